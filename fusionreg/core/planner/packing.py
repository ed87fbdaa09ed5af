"""Weighted set packing: the heaviest choice of sets that share no element. Floor 4; knows nothing of graphs.

Sets that share no element, directly or through others, are decided apart. A component is solved exactly: by branch and
bound while it is small, by integer programming (SciPy's HiGHS) up to a few hundred sets; beyond that greedily, and
the answer says so.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

#: Components up to this many sets are searched; up to the second, solved as an integer program; beyond, greedily.
SEARCHED, PROGRAMMED = 16, 600


@dataclass(frozen=True, slots=True)
class Packing:
    """Indices of the chosen sets, ascending, and whether no better choice exists."""

    chosen: tuple[int, ...]
    exact: bool


def pack(sets: Sequence[frozenset[Hashable]], weights: Sequence[float]) -> Packing:
    """The heaviest disjoint choice; sets of weight ≤ 0 are never taken.

    Deterministic for one order of the sets. Of equal sets with equal weights the earlier is taken, so callers order
    them by preference.
    """
    best: dict[frozenset[Hashable], int] = {}
    for i, s in enumerate(sets):  # of equal sets only the heaviest matters
        if weights[i] > 0 and (s not in best or weights[i] > weights[best[s]]):
            best[s] = i
    live = sorted(best.values())
    chosen: list[int] = []
    exact = True
    for component in components(live, sets):
        if len(component) <= SEARCHED:
            chosen += _searched(component, sets, weights)
        elif len(component) <= PROGRAMMED and (found := _programmed(component, sets, weights)) is not None:
            chosen += found
        else:
            chosen += _greedy(component, sets, weights)
            exact = False
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
    component: list[int], sets: Sequence[frozenset[Hashable]], weights: Sequence[float]
) -> list[int] | None:
    """Integer program: one row per element that several sets want. None when the solver does not finish."""
    import numpy as np
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array

    wanted: dict[Hashable, list[int]] = {}
    for column, i in enumerate(component):
        for element in sets[i]:
            wanted.setdefault(element, []).append(column)
    rows = [columns for columns in dict.fromkeys(tuple(c) for c in wanted.values()) if len(columns) > 1]
    top = max(weights[i] for i in component)
    gain = np.array([weights[i] / top for i in component])
    cells = [(r, c) for r, columns in enumerate(rows) for c in columns]
    if not cells:
        return list(component)
    matrix = csr_array((np.ones(len(cells)), tuple(zip(*cells, strict=True))), shape=(len(rows), len(component)))
    answer = milp(
        -gain,
        constraints=LinearConstraint(matrix, ub=np.ones(len(rows))),
        integrality=np.ones(len(component)),
        bounds=Bounds(0, 1),
        options={"mip_rel_gap": 0.0, "node_limit": 20_000},
    )
    if not answer.success:
        return None
    return [i for i, x in zip(component, answer.x, strict=True) if x > 0.5]


def _greedy(component: list[int], sets: Sequence[frozenset[Hashable]], weights: Sequence[float]) -> list[int]:
    used: set[Hashable] = set()
    chosen = []
    for i in sorted(component, key=lambda i: (-weights[i], i)):
        if not used & sets[i]:
            chosen.append(i)
            used |= sets[i]
    return chosen
