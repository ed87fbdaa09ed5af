"""The devices that conformance runs on. Floor 7."""

from __future__ import annotations

from ..cache import Cache
from ..errors import ArgumentError, MissingDependencyError
from .execute import Executor

DEVICES = ("auto", "sim", "cuda")


def executor_for(device: str, cache: Cache | None = None, *, ahead: bool = True, sanitize: bool = False) -> Executor:
    """The executor of a device word. ``auto`` is the GPU where there is one, else the simulator.

    ``ahead`` and ``sanitize`` are the simulator's; with ``sanitize``, ``auto`` is the simulator.

    Raises:
        ArgumentError: for an unknown word, or ``sanitize`` on a GPU.
        MissingDependencyError: where ``cuda`` has no GPU, driver or CuPy, or the simulator no compiler or no headers:
            cases that were all skipped would prove nothing.
    """
    if device not in DEVICES:
        raise ArgumentError("unknown device", repr(device), "", f"one of {', '.join(DEVICES)}")
    if device == "cuda" and sanitize:
        raise ArgumentError(
            "cannot sanitize", "a GPU run", "device 'cuda'", "the simulator", "On a GPU use compute-sanitizer"
        )
    if device != "sim" and not sanitize:
        from .gpu import GpuExecutor

        try:
            return GpuExecutor(cache)
        except MissingDependencyError:
            if device == "cuda":
                raise
    from .. import simulator
    from .simulated import SimExecutor

    simulator.require(cache)
    return SimExecutor(cache, ahead=ahead, sanitize=sanitize)
