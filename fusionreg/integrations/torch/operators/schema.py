"""What a fusion takes and gives, as a schema of torch: tensors by position, attributes and choices by keyword."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite
from typing import Any

from fusionreg.core.registry.entries import FusionEntry
from fusionreg.core.spec import AttributeSpec

#: The namespace of all operators.
NAMESPACE = "fusionreg"

_WORD = re.compile(r"[^A-Za-z0-9_]+")


@dataclass(frozen=True)
class Keyword:
    """A keyword-only argument.

    Attributes:
        name: its name.
        type: in torch's schema language, with ``?`` where None stands for what the fusion takes by default.
        default: its default; None where there is none, or where None itself is.
        required: whether a call must give it.
    """

    name: str
    type: str
    default: Any = None
    required: bool = False

    def __str__(self) -> str:
        if self.required:
            return f"{self.type} {self.name}"
        default = f'"{self.default}"' if isinstance(self.default, str) else repr(self.default)
        return f"{self.type} {self.name}={default}"


def operator_name(fusion: str) -> str:
    """The name of a fusion's operator: a word of torch."""
    return _WORD.sub("_", fusion)


def digest(entry: FusionEntry) -> str:
    """Eight digits that tell two specs of one name apart."""
    return hashlib.sha256(entry.spec.model_dump_json().encode()).hexdigest()[:8]


def schema(entry: FusionEntry) -> str:
    """What follows the name: ``(Tensor x, Tensor? bias=None, *, float epsilon=1e-05) -> Tensor``.

    An optional tensor has a default only where no required one follows it.
    """
    words: list[str] = []
    trailing = True
    for name in reversed(tuple(entry.inputs)):
        optional = name in entry.optional
        trailing &= optional
        words.insert(0, f"Tensor? {name}=None" if trailing else f"Tensor? {name}" if optional else f"Tensor {name}")
    keywords = list(map(str, keyword_arguments(entry)))
    results = ["Tensor"] * len(entry.outputs)
    returns = results[0] if len(results) == 1 else f"({', '.join(results)})"
    return f"({', '.join([*words, '*', *keywords] if keywords else words)}) -> {returns}"


def keyword_arguments(entry: FusionEntry) -> tuple[Keyword, ...]:
    """Attributes, choices and the dtypes that no tensor tells; those that a call must give come first."""
    found = [*map(_attribute, entry.spec.attributes, entry.spec.attributes.values()), *_choices(entry), *_dtypes(entry)]
    return tuple(sorted(found, key=lambda k: not k.required))


def _attribute(name: str, spec: AttributeSpec) -> Keyword:
    if spec.default is None:
        return Keyword(name, spec.type, required=True)
    if isinstance(spec.default, float) and not isfinite(spec.default):
        return Keyword(name, f"{spec.type}?")  # torch's schemas know no such number
    return Keyword(name, spec.type, float(spec.default) if spec.type == "float" else spec.default)


def _choices(entry: FusionEntry) -> Iterator[Keyword]:
    """As calls do: an optional step is left out unless asked for, or has the word of the tensor that it needs."""
    gated = {s.choice for s in entry.patterns[0].steps if s.choice and s.gates}
    for name, keys in entry.choices.items():
        if name in gated:
            yield Keyword(name, "str?")
        elif "none" in keys or len(keys) == 1:
            yield Keyword(name, "str", "none" if "none" in keys else keys[0])
        else:
            yield Keyword(name, "str", required=True)


def _dtypes(entry: FusionEntry) -> Iterator[Keyword]:
    told = {t.dtype for name, t in entry.inputs.items() if name not in entry.optional}
    for variable, allowed in entry.spec.dtypes.items():
        if variable not in told and any(t.dtype == variable for t in entry.tensors.values()) and len(allowed) > 1:
            yield Keyword(variable, "str?")
