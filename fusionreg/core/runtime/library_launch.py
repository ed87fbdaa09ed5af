"""A prepared launch that is a call of a library. Floor 6."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ..registry.library_calls import PreparedCall
from .driver import Driver

if TYPE_CHECKING:
    from .launch import Allocation
    from .libraries import Library, Place


class LibraryLaunch:
    """Hands a library the addresses of a call's arrays, on the caller's stream."""

    reason = ""
    guard: Callable[[], bool] | None = None

    def __init__(
        self,
        *,
        kernel: str,
        driver: Driver,
        prepared: PreparedCall,
        sources: Sequence[int],
        library: Library,
        place: Place,
        allocation: Allocation,
        several_devices: bool,
    ) -> None:
        """``sources``: places of the present inputs among those of the fusion."""
        self.kernel, self.calls, self.driver, self.prepared = kernel, 0, driver, prepared
        self.sources, self.device = tuple(sources), place.ordinal
        self.pointer, self.stream = library.pointer, library.stream()
        self.outputs, self.scratch = allocation.outputs, allocation.workspace
        self.several_devices = several_devices

    def _enqueue(self, pointers: Sequence[int], scratch: int) -> None:
        driver, stream = self.driver, self.stream(self.device)
        if not self.several_devices or driver.current() == driver.context(self.device):
            self.prepared(pointers, scratch, stream)
            return
        driver.push(self.device)
        try:
            self.prepared(pointers, scratch, stream)
        finally:
            driver.pop()

    def run(self, inputs: Sequence[Any], outputs: tuple[Any, ...]) -> tuple[Any, ...]:
        pointer = self.pointer
        scratch = None if self.scratch is None else self.scratch()
        pointers = [*(pointer(inputs[i]) for i in self.sources), *map(pointer, outputs)]
        self._enqueue(pointers, 0 if scratch is None else pointer(scratch))
        self.calls += 1
        return outputs

    def binder(self, inputs: Sequence[Any], outputs: tuple[Any, ...]) -> Callable[[], Any]:
        scratch = None if self.scratch is None else self.scratch()
        pointed = [*(inputs[i] for i in self.sources), *outputs]
        pointers = tuple(map(self.pointer, pointed))
        at = 0 if scratch is None else self.pointer(scratch)

        def again() -> None:
            self._enqueue(pointers, at)

        again.alive = (pointed, scratch)  # type: ignore[attr-defined]
        return again
