"""One segment: trace, match, choose, weave."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from fusionreg.core.errors import FusionregError, ModelError
from fusionreg.core.matcher.match import Match
from fusionreg.core.planner.training import UNSURE as MULTIPLIES
from fusionreg.core.planner.training import Backward

from ..operators import Operators
from . import autocast, maps, masks
from .gradients import Gradients
from .guards import Extents
from .lowering import Lowered, lower
from .options import Options
from .reach import Reach
from .reading import Traced, read
from .report import FusedSite, LostSite, Report
from .retrace import to_aten
from .weaving import dressed, weave

if TYPE_CHECKING:
    from fusionreg.api import Registry
    from fusionreg.core.planner.plan import Plan

#: Why a site that gives maps is not taken among convolutions that are Inductor's, unless all maps are moved.
MOVED = "Inductor runs the convolutions around it with channels last, and would copy its maps"
#: How often a plan is made again at most, because measurements let in other sites than before.
_TURNS = 3


@dataclass(frozen=True)
class _Planned:
    """A traced graph, and what is to be fused in it."""

    traced: Traced
    lowered: Lowered
    gradients: Gradients
    reach: Reach
    plan: Plan
    laid: int = 0
    """Of how many attentions the mask was laid out, or left out."""

    @property
    def saves(self) -> float:
        """Seconds."""
        return sum(s.seconds for s in self.plan.savings)


class Fuser:
    """Rewrites the segments of one Dynamo graph.

    Args:
        executor: who runs what is not fused; see ``core.planner.executor``.

    Attributes:
        reports: one for each segment that was looked at.
    """

    def __init__(self, registry: Registry, options: Options, executor: str) -> None:
        self.registry, self.options, self.executor = registry, options, executor
        self.operators = Operators.of(registry)
        self.reports: list[Report] = []
        self.sites = 0
        self._measuring, self._unmeasured = options.measuring, 0

    def rewrite(self, segment: torch.fx.GraphModule, values: list[Any]) -> torch.fx.GraphModule | None:
        """The segment with what could be fused as calls; None where nothing was, or it cannot be rewritten."""
        device = _device(values)
        if device is None or self.options.policy == "off":
            return None
        if device.type == "cpu" and self.options.device != "sim":
            self.reports.append(Report(refused=("its tensors are on the CPU: fused kernels run on a GPU",)))
            return None
        return self._guarded(lambda: self._best(segment, values, device))

    def rewrite_traced(self, module: torch.fx.GraphModule, moved: bool = False) -> torch.fx.GraphModule:
        """A graph that autograd has made, of aten calls, with what could be fused as calls; ``module`` itself, as it
        was, where nothing could. ``moved``: whether its maps are moved to channels last in it."""
        values = [n.meta.get("val") for n in module.graph.find_nodes(op="placeholder")]
        device = _device(values)
        if device is None or self.options.policy == "off" or (device.type == "cpu" and self.options.device != "sim"):
            return module
        with torch.no_grad():
            measure = bool(self.options.measure)
            copied = self.options.inner == "inductor" and not moved and maps.copied(module, values)
            stay = MOVED if copied else ""
            made = self._guarded(lambda: self._woven(self._planned(read(module, "graph"), 0, values, measure, stay)))
        return module if made is None else dressed(made, module)

    def _guarded(self, rewrite: Callable[[], torch.fx.GraphModule | None]) -> torch.fx.GraphModule | None:
        """What ``rewrite`` gives; None, and a line of the report, where it fails: the graph works without us."""
        try:
            return rewrite()
        except FusionregError as error:
            if self.options.strict:
                raise
            self.reports.append(Report(refused=(str(error),)))
        except Exception as error:  # whatever tracing raises
            if self.options.strict:
                raise
            self.reports.append(Report(refused=(f"tracing it failed ({type(error).__name__}: {error})",)))
        return None

    def _best(
        self, segment: torch.fx.GraphModule, values: list[Any], device: torch.device
    ) -> torch.fx.GraphModule | None:
        """The segment as the plan has it that saves most: of its maps as they lie, or with channels last."""
        module = to_aten(segment, values)
        moved, inductor = maps.movable(module, values), self.options.inner == "inductor"
        measure = bool(self.options.measure)
        if moved:
            given = [moved.get(i, v) for i, v in enumerate(values)]
            other = self._planned(*self._read(to_aten(segment, given), device), given, measure)
            price = maps.seconds(maps.by_itself(module, moved) if inductor else moved)
        stay = MOVED if moved and inductor else ""
        plan = self._planned(*self._read(module, device), values, measure and not moved, stay)
        if moved and other.saves - price > plan.saves and (made := self._woven(other)) is not None:
            self.reports[-1] = replace(self.reports[-1], moved=maps.move(made, moved, segment))
            return made
        return self._woven(plan)

    def _read(self, module: torch.fx.GraphModule, device: torch.device) -> tuple[Traced, int]:
        """And of how many attentions the mask was laid out."""
        autocast.spell_out(module, device.type)
        laid = masks.lay_out(module) if self.options.policy != "conservative" else 0
        return read(module, "graph"), laid

    def _planned(
        self, traced: Traced, laid: int, values: Sequence[Any], measure: bool, maps_stay: str = ""
    ) -> _Planned:
        """The plan of a traced graph; ``maps_stay``: why no site may give maps, "" where they may."""
        lowered = lower(traced, self.operators, torch.is_grad_enabled(), self.options.policy != "conservative")
        reach, extents = Reach(traced, lowered), Extents(traced)
        gradients = Gradients(traced, lowered, self.operators, values, reach.strides)

        def refuses(match: Match) -> str | None:
            entry = self.operators.registry.catalog[match.fusion]
            if maps_stay and entry.spec.layouts:
                return maps_stay
            return reach.refusal(match) or extents.refusal(match, entry)

        def planned() -> Plan:
            return self.registry.plan(
                lowered.graph, policy=self.options.policy, refuses=refuses, gradients=gradients.backward,
                executor=self.executor, strides=reach.strides,
            )  # fmt: skip

        plan = planned()
        for _ in range(_TURNS if measure else 0):
            if not self._measured(plan, reach.place, _backwards(plan, gradients)):
                break
            plan = planned()
        return _Planned(traced, lowered, gradients, reach, plan, laid)

    def _woven(self, of: _Planned) -> torch.fx.GraphModule | None:
        """The graph with what its plan has chosen as calls; None where that is nothing."""
        found = self._report(of.plan, of.lowered, of.gradients, of.reach)
        self.reports.append(replace(found, unmeasured=self._unmeasured, masks=of.laid))
        chosen = [m for m in of.plan.chosen if not of.reach.stands(m)]
        if not chosen and not of.laid:
            return None
        graph = weave(of.traced, of.lowered, chosen, self.operators, self.sites)
        self.sites += len(of.lowered.seeds)
        root = torch.nn.Module()
        for name, tensor in of.traced.constants.items():
            root.register_buffer(name, tensor, persistent=False)
        return torch.fx.GraphModule(root, graph)

    def _measured(self, plan: Plan, place: torch.device, also: Sequence[Match]) -> int:
        """How many sites of a plan were measured now."""
        if _ranks() > 1:
            self._tell("nothing is measured in one of several processes: each would choose for itself")
            return 0
        start = time.monotonic()
        try:
            done, left = self.registry.measure(plan, place.index or 0, self._measuring, also)
        except FusionregError as error:
            self._tell(str(error))
            return 0
        self._measuring -= time.monotonic() - start
        self._unmeasured = left
        return done if self._measuring > 0 else 0

    def _tell(self, refused: str) -> None:
        if self.options.strict:
            raise ModelError("cannot compile", "backend fusionreg", refused, "sites that can be measured")
        self.reports.append(Report(refused=(refused,)))

    def _report(self, plan: Any, lowered: Lowered, gradients: Gradients, reach: Reach) -> Report:
        nodes = lowered.graph.node_by_name

        def described(match: Match) -> tuple[tuple[str, ...], str]:
            return reach.covered(match), nodes[match.root].source

        rows = zip(plan.chosen, plan.savings, plan.backwards or ("",) * len(plan.chosen), strict=True)
        fused = tuple(
            FusedSite(m.fusion, *described(m), bool(gradients.wanted(m)), s.seconds, backward, reach.kept(m))
            for m, s, backward in rows
            if not reach.stands(m)
        )
        lost = tuple(LostSite(x.match.fusion, *described(x.match), x.reason) for x in plan.losers)
        return Report(fused, lost, (), lowered.opaque, self.options.policy, plans=(plan.digest,))


def _backwards(plan: Plan, gradients: Gradients) -> list[Match]:
    """The calls of backward fusions that could keep a site out."""
    sites = (*plan.chosen, *(x.match for x in plan.losers if x.reason == MULTIPLIES))
    found = [gradients.backward(m) for m in sites]
    return [b.call for b in found if isinstance(b, Backward) and b.call is not None]


def _ranks() -> int:
    """How many processes the job has."""
    known = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if known else 1


def _device(values: list[Any]) -> torch.device | None:
    """Where the tensors of a segment are; None where there are none, or they are in several places."""
    found = {v.device for v in values if isinstance(v, torch.Tensor) and (v.dim() or v.device.type != "cpu")}
    return found.pop() if len(found) == 1 else None
