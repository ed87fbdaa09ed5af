"""What a fusion's ``backward`` names, resolved and checked against the fusion that it names. Floor 3."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from ..errors import SpecError, UnknownNameError
from ..frozen import EMPTY, FrozenDict
from ..registry.entries import FusionEntry
from .names import Problems

if TYPE_CHECKING:
    from ..matcher.match import Match


@dataclass(frozen=True, slots=True)
class Source:
    """Where an input of a backward fusion comes from.

    Attributes:
        kind: an ``input`` or an ``output`` of the forward fusion, or the ``gradient`` of an output.
        name: of that tensor.
        index: its place among the inputs, or the outputs.
    """

    kind: Literal["input", "output", "gradient"]
    name: str
    index: int


@dataclass(frozen=True)
class Gradients:
    """How a backward fusion is called, and what it gives.

    Attributes:
        fusion: its name.
        sources: one for each of its inputs, in their order.
        outputs: its outputs, in their order.
        results: forward input → the output of the backward fusion that is its gradient.
        attributes: attributes and choices that it takes from the forward fusion.
        defaults: what the forward fusion means by leaving one of them out, where the backward fusion means another.
        optional: its inputs that may be absent.
    """

    fusion: str
    sources: FrozenDict[str, Source]
    outputs: tuple[str, ...]
    results: FrozenDict[str, str]
    attributes: tuple[str, ...]
    defaults: FrozenDict[str, Any]
    optional: frozenset[str]

    def refusal(self, wanted: Collection[str], absent: Collection[str] = ()) -> str | None:
        """Why gradients of the inputs ``wanted`` cannot be had where those ``absent`` are left out, or None."""
        without = [n for n in wanted if n not in self.results]
        if without:
            return f"{self.fusion} gives no gradient of {', '.join(without)}"
        for name, source in self.sources.items():
            if wanted and source.kind == "input" and source.name in absent and name not in self.optional:
                return f"{self.fusion} needs {source.name}, which is absent"
        return None

    def call(self, match: Match, backward: FusionEntry) -> Match:
        """The call of the backward fusion behind a match of the forward one, as a match; the gradient of a value stands
        as that value."""
        given = {
            name: value
            for name, s in self.sources.items()
            if (value := (match.inputs if s.kind == "input" else match.outputs).get(s.name)) is not None
        }
        gives = {self.results[n]: v for n, v in match.inputs.items() if n in self.results}
        return replace(
            match, fusion=self.fusion, inputs=FrozenDict(given), outputs=FrozenDict(gives), forms=EMPTY, strides=EMPTY,
            axes=FrozenDict({k: v for k, v in match.axes.items() if k in backward.axes}),
            attributes=FrozenDict({k: v for k, v in match.attributes.items() if k in self.attributes}),
            choices=FrozenDict({k: v for k, v in match.choices.items() if k in self.attributes}),
        )  # fmt: skip

    @property
    def differentiable(self) -> frozenset[str]:
        """Outputs of the forward fusion whose gradients count."""
        return frozenset(s.name for s in self.sources.values() if s.kind == "gradient")


def gradients(forward: FusionEntry, fusions: Mapping[str, FusionEntry]) -> Gradients | None:
    """The resolved ``backward`` of a fusion that is loaded; None where it has none."""
    record = forward.spec.backward
    if record is None:
        return None
    backward = fusions[record.fusion]
    found = {name: _source(forward, record.inputs.get(name, name)) for name in backward.inputs}
    results = {name: record.gradients.get(name, f"d{name}") for name in forward.inputs}
    keywords = (*backward.spec.attributes, *backward.choices)
    return Gradients(
        record.fusion,
        FrozenDict({name: source for name, source in found.items() if source is not None}),
        tuple(backward.outputs),
        FrozenDict({name: output for name, output in results.items() if output in backward.outputs}),
        tuple(k for k in keywords if k in forward.spec.attributes or k in forward.choices),
        FrozenDict(_defaults(forward, backward)),
        backward.optional,
    )


def _defaults(forward: FusionEntry, backward: FusionEntry) -> Iterator[tuple[str, Any]]:
    for name, spec in backward.spec.attributes.items():
        own = forward.spec.attributes.get(name)
        if own is not None and own.default is not None and own.default != spec.default:
            yield name, own.default
    for name, keys in backward.choices.items():
        single = forward.choices.get(name, ())
        if len(single) == 1 and len(keys) > 1:
            yield name, single[0]


def _source(forward: FusionEntry, name: str) -> Source | None:
    for kind, names in (("input", forward.inputs), ("output", forward.outputs)):
        if name in names:
            return Source(kind, name, tuple(names).index(name))  # type: ignore[arg-type]
    if name[:1] == "d" and name[1:] in forward.outputs:
        return Source("gradient", name[1:], tuple(forward.outputs).index(name[1:]))
    return None


def check_backward(forward: FusionEntry, fusions: Mapping[str, FusionEntry]) -> list[SpecError]:
    """Everything that is wrong with a fusion's ``backward``."""
    record = forward.spec.backward
    problems = Problems(forward.plugin, forward.name)
    if record is None:
        return []
    backward = fusions.get(record.fusion)
    if backward is None or backward.spec.open:
        hint = UnknownNameError.among("fusion", record.fusion, fusions).expected if backward is None else "no open one"
        problems.add("backward.fusion", f"{record.fusion!r} cannot be called", f"a fusion with tensors ({hint})")
        return problems.found
    _check_names(problems, "inputs", record.inputs, backward.inputs, None)
    _check_names(problems, "gradients", record.gradients, forward.inputs, backward.outputs)
    if problems.found:
        return problems.found
    _check_sources(problems, forward, backward, record.inputs)
    _check_results(problems, forward, backward, record.gradients)
    _check_keywords(problems, forward, backward)
    return problems.found


