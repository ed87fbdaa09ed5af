"""A prepared launch that is a call of a library. Floor 6."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..registry.library_calls import PreparedCall
from .device_launch import DeviceLaunch, Opening


class LibraryLaunch(DeviceLaunch):
    """Hands a library the addresses of a call's arrays."""

    def __init__(self, opening: Opening, *, prepared: PreparedCall, sources: Sequence[int]) -> None:
        """``sources``: places of the present inputs among those of the fusion."""
        super().__init__(opening)
        self.prepared, self.sources = prepared, tuple(sources)

    def _enqueue(self, pointers: Sequence[int], scratch: int) -> None:
        stream = self.stream(self.device)
        if self.several_devices:
            self.in_context(lambda: self.prepared(pointers, scratch, stream))
        else:
            self.prepared(pointers, scratch, stream)

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
