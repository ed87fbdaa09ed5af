"""Which kernels accept a problem, with which parameters, in which order. Floor 4."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from math import inf
from typing import TYPE_CHECKING, Any

from ..errors import ExpressionError, LaunchError, MisfitError
from ..frozen import EMPTY, FrozenDict
from ..spec import WHOLE
from ..targets import accepts, target
from .geometry import Launch, launch_geometry, names
from .tensor_maps import TensorMapLayout, tensor_maps
from .types import Problem

if TYPE_CHECKING:
    from ..registry.catalog import FusionEntry, KernelEntry


#: Combinations of a kernel's parameters that are compared by estimate, at most.
ESTIMATED = 64


@dataclass(frozen=True, slots=True)
class Candidate:
    """A kernel that accepts a problem, the parameters it would use, its launch, and its tensor maps."""

    kernel: KernelEntry
    params: FrozenDict[str, Any]
    launch: Launch
    maps: tuple[TensorMapLayout, ...] = ()


@dataclass(frozen=True, slots=True)
class Refusal:
    """A kernel that does not accept a problem, and why, as half a sentence.

    ``broken``: the problem is one that the kernel says it takes, and there its own expressions give no launch.
    """

    kernel: KernelEntry
    reason: str
    broken: bool = False

    def __str__(self) -> str:
        return f"{self.kernel.spec.name}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Selection:
    """The kernels of a fusion on a problem: those that accept it, best first, and those that do not."""

    accepted: tuple[Candidate, ...]
    refused: tuple[Refusal, ...]

    def __bool__(self) -> bool:
        return bool(self.accepted)

    @property
    def reason(self) -> str:
        """Why nothing accepts, for a message."""
        return "; ".join(map(str, self.refused)) or "it has no kernel"


class Preferences(dict[str, Mapping[str, Any]]):
    """Kernel key → parameters found best for a problem like this.

    Attributes:
        seconds: kernel key → what it took with them, where somebody measured.
    """

    def __init__(self, params: Mapping[str, Mapping[str, Any]] = EMPTY, seconds: Mapping[str, float] = EMPTY) -> None:
        super().__init__(params)
        self.seconds = seconds


def select(
    entry: FusionEntry,
    problem: Problem,
    *,
    measured: Mapping[str, float] = EMPTY,
    tuned: Mapping[str, Mapping[str, Any]] = EMPTY,
    pending: bool = False,
) -> Selection:
    """All kernels of ``entry`` on ``problem``, ordered by measured time, then estimate, then name.

    Args:
        measured: kernel key → seconds, where somebody measured this problem.
        tuned: kernel key → parameters found best; used where they are valid here. Times of :class:`Preferences` order
            the kernels where every one that accepts has one: a time says nothing about a kernel that nobody timed.
        pending: whether kernels that are marked pending count too.
    """
    accepted: list[Candidate] = []
    refused: list[Refusal] = []
    for kernel in entry.kernels:
        found = choose(kernel, problem, tuned=tuned.get(kernel.key), pending=pending)
        if isinstance(found, Refusal):
            refused.append(found)
        else:
            accepted.append(found)
    seconds = measured
    if not measured and isinstance(tuned, Preferences) and all(c.kernel.key in tuned.seconds for c in accepted):
        seconds = tuned.seconds
    ranked = sorted(
        accepted,
        key=lambda c: (
            seconds.get(c.kernel.key, inf),
            estimated(c.kernel, problem, c.params),
            c.kernel.spec.name,
            c.kernel.key,
        ),
    )
    return Selection(tuple(ranked), tuple(refused))


def choose(
    kernel: KernelEntry, problem: Problem, *, tuned: Mapping[str, Any] | None = None, pending: bool = False
) -> Candidate | Refusal:
    """What :func:`select` says of one kernel, without a look at the others; ``tuned``: its own parameters."""
    reason = _objection(kernel, problem, pending)
    if reason:
        return Refusal(kernel, reason)
    reasons: list[Refusal] = []
    found = _chosen(kernel, problem, tuned, reasons)
    if found is None:
        broken = next((r for r in reasons if r.broken), None)
        return broken or (reasons or [Refusal(kernel, "no combination of its parameters is valid")])[-1]
    return found


def fits(kernel: KernelEntry, problem: Problem) -> bool:
    """Whether :func:`choose` finds anything, whatever the kernel is pending for."""
    return not _objection(kernel, problem, pending=True) and next(combinations(kernel, problem), None) is not None


def combinations(kernel: KernelEntry, problem: Problem) -> Iterator[Candidate]:
    """Every valid combination of the kernel's parameters on ``problem``, defaults first: what tuning tries."""
    return _candidates(kernel, problem, None, [])


