"""The docstring of a fusion's function, from its spec."""

from __future__ import annotations

from collections.abc import Iterable

from fusionreg.core.registry.entries import FusionEntry

from ..derivatives import RULES
from .schema import Keyword, keyword_arguments


def docstring(entry: FusionEntry, drawn: bool) -> str:
    """Summary, formula, arguments with shapes and dtypes, results, gradients.

    ``drawn``: whether a call that leaves ``rng`` out draws one.
    """
    spec = entry.spec
    parts = [f"{spec.summary or spec.name}.", _indented(str(spec.pattern[0]).splitlines())]
    arguments = [f"{n}: {t}{', may be left out' if n in entry.optional else ''}" for n, t in entry.inputs.items()]
    if drawn:
        at = list(entry.inputs).index("rng")
        arguments[at] += ": seed and offset, by name; drawn from torch's generator where it is left out"
    arguments += [_keyword(entry, k) for k in keyword_arguments(entry)]
    parts.append(f"Args:\n{_indented(arguments)}")
    parts.append(f"Returns:\n{_indented(f'{n}: {t}' for n, t in entry.outputs.items())}")
    facts = [f"{v}: {' or '.join(allowed)}" for v, allowed in spec.dtypes.items()]
    facts += [f"{a}: {line}" for a, line in spec.axes.items()]
    facts += [f"condition: {text}" for text in spec.constraints]
    if facts:
        parts.append(f"Where:\n{_indented(facts)}")
    if spec.backward is not None:
        parts.append(f"Differentiable: the gradients are those of {spec.backward.fusion}.")
    elif all(op in RULES for pattern in entry.patterns for step in pattern.steps for op in step.ops):
        parts.append("Differentiable: the gradients are those of its operators, which are computed again where needed.")
    else:
        parts.append("Not differentiable: inputs that require a gradient are refused.")
    return "\n\n".join(parts)


def _indented(lines: Iterable[str]) -> str:
    return "\n".join(f"    {line}" for line in lines)


def _keyword(entry: FusionEntry, keyword: Keyword) -> str:
    """``epsilon: float = 1e-05, added to the variance``."""
    spec = entry.spec.attributes.get(keyword.name)
    allowed = spec.choices if spec is not None else entry.choices.get(keyword.name, ())
    allowed = allowed or entry.spec.dtypes.get(keyword.name, ())
    default = keyword.default if keyword.default is not None or spec is None else spec.default
    words = [f"{keyword.name}: {keyword.type.rstrip('?')}{'' if keyword.required else f' = {default}'}"]
    if allowed:
        words.append(f"one of {', '.join(map(str, allowed))}")
    if spec is not None and spec.summary:
        words.append(spec.summary)
    return "; ".join(words)
