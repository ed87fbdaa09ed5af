"""The loop over workloads: verify, time, write each row as soon as it is there, resume where a run stopped. Floor 7."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache as remembered
from math import inf
from pathlib import Path
from statistics import median
from typing import Protocol

from ..cache import Cache
from ..errors import ExpressionError, FusionregError
from ..expressions import Expression
from .counting import counted, elements
from .floors import Ceilings, floor
from .results import Column, Result, Results, Run, file_name, read
from .statistics import Spread, spread
from .subject import Subject

#: How often every competitor has its turn: a clock that drifts then shows as spread, not as a difference.
ROUNDS = 2
#: From so many times the fastest one's time on a glance is all that a competitor gets, and a kernel of ours that is not
#: the one that dispatch picks.
FAR, BEHIND = 3.0, 1.5
#: Workloads whose kernels are compiled side by side before the first of them is measured.
AHEAD = 16

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Check:
    """One competitor's outputs against float64.

    Attributes:
        error: ‖got − exact‖ / ‖exact‖, the largest over its outputs.
        allowed: what the numerics contract allows.
        reason: what else is wrong (a NaN, a shape); "" for nothing.
    """

    error: float
    allowed: float
    reason: str = ""

    @property
    def ok(self) -> bool:
        return not self.reason and self.error <= self.allowed

    def __str__(self) -> str:
        return self.reason or f"error {self.error:.3g} against float64 — at most {self.allowed:.3g}"


@dataclass(frozen=True)
class Entrant:
    """One competitor, ready to run.

    Attributes:
        name: kernel name, or the peer's.
        ours: whether it is a kernel of the registry.
        computes: what it computes where that is not the workload itself.
        note: what else to know about its figures.
        reason: why it cannot run; then it is neither checked nor timed.
        check: runs it once and compares.
        sample: milliseconds of single launches, one round of them.
        glance: the same in a tenth of the time; None where there is no such thing.
    """

    name: str
    ours: bool = False
    computes: str = ""
    note: str = ""
    reason: str = ""
    check: Callable[[], Check] = field(default=lambda: Check(0.0, 0.0, "it was never run"), repr=False)
    sample: Callable[[], Sequence[float]] = field(default=tuple, repr=False)
    glance: Callable[[], Sequence[float]] | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Prepared:
    """A workload with its arrays in place: the entrants, ours first, and the code that the torch peers run."""

    entrants: tuple[Entrant, ...]
    peer: str = ""


class Bench(Protocol):
    """A device that can be timed.

    Attributes:
        gpu: its name.
        target: architecture that kernels are rendered for.
        multiprocessors: the device's own number.
        environment: what figures depend on beside the workload and the kernels; part of every digest.
        peers: competitors that it prepares, where they fit; names of :data:`~.results.PEERS`.
    """

    gpu: str
    target: str
    multiprocessors: int
    environment: Mapping[str, str]
    peers: tuple[str, ...]

    def ceilings(self) -> Ceilings:
        """Measures the device."""
        ...

    def prepare(self, subject: Subject) -> AbstractContextManager[Prepared]:
        """Puts a workload in place; its memory is free again afterwards."""
        ...

    def ready(self, subject: Subject) -> Sequence[str]:
        """Compiles what :meth:`prepare` and its entrants will ask for; what failed, and why."""
        ...

    def compile(self, subjects: Sequence[Subject]) -> Sequence[str]:
        """Compiles our kernels for workloads, as many at a time as there are processors; what failed, and why."""
        ...

    def lost(self) -> str:
        """Why the device is of no use to this process any more: an illegal access is not survived. "" while it is."""
        ...

    def executed(self, subjects: Sequence[Subject]) -> Sequence[int | None]:
        """Instructions that one launch of what dispatch picks executes, for each; None where nothing can count them."""
        ...


@dataclass(frozen=True)
class Outcome:
    """What one call of :func:`measure` did.

    Attributes:
        results: everything that the file holds now.
        path: the file.
        rows: the rows of this call's workloads, kept ones included.
        measured, kept, left: how many were measured, were there already, and were not begun.
        lost: why the device was of no use any more before the end, "" where it was to the last.
    """

    results: Results
    path: Path
    rows: tuple[Result, ...]
    measured: int = 0
    kept: int = 0
    left: int = 0
    lost: str = ""

    @property
    def ok(self) -> bool:
        """Whether no comparison of these workloads was refused."""
        return all(r.status == "measured" for r in self.rows)


def measure(
    subjects: Iterable[Subject],
    bench: Bench,
    folder: Path,
    *,
    again: bool = False,
    time_limit: float | None = None,
    progress: Progress | None = None,
    count: bool = True,
    cache: Cache | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Outcome:
    """Measures every subject that the folder's file has no figures for, and writes the file after each row.

    Args:
        bench: the device.
        folder: where the GPU's file is, or will be.
        again: measure also what is there already.
        time_limit: seconds after which no further workload is begun.
        count: whether the instructions of kernels are counted at the end, while there is time.
        cache: where compiled kernels are kept.
        clock: seconds, for tests.

    Raises: :class:`ModelError` when the file there is no file of results: nothing is overwritten then.
    """
    started = clock()
    path = folder / file_name(bench.gpu)
    results = read(path) if path.exists() else Results(gpu=bench.gpu)
    every = tuple(subjects)
    run: Run | None = None
    done: list[tuple[str, str]] = []
    kept, left, lost = 0, 0, ""
    old, compiled = results, 0
    digest = remembered(lambda subject: subject.digest(bench.environment))

    def stands(subject: Subject) -> bool:
        there = None if again else old.find(subject.key)
        return there is not None and holds(there, digest(subject), bench)

    for i, subject in enumerate(every):
        if stands(subject):
            done.append(subject.key)
            kept += 1
            continue
        if lost or (time_limit is not None and clock() - started >= time_limit):
            left += 1
            continue
        if progress is not None:
            progress(i, len(every), f"{subject.entry.name} {subject.workload.name}")
        if run is None:
            date = datetime.now(UTC).isoformat(timespec="seconds")
            run = Run(date=date, environment=bench.environment, ceilings=bench.ceilings())
        if i >= compiled:  # nothing is timed meanwhile
            compiled = i + AHEAD
            bench.compile([s for s in every[i:compiled] if not stands(s)])
        row = _row(subject, bench, digest(subject), run.ceilings)
        lost = bench.lost()
        results = results.with_row(row, run)
        results.write(path)
        done.append(subject.key)
    if count and done and not lost and (time_limit is None or clock() - started < time_limit):
        if progress is not None:
            progress(len(every), len(every), "instructions")
        found = counted(results, every, bench, done, cache)
        if found is not results:
            results = found
            results.write(path)
    if progress is not None:
        progress(len(every), len(every), "")
    rows = tuple(r for r in map(results.find, done) if r is not None)
    return Outcome(results, path, rows, len(done) - kept, kept, left, lost)


def holds(row: Result, digest: str, bench: Bench) -> bool:
    """Whether a row of the file stands for a measurement now: one that failed is tried again."""
    return row.status != "failed" and row.digest == digest and set(bench.peers) <= set(row.peers)


def _row(subject: Subject, bench: Bench, digest: str, ceilings: Ceilings) -> Result:
    """Measures one workload; whatever goes wrong with it is a row with its reason."""
    entry, workload, traffic = subject.entry, subject.workload, subject.traffic
    seconds, bound = floor(traffic, subject.graph, ceilings, subject.ops)
    chosen = subject.chosen.kernel.name if subject.chosen else ""
    status, reason, peer = "measured", "", ""
    columns: tuple[Column, ...] = ()
    try:
        with bench.prepare(subject) as prepared:
            peer = prepared.peer
            columns, reason = compete(prepared.entrants, chosen)
            status = "differs" if reason else "measured"
            lost = bench.lost()
            if lost:  # the first competitor that failed is what did it; the reasons of those after it are no news
                status, reason = "failed", next((f"{c.name}: {c.reason}" for c in columns if c.reason), lost)
    except (FusionregError, RuntimeError, MemoryError) as e:  # out of memory, a lost kernel: the next row may run
        status, reason = "failed", _said(e)
    digests = subject.kernel_digests(bench.environment)
    columns = tuple(c.model_copy(update={"digest": digests.get(c.name, "")}) if c.ours else c for c in columns)
    row = Result(
        fusion=entry.name, workload=workload.name, row=workload.row, mode=workload.mode, problem=str(subject.problem),
        digest=digest, run=0, status=status, reason=reason,
        read=traffic.read, written=traffic.written,
        flops=traffic.flops, floor_ms=seconds * 1e3, bound=bound, chosen=chosen, columns=columns,
        goal=workload.goal, peer=peer, peers=bench.peers, elements=elements(subject),
    )  # fmt: skip
    return row.model_copy(update={"goal_ms": goal_of(row)})


def compete(entrants: Sequence[Entrant], chosen: str) -> tuple[tuple[Column, ...], str]:
    """(columns, why the comparison is refused): every entrant is checked before any is timed.

    One that differs from float64 is not timed; where that is the kernel that dispatch picks, nothing is. A glance tells
    which are far behind: they have no turns after it.
    """
    checks: dict[str, Check] = {}
    wrong: dict[str, str] = {e.name: e.reason for e in entrants if e.reason}
    refused = ""
    for e in entrants:
        if e.name in wrong:
            continue
        try:
            checks[e.name] = e.check()
        except Exception as error:  # whatever a peer's compiler raises is that peer's reason, not the end of the run
            wrong[e.name] = _said(error)
            continue
        if not checks[e.name].ok:
            wrong[e.name] = str(checks[e.name])
            if e.ours and e.name == chosen:
                refused = f"{chosen} differs: {checks[e.name]}"
    ready = [] if refused else [e for e in entrants if e.name not in wrong]
    looks = _turn(ready, wrong, lambda e: (e.glance or e.sample)())
    times = {name: median(found) for name, found in looks.items()}
    least = min(times.values(), default=0.0)
    near = [e for e in ready if e.name == chosen or times.get(e.name, inf) <= (BEHIND if e.ours else FAR) * least]
    rounds = [_turn(near, wrong, lambda e: e.sample()) for _ in range(ROUNDS)]
    samples = looks | {e.name: [ms for found in rounds for ms in found.get(e.name, ())] for e in near}
    return tuple(_column(e, checks, samples, wrong, refused) for e in entrants), refused


def _turn(
    entrants: Sequence[Entrant], wrong: dict[str, str], sample: Callable[[Entrant], Sequence[float]]
) -> dict[str, Sequence[float]]:
    """Milliseconds of each, one after the other; what fails goes into ``wrong``."""
    found: dict[str, Sequence[float]] = {}
    for e in entrants:
        if e.name not in wrong:
            try:
                found[e.name] = sample(e)
            except Exception as error:
                wrong[e.name] = _said(error)
    return found


def _column(
    e: Entrant,
    checks: Mapping[str, Check],
    samples: Mapping[str, Sequence[float]],
    wrong: Mapping[str, str],
    refused: str,
) -> Column:
    time: Spread | None = spread(samples[e.name]) if e.name in samples and e.name not in wrong else None
    error = checks[e.name].error if e.name in checks else None
    if error is not None and not error < float("inf"):
        error = None  # JSON has no infinity; the reason says it
    reason = wrong.get(e.name, "the comparison was refused" if refused else "")
    return Column(name=e.name, ours=e.ours, computes=e.computes, note=e.note, time=time, error=error, reason=reason)


def goal_of(row: Result) -> float | None:
    """The goal's milliseconds from the row's own figures; None where one that it names is missing."""
    if not row.goal:
        return None
    known = {c.name: c.time.median for c in row.columns if c.time and not c.ours} | {"floor": row.floor_ms}
    if row.best and row.best.time:
        known["best"] = row.best.time.median
    goal = Expression.parse(row.goal)
    if not goal.names <= set(known):
        return None
    try:
        return float(goal(known))
    except (ExpressionError, TypeError, ValueError):
        return None


def _said(error: BaseException) -> str:
    """The first line of an error, with its kind where it is none of ours."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return text if isinstance(error, FusionregError) else f"{type(error).__name__}: {text}"[:300]
