"""Durations of launches on a CUDA device: events around single launches with a cold L2, or replays of a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

#: Milliseconds of device time that one round of one competitor gets.
BUDGET = 30.0
_LEAST, _MOST, _WARM = 8, 400, 3
#: Calls inside one captured graph: what a replay itself costs is shared among them.
CAPTURED = 10


class Timer:
    """Times calls on the current CUDA device.

    Args:
        flush: bytes written between launches; several times the L2.
    """

    def __init__(self, flush: int = 1 << 28) -> None:
        self._flush = torch.empty(flush, dtype=torch.int8, device="cuda")

    def cold(self, calls: Sequence[Callable[[], Any]], budget: float = BUDGET) -> list[float]:
        """Milliseconds of single launches. ``calls`` are the same work on different buffers, taken in turn; before
        each one the L2 is filled with something else. What outlasts the budget is launched once."""
        seen = self._series(calls, 1)
        if seen[0] > budget:
            return seen
        for i in range(max(_WARM, len(calls))):
            calls[i % len(calls)]()
        return self._series(calls, _count(budget, self._series(calls, 2)))

    def _series(self, calls: Sequence[Callable[[], Any]], count: int) -> list[float]:
        starts = [torch.cuda.Event(enable_timing=True) for _ in range(count)]
        ends = [torch.cuda.Event(enable_timing=True) for _ in range(count)]
        for i in range(count):
            self._flush.zero_()
            starts[i].record()
            calls[i % len(calls)]()
            ends[i].record()
        torch.cuda.synchronize()
        return [a.elapsed_time(b) for a, b in zip(starts, ends, strict=True)]

    def replayed(self, call: Callable[[], Any], budget: float = BUDGET) -> list[float]:
        """Milliseconds of one call inside a replayed CUDA graph of :data:`CAPTURED` calls."""
        graph = captured(call, CAPTURED)
        for _ in range(_WARM):
            graph.replay()
        count = _count(budget, replays(graph, 2))
        found = replays(graph, count)
        graph.reset()
        return [ms / CAPTURED for ms in found]


def captured(call: Callable[[], Any], count: int) -> Any:
    """A CUDA graph of ``count`` calls, which have run before; RuntimeError where one cannot be captured."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(_WARM):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            call()
    return graph


def replays(graph: Any, count: int) -> list[float]:
    """Milliseconds of replays, one after the other."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2 * count)]
    for start, end in zip(events[::2], events[1::2], strict=True):
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in zip(events[::2], events[1::2], strict=True)]


def _count(budget: float, seen: Sequence[float]) -> int:
    return max(_LEAST, min(_MOST, int(budget / max(min(seen), 1e-3))))


def fastest(call: Callable[[], Any], count: int = 10) -> float:
    """Seconds of the fastest of ``count`` launches: how a ceiling is measured."""
    for _ in range(_WARM):
        call()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2 * count)]
    for start, end in zip(events[::2], events[1::2], strict=True):
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return min(a.elapsed_time(b) for a, b in zip(events[::2], events[1::2], strict=True)) * 1e-3
