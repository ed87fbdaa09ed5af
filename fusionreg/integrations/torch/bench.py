"""A GPU as a place to measure: kernels, their torch peers and the ceilings, on torch's arrays and stream."""

from __future__ import annotations

import math
import platform
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from importlib import metadata
from typing import TYPE_CHECKING, Any

import torch

from fusionreg.core.bench import Ceilings, Check, Entrant, Subject
from fusionreg.core.bench.measure import Prepared
from fusionreg.core.bench.results import PEERS
from fusionreg.core.cache import Cache
from fusionreg.core.compiler.nvrtc import version as nvrtc_version
from fusionreg.core.errors import FusionregError, LaunchError, MissingDependencyError
from fusionreg.core.frozen import FrozenDict
from fusionreg.core.problem.selection import estimated
from fusionreg.core.runtime.driver import driver
from fusionreg.core.runtime.kernels import device_target

from .bench_arrays import Verifier, arrays_of, behind, bound
from .bench_compile import COMPILE_MODE, compile_all, compile_ours, compiled
from .counting import Job, executed
from .library_peers import LibraryPeer, library_peers
from .peers import restricted, torch_module, undropped
from .probes import ceilings
from .timing import BUDGET, Timer

if TYPE_CHECKING:
    from fusionreg.core.registry.catalog import Catalog
    from fusionreg.core.registry.entries import KernelEntry

#: Input sets that cold launches rotate among, at most; and the memory they may take.
SETS, SETS_BYTES = 4, 8 << 30
#: Seconds from which on a launch finds nothing of the one before in L2: then one set is enough.
SLOW = 0.02
#: Seconds of a launch, by estimate or by the clock, from which on a kernel that dispatch does not pick is left out.
LOST = 0.2
#: Share of the usual time that a glance takes.
GLANCE = 0.1
Sampler = Callable[[Sequence[Callable[[], Any]], str, float], list[float]]
_PACKAGES = ("torch", "triton", "cupy-cuda13x", "liger-kernel", "quack-kernels")


class TorchBench:
    """The current CUDA device; see ``core.bench.Bench``.

    Args:
        peers: competitors that are prepared.
        mode: in which torch.compile competes.
        budget: milliseconds of device time that one round of one competitor gets.

    Raises: :class:`MissingDependencyError` where there is none: nothing else is a source of timings.
    """

    def __init__(
        self,
        catalog: Catalog,
        cache: Cache | None = None,
        peers: Sequence[str] = PEERS,
        mode: str = COMPILE_MODE,
        budget: float = BUDGET,
    ) -> None:
        if not torch.cuda.is_available():
            raise MissingDependencyError(
                "cannot measure", "speed", f"torch {torch.__version__} finds no CUDA device", "a GPU",
                "Run it where there is one: the simulator is never a source of timings",
            )  # fmt: skip
        self.catalog, self._cache, self.peers = catalog, cache or Cache(), tuple(peers)
        self._mode, self._budget = mode, budget
        index = torch.cuda.current_device()
        self.gpu, self.target = torch.cuda.get_device_name(index), device_target(index)
        facts = torch.cuda.get_device_properties(index)
        self.multiprocessors = facts.multi_processor_count
        self.environment: Mapping[str, str] = FrozenDict(
            {
                "gpu": self.gpu,
                "target": self.target,
                "multiprocessors": str(self.multiprocessors),
                "l2": str(facts.L2_cache_size),
                "driver": driver().version(),
                "cuda": str(torch.version.cuda),
                "nvrtc": nvrtc_version(),
                "python": platform.python_version(),
                "tf32": "off",
                "compile": mode,
                **{name: v for name in _PACKAGES if (v := _version(name))},
            }
        )
        self._timer: Timer | None = None

    def ceilings(self) -> Ceilings:
        """Bytes per second of every mix, products and instructions, in about a second."""
        with _settings():
            return ceilings(self.target, self.multiprocessors, self._cache)

    @contextmanager
    def prepare(self, subject: Subject) -> Iterator[Prepared]:
        """Arrays on the GPU, references computed, entrants ready; TF32 is off inside."""
        with _settings():
            place = Workbench(subject, self.catalog, "cuda", self._cache, self._sample)
            try:
                yield Prepared(place.entrants(self.peers, self._mode), place.code)
            finally:
                del place
                torch._dynamo.reset()
                if not self.lost():
                    torch.cuda.empty_cache()

    def ready(self, subject: Subject) -> tuple[str, ...]:
        """Compiles what :meth:`prepare` and its entrants will ask for; see :func:`~.bench_compile.compile_all`."""
        with _settings():
            try:
                return compile_all(subject, "cuda", self._cache, self.peers, self._mode)
            finally:
                torch._dynamo.reset()
                if not self.lost():
                    torch.cuda.empty_cache()

    def compile(self, subjects: Sequence[Subject]) -> tuple[str, ...]:
        """Our kernels for workloads into the cache; see :func:`~.bench_compile.compile_ours`."""
        return compile_ours(subjects, self._cache)

    @contextmanager
    def trials(self, subject: Subject) -> Iterator[Callable[[KernelEntry, Mapping[str, Any]], Entrant]]:
        """As :meth:`prepare`, for kernels with parameters of the caller's; see ``core.bench.tuning``."""
        with _settings():
            yield Workbench(subject, self.catalog, "cuda", self._cache, self._sample).ours
        if not self.lost():
            torch.cuda.empty_cache()

    def lost(self) -> str:
        """What the device says where no later call of this process can succeed."""
        try:
            torch.cuda.synchronize()
        except RuntimeError as e:
            return str(e).splitlines()[0]
        return ""

    def executed(self, subjects: Sequence[Subject]) -> list[int | None]:
        """As the device counts them, under a profiler in a process of its own; where there is none, or it may not
        count, nothing."""
        jobs = [Job.of(subject) for subject in subjects]
        try:
            return list(executed(jobs))
        except FusionregError as e:
            warnings.warn(str(e), stacklevel=2)
            return [None] * len(jobs)

    def _sample(self, calls: Sequence[Callable[[], Any]], mode: str, part: float = 1.0) -> list[float]:
        if mode == "g":
            return _timer(self).replayed(calls[0], part * self._budget)
        return _timer(self).cold(calls, part * self._budget)


