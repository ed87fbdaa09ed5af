"""The numerics contract: every rule has a value that it admits and one that it refuses."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from fusionreg.core.conformance.compare import OVERFLOWED_CAST, compare, pooled, rounded, ulp
from fusionreg.core.dtypes import dtype
from fusionreg.core.spec import Tolerance

F16, BF16 = np.dtype("float16"), np.dtype(ml_dtypes.bfloat16)


def judge(got, exact, chain=None, kind="float16", rounding="once", **kwargs):
    got = np.asarray(got, dtype(kind).numpy)
    exact = np.asarray(exact, np.float64)
    with np.errstate(over="ignore"):
        chain = np.asarray(exact if chain is None else chain).astype(dtype(kind).numpy)
    return compare(got, exact, chain, rounding=rounding, **kwargs)


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        ("float16", 1.0, 2.0**-10),
        ("float16", 1.999, 2.0**-10),
        ("float16", 2.0, 2.0**-9),
        ("float16", 0.0, 2.0**-24),
        ("float16", 1e-7, 2.0**-24),
        ("float16", 1e9, 32.0),
        ("bfloat16", 1.0, 2.0**-7),
        ("float32", -3.0, 2.0**-22),
        ("float32", 0.0, 2.0**-149),
        ("float64", 1.0, 2.0**-52),
        ("float8_e4m3fn", 1.0, 0.125),
    ],
)
def test_ulp(kind, value, expected):
    assert ulp(np.array([value]), dtype(kind))[0] == expected


@pytest.mark.parametrize("kind", ["float16", "bfloat16", "float32", "float8_e5m2"])
def test_rounded_is_round_to_nearest_even_once(kind):
    row = dtype(kind)
    one = 2.0 ** -(row.mantissa + 1)  # half an ulp of 1
    exact = np.array([1 + one, 1 + one * (1 + 2**-20), 1 + 3 * one, -1 - one, np.inf, np.nan, 0.0])
    got = rounded(exact, row)
    step = 2.0**-row.mantissa
    np.testing.assert_array_equal(got, [1.0, 1 + step, 1 + 2 * step, -1.0, np.inf, np.nan, 0.0])


def test_rounded_does_not_round_twice():
    value = 1 + 2.0**-8 + 2.0**-30  # just above the middle of two bfloat16; as float32 it is the middle
    assert rounded(np.array([value]), dtype("bfloat16"))[0] == 1 + 2.0**-7


def test_rounded_overflows_to_infinity():
    np.testing.assert_array_equal(
        rounded(np.array([65519.9, 65520.0, -1e9]), dtype("float16")), [65504, np.inf, -np.inf]
    )
    assert np.isnan(rounded(np.array([1e9]), dtype("float8_e4m3fn")))[0]


def test_one_ulp_is_admitted_and_two_are_not():
    assert judge([1 + 2.0**-10], [1.0]).passed
    refused = judge([1 + 2.0**-9], [1.0])
    assert refused.status == "INCORRECT_NUMERICAL" and "1 of 1" in refused.reason


def test_twice_the_chains_error_is_admitted():
    exact, chain = np.linspace(1, 2, 64)[None], np.linspace(1, 2, 64)[None].copy()
    chain[0, 5] += 2.0**-6
    near, far = exact.copy(), exact.copy()
    near[0, 40] += 2.0**-5
    far[0, 40] += 2.0**-4
    assert judge(near, exact, chain).passed
    assert not judge(far, exact, chain).passed


def test_rows_lend_their_relative_error_to_rows_that_were_lucky():
    exact = np.array([[100.0, 50.0] * 8, [1.0, 0.5] * 8])
    errors = np.zeros((2, 16))
    errors[0, 0] = 0.25
    np.testing.assert_array_equal(pooled([errors], [exact]), [[0.25] * 16, [0.0025] * 16])


def test_narrow_rows_are_pooled_with_their_neighbours():
    exact, errors = np.ones((32, 1)), np.full((32, 1), 1e-7)
    exact[5], errors[5] = 1e-3, 1e-9  # it cancelled, and the chain was right there by luck
    allowed = pooled([errors], [exact])
    assert allowed.shape == (32, 1) and allowed[5, 0] == 1e-7
    column = np.ones((16, 1))
    exact, chain = column.copy(), column * (1 + 1e-7)
    exact[0] = chain[0] = 1e-3
    near, far = exact.copy(), exact.copy()
    near[0] += 1.5e-7
    far[0] += 3e-7
    assert judge(near, exact, chain, "float32").passed
    assert not judge(far, exact, chain, "float32").passed


def test_rows_of_few_values_among_zeros_are_pooled_too():
    """The first rows of a causal gradient: a lucky one has the error of its neighbours, and no share of their size."""
    exact = np.tril(np.ones((40, 40)))
    errors = 1e-7 * exact
    exact[0, 0], errors[0, 0] = 1e-3, 1e-10
    exact[1], errors[1] = 8.0 * exact[1], 4.0 * errors[1]
    allowed = pooled([errors], [exact])
    np.testing.assert_allclose(allowed[[0, 2, 3, 4, 5], 0], 4e-7)  # 1 + … + 6 values
    np.testing.assert_allclose(allowed[20:, 0], 1e-7)
    lonely = np.array([[1.0, 0.0], [1e-3, 0.0]] * 16)
    np.testing.assert_allclose(pooled([1e-7 * lonely**2], [lonely])[:2, 0], [1e-7, 1e-7])


def test_rows_that_hold_few_values_on_purpose_stay_apart():
    exact = np.zeros((8, 40))
    exact[:, 0] = [100.0, 1e-3] * 4
    errors = 1e-7 * exact
    np.testing.assert_allclose(pooled([errors], [exact], alone=True)[:2, 7], [1e-5, 1e-10])
    np.testing.assert_allclose(pooled([errors], [exact])[:2, 7], [1e-5, 1e-5])


def test_a_freak_row_lends_sixteen_times_the_median_at_most():
    exact = np.ones((8, 16))
    errors = np.full((8, 16), 1e-6)
    errors[3] = 0.5
    allowed = pooled([errors], [exact])
    np.testing.assert_allclose(allowed[:, 0], [16e-6] * 3 + [0.5] + [16e-6] * 4)


def test_replicas_count_and_overflowed_errors_do_not():
    one = np.ones((1, 1))
    assert pooled([one * 0, one * 0.5], [one, one])[0, 0] == 0.5
    assert pooled([np.array([[np.inf, 0.125]])], [np.ones((1, 2))]).max() == 0.125
    assert pooled([np.zeros((2, 0))], [np.zeros((2, 0))]).shape == (2, 0)
    assert pooled([np.array(0.5)], [np.array(2.0)]) == 0.5


def test_nan_neither_disappears_nor_appears():
    assert judge([np.nan, 1], [np.nan, 1]).passed
    assert not judge([0, 1], [np.nan, 1]).passed
    assert not judge([1, np.nan], [1, 1]).passed


def test_once_follows_float64_where_the_chain_overflowed():
    assert judge([131.125], [131.072], chain=[np.inf]).passed
    assert not judge([np.inf], [131.072], chain=[np.inf]).passed
    assert not judge([131.75], [131.072], chain=[np.inf]).passed  # five ulp: an overflowed chain excuses two


def test_an_overflowed_cast_may_give_what_the_chain_gives():
    excused = {"chain": [np.inf, 1.0], "allowed": np.array([OVERFLOWED_CAST, 0.0]), "kind": "float32"}
    assert judge([np.inf, 1.0], [7e4, 1.0], **excused).passed
    assert judge([7e4, 1.0], [7e4, 1.0], **excused).passed  # it did not round there
    assert not judge([65504.0, 1.0], [7e4, 1.0], **excused).passed
    assert not judge([-np.inf, 1.0], [7e4, 1.0], **excused).passed
    assert not judge([np.nan, 1.0], [7e4, 1.0], **excused).passed
    assert not judge([np.inf, np.inf], [7e4, 1.0], **excused).passed  # the other one did not overflow
    gone = {"chain": [np.nan], "allowed": np.array([OVERFLOWED_CAST]), "kind": "float32"}
    assert judge([np.nan], [2.0], **gone).passed and not judge([np.inf], [2.0], **gone).passed
    assert not judge([2.0], [np.nan], **gone).passed  # NaN never disappears


def test_an_output_wider_than_what_overflowed_has_the_bound_of_its_neighbours():
    exact = np.full(2, 7e4)
    chain, allowed = np.array([np.inf, 7e4]), np.full(2, 0.5)
    assert judge([7e4 + 1, 7e4], exact, chain, "float32", allowed=allowed).passed
    assert not judge([7e4 + 2, 7e4], exact, chain, "float32", allowed=allowed).passed
    assert not judge([7e4 + 1, 7e4], exact, chain, "float32").passed  # as wide: two ulp


def test_per_op_follows_the_chain():
    assert judge([np.inf], [131.072], chain=[np.inf], rounding="per_op").passed
    assert not judge([131.125], [131.072], chain=[np.inf], rounding="per_op").passed


def test_overflow_of_the_exact_result():
    assert judge([np.inf, -np.inf], [1e6, -1e6]).passed
    assert not judge([65504.0], [1e6]).passed
    assert not judge([-np.inf], [1e6]).passed
    assert judge([np.inf], [65519.0]).passed  # within an ulp of the border
    assert not judge([np.inf], [60000.0]).passed


def test_zeros_of_both_signs_are_equal():
    assert judge([0.0, -0.0], [-0.0, 0.0]).passed


def test_subnormals_may_not_be_flushed():
    assert not judge([0.0], [2.0**-20]).passed
    assert judge([0.0], [2.0**-25]).passed


def test_integers_and_bools_are_equal():
    a = np.array([1, 2, 3])
    assert compare(a, a, a, rounding="once").passed
    assert not compare(np.array([1, 2, 4]), a, a, rounding="once").passed
    b = np.array([True, False])
    assert not compare(~b, b, b, rounding="once").passed


def test_shape_and_dtype():
    a = np.zeros((2, 2), np.float32)
    assert compare(a[:1], a, a, rounding="once").status == "INCORRECT_SHAPE"
    assert compare(a.astype(np.float16), a, a, rounding="once").status == "INCORRECT_DTYPE"


def test_empty_output_passes():
    a = np.zeros((0, 4), np.float32)
    assert compare(a, a, a, rounding="once").passed


def test_float64_allows_for_the_reference_itself():
    exact = np.array([[1.0, 1e-3]])
    assert judge(exact + 2.0**-50, exact, kind="float64").passed
    assert not judge(exact + 2.0**-44, exact, kind="float64").passed


def test_nan_for_an_infinity_is_right_where_the_chain_has_it_too():
    """1e-300 times inf: zero times inf in fp32. Not where the chain has the infinity, nor for a number."""
    inf, nan = np.inf, np.nan
    assert judge([nan, 1.0], [inf, 1.0], [nan, 1.0]).passed
    assert not judge([nan, 1.0], [inf, 1.0], [inf, 1.0]).passed
    assert not judge([nan, 1.0], [2.0, 1.0], [nan, 1.0]).passed
    assert judge([inf, 1.0], [inf, 1.0], [nan, 1.0]).passed
    assert not judge([-inf, 1.0], [inf, 1.0], [nan, 1.0]).passed


def test_spec_tolerance_widens_by_ulp():
    assert not judge([1 + 3 * 2.0**-10], [1.0]).passed
    assert judge([1 + 3 * 2.0**-10], [1.0], slack=Tolerance(dtype="float16", ulp=2, reason="")).passed


def test_spec_tolerance_widens_by_an_absolute_bound():
    """Results below the absolute error of an approximation may be anything that small, others none the less judged."""
    slack = Tolerance(dtype="bfloat16", ulp=0, absolute=2e-8, reason="")
    got, exact = [-8.24e-26, 1.0], [-1.31e-24, 1.0]
    assert not judge(got, exact, kind="bfloat16").passed
    assert judge(got, exact, kind="bfloat16", slack=slack).passed
    assert not judge([3e-8, 1.0], exact, kind="bfloat16", slack=slack).passed
    assert not judge([0.0, 1.02], exact, kind="bfloat16", slack=slack).passed


def test_erf_and_tanh_gelu_are_told_apart_in_fp32():
    from math import erf, sqrt, tanh

    x = 2.70
    exact = 0.5 * x * (1 + erf(x / sqrt(2)))
    other = 0.5 * x * (1 + tanh(sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    assert judge([exact], [exact], kind="float32").passed
    assert not judge([other], [exact], kind="float32").passed


def test_worst_element_is_named():
    refused = judge([[1, 1], [1, 9]], [[1, 1], [1, 1]])
    assert "[1, 1]" in refused.reason and "9.0" in refused.reason and refused.max_abs == 8.0 and refused.max_rel == 8.0
