"""How a kernel treats shared memory: run in the simulator on a small problem, its accesses counted. Floor 7."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

from ..bench import Subject
from ..conformance import cases
from ..conformance.coverage import problem_of
from ..conformance.execute import Job, prepare
from ..conformance.simulated import SimExecutor
from ..conformance.trial import Trial
from ..errors import FusionregError
from ..problem import Candidate, combinations, select
from ..simulator import Checks
from ..spec import Record

if TYPE_CHECKING:
    from ..cache import Cache

#: Multiprocessors of the device that is simulated: grids that fill a device stay small.
MULTIPROCESSORS = 2
#: Bytes of all tensors of the problem that is run, at most.
BYTES = 32 << 20
#: Seconds after which a launch is broken off.
TIMEOUT = 60.0


class Site(Record):
    """One place that accesses shared memory, added up over all warps."""

    where: str
    """``file:line`` of the template, as exact as the compiler's line table."""
    instructions: int
    """Warp-wide executions."""
    wavefronts: int
    """Passes that the 32 banks need for them."""
    ideal: int
    """Passes without any conflict."""
    words: tuple[int, ...]
    """What each of the 32 banks gave or took."""

    @property
    def conflicts(self) -> int:
        """Passes beyond those without any conflict."""
        return self.wavefronts - self.ideal

    @property
    def passes(self) -> float:
        """Wavefronts of one execution."""
        return self.wavefronts / self.instructions

    @property
    def least(self) -> float:
        """The same without any conflict."""
        return self.ideal / self.instructions


class SharedMemory(Record):
    """What one simulated launch did to shared memory."""

    problem: str = ""
    """What was run."""
    sites: tuple[Site, ...] = ()
    """Those with most conflicts first."""
    reason: str = ""
    """Why nothing was counted."""

    @property
    def conflicts(self) -> int:
        """Passes beyond those without any conflict, of all sites."""
        return sum(s.conflicts for s in self.sites)

    @property
    def wavefronts(self) -> int:
        return sum(s.wavefronts for s in self.sites)

    def load(self) -> tuple[tuple[int, float], ...]:
        """(accesses, weight) of each bank: words that it gave or took, and the same over those of the busiest one."""
        banks = [sum(column) for column in zip(*(s.words for s in self.sites), strict=True)]
        most = max(banks, default=0)
        return tuple((n, n / most if most else 0.0) for n in banks)


def watch(made: Subject, candidate: Candidate, cache: Cache | None = None) -> SharedMemory:
    """Runs ``candidate`` on a small problem like that of ``made``. What keeps it from running is the ``reason``."""
    for multiprocessors in (MULTIPROCESSORS, None):
        trial = _smallest(made, candidate, multiprocessors)
        if trial is not None:
            executor = SimExecutor(cache, ahead=False, target=made.problem.target, multiprocessors=multiprocessors)
            job = prepare(made.entry, candidate.kernel, trial, executor)
            return _watched(executor, job) if isinstance(job, Job) else SharedMemory(reason=job.reason)
    return SharedMemory(reason=f"with these parameters it takes no problem of at most {BYTES >> 20} MiB like this one")


def _smallest(made: Subject, candidate: Candidate, multiprocessors: int | None) -> Trial | None:
    """The smallest problem that the variant takes: axes that its unit is compiled for as asked, of the others one tile,
    or what conformance has, or as asked; a single element where nothing else is small enough. None where that is not
    small."""
    entry, kernel, asked = made.entry, candidate.kernel, made.trial
    base = cases.base_axes(entry)
    exact = asked.with_("small", params=candidate.params, exactly=True)
    leading = tuple(dict.fromkeys(((1,) * len(asked.leading), asked.leading)))
    levels = []
    for axis, extent in asked.axes.items():
        tile = min(extent, cases.tile_of(candidate.params, axis) or base.get(axis, extent))
        levels.append((extent,) if axis in kernel.spec.specialize else tuple(dict.fromkeys((tile, extent, 1))))
    found: list[tuple[int, int, int, Trial]] = []
    for at, (further, *extents) in enumerate(product(leading, *levels)):
        trial = exact.with_("small", axes=dict(zip(asked.axes, extents, strict=True)), leading=further)
        problem = problem_of(entry, trial, made.problem.target, multiprocessors)
        if problem is not None and not problem.empty:
            ones = sum(n == 1 for n in extents)
            found.append((ones, problem.bytes, at, trial))
    for _, size, _, trial in sorted(found, key=lambda row: row[:3]):
        if size <= BYTES and _takes(made, candidate, trial, multiprocessors):
            return trial
    return None


def _takes(made: Subject, candidate: Candidate, trial: Trial, multiprocessors: int | None) -> bool:
    problem = problem_of(made.entry, trial, made.problem.target, multiprocessors)
    assert problem is not None, "it was one before"
    accepted = select(made.entry, problem, pending=True).accepted
    return any(c.kernel is candidate.kernel for c in accepted) and any(
        c.params == candidate.params for c in combinations(candidate.kernel, problem)
    )


def _watched(executor: SimExecutor, job: Job) -> SharedMemory:
    checks = Checks(
        guard=True, accesses=True, races=False, uninitialised=False, unwritten=False, banks=True, timeout=TIMEOUT
    )
    try:
        _, report = executor.watch(executor.compile(job.source), job, float("nan"), checks)
    except FusionregError as e:
        return SharedMemory(problem=str(job.problem), reason=str(e))
    sites = (
        Site(where=s.where, instructions=s.instructions, wavefronts=s.wavefronts, ideal=s.ideal, words=s.words)
        for s in report.shared
    )
    return SharedMemory(problem=str(job.problem), sites=tuple(sorted(sites, key=lambda s: (-s.conflicts, s.where))))
