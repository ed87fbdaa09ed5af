"""What matching gives back: found sites, near misses, and bare bindings. Floor 2."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ..frozen import EMPTY, FrozenDict
from ..ir import Dim, Node, Shape
from ..spec import FusionSpec
from ..tensors import TensorType

T = TypeVar("T")


@dataclass(frozen=True)
class Bindings:
    """One place where a bare pattern fits, types and legality aside.

    Attributes:
        root: the node it was anchored at.
        nodes: the matched nodes, topologically ordered.
        steps: pattern step → its node; steps that are left out are missing.
        values: pattern input and output names → graph values; absent ones are missing.
        inputs: the part of ``values`` that are pattern inputs.
        outputs: the part that are pattern outputs.
        attributes: bound attributes.
        choices: choice variable → key, ``"none"`` where the step is left out.
        literals: (step, operand index) → the constant that stood for a literal.
    """

    root: Node
    nodes: tuple[Node, ...]
    steps: FrozenDict[int, Node]
    inputs: FrozenDict[str, str]
    outputs: FrozenDict[str, str]
    attributes: FrozenDict[str, Any]
    choices: FrozenDict[str, str]
    literals: FrozenDict[tuple[int, int], str]

    @property
    def values(self) -> FrozenDict[str, str]:
        return self.inputs | self.outputs


@dataclass(frozen=True)
class Match:
    """One site of one fusion.

    Attributes:
        fusion, plugin: which fusion, and whose.
        spelling: which of the fusion's patterns matched.
        root: the node that the match is anchored at.
        nodes: names of all matched nodes, topologically ordered.
        inputs: fusion input → graph value, in the spec's order; absent optional inputs are missing.
        outputs: fusion output → graph value; one that the graph does not make is missing.
        dtypes: dtype variable → dtype.
        axes: axis → extent, a number or a symbolic name; unfolded.
        leading: the extents that ``...`` stands for.
        attributes: attribute → value.
        choices: choice variable → key.
        guards: constraints over symbolic extents; whoever calls must check them with the real ones.
        forms: tensor → index of the form that it took, in the order of its text.
        base: the fusion that this one was derived from, "" for one of the registry's own.
        around: how many of its nodes stand at slots of that fusion, around the nodes of its pattern.
        captured: whether it takes whatever point-wise operators are there: any part of it would be a match too.
        kept: those of ``nodes`` that run beside the fused call as well, since what they give is read elsewhere.
        strides: fusion input → its strides in elements, where they are known not to be row-major. They say nothing of
            what it is a match of, only which kernel will run.
    """

    fusion: str
    plugin: str
    spelling: int
    root: str
    nodes: tuple[str, ...]
    inputs: FrozenDict[str, str]
    outputs: FrozenDict[str, str]
    dtypes: FrozenDict[str, str] = EMPTY
    axes: FrozenDict[str, Dim] = EMPTY
    leading: Shape = ()
    attributes: FrozenDict[str, Any] = EMPTY
    choices: FrozenDict[str, str] = EMPTY
    guards: tuple[str, ...] = ()
    forms: FrozenDict[str, int] = EMPTY
    base: str = ""
    around: int = 0
    captured: bool = False
    kept: tuple[str, ...] = ()
    strides: FrozenDict[str, tuple[int, ...]] = field(default=EMPTY, compare=False)

    @property
    def taken(self) -> tuple[str, ...]:
        """The nodes whose place the fused call takes."""
        return tuple(n for n in self.nodes if n not in self.kept) if self.kept else self.nodes

    def keywords(self, spec: FusionSpec) -> dict[str, Any]:
        """What a call of the fusion passes by name: attributes, choices, and the dtype variables of its outputs that
        none of the inputs tells. ``spec``: of the match's fusion."""
        told = {TensorType.parse(spec.inputs[name]).dtype for name in self.inputs}
        wanted = {TensorType.parse(text).dtype for text in spec.outputs.values()} - told
        open_ = {v: d for v, d in self.dtypes.items() if v in wanted and len(spec.dtypes[v]) > 1}
        return {**self.attributes, **self.choices, **open_}

    def __str__(self) -> str:
        axes = " ".join(f"{k}={v}" for k, v in self.axes.items())
        lead = f" ...={self.leading}" if self.leading else ""
        return f"{self.fusion} at {self.root} ({len(self.nodes)} nodes, {axes}{lead})"

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "fusion": self.fusion,
            "plugin": self.plugin,
            "spelling": self.spelling,
            "root": self.root,
            "nodes": list(self.nodes),
            "inputs": dict(self.inputs),
            "outputs": dict(self.outputs),
            "dtypes": dict(self.dtypes),
            "axes": dict(self.axes),
            "leading": list(self.leading),
            "attributes": dict(self.attributes),
            "choices": dict(self.choices),
            "guards": list(self.guards),
            "forms": dict(self.forms),
            "base": self.base,
            "around": self.around,
            "captured": self.captured,
            "kept": list(self.kept),
        }


@dataclass(frozen=True)
class FailedMatch:
    """The deepest partial match of one fusion at one root, and what stopped it there.

    Attributes:
        fusion: which fusion.
        root: the node it was anchored at.
        depth: how many pattern steps had a node.
        clause: the rule that failed.
        node: the node where it failed.
        source: where that node stands in the model.
        found, expected: what was there, and what would have matched.
    """

    fusion: str
    root: str
    depth: int
    clause: str
    node: str
    source: str
    found: str
    expected: str

    def __str__(self) -> str:
        place = f" ({self.source})" if self.source and self.source != self.node else ""
        steps = f"{self.depth} step{'s' if self.depth != 1 else ''} matched"
        return (
            f"{self.fusion} at {self.root}, {steps}: {self.clause} fails at {self.node}{place}: "
            f"{self.found} — {self.expected}."
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "fusion": self.fusion,
            "root": self.root,
            "depth": self.depth,
            "clause": self.clause,
            "node": self.node,
            "source": self.source,
            "found": self.found,
            "expected": self.expected,
        }


@dataclass(frozen=True)
class Matches:
    """All sites of all fusions, overlapping ones too, and the near misses when they were asked for."""

    matches: tuple[Match, ...]
    failures: tuple[FailedMatch, ...] = ()

    def __iter__(self):
        return iter(self.matches)

    def __len__(self) -> int:
        return len(self.matches)

    def __repr__(self) -> str:
        return f"Matches({len(self.matches)} sites, {len(self.failures)} near misses)"


def once(ask: Callable[[Match], T]) -> Callable[[Match], T]:
    """The same question, asked once of matches that come to the same problem: layers repeat."""
    known: dict[Any, T] = {}

    def answer(m: Match) -> T:
        bound = m.dtypes, m.axes, m.leading, m.choices, m.forms, m.strides, tuple(m.inputs), tuple(m.outputs)
        key = (m.fusion, *bound, tuple((k, repr(v)) for k, v in m.attributes.items()))
        if key not in known:
            known[key] = ask(m)
        return known[key]

    return answer
