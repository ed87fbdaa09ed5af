"""A kernel that the simulator has compiled, and how it is launched."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import ArgumentError, LaunchError, SimulatorError
from ..targets import STATIC_SHARED, TARGETS
from . import abi, library
from .build import Builder, Built
from .checks import BankConflict, Checks, SimReport, parse_order
from .faults import fault, order_dependence, unwritten
from .memory import Guarded, Pointer, Region, regions
from .toolchain import Mode

if TYPE_CHECKING:
    from ..problem import Launch

#: Threads that may be resident together (cooperative grids): each has a stack of its own.
MAX_RESIDENT = 65_536
_STACK = {"fast": 128 << 10, "checked": 256 << 10, "sanitize": 512 << 10}
_POINTERS = (2, 3)


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

        Arrays behind non-const pointers receive the results. ``names``: of the arguments, for messages. ``inout``: names of outputs
        whose content the kernel reads. :class:`ArgumentError` when arguments do not fit the parameters, :class:`LaunchError` when the
        launch passes a limit of the target, :class:`SimulatorError` (``facts``: detector, tensor, offset, thread, block,
        file, line) when a check finds a fault.
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
        resident = self._check(launch)
        blocks = launch.grid[0] * launch.grid[1] * launch.grid[2]
        workers = max(1, min(checks.workers, blocks // resident)) if mode == "fast" else 1
        built, units = self._units(mode, resident * workers)
        self._check_shared(built, units[0], launch)
        values, pointers = self.convert(units[0], args, names, inout)
        found = regions([p for p in pointers if p is not None]) if checks.guard or checks.accesses else []
        run = Run(self, built, units, launch, checks, mode, workers, resident)
        if not found:
            result = run.once(values, [], checks.orders[0])
            return run.report(result, started)
        first: abi.Result | None = None
        expected: list[np.ndarray] = []
        with Guarded(run.runtime, found) as memory:
            holders = {i: ctypes.c_void_p(memory.address(p)) for i, p in enumerate(pointers) if p is not None}
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
            return built, units

    def _refuse_globals(self, built: Built) -> None:
        for v in built.variables:
            if not v.local:
                raise SimulatorError(
                    "cannot simulate", self.name, f"variable {v.name} stands outside of functions without a value",
                    "shared memory inside of functions, and __device__ variables with an initialiser",
                    "Write `= 0`, or keep the state in a workspace", detector="unsupported", variable=v.name,
                )  # fmt: skip

    def _check(self, launch: Launch) -> int:
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
                "cannot launch", self.name, f"{fixed} bytes of static and {launch.shared_memory} of dynamic shared memory",
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
        parameters = unit.info.parameters[: unit.info.n_parameters]
        if len(args) != len(parameters):
            raise ArgumentError(
                "cannot launch",
                self.name,
                f"{len(args)} arguments",
                f"{len(parameters)}, as many as the kernel has parameters",
            )
        kinds = {i: a.kind for i, a in enumerate(self.arguments)} if len(self.arguments) == len(args) else {}
        known = names or [a.parameter for a in self.arguments] if len(self.arguments) == len(args) else names
        values: list[Any] = []
        pointers: list[Pointer | None] = []
        for i, (value, p) in enumerate(zip(args, parameters, strict=True)):
            name = known[i] if known else f"argument {i}"
            pointer = None
            if p.kind in _POINTERS and value is not None:
                pointer = self._pointer(name, value, p, kinds.get(i, "output"), name in inout)
                values.append(ctypes.c_void_p(pointer.array.ctypes.data))
            else:
                values.append(self._number(name, value, p))
            pointers.append(pointer)
        return values, pointers

    def _pointer(self, name: str, value: Any, p: abi.Parameter, kind: str, inout: bool) -> Pointer:
        if not isinstance(value, np.ndarray):
            raise ArgumentError("cannot launch", self.name, f"{name} is a {type(value).__name__}", "a NumPy array")
        writable = p.kind == 2
        if writable and not value.flags.writeable:
            raise ArgumentError(
                "cannot launch", self.name, f"{name} is a read-only array", "one that the kernel can write"
            )
        if p.pointee > 1 and value.itemsize not in (1, p.pointee):
            raise ArgumentError(
                "cannot launch", self.name, f"{name} has dtype {value.dtype}", f"elements of {p.pointee} bytes"
            )
        return Pointer(name, value, writable, inout, writable and not inout and kind == "output")

    def _number(self, name: str, value: Any, p: abi.Parameter) -> Any:
        if value is None and p.kind in _POINTERS:
            return ctypes.c_void_p()
        if p.kind == 4:
            raw = bytes(value)
            if len(raw) != p.bytes:
                raise ArgumentError(
                    "cannot launch", self.name, f"{name} has {len(raw)} bytes", f"a structure of {p.bytes}"
                )
            return ctypes.create_string_buffer(raw, len(raw))
        if isinstance(value, np.ndarray) or p.kind in _POINTERS:
            raise ArgumentError(
                "cannot launch",
                self.name,
                f"{name} is a {type(value).__name__}",
                "a number" if p.kind < 2 else "an array",
            )
        if p.kind == 1:
            return (ctypes.c_float if p.bytes == 4 else ctypes.c_double)(float(value))
        integer = {1: ctypes.c_int8, 2: ctypes.c_int16, 4: ctypes.c_int32, 8: ctypes.c_int64}[p.bytes]
        if not -(1 << (8 * p.bytes - 1)) <= int(value) < 1 << (8 * p.bytes):
            raise ArgumentError("cannot launch", self.name, f"{name} is {value}", f"an integer of {p.bytes} bytes")
        return integer(int(value))


class Run:
    """Launches of one kernel in one geometry."""

    def __init__(
        self,
        kernel: SimKernel,
        built: Built,
        units: Sequence[library.LoadedUnit],
        launch: Launch,
        checks: Checks,
        mode: Mode,
        workers: int,
        resident: int,
    ) -> None:
        self.kernel, self.built, self.units, self.checks, self.mode = kernel, built, units, checks, mode
        self.runtime = library.runtime(kernel.builder.runtime)
        count = workers * resident
        self.copies = (abi.Copy * count)(*(u.copy() for u in units[:count]))
        three = abi.Three
        self.request = abi.Request(
            copies=self.copies, n_copies=count, workers=workers, grid=three(*launch.grid), block=three(*launch.block),
            cluster=three(*(launch.cluster or (1, 1, 1))), dynamic_shared=launch.shared_memory, stack_bytes=_STACK[mode],
            checked=checks.accesses, races=checks.accesses and checks.races, uninitialised=checks.accesses and checks.uninitialised,
            banks=checks.accesses and checks.banks, cooperative=launch.cooperative, timeout_ms=int(1000 * checks.timeout),
        )  # fmt: skip
        self.banks: tuple[BankConflict, ...] = ()

    def once(self, values: Sequence[Any], found: Sequence[Region], order: str) -> abi.Result:
        """One run; :class:`SimulatorError` when it ends in a fault."""
        pointers = (abi.vp * max(1, len(values)))(*(ctypes.addressof(v) for v in values))
        buffers = (abi.Buffer * max(1, len(found)))()
        for b, r in zip(buffers, found, strict=False):
            b.base, b.bytes, b.writable, b.initialised = r.base, r.bytes, r.writable, r.initialised
            b.mask = r.mask.ctypes.data if r.mask is not None else None
        request = self.request
        request.args, request.buffers, request.n_buffers = pointers, buffers, len(found)
        request.order, request.seed = parse_order(order)
        result = abi.Result()
        self.runtime.frsim_launch(ctypes.byref(request), ctypes.byref(result))
        if result.failed:
            raise fault(self.kernel.name, self.built, result, [r.names for r in found], order)
        if self.checks.accesses and self.checks.unwritten:
            unwritten(self.kernel.name, found, buffers)
        return result

    def report(self, result: abi.Result, started: float) -> SimReport:
        counters = {n: int(getattr(result, n)) for n in abi.COUNTERS}
        sites = result.banks[: result.n_banks]
        lines = library.source_lines(self.built.data, [s.pc for s in sites])
        banks = tuple(
            BankConflict(library.place_text(line) or f"offset {s.pc:#x}", s.instructions, s.wavefronts, s.ideal)
            for s, line in zip(sites, lines, strict=True)
        )
        return SimReport(counters, self.checks.orders, banks, time.perf_counter() - started)
