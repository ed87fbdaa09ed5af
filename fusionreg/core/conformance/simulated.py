"""Conformance in the simulator: guarded memory always, every check on one case of each unit. Floor 7."""

from __future__ import annotations

from dataclasses import replace
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import simulator
from ..cache import Cache
from ..errors import FusionregError, SimulatorError
from ..frozen import EMPTY
from ..render import KernelSource
from ..runtime.dispatch import SIMULATED
from ..runtime.launch import argument_values, simulated_arguments
from ..simulator import Checks, SimReport
from .execute import Job, Outputs, difference, empty_outputs

if TYPE_CHECKING:
    from ..registry.entries import KernelEntry
    from ..simulator.toolchain import Mode

#: Seconds after which one simulated launch is broken off.
TIMEOUT = 120.0


class SimExecutor:
    """The simulator. Launches run between guard pages; :meth:`stress` runs the instrumented build in three orders.

    A unit that was compiled ``alone`` has no other build: its launches are instrumented too, in the first two orders.
    """

    device = "sim"
    facts = EMPTY

    def __init__(
        self,
        cache: Cache | None = None,
        *,
        ahead: bool = True,
        sanitize: bool = False,
        target: str = SIMULATED,
        multiprocessors: int | None = None,
    ) -> None:
        """``target``, ``multiprocessors``: of the device that is simulated.

        ``ahead``: compile the instrumented build together with the plain one, not when :meth:`stress` needs it.

        ``sanitize``: stress each unit in a build with AddressSanitizer and UBSan too, in a process of its own.
        """
        self.target, self.multiprocessors = target, multiprocessors
        self._cache, self._ahead, self._sanitize = cache, ahead, sanitize
        self._codes: dict[str, Any] = {}
        self._alone: set[str] = set()
        self._locks: dict[str, Lock] = {}
        self._lock = Lock()
        self._begun = False  # the first compilation builds and loads the simulator's runtime, and does so alone

    def refusal(self, kernel: KernelEntry) -> str:
        return kernel.unsimulated

    def compile(self, source: KernelSource, *, stressed: bool = False, alone: bool = False) -> Any:
        with self._lock:
            lock = self._locks.setdefault(source.digest, Lock())
            if not self._begun:
                self._codes[source.digest] = self._built(source, stressed, alone)
                self._begun = True
        with lock:
            found = self._codes.get(source.digest)
            if found is None:
                found = self._codes[source.digest] = self._built(source, stressed, alone)
        if isinstance(found, FusionregError):  # every further case of the unit would take as long to fail
            raise found
        return found

    def _built(self, source: KernelSource, stressed: bool, alone: bool) -> Any:
        ahead = stressed and self._ahead
        if alone:
            self._alone.add(source.digest)
        modes: list[Mode] = ["checked"] if alone else ["fast", "checked"] if ahead else ["fast"]
        if ahead and self._sanitize:
            modes.append("sanitize")
        try:
            return simulator.compile(source, cache=self._cache, modes=modes)
        except FusionregError as e:
            return e

    def launch(self, code: Any, job: Job, poison: float) -> Outputs:
        order = "forward" if np.isnan(poison) else "reverse"
        if job.source.digest in self._alone:
            return self._run(code, job, poison, replace(Checks.full(), orders=(order,)))
        try:
            return self._run(code, job, poison, Checks(guard=True, orders=(order,), timeout=TIMEOUT))
        except SimulatorError as fault:
            if fault.facts.get("detector") != "guard":
                raise
            self._run(code, job, poison, Checks.full())  # which tells the thread and the line
            raise

    def stress(self, code: Any, job: Job, expected: Outputs) -> str:
        builds = {"instrumented": Checks.full()}
        if job.source.digest in self._alone:  # the first two orders were :meth:`launch`'s
            builds["instrumented"] = replace(Checks.full(), orders=Checks.full().orders[2:])
        if self._sanitize:
            builds["sanitized"] = Checks(sanitize=True, timeout=TIMEOUT)
        for build, checks in builds.items():
            differs = difference(expected, self._run(code, job, float("nan"), checks))
            if differs:
                return f"in the {build} build, {differs}"
        return ""

    def lost(self) -> str:
        return ""

    def _run(self, code: Any, job: Job, poison: float, checks: Checks) -> Outputs:
        return self.watch(code, job, poison, checks)[0]

    def watch(self, code: Any, job: Job, poison: float, checks: Checks) -> tuple[Outputs, SimReport]:
        """One launch under ``checks``: its outputs, and what the simulator counted."""
        outputs = empty_outputs(job, poison)
        values = argument_values(job.problem, job.source.arguments)
        scratch = np.full(job.candidate.launch.workspace, 0xFF, np.uint8)
        arrays = {**job.arrays, **outputs}
        arguments = simulated_arguments(job.source.arguments, values, arrays, scratch, job.candidate.maps)
        report = code.launch(arguments, job.candidate.launch, checks=checks)
        return outputs, report
