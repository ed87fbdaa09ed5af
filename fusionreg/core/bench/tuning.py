"""Parameters found best: tried per class of problems, kept in the cache under the full environment. Floor 7.

Looking them up is the runtime's business: it is handed a :class:`TunedParameters` and asks it once per layout.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from math import gcd, inf
from typing import TYPE_CHECKING, Any, Protocol

from ..cache import Cache, cache_key
from ..compiler.nvrtc import version as nvrtc_version
from ..errors import ExpressionError, FusionregError
from ..expressions import next_pow2
from ..frozen import EMPTY, FrozenDict
from ..problem import Candidate, Problem, combinations
from ..proof.evidence import stripped
from ..render import render
from ..runtime.driver import driver
from ..runtime.kernels import device_target
from ..targets import REGISTERS_SM, Target, target
from .measure import Entrant, Progress
from .statistics import spread
from .subject import Subject

if TYPE_CHECKING:
    from ..registry.entries import FusionEntry, KernelEntry

#: Kind of cache entries, and the version of what they mean.
KIND, VERSION = "tuned", 1
#: Times within this share of the fastest count as equal: the combination that the spec names first wins.
CLOSE = 0.01
#: Combinations of one kernel that are tried, at most.
TRIED = 32
#: Blocks that any multiprocessor holds at most.
_BLOCKS_SM = 32


class Tuner(Protocol):
    """A device that combinations can be tried on; ``core.bench.Bench`` with one more ability."""

    target: str
    environment: Mapping[str, str]

    def trials(self, subject: Subject) -> AbstractContextManager[Callable[[KernelEntry, Mapping[str, Any]], Entrant]]:
        """Puts a workload in place; the function makes an entrant of a kernel with parameters."""
        ...


@dataclass(frozen=True)
class Tuned:
    """What tuning one kernel on one workload found.

    Attributes:
        kernel: ``fusion/kernel``.
        workload: its name.
        params: the best ones; empty where none could be timed.
        ms, default_ms: medians of the best, and of what dispatch would have taken.
        tried: combinations timed.
        kept: whether the cache had them.
        reason: why there are none.
    """

    kernel: str
    workload: str
    params: FrozenDict[str, Any] = EMPTY
    ms: float | None = None
    default_ms: float | None = None
    tried: int = 0
    kept: bool = False
    reason: str = ""


def problem_class(problem: Problem) -> dict[str, Any]:
    """What problems share that are tuned as one: everything but the extents, which count by their next power of two
    and by whether they are multiples of 8."""
    return {
        "fusion": problem.fusion,
        "dtypes": dict(problem.dtypes),
        "attributes": dict(problem.attributes),
        "choices": dict(problem.choices),
        "forms": dict(problem.forms),
        "axes": {name: (next_pow2(extent), gcd(extent, 8)) for name, extent in problem.axes.items()},
        "dense": [None if t is None else (t.is_contiguous, t.alignment >= 16) for t in problem.tensors.values()],
        "target": problem.target,
        "multiprocessors": problem.multiprocessors,
    }


def key_of(entry: FusionEntry, kernel: KernelEntry, problem: Problem, environment: Mapping[str, str]) -> str | None:
    """The cache's key; None where the kernel has no valid combination, or does not render."""
    first = next(combinations(kernel, problem), None)
    if first is None:
        return None
    try:
        source = render(entry, kernel, problem, first.params)
    except FusionregError:
        return None
    spec = kernel.spec
    space = [{k: list(v) for k, v in spec.params.items()}, spec.valid, dict(spec.constants), spec.grid, spec.block]
    digest = hashlib.sha256(f"{stripped(source.text)} {source.options}".encode()).hexdigest()
    return cache_key(
        {
            "version": str(VERSION),
            "kernel": kernel.key,
            "class": json.dumps(problem_class(problem), sort_keys=True, default=str),
            "space": json.dumps(space, sort_keys=True, default=str),
            "source": digest,
            "environment": json.dumps(dict(environment), sort_keys=True),
        }
    )


def order(candidates: Sequence[Candidate], problem: Problem, multiprocessors: int) -> list[Candidate]:
    """The most promising first: by the kernel's own estimate, then by how evenly and fully its blocks fill the device,
    then as the spec has them."""
    device = target(problem.target)

    def rank(at: int) -> tuple[float, float, int]:
        candidate = candidates[at]
        return _estimate(candidate, problem), -fill(candidate, device, multiprocessors), at

    return [candidates[i] for i in sorted(range(len(candidates)), key=rank)]


