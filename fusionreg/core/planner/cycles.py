"""Matches that lie on a cycle once all are contracted: legal alone, not together. Floor 4."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..ir import Graph
from ..matcher.legality import hazards
from ..matcher.match import Match


def cycle(graph: Graph, chosen: Sequence[Match]) -> list[int]:
    """Indices of chosen matches that lie on one cycle once all are contracted; empty when there is none.

    Matches with one output cannot: whatever leaves such a match leaves at its last node.
    """
    if all(len(m.outputs) == 1 for m in chosen):
        return []
    site = {n: i for i, m in enumerate(chosen) for n in m.taken}
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