def _check_names(
    problems: Problems,
    field: str,
    given: Mapping[str, str],
    keys: Mapping[str, object],
    values: Mapping[str, object] | None,
) -> None:
    for key, value in given.items():
        for name, known in ((key, keys), (value, values)):
            if known is not None and name not in known:
                hint = UnknownNameError.among("tensor", name, known).expected
                problems.add(f"backward.{field}", f"unknown {name!r}", hint)


def _check_sources(
    problems: Problems, forward: FusionEntry, backward: FusionEntry, renamed: Mapping[str, str]
) -> None:
    gradient = False
    for name, type_ in backward.inputs.items():
        source = _source(forward, renamed.get(name, name))
        at = f"backward, input {name} of {backward.name},"
        if source is None:
            known = [*forward.inputs, *forward.outputs, *(f"d{n}" for n in forward.outputs)]
            hint = UnknownNameError.among("tensor", renamed.get(name, name), known).expected
            problems.add(at, "it is nothing that the forward fusion has", f"an input, output or d<output> ({hint})")
            continue
        gradient |= source.kind == "gradient"
        other = forward.tensors[source.name]
        if (type_.dtype, type_.forms, type_.space) != (other.dtype, other.forms, other.space):
            problems.add(at, f"it is {type_}", f"{other}, as {source.name} is")
    if not gradient:
        problems.add("backward.fusion", f"{backward.name} reads no gradient", "d<output> among its inputs")
    for variable, allowed in forward.spec.dtypes.items():
        missing = sorted(set(allowed) - set(backward.spec.dtypes.get(variable, allowed)))
        if missing:
            problems.add("backward.fusion", f"{backward.name} has no {variable} = {', '.join(missing)}", "all dtypes")


def _check_results(
    problems: Problems, forward: FusionEntry, backward: FusionEntry, renamed: Mapping[str, str]
) -> None:
    results = {name: renamed.get(name, f"d{name}") for name in forward.inputs}
    found = {name: output for name, output in results.items() if output in backward.outputs}
    for name, output in found.items():
        type_, other = backward.outputs[output], forward.inputs[name]
        if (type_.dtype, type_.forms) != (other.dtype, other.forms):
            problems.add(f"backward, gradient of {name},", f"{output} is {type_}", f"{other}, as {name} is")
    if not found:
        known = ", ".join(backward.outputs)
        problems.add("backward.gradients", f"{backward.name} gives {known}", "d<input> among its outputs")


def _check_keywords(problems: Problems, forward: FusionEntry, backward: FusionEntry) -> None:
    for name, spec in backward.spec.attributes.items():
        own = forward.spec.attributes.get(name)
        if own is None and spec.default is None:
            problems.add("backward.fusion", f"{backward.name} needs {name}", f"an attribute {name} here")
        elif own is not None and (own.type != spec.type or not set(own.choices) <= set(spec.choices or own.choices)):
            problems.add("backward.fusion", f"{name} of {backward.name} is another", "the same attribute")
    for name, keys in backward.choices.items():
        if name in forward.choices and not set(forward.choices[name]) <= set(keys):
            problems.add("backward.fusion", f"{name} of {backward.name} has keys {keys}", "all keys of the choice here")
