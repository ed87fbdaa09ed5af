"""Point-wise regions: connected point-wise operators over one iteration space, as a program of their own. Floor 2.

A region grows along the flow of data: a node joins the region of what it reads, and two regions that it joins become
one, wherever no path leaves the region and comes back (fusing it would make a cycle). What others read of a region
becomes an output of it; operands that it broadcasts are inputs as they are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, isinf, isnan

from ..frozen import FrozenDict
from ..ir import Dim, Graph, Node, Shape, Value
from ..spec import OpSpec, Region
from .legality import Legality, mutated

#: Operators, and tensors in and out, of one region at most: registers and launch parameters are finite.
MAX_NODES, MAX_TENSORS = 96, 24
#: Axes of an iteration space at most.
MAX_RANK = 8

_FREE = frozenset({"Identity"})


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
    graph: Graph, ops: Mapping[str, OpSpec], taken: Collection[str] = (), legality: Legality | None = None
) -> Iterator[Capture]:
    """Every region of at least two operators, as large as it can be, in order of their last nodes.

    ``taken``: names of nodes that are spoken for.
    """
    rules = legality or Legality(graph)
    regions = _Grower(graph, ops, frozenset(taken)).grow()
    place = graph.position
    for nodes in sorted(regions, key=lambda r: place[r[-1].name]):
        if sum(n.op not in _FREE for n in nodes) < 2:
            continue
        found = program(graph, ops, nodes)
        if found is None or rules.check(nodes, found.inputs.values(), frozenset(found.outputs.values())):
            continue
        yield found


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


class _Grower:
    """Unites nodes to groups."""

    def __init__(self, graph: Graph, ops: Mapping[str, OpSpec], taken: frozenset[str]) -> None:
        self.graph, self.ops, self.taken = graph, ops, taken
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
        """The iteration space of a node that a region may hold, None for any other."""
        spec = self.ops.get(node.op)
        if spec is None or not spec.pointwise or node.name in self.taken or node.graphs or mutated(node):
            return None
        graph, values = self.graph, self.graph.values
        if any(o and o not in graph.output_names and o not in graph.consumers for o in node.outputs):
            return None  # nobody reads it: dead code, or an output that a program could not leave out
        outs = [values[o] for o in node.outputs if o]
        shape = outs[0].shape if outs else None
        if shape is None or len(shape) > MAX_RANK or any(o.shape != shape for o in outs):
            return None
        given = [values[i] if i else None for i in node.inputs]
        if all(v is None or graph.is_constant(v.name) for v in given):
            return None
        if any(v is not None and _text(v, shape) is None for v in given):
            return None
        return shape if spec.cuda else None

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


def program(graph: Graph, ops: Mapping[str, OpSpec], nodes: Sequence[Node]) -> Capture | None:
    """The nodes as a program in pattern language; None where it would have no operand, or too many tensors."""
    made = {o for n in nodes for o in n.outputs if o}
    inside = {n.name for n in nodes}
    shape = graph.values[next(o for o in nodes[0].outputs if o)].shape
    assert shape is not None
    names: dict[str, str] = {}
    inputs: dict[str, str] = {}
    outputs: dict[str, str] = {}
    lines = []
    for node in nodes:
        operands = [_operand(graph, node, i, made, names, inputs) for i in node.inputs]
        while operands and operands[-1] == "None":
            operands.pop()
        targets = []
        for out in node.outputs:
            visible = out and _visible(graph, out, inside)
            name = f"out{len(outputs)}" if visible else f"v{len(names)}" if out else "_"
            if visible:
                outputs[name] = out
            if out:
                names[out] = name
            targets.append(name)
        spec = ops[node.op]
        given = {k: v for k, v in node.attrs.items() if k in spec.attributes and spec.attributes[k] != v}
        words = [*operands, *(f"{k}={v!r}" for k, v in given.items())]
        lines.append(f"{', '.join(targets)} = {node.op.replace('::', '.')}({', '.join(words)})")
    if not inputs or not outputs or len(inputs) + len(outputs) > MAX_TENSORS:
        return None
    texts = {n: _text(graph.values[v], shape) for n, v in (*inputs.items(), *outputs.items())}
    pattern = "\n".join(lines)
    digest = hashlib.sha256("\n".join((pattern, *map(str, texts.items()))).encode()).hexdigest()[:10]
    region = Region(
        name=f"r{digest}",
        pattern=pattern,
        inputs={n: texts[n] for n in inputs},
        outputs={n: texts[n] for n in outputs},
    )
    axes = {f"A{i}": d for i, d in enumerate(shape) if d != 1}
    return Capture(tuple(nodes), region, FrozenDict(inputs), FrozenDict(outputs), FrozenDict(axes))


def _visible(graph: Graph, value: str, inside: Collection[str]) -> bool:
    return value in graph.output_names or any(r.name not in inside for r in graph.consumers.get(value, ()))


def _operand(
    graph: Graph, node: Node, value: str, made: Collection[str], names: dict[str, str], inputs: dict[str, str]
) -> str:
    if not value:
        return "None"
    if value in made:
        return names[value]
    literal = _literal(graph, node, value)
    if literal:
        return literal
    if value not in names:
        names[value] = f"in{len(inputs)}"
        inputs[names[value]] = value
    return names[value]


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
