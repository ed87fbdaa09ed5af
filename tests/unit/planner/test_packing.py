"""The heaviest disjoint choice: against brute force, in any size, and the same everywhere."""

from __future__ import annotations

import itertools
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusionreg.core.planner import packing


def brute(sets, weights):
    best = 0.0
    for k in range(len(sets) + 1):
        for pick in itertools.combinations(range(len(sets)), k):
            if sum(len(sets[i]) for i in pick) == len(frozenset().union(*(sets[i] for i in pick))):
                best = max(best, sum(weights[i] for i in pick))
    return best


FAMILIES = st.lists(
    st.tuples(st.frozensets(st.integers(0, 9), min_size=1, max_size=4), st.integers(-2, 9).map(lambda w: w * 1e-6)),
    max_size=9,
)


@settings(max_examples=200, deadline=None)
@given(FAMILIES)
def test_packing_is_exact(family):
    sets, weights = [s for s, _ in family], [w for _, w in family]
    found = packing.pack(sets, weights)
    assert found.exact
    assert all(sets[a].isdisjoint(sets[b]) for a, b in itertools.combinations(found.chosen, 2))
    assert all(weights[i] > 0 for i in found.chosen)
    assert sum(weights[i] for i in found.chosen) == pytest.approx(brute(sets, weights))


@settings(max_examples=40, deadline=None)
@given(FAMILIES)
def test_integer_programming_agrees_with_search(family):
    live = {s: w for s, w in family if w > 0}
    sets, weights = list(live), list(live.values())
    if not sets:
        return
    indices = list(range(len(sets)))
    programmed, sure = packing._programmed(indices, sets, weights)
    assert sure
    assert all(sets[a].isdisjoint(sets[b]) for a, b in itertools.combinations(programmed, 2))
    assert sum(weights[i] for i in programmed) == pytest.approx(brute(sets, weights))


def ladder(count):
    """One component: overlapping pairs along a line, of which every other one is best."""
    return [frozenset({i, i + 1}) for i in range(count)], [1.0 + (i % 2) * 0.5 for i in range(count)]


@pytest.mark.parametrize("count", [12, 200, 2_000])
def test_components_of_any_size_met_are_solved_exactly(count):
    sets, weights = ladder(count)
    found = packing.pack(sets, weights)
    assert found.exact
    assert found.chosen == tuple(range(1, count, 2))


def test_without_search_the_answer_says_that_it_is_not_exact():
    sets, weights = ladder(200)
    found = packing.pack(sets, weights, limit=0)
    assert not found.exact and found.chosen == tuple(range(1, 200, 2))
    assert packing.pack(*ladder(12), limit=0).exact


def entangled(count, seed):
    """Random overlapping sets over few elements: a hard component."""
    rng = random.Random(seed)
    sets = [frozenset(rng.sample(range(count // 3), rng.randint(2, 6))) for _ in range(count)]
    return sets, [rng.randint(1, 1000) * 1e-7 for _ in range(count)]


def windows(count, seed):
    """Random stretches of a line of nodes, as matches along a chain of operators are: one component."""
    rng = random.Random(seed)
    starts = [(rng.randrange(count // 2), rng.randint(2, 12)) for _ in range(count)]
    sets = [frozenset({a, *(x for x in range(a, a + n) if rng.random() < 0.8)}) for a, n in starts]
    return sets, [len(s) * 1e-6 * rng.uniform(0.5, 1.5) for s in sets]


def test_two_thousand_overlapping_matches_are_chosen_from_exactly_and_at_once():
    sets, weights = windows(2_000, 1)
    assert len(packing.components(range(2_000), sets)) == 1
    start = time.process_time()
    found = packing.pack(sets, weights)
    assert time.process_time() - start < 5
    assert found.exact
    assert all(sets[a].isdisjoint(sets[b]) for a, b in itertools.combinations(found.chosen, 2))
    near = packing.pack(sets, weights, limit=0)
    assert 0.9 <= sum(weights[i] for i in near.chosen) / sum(weights[i] for i in found.chosen) < 1


def test_a_search_that_meets_its_bound_takes_the_best_it_has():
    sets, weights = entangled(600, 1)
    found = packing.pack(sets, weights, limit=600)  # one node of the tree, and this one needs more
    assert not found.exact
    assert all(sets[a].isdisjoint(sets[b]) for a, b in itertools.combinations(found.chosen, 2))
    greedy = packing.pack(sets, weights, limit=0)
    assert sum(weights[i] for i in found.chosen) >= sum(weights[i] for i in greedy.chosen)


@pytest.mark.parametrize("seed", range(5))
def test_local_improvement_is_near_the_best(seed):
    sets, weights = entangled(60, seed)
    best = packing.pack(sets, weights)
    near = packing.pack(sets, weights, limit=0)
    assert best.exact and not near.exact
    share = sum(weights[i] for i in near.chosen) / sum(weights[i] for i in best.chosen)
    assert 0.8 <= share <= 1 + 1e-9


def test_components_are_decided_apart():
    sets = [frozenset({1, 2}), frozenset({2, 3}), frozenset({7}), frozenset({8, 9}), frozenset({9, 3})]
    assert packing.components(range(5), sets) == [[0, 1, 3, 4], [2]]
