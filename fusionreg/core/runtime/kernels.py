"""Rendered, compiled and loaded kernels of one process, by variant. Floor 6."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from ..cache import Cache
from ..compiler import ObjectCode, compile_source
from ..compiler.nvrtc import binding
from ..compiler.nvrtc import version as nvrtc_version
from ..errors import LaunchError
from ..problem import Candidate, Problem
from ..problem.geometry import Launch
from ..registry.library_calls import PreparedCall
from ..render import KernelSource, render, variant
from ..targets import for_capability, target
from .driver import SHARED_WITHOUT_ASKING, Driver, driver

if TYPE_CHECKING:
    from ..registry.catalog import FusionEntry

#: Prepared calls of libraries kept, which are one for each problem; the oldest make room.
_KEPT = 4096


@dataclass(eq=False)
class Loaded:
    """A kernel in a device's context."""

    source: KernelSource
    code: ObjectCode
    module: Any
    function: int
    shared: int = 0

    def misfit(self, cuda: Driver, launch: Launch, device: int) -> str:
        """Why the device cannot have this launch, as its expressions alone could not tell; "" when it can.

        Shared memory that the code declares counts beside what the launch asks for, and a cooperative grid must be
        resident as a whole, with the registers that the compiler gave it. What fits has room made for it.
        """
        limit = target(self.code.target).shared_memory
        if launch.shared_memory + self.code.shared > limit:
            own = f"{self.code.shared} bytes of its own and {launch.shared_memory} of dynamic shared memory"
            return f"{own}, {self.code.target} has {limit}"
        self.allow(cuda, launch.shared_memory)
        if not launch.cooperative:
            return ""
        cuda.push(device)
        try:
            room = cuda.resident(self.function, launch.threads, launch.shared_memory, device)
        finally:
            cuda.pop()
        if launch.blocks <= room:
            return ""
        return f"a cooperative grid of {launch.blocks} blocks, {cuda.name(device)} holds {room} of them at once"

    def allow(self, cuda: Driver, shared: int) -> None:
        """Makes room for ``shared`` bytes of dynamic shared memory; the most that was asked for stays allowed."""
        if shared > self.shared and shared + self.code.shared > SHARED_WITHOUT_ASKING:
            cuda.allow_shared(self.function, shared, self.code.kernel)
            self.shared = shared


class Kernels:
    """What is loaded where. Variants are rendered and compiled once, then found by key."""

    def __init__(self, cache: Callable[[], Cache], observer: Callable[[ObjectCode], Any]) -> None:
        self._cache, self._observer = cache, observer
        self._loaded: dict[Any, Loaded] = {}
        self._simulated: dict[Any, tuple[KernelSource, Any]] = {}
        self._calls: dict[Any, PreparedCall] = {}

    def on_gpu(self, entry: FusionEntry, candidate: Candidate, problem: Problem, device: int) -> Loaded:
        """The kernel, loaded on ``device``; :class:`CompileError`, :class:`LaunchError` when it cannot be.

        Ask its :meth:`Loaded.misfit` before a launch.
        """
        key = (device, variant(entry, candidate.kernel, problem, candidate.params))
        found = self._loaded.get(key)
        if found is None:
            source = render(entry, candidate.kernel, problem, candidate.params)
            code = compile_source(source, self._cache(), (self._observer,))
            module, function = load(code, device)
            found = self._loaded[key] = Loaded(source, code, module, function)
        return found

    def library_call(self, candidate: Candidate, problem: Problem, device: int) -> PreparedCall:
        """The prepared call of a library; :class:`UnsupportedError` where it has none for the problem."""
        key = (device, candidate.kernel.key, problem)
        if key not in self._calls:
            while len(self._calls) >= _KEPT:
                self._calls.pop(next(iter(self._calls)))
            self._calls[key] = prepare_call(candidate, problem, device)
        return self._calls[key]

    def has(self, entry: FusionEntry, candidate: Candidate, problem: Problem, device: int) -> bool:
        """Whether the kernel is loaded, so that a launch of it can be captured."""
        if candidate.kernel.library is not None:
            return (device, candidate.kernel.key, problem) in self._calls
        return (device, variant(entry, candidate.kernel, problem, candidate.params)) in self._loaded

    def in_simulator(self, entry: FusionEntry, candidate: Candidate, problem: Problem) -> tuple[KernelSource, Any]:
        """The kernel, compiled for the simulator."""
        from .. import simulator

        key = variant(entry, candidate.kernel, problem, candidate.params)
        if key not in self._simulated:
            source = render(entry, candidate.kernel, problem, candidate.params)
            self._simulated[key] = source, simulator.compile(source, cache=self._cache())
        return self._simulated[key]


def prepare_call(candidate: Candidate, problem: Problem, device: int) -> PreparedCall:
    """A library's call for ``problem``, made with the device's context current."""
    call, cuda = candidate.kernel.library, driver()
    assert call is not None, "the kernel is a call of a library"
    cuda.push(device)
    try:
        return call.prepare(problem, device, candidate.launch.workspace)
    finally:
        cuda.pop()


def load(code: ObjectCode, device: int) -> tuple[Any, int]:
    """Loads a cubin into a device's primary context, through CuPy; returns what keeps it there, and its function."""
    binding()  # one typed error where CuPy is missing
    from cupy.cuda.function import Module

    cuda = driver()
    cuda.push(device)
    try:
        module = Module()
        module.load(code.cubin)
        return module, int(module.get_function(code.entry).ptr)
    except Exception as e:  # CuPy's CUDADriverError
        raise LaunchError(
            "cannot load", f"{code.kernel} on {cuda.name(device)}", str(e),
            f"a driver that takes code of NVRTC {code.nvrtc}",
            f"The driver supports CUDA {cuda.version()}; a newer driver or an older nvidia-cuda-nvrtc helps",
            target=code.target, nvrtc=code.nvrtc, driver=cuda.version(),
        ) from None  # fmt: skip
    finally:
        cuda.pop()


@lru_cache(maxsize=64)
def device_target(device: int) -> str:
    """The architecture to compile for on a device; :class:`LaunchError` when there is none."""
    cuda = driver()
    major, minor = cuda.capability(device)
    found = for_capability(major, minor)
    if found is None:
        raise LaunchError(
            "cannot use", cuda.name(device), f"compute capability {major}.{minor}",
            "8.0 or later, of a known major version",
            "NumPy arrays run in the simulator", capability=(major, minor), nvrtc=nvrtc_version(),
        )  # fmt: skip
    return found.name
