"""What a graph is worth: host time with and without it, what it consists of, what it holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .nodes import Nodes


@dataclass(frozen=True)
class GraphReport:
    """One captured call.

    Attributes:
        name: of the function.
        nodes: what the graph consists of; None where the driver does not tell.
        input_bytes: static buffers that arguments are copied into.
        pool_bytes: memory of the graph's pool: intermediate values and results. Graphs that share a pool share it.
        launched: median host seconds of a call of the function itself, None where it was not timed.
        replayed: median host seconds of a replay with its copies, None before the first.
        calls: how often it was replayed.
        measured: whether both were timed in turn by ``measure``; else ``launched`` is of the calls before the capture
            and ``replayed`` of the last replays.
    """

    name: str
    nodes: Nodes | None
    input_bytes: int
    pool_bytes: int
    launched: float | None = None
    replayed: float | None = None
    calls: int = 0
    measured: bool = False

    @property
    def saved(self) -> float | None:
        """The part of the host time that is gone, 0.8 for 80 %; None where either is not known."""
        return 1 - self.replayed / self.launched if self.launched and self.replayed is not None else None

    def __str__(self) -> str:
        parts = "the driver does not tell its nodes"
        if self.nodes is not None:
            early = f", {self.nodes.programmatic} of them start early" if self.nodes.programmatic else ""
            copies = f", {self.nodes.copies} copies or fills" if self.nodes.copies else ""
            others = f", {self.nodes.others} others" if self.nodes.others else ""
            parts = f"{self.nodes.kernels} kernels{early}{copies}{others}"
        saved = "" if self.saved is None else f", {self.saved:.0%} less" if self.saved >= 0 else ", no less"
        how = "in turn" if self.measured else f"{self.calls} replays so far"
        return (
            f"{self.name}: {parts}\n"
            f"  host time a call: {_microseconds(self.launched)} launched, {_microseconds(self.replayed)} replayed"
            f"{saved} ({how})\n"
            f"  memory: {_bytes(self.input_bytes)} of input buffers, {_bytes(self.pool_bytes)} of the graph's pool"
        )


@dataclass(frozen=True)
class PoolReport:
    """The graphs of a pool.

    Attributes:
        graphs: those it holds, the one used longest ago first, each with the layouts of its arguments.
        limit: how many it keeps.
        captured: graphs captured so far.
        evicted: graphs that made room.
        refused: why calls ran without a graph, and how many of each.
    """

    graphs: tuple[tuple[str, GraphReport], ...]
    limit: int
    captured: int
    evicted: int
    refused: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        lines = [f"{len(self.graphs)} of at most {self.limit} graphs, {self.captured} captured, {self.evicted} evicted"]
        for layouts, graph in self.graphs:
            lines += [layouts, *(f"  {line}" for line in str(graph).splitlines())]
        lines += [f"{count} calls without a graph: {reason}" for reason, count in self.refused]
        return "\n".join(lines)


def median(values: Sequence[float]) -> float | None:
    """None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2


def _microseconds(seconds: float | None) -> str:
    return "not timed" if seconds is None else f"{seconds * 1e6:.1f} µs"


def _bytes(count: int) -> str:
    if count < 2**10:
        return f"{count} B"
    return f"{count / 2**20:.1f} MiB" if count >= 2**20 else f"{count / 2**10:.1f} KiB"
