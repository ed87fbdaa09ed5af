"""The devices that conformance runs on. Floor 7."""

from __future__ import annotations

from ..cache import Cache
from ..errors import ArgumentError, MissingDependencyError
from .execute import Executor

DEVICES = ("auto", "sim", "cuda")


def executor_for(device: str, cache: Cache | None = None, *, ahead: bool = True) -> Executor:
    """The executor of a device word. ``auto`` is the GPU where there is one, else the simulator; ``ahead`` as there.

    Raises:
        ArgumentError: for an unknown word.
        MissingDependencyError: where ``cuda`` has no GPU, driver or CuPy, or the simulator no compiler or no headers:
            cases that were all skipped would prove nothing.
    """
    if device not in DEVICES:
        raise ArgumentError("unknown device", repr(device), "", f"one of {', '.join(DEVICES)}")
    if device != "sim":
        from .gpu import GpuExecutor

        try:
            return GpuExecutor(cache)
        except MissingDependencyError:
            if device == "cuda":
                raise
    from .. import simulator
    from .simulated import SimExecutor

    simulator.require(cache)
    return SimExecutor(cache, ahead=ahead)
