"""Running conformance over a registry. Floor 7."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ..cache import Cache
from ..errors import FusionregError, UnknownNameError
from ..proof.report import Evaluation, Report, Status
from ..render import KernelSource
from . import cases as derived
from .devices import executor_for
from .execute import Executor, Job, Mutate, execute, not_run, prepare
from .reference import References
from .trial import Trial

if TYPE_CHECKING:
    from ..registry.catalog import Catalog
    from ..registry.entries import FusionEntry, KernelEntry

#: Threads in all further cases of a unit for which no other build is worth its compilation.
FEW_THREADS = 8_192

Progress = Callable[[int, int, Evaluation], None]
"""Called after each evaluation with (done, total, it)."""


def run(
    catalog: Catalog,
    names: Sequence[str] = (),
    *,
    device: str = "auto",
    cases: derived.Extent = "all",
    kernels: Sequence[str] | None = None,
    progress: Progress | None = None,
    cache: Cache | None = None,
    executor: Executor | None = None,
    mutate: Mutate | None = None,
    part: tuple[int, int] = (0, 1),
) -> Report:
    """Every kernel of the named fusions on every case.

    Args:
        catalog: the registry.
        names: fusions; empty for all.
        device: ``sim``, ``cuda``, or ``auto``: a GPU where there is one.
        cases: ``quick`` or ``all``; see :func:`cases.derive`.
        kernels: kernel names or ``fusion/kernel`` keys to keep; None for all, in the simulator without calls of a
            library beside other kernels. Each runs as itself or is SKIPPED_UNSUPPORTED with a reason; no kernel ever
            stands in for another.
        progress: told of each evaluation.
        cache: for compiled units; None compiles anew.
        executor: the device itself, in place of ``device``.
        mutate: changes every rendered unit before it is compiled: how mutants are made.
        part: (i, n): of the cases of each kernel only the i-th of n runs of equal length, those of a unit side by side,
            so that the parts compile few units twice.

    Raises: :class:`UnknownNameError` for a fusion or kernel that nothing has.
    """
    entries = catalog.entries(names)
    on = executor or executor_for(device, cache)
    chosen = _kernels(entries, kernels, on.device)
    rendered: dict[Any, KernelSource] = {}
    jobs = [
        job
        for e, k in chosen
        for job in _part([prepare(e, k, t, on, mutate, rendered) for t in derived.derive(e, k, on.target, cases)], part)
    ]
    report = Report(environment=Report().environment | on_facts(on) | {"cases": cases})
    evaluations: list[Evaluation] = []
    for made in _evaluations(jobs, on, catalog, cases):
        evaluations.append(made)
        if progress is not None:
            progress(len(evaluations), len(jobs), made)
    return Report(tuple(evaluations), (), report.environment)


def on_facts(executor: Executor) -> dict[str, str]:
    """What an executor adds to a report's environment."""
    return {"device": executor.device, "target": executor.target, **getattr(executor, "facts", {})}


def run_one(
    catalog: Catalog, fusion: str, kernel: str, trial: Trial, executor: Executor, mutate: Mutate | None = None
) -> Evaluation:
    """One kernel on one trial; for tests and reproducers."""
    entry = catalog[fusion]
    job = prepare(entry, entry.kernel(kernel), trial, executor, mutate)
    return job if isinstance(job, Evaluation) else execute(job, executor, catalog.ops, stress=True)


def _kernels(
    entries: Sequence[FusionEntry], wanted: Sequence[str] | None, device: str
) -> list[tuple[FusionEntry, KernelEntry]]:
    everything = [(e, k) for e in entries for k in e.kernels]
    if wanted is None:
        own = {e.name for e, k in everything if not k.spec.library}
        return [(e, k) for e, k in everything if device != "sim" or not k.spec.library or e.name not in own]
    for name in wanted:
        if not any(name in (k.name, k.key) for _, k in everything):
            raise UnknownNameError.among("kernel", name, {n for _, k in everything for n in (k.name, k.key)})
    return [(e, k) for e, k in everything if k.name in wanted or k.key in wanted]


