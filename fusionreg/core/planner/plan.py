"""Which of the overlapping matches are fused: those that together save most, and why not the others. Floor 4."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

from ..errors import UnknownNameError
from ..ir import Graph
from ..matcher.match import Match
from .costs import Cost, CostModel
from .cycles import cycle
from .digest import graph_digest
from .packing import WORK, pack
from .policies import FUEL, Policy, refusal
from .savings import GraphCosts, Saving
from .tails import behind
from .training import Backward

__all__ = ["Loser", "Plan", "Policy", "plan"]

#: Match → how its gradients are computed, why they cannot be, or None where nobody asks for them.
Gradients = Callable[[Match], Backward | str | None]


@dataclass(frozen=True)
class Loser:
    """A match that is not fused.

    Attributes:
        match: which.
        reason: why not.
        by: the chosen match that took its nodes or its place in an order; None where the reason is its own.
    """

    match: Match
    reason: str
    by: Match | None = None

    def __str__(self) -> str:
        return f"{self.match.fusion} at {self.match.root}: {self.reason}"


@dataclass(frozen=True)
class Plan:
    """What will be fused. ``str(plan)`` is a table; ``to_dict`` and ``from_dict`` keep it in JSON.

    Attributes:
        chosen: matches that share no node and make no cycle together, ordered by their place in the graph.
        savings: what each of them saves once those before it are taken: their sum is what the plan saves.
        losers: all other matches, in the same order; those that fuel cut off come last.
        policy: the policy it was made under.
        exact: whether no other choice saves more, each match counted by what it saves alone; False where a component
            was too large for an exact answer, or where a cycle among several matches had to be broken. Matches that
            take parts of one kernel of the executor may save more together.
        executor: who was to run the rest.
        basis: what each saving rests on: ``model``, or the measurement.
        graph: digest of the graph that it is for.
        fuel: how many sites it was cut off at; None where it was not.
        moved: inputs and filters of the graph that have channels last in it: they are moved first.
        backwards: of each site, how its gradients are computed, in words, "" where nobody asks for them; empty where
            that is so of all. What is computed again is part of its saving.
    """

    chosen: tuple[Match, ...]
    savings: tuple[Cost, ...]
    losers: tuple[Loser, ...]
    policy: Policy
    exact: bool = True
    executor: str = "library"
    basis: tuple[str, ...] = ()
    graph: str = ""
    fuel: int | None = None
    backwards: tuple[str, ...] = ()
    moved: tuple[str, ...] = ()

    @property
    def saved(self) -> Cost:
        """Bytes, operations, launches and seconds that the whole plan saves."""
        return sum(self.savings, Cost())

    @property
    def digest(self) -> str:
        """SHA-256 over what it does: its graph, and the matches that it takes. Equal in every process and on every rank
        that plans the same graph with the same plugins."""
        does = [self.graph, self.policy, self.executor, [_key(m) for m in self.chosen]]
        does += [self.moved] if self.moved else []
        return hashlib.sha256(json.dumps(does, separators=(",", ":")).encode()).hexdigest()

    def limited(self, fuel: int) -> Plan:
        """The same with its first ``fuel`` sites alone."""
        if fuel >= len(self.chosen):
            return replace(self, fuel=fuel)
        kept, cut = self.chosen[:fuel], self.chosen[fuel:]
        losers = tuple(replace(x, by=None) if x.by in cut else x for x in self.losers)
        return replace(
            self, chosen=kept, savings=self.savings[:fuel], basis=self.basis[:fuel],
            backwards=self.backwards[:fuel], losers=(*losers, *(Loser(m, FUEL) for m in cut)), fuel=fuel,
        )  # fmt: skip

    def __iter__(self) -> Iterator[Match]:
        return iter(self.chosen)

    def __len__(self) -> int:
        return len(self.chosen)

    def __repr__(self) -> str:
        s = self.saved
        beside = "" if self.executor == "library" else f" beside {self.executor}"
        how = "" if self.exact else ", approximate"
        return (
            f"Plan({len(self.chosen)} sites, {len(self.losers)} losers, saves {s.seconds * 1e6:.1f} µs, "
            f"{s.bytes} bytes, {s.launches} launches, {self.policy}{beside}{how})"
        )

    def __str__(self) -> str:
        return self.describe()

    def describe(self, losers: bool = True) -> str:
        """Its sites and, unless ``losers`` is false, what was not taken and why, as a table of plain text."""
        from .stored import describe

        return describe(self, losers)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        from .stored import to_dict

        return to_dict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Plan:
        """What :meth:`to_dict` gave, also by way of JSON; :class:`PlanError` names what is damaged."""
        from .stored import from_dict

        return from_dict(data)


def _key(m: Match) -> str:
    bound = (tuple(d.items()) for d in (m.inputs, m.outputs, m.attributes, m.choices, m.forms))
    return repr((m.fusion, m.plugin, m.spelling, m.nodes, *bound))


def plan(
    graph: Graph,
    matches: Iterable[Match],
    *,
    cost: CostModel,
    policy: Policy = "balanced",
    accepts: Callable[[Match], str | None] | None = None,
    gradients: Gradients | None = None,
    fusions: Any = None,
    regions: Callable[[frozenset[str]], Iterable[Match]] | None = None,
    fuel: int | None = None,
    limit: int = WORK,
) -> Plan:
    """The set of matches that saves most seconds by the cost model.

    Args:
        graph: the graph that the matches are of.
        matches: in any order, overlapping or not; the plan does not depend on their order.
        cost: what nodes and fused calls cost, and beside which executor.
        policy: see :data:`~.policies.Policy`.
        accepts: match → why no kernel can serve it, None where one can.
        gradients: how the gradients of a match are computed, where the graph is to be trained.
        fusions: fusion name → entry with ``kernels``; needed by ``conservative``.
        regions: names of nodes that are spoken for → the point-wise regions of what is left. Captured matches are
            chosen from those, once the others are: any part of a region is a region too.
        fuel: how many sites are taken at most, in the order of the graph.
        limit: work of the search in one component of overlapping matches: nodes of its tree times matches. After it
            the best choice found so far is taken. No clock bounds it: every rank of a job comes to the same plan.

    :class:`UnknownNameError` for another policy.
    """
    if policy not in get_args(Policy):
        raise UnknownNameError.among("policy", policy, get_args(Policy))
    costs = cost.on(graph)
    every = list(matches)

    def choose(among: Sequence[Match]) -> Plan:
        return _choose(graph, among, costs, policy, accepts, gradients, fusions, limit)

    if regions is not None and not (cost.executor.chains and policy != "aggressive"):
        fixed = [m for m in every if not m.captured]
        first = choose(fixed)
        every = [*fixed, *regions(frozenset(n for m in first.chosen for n in m.taken))]
    made = replace(choose(every), graph=graph_digest(graph))
    return made if fuel is None else made.limited(fuel)


def _choose(
    graph: Graph, matches: Sequence[Match], costs: GraphCosts, policy: Policy, accepts: Any,
    gradients: Gradients | None, fusions: Any, limit: int,
) -> Plan:  # fmt: skip
    place, cost = graph.position, costs.model
    ordered = sorted(
        matches, key=lambda m: (place[m.root], -len(m.nodes), m.around, m.fusion, m.plugin, m.spelling, m.nodes)
    )
    backwards = [gradients(m) if gradients is not None else None for m in ordered]
    extra = [b.cost(cost) if isinstance(b, Backward) else None for b in backwards]
    saved = behind(costs, ordered, [costs.saved(m, extra=e) for m, e in zip(ordered, extra, strict=True)])
    broken: dict[int, str] = {}
    for i, (m, backward) in enumerate(zip(ordered, backwards, strict=True)):
        reason = backward.refusal(policy, cost) if isinstance(backward, Backward) else backward
        if reason is None:
            reason = refusal(m, saved[i], policy, cost, _plain(costs, m), accepts, fusions)
            if reason and isinstance(backward, Backward) and backward.cost(cost) != Cost():
                reason += f"; its backward pass {backward.describe(cost)}"
        if reason:
            broken[i] = reason
    weights = [_weight(m, s, policy, cost) for m, s in zip(ordered, saved, strict=True)]
    nodes = [frozenset(place[n] for n in m.taken) for m in ordered]
    exact = True
    while True:
        packing = pack(nodes, [0.0 if i in broken else w for i, w in enumerate(weights)], limit=limit)
        exact = exact and packing.exact
        chosen = packing.chosen
        if loop := cycle(graph, [ordered[i] for i in chosen]):
            ring = [chosen[k] for k in loop]
            weakest = min(ring, key=lambda i: (weights[i], -i))
            others = ", ".join(f"{ordered[i].fusion} at {ordered[i].root}" for i in ring if i != weakest)
            broken[weakest] = f"would make a cycle together with {others}"
            exact = False
        else:
            break
    taken = {n: i for i in chosen for n in ordered[i].taken}
    winning, losers = set(chosen), []
    for i, m in enumerate(ordered):
        if i not in winning:
            own = broken.get(i)
            by = None if own else ordered[_most_overlap(m, taken)]
            losers.append(Loser(m, own or _why(m, by), by))
    winners = tuple(ordered[i] for i in chosen)
    found = [saved[i] for i in chosen] if cost.executor.alone else _in_turn(costs, winners, [extra[i] for i in chosen])
    told = tuple(b.describe(cost) if isinstance(b := backwards[i], Backward) else "" for i in chosen)
    return Plan(
        winners, tuple(s.cost for s in found), tuple(losers), policy, exact, cost.executor.name,
        tuple(s.basis for s in found), backwards=told if any(told) else (),
    )  # fmt: skip


def _plain(costs: GraphCosts, m: Match) -> bool:
    """Whether all operators of a match are point-wise, or none at all."""
    ops, free, named = costs.model.ops, costs.model.free, costs.graph.node_by_name
    return m.captured or all((op := named[n].op) in free or (op in ops and ops[op].pointwise) for n in m.nodes)


def _weight(m: Match, saving: Saving, policy: Policy, cost: CostModel) -> float:
    if policy == "aggressive":  # a site without gain still beats no site, and more nodes beat fewer
        return max(saving.cost.seconds, 0.0) + 1e-3 * cost.device.launch * len(m.taken)
    return saving.cost.seconds


def _in_turn(costs: GraphCosts, chosen: Sequence[Match], extra: Sequence[Cost | None]) -> list[Saving]:
    """What each saves once those before it are taken."""
    taken: set[str] = set()
    found = []
    for m, e in zip(chosen, extra, strict=True):
        found.append(costs.saved(m, taken, e))
        taken.update(m.taken)
    return found


def _most_overlap(m: Match, taken: Mapping[str, int]) -> int:
    counts: dict[int, int] = {}
    for n in m.taken:
        if n in taken:
            counts[taken[n]] = counts.get(taken[n], 0) + 1
    return max(counts, key=lambda i: (counts[i], -i))


def _why(m: Match, by: Match | None) -> str:
    assert by is not None
    if set(m.taken) == set(by.taken):
        return f"{by.fusion} covers the same nodes and saves as much or more"
    if set(m.taken) < set(by.taken):
        return f"part of {by.fusion} at {by.root}"
    shared = [n for n in m.taken if n in by.taken]
    return f"shares {', '.join(shared[:3])} with {by.fusion} at {by.root}, and the plan saves more so"
