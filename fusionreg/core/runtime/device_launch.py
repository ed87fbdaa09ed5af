"""What launches on a device have in common: where they run, what they take memory from, whose context is current.
Floor 6."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from .driver import Driver

if TYPE_CHECKING:
    from .launch import Allocation
    from .libraries import Library, Place

T = TypeVar("T")


@dataclass(frozen=True)
class Opening:
    """What a launch is opened with.

    Attributes:
        kernel: ``fusion/kernel``.
        driver: of the device.
        library: of the arrays; its stream and allocator serve.
        place: where they are.
        allocation: outputs and scratch memory.
        several: whether there are further devices, one of which may be the current one of a thread.
    """

    kernel: str
    driver: Driver
    library: Library
    place: Place
    allocation: Allocation
    several: bool


class DeviceLaunch:
    """A launch on one device, on the caller's stream."""

    reason = ""
    guard: Callable[[], bool] | None = None

    def __init__(self, opening: Opening) -> None:
        self.kernel, self.calls, self.driver = opening.kernel, 0, opening.driver
        self.device, self.several_devices = opening.place.ordinal, opening.several
        self.pointer, self.stream = opening.library.pointer, opening.library.stream()
        self.outputs, self.scratch = opening.allocation.outputs, opening.allocation.workspace

    def in_context(self, call: Callable[[], T]) -> T:
        """What ``call`` gives where the context of the device is the thread's current one."""
        driver = self.driver
        if driver.current() == driver.context(self.device):
            return call()
        driver.push(self.device)
        try:
            return call()
        finally:
            driver.pop()
