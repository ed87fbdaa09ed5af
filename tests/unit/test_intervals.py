"""What abstract evaluation proves impossible: sound, and strong enough for the usual mistakes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusionreg.core.expressions import Expression
from fusionreg.core.intervals import EXTENT, UNKNOWN, Conditions, Interval, comparisons, computed, evaluate, impossible

ENV = {"K": EXTENT, "M": EXTENT, "T": "float16", "has": {"mma"}.__contains__}


@pytest.mark.parametrize(
    "conditions",
    [
        ["K % 8 == 9"],
        ["M < 0"],
        ["K < 64", "K >= 128"],
        ["128 <= K", "K < 64"],
        ["K % 16 == 0", "K % 8 == 4"],
        ['T == "float32"'],
        ['T in ("bfloat16", "float32")'],
        ["K in (64, 128)", "K > 200"],
        ["ceildiv(K, 8) < 0"],
        ["not (K >= 0)"],
        ["K == 3", "K % 8 == 0"],
        ["0 < K < 1"],
        ["min(K, 64) > 64"],
        ["has(wgmma)"],
        ["K > 3 and K < 2"],
        ["False"],
        ["K * 0 == 1"],
    ],
)
def test_impossible(conditions):
    assert impossible(conditions, ENV) in conditions


@pytest.mark.parametrize(
    "conditions",
    [
        ["K % 8 == 0", "M > 3"],
        ["K % 16 == 8", "K % 8 == 0"],
        ["K < 64", "K == 63"],
        ["K <= 64", "K >= 64"],
        ["K > 3", "K == 4"],
        ["3 < K", "K < 5"],
        ['T in ("bfloat16", "float32") or K == 0'],
        ["shape(x, 0) == K"],
        ["has(mma)"],
        ["K - 5 < 0"],
        ["aligned(x, 16)", "rank(x) == 2"],
        ["unknown > 3"],
        ["M / K > 3"],
    ],
)
def test_possible(conditions):
    assert impossible(conditions, ENV) is None


def test_names_it_reads():
    assert Conditions(["K % 8 == 0", "has(mma)"]).names == {"K", "has", "mma"}


def test_comparisons_with_words():
    text = 'T == "float16" or "Relu" != act or U in ("a", "b") or 3 < K'
    assert sorted(comparisons(text)) == [("K", 3), ("T", "float16"), ("U", "a"), ("U", "b"), ("act", "Relu")]
    assert computed("K + min(M, N * 2) - (P if Q else R)") == {"K", "N"}


ATOMS = st.builds(
    "({} {} {}) {} {}".format,
    st.sampled_from(["K", "M"]),
    st.sampled_from(["+", "*", "%", "//", "-"]),
    st.integers(1, 9),
    st.sampled_from(["==", "!=", "<", "<=", ">", ">="]),
    st.integers(-3, 20),
)
SIMPLE = st.builds("K {} {}".format, st.sampled_from(["==", "<", "<=", ">", ">=", "!="]), st.integers(0, 12))


@given(st.lists(ATOMS | SIMPLE, min_size=1, max_size=3), st.integers(0, 30), st.integers(0, 30))
def test_nothing_that_holds_is_called_impossible(conditions, k, m):
    if all(Expression.parse(c)({"K": k, "M": m}) for c in conditions):
        assert impossible(conditions, {"K": EXTENT, "M": EXTENT}) is None


@given(ATOMS, st.integers(0, 30), st.integers(0, 30))
def test_abstract_value_contains_the_concrete_one(text, k, m):
    side = text.partition(") ")[0].strip("(")
    concrete = Expression.parse(side)({"K": k, "M": m})
    abstract = evaluate(side, {"K": Interval(0, 30), "M": Interval(0, 30)})
    assert abstract is UNKNOWN or abstract.lo <= concrete <= abstract.hi
