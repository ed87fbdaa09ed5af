"""The time no version can beat by much: bytes and operations over the ceilings measured in the same run. Floor 7."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from ..frozen import EMPTY, FrozenDict
from ..ir import Graph
from ..planner.costs import CostModel, DeviceModel
from ..spec import OpSpec, Record

if TYPE_CHECKING:
    from ..problem import Problem


class Ceilings(Record):
    """What the device was seen to reach: bytes per second of large buffers, operations per second of large products."""

    copy_rate: float
    """Bytes read plus bytes written, half each."""
    read_rate: float
    """Bytes read alone."""
    write_rate: float
    """Bytes written alone."""
    matmul: FrozenDict[str, float] = EMPTY
    """Dtype → operations per second of a square matrix product."""

    def seconds(self, read: int, written: int) -> float:
        """Least time to move these bytes: pairs of a byte read and a byte written at the rate of a copy, the rest at
        the rate of reading or writing alone."""
        paired = min(read, written)
        rest = (read - paired) / self.read_rate if read > paired else (written - paired) / self.write_rate
        return 2 * paired / self.copy_rate + rest

    def rate(self, read: int, written: int) -> float:
        """Bytes per second of this read:write mix."""
        return (read + written) / self.seconds(read, written) if read + written else self.copy_rate


@dataclass(frozen=True)
class Traffic:
    """What a problem needs at least.

    Attributes:
        read, written: bytes, each input read once and each output written once.
        flops: operations of the pattern's graph; a multiply-add counts twice, an element-wise operation once.
    """

    read: int
    written: int
    flops: int

    @classmethod
    def of(cls, problem: Problem, graph: Graph, ops: Mapping[str, OpSpec]) -> Traffic:
        """Counted on the problem's tensors and the pattern's graph."""
        outputs = set(problem.output_names)
        sizes = {name: t.bytes for name, t in problem.tensors.items() if t is not None}
        model = CostModel(ops)
        return cls(
            sum(size for name, size in sizes.items() if name not in outputs),
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
