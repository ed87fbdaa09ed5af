"""The programmatic interface: load a registry, look things up, match, plan, call and fuse."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from fusionreg.core.errors import ArgumentError, PlanError
from fusionreg.core.frozen import FrozenDict
from fusionreg.core.ir import Graph
from fusionreg.core.lift.near import near_lifts
from fusionreg.core.matcher import find as matcher
from fusionreg.core.matcher.match import Matches, once
from fusionreg.core.matcher.regions import Maker, near_misses
from fusionreg.core.matcher.sharing import shared
from fusionreg.core.planner import plan as planner
from fusionreg.core.planner.costs import CostModel
from fusionreg.core.planner.executor import LIBRARY, Executor
from fusionreg.core.planner.executor import executor as executor_of
from fusionreg.core.planner.maps import channels_last
from fusionreg.core.planner.stored import check_graph
from fusionreg.core.registry.catalog import Catalog, FusionEntry, load
from fusionreg.core.render.pointwise import supported
from fusionreg.core.runtime import Runtime
from fusionreg.core.runtime.dispatch import DEVICES
from fusionreg.core.runtime.preview import COPIED, COPY
from fusionreg.core.runtime.seeds import draw

if TYPE_CHECKING:
    from fusionreg.core.bench.gains import MeasuredGains
    from fusionreg.core.matcher.match import FailedMatch, Match
    from fusionreg.core.planner.plan import Plan, Policy
    from fusionreg.core.planner.training import Backward
    from fusionreg.core.runtime import Bound
    from fusionreg.measuring import Measurer
    from fusionreg.model import FusedModel

    Strides = Callable[[Match], Mapping[str, tuple[int, ...]]]

#: Environment variable: how many sites of each plan are taken, in the order of the graph.
FUEL = "FUSIONREG_FUEL"


class NothingFusedWarning(UserWarning):
    """A model came out of ``fuse`` as it went in."""


def load_registry(
    *, strict: bool = False, device: str = "auto", frozen: bool = False, spare: int = 0, **options: Any
) -> Registry:
    """Discovers, loads and validates every installed plugin.

    Args:
        strict: raise for the first plugin that fails, instead of keeping it as a row in ``failures``.
        device: where calls run: ``auto`` (by the arrays), ``sim`` or ``cuda``.
        frozen: use the parameters and times that kernels ship with, never those that ``fusionreg tune`` and ``bench``
            found on this machine: plans are then equal on every machine of an architecture.
        spare: multiprocessors of a GPU that kernels whose blocks stay leave to others, such as transfers between GPUs.
        options: further arguments of ``core.registry.catalog.load``: ``allow``, ``deny``, ``extra_plugins``.

    Returns: a new, independent :class:`Registry`; nothing is kept in the module.
    Raises: :class:`ArgumentError` for another word for ``device``, and for a ``spare`` below 0.
    """
    if device not in DEVICES:
        raise ArgumentError("cannot run", "calls", f"device {device!r}", f"one of {', '.join(DEVICES)}")
    if spare < 0:
        raise ArgumentError("cannot spare", "multiprocessors", str(spare), "0 or more")
    return Registry(load(strict=strict, **options), device=device, frozen=frozen, spare=spare)


def fuse(
    model: Any,
    *example: Any,
    registry: Registry | None = None,
    policy: Policy = "balanced",
    plan: Plan | None = None,
    dynamic_shapes: Any = None,
) -> Any:
    """A faster callable of ``model``; see :meth:`Registry.fuse`."""
    chosen = registry or load_registry()
    return chosen.fuse(model, *example, policy=policy, plan=plan, dynamic_shapes=dynamic_shapes)


class Registry(Mapping[str, FusionEntry]):
    """All fusions of one load, by name, with what can be done with them."""

    def __init__(self, catalog: Catalog, device: str = "auto", frozen: bool = False, spare: int = 0) -> None:
        self.catalog = catalog
        self.device = device
        self.frozen = frozen
        self.spare = spare

    def __getitem__(self, name: str) -> FusionEntry:
        return self.catalog[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.catalog.fusions)

    def __len__(self) -> int:
        return len(self.catalog.fusions)

    def __contains__(self, name: object) -> bool:
        return name in self.catalog.fusions

    def __repr__(self) -> str:
        return f"<Registry: {len(self)} fusions of {len(self.catalog.plugins)} plugins>"

    def __deepcopy__(self, memo: Any) -> Registry:
        """Itself: compiled modules are copied, and hold it among their options."""
        return self

    @property
    def plugins(self) -> tuple[Any, ...]:
        """Plugins that loaded."""
        return self.catalog.plugins

    @property
    def failures(self) -> tuple[Any, ...]:
        """Plugins that did not, each with its reason."""
        return self.catalog.failures

    @cached_property
    def runtime(self) -> Runtime:
        from fusionreg.core.bench.tuned import ShippedParameters, TunedParameters

        tuned = ShippedParameters() if self.frozen else TunedParameters()
        return Runtime(self.catalog, device=self.device, tuned=tuned, spare=self.spare)

    @cached_property
    def _gains(self) -> MeasuredGains:
        from fusionreg.core.bench.gains import MeasuredGains
        from fusionreg.core.cache import Cache

        cache = None if self.frozen else Cache()
        return MeasuredGains(self.catalog, self.runtime.kernel, self.runtime.target, cache)

    @cached_property
    def _measurer(self) -> Measurer:
        from fusionreg.measuring import Measurer

        return Measurer()

    def measure(
        self, plan: Plan, device: int = 0, seconds: float = 60.0, also: Iterable[Match] = ()
    ) -> tuple[int, int]:
        """Measures the sites that a plan rests on, those that only a measurement could let in, and further matches, on
        CUDA device ``device``, in processes of their own: what nobody has measured on this machine, as much of it as
        ``seconds`` are enough for. The next plan knows.

        Returns: how many were measured, or found to be none that can be, and how many are left.
        Raises: :class:`ArgumentError` in the simulator, and where what this machine found counts for nothing
        (``frozen``); :class:`LaunchError` where they cannot be measured.
        """
        from fusionreg.core.bench.sites import unmeasured

        if self.frozen or self.device == "sim":
            found = "a frozen registry" if self.frozen else "a registry of the simulator"
            raise ArgumentError("cannot measure", "sites", found, "one on a GPU that takes what it finds here")
        sites = unmeasured(plan, self.catalog, self._gains.knows, tuple(also))
        if not sites:
            return 0, 0
        done = self._measurer.measure(sites, device, seconds)
        del self._gains
        return done, len(sites) - done

    @property
    def _maker(self) -> Maker:
        return Maker(self.catalog.derive, supported)

    @property
    def _fusions(self) -> tuple[FusionEntry, ...]:
        return tuple(self.catalog.fusions.values())

    def call(self, name: str, *arrays: Any, **attributes: Any) -> Any:
        """Runs one fusion on arrays.

        Args:
            name: the fusion's name.
            arrays: its inputs in declared order, None for an absent optional one; shapes and dtypes as
                ``fusionreg show NAME`` prints them.
            attributes: attributes and choices by name.

        Returns: one array, or a tuple for several outputs, allocated by the library of the inputs.
        Raises: :class:`ArgumentError` when they do not fit, :class:`UnknownNameError` for an unknown name.
        """
        return self.runtime.call(name, *arrays, **attributes)

    def bind(self, name: str, *arrays: Any, **attributes: Any) -> Bound:
        """A handle that launches again on the same arrays, for hot loops and graph capture."""
        return self.runtime.bind(name, *arrays, **attributes)

    def rng(self, like: Any, generator: Any = None) -> Any:
        """Seed and offset for one call with dropout, beside ``like`` and from its library's generator: int64[2].

        Hand the same array to the backward fusion. It is safe to capture into a CUDA graph.
        """
        return draw(like, generator)

    def graph(self, model: Any, *example: Any) -> Graph:
        """The lifted graph of a model: a path, an ONNX model, an exported program or a module with example inputs."""
        return model if isinstance(model, Graph) else self._open(model, example).graph

    def match(self, model: Any, *example: Any, explain: bool = False) -> Matches:
        """All legal matches of all fusions; with ``explain`` also the deepest failed match per site."""
        graph = self.graph(model, *example)
        found = self._find(graph, explain)
        open_fusions = [f.name for f in self._fusions if f.spec.open] if explain else []
        near = [m for name in open_fusions for m in near_misses(graph, self.catalog.ops, supported, name)]
        regions = tuple(self._regions(graph, near=near))
        lifts = near_lifts(graph, self.catalog.ops) if explain else ()
        return Matches((*found.matches, *regions), (*lifts, *found.failures, *near))

    def _find(self, graph: Graph, explain: bool = False) -> Matches:
        return matcher.find(graph, self._fusions, self.catalog.ops, explain=explain, maker=self._maker)

    def _shared(self, graph: Graph, legal: Iterable[Match], policy: Policy) -> Iterator[Match]:
        closed = [f for f in self._fusions if not f.spec.open]
        return shared(graph, closed, self.catalog.ops, legal, light=policy != "aggressive")

    def _regions(
        self, graph: Graph, taken: Collection[str] = (), near: list[FailedMatch] | None = None
    ) -> Iterator[Match]:
        return matcher.captured(graph, self._fusions, self.catalog.ops, self._maker, taken, near)

    def plan(
        self,
        model: Any,
        *example: Any,
        policy: Policy = "balanced",
        executor: str | Executor = LIBRARY,
        matches: Matches | None = None,
        fuel: int | None = None,
        refuses: Callable[[Match], str | None] | None = None,
        gradients: Callable[[Match], Backward | str | None] | None = None,
        strides: Strides | None = None,
    ) -> Plan:
        """The set of matches that saves most time.

        Args:
            model, example: as for :meth:`fuse`, or a :class:`Graph`, or what ``open_model`` gave.
            policy: ``off``, ``conservative``, ``balanced`` or ``aggressive``; see ``core.planner.policies``.
            executor: who runs what is not fused: ``library`` (our own evaluator, as :meth:`fuse` does), ``eager``,
                ``inductor``, ``inductor-max-autotune`` or ``onnxruntime``; see ``core.planner.executor``.
            matches: of this graph, where they were found already.
            fuel: how many sites are taken at most, in the order of the graph; None reads ``FUSIONREG_FUEL``.
            refuses: match → why it cannot be taken for a reason of the caller's, None where it can.
            gradients: match → how its gradients are computed in a graph that is trained, or why they cannot be; None
                where nobody asks for them.
            strides: match → those of its inputs that are known not to lie row by row, by name; by default what the
                model tells of them.

        Raises: :class:`UnknownNameError` for another policy or executor, :class:`ArgumentError` for fuel that is no
        number.
        """
        opened = None if isinstance(model, Graph) else self._open(model, example)
        graph = model if opened is None else opened.graph
        maps = channels_last(graph, self.catalog.ops, opened.strides) if strides is None and opened else None
        strides = strides or (opened and opened.laid)
        found = (self._find(graph) if matches is None else matches).matches
        found = (*found, *self._shared(graph, found, policy))

        refusal = once(self.runtime.refusal)
        found = self._asked_for(found, refusal, gradients)
        cost = CostModel(
            self.catalog.ops, executor=executor_of(executor), measured=self.runtime.expected,
            kernels=once(self.runtime.seconds), gains=partial(self._gains, kernel=once(self.runtime.kernel)),
        )  # fmt: skip

        def accepts(match: Match) -> str | None:
            return (refuses(match) if refuses is not None else None) or refusal(match)

        def planned(strides: Strides | None) -> Plan:
            def laid(matches: Iterable[Match]) -> Iterable[Match]:
                return matches if strides is None else [replace(m, strides=FrozenDict(strides(m))) for m in matches]

            return planner.plan(
                graph, laid(found), cost=cost, policy=policy, accepts=accepts, gradients=gradients,
                fusions=self.catalog, regions=lambda taken: laid(self._regions(graph, taken)),
                fuel=_fuel() if fuel is None else fuel,
            )  # fmt: skip

        made = planned(strides)
        if maps is None:
            return made
        return maps.better(made, planned(maps.of), lambda value: COPY + 2 * cost.size(value) / COPIED)

    def _asked_for(
        self,
        found: tuple[Match, ...],
        refusal: Callable[[Match], str | None],
        gradients: Callable[[Match], Backward | str | None] | None,
    ) -> tuple[Match, ...]:
        """Without matches that would only give statistics for a backward pass besides, where nobody asks for gradients
        and a fusion that gives none of them is found at the same nodes; they stay where they alone have a kernel."""

        def besides(m: Match) -> bool:
            return len(m.outputs) < len(self.catalog[m.fusion].outputs)

        known: dict[frozenset[str], list[Match]] = {}
        for m in found:
            if not besides(m):
                known.setdefault(frozenset(m.nodes), []).append(m)

        def needless(m: Match) -> bool:
            others = known.get(frozenset(m.nodes), ())
            if not others or not besides(m) or self.catalog[m.fusion].spec.backward is None:
                return False
            wanted = gradients is not None and gradients(m) is not None
            return not wanted and (refusal(m) is not None or any(refusal(other) is None for other in others))

        return tuple(m for m in found if not needless(m))

    def fuse(
        self,
        model: Any,
        *example: Any,
        policy: Policy = "balanced",
        plan: Plan | None = None,
        dynamic_shapes: Any = None,
    ) -> Any:
        """Match → plan → a runnable.

        Args:
            model: a path to ``.onnx`` or ``.pt2``, an ``onnx.ModelProto``, an ``onnx_ir.Model``, a
                ``torch.export.ExportedProgram``, or a ``torch.nn.Module`` with ``example`` inputs.
            policy: ``off``, ``conservative``, ``balanced`` or ``aggressive``.
            plan: one that :meth:`plan` made of this model, to be applied instead of planning again.
            dynamic_shapes: of a module, which axes of the example inputs may vary, as ``torch.export.export`` takes it.

        Returns: for ONNX a :class:`FusedModel` (named inputs; it can be saved); for torch a callable with the signature
        of the original. A :class:`NothingFusedWarning` where nothing was fused, though the policy allows it.
        Raises: :class:`PlanError` for a plan of another graph, or of plugins that find other sites in it.
        """
        opened = self._open(model, example, dynamic_shapes=dynamic_shapes)
        made = self.build(opened, policy=policy, plan=plan, original=opened.original, saver=opened.saver)
        if not made.plan.chosen and policy != "off":
            told = f"nothing in {opened.name} is fused; `fusionreg match MODEL --explain` says why"
            warnings.warn(told, NothingFusedWarning, stacklevel=_outside())
        return opened.wrap(made)

    def build(self, model: Any, *, policy: Policy = "balanced", plan: Plan | None = None, **extra: Any) -> FusedModel:
        """A :class:`FusedModel` of a lifted graph, or of what ``open_model`` gave; ``policy`` and ``plan`` as for
        :meth:`fuse`."""
        from fusionreg.model import FusedModel

        graph = self.graph(model)
        made = self.plan(model, policy=policy) if plan is None else self._checked(graph, plan)
        return FusedModel.build(graph, made, self.catalog, self.runtime, **extra)

    def _checked(self, graph: Graph, plan: Plan) -> Plan:
        """A stored plan that this registry finds on this graph: every site is matched again, which also makes the
        fusions of its regions."""
        check_graph(plan, graph)
        legal = self._find(graph).matches
        kept = self._shared(graph, legal, plan.policy) if any(m.kept for m in plan.chosen) else ()
        found = {(m.fusion, m.nodes): m for m in (*legal, *kept)}
        for m in plan.chosen:
            if m.captured:
                inside = set(m.nodes)
                others = [n.name for n in graph.nodes if n.name not in inside]
                again = next((r for r in self._regions(graph, others) if r.nodes == m.nodes), None)
            else:
                again = found.get((m.fusion, m.nodes))
            if again != m:
                what = "is not found there" if again is None else "is another match there"
                raise PlanError(
                    "cannot apply a plan", f"to {graph.name}", f"{m.fusion} at {m.root} {what}",
                    "the plugins that it was made with", "Plan again", node=m.root,
                )  # fmt: skip
        fuel = _fuel()
        return plan if fuel is None else plan.limited(fuel)

    def _open(self, model: Any, example: tuple[Any, ...], **options: Any) -> Any:
        from fusionreg.integrations import open_model

        return open_model(model, example, ops=self.catalog.ops, **options)


def _outside() -> int:
    """The stack level, seen from the caller of this, of the first frame outside of this module: Python tells a warning
    once for each line of code that it is about."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__") == __name__:
        level, frame = level + 1, frame.f_back
    return level


def _fuel() -> int | None:
    """``FUSIONREG_FUEL``; None where it is not set. :class:`ArgumentError` where it is no count."""
    given = os.environ.get(FUEL, "").strip()
    if not given:
        return None
    if not given.isdecimal():
        raise ArgumentError("cannot plan", "with fuel", f"{FUEL}={given!r}", "a number of sites, 0 or more")
    return int(given)
