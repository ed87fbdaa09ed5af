"""Kernels that are wrong on purpose: conformance must fail each of them, or it has no teeth. Floor 7.

A *launch* mutant replaces what the device gives back; a *source* mutant edits the rendered unit. Plugins' tests may add
mutants of their own with :func:`edit`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ..cache import Cache
from ..errors import FusionregError
from ..ops import Vocabulary
from ..proof.report import Evaluation
from ..render import KernelSource
from .cases import derive
from .devices import executor_for
from .execute import Executor, Job, Outputs, empty_outputs, execute, prepare

if TYPE_CHECKING:
    from ..registry.catalog import Catalog
    from ..registry.entries import FusionEntry, KernelEntry

#: Trials a mutant may survive before it counts as surviving.
PATIENCE = 100


@dataclass(frozen=True)
class Mutant:
    """One planted fault.

    Attributes:
        name: for reports and test ids.
        summary: what it imitates.
        source: unit text → changed text, the same text where it does not apply; None for a launch mutant.
        launch: (device, code, job, poison) → outputs; None for a source mutant.
    """

    name: str
    summary: str
    source: Callable[[str], str] | None = None
    launch: Callable[[Executor, Any, Job, float], Outputs] | None = None


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant of one kernel.

    Attributes:
        killed: the evaluation that failed it; None when every trial passed.
        tried: trials that ran.
        applies: False where the unit has nothing for it to change.
    """

    mutant: str
    fusion: str
    kernel: str
    killed: Evaluation | None
    tried: int
    applies: bool = True

    @property
    def survived(self) -> bool:
        return self.applies and self.killed is None

    def __str__(self) -> str:
        outcome = (
            f"killed by {self.killed.case} ({self.killed.status})" if self.killed else f"survived {self.tried} cases"
        )
        return f"{self.fusion}/{self.kernel} {self.mutant}: {outcome if self.applies else 'does not apply'}"


def edit(name: str, old: str, new: str, summary: str = "") -> Mutant:
    """A source mutant that replaces every ``old`` in the kernel's own text (not in the device library) by ``new``."""
    return Mutant(
        name, summary or f"{old} becomes {new}", source=lambda text: _in_body(text, lambda b: b.replace(old, new))
    )


def _in_body(text: str, change: Callable[[str], str]) -> str:
    """Changes what follows the generated prelude: the plugin's own code."""
    head, mark, body = text.partition('#line 1 "prelude of ')
    return head + mark + change(body) if mark else change(text)


def _zero(executor: Executor, code: Any, job: Job, poison: float) -> Outputs:
    return {n: np.zeros_like(a) for n, a in empty_outputs(job, poison).items()}


def _identity(executor: Executor, code: Any, job: Job, poison: float) -> Outputs:
    first = next(iter(job.arrays.values()))
    return {n: np.resize(first, a.shape).astype(a.dtype) for n, a in empty_outputs(job, poison).items()}


def _stale(executor: Executor, code: Any, job: Job, poison: float) -> Outputs:
    return empty_outputs(job, poison)


def _dropped_tail(executor: Executor, code: Any, job: Job, poison: float) -> Outputs:
    found = executor.launch(code, job, poison)
    for name, poisoned in empty_outputs(job, poison).items():
        found[name] = found[name].copy()
        found[name][..., -1:] = poisoned[..., -1:]
    return found


def _first_row_for_all(executor: Executor, code: Any, job: Job, poison: float) -> Outputs:
    found = executor.launch(code, job, poison)
    return {n: np.broadcast_to(a[:1], a.shape).copy() if a.ndim else a for n, a in found.items()}


LAUNCH_MUTANTS = (
    Mutant("zero", "the output is all zeros", launch=_zero),
    Mutant("identity", "the output is the first input", launch=_identity),
    Mutant("stale", "nothing is written", launch=_stale),
    Mutant("dropped_tail", "the last column is not written", launch=_dropped_tail),
    Mutant("first_row", "every row is the first one", launch=_first_row_for_all),
)

_BARRIER = re.compile(r"__syncthreads\(\);")
_WAIT = re.compile(r"fr::cp_async_wait<[^;]*>\(\);")

SOURCE_MUTANTS = (
    edit("relu_drops_nan", "fr::relu(", "fmaxf(0.0f, ", "relu by fmaxf, which drops NaN"),
    edit("tanh_for_erf", "fr::gelu_erf(", "fr::gelu_tanh(", "the other GELU"),
    edit("erf_for_tanh", "fr::gelu_tanh(", "fr::gelu_erf(", "the other GELU"),
)


def missing(text: str, what: re.Pattern[str], name: str) -> list[Mutant]:
    """One mutant per occurrence of ``what`` in the kernel's own text, each without that occurrence."""

    def without(index: int) -> Callable[[str], str]:
        def change(body: str) -> str:
            seen = iter(range(body.count(";")))
            return what.sub(lambda m: ";" if next(seen) == index else m[0], body)

        return lambda unit: _in_body(unit, change)

    _, _, body = text.partition('#line 1 "prelude of ')
    count = len(what.findall(body))
    return [
        Mutant(f"{name}_{i + 1}", f"{name.replace('_', ' ')} number {i + 1}", source=without(i)) for i in range(count)
    ]


