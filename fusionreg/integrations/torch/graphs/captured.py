"""One call as a CUDA graph: captured once, replayed on new values."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import RLock
from time import perf_counter
from typing import Any

import torch

from fusionreg.core.errors import ArgumentError, LaunchError

from .device import Device
from .leaves import Inputs, Structure, flatten
from .outputs import Outputs
from .report import GraphReport, median

#: Replays whose host time is remembered.
_REMEMBERED = 101


class Order:
    """Replays of graphs that share memory, one after the other, whatever streams and threads they come from."""

    def __init__(self) -> None:
        self.lock = RLock()
        self.last: Any = None


class Captured:
    """A function's call as a CUDA graph. Made by :func:`fusionreg.capture`.

    Attributes:
        name: of the function.
        function: it, and with it everything that it holds, is kept alive.
        pool: the memory pool of the graph, for ``pool=`` of another capture.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        structure: Structure,
        leaves: Sequence[Any],
        device: Device,
        *,
        stays: Collection[int] = (),
        pool: Any = None,
        order: Order | None = None,
        warmup: int = 3,
        clone: bool = False,
        generators: Sequence[torch.Generator] = (),
    ) -> None:
        self.function, self.name, self.clone = function, name_of(function), clone
        self._device, self._order = device, order or Order()
        self._launched: list[float] = []
        self._replayed: deque[float] = deque(maxlen=_REMEMBERED)
        self._calls, self._measured = 0, False
        if device.capturing():
            raise LaunchError(
                "cannot capture", self.name, "the current stream is being captured into a CUDA graph",
                "a stream that runs", "Call the function itself: it becomes part of the graph under way",
            )  # fmt: skip
        with self._order.lock:
            self._inputs = Inputs(self.name, structure, leaves, stays, device.device)
            with device.keeping(generators), _casts_anew(), device.aside() as stream:
                self._warm_up(leaves, warmup)
                recording = device.record(self.name, self._call, stream, pool, generators)
            self._outputs = Outputs(recording.result)
            self._replay, self.pool = recording.replay, recording.pool
            self._nodes, self._pool_bytes = recording.nodes, recording.bytes
            self._order.last = device.stream()

    def _call(self) -> Any:
        args, kwargs = self._inputs.call()
        return self.function(*args, **kwargs)

    def _warm_up(self, leaves: Sequence[Any], times: int) -> None:
        """Calls before the capture: what is compiled, loaded or allocated once must not happen during it."""
        versions = self._inputs.versions()
        for i in range(times):
            self._device.synchronize()
            start = perf_counter()
            self._call()
            if i:  # the first one compiles
                self._launched.append(perf_counter() - start)
        written = self._inputs.written_since(versions)
        if written:
            raise ArgumentError(
                "cannot capture", self.name, f"it writes {written} in place",
                "a function that leaves its arguments as they are: a replay has copies of them",
                "Return the new value; state that stays (a cache) belongs to the function, not to its arguments",
            )  # fmt: skip

    def replay(self, *args: Any, **kwargs: Any) -> Any:
        """Copies the arguments into the graph's buffers and launches it on the caller's current stream.

        Without any argument it replays on what the buffers (:attr:`inputs`) hold.

        Returns: what the function returned, nested alike. The tensors are the same at every replay, which overwrites
        them; with ``clone=True`` they are new ones.
        Raises:
            ArgumentError: arguments of another nesting, shape, dtype, device or stride, another constant, or a tensor
                that requires grad.
            LaunchError: the current stream is being captured.
        """
        if args or kwargs:
            structure, leaves = flatten(args, kwargs)
            if not self._inputs.fits(structure, leaves):
                raise self._inputs.explain(structure, leaves)
            return self.run(leaves)
        return self.run(self._inputs.leaves)

    __call__ = replay

    def run(self, leaves: Sequence[Any]) -> Any:
        """A replay on leaves that are known to fit."""
        device, order = self._device, self._order
        start = perf_counter()
        if device.capturing():
            raise LaunchError(
                "cannot replay", self.name, "the current stream is being captured into a CUDA graph",
                "a stream that runs", "Call the function itself: it becomes part of the graph under way",
            )  # fmt: skip
        with order.lock:
            stream = device.stream()
            if stream != order.last:
                device.order(order.last, self._inputs.buffers)
                order.last = stream
            self._inputs.fill(leaves)
            self._replay()
            self._calls += 1
            result = self._outputs.fresh() if self.clone else self._outputs.value
        self._replayed.append(perf_counter() - start)
        return result

    def fits(self, structure: Structure, leaves: Sequence[Any]) -> bool:
        """Whether :meth:`run` may be called on these leaves."""
        return self._inputs.fits(structure, leaves)

    @property
    def order(self) -> Order:
        """What its replays wait for, for captures that share its memory."""
        return self._order

    @property
    def inputs(self) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """The arguments that the graph reads, ``args, kwargs``: whoever writes there need not have them copied."""
        args, kwargs = self._inputs.call()
        return tuple(args), kwargs

    @property
    def outputs(self) -> Any:
        """The results that every replay writes."""
        return self._outputs.value

    @property
    def report(self) -> GraphReport:
        """Nodes, memory, and host times as far as they are known; nothing is run for it, see :meth:`measure`."""
        return GraphReport(
            self.name, self._nodes, self._inputs.bytes, self._pool_bytes, median(self._launched),
            median(self._replayed), self._calls, self._measured,
        )  # fmt: skip

    def measure(self, calls: int = 50) -> GraphReport:
        """Times the function and its replay in turn, ``calls`` times each, and returns the report.

        The device is idle before each, so that none waits for room in the queue. The arguments are the buffers. Both
        really run: a training step that is measured has trained.
        """
        launched: list[float] = []
        replayed: list[float] = []
        for i in range(calls + 1):
            for into, run in ((launched, self._call), (replayed, self.replay)):
                self._device.synchronize()
                start = perf_counter()
                run()
                if i:
                    into.append(perf_counter() - start)
        self._device.synchronize()
        self._launched, self._replayed, self._measured = launched, deque(replayed, _REMEMBERED), True
        return self.report

    def __repr__(self) -> str:
        return f"<captured {self.name}>"


def name_of(function: Callable[..., Any]) -> str:
    """A function's name, or the type of a module or another callable."""
    return getattr(function, "__qualname__", "") or type(function).__name__


@contextmanager
def _casts_anew() -> Iterator[None]:
    """Autocast keeps its casts of weights until it ends; a graph must not read what dies then."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
