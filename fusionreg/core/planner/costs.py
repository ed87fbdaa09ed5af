"""What a node costs: bytes moved, floating-point operations, launches, and the seconds they come to. Floor 4.

Nominal on purpose: a roofline over shapes and a device's data-sheet numbers, good for saying which of two plans moves
less. How a fusion measured against the executor of the rest, where somebody measured it, takes its place
(``CostModel.gains``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

from ..dtypes import DTYPES
from ..ir import Graph, Node, Value
from ..matcher.match import Match
from ..spec import OpSpec
from .executor import LIBRARY, PRODUCTS, Executor

if TYPE_CHECKING:
    from .savings import GraphCosts


@dataclass(frozen=True)
class DeviceModel:
    """Nominal numbers of a device.

    Attributes:
        name: for reports.
        bandwidth: bytes per second to and from memory.
        flops: operations per second by dtype of a matrix product; other dtypes count as float32.
        vector_flops: operations per second outside matrix products.
        launch: seconds that one kernel launch costs.
    """

    name: str = "H200"
    bandwidth: float = 4.8e12
    flops: Mapping[str, float] = field(
        default_factory=lambda: (
            {"float16": 9.9e14, "bfloat16": 9.9e14, "float32": 6.7e13, "float64": 6.7e13}
            | {"float8_e4m3fn": 1.98e15, "float8_e5m2": 1.98e15, "int8": 1.98e15}
        )
    )
    vector_flops: float = 6.7e13
    launch: float = 4e-6


@dataclass(frozen=True, slots=True)
class Cost:
    """Bytes moved, operations done, kernels launched, and seconds."""

    bytes: int = 0
    flops: int = 0
    launches: int = 0
    seconds: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.bytes + other.bytes,
            self.flops + other.flops,
            self.launches + other.launches,
            self.seconds + other.seconds,
        )

    def __sub__(self, other: Cost) -> Cost:
        return Cost(
            self.bytes - other.bytes,
            self.flops - other.flops,
            self.launches - other.launches,
            self.seconds - other.seconds,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {"bytes": self.bytes, "flops": self.flops, "launches": self.launches, "seconds": self.seconds}


@dataclass(frozen=True, slots=True)
class Gain:
    """How a fusion measured against an executor.

    Attributes:
        ratio: its time over the executor's: below 1 it is faster.
        source: which measurement that was.
        kernel: whose time that is.
        sure: whether it was of the very nodes, with as many bytes or nearly so.
    """

    ratio: float
    source: str = ""
    kernel: str = ""
    sure: bool = False


#: What a symbolic extent counts as.
EXTENT = 128


#: Operators that read no more of their first input than they give: a table counts by the rows that are looked up.
SELECTING = frozenset({"CenterCropPad", "Compress", "Gather", "GatherElements", "GatherND", "Slice", "Split"})

#: Products of rows with one of many matrices each: of those, the ones that some row has are read.
ROUTED = frozenset({"fusionreg::RoutedMatMul"})

#: Products of queries and keys, without scores in memory: where q stands among the inputs, k and v behind it.
ATTENTION: Mapping[str, int] = {"Attention": 0, "fusionreg::AttentionGrad": 1}


@dataclass(frozen=True)
class CostModel:
    """Costs of nodes and matches on one device.

    Attributes:
        ops: the vocabulary, for telling point-wise operators from others.
        device: its numbers.
        extent: what a symbolic extent counts as.
        executor: who runs what is not fused.
        measured: match → seconds of its fused call, where a plugin tells; None where none does.
        kernels: match → seconds of the kernel that would run, by what it says itself; None where it says nothing.
        gains: (match, executor, bytes of its inputs and outputs) → how it measured against that executor; None where
            nothing like it was measured.
    """

    ops: Mapping[str, OpSpec] = field(repr=False)
    device: DeviceModel = DeviceModel()
    extent: int = EXTENT
    executor: Executor = LIBRARY
    measured: Callable[[Match], float | None] = field(default=lambda match: None, repr=False)
    kernels: Callable[[Match], float | None] = field(default=lambda match: None, repr=False)
    gains: Callable[[Match, Executor, int], Gain | None] = field(default=lambda match, executor, size: None, repr=False)

    @property
    def free(self) -> frozenset[str]:
        """Operators that cost nothing where the rest runs."""
        return self.executor.free

    def elements(self, value: Value) -> int:
        """How many elements a value has; unknown ranks count as one symbolic extent."""
        if value.shape is None:
            return self.extent
        return prod(d if isinstance(d, int) else self.extent for d in value.shape)

    def size(self, value: Value) -> int:
        """Bytes of a value."""
        row = DTYPES.get(value.dtype)
        return self.elements(value) * (row.bytes if row else 4)

    def node(self, graph: Graph, node: Node) -> Cost:
        """One node run by itself: each of its kernels reads its inputs and writes its outputs."""
        if node.op in self.free:
            return Cost()
        launches = self.executor.passes.get(node.op, 1)
        read = sum(self.read(graph, node, i) for i in {*node.inputs} if i)
        moved = launches * (read + self._bytes(graph, {*node.outputs}))
        flops = self.flops(graph, node)
        seconds = self.seconds(moved, self.busy(graph, node, flops)) + (launches - 1) * self.device.launch
        return Cost(moved, flops, launches, seconds)

    def read(self, graph: Graph, node: Node, name: str) -> int:
        """Bytes that a node reads of an input."""
        size = self.size(graph.values[name])
        if node.op in SELECTING and name == node.inputs[0]:
            return min(size, self._bytes(graph, {*node.outputs}))
        if node.op in ROUTED and name == node.inputs[1]:
            return self._chosen(graph, node, size)
        return size

    def _chosen(self, graph: Graph, node: Node, size: int) -> int:
        """Bytes of the matrices that are chosen at all: a row's choices are different ones, those of rows are random;
        of rows with one choice each, as many as there can be."""
        w, ids = (graph.values[i] for i in node.inputs[1:3])
        matrices, choices = self._extent(w, -3), self.elements(ids)
        each = self._extent(ids, -1) if len(ids.shape or ()) > 1 else 1
        if not matrices or not each:
            return 0
        if each == 1:
            return size * min(choices, matrices) // matrices
        return round(size * (1.0 - (1.0 - min(each, matrices) / matrices) ** (choices // each)))

    def unfused(self, graph: Graph, nodes: Iterable[str]) -> Cost:
        """The nodes as the executor runs them."""
        return self.on(graph).unfused(nodes)

    def fused(self, graph: Graph, match: Match) -> Cost:
        """The match as one kernel: reads its inputs and writes its outputs once."""
        return self.on(graph).fused(match)

    def saved(self, graph: Graph, match: Match) -> Cost:
        """What fusing saves; negative where it costs."""
        return self.on(graph).saved(match).cost

    def on(self, graph: Graph) -> GraphCosts:
        """The same for many matches of one graph: each node is looked at once."""
        from .savings import GraphCosts

        return GraphCosts(self, graph)

    def flops(self, graph: Graph, node: Node) -> int:
        """Multiply-adds count twice; an element-wise operation once per element of its largest operand."""
        out = self.elements(graph.values[node.outputs[0]]) if node.outputs and node.outputs[0] else 0
        if node.op in ATTENTION and len(node.inputs) > 2:
            return self._attention(graph, node)
        if node.op in PRODUCTS | ROUTED and len(node.inputs) > 1:
            return 2 * out * self._depth(graph, node)
        if node.op in SELECTING:
            return out
        return max([out, *(self.elements(graph.values[i]) for i in node.inputs if i)], default=0)

    def _depth(self, graph: Graph, node: Node) -> int:
        """How many products each output element sums."""
        a, b = (graph.values[i] for i in node.inputs[:2])
        shape = [d if isinstance(d, int) else self.extent for d in a.shape or (self.extent,)]
        if node.op in ("Conv", "ConvTranspose"):
            filters = [d if isinstance(d, int) else self.extent for d in b.shape or (self.extent,)]
            return prod(filters[1:])
        return shape[-2] if node.attrs.get("transA") and len(shape) > 1 else shape[-1] if shape else 1

    def _attention(self, graph: Graph, node: Node) -> int:
        """Products of attention or of its gradient, for the pairs of queries and keys that positions allow."""
        first = ATTENTION[node.op]
        q, k = (graph.values[i] for i in node.inputs[first : first + 2])
        queries, keys = (self._extent(v, -2) for v in (q, k))
        pairs = _pairs(queries, keys, node.attrs)
        if first == 0:  # q k^T and p v
            size = self.elements(q) + self.elements(graph.values[node.outputs[0]])
        else:  # q k^T, dy v^T, and the three gradients
            size = 3 * self.elements(q) + 2 * self.elements(graph.values[node.inputs[0]])
        return 2 * size * pairs // max(1, queries)

    def _extent(self, value: Value, axis: int) -> int:
        extent = value.shape[axis] if value.shape and len(value.shape) >= -axis else self.extent
        return extent if isinstance(extent, int) else self.extent

    def _bytes(self, graph: Graph, names: Iterable[str]) -> int:
        return sum(self.size(graph.values[n]) for n in names if n)

    def busy(self, graph: Graph, node: Node, flops: int) -> float:
        """Seconds of a node's arithmetic, were its data there."""
        if node.op in self.free:
            return 0.0
        if node.op in PRODUCTS | ROUTED or node.op in ATTENTION:
            kind = graph.values[node.inputs[0]].dtype
            return flops / self.device.flops.get(kind, self.device.vector_flops)
        return flops / self.device.vector_flops

    def seconds(self, moved: int, busy: float) -> float:
        """Seconds of one launch that moves so many bytes and computes for so long."""
        return max(moved / self.device.bandwidth, busy) + self.device.launch


def _pairs(queries: int, keys: int, attributes: Mapping[str, Any]) -> int:
    """Pairs of a query and a key that it sees by its position, which counts from the first of both."""
    left, right = (int(attributes.get(f"{side}_window_size", -1)) for side in ("left", "right"))
    if attributes.get("is_causal"):
        right = 0

    def before(last: int) -> int:
        """Keys in front of position ``i + last``, for all queries ``i``."""
        return _clamped(queries + last, keys) - _clamped(last, keys)

    return (before(right + 1) if right >= 0 else queries * keys) - (before(-left) if left >= 0 else 0)


def _clamped(end: int, most: int) -> int:
    """The sum of min(i, most) for i from 0 to end - 1."""
    few = max(0, min(end, most))
    return few * (few - 1) // 2 + max(0, end - most) * most
