"""Weighted set packing: the heaviest choice of sets that share no element. Floor 4; knows nothing of graphs.

Sets that share no element, directly or through others, are decided apart. A component is solved exactly: by branch and
bound while it is small, else by integer programming (SciPy's HiGHS), which is bounded by the nodes of its search tree
and never by a clock: the same sets give the same answer everywhere. Where that bound, or that on the size of a
component, is met, the best of what the program found and a greedy choice improved step by step is taken, and the
answer says that it is not exact.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

#: Components up to this many sets are searched; up to the second, solved as an integer program; beyond, greedily.
SEARCHED, PROGRAMMED = 16, 20_000
#: Work of one integer program: nodes of its search tree times sets. Graphs of models need one node.
WORK = 100_000
#: Rounds of local improvement of a greedy choice.
ROUNDS = 20


@dataclass(frozen=True, slots=True)
class Packing:
    """Indices of the chosen sets, ascending, and whether no better choice exists."""

    chosen: tuple[int, ...]
    exact: bool


def pack(sets: Sequence[frozenset[Hashable]], weights: Sequence[float], *, limit: int = WORK) -> Packing:
    """The heaviest disjoint choice; sets of weight ≤ 0 are never taken.

    Deterministic for one order of the sets, whatever the order in which a set yields its elements. Of equal sets with
    equal weights the earlier is taken, so callers order them by preference. ``limit``: work on one component, nodes of
    the search tree times sets; 0 takes the greedy choice for whatever is not small.
    """
    best: dict[frozenset[Hashable], int] = {}
    for i, s in enumerate(sets):  # of equal sets only the heaviest matters
        if weights[i] > 0 and (s not in best or weights[i] > weights[best[s]]):
            best[s] = i
    live = sorted(best.values())
    chosen: list[int] = []
    exact = True
    for component in components(live, sets):
        if len(component) == 1:
            chosen += component
        elif len(component) <= SEARCHED:
            chosen += _searched(component, sets, weights)
        else:
            found, sure = _programmed(component, sets, weights, limit) if len(component) <= PROGRAMMED else ([], False)
            if not sure:
                local = _improved(component, sets, weights)
                found = max(local, found, key=lambda c: sum(weights[i] for i in c))
            chosen += found
            exact = exact and sure
    return Packing(tuple(sorted(chosen)), exact)


def components(live: Iterable[int], sets: Sequence[frozenset[Hashable]]) -> list[list[int]]:
    """Groups of indices that are connected by shared elements, each ascending, ordered by their first."""
    parent: dict[int, int] = {}

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    first: dict[Hashable, int] = {}
    for i in live:
        parent[i] = i
        for element in sets[i]:
            a, b = root(first.setdefault(element, i)), root(i)
            parent[max(a, b)] = min(a, b)
    groups: dict[int, list[int]] = {}
    for i in parent:
        groups.setdefault(root(i), []).append(i)
    return [sorted(g) for _, g in sorted(groups.items())]


def _searched(component: list[int], sets: Sequence[frozenset[Hashable]], weights: Sequence[float]) -> list[int]:
    """Branch and bound; the bound is the weight of all sets left."""
    order = sorted(component, key=lambda i: (-weights[i], i))
    rest = [0.0] * (len(order) + 1)
    for k in range(len(order) - 1, -1, -1):
        rest[k] = rest[k + 1] + weights[order[k]]
    best: tuple[float, list[int]] = (0.0, [])

    def search(k: int, taken: list[int], used: frozenset[Hashable], weight: float) -> None:
        nonlocal best
        if weight > best[0] * (1 + 1e-12):
            best = (weight, taken)
        if k == len(order) or weight + rest[k] <= best[0] * (1 + 1e-12):
            return
        i = order[k]
        if not used & sets[i]:
            search(k + 1, [*taken, i], used | sets[i], weight + weights[i])
        search(k + 1, taken, used, weight)

    search(0, [], frozenset(), 0.0)
    return best[1]


def _programmed(
    component: list[int], sets: Sequence[frozenset[Hashable]], weights: Sequence[float], limit: int = WORK
) -> tuple[list[int], bool]:
    """(choice, whether it is the best) by an integer program: one row per element that several sets want. The best
    that was found, perhaps nothing, where the search takes more than ``limit``."""
    import numpy as np
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array

    if limit < 1:
        return [], False
    wanted: dict[Hashable, list[int]] = {}
    for column, i in enumerate(component):
        for element in sets[i]:
            wanted.setdefault(element, []).append(column)
    rows = sorted({tuple(columns) for columns in wanted.values() if len(columns) > 1})
    if not rows:
        return list(component), True
    top = max(weights[i] for i in component)
    gain = np.array([weights[i] / top for i in component])
    cells = [(r, c) for r, columns in enumerate(rows) for c in columns]
    matrix = csr_array((np.ones(len(cells)), tuple(zip(*cells, strict=True))), shape=(len(rows), len(component)))
    answer = milp(
        -gain,
        constraints=LinearConstraint(matrix, ub=np.ones(len(rows))),
        integrality=np.ones(len(component)),
        bounds=Bounds(0, 1),
        options={"mip_rel_gap": 0.0, "node_limit": max(1, limit // len(component))},
    )
    found = [] if answer.x is None else [i for i, x in zip(component, answer.x, strict=True) if x > 0.5]
    return found, bool(answer.success)


def _improved(component: list[int], sets: Sequence[frozenset[Hashable]], weights: Sequence[float]) -> list[int]:
    """The better of two greedy choices, by weight and by weight for each element, each improved."""
    heavy = sorted(component, key=lambda i: (-weights[i], i))
    dense = sorted(component, key=lambda i: (-weights[i] / len(sets[i]), i))
    found = [_climbed(order, sets, weights) for order in (heavy, dense)]
    return max(found, key=lambda c: sum(weights[i] for i in c))


def _climbed(order: list[int], sets: Sequence[frozenset[Hashable]], weights: Sequence[float]) -> list[int]:
    """Greedily in ``order``; then a set that outweighs all chosen ones in its way takes their place, and what is free
    after that is filled; until nothing changes, or :data:`ROUNDS` times."""
    holder: dict[Hashable, int] = {}
    taken: set[int] = set()

    def take(i: int) -> bool:
        rivals = {holder[e] for e in sets[i] if e in holder}
        if weights[i] <= sum(sorted(weights[r] for r in rivals)) * (1 + 1e-12):
            return False
        for r in rivals:
            taken.discard(r)
            for e in sets[r]:
                del holder[e]
        taken.add(i)
        holder.update(dict.fromkeys(sets[i], i))
        return True

    for i in order:
        if not any(e in holder for e in sets[i]):
            take(i)
    for _ in range(ROUNDS):
        moved = [take(i) for i in order if i not in taken]
        if not any(moved):
            break
    return sorted(taken)