def _objection(kernel: KernelEntry, problem: Problem, pending: bool) -> str:
    spec = kernel.spec
    device = target(problem.target)
    if spec.pending and not pending:
        return f"pending: {spec.pending}"
    if not any(accepts(declared, device) for declared in spec.targets):
        return f"it is for {', '.join(spec.targets)}, not {problem.target}"
    strided = {n: problem.in_place(n) for n in spec.strides if n != WHOLE}
    free = {*problem.loose, *(n for together in strided.values() for n in together)}
    for name, tensor in problem.tensors.items():
        if tensor is None:
            continue
        if tensor.space != "device" and tensor.space not in spec.spaces.get(name, ()):
            return f"{name} is in {tensor.space} memory"
        if not tensor.foldable:
            return f"the leading axes of {name} have no common stride"
        if name not in free and WHOLE not in spec.strides and not tensor.is_contiguous:
            return f"{name} is not contiguous (strides {tensor.strides})"
    for name in sorted(problem.slots.keys() & strided.keys()):
        together = strided[name]
        if not together:
            return f"what stands in the place of {name} lacks some of its axes"
        if len({tuple(s for s, d in zip(t.strides, t.shape, strict=True) if d != 1) for t in together.values()}) > 1:
            return f"{' and '.join(together)} lie in memory in different orders"
    try:
        env = names(kernel, problem)
    except MisfitError as e:
        return e.found
    for condition in kernel.requires:
        try:
            if not condition(env):
                return f"requires {condition.pretty(env)}"
        except ExpressionError as e:
            return f"requires {condition.text}: {e.found}"
    return kernel.library.refusal(problem) if kernel.library is not None else ""


def _candidates(
    kernel: KernelEntry, problem: Problem, preferred: Mapping[str, Any] | None, reasons: list[Refusal]
) -> Iterator[Candidate]:
    spec, device = kernel.spec, target(problem.target)
    fits = preferred is not None and all(preferred.get(k) in v for k, v in spec.params.items())
    choices: list[FrozenDict[str, Any]] = (
        [FrozenDict({k: preferred[k] for k in spec.params})] if fits and preferred is not None else []
    )
    told = names(kernel, problem)
    for params in (*choices, *kernel.settings):
        env = {**told, **params}
        try:
            broken = next((c for c in kernel.valid if not c(env)), None)
            if broken is not None:
                reasons.append(Refusal(kernel, f"{broken.pretty(env)} does not hold for any parameters"))
                continue
            launch = launch_geometry(kernel, problem, params)
            maps = () if problem.empty else tensor_maps(kernel, problem, params)
        except MisfitError as e:
            reasons.append(Refusal(kernel, e.found))
            continue
        except (ExpressionError, LaunchError) as e:
            reasons.append(Refusal(kernel, f"{e.whom}: {e.found}", broken=not problem.empty))
            continue
        wrong = launch.violation(device)
        if wrong:
            reasons.append(Refusal(kernel, wrong, broken=launch.impossible and not problem.empty))
            continue
        yield Candidate(kernel, params, launch, maps)


def _chosen(
    kernel: KernelEntry, problem: Problem, preferred: Mapping[str, Any] | None, reasons: list[Refusal]
) -> Candidate | None:
    """The preferred parameters where they are valid, else those of the least estimate, else the first valid ones."""
    candidates = _candidates(kernel, problem, preferred, reasons)
    first = next(candidates, None)
    if first is None or kernel.estimate is None or len(kernel.spec.params) == 0:
        return first
    if preferred is not None and all(preferred.get(k) == v for k, v in first.params.items()):
        return first
    everything = (first, *islice(candidates, ESTIMATED - 1))
    return min(everything, key=lambda c: estimated(kernel, problem, c.params))


def estimated(kernel: KernelEntry, problem: Problem, params: Mapping[str, Any]) -> float:
    """Seconds by the kernel's own expression; infinite where it has none or it fails, so that those rank last."""
    if kernel.estimate is None:
        return inf
    try:
        value = float(kernel.estimate({**names(kernel, problem), **params}))
    except (ExpressionError, TypeError, ValueError):
        return inf
    return value if value >= 0 else inf
