"""What a node costs: bytes moved, floating-point operations, launches, and the seconds they come to. Floor 4.

Nominal on purpose: a roofline over shapes and a device's data-sheet numbers, good for saying which of two plans moves
less. A measured time, where there is one, takes its place (``CostModel.measured``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from ..dtypes import DTYPES
from ..frozen import FrozenDict
from ..ir import Graph, Node, Value
from ..matcher.match import Match
from ..spec import OpSpec


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


#: Operators that move no data: they give the same elements another shape.
FREE = frozenset({"Identity", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Shape", "Size"})

#: Operators that our own executor runs as several library kernels, each over the whole tensor: how many, at least.
#: A compiled executor of the rest, or one with kernels of its own for them, has none.
PASSES: Mapping[str, int] = FrozenDict(
    {"LayerNormalization": 8, "RMSNormalization": 6, "GroupNormalization": 8, "InstanceNormalization": 8}
    | {"BatchNormalization": 4, "Softmax": 5, "LogSoftmax": 5, "fusionreg::Dropout": 6, "fusionreg::SoftmaxGrad": 4}
    | {"fusionreg::LayerNormalizationGrad": 16, "fusionreg::RMSNormalizationGrad": 12}
)

_PRODUCTS = frozenset({"MatMul", "Gemm", "Conv", "ConvTranspose", "Attention", "MatMulInteger"})


@dataclass(frozen=True)
class CostModel:
    """Costs of nodes and matches on one device.

    Attributes:
        ops: the vocabulary, for telling point-wise operators from others.
        device: its numbers.
        extent: what a symbolic extent counts as.
        measured: match → measured seconds of its fused call, None where nothing was measured.
        free: operators that cost nothing where the rest of the graph runs.
        passes: operators that are more than one kernel there, each over the whole tensor: how many.
    """

    ops: Mapping[str, OpSpec] = field(repr=False)
    device: DeviceModel = DeviceModel()
    extent: int = 128
    measured: Callable[[Match], float | None] = field(default=lambda match: None, repr=False)
    free: Collection[str] = FREE
    passes: Mapping[str, int] = field(default=PASSES, repr=False)

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
        launches = self.passes.get(node.op, 1)
        moved = launches * self._bytes(graph, {*node.inputs, *node.outputs})
        flops = self.flops(graph, node)
        seconds = self.seconds(moved, self.busy(graph, node, flops)) + (launches - 1) * self.device.launch
        return Cost(moved, flops, launches, seconds)

    def unfused(self, graph: Graph, nodes: Iterable[str]) -> Cost:
        """The nodes one by one."""
        return self.on(graph).unfused(nodes)

    def fused(self, graph: Graph, match: Match) -> Cost:
        """The match as one kernel: reads its inputs and writes its outputs once."""
        return self.on(graph).fused(match)

    def saved(self, graph: Graph, match: Match) -> Cost:
        """What fusing saves: unfused minus fused; negative where it costs."""
        return self.on(graph).saved(match)

    def on(self, graph: Graph) -> GraphCosts:
        """The same for many matches of one graph: each node is looked at once."""
        return GraphCosts(self, graph)

    def flops(self, graph: Graph, node: Node) -> int:
        """Multiply-adds count twice; an element-wise operation once per element of its largest operand."""
        out = self.elements(graph.values[node.outputs[0]]) if node.outputs and node.outputs[0] else 0
        if node.op in _PRODUCTS and len(node.inputs) > 1:
            return 2 * out * self._depth(graph, node)
        return max([out, *(self.elements(graph.values[i]) for i in node.inputs if i)], default=0)

    def _depth(self, graph: Graph, node: Node) -> int:
        """How many products each output element sums."""
        a, b = (graph.values[i] for i in node.inputs[:2])
        shape = [d if isinstance(d, int) else self.extent for d in a.shape or (self.extent,)]
        if node.op in ("Conv", "ConvTranspose"):
            filters = [d if isinstance(d, int) else self.extent for d in b.shape or (self.extent,)]
            return prod(filters[1:])
        if node.op == "Attention" and len(node.inputs) > 1:
            keys = b.shape[-2] if b.shape and len(b.shape) > 1 else self.extent
            return 2 * (keys if isinstance(keys, int) else self.extent)
        return shape[-2] if node.attrs.get("transA") and len(shape) > 1 else shape[-1] if shape else 1

    def _bytes(self, graph: Graph, names: Iterable[str]) -> int:
        return sum(self.size(graph.values[n]) for n in names if n)

    def busy(self, graph: Graph, node: Node, flops: int) -> float:
        """Seconds of a node's arithmetic, were its data there."""
        if node.op in self.free:
            return 0.0
        if node.op in _PRODUCTS:
            kind = graph.values[node.inputs[0]].dtype
            return flops / self.device.flops.get(kind, self.device.vector_flops)
        return flops / self.device.vector_flops

    def seconds(self, moved: int, busy: float) -> float:
        """Seconds of one launch that moves so many bytes and computes for so long."""
        return max(moved / self.device.bandwidth, busy) + self.device.launch


class GraphCosts:
    """A cost model on one graph."""

    def __init__(self, model: CostModel, graph: Graph) -> None:
        self.model, self.graph = model, graph
        self._nodes: dict[str, tuple[Cost, float]] = {}
        self._sizes: dict[str, int] = {}

    def _node(self, name: str) -> tuple[Cost, float]:
        """A node's cost, and the seconds that its arithmetic alone takes."""
        known = self._nodes.get(name)
        if known is None:
            node = self.graph.node_by_name[name]
            cost = self.model.node(self.graph, node)
            known = self._nodes[name] = (cost, self.model.busy(self.graph, node, cost.flops))
        return known

    def unfused(self, nodes: Iterable[str]) -> Cost:
        """The nodes one by one."""
        costs = [self._node(n)[0] for n in nodes]
        return Cost(
            sum([c.bytes for c in costs]),
            sum([c.flops for c in costs]),
            sum([c.launches for c in costs]),
            sum([c.seconds for c in costs]),
        )

    def fused(self, match: Match) -> Cost:
        """The match as one kernel: reads its inputs and writes its outputs once."""
        values, sizes, moved = self.graph.values, self._sizes, 0
        for name in {*match.inputs.values(), *match.outputs.values()}:
            if name not in sizes:
                sizes[name] = self.model.size(values[name])
            moved += sizes[name]
        nodes = [self._node(n) for n in match.nodes]
        seconds = self.model.measured(match)
        if seconds is None:
            seconds = self.model.seconds(moved, sum([busy for _, busy in nodes]))
        return Cost(moved, sum([c.flops for c, _ in nodes]), 1, seconds)

    def saved(self, match: Match) -> Cost:
        """What fusing saves: unfused minus fused; negative where it costs."""
        return self.unfused(match.nodes) - self.fused(match)
