"""The runtime: a call finds its prepared launch by exact layout; the first call of a layout prepares it. Floor 6."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from threading import RLock
from typing import TYPE_CHECKING, Any

from ..cache import Cache
from ..errors import ArgumentError, FusionregError, LaunchError, UnsupportedError
from ..frozen import EMPTY, FrozenDict
from ..planner.costs import EXTENT
from ..problem import Candidate, Problem, Refusal, Selection, bind, select
from .bound import Bound
from .call import Call, check_overlap, look_at
from .device_launch import Opening
from .driver import driver
from .kernels import Kernels, device_target
from .keys import attributes_key
from .launch import Allocation, Densified, GpuLaunch, Nothing, Prepared, SimulatorLaunch, argument_values
from .library_launch import LibraryLaunch
from .preview import SYMBOLIC, estimate, selected, told
from .unfused import Unfused, evaluation

if TYPE_CHECKING:
    from ..matcher.match import Match
    from ..registry.catalog import Catalog, FusionEntry

Tuning = Callable[["FusionEntry", Problem, int], Mapping[str, Mapping[str, Any]]]

DEVICES = ("auto", "sim", "cuda")

#: The architecture that the simulator stands in for: it executes what a Hopper kernel may use.
SIMULATED = "sm_90a"

#: Prepared launches kept; the oldest make room.
_KEPT = 4096


class FallbackWarning(UserWarning):
    """No kernel accepted a call; its operators ran unfused."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one call gave, and how.

    Attributes:
        outputs: arrays in the spec's order.
        kernel: ``fusion/kernel``; "" when the operators ran unfused.
        reason: why they did.
    """

    outputs: tuple[Any, ...]
    kernel: str
    reason: str = ""


class Runtime:
    """Runs fusions on arrays.

    Args:
        catalog: the loaded fusions.
        device: ``auto`` (GPU arrays on their GPU, CPU arrays in the simulator), ``sim`` or ``cuda`` (that alone).
        cache: where compiled kernels are kept; None opens the default one at first need.
        checks: what the simulator checks (``simulator.Checks``); None is its default.
        measured: kernel key → seconds, where somebody measured; those kernels are tried first.
        tuned: kernel key → parameters found best, or a function (fusion, problem, device index) → such a mapping.
        spare: multiprocessors of a GPU that kernels whose blocks stay leave to others, such as transfers.
    """

    def __init__(
        self,
        catalog: Catalog,
        device: str = "auto",
        cache: Cache | None = None,
        checks: Any = None,
        *,
        measured: Mapping[str, float] = EMPTY,
        tuned: Mapping[str, Mapping[str, Any]] | Tuning = EMPTY,
        spare: int = 0,
    ) -> None:
        if device not in DEVICES:
            raise ArgumentError("cannot run", "calls", f"device {device!r}", f"one of {', '.join(DEVICES)}")
        self.catalog, self.device, self.checks = catalog, device, checks
        self.measured, self.tuned, self.spare = measured, tuned, spare
        self._given_cache = cache
        self.kernels = Kernels(self._cache, lambda code: catalog.hook("kernel_compiled", code=code))
        self._prepared: dict[Any, Prepared] = {}
        self._layouts: dict[type, Callable[[Any], Any]] = {}
        self._warned: set[tuple[str, str]] = set()
        self._fallbacks: dict[str, str] = {}
        self._lock = RLock()

    # ---- calls ------------------------------------------------------------------------------------------------------

    def call(self, fusion: str, *arrays: Any, out: Any = None, **attributes: Any) -> Any:
        """Runs ``fusion`` on ``arrays`` (the spec's order, None for an absent one) on the caller's stream and device.

        Args:
            out: the caller's own output, or a tuple of them; by default new ones from the caller's allocator.
            attributes: attributes and choices by name.

        Returns: the output, or a tuple of several.
        Raises: :class:`ArgumentError`, :class:`UnknownNameError`, :class:`LaunchError`, :class:`CompileError`.
        """
        if out is not None:
            return _unpacked(self._into(fusion, arrays, out, attributes)[1])
        layouts = self._layouts
        try:  # as in `_find`, spelled out: this is the path that every warm call takes
            layout = [None if a is None else layouts[a.__class__](a) for a in arrays]
            key = (fusion, *layout, attributes_key(attributes)) if attributes else (fusion, *layout)
            prepared = self._prepared[key]
            if prepared.guard is not None and prepared.guard():
                look_at(self.catalog[fusion], arrays, None)
        except Exception:  # an unknown layout, an unknown library, or an array that does not even tell its layout
            prepared = self._prepare(fusion, arrays, attributes)
        found = prepared.run(arrays, prepared.outputs())
        return found[0] if len(found) == 1 else found

    def bind(self, fusion: str, *arrays: Any, out: Any = None, **attributes: Any) -> Bound:
        """A handle that launches again on these very arrays and outputs; the outputs are filled once before it returns.

        Its arrays must stay as they are; it follows the caller's current stream and can be captured into a CUDA graph.
        """
        if out is not None:
            prepared, outputs = self._into(fusion, arrays, out, attributes)
        else:
            prepared = self._prepare(fusion, arrays, attributes)
            outputs = prepared.run(arrays, prepared.outputs())
        return Bound(fusion, prepared, arrays, outputs)

    def execute(self, fusion: str, arrays: Sequence[Any], attributes: Mapping[str, Any]) -> Outcome:
        """A site of a model: like :meth:`call`, but an input with unfit strides is copied rather than left unfused."""
        prepared = self._find(fusion, arrays, attributes)
        return Outcome(prepared.run(arrays, prepared.outputs()), prepared.kernel, prepared.reason)

    def run(self, fusion: str, arrays: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
        """As :meth:`execute`: the output alone, or a tuple of several, every one with memory of its own."""
        prepared = self._find(fusion, arrays, attributes)
        found = prepared.run(arrays, prepared.outputs())
        return found[0] if len(found) == 1 else found

    def refusal(self, match: Match) -> str | None:
        """Why no kernel would accept this site, or None when one would (as far as symbolic extents let one tell)."""
        try:
            problem, selection, _ = self._site(match)
        except FusionregError as e:
            return str(e)
        return None if selection or problem.empty else selection.reason

    def kernel(self, match: Match) -> str:
        """Name of the kernel that would run at this site; "" where none would, or only on copies of its operands."""
        try:
            _, selection, copied = self._site(match, EXTENT)
        except FusionregError:
            return ""
        return selection.accepted[0].kernel.name if selection and not copied else ""

    def _site(self, match: Match, extent: int = SYMBOLIC) -> tuple[Problem, Selection, int]:
        def choose(entry: FusionEntry, problem: Problem) -> Selection:
            return self._select(entry, problem, simulated=self.device == "sim")

        return selected(self.catalog[match.fusion], match, self.target, choose, extent)

    def expected(self, match: Match) -> float | None:
        """Seconds of this site as a plugin's ``estimate`` hook tells, None where none does."""
        return told(self.catalog, match, self.target)

    def seconds(self, match: Match) -> float | None:
        """Seconds of the kernel that a device would run at this site, as it says itself; None where it says nothing."""
        return estimate(self.catalog, match, self.target, self.measured, pending=self.device == "sim")

    @property
    def kernels_used(self) -> FrozenDict[str, int]:
        """``fusion/kernel`` → calls so far."""
        counts: dict[str, int] = {}
        for prepared in list(self._prepared.values()):
            if prepared.kernel and prepared.calls:
                counts[prepared.kernel] = counts.get(prepared.kernel, 0) + prepared.calls
        return FrozenDict(counts)

    @property
    def fallbacks(self) -> FrozenDict[str, str]:
        """Fusion → why its operators last ran unfused."""
        return FrozenDict(self._fallbacks)

    # ---- finding the prepared launch --------------------------------------------------------------------------------

    def _find(self, fusion: str, arrays: Sequence[Any], attributes: Mapping[str, Any]) -> Prepared:
        """As the beginning of :meth:`call`, for a model's site."""
        try:
            layout = [None if a is None else self._layouts[a.__class__](a) for a in arrays]
            of_site = ("densify", fusion, *layout)
            prepared = self._prepared[(*of_site, attributes_key(attributes)) if attributes else of_site]
            if prepared.guard is not None and prepared.guard():
                look_at(self.catalog[fusion], arrays, None)
            return prepared
        except Exception:
            return self._prepare(fusion, arrays, attributes, densify=True)

    def _prepare(
        self, fusion: str, arrays: Sequence[Any], attributes: Mapping[str, Any], densify: bool = False
    ) -> Prepared:
        """The prepared launch, made at the first call of its layout."""
        entry = self.catalog[fusion]
        call = look_at(entry, arrays, None)
        with self._lock:
            for a in call.arrays.values():
                self._layouts.setdefault(type(a), call.library.layout)
            layout = [None if a is None else call.library.layout(a) for a in arrays]
            key = (fusion, *layout, attributes_key(attributes)) if attributes else (fusion, *layout)
            if densify:
                key = ("densify", *key)
            if key not in self._prepared:
                prepared = self._make(entry, call, attributes, densify)
                prepared.guard = call.guard
                while len(self._prepared) >= _KEPT:
                    self._prepared.pop(next(iter(self._prepared)))
                self._prepared[key] = prepared
            return self._prepared[key]

    def _into(
        self, fusion: str, arrays: tuple[Any, ...], out: Any, attributes: Mapping[str, Any]
    ) -> tuple[Prepared, tuple[Any, ...]]:
        """A call into the caller's own outputs: their layout is in the key, their addresses are checked each time."""
        entry = self.catalog[fusion]
        outputs = tuple(out) if isinstance(out, tuple | list) else (out,)
        call = look_at(entry, arrays, outputs)
        named = {**call.arrays, **dict(zip(entry.outputs, outputs, strict=True))}
        check_overlap(entry, named, call.tensors, set(entry.outputs), call.library)
        layout = [None if a is None else call.library.layout(a) for a in (*arrays, *outputs)]
        key = (fusion, "out", *layout, attributes_key(attributes))
        with self._lock:
            if key not in self._prepared:
                self._prepared[key] = self._make(entry, call, attributes, False)
        prepared = self._prepared[key]
        return prepared, prepared.run(arrays, outputs)

    # ---- preparing --------------------------------------------------------------------------------------------------

    def _make(self, entry: FusionEntry, call: Call, attributes: Mapping[str, Any], densify: bool) -> Prepared:
        on_gpu = call.place.kind == "cuda"
        self._check_device(entry, call, on_gpu)
        target = device_target(call.place.ordinal) if on_gpu else SIMULATED
        multiprocessors = max(1, driver().multiprocessors(call.place.ordinal) - self.spare) if on_gpu else None
        problem = bind(entry, call.tensors, attributes, target, multiprocessors)
        selection = self._select(entry, problem, simulated=not on_gpu, device=call.place.ordinal)
        if problem.empty:
            kernel = selection.accepted[0].kernel.key if selection else ""
            return Nothing(kernel, Allocation(call.library, call.place, problem))
        refused = list(selection.refused)
        for candidate in selection.accepted:  # best first; what the device cannot have gives way to the next
            kind = self._gpu if on_gpu else self._simulator
            made = kind(entry, call, problem, candidate)
            if not isinstance(made, str):
                return made
            refused.append(Refusal(candidate.kernel, made))
        beside = next((n for n, t in call.tensors.items() if t.space != "device"), "")
        if beside:  # operators compute in one place
            raise ArgumentError(
                "cannot call", entry.spec.name,
                f"{beside} is in {call.tensors[beside].space} memory: {Selection((), tuple(refused)).reason}",
                f"{call.place}, as the others are", fusion=entry.spec.name, tensor=beside,
            )  # fmt: skip
        if densify:
            dense = [n for n in call.arrays if not call.tensors[n].is_contiguous]
            if dense:
                return self._densified(entry, call, attributes, dense, Allocation(call.library, call.place, problem))
        return self._unfused(entry, call, problem, Selection((), tuple(refused)))

    def _densified(
        self,
        entry: FusionEntry,
        call: Call,
        attributes: Mapping[str, Any],
        dense: Sequence[str],
        allocation: Allocation,
    ) -> Prepared:
        copies = {n: call.library.contiguous(a) if n in dense else a for n, a in call.arrays.items()}
        again = Call(
            copies, {n: call.library.tensor(a) for n, a in copies.items()}, call.library, call.place, call.guard
        )
        inner = self._make(entry, again, attributes, False)
        if isinstance(inner, Unfused):
            return Unfused(inner.evaluate, allocation, inner.reason)
        return Densified(inner, [i for i, n in enumerate(entry.inputs) if n in dense], allocation)

    def _select(self, entry: FusionEntry, problem: Problem, simulated: bool, device: int = 0) -> Selection:
        tuned = self.tuned
        if not isinstance(tuned, Mapping):
            tuned = EMPTY if simulated else tuned(entry, problem, device)
        found = select(entry, problem, measured=self.measured, tuned=tuned, pending=simulated)
        if not simulated:
            return found
        unable = {c.kernel.key: c.kernel.unsimulated for c in found.accepted}
        able = tuple(c for c in found.accepted if not unable[c.kernel.key])
        reasons = tuple(Refusal(c.kernel, why) for c in found.accepted if (why := unable[c.kernel.key]))
        return Selection(able, found.refused + reasons)

    def _gpu(self, entry: FusionEntry, call: Call, problem: Problem, candidate: Candidate) -> Prepared | str:
        """The launch, or why the device cannot have it."""
        cuda, device, of_library = driver(), call.place.ordinal, candidate.kernel.library
        if of_library is not None and (missing := of_library.missing()):
            return missing
        stream = call.library.stream()(device)
        if not self.kernels.has(entry, candidate, problem, device) and cuda.capturing(stream):
            raise LaunchError(
                "cannot load", candidate.kernel.key, "the current stream is being captured into a CUDA graph",
                "a kernel that is loaded already", "Call it once with these layouts before the capture",
            )  # fmt: skip
        self._check_launch(candidate, problem)
        allocation = Allocation(call.library, call.place, problem, candidate.launch.workspace)
        opening = Opening(
            candidate.kernel.key, cuda, call.library, call.place, allocation, several=cuda.device_count() > 1
        )
        if of_library is not None:
            try:
                prepared = self.kernels.library_call(candidate, problem, device)
            except UnsupportedError as e:
                return str(e)
            sources = [i for i, n in enumerate(entry.inputs) if n in call.arrays]
            return LibraryLaunch(opening, prepared=prepared, sources=sources)
        loaded = self.kernels.on_gpu(entry, candidate, problem, device)
        wrong = loaded.misfit(cuda, candidate.launch, device)
        if wrong:
            return wrong
        arguments = loaded.source.arguments
        return GpuLaunch(
            opening, function=loaded.function, module=loaded.module, launch=candidate.launch, arguments=arguments,
            values=argument_values(problem, arguments), inputs=tuple(entry.inputs), maps=candidate.maps,
        )  # fmt: skip

    def _simulator(self, entry: FusionEntry, call: Call, problem: Problem, candidate: Candidate) -> Prepared | str:
        """As :meth:`_gpu`."""
        self._check_launch(candidate, problem)
        source, simulated = self.kernels.in_simulator(entry, candidate, problem)
        return SimulatorLaunch(
            kernel=candidate.kernel.key, simulated=simulated, launch=candidate.launch, arguments=source.arguments,
            values=argument_values(problem, source.arguments), inputs=tuple(entry.inputs),
            output_names=problem.output_names, library=call.library, place=call.place,
            allocation=Allocation(call.library, call.place, problem), checks=self.checks, maps=candidate.maps,
        )  # fmt: skip

    def _check_launch(self, candidate: Candidate, problem: Problem) -> None:
        if min(candidate.launch.grid) == 0:
            raise LaunchError(
                "cannot launch", candidate.kernel.key, f"grid {candidate.launch.grid} on {problem}",
                "blocks for outputs that have elements",
                "The kernel's grid expression must not vanish with a reduced axis",
            )  # fmt: skip

    def _unfused(self, entry: FusionEntry, call: Call, problem: Problem, selection: Selection) -> Prepared:
        name, reason = entry.spec.name, selection.reason
        evaluate = evaluation(entry, call, problem, self.catalog.ops)
        self._fallbacks[name] = reason
        if (name, reason) not in self._warned:
            self._warned.add((name, reason))
            warnings.warn(f"{name} runs unfused: no kernel accepts {problem}: {reason}", FallbackWarning, stacklevel=5)
        return Unfused(evaluate, Allocation(call.library, call.place, problem), reason)

    def _check_device(self, entry: FusionEntry, call: Call, on_gpu: bool) -> None:
        if on_gpu and self.device == "sim":
            raise ArgumentError("cannot call", entry.spec.name, f"arrays on {call.place}", "CPU arrays (device='sim')")
        if not on_gpu and self.device == "cuda":
            raise ArgumentError(
                "cannot call", entry.spec.name, f"{call.library.name} arrays in CPU memory",
                "arrays on a GPU (device='cuda')",
                "Copy them there, or use device='auto' to run in the simulator",
            )  # fmt: skip

    @property
    def target(self) -> str:
        """The architecture that sites are planned for."""
        if self.device == "sim":
            return SIMULATED
        try:
            return device_target(0)
        except FusionregError:
            return SIMULATED

    def _cache(self) -> Cache:
        if self._given_cache is None:
            self._given_cache = Cache()
        return self._given_cache


def _unpacked(outputs: tuple[Any, ...]) -> Any:
    return outputs[0] if len(outputs) == 1 else outputs
