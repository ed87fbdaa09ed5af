"""Point-wise regions: connected point-wise operators over one iteration space, as a program of their own. Floor 2.

A region grows along the flow of data: a node joins the region of what it reads, and two regions that it joins become
one, wherever no path leaves the region and comes back (fusing it would make a cycle). What others read of a region
becomes an output of it; operands that it broadcasts are inputs as they are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, isinf, isnan
from typing import Any

from ..frozen import FrozenDict
from ..ir import Dim, Graph, Node, Shape, Value
from ..spec import OpSpec, Region
from .legality import Legality, mutated
from .match import FailedMatch

#: Operators, and tensors in and out, of one region at most: registers and launch parameters are finite.
MAX_NODES, MAX_TENSORS = 96, 24
#: Axes of an iteration space at most.
MAX_RANK = 8

SPACE = "the iteration space"
CODE = "the generated code"
PROGRAM = "the program of the point-wise operators"

_FREE = frozenset({"Identity"})


#: (node, types, vocabulary) → why no code can be generated for a node, "" where it can.
Refuses = Callable[[Node, Mapping[str, Value], Mapping[str, OpSpec]], str]


@dataclass(frozen=True)
class Maker:
    """What makes fusions of regions; it comes from the floors above.

    Attributes:
        derive: (fusion, region) → the fusion that it makes: ``Catalog.derive``.
        refuses: ``render.pointwise.supported``.
    """

    derive: Callable[[Any, Region], Any]
    refuses: Refuses


@dataclass(frozen=True)
class Capture:
    """One region of a graph.

    Attributes:
        nodes: in topological order.
        region: its program and the tensors of that; named after its own contents.
        inputs, outputs: names in the program → values of the graph.
        axes: axis of the program → extent.
    """

    nodes: tuple[Node, ...]
    region: Region
    inputs: FrozenDict[str, str]
    outputs: FrozenDict[str, str]
    axes: FrozenDict[str, Dim]


def capture(
    graph: Graph, ops: Mapping[str, OpSpec], refuses: Refuses, taken: Collection[str] = ()
) -> Iterator[Capture]:
    """Every region of at least two operators, as large as it can be, in order of their last nodes.

    ``taken``: names of nodes that are spoken for.
    """
    rules = Legality(graph)
    regions = _Grower(graph, ops, refuses, frozenset(taken)).grow()
    place = graph.position
    for nodes in sorted(regions, key=lambda r: place[r[-1].name]):
        if sum(n.op not in _FREE for n in nodes) < 2:
            continue
        found = program(graph, ops, nodes)
        if found is None or rules.check(nodes, found.inputs.values(), frozenset(found.outputs.values())):
            continue
        yield found


def near_misses(graph: Graph, ops: Mapping[str, OpSpec], refuses: Refuses, fusion: str) -> Iterator[FailedMatch]:
    """Point-wise nodes that no region can hold, each with the reason."""
    for node in graph.nodes:
        spec = ops.get(node.op)
        if spec is None or not spec.pointwise or all(graph.is_constant(i) for i in node.inputs if i):
            continue
        shape = graph.values[node.outputs[0]].shape if node.outputs[0] else None
        if shape is None or len(shape) > MAX_RANK:
            found, expected = f"{graph.values[node.outputs[0]]}", f"a known rank of at most {MAX_RANK}"
            yield FailedMatch(fusion, node.name, 0, SPACE, node.name, node.source, found, expected)
        elif reason := refuses(node, graph.values, ops):
            expected = "an operator that has CUDA text for its dtypes"
            yield FailedMatch(fusion, node.name, 0, CODE, node.name, node.source, reason, expected)


@dataclass(eq=False)
class _Group:
    shape: Shape
    nodes: list[Node]
    first: int
    into: _Group | None = None

    def fits(self, nodes: Sequence[Node]) -> bool:
        """Whether it stays within bounds with ``nodes`` too."""
        if len(self.nodes) + len(nodes) > MAX_NODES:
            return False
        made = {o for n in (*self.nodes, *nodes) for o in n.outputs}
        return len({i for n in (*self.nodes, *nodes) for i in n.inputs if i} - made) < MAX_TENSORS


def iteration_space(graph: Graph, ops: Mapping[str, OpSpec], refuses: Refuses, node: Node) -> Shape | None:
    """The shape that a node works over element by element, where a program may hold it; None for any other node."""
    spec, values = ops.get(node.op), graph.values
    if spec is None or not spec.pointwise or node.graphs or mutated(node):
        return None
    if any(o and o not in graph.output_names and o not in graph.consumers for o in node.outputs):
        return None  # nobody reads it: dead code, or an output that a program could not leave out
    outs = [values[o] for o in node.outputs if o]
    shape = outs[0].shape if outs else None
    if shape is None or len(shape) > MAX_RANK or any(o.shape != shape for o in outs):
        return None
    if all(graph.is_constant(i) for i in node.inputs if i):
        return None
    return None if refuses(node, values, ops) else shape


class _Grower:
    """Unites nodes to groups."""

    def __init__(self, graph: Graph, ops: Mapping[str, OpSpec], refuses: Refuses, taken: frozenset[str]) -> None:
        self.graph, self.ops, self.refuses, self.taken = graph, ops, refuses, taken
        self.of: dict[str, _Group] = {}
        self.place = graph.position
        self.producers = graph.producers

    def grow(self) -> list[tuple[Node, ...]]:
        for node in self.graph.nodes:
            shape = self._space(node)
            if shape is not None:
                self._place(node, shape)
        groups = {id(g): g for g in map(self._root, self.of.values())}
        return [tuple(sorted(g.nodes, key=lambda n: self.place[n.name])) for g in groups.values()]

    def _space(self, node: Node) -> Shape | None:
        if node.name in self.taken:
            return None
        shape = iteration_space(self.graph, self.ops, self.refuses, node)
        if shape is None or any(i and _text(self.graph.values[i], shape) is None for i in node.inputs):
            return None
        return shape

    def _root(self, group: _Group) -> _Group:
        while group.into is not None:
            group = group.into
        return group

    def _group(self, value: str) -> _Group | None:
        producer = self.producers.get(value)
        found = self.of.get(producer.name) if producer is not None else None
        return None if found is None else self._root(found)

    def _place(self, node: Node, shape: Shape) -> None:
        near = [g for i in node.inputs if i and (g := self._group(i)) is not None and g.shape == shape]
        home: _Group | None = None
        for group in dict.fromkeys(near):
            if home is None:
                if group.fits((node,)) and not self._returns(group, (node,)):
                    home = group
                    group.nodes.append(node)
                    self.of[node.name] = group
            elif home.fits(group.nodes) and self._mergeable(home, group):
                group.into = home
                home.nodes += group.nodes
                home.first = min(home.first, group.first)
        if home is None:
            self.of[node.name] = _Group(shape, [node], self.place[node.name])

    def _mergeable(self, a: _Group, b: _Group) -> bool:
        return not (self._returns(a, b.nodes) or self._returns(b, a.nodes))

    def _returns(self, group: _Group, nodes: Sequence[Node]) -> bool:
        """Whether a path leads out of ``group`` and into one of ``nodes`` through other nodes, groups taken whole.

        Whatever lies on such a path stands behind the group's first node: nothing before that is walked.
        """
        mine = {n.name for n in nodes}
        stack = [p for n in nodes for i in n.reads if (p := self.producers.get(i)) is not None and p.name not in mine]
        stack = [p for p in stack if not self._in(p, group)]
        seen: set[str] = set()
        while stack:
            node = stack.pop()
            if node.name in seen or self.place[node.name] < group.first:
                continue
            other = self.of.get(node.name)
            members = self._root(other).nodes if other is not None else (node,)
            seen.update(m.name for m in members)
            for member in members:
                for read in member.reads:
                    producer = self.producers.get(read)
                    if producer is None or producer.name in seen:
                        continue
                    if self._in(producer, group):
                        return True
                    if producer.name not in mine:
                        stack.append(producer)
        return False

    def _in(self, node: Node, group: _Group) -> bool:
        found = self.of.get(node.name)
        return found is not None and self._root(found) is group


class Program:
    """Nodes written down in pattern language, one after the other.

    Attributes:
        lines: one for each node so far.
        names: value of the graph → its name in the program.
        inputs, outputs: name in the program → value, in order of first use.
    """

    def __init__(self, graph: Graph, ops: Mapping[str, OpSpec], inside: Collection[str], suffix: str = "") -> None:
        self.graph, self.ops, self.inside, self.suffix = graph, ops, inside, suffix
        self.lines: list[str] = []
        self.names: dict[str, str] = {}
        self.inputs: dict[str, str] = {}
        self.outputs: dict[str, str] = {}

    def add(self, node: Node) -> None:
        operands = [self._operand(node, i) for i in node.inputs]
        while operands and operands[-1] == "None":
            operands.pop()
        targets = [self._target(o) if o else "_" for o in node.outputs]
        declared = self.ops[node.op].attributes
        given = {k: v for k, v in node.attrs.items() if k in declared and declared[k] != v}
        words = [*operands, *(f"{k}={v!r}" for k, v in given.items())]
        self.lines.append(f"{', '.join(targets)} = {node.op.replace('::', '.')}({', '.join(words)})")

    def visible(self, value: str) -> bool:
        """Whether anybody outside the program reads a value."""
        readers = self.graph.consumers.get(value, ())
        return value in self.graph.output_names or any(r.name not in self.inside for r in readers)

    def _target(self, value: str) -> str:
        """An output where somebody outside reads it; one that is named already keeps its name."""
        if value not in self.names:
            visible = self.visible(value)
            name = f"out{len(self.outputs)}{self.suffix}" if visible else f"v{len(self.names)}{self.suffix}"
            if visible:
                self.outputs[name] = value
            self.names[value] = name
        return self.names[value]

    def _operand(self, node: Node, value: str) -> str:
        if not value:
            return "None"
        if value not in self.names:
            literal = _literal(self.graph, node, value)
            if literal:
                return literal
            self.names[value] = f"in{len(self.inputs)}{self.suffix}"
            self.inputs[self.names[value]] = value
        return self.names[value]


def named_by_contents(region: Region) -> Region:
    """The region under a name that says what it is: equal programs on equal tensors are one fusion."""
    digest = hashlib.sha256(region.model_copy(update={"name": "r"}).model_dump_json().encode()).hexdigest()[:10]
    return region.model_copy(update={"name": f"r{digest}"})


def program(graph: Graph, ops: Mapping[str, OpSpec], nodes: Sequence[Node]) -> Capture | None:
    """The nodes as a program of their own; None where it would have no operand, or too many tensors."""
    text = Program(graph, ops, {n.name for n in nodes})
    for node in nodes:
        text.add(node)
    shape = graph.values[next(o for o in nodes[0].outputs if o)].shape
    assert shape is not None
    if not text.inputs or not text.outputs or len(text.inputs) + len(text.outputs) > MAX_TENSORS:
        return None
    region = Region(
        name="r",
        pattern="\n".join(text.lines),
        inputs={n: _text(graph.values[v], shape) for n, v in text.inputs.items()},
        outputs={n: _text(graph.values[v], shape) for n, v in text.outputs.items()},
    )
    axes = {f"A{i}": d for i, d in enumerate(shape) if d != 1}
    return Capture(
        tuple(nodes), named_by_contents(region), FrozenDict(text.inputs), FrozenDict(text.outputs), FrozenDict(axes)
    )


def _literal(graph: Graph, node: Node, value: str) -> str:
    """A constant of one element as text, where the pattern language gives it the same dtype and shape again; or ""."""
    if not graph.is_constant(value) or graph.constants[value].size != 1:
        return ""
    mine = graph.values[value]
    others = [graph.values[i] for i in node.inputs if i and not (graph.is_constant(i) and graph.constants[i].size == 1)]
    kind = next((o.dtype for o in others if o.dtype != "bool"), others[0].dtype if others else "")
    if kind != mine.dtype or all(len(o.shape or ()) < len(mine.shape or ()) for o in others):
        return ""
    item = graph.constants[value].reshape(()).item()
    if isinstance(item, bool | int):
        return repr(item)
    if not isinstance(item, float) or isnan(item):
        return ""
    return repr(item) if isfinite(item) else "1e999" if isinf(item) and item > 0 else "-1e999"


def _text(value: Value, space: Shape) -> str | None:
    """The tensor text of a value in an iteration space; None where it does not broadcast into it."""
    shape = value.shape
    if shape is None or len(shape) > len(space):
        return None
    words = []
    for i, (d, whole) in enumerate(zip(shape, space[len(space) - len(shape) :], strict=True)):
        if d == 1:
            words.append("1")
        elif d == whole:
            words.append(f"A{i + len(space) - len(shape)}")
        else:
            return None
    return f"{value.dtype}[{' '.join(words)}]"
