"""The search for the best parameters of kernels: tried per class of problems, kept in the cache. Floor 7.

Looking them up is the runtime's business; see :mod:`.tuned`.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ..cache import Cache
from ..compiler import ObjectCode, compile_all
from ..errors import FusionregError
from ..frozen import EMPTY, FrozenDict
from ..problem import Candidate, Problem, combinations
from ..problem.selection import estimated
from ..render import KernelSource, render
from ..targets import target
from .measure import Entrant, Progress
from .model import agreement, predict
from .shipped import ShippedRow, class_text, kernel_digest, path_of, problem_class, write
from .statistics import spread
from .subject import Subject
from .tuned import KIND, kept, key_of, tuning_environment

if TYPE_CHECKING:
    from ..registry.catalog import Catalog
    from ..registry.entries import KernelEntry

#: Times within this share of the fastest count as equal: the combination that the spec names first wins.
CLOSE = 0.01
#: Combinations of one kernel that are tried, at most.
TRIED = 32
#: Combinations that are timed in full, at most, after a look at all that are tried.
FINAL = 4


Make = Callable[["KernelEntry", Mapping[str, Any]], Entrant]


class Tuner(Protocol):
    """A device that combinations can be tried on; ``core.bench.Bench`` with one more ability."""

    target: str
    environment: Mapping[str, str]

    def trials(self, subject: Subject) -> AbstractContextManager[Make]:
        """Puts a workload in place; the function makes an entrant of a kernel with parameters."""
        ...

    def lost(self) -> str:
        """As of ``core.bench.Bench``."""
        ...


@dataclass(frozen=True)
class Tried:
    """One combination that was timed: milliseconds at a glance, and the share of what the device can issue that the
    model of throughput predicts."""

    params: FrozenDict[str, Any]
    ms: float
    model: float


@dataclass(frozen=True)
class Tuned:
    """What tuning one kernel on one workload found.

    Attributes:
        kernel: ``fusion/kernel``.
        workload: its name.
        params: the best ones; empty where none could be timed, and for a kernel that has none.
        ms, default_ms: medians of the best, and of what dispatch would have taken.
        tried: combinations timed.
        kept: whether the cache had them.
        reason: why there are none; of one combination that failed, where others did not.
        model: share of what the device can issue that the model of throughput predicts for the best ones.
        agreement: rank correlation of that model with the times of all combinations tried.
        trials: all of them.
        subject, entry: the workload made concrete, and the kernel, where there are parameters.
    """

    kernel: str
    workload: str
    params: FrozenDict[str, Any] = EMPTY
    ms: float | None = None
    default_ms: float | None = None
    tried: int = 0
    kept: bool = False
    reason: str = ""
    model: float | None = None
    agreement: float | None = None
    trials: tuple[Tried, ...] = ()
    subject: Subject | None = field(default=None, repr=False)
    entry: KernelEntry | None = field(default=None, repr=False)


def order(candidates: Sequence[Candidate], problem: Problem, multiprocessors: int) -> list[Candidate]:
    """The most promising first: by the kernel's own estimate, then by the model of throughput, then as the spec has
    them."""
    device = target(problem.target)

    def rank(at: int) -> tuple[float, float, int]:
        candidate = candidates[at]
        seconds = estimated(candidate.kernel, problem, candidate.params)
        return seconds, -predict(candidate, device, multiprocessors).share, at

    return [candidates[i] for i in sorted(range(len(candidates)), key=rank)]


def winner(times: Mapping[int, float]) -> int:
    """The first index whose time is within :data:`CLOSE` of the least: the same on every run that sees such times."""
    least = min(times.values())
    return min(i for i, ms in times.items() if ms <= least * (1.0 + CLOSE))


def tune(
    subjects: Iterable[Subject],
    tuner: Tuner,
    cache: Cache,
    *,
    again: bool = False,
    time_limit: float | None = None,
    progress: Progress | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[Tuned, ...]:
    """Tries the parameters of every kernel that accepts the workloads, and keeps the best in the cache.

    Numbers are checked before anything is timed; a combination that differs from float64 never wins.

    Args:
        again: try also what the cache knows.
        time_limit: seconds after which no further kernel is begun.
    """
    started, every, found, lost = clock(), tuple(subjects), [], ""
    environment = tuning_environment(tuner.environment)
    for at, subject in enumerate(every):
        if progress is not None:
            progress(at, len(every), f"{subject.entry.name} {subject.workload.name}")
        with ExitStack() as stack:
            make: Make | None = None  # arrays and references of a workload serve all of its kernels
            for chosen in subject.selection.accepted:
                kernel, name = chosen.kernel, subject.workload.name
                candidates = list(combinations(kernel, subject.problem))
                if len(candidates) < 2 and len(subject.selection.accepted) < 2:
                    continue  # neither parameters nor a kernel to choose
                key = key_of(subject.entry, kernel, subject.problem, environment)
                known = None if key is None or again else kept(cache, key)
                if known is not None:
                    found.append(_kept(subject, kernel, known))
                elif key is None:
                    found.append(Tuned(kernel.key, name, reason="it cannot be rendered"))
                elif lost:
                    found.append(Tuned(kernel.key, name, reason=lost))
                elif time_limit is not None and clock() - started >= time_limit:
                    found.append(Tuned(kernel.key, name, reason="no time left"))
                else:
                    make = make or stack.enter_context(tuner.trials(subject))
                    made = _tune(subject, kernel, candidates, chosen, tuner, make, cache)
                    lost = tuner.lost()
                    keep(made, key, cache, environment)
                    found.append(made)
    return tuple(found)


def keep(tuned: Tuned, key: str | None, cache: Cache, environment: Mapping[str, str]) -> None:
    """Has later calls on such a device take what tuning found. ``key``, ``environment``: of :func:`~.tuned.key_of` and
    :func:`~.tuned.tuning_environment`."""
    if tuned.ms is not None and key is not None:
        body = {"params": dict(tuned.params), "ms": tuned.ms, "default_ms": tuned.default_ms, "tried": tuned.tried}
        meta = {"name": tuned.kernel, "parts": {"workload": tuned.workload, **environment}}
        cache.put(KIND, key, json.dumps(body, sort_keys=True).encode(), meta)


def _tune(
    subject: Subject,
    kernel: KernelEntry,
    candidates: Sequence[Candidate],
    chosen: Candidate,
    tuner: Tuner,
    make: Make,
    cache: Cache,
) -> Tuned:
    """All of the most promising are looked at for a moment, and the fastest of them timed in full."""
    multiprocessors = int(tuner.environment.get("multiprocessors", "132"))
    tried = order(candidates, subject.problem, multiprocessors)[:TRIED]
    tried += [chosen] if chosen not in tried else []
    reason = ""
    codes = _compiled(subject, kernel, tried, cache)
    entrants: dict[int, Entrant] = {}
    looks: dict[int, float] = {}
    shares: dict[int, float] = {}
    rates: dict[int, float] = {}
    for candidate, code in zip(tried, codes, strict=True):
        at = candidates.index(candidate)
        try:
            if isinstance(code, FusionregError):
                raise code
            entrant = make(kernel, candidate.params)
            check = entrant.check()
            if not check.ok:
                reason = f"{dict(candidate.params)}: {check}"
                continue
            looks[at] = spread((entrant.glance or entrant.sample)()).median
        except (FusionregError, RuntimeError) as e:  # one that cannot be compiled or launched is no candidate
            reason = f"{dict(candidate.params)}: {e}"
            if tuner.lost():
                return Tuned(kernel.key, subject.workload.name, reason=reason)
            continue
        entrants[at] = entrant
        found = predict(candidate, target(subject.problem.target), multiprocessors, code)
        shares[at], rates[at] = found.share, 1.0 / found.seconds if found.seconds else 0.0
    if not looks:
        return Tuned(kernel.key, subject.workload.name, reason=reason or "nothing could be timed")
    own = candidates.index(chosen)
    last = sorted(looks, key=lambda i: (looks[i], i))[:FINAL] + ([own] if own in looks else [])
    times = {i: spread(entrants[i].sample()).median for i in dict.fromkeys(last)}
    best = winner(times)
    places = list(looks)
    return Tuned(
        kernel.key, subject.workload.name, candidates[best].params, times[best], times.get(own), len(looks),
        reason=reason, subject=subject, entry=kernel, model=shares[best],
        agreement=agreement([rates[i] for i in places], [looks[i] for i in places]),
        trials=tuple(Tried(candidates[i].params, looks[i], shares[i]) for i in places),
    )  # fmt: skip


def _compiled(
    subject: Subject, kernel: KernelEntry, tried: Sequence[Candidate], cache: Cache
) -> list[ObjectCode | FusionregError | None]:
    """Their code, compiled side by side; an error stands in the place of one that has none, None in that of a call."""
    units: list[KernelSource | FusionregError] = []
    if kernel.library is not None:
        return [None] * len(tried)
    for candidate in tried:
        try:
            units.append(render(subject.entry, kernel, subject.problem, candidate.params))
        except FusionregError as e:
            units.append(e)
    codes = iter(compile_all([u for u in units if isinstance(u, KernelSource)], cache, workers=os.cpu_count() or 1))
    return [u if isinstance(u, FusionregError) else next(codes) for u in units]


def _kept(subject: Subject, kernel: KernelEntry, known: Mapping[str, Any]) -> Tuned:
    return Tuned(
        kernel.key, subject.workload.name, FrozenDict(known["params"]), known.get("ms"), known.get("default_ms"),
        kept=True, subject=subject, entry=kernel,
    )  # fmt: skip


def ship(found: Iterable[Tuned], catalog: Catalog, environment: Mapping[str, str]) -> tuple[Path, ...]:
    """Writes what tuning found into the packages of the plugins that the kernels are of; the files.

    Raises: :class:`OSError` where a package cannot be written to.
    """
    files: dict[Path, list[ShippedRow]] = {}
    for tuned in found:
        if tuned.subject is None or tuned.entry is None or tuned.ms is None:
            continue
        problems = json.loads(class_text(problem_class(tuned.subject.problem)))
        row = ShippedRow(
            kernel=tuned.kernel, workload=tuned.workload, problems=problems, digest=kernel_digest(tuned.entry),
            params=tuned.params, ms=tuned.ms, default_ms=tuned.default_ms,
            **{name: environment.get(name, "") for name in ("gpu", "driver", "nvrtc")},
        )  # fmt: skip
        files.setdefault(path_of(tuned.entry.root, tuned.subject.problem.target), []).append(row)
    for path, rows in files.items():
        write(path, path.stem, rows, catalog)
    return tuple(files)