def mutants_of(text: str) -> list[Mutant]:
    """Every mutant for a kernel with this unit text: missing barriers and waits one by one, then the named ones."""
    return [
        *LAUNCH_MUTANTS,
        *missing(text, _BARRIER, "missing_barrier"),
        *missing(text, _WAIT, "missing_wait"),
        *SOURCE_MUTANTS,
    ]


def run_mutants(
    catalog: Catalog,
    names: Sequence[str] = (),
    *,
    device: str = "sim",
    kernels: Sequence[str] | None = None,
    cache: Cache | None = None,
    extra: Sequence[Mutant] = (),
    only: Sequence[str] | None = None,
    executor: Executor | None = None,
) -> tuple[Verdict, ...]:
    """Tries every mutant of the named fusions' kernels until a case fails it.

    Args:
        names, device, kernels, cache, executor: as for :func:`run`.
        extra: mutants beside the built-in ones.
        only: names of mutants to keep; None for all.
    """
    on = executor or executor_for(device, cache, ahead=False)
    entries = catalog.entries(names)
    found: list[Verdict] = []
    for entry in entries:
        for kernel in entry.kernels:
            if kernels is not None and kernel.name not in kernels and kernel.key not in kernels:
                continue
            jobs = _jobs(entry, kernel, on)
            text = jobs[0].source.text if jobs else ""
            chosen = [m for m in (*mutants_of(text), *extra) if only is None or m.name in only]
            found += [_try(m, entry, kernel, jobs, on, catalog.ops) for m in chosen]
    return tuple(found)


def _jobs(entry: FusionEntry, kernel: KernelEntry, executor: Executor) -> list[Job]:
    """Quick trials first: they share few units; then those of the full set that are of another unit."""
    found: list[Job] = []
    seen: set[str] = set()
    rendered: dict[Any, KernelSource] = {}
    for extent in ("quick", "all"):
        trials = derive(entry, kernel, executor.target, extent)
        fresh = [prepare(entry, kernel, t, executor, rendered=rendered) for t in trials]
        jobs = [j for j in fresh if isinstance(j, Job) and not j.problem.empty and j.source.digest not in seen]
        found += jobs
        seen |= {j.source.digest for j in jobs}
    return found


def _try(
    mutant: Mutant, entry: FusionEntry, kernel: KernelEntry, jobs: Sequence[Job], executor: Executor, ops: Vocabulary
) -> Verdict:
    tried = 0
    for job in _changed(mutant, jobs):
        tried += 1
        on = _Replaced(executor, mutant.launch) if mutant.launch else executor
        if mutant.source:  # most are seen by the checks alone, and another build would run these few cases
            with suppress(FusionregError):  # which comes back where the job is executed
                on.compile(job.source, stressed=True, alone=True)
        outcome = execute(job, on, ops, stress=mutant.launch is None)
        if outcome.status.failed:
            return Verdict(mutant.name, entry.name, kernel.name, outcome, tried)
        if tried == PATIENCE:
            break
    return Verdict(mutant.name, entry.name, kernel.name, None, tried, applies=tried > 0)


def _changed(mutant: Mutant, jobs: Sequence[Job]) -> Iterator[Job]:
    """The jobs that the mutant changes, with the changed unit."""
    for job in jobs:
        if mutant.source is None:
            yield job
            continue
        text = mutant.source(job.source.text)
        if text != job.source.text:
            yield replace(job, source=changed(job.source, text))


def changed(source: KernelSource, text: str) -> KernelSource:
    """``source`` with another text and a digest to match."""
    return replace(source, text=text, digest=hashlib.sha256(f"{source.digest}\0{text}".encode()).hexdigest())


@dataclass(frozen=True)
class _Replaced:
    """An executor whose launches are a mutant's."""

    inner: Executor
    replaced: Callable[[Executor, Any, Job, float], Outputs]

    @property
    def device(self) -> str:
        return self.inner.device

    @property
    def target(self) -> str:
        return self.inner.target

    @property
    def multiprocessors(self) -> int | None:
        return self.inner.multiprocessors

    def refusal(self, kernel: KernelEntry) -> str:
        return self.inner.refusal(kernel)

    def compile(self, source: KernelSource, *, stressed: bool = False, alone: bool = False) -> Any:
        return self.inner.compile(source, stressed=stressed, alone=alone)

    def launch(self, code: Any, job: Job, poison: float) -> Outputs:
        return self.replaced(self.inner, code, job, poison)

    def stress(self, code: Any, job: Job, expected: Outputs) -> str:
        return ""

    def lost(self) -> str:
        return self.inner.lost()
