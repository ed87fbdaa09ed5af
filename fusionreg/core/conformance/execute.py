"""One kernel on one trial: forced, poisoned, repeated, compared. Floor 7."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ..errors import (
    ArgumentError,
    CompileError,
    FusionregError,
    GraphError,
    MissingDependencyError,
    RenderError,
    UnsupportedError,
)
from ..ops import Vocabulary
from ..problem import Problem, Refusal, bind, choose, combinations
from ..problem.selection import Candidate
from ..proof.report import Evaluation, Status
from ..render import KernelSource, render, variant
from ..runtime.libraries import in_order
from .compare import Comparison, compare
from .reference import Reference, References
from .trial import Trial

if TYPE_CHECKING:
    from ..registry.entries import FusionEntry, KernelEntry

#: What outputs hold before a launch: the first would spread, the second would pass for a number.
POISONS = (float("nan"), 1e4)

Outputs = dict[str, np.ndarray]
Mutate = Callable[[KernelSource], KernelSource]


@dataclass(frozen=True, eq=False)
class Job:
    """A trial bound to a kernel that accepts it, and the rendered unit."""

    entry: FusionEntry
    kernel: KernelEntry
    trial: Trial
    problem: Problem
    candidate: Candidate
    source: KernelSource
    arrays: Mapping[str, np.ndarray]


class Executor(Protocol):
    """A device that runs kernels.

    Attributes:
        device: ``sim``, or the GPU's name.
        target: the architecture that units are rendered for.
        multiprocessors: the device's own number, None for the usual part of the target.
    """

    @property
    def device(self) -> str: ...

    @property
    def target(self) -> str: ...

    @property
    def multiprocessors(self) -> int | None: ...

    def refusal(self, kernel: KernelEntry) -> str:
        """Why this device cannot run ``kernel`` at all; "" when it can."""
        ...

    def compile(self, source: KernelSource, *, stressed: bool = False, alone: bool = False) -> Any:
        """Runnable code; :class:`CompileError`. Called from several threads. ``stressed``: :meth:`stress` follows;
        ``alone``: and there is so little beside it that no other build than its own need be compiled."""
        ...

    def launch(self, code: Any, job: Job, poison: float) -> Outputs:
        """New outputs, which held ``poison`` before the launch. Raises a :class:`FusionregError` for any fault it sees:
        an access out of bounds, a race, a changed input, an error of the driver."""
        ...

    def stress(self, code: Any, job: Job, expected: Outputs) -> str:
        """What else this device can try (another stream, graph replay): how that differs from ``expected``, or ""."""
        ...

    def lost(self) -> str:
        """What the device says where no later launch of this process can succeed; "" while they can."""
        ...


def prepare(
    entry: FusionEntry,
    kernel: KernelEntry,
    trial: Trial,
    executor: Executor,
    mutate: Mutate | None = None,
    rendered: dict[Any, KernelSource] | None = None,
) -> Job | Evaluation:
    """The job of ``trial`` on exactly ``kernel``; an evaluation where there is none to run.

    ``rendered``: units by variant, to take from and to add to: what is one unit to a runtime is rendered once here too.
    """
    refused = executor.refusal(kernel)
    if refused:
        return _result(kernel, trial, executor, Status.SKIPPED_UNSUPPORTED, refused)
    arrays = trial.arrays(entry)
    try:
        problem = bind(entry, trial.tensors(arrays), trial.passed(entry), executor.target, executor.multiprocessors)
        chosen = choose(kernel, problem, pending=True)
        if isinstance(chosen, Refusal):
            if chosen.broken:
                return _result(kernel, trial, executor, Status.RUNTIME_ERROR, f"its launch cannot be: {chosen.reason}")
            return _result(kernel, trial, executor, Status.SKIPPED_UNSUPPORTED, chosen.reason)
        if trial.params:
            valid = list(combinations(kernel, problem))
            wanted = next((c for c in valid if c.params == trial.params), None)
            if wanted is None and trial.exactly:
                reason = f"parameters {dict(trial.params)} are not valid here"
                return _result(kernel, trial, executor, Status.SKIPPED_UNSUPPORTED, reason)
            chosen = wanted or valid[0]
        source = _rendered(entry, kernel, problem, chosen, {} if rendered is None else rendered)
    except ArgumentError as e:
        return _result(kernel, trial, executor, Status.SKIPPED_UNSUPPORTED, str(e))
    except RenderError as e:
        return _result(kernel, trial, executor, Status.COMPILE_ERROR, str(e))
    return Job(entry, kernel, trial, problem, chosen, mutate(source) if mutate else source, arrays)


def _rendered(
    entry: FusionEntry, kernel: KernelEntry, problem: Problem, chosen: Candidate, rendered: dict[Any, KernelSource]
) -> KernelSource:
    if kernel.library is not None:
        return render(entry, kernel, problem, chosen.params)
    key = variant(entry, kernel, problem, chosen.params)
    if key not in rendered:
        rendered[key] = render(entry, kernel, problem, chosen.params)
    return rendered[key]


def execute(
    job: Job,
    executor: Executor,
    ops: Vocabulary,
    *,
    stress: bool = False,
    wanted: Reference | None = None,
    references: References | None = None,
) -> Evaluation:
    """Runs the job twice, with the outputs poisoned differently, and judges both outcomes.

    ``wanted``: the reference, where the caller has it already; it comes from ``references`` otherwise.
    """
    started = time.perf_counter()

    def result(status: Status, reason: str = "", worst: Comparison | None = None) -> Evaluation:
        made = _result(job.kernel, job.trial, executor, status, reason)
        seconds, digest = time.perf_counter() - started, job.source.digest
        if worst is None:
            return replace(made, seconds=seconds, digest=digest)
        return replace(made, max_abs=worst.max_abs, max_rel=worst.max_rel, seconds=seconds, digest=digest)

    try:
        code = None if job.problem.empty else executor.compile(job.source)  # nothing is launched
    except MissingDependencyError as e:
        return result(Status.SKIPPED_UNSUPPORTED, str(e))
    except CompileError as e:
        return result(Status.COMPILE_ERROR, str(e))
    try:
        expected = wanted or (references or References(ops)).of(job.entry, job.trial, job.arrays)
    except GraphError as e:  # the pattern contradicts its own tensors: this fusion's fault, and no other's
        return result(Status.RUNTIME_ERROR, f"the pattern cannot be evaluated: {e}")
    before = {name: a.tobytes() for name, a in job.arrays.items()}
    try:
        runs = [_run(code, job, executor, poison) for poison in POISONS]
        for name, held in before.items():
            if job.arrays[name].tobytes() != held:
                return result(Status.RUNTIME_ERROR, f"the kernel changed its input {name}")
        differs = difference(runs[0], runs[1])
        found = [_judge(job, outputs, expected) for outputs in (runs if differs else runs[:1])]
        worst = next((c for c in found if not c.passed), max(found, key=lambda c: c.max_abs))
        if not worst.passed:
            return result(Status(worst.status), worst.reason, worst)
        if differs:
            return result(Status.INCORRECT_NUMERICAL, f"a repeated call gives another result: {differs}", worst)
        if stress and not job.problem.empty and (differs := executor.stress(code, job, runs[0])):
            return result(Status.INCORRECT_NUMERICAL, differs, worst)
    except UnsupportedError as e:
        return result(Status.SKIPPED_UNSUPPORTED, str(e))
    except FusionregError as e:
        late = e.facts.get("detector") == "timeout"
        return result(Status.TIMEOUT if late else Status.RUNTIME_ERROR, str(e))
    return result(Status.PASSED, "", worst)


def not_run(job: Job, executor: Executor, status: Status, why: str) -> Evaluation:
    """The evaluation of a case that is left out for what happened on another one."""
    made = _result(job.kernel, job.trial, executor, status, f"not run: {why}")
    return replace(made, digest=job.source.digest)


def empty_outputs(job: Job, poison: float) -> Outputs:
    """Outputs of the job's shapes and dtypes, filled with ``poison`` (all bits set in an integer)."""
    from ..dtypes import dtype

    found: Outputs = {}
    for name in job.problem.output_names:
        tensor = job.problem.tensors[name]
        assert tensor is not None, "an output is always present"
        kind = dtype(tensor.dtype)
        shape, strides = job.problem.shapes[name], job.problem.strides.get(name)
        array = np.empty(shape, kind.numpy)
        if strides is not None:
            array = in_order(array.reshape(-1), shape, strides)
        if kind.kind in "fc":
            array[...] = poison
        elif kind.kind in "iu":
            array[...] = -1 if kind.kind == "i" else np.iinfo(kind.numpy).max
        else:
            array[...] = True
        found[name] = array
    return found


