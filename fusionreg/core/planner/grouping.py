"""Which nodes an executor runs in one kernel, and what of them is left once a fusion takes some. Floor 4.

Nodes join the kernel of what they read, in the order of the graph, where the executor allows it and no path leaves
that kernel and comes back. What is modelled of generated kernels: point-wise operators over the same elements share
one, smaller operands are computed again where they are broadcast, and a reduction shares one with what comes before
and after it as long as all its members reduce the same rows: a second level of reduction is a second kernel.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from ..ir import Graph, Node
from .executor import PRODUCTS, Executor

if TYPE_CHECKING:
    from ..spec import OpSpec

#: Operators that generated kernels compute element by element although they are not point-wise by themselves.
_INDEXED = frozenset(
    {"CastLike", "Concat", "DequantizeLinear", "Dropout", "Gather", "GatherElements", "OneHot", "Pad", "Tile", "Trilu"}
    | {"QuantizeLinear", "RotaryEmbedding", "fusionreg::BatchNormalizationApply", "fusionreg::Dropout"}
    | {"fusionreg::MaskedFill", "fusionreg::CausalMask"}
)
_AXIS = frozenset(
    {"Softmax", "LogSoftmax", "LpNormalization", "fusionreg::SoftmaxGrad", "fusionreg::LogSoftmaxGrad"}
    | {"fusionreg::CausalSoftmaxGrad"}
)
_TAIL = frozenset(
    {"LayerNormalization", "RMSNormalization", "fusionreg::LayerNormalizationGrad", "fusionreg::RMSNormalizationGrad"}
)
_GROUPS = frozenset({"GroupNormalization", "fusionreg::GroupNormalizationGrad"})
_BATCH = frozenset({"BatchNormalization", "fusionreg::BatchNormalizationGrad"})


class Space(NamedTuple):
    """What one kernel works over: ``rows`` results, each of ``length`` elements; 1 where nothing is reduced.

    ``whole``: an operator that reduces and then works on all elements again.
    """

    rows: int
    length: int = 1
    whole: bool = False

    @property
    def elements(self) -> int:
        return self.rows * self.length


def space(graph: Graph, ops: Mapping[str, OpSpec], node: Node, extent: int) -> Space | None:
    """The space of a node that a generated kernel may hold; None for any other. ``extent``: of a symbolic axis."""

    def shape(value: str) -> tuple[int, ...] | None:
        found = graph.values[value].shape
        return None if found is None else tuple(d if isinstance(d, int) else extent for d in found)

    out = shape(node.outputs[0]) if node.outputs and node.outputs[0] else None
    given = shape(node.inputs[0]) if node.inputs and node.inputs[0] else None
    if out is None or node.graphs or node.mutates:
        return None
    spec = ops.get(node.op)
    if node.op in _INDEXED or (spec is not None and spec.pointwise):
        return Space(max(1, prod(out)))
    if given is None or not given:
        return None
    if node.op.startswith("Reduce") or node.op in ("ArgMax", "ArgMin"):
        return Space(max(1, prod(out)), max(1, prod(given) // max(1, prod(out))))
    if node.op in _AXIS:
        length = given[int(node.attrs.get("axis", -1))]
    elif node.op in _TAIL:
        length = prod(given[int(node.attrs.get("axis", -1)) :])
    elif node.op == "InstanceNormalization":
        length = prod(given[2:])
    elif node.op in _GROUPS:
        length = prod(given[1:]) // int(node.attrs.get("num_groups", 1))
    elif node.op in _BATCH:
        if node.op == "BatchNormalization" and not node.attrs.get("training_mode", 0):
            return Space(max(1, prod(out)))
        length = prod(given) // given[1] if len(given) > 1 else 1
    else:
        return None
    return Space(max(1, prod(given) // max(1, length)), max(1, length), True)


@dataclass(frozen=True)
class Grouping:
    """The kernels of an executor on a graph.

    Attributes:
        of: node → index of its kernel; nodes that cost nothing are missing.
        kernels: the nodes of each, in the graph's order.
        sources: value → the one whose memory it lies in, for what views make.
        spaces: node → what a generated kernel works over; empty where none are generated.
    """

    of: Mapping[str, int]
    kernels: tuple[tuple[str, ...], ...]
    sources: Mapping[str, str]
    spaces: Mapping[str, Space]


def group(graph: Graph, ops: Mapping[str, OpSpec], executor: Executor, extent: int) -> Grouping:
    """All nodes in kernels, as ``executor`` runs them."""
    sources = _sources(graph, executor)
    nodes = [n for n in graph.nodes if n.op not in executor.free]
    if executor.alone:
        return Grouping({n.name: i for i, n in enumerate(nodes)}, tuple((n.name,) for n in nodes), sources, {})
    made = _Grower(graph, executor, sources)
    if executor.chains:
        found = ((n.name, space(graph, ops, n, extent)) for n in nodes)
        made.spaces = {name: s for name, s in found if s is not None}
    for node in nodes:
        made.place(node)
    return made.result(nodes)


def _sources(graph: Graph, executor: Executor) -> dict[str, str]:
    found: dict[str, str] = {}
    for n in graph.nodes:
        if n.op in executor.free and n.inputs and n.inputs[0]:
            for out in n.outputs:
                found[out] = found.get(n.inputs[0], n.inputs[0])
    return found


class _Grower:
    """Unites nodes to kernels. Which kernel waits for which is kept as bit sets of indices; a kernel that grows is not
    looked up again by those that wait for it: a rare cycle is missed, which an estimate can bear."""

    def __init__(self, graph: Graph, executor: Executor, sources: Mapping[str, str]) -> None:
        self.graph, self.executor, self.sources = graph, executor, sources
        self.spaces: Mapping[str, Space] = {}
        self.of: dict[str, int] = {}
        self.into: list[int] = []
        self.size: list[int] = []
        self.space: list[Space | None] = []
        self.product: list[bool] = []
        self.conv: list[bool] = []
        self.ids: list[int] = []
        self.behind: list[int] = []

    def _root(self, k: int) -> int:
        while self.into[k] != k:
            self.into[k] = k = self.into[self.into[k]]
        return k

    def place(self, node: Node) -> None:
        read = [p for i in node.inputs if i and (p := self.graph.producers.get(self.sources.get(i, i))) is not None]
        near = {self._root(self.of[p.name]): p for p in read if p.name in self.of}
        waits = 0
        for k in near:
            waits |= self.ids[k] | self.behind[k]
        home, mine = -1, self.spaces.get(node.name)
        for k, producer in near.items():
            if home < 0:
                if self._joins(k, producer, node, mine) and not self._loop(k, near):
                    home = k
            elif self.space[k] is not None and self._merges(home, k):
                self._unite(home, k)
        if home < 0:
            home = len(self.into)
            self.into.append(home)
            self.ids.append(1 << home)
            self.size.append(0)
            self.space.append(mine)
            self.product.append(node.op in PRODUCTS)
            self.conv.append(node.op == "Conv")
            self.behind.append(0)
        elif mine is not None:
            self.space[home] = _both(self.space[home], mine)
        self.of[node.name] = home
        self.size[home] += 1
        self.behind[home] |= waits & ~self.ids[home]

    def _loop(self, k: int, near: Collection[int]) -> bool:
        return any(self.behind[other] & self.ids[k] for other in near if other != k)

    def _joins(self, k: int, producer: Node, node: Node, mine: Space | None) -> bool:
        pair = ("Conv" if self.conv[k] else producer.op, node.op)
        if pair in self.executor.joins and self._only(producer) and (self.conv[k] or self.size[k] == 1):
            if self.conv[k] or producer.op not in PRODUCTS or node.op != "Add":
                return True
            made = set(producer.outputs)
            shapes = [self.graph.values[i].shape for i in node.inputs if i and self.sources.get(i, i) not in made]
            if all(s is not None and len(s) <= 1 for s in shapes):
                return True
        if mine is None or not self.executor.chains or self.size[k] >= self.executor.largest:
            return False
        held = self.space[k]
        if held is None:  # a call into a library, with what joined it already
            if not self.executor.epilogues or not self.product[k] or mine.length > 1:
                return False
            made_by = self.graph.values[producer.outputs[0]].shape
            return made_by == self.graph.values[node.outputs[0]].shape and self._only(producer)
        return _both(held, mine) is not None

    def _only(self, producer: Node) -> bool:
        """Whether one node alone reads what it makes."""
        return len(self.graph.consumers.get(producer.outputs[0], ())) == 1 and (
            producer.outputs[0] not in self.graph.output_names
        )

    def _merges(self, a: int, b: int) -> bool:
        if self.behind[a] & self.ids[b] or self.behind[b] & self.ids[a]:
            return False
        held, other = self.space[a], self.space[b]
        small = self.size[a] + self.size[b] < self.executor.largest
        return small and held is not None and other is not None and _both(held, other) is not None

    def _unite(self, a: int, b: int) -> None:
        self.into[b] = a
        self.size[a] += self.size[b]
        self.space[a] = _both(self.space[a], self.space[b])
        self.ids[a] |= self.ids[b]
        self.behind[a] = (self.behind[a] | self.behind[b]) & ~self.ids[a]

    def result(self, nodes: Sequence[Node]) -> Grouping:
        index: dict[int, int] = {}
        members: list[list[str]] = []
        of: dict[str, int] = {}
        for n in nodes:
            k = index.setdefault(self._root(self.of[n.name]), len(index))
            if k == len(members):
                members.append([])
            members[k].append(n.name)
            of[n.name] = k
        return Grouping(of, tuple(map(tuple, members)), self.sources, self.spaces)


def _both(a: Space | None, b: Space | None) -> Space | None:
    """The space of one kernel over both; None where one kernel cannot be. What is smaller is computed again."""
    if a is None or b is None:
        return None
    if a.length == 1 and b.length == 1:
        return a if a.rows >= b.rows else b
    if a.length > 1 and b.length > 1:
        return a if (a.rows, a.length) == (b.rows, b.length) else None
    reduced, plain = (a, b) if a.length > 1 else (b, a)
    return reduced if plain.rows in (reduced.elements, reduced.rows) or reduced.elements % plain.rows == 0 else None


def pieces(graph: Graph, grouping: Grouping, members: Sequence[str], taken: Collection[str]) -> list[tuple[str, ...]]:
    """What is left of a kernel without ``taken``: its connected parts, those before the taken nodes and those that
    wait for them apart."""
    left = [n for n in members if n not in taken]
    if len(left) < 2 or len(left) == len(members):
        return [tuple(left)] if left else []
    behind: dict[str, bool] = {}
    parent = {n: n for n in left}

    def root(n: str) -> str:
        while parent[n] != n:
            n = parent[n]
        return n

    mine = set(members)
    for name in members:
        node = graph.node_by_name[name]
        sources = (grouping.sources.get(i, i) for i in node.inputs if i)
        producers = (graph.producers.get(s) for s in sources)
        read = [p.name for p in producers if p is not None and p.name in mine]
        behind[name] = name in taken or any(behind[other] for other in read)
        if name in taken:
            continue
        for other in read:
            if other not in taken and behind[other] == behind[name]:
                a, b = root(other), root(name)
                parent[max(a, b, key=members.index)] = min(a, b, key=members.index)
    found: dict[str, list[str]] = {}
    for n in left:
        found.setdefault(root(n), []).append(n)
    return [tuple(p) for p in found.values()]