def _timer(bench: TorchBench) -> Timer:
    if bench._timer is None:
        bench._timer = Timer(max(1 << 28, 4 * int(bench.environment["l2"])))
    return bench._timer


@contextmanager
def current_device(index: int) -> Iterator[None]:
    """CUDA device ``index`` as the current one; nothing where there is none."""
    with torch.cuda.device(index) if torch.cuda.is_available() else nullcontext():
        yield


@contextmanager
def _settings() -> Iterator[None]:
    """No gradients, and float32 products in float32."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = False
    try:
        with torch.no_grad():
            yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before


class Workbench:
    """One workload with its arrays on one device.

    Args:
        sample: milliseconds of calls, by mode, in a part of the usual time.
    """

    def __init__(
        self,
        subject: Subject,
        catalog: Catalog,
        device: str,
        cache: Cache | None,
        sample: Sampler,
    ) -> None:
        self.subject, self.catalog, self.device, self._cache, self._sample = subject, catalog, device, cache, sample
        traffic = subject.traffic
        sets = 1 if subject.workload.mode == "g" else SETS
        fitting = max(1, SETS_BYTES // max(1, traffic.read + traffic.written))
        self.sets = [arrays_of(subject, device, seed) for seed in range(min(sets, fitting))]
        self.verifier = Verifier(subject.graph, subject.ops, self.sets[0], subject.entry.spec.tolerances)
        asked = restricted(subject.graph, subject.asked)
        self.still = undropped(asked)
        self.module: Any = None
        self.code, self._why = "", ""
        try:
            self.module = torch_module(asked, subject.ops, device)
            self.code = self.module.code.strip()
        except FusionregError as e:
            self._why = str(e)

    def entrants(self, peers: Sequence[str] = PEERS, mode: str = COMPILE_MODE) -> tuple[Entrant, ...]:
        """Our kernels, then of ``peers`` eager and compile (in ``mode``), then what libraries have."""
        found = [self.ours(c.kernel, c.params) for c in self.subject.selection.accepted]
        plain = partial(compiled, mode="default")  # of the twin that is only checked: nothing of it is tuned
        tuned = partial(compiled, mode=mode)
        for name, made, twin in (("eager", _forward, _forward), ("compile", tuned, plain)):
            if name in peers:
                found.append(Entrant(name, reason=self._why) if self.module is None else self._peer(name, made, twin))
        libraries = library_peers(self.subject.graph, self.subject.ops)
        found += [self._library(p) for p in libraries if p.name in peers]
        return tuple(found)

    def _entrant(
        self, name: str, bind: Callable[[], list[Any]], verify: Callable[[Any], Check], **facts: Any
    ) -> Entrant:
        calls: list[Any] = []

        def check() -> Check:
            calls[:] = bind()
            return verify(calls[0])

        def sample(part: float = 1.0) -> list[float]:
            return self._sample(calls, self.subject.workload.mode, part)

        return Entrant(name, check=check, sample=sample, glance=partial(sample, GLANCE), **facts)

    def ours(self, kernel: KernelEntry, params: Mapping[str, Any]) -> Entrant:
        """The kernel alone in its fusion, with these parameters: each is timed as itself, whatever dispatch prefers."""
        chosen = self.subject.chosen

        def one(sets: Sequence[Mapping[str, Any]]) -> list[Any]:
            found = bound(self.subject, self.catalog, kernel, params, sets, self._cache)
            return [behind(self.subject, call, arrays) for call, arrays in zip(found, sets, strict=True)]

        other = chosen is not None and chosen.kernel.name != kernel.name

        def refused(words: str) -> LaunchError:
            return LaunchError("not compared", kernel.key, words, "one that dispatch picks")

        def bind() -> list[Any]:
            expected = estimated(kernel, self.subject.problem, params)
            if other and LOST < expected < math.inf:
                raise refused(f"a launch is estimated at {expected:.1f} s")
            self._wait()
            (first,) = one(sets=self.sets[:1])
            started = time.perf_counter()  # it was launched: a long launch still runs
            self._wait()
            took = time.perf_counter() - started
            if other and took > LOST:
                raise refused(f"a launch takes {took:.1f} s")
            return [first] if took > SLOW else [first, *one(sets=self.sets[1:])]

        def verify(call: Any) -> Check:
            for output in call.outputs:
                output.fill_(float("nan") if output.is_floating_point() else 1)
            call()
            return self.verifier.check(call.outputs)

        note = f"pending: {kernel.spec.pending}" if kernel.spec.pending else ""
        return self._entrant(kernel.name, bind, verify, ours=True, note=note)

    def _peer(
        self, name: str, made: Callable[[Any], Callable[..., Any]], checked: Callable[[Any], Callable[..., Any]]
    ) -> Entrant:
        """torch on the pattern's graph. Where that drops elements, torch's mask is another: then the same code is
        ``checked`` with nothing dropped, and timed as it is."""
        names, still = self.subject.graph.inputs, self.still

        def verify(call: Any) -> Check:
            if still is None:
                return self.verifier.check(_tuple(call()), self.verifier.exact[: self.subject.asked or None])
            found = _tuple(call())
            wanted = Verifier(still, self.subject.ops, self.sets[0], self.subject.entry.spec.tolerances)
            twin = checked(torch_module(still, self.subject.ops, self.device))
            verdict = wanted.check(_tuple(twin(*(self.sets[0][n] for n in names))))
            finite = all(bool(torch.isfinite(y).all()) for y in found if y.is_floating_point())
            return verdict if finite else replace(verdict, reason="an output is not finite")

        note = "" if still is None else "a random mask of its own"
        return self._entrant(name, lambda: self._calls(made(self.module), names), verify, note=note)

    def _library(self, peer: LibraryPeer) -> Entrant:
        def verify(call: Any) -> Check:
            exact = peer.exact(*(self.sets[0][n] for n in peer.inputs)) if peer.computes else None
            return self.verifier.check(_tuple(call()), exact)

        bind = partial(self._calls, peer.call, peer.inputs)
        return self._entrant(peer.name, bind, verify, computes=peer.computes)

    def _wait(self) -> None:
        if self.device != "cpu":
            torch.cuda.synchronize()

    def _calls(self, function: Callable[..., Any], inputs: Sequence[str]) -> list[Any]:
        return [partial(function, *(arrays[n] for n in inputs)) for arrays in self.sets]


def _forward(module: Any) -> Callable[..., Any]:
    forward: Callable[..., Any] = module.forward
    return forward


def _tuple(found: Any) -> tuple[Any, ...]:
    return found if isinstance(found, tuple) else (found,)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