def fill(candidate: Candidate, device: Target, multiprocessors: int) -> float:
    """Share of the device that works on average: blocks over the places in all waves, times the share of resident
    threads up to half of the most (more hides no further latency)."""
    launch, spec = candidate.launch, candidate.kernel.spec
    if not launch.blocks:
        return 0.0
    resident = min(_BLOCKS_SM, device.threads_sm // launch.threads)
    if launch.shared_memory:
        resident = min(resident, device.shared_memory_sm // (launch.shared_memory + 1024))
    if spec.max_registers:
        resident = min(resident, REGISTERS_SM // (spec.max_registers * launch.threads))
    places = max(1, resident) * multiprocessors
    waves = -(-launch.blocks // places)
    threads = max(1, resident) * launch.threads / device.threads_sm
    return launch.blocks / (waves * places) * min(1.0, 2.0 * threads)


def _estimate(candidate: Candidate, problem: Problem) -> float:
    if candidate.kernel.estimate is None:
        return inf
    try:
        return float(candidate.kernel.estimate({**problem.env(), **candidate.params}))
    except (ExpressionError, TypeError, ValueError):
        return inf


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
    started, every, found = clock(), tuple(subjects), []
    environment = tuning_environment(tuner.environment)
    for at, subject in enumerate(every):
        if progress is not None:
            progress(at, len(every), f"{subject.entry.name} {subject.workload.name}")
        for chosen in subject.selection.accepted:
            kernel, name = chosen.kernel, subject.workload.name
            candidates = list(combinations(kernel, subject.problem))
            if len(candidates) < 2:
                continue
            key = key_of(subject.entry, kernel, subject.problem, environment)
            known = None if key is None or again else _read(cache, key)
            if known is not None:
                found.append(Tuned(kernel.key, name, known, kept=True))
            elif key is None:
                found.append(Tuned(kernel.key, name, reason="it cannot be rendered"))
            elif time_limit is not None and clock() - started >= time_limit:
                found.append(Tuned(kernel.key, name, reason="no time left"))
            else:
                made = _tune(subject, kernel, candidates, chosen, tuner)
                if made.params:
                    body = {"params": dict(made.params), "ms": made.ms, "tried": made.tried}
                    meta = {"name": kernel.key, "parts": {"workload": name, **environment}}
                    cache.put(KIND, key, json.dumps(body, sort_keys=True).encode(), meta)
                found.append(made)
    return tuple(found)


def _tune(
    subject: Subject, kernel: KernelEntry, candidates: Sequence[Candidate], chosen: Candidate, tuner: Tuner
) -> Tuned:
    multiprocessors = int(tuner.environment.get("multiprocessors", "132"))
    tried = order(candidates, subject.problem, multiprocessors)[:TRIED]
    tried += [chosen] if chosen not in tried else []
    times: dict[int, float] = {}
    reason = ""
    with tuner.trials(subject) as make:
        for candidate in tried:
            entrant = make(kernel, candidate.params)
            try:
                check = entrant.check()
                if not check.ok:
                    reason = f"{dict(candidate.params)}: {check}"
                    continue
                times[candidates.index(candidate)] = spread(entrant.sample()).median
            except (FusionregError, RuntimeError) as e:  # one that cannot be compiled or launched is no candidate
                reason = f"{dict(candidate.params)}: {e}"
    if not times:
        return Tuned(kernel.key, subject.workload.name, reason=reason or "nothing could be timed")
    best = winner(times)
    default = times.get(candidates.index(chosen))
    return Tuned(
        kernel.key, subject.workload.name, candidates[best].params, times[best], default, len(times), reason=reason
    )


def _read(cache: Cache, key: str) -> FrozenDict[str, Any] | None:
    data = cache.get(KIND, key)
    try:
        return None if data is None else FrozenDict(json.loads(data)["params"])
    except (ValueError, KeyError, TypeError):
        return None


def tuning_environment(facts: Mapping[str, str]) -> dict[str, str]:
    """What of an environment the speed of a kernel of ours depends on."""
    return {name: facts[name] for name in ("gpu", "target", "driver", "nvrtc") if name in facts}


def device_facts(device: int = 0) -> dict[str, str]:
    """The same facts of a device, from the driver; empty where there is none."""
    try:
        cuda = driver()
        if device >= cuda.device_count():  # which also starts the driver: names need that
            return {}
        return {
            "gpu": cuda.name(device),
            "target": device_target(device),
            "driver": cuda.version(),
            "nvrtc": nvrtc_version(),
        }
    except FusionregError:
        return {}


class TunedParameters:
    """Kernel key → parameters that were found best for problems of this class on this GPU; asked by the runtime.

    Args:
        cache: where :func:`tune` keeps them.
        environment: device index → its facts, by the names of :func:`tuning_environment`.
    """

    def __init__(
        self, cache: Callable[[], Cache] = Cache, environment: Callable[[int], Mapping[str, str]] = device_facts
    ) -> None:
        self._cache, self._environment = cache, environment

    def __call__(self, entry: FusionEntry, problem: Problem, device: int = 0) -> Mapping[str, Mapping[str, Any]]:
        cache = self._cache()
        if cache.path is None or not (cache.path / KIND).is_dir():  # nobody ever tuned: nothing to look up
            return EMPTY
        environment = tuning_environment(self._environment(device))
        if not environment:
            return EMPTY
        found = {}
        for kernel in entry.kernels:
            key = key_of(entry, kernel, problem, environment) if kernel.spec.params else None
            params = _read(cache, key) if key else None
            if params is not None:
                found[kernel.key] = params
        return found