def _run(code: Any, job: Job, executor: Executor, poison: float) -> Outputs:
    return empty_outputs(job, poison) if job.problem.empty else executor.launch(code, job, poison)


def _judge(job: Job, outputs: Outputs, wanted: Reference) -> Comparison:
    """The first output that is wrong, else the one with the largest error."""
    rounding = job.kernel.spec.rounding
    slack = {t.dtype: t for t in job.entry.spec.tolerances}
    found = []
    for name, got in outputs.items():
        verdict = compare(
            got,
            wanted.exact[name],
            wanted.chain[name],
            rounding=rounding,
            allowed=wanted.allowed[name],
            slack=slack.get(got.dtype.name),
        )
        found.append(replace(verdict, reason=f"{name}: {verdict.reason}" if verdict.reason else ""))
    return next((c for c in found if not c.passed), max(found, key=lambda c: c.max_abs))


def difference(a: Outputs, b: Outputs) -> str:
    """The first output whose bits differ, as half a sentence; NaNs are equal whatever their bits."""
    for name in a:
        same = a[name].tobytes() == b[name].tobytes()
        if not same and a[name].dtype.kind not in "iub":
            x, y = a[name].astype(np.float64), b[name].astype(np.float64)
            same = bool(np.array_equal(x, y, equal_nan=True))
        if not same:
            wrong = a[name].astype(np.float64) != b[name].astype(np.float64)
            return f"{name} differs in {int(wrong.sum())} of {a[name].size} elements"
    return ""


def _result(kernel: KernelEntry, trial: Trial, executor: Executor, status: Status, reason: str) -> Evaluation:
    return Evaluation(
        kernel.fusion,
        kernel.name,
        trial.name,
        trial.dtype,
        status,
        device=executor.device,
        target=executor.target,
        reason=reason,
    )
