"""The time no version can beat by much: bytes and operations over the ceilings measured in the same run. Floor 7."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from typing import TYPE_CHECKING

from ..frozen import EMPTY, FrozenDict
from ..ir import Graph
from ..planner.costs import CostModel, DeviceModel
from ..spec import OpSpec, Record

if TYPE_CHECKING:
    from ..problem import Problem


class Ceilings(Record):
    """What the device was seen to reach: bytes per second of large buffers, by how they mix, and operations per second
    of large products."""

    copy_rate: float
    """Bytes read plus bytes written, half each."""
    read_rate: float
    """Bytes read alone."""
    write_rate: float
    """Bytes written alone."""
    mixes: FrozenDict[str, float] = EMPTY
    """Further mixes, ``"2:1"`` for two bytes read to one written → bytes per second, both counted."""
    matmul: FrozenDict[str, float] = EMPTY
    """Dtype → operations per second of a square matrix product."""
    issue_rate: float | None = None
    """Instructions per second that all warps together issue; one instruction serves the 32 lanes of a warp."""

    def named(self) -> dict[str, float]:
        """Mix → rate, from bytes that are only read to bytes that are only written."""
        return {name: rate for _, name, rate in self._points()}

    def _points(self) -> list[tuple[float, str, float]]:
        """(share of the bytes that is written, name, bytes per second), ascending."""
        points = [(0.0, "read", self.read_rate), (0.5, "copy 1:1", self.copy_rate), (1.0, "write", self.write_rate)]
        for name, rate in self.mixes.items():
            read, written = map(float, name.split(":"))
            points.append((written / (read + written), name, rate))
        return sorted(points)

    def seconds(self, read: int, written: int) -> float:
        """Least time to move these bytes: a mix that was measured at its own rate, another one as the two measured
        mixes nearest to it, in the amounts that make it up."""
        total = read + written
        if not total:
            return 0.0
        share, points = written / total, self._points()
        for (low, _, slow), (high, _, fast) in pairwise(points):
            if share <= high:
                part = (share - low) / (high - low)
                return total * ((1.0 - part) / slow + part / fast)
        return total / points[-1][2]

    def rate(self, read: int, written: int) -> float:
        """Bytes per second of this read:write mix."""
        return (read + written) / self.seconds(read, written) if read + written else self.copy_rate

    def issuing(self, instructions: int) -> float | None:
        """Seconds that it takes to issue so many instructions of warps; None where that rate was not measured."""
        return instructions / self.issue_rate if self.issue_rate else None


@dataclass(frozen=True)
class Traffic:
    """What a problem needs at least.

    Attributes:
        read, written: bytes, each input read once, or what is chosen of it, and each output written once.
        flops: operations of the pattern's graph; a multiply-add counts twice, an element-wise operation once.
    """

    read: int
    written: int
    flops: int

    @classmethod
    def of(cls, problem: Problem, graph: Graph, ops: Mapping[str, OpSpec]) -> Traffic:
        """Counted on the problem's tensors and the pattern's graph."""
        outputs = set(problem.output_names)
        model = CostModel(ops)
        sizes = {name: t.bytes for name, t in problem.tensors.items() if t is not None}
        for name in {*graph.producers} & {*sizes} - outputs:  # products in front
            del sizes[name]
        sizes |= {name: model.size(graph.values[name]) for name in graph.inputs if name not in sizes}
        chosen: dict[str, int] = {}  # of inputs of the graph, what its nodes read of them together
        for node in graph.nodes:
            for name in {*node.inputs} & {*graph.inputs}:
                chosen[name] = chosen.get(name, 0) + model.read(graph, node, name)
        return cls(
            sum(min(size, chosen.get(name, size)) for name, size in sizes.items() if name not in outputs),
            sum(size for name, size in sizes.items() if name in outputs),
            sum(model.flops(graph, node) for node in graph.nodes if node.op not in model.free),
        )

    @property
    def intensity(self) -> float:
        """Operations per byte."""
        return self.flops / (self.read + self.written) if self.read + self.written else inf


def floor(traffic: Traffic, graph: Graph, ceilings: Ceilings, ops: Mapping[str, OpSpec]) -> tuple[float, str]:
    """(seconds, what binds: ``memory`` or ``matmul``).

    Only matrix products count as arithmetic: element-wise work has no ceiling of its own here, and a product of a
    dtype whose rate was not measured has none either.
    """
    model = CostModel(ops, DeviceModel("measured", flops=ceilings.matmul, vector_flops=inf))
    memory = ceilings.seconds(traffic.read, traffic.written)
    busy = sum(model.busy(graph, node, model.flops(graph, node)) for node in graph.nodes)
    return (busy, "matmul") if busy > memory else (memory, "memory")
