"""What capturing needs of a device: a stream aside, recording, and replays in order. One GPU of torch behind it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from fusionreg.core.errors import ArgumentError, FusionregError, LaunchError
from fusionreg.core.runtime.driver import driver

from .nodes import Nodes, of_capture

#: Calls of other threads go on as they are while this one captures.
_MODE = "thread_local"


@dataclass(frozen=True)
class Recording:
    """A call as a graph.

    Attributes:
        replay: launches it on the current stream.
        result: what the call returned; its tensors are written by every replay.
        nodes: what it consists of, None where the driver does not tell.
        pool: the memory that its intermediate values live in; graphs of one pool share it.
        bytes: of that pool.
    """

    replay: Callable[[], None]
    result: Any
    nodes: Nodes | None
    pool: Any
    bytes: int


class Device(Protocol):
    """Where graphs are captured. Tests have one without a GPU."""

    device: torch.device

    def aside(self) -> AbstractContextManager[Any]:
        """A stream that begins after the current one and that the current one waits for; None is given for it."""
        ...

    def keeping(self, generators: Sequence[torch.Generator]) -> AbstractContextManager[None]:
        """Generators are afterwards as they were before."""
        ...

    def record(
        self, whom: str, run: Callable[[], Any], stream: Any, pool: Any, generators: Sequence[torch.Generator]
    ) -> Recording:
        """``run()`` captured on ``stream``. Whatever it raises ends the capture and leaves the device usable."""
        ...

    def stream(self) -> Any:
        """The current stream, cheap to compare."""
        ...

    def order(self, before: Any, buffers: Sequence[torch.Tensor]) -> None:
        """The current stream begins after what stream ``before`` has been given; ``buffers`` are used on it too."""
        ...

    def capturing(self) -> bool:
        """Whether the current stream is being captured."""
        ...

    def synchronize(self) -> None: ...


class Gpu:
    """A GPU; :class:`ArgumentError` where torch finds none."""

    def __init__(self, index: int | None = None) -> None:
        if not torch.cuda.is_available():
            raise ArgumentError("cannot capture", "a CUDA graph", "torch finds no GPU", "a GPU, and torch with CUDA")
        self.index = torch.cuda.current_device() if index is None else index
        self.device = torch.device("cuda", self.index)
        self._current = torch._C._cuda_getCurrentRawStream
        self.capturing = torch.cuda.is_current_stream_capturing

    @contextmanager
    def aside(self) -> Iterator[torch.cuda.Stream]:
        with torch.cuda.device(self.index):
            before = torch.cuda.current_stream()
            stream = torch.cuda.Stream()
            stream.wait_stream(before)
            try:
                with torch.cuda.stream(stream):
                    yield stream
            finally:
                before.wait_stream(stream)

    @contextmanager
    def keeping(self, generators: Sequence[torch.Generator]) -> Iterator[None]:
        kept = [*generators, torch.cuda.default_generators[self.index], torch.default_generator]
        states = [g.get_state() for g in kept]
        try:
            yield
        finally:
            for generator, state in zip(kept, states, strict=True):
                generator.set_state(state)

    def record(
        self, whom: str, run: Callable[[], Any], stream: Any, pool: Any, generators: Sequence[torch.Generator]
    ) -> Recording:
        pool = torch.cuda.graph_pool_handle() if pool is None else pool
        graph = torch.cuda.CUDAGraph()
        for generator in generators:
            graph.register_generator_state(generator)
        torch.cuda.synchronize()
        gc.collect()  # what dies now need not die during the capture
        graph.capture_begin(pool=pool, capture_error_mode=_MODE)
        try:
            result = run()
            nodes = of_capture(stream.cuda_stream)
        except BaseException as error:
            intact = driver().capturing(stream.cuda_stream)
            self._abandon(graph, pool, generators, intact)
            capturing = not intact or "captur" in str(error)  # some things torch refuses before the driver does
            if capturing and isinstance(error, RuntimeError) and not isinstance(error, FusionregError):
                raise _uncapturable(whom, error) from error
            raise
        try:
            graph.capture_end()
        except RuntimeError as error:
            self._recover(pool, generators)
            raise _uncapturable(whom, error) from error
        return Recording(graph.replay, result, nodes, pool, self._bytes(pool))

    def _abandon(self, graph: Any, pool: Any, generators: Sequence[torch.Generator], intact: bool) -> None:
        try:
            if intact:
                torch.zeros(1, device=self.device)  # torch warns of empty graphs
            graph.capture_end()
        except RuntimeError:
            self._recover(pool, generators)

    def _recover(self, pool: Any, generators: Sequence[torch.Generator]) -> None:
        """Undoes by hand what torch leaves behind when the driver calls a capture invalid.

        Its allocator still believes that a capture is under way, and its generators refuse every eager call with
        "Offset increment outside graph capture": a capture that succeeds puts them right.
        """
        for undo in (torch._C._cuda_endAllocateToPool, torch._C._cuda_releasePool):
            with suppress(RuntimeError):  # of versions that had done so themselves
                undo(self.index, pool)
        again = torch.cuda.CUDAGraph()
        for generator in generators:
            again.register_generator_state(generator)
        one = torch.zeros(1, device=self.device)
        torch.cuda.synchronize()
        again.capture_begin(capture_error_mode=_MODE)
        one.zero_()
        again.capture_end()

    def _bytes(self, pool: Any) -> int:
        return sum(s["total_size"] for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) == tuple(pool))

    def stream(self) -> int:
        return self._current(self.index)

    def order(self, before: int, buffers: Sequence[torch.Tensor]) -> None:
        current = torch.cuda.current_stream(self.index)
        current.wait_stream(torch.cuda.ExternalStream(before, self.device))
        for buffer in buffers:
            buffer.record_stream(current)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.index)


def _uncapturable(whom: str, error: RuntimeError) -> LaunchError:
    return LaunchError(
        "cannot capture", whom, str(error).strip().splitlines()[0].removesuffix("."),
        "work that stays on the device: no .item(), no copy to the CPU, no other stream that joins too late",
        "The stream is usable again; the call works as it is, without a graph",
    )  # fmt: skip
