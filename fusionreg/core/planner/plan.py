"""Which of the overlapping matches are fused: those that together save most, and why not the others. Floor 4."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from ..errors import UnknownNameError
from ..ir import Graph
from ..matcher.legality import hazards
from ..matcher.match import Match
from .costs import Cost, CostModel
from .packing import pack

Policy = Literal["off", "conservative", "balanced", "aggressive"]


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
    """What will be fused.

    Attributes:
        chosen: matches that share no node and make no cycle together, ordered by their place in the graph.
        savings: what each of them saves by the cost model.
        losers: all other matches, in the same order.
        policy: the policy it was made under.
        exact: whether no other choice saves more by the cost model; False where a component was too large for an
            exact answer, or where a cycle among several matches had to be broken.
    """

    chosen: tuple[Match, ...]
    savings: tuple[Cost, ...]
    losers: tuple[Loser, ...]
    policy: Policy
    exact: bool = True

    @property
    def saved(self) -> Cost:
        """Bytes, operations, launches and seconds that the whole plan saves."""
        return sum(self.savings, Cost())

    def __iter__(self) -> Iterator[Match]:
        return iter(self.chosen)

    def __len__(self) -> int:
        return len(self.chosen)

    def __repr__(self) -> str:
        s = self.saved
        how = "" if self.exact else ", approximate"
        return (
            f"Plan({len(self.chosen)} sites, {len(self.losers)} losers, saves {s.seconds * 1e6:.1f} µs, "
            f"{s.bytes} bytes, {s.launches} launches, {self.policy}{how})"
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "policy": self.policy,
            "exact": self.exact,
            "saved": self.saved.to_dict(),
            "chosen": [m.to_dict() | {"saved": s.to_dict()} for m, s in zip(self.chosen, self.savings, strict=True)],
            "losers": [
                {"fusion": x.match.fusion, "root": x.match.root, "nodes": list(x.match.nodes), "reason": x.reason}
                | {"by": None if x.by is None else {"fusion": x.by.fusion, "root": x.by.root}}
                for x in self.losers
            ],
        }


def plan(
    graph: Graph,
    matches: Iterable[Match],
    *,
    cost: CostModel,
    policy: Policy = "balanced",
    accepts: Callable[[Match], str | None] | None = None,
    fusions: Any = None,
    regions: Callable[[frozenset[str]], Iterable[Match]] | None = None,
) -> Plan:
    """The set of matches that saves most seconds by the cost model.

    Args:
        graph: the graph that the matches are of.
        matches: in any order, overlapping or not; the plan does not depend on their order.
        cost: what nodes and fused calls cost.
        policy: ``off`` takes nothing; ``conservative`` only fusions with a kernel that rounds where the unfused chain
            rounds (``per_op``), where they save time; ``balanced`` whatever saves time; ``aggressive`` every site that
            does not lose its nodes to a better one.
        accepts: match → why no kernel can serve it, None where one can.
        fusions: fusion name → entry with ``kernels``; needed by ``conservative``.
        regions: names of nodes that are spoken for → the point-wise regions of what is left. Captured matches are
            chosen from those, once the others are: any part of a region is a region too.

    :class:`UnknownNameError` for another policy.
    """
    if policy not in get_args(Policy):
        raise UnknownNameError.among("policy", policy, get_args(Policy))
    if regions is not None:
        fixed = [m for m in matches if not m.captured]
        first = plan(graph, fixed, cost=cost, policy=policy, accepts=accepts, fusions=fusions)
        matches = [*fixed, *regions(frozenset(n for m in first.chosen for n in m.nodes))]
    place = graph.position
    ordered = sorted(matches, key=lambda m: (place[m.root], -len(m.nodes), m.fusion, m.plugin, m.spelling))
    costs = cost.on(graph)
    saved = [costs.saved(m) for m in ordered]
    refused: dict[int, str] = {}
    for i, m in enumerate(ordered):
        if reason := _refusal(m, saved[i], policy, accepts, fusions):
            refused[i] = reason
    weights = [_weight(m, s, policy, cost) for m, s in zip(ordered, saved, strict=True)]
    nodes = [frozenset(m.nodes) for m in ordered]
    exact, broken = True, dict[int, str]()
    while True:
        out = {*refused, *broken}
        packing = pack(nodes, [0.0 if i in out else w for i, w in enumerate(weights)])
        exact = exact and packing.exact
        loop = _cycle(graph, [ordered[i] for i in packing.chosen])
        if not loop:
            break
        exact = False
        ring = [packing.chosen[k] for k in loop]
        weakest = min(ring, key=lambda i: (weights[i], -i))
        others = ", ".join(f"{ordered[i].fusion} at {ordered[i].root}" for i in ring if i != weakest)
        broken[weakest] = f"would make a cycle together with {others}"
    taken = {n: i for i in packing.chosen for n in ordered[i].nodes}
    winners = set(packing.chosen)
    losers = []
    for i, m in enumerate(ordered):
        if i not in winners:
            own = refused.get(i) or broken.get(i)
            by = None if own else ordered[_most_overlap(m, taken)]
            losers.append(Loser(m, own or _lost(m, by), by))
    return Plan(
        tuple(ordered[i] for i in packing.chosen),
        tuple(saved[i] for i in packing.chosen),
        tuple(losers),
        policy,
        exact,
    )


def _refusal(
    m: Match, saved: Cost, policy: Policy, accepts: Callable[[Match], str | None] | None, fusions: Any
) -> str | None:
    if policy == "off":
        return "the policy is off"
    if policy == "conservative":
        kernels = fusions[m.fusion].kernels if fusions is not None else ()
        if not any(k.spec.rounding == "per_op" and not k.spec.pending for k in kernels):
            return "policy conservative: no kernel rounds per operator"
    if accepts is not None and (reason := accepts(m)):
        return reason
    if policy != "aggressive" and saved.seconds <= 0:
        if saved.launches <= 0 and saved.bytes <= 0:
            return "saves nothing: unfused it is one kernel already"
        figures = f"{saved.launches} launches, {saved.bytes} bytes"
        return f"saves no time: {figures} less, and yet {-saved.seconds * 1e6:.2f} µs more"
    return None


def _weight(m: Match, saved: Cost, policy: Policy, cost: CostModel) -> float:
    if policy == "aggressive":  # a site without gain still beats no site, and more nodes beat fewer
        return max(saved.seconds, 0.0) + 1e-3 * cost.device.launch * len(m.nodes)
    return saved.seconds


def _most_overlap(m: Match, taken: Mapping[str, int]) -> int:
    counts: dict[int, int] = {}
    for n in m.nodes:
        if n in taken:
            counts[taken[n]] = counts.get(taken[n], 0) + 1
    return max(counts, key=lambda i: (counts[i], -i))


def _lost(m: Match, by: Match | None) -> str:
    assert by is not None
    if set(m.nodes) == set(by.nodes):
        return f"{by.fusion} covers the same nodes and saves as much or more"
    if set(m.nodes) < set(by.nodes):
        return f"part of {by.fusion} at {by.root}"
    shared = [n for n in m.nodes if n in by.nodes]
    return f"shares {', '.join(shared[:3])} with {by.fusion} at {by.root}, and the plan saves more so"


def _cycle(graph: Graph, chosen: Sequence[Match]) -> list[int]:
    """Indices of chosen matches that lie on one cycle once all are contracted; empty when there is none.

    Matches with one output cannot: whatever leaves such a match leaves at its last node.
    """
    if all(len(m.outputs) == 1 for m in chosen):
        return []
    site = {n: i for i, m in enumerate(chosen) for n in m.nodes}
    unit = {n.name: site.get(n.name, len(chosen) + k) for k, n in enumerate(graph.nodes)}
    after: dict[int, set[int]] = {u: set() for u in unit.values()}
    for n in graph.nodes:
        for r in n.reads if n.graphs else n.inputs:
            producer = graph.producers.get(r)
            if producer is not None and unit[producer.name] != unit[n.name]:
                after[unit[producer.name]].add(unit[n.name])
    for earlier, later in hazards(graph):
        if unit[earlier] != unit[later]:
            after[unit[earlier]].add(unit[later])
    waits = dict.fromkeys(after, 0)
    before: dict[int, set[int]] = {u: set() for u in after}
    for a, targets in after.items():
        for b in targets:
            waits[b] += 1
            before[b].add(a)
    # what remains after peeling from both ends lies on cycles or between them
    _peel(waits, after)
    rest = {u for u, w in waits.items() if w}
    left = {u: len(after[u] & rest) for u in rest}
    _peel(left, {u: before[u] & rest for u in rest})
    core = {u for u, w in left.items() if w}
    if not core:
        return []
    start = min(core)
    ring, seen = [start], {start: 0}
    while True:  # every unit of the core has a successor in it: walking on closes a ring
        step = min(after[ring[-1]] & core)
        if step in seen:
            return sorted(u for u in ring[seen[step] :] if u < len(chosen))
        seen[step] = len(ring)
        ring.append(step)


def _peel(waits: dict[int, int], after: Mapping[int, set[int]]) -> None:
    """Sets to zero the count of everything that is not on or behind a cycle."""
    ready = [u for u, w in waits.items() if not w]
    while ready:
        for b in after[ready.pop()]:
            waits[b] -= 1
            if not waits[b]:
                ready.append(b)