def _part(jobs: list[Job | Evaluation], part: tuple[int, int]) -> Sequence[Job | Evaluation]:
    """The i-th of n runs of one kernel's jobs, ordered by unit."""
    number, count = part
    if count == 1:
        return jobs
    units: dict[str, list[Job | Evaluation]] = {}
    for job in jobs:
        units.setdefault(job.source.digest if isinstance(job, Job) else "", []).append(job)
    ordered = [job for unit in units.values() for job in unit]
    return ordered[number * len(ordered) // count : (number + 1) * len(ordered) // count]


def _evaluations(
    jobs: Sequence[Job | Evaluation], executor: Executor, catalog: Catalog, cases: derived.Extent
) -> Iterator[Evaluation]:
    """In order of ``jobs``. Units compile ahead in threads; each is stressed on its first case that is not empty,
    in ``quick`` one of those that differ in nothing but dtypes and choices; there it is all that is compiled of a unit
    whose further cases are small.

    One that did not end is not run again: each further case would take the whole limit of time. Nothing is run any more
    on a device that is lost: every further case would fail for what this one did.
    """
    distinct = {j.source.digest: j for j in jobs if isinstance(j, Job) and not j.problem.empty}
    stressed = _stressed(jobs, cases)
    units = {job.source.digest for job in stressed}
    alone = _alone(jobs, stressed) if cases == "quick" else set()
    shared = References(catalog.ops)
    endless: dict[str, str] = {}
    lost = ""

    def ahead(job: Job) -> None:
        with suppress(FusionregError):  # the same error comes back where the job itself is executed
            digest = job.source.digest
            executor.compile(job.source, stressed=digest in units, alone=digest in alone)

    with ThreadPoolExecutor(max(1, min(len(distinct) or 1, os.cpu_count() or 1))) as pool:
        pending = {digest: pool.submit(ahead, job) for digest, job in distinct.items()}
        for job in jobs:
            if isinstance(job, Evaluation):
                yield job
                continue
            if job.source.digest in endless:
                why = f"the same unit did not end on {endless[job.source.digest]}"
                yield not_run(job, executor, Status.TIMEOUT, why)
                continue
            if lost:
                yield not_run(job, executor, Status.SKIPPED_UNSUPPORTED, lost)
                continue
            if not job.problem.empty:
                pending[job.source.digest].result()
            made = execute(job, executor, catalog.ops, stress=job in stressed, references=shared)
            if made.status is Status.TIMEOUT:
                endless[job.source.digest] = made.case
            yield made
            if made.status is Status.RUNTIME_ERROR and (said := executor.lost()):
                lost = f"the device is lost since {made.key}, {said}; run this kernel in a process of its own"
                pool.shutdown(wait=False, cancel_futures=True)


def _stressed(jobs: Sequence[Job | Evaluation], cases: derived.Extent) -> set[Job]:
    """The first job of each unit, or in ``quick`` of each group of units, that is not empty."""
    found: dict[object, Job] = {}
    for job in jobs:
        if isinstance(job, Job) and not job.problem.empty:
            trial = job.trial
            alike = (job.kernel.key, job.candidate.params, trial.forms, trial.absent)
            found.setdefault(alike if cases == "quick" else job.source.digest, job)
    return set(found.values())


def _alone(jobs: Sequence[Job | Evaluation], stressed: set[Job]) -> set[str]:
    """The units that are stressed and beside that launch :data:`FEW_THREADS` at most."""
    threads = {job.source.digest: 0 for job in stressed}
    for job in jobs:
        if isinstance(job, Job) and job.source.digest in threads and job not in stressed and not job.problem.empty:
            threads[job.source.digest] += job.candidate.launch.blocks * job.candidate.launch.threads
    return {digest for digest, further in threads.items() if further <= FEW_THREADS}
