"""Point-wise operators behind a product: a match that holds them is no worse than one without them. Floor 4.

Both are measured by the like of them, which may be of quite different problems; and a kernel that makes a product does
not take longer for what it computes on the result before it writes it than another kernel does behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ..matcher.match import Match

if TYPE_CHECKING:
    from .savings import GraphCosts, Saving


def behind(costs: GraphCosts, matches: Sequence[Match], saved: Sequence[Saving]) -> list[Saving]:
    """What matches save, beside an executor that runs every operator by itself: of two by one kernel, where one has
    point-wise operators at its end that the other lacks, it saves no less than the other and what these take by
    themselves, but for bytes that only they read. So much is added to the longer one or, where that alone was measured
    as it is, taken from the shorter. Derived fusions stay behind others that end there with as many nodes."""
    found = list(saved)
    if not costs.model.executor.alone:
        return found
    at: dict[str, list[int]] = {}
    named = {(m.root, len(m.nodes)) for m, s in zip(matches, saved, strict=True) if s.gain is not None and not m.base}
    for i, m in enumerate(matches):
        if (gain := saved[i].gain) is not None and gain.kernel and not m.kept:
            at.setdefault(m.nodes[0], []).append(i)
    for some in at.values():
        some.sort(key=lambda i: (len(matches[i].nodes), i))
        for i in some:
            if not matches[i].base or (matches[i].root, len(matches[i].nodes)) not in named:
                _settle(costs, matches, found, i, some)
    return found


def _settle(costs: GraphCosts, matches: Sequence[Match], found: list[Saving], i: int, some: Sequence[int]) -> None:
    """A match and those of ``some`` that are a part of it."""
    for k in some:
        more = _more(costs, matches[i], matches[k])
        whole, part = found[i], found[k]
        if more is None or whole.gain is None or part.gain is None or whole.gain.kernel != part.gain.kernel:
            continue
        if part.cost.seconds + more <= whole.cost.seconds:
            continue
        if not whole.gain.sure:
            found[i] = _at(costs, matches[i], whole, part.cost.seconds + more, part.basis)
        elif not part.gain.sure:
            found[k] = _at(costs, matches[k], part, whole.cost.seconds - more, part.basis)


def _more(costs: GraphCosts, whole: Match, part: Match) -> float | None:
    """Seconds that ``whole`` saves more than a ``part`` of it; None of what is none, or lacks more than that."""
    ops, named, inside = costs.model.ops, costs.graph.node_by_name, set(part.nodes)
    rest = [n for n in whole.nodes if n not in inside]
    if not rest or len(rest) + len(inside) != len(whole.nodes):
        return None
    if not all((op := named[n].op) in ops and ops[op].pointwise for n in rest):
        return None
    read = max(costs.moved(whole) - costs.moved(part), 0) / costs.model.device.bandwidth
    return costs.unfused(rest).seconds - read


def _at(costs: GraphCosts, match: Match, own: Saving, seconds: float, basis: str) -> Saving:
    share = seconds / costs.unfused(match.nodes).seconds
    return replace(own, cost=replace(own.cost, seconds=seconds), share=share, basis=basis)
