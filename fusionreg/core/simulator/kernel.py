"""A kernel that the simulator has compiled, and how it is launched."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import LaunchError, SimulatorError
from ..targets import STATIC_SHARED, TARGETS
from . import abi, library
from .arguments import convert
from .build import Builder, Built
from .checks import Checks, SimReport
from .faults import order_dependence
from .memory import Guarded, Pointer, regions
from .run import Run
from .tensor_map import placed
from .toolchain import Mode

if TYPE_CHECKING:
    from ..problem import Launch

#: Threads that may be resident together (cooperative grids): each has a stack of its own.
MAX_RESIDENT = 65_536


class SimKernel:
    """One kernel. Builds of other kinds (instrumented, sanitized) are made when a launch first asks for them.

    Attributes:
        name: for messages.
        entry: C symbol.
        target: architecture whose limits a launch must keep.
        built: the library it was compiled to.
    """

    def __init__(
        self, text: str, entry: str, *, name: str, target: str, arguments: Sequence[Any], builder: Builder
    ) -> None:
        self.text, self.entry, self.name, self.target, self.builder = text, entry, name, target, builder
        self.arguments = tuple(arguments)
        self._loaded: dict[Mode, tuple[Built, list[library.LoadedUnit]]] = {}
        self._lock = threading.RLock()  # a loaded copy has one set of shared memory: one launch at a time

    def prepare(self, mode: Mode) -> Built:
        """Compiles the kernel in this mode unless it was; :class:`CompileError` when the host compiler refuses it."""
        return self._units(mode, 1 if mode != "sanitize" else 0)[0]

    def launch(
        self,
        args: Sequence[Any],
        launch: Launch,
        *,
        checks: Checks | None = None,
        names: Sequence[str] | None = None,
        inout: Collection[str] = (),
    ) -> SimReport:
        """Runs the kernel on NumPy arrays (any strides) and numbers, in the order of its parameters.

        Arrays behind non-const pointers receive the results. ``names``: of the arguments, for messages. ``inout``:
        names of outputs whose content the kernel reads.

        :class:`ArgumentError` when arguments do not fit the parameters, :class:`LaunchError` when the launch passes a
        limit of the target, :class:`SimulatorError` (``facts``: detector, tensor, offset, thread, block, file, line)
        when a check finds a fault.
        """
        checks = checks or Checks()
        if checks.sanitize:
            from .sanitize import launch_sanitized

            return launch_sanitized(self, args, launch, checks, names, inout)
        mode: Mode = "checked" if checks.accesses else "fast"
        with self._lock:
            return self._launch(mode, args, launch, checks, names, inout)

    def _launch(
        self,
        mode: Mode,
        args: Sequence[Any],
        launch: Launch,
        checks: Checks,
        names: Sequence[str] | None,
        inout: Collection[str],
    ) -> SimReport:
        started = time.perf_counter()
        resident = self.check(launch)
        blocks = launch.grid[0] * launch.grid[1] * launch.grid[2]
        workers = max(1, min(checks.workers, blocks // resident)) if mode == "fast" else 1
        built, units = self._units(mode, resident * workers)
        self._check_shared(built, units[0], launch)
        values, pointers = self.convert(units[0], args, names, inout)
        found = regions(pointers) if checks.guard or checks.accesses else []
        runtime = library.runtime(self.builder.runtime)
        run = Run(self.name, built, runtime, units[: resident * workers], launch, checks, workers)
        if not found:
            result = run.once(values, [], checks.orders[0])
            return run.report(result, started)
        first: abi.Result | None = None
        expected: list[np.ndarray] = []
        with Guarded(runtime, found) as memory:
            maps = [getattr(a, "layout", None) for a in args]
            holders = {i: placed(maps[i], memory.address(p)) for i, p in enumerate(pointers) if p is not None}
            for order in checks.orders:
                memory.reset()
                result = run.once([holders.get(i, v) for i, v in enumerate(values)], found, order)
                memory.check(self.name)
                results = memory.results()
                if first is None:
                    first, expected = result, results
                elif checks.deterministic:
                    order_dependence(self.name, found, expected, results, checks.orders[0], order)
            memory.copy_back()
        assert first is not None
        return run.report(first, started)

    def unit(self) -> library.LoadedUnit:
        """A loaded copy, for what it says about its parameters."""
        return self._units("fast", 1)[1][0]

    def _units(self, mode: Mode, count: int) -> tuple[Built, list[library.LoadedUnit]]:
        with self._lock:
            if mode not in self._loaded:
                library.runtime(self.builder.runtime)
                built = self.builder.unit(self.text, self.entry, self.target, mode, self.name)
                self._refuse_globals(built)
                self._loaded[mode] = built, []
            built, units = self._loaded[mode]
            while len(units) < count:
                units.append(library.LoadedUnit(built.data, f"unit-{self.entry[:60]}", built.variables))
            self.builder.loaded(self, sum(len(loaded) for _, loaded in self._loaded.values()))
            return built, units

    def unload(self) -> bool:
        """Frees all loaded copies, which the next launch loads again; False, where a launch uses them now."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            for _, units in self._loaded.values():
                while units:
                    units.pop().close()
            return True
        finally:
            self._lock.release()

    def _refuse_globals(self, built: Built) -> None:
        for v in built.variables:
            if not v.local:
                raise SimulatorError(
                    "cannot simulate", self.name, f"variable {v.name} stands outside of functions without a value",
                    "shared memory inside of functions, and __device__ variables with an initialiser",
                    "Write `= 0` (with g++), or keep the state in a workspace", detector="unsupported", variable=v.name,
                )  # fmt: skip

    def check(self, launch: Launch) -> int:
        """The number of blocks that are resident together; :class:`LaunchError` beyond the target's limits."""
        device = TARGETS.get(self.target)
        if device is not None and hasattr(launch, "violation"):
            wrong = launch.violation(device)
            if wrong:
                raise LaunchError("cannot launch", self.name, wrong, f"a launch within the limits of {device.name}")
        threads, blocks = (
            launch.block[0] * launch.block[1] * launch.block[2],
            launch.grid[0] * launch.grid[1] * launch.grid[2],
        )
        if blocks < 0 or not 1 <= threads <= 1024:
            raise LaunchError(
                "cannot launch", self.name, f"grid {launch.grid}, block {launch.block}", "1 to 1024 threads a block"
            )
        cluster = tuple(launch.cluster) or (1, 1, 1)
        if any(g % c for g, c in zip(launch.grid, cluster, strict=True)):
            raise LaunchError(
                "cannot launch", self.name, f"grid {launch.grid} in clusters of {cluster}", "whole clusters"
            )
        resident = blocks if launch.cooperative else cluster[0] * cluster[1] * cluster[2]
        if resident * threads > MAX_RESIDENT:
            raise SimulatorError(
                "cannot simulate", self.name, f"{resident} blocks of {threads} threads that must be resident together",
                f"at most {MAX_RESIDENT} threads", "Use a smaller problem", detector="unsupported",
            )  # fmt: skip
        return max(1, resident)

    def _check_shared(self, built: Built, unit: library.LoadedUnit, launch: Launch) -> None:
        device = TARGETS.get(self.target)
        fixed = sum(v.bytes for v in built.variables)
        if fixed > STATIC_SHARED or launch.shared_memory > unit.info.dynamic_bytes:
            raise LaunchError(
                "cannot launch", self.name,
                f"{fixed} bytes of static and {launch.shared_memory} of dynamic shared memory",
                f"at most {STATIC_SHARED} and {unit.info.dynamic_bytes}",
            )  # fmt: skip
        if device is not None and launch.shared_memory + fixed > device.shared_memory:
            raise LaunchError(
                "cannot launch", self.name, f"{launch.shared_memory + fixed} bytes of shared memory",
                f"at most {device.shared_memory} on {device.name}",
            )  # fmt: skip

    def convert(
        self, unit: library.LoadedUnit, args: Sequence[Any], names: Sequence[str] | None, inout: Collection[str]
    ) -> tuple[list[Any], list[Pointer | None]]:
        """The arguments as the kernel's parameters take them; :class:`ArgumentError` when they do not fit."""
        declared = self.arguments if len(self.arguments) == len(args) else ()
        known = list(names or (a.parameter for a in declared))
        known += [f"argument {i}" for i in range(len(known), len(args))]
        kinds = [a.kind for a in declared] or ["output"] * len(args)
        return convert(self.name, unit.info.parameters[: unit.info.n_parameters], args, known, kinds, inout)
