"""One launch of a compiled kernel: the request to the runtime library, and what comes back."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from . import abi, library
from .build import Built
from .checks import Checks, SharedAccess, SimReport, parse_order
from .faults import fault, never_waits, unwritten
from .memory import Region

if TYPE_CHECKING:
    from ..problem.geometry import Launch

#: Bytes of one thread's stack: one size for both builds that run here, so that launches of either reuse the stacks.
STACK = 256 << 10
#: Sites of shared-memory accesses that a launch can tell apart.
SITES = 4096


class Run:
    """Launches of one kernel in one geometry."""

    def __init__(
        self,
        whom: str,
        built: Built,
        runtime: ctypes.CDLL,
        units: Sequence[library.LoadedUnit],
        launch: Launch,
        checks: Checks,
        workers: int,
    ) -> None:
        self.whom, self.built, self.runtime, self.checks = whom, built, runtime, checks
        self.copies = (abi.Copy * len(units))(*(u.copy() for u in units))
        three, checked = abi.Three, checks.accesses
        self.request = abi.Request(
            copies=self.copies, n_copies=len(units), workers=workers, grid=three(*launch.grid),
            block=three(*launch.block), cluster=three(*(launch.cluster or (1, 1, 1))),
            dynamic_shared=launch.shared_memory, stack_bytes=STACK,
            checked=checked, races=checked and checks.races, uninitialised=checked and checks.uninitialised,
            banks=checked and checks.banks, cooperative=launch.cooperative, programmatic=launch.programmatic,
            timeout_ms=int(1000 * checks.timeout),
        )  # fmt: skip
        self.sites: ctypes.Array[abi.BankSite] | None = None

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
        request.n_sites = 0
        if request.banks and self.sites is None:  # of the first order, as all that is reported
            self.sites = (abi.BankSite * SITES)()
            request.sites, request.n_sites = self.sites, SITES
        result = abi.Result()
        self.runtime.frsim_launch(ctypes.byref(request), ctypes.byref(result))
        if result.failed:
            raise fault(self.whom, self.built, result, [r.names for r in found], order)
        if request.programmatic and not result.waits:
            raise never_waits(self.whom)
        if self.checks.accesses and self.checks.unwritten:
            unwritten(self.whom, found, buffers)
        return result

    def report(self, result: abi.Result, started: float) -> SimReport:
        counters = {n: int(getattr(result, n)) for n in abi.COUNTERS}
        return SimReport(counters, self.checks.orders, self._shared(result), time.perf_counter() - started)

    def _shared(self, result: abi.Result) -> tuple[SharedAccess, ...]:
        """By line: a loop that the compiler unrolls is one site."""
        sites = self.sites[: min(result.n_banks, SITES)] if self.sites is not None else []
        lines = library.source_lines(self.built.data, [s.pc for s in sites])
        found: dict[str, SharedAccess] = {}
        for s, line in zip(sites, lines, strict=True):
            where = library.place_text(line) or f"offset {s.pc:#x}"
            old = found.get(where, SharedAccess(where, 0, 0, 0, (0,) * abi.BANKS))
            found[where] = SharedAccess(
                where, old.instructions + s.instructions, old.wavefronts + s.wavefronts, old.ideal + s.ideal,
                tuple(a + b for a, b in zip(old.words, s.words, strict=True)),
            )  # fmt: skip
        return tuple(found.values())
