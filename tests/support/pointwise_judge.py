"""How the results of generated device functions are judged, on the CPU and on a GPU.

The vocabulary's meanings are the reference: in float64 (``exact``) for floats, and bit by bit for integers, bool and
casts. onnx.reference confirms the meanings themselves (tests/unit/ops).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from pointwise_cases import cast_cases, constant_divisors, kept_casts, operator_cases, pow_cases, whole_powers
from pointwise_random import random_cases
from pointwise_units import Case, rounded_once

from fusionreg.core.dtypes import dtype

#: Operators whose result changes by many units in its last place when the operand does by one: what a step of the
#: operand is worth, in steps of the result.
STEEP = {"Gelu": 200, "fusionreg.GeluGrad": 300, "Tan": 20, "Sinh": 20}


def wide(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float64)


def ulp(x: np.ndarray) -> np.ndarray:
    """The distance from |x| to the next number of its dtype."""
    kind = x.dtype if x.dtype.kind == "f" else np.dtype(np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        steps = wide(np.spacing(np.abs(x.astype(kind))))
    if x.dtype.kind == "f":
        return steps
    fraction = dtype(x.dtype.name).mantissa
    return np.maximum(steps * 2.0 ** (23 - fraction), 2.0**-133)


def assert_close(got: np.ndarray, step: np.ndarray, exact: np.ndarray, steps: float, floor: Any = 0.0) -> None:
    """Within ``steps`` units of ``exact`` rounded once, beside twice the chain's error and ``floor``; special values
    follow it, or the chain where that overflowed on the way."""
    with np.errstate(all="ignore"):
        rounded = exact.astype(got.dtype)
        a, s, e = wide(got), wide(step), wide(rounded)
        near = np.abs(a - e) <= steps * ulp(rounded) + 2 * np.abs(s - e) + floor
    same = (a == e) | (np.isnan(a) & np.isnan(e))
    chain = ~np.isfinite(s) & ((a == s) | (np.isnan(a) & np.isnan(s)))
    wrong = ~(same | near | chain)
    assert not wrong.any(), (np.flatnonzero(wrong)[:3], got[wrong][:3], step[wrong][:3], exact[wrong][:3])
    assert not (np.isnan(e) & ~np.isnan(a)).any(), "NaN disappeared"


_FLOAT8_MAX = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
_LEAST_EXPONENT = {"float16": -14, "bfloat16": -126, "float8_e4m3fn": -6, "float8_e5m2": -14}
_LARGEST = {"float16": 65504.0, "bfloat16": float.fromhex("0x1.fep127"), **_FLOAT8_MAX}


def rounded_to(x: np.ndarray, fraction: int, name: str) -> np.ndarray:
    """Long doubles to nearest even with ``fraction`` bits, by arithmetic alone."""
    _, exponent = np.frexp(x)
    step = np.ldexp(np.longdouble(1), np.maximum(exponent - 1, _LEAST_EXPONENT[name]) - fraction)
    finite = np.isfinite(x)
    y = np.where(finite, np.rint(np.where(finite, x, 0) / step) * step, x)
    y = np.where(np.abs(y) > _LARGEST[name], np.copysign(np.inf, y), y)
    return y.astype(np.float32)


def operator(case: Case, got: np.ndarray) -> None:
    step, exact = case.evaluated("step")[0], case.evaluated("exact")[0]
    if not dtype(case.graph.values[case.graph.outputs[0]].dtype).floating:
        np.testing.assert_array_equal(got, step)
        return
    steps = 4 + STEEP.get(case.graph.name, 0)
    floor = 0.0
    if case.graph.name.endswith("Grad"):  # near a root of the derivative its terms cancel
        dy, x = case.inputs.values()
        with np.errstate(invalid="ignore"):
            floor = np.where(np.abs(wide(x)) < 2, 4 * ulp(dy), 0.0)
    assert_close(got, step, exact, steps, floor)
    with np.errstate(invalid="ignore"):
        zero = (wide(exact) == 0) & (wide(got) == 0) & (wide(step) == 0)
    if case.graph.name not in ("Max", "Min", "Hypot"):  # where 0 and -0 are equal
        signs = [np.signbit(wide(x))[zero] for x in (got, exact, step)]  # one that underflowed may have either
        assert ((signs[0] == signs[1]) | (signs[0] == signs[2])).all()


def cast(case: Case, got: np.ndarray) -> None:
    np.testing.assert_array_equal(wide(got), wide(case.evaluated("step")[0]))
    assert got.dtype == case.evaluated("step")[0].dtype


def kept_cast(case: Case, got: np.ndarray) -> None:
    x, to = case.inputs["x0"], case.graph.nodes[0].attrs["to"]
    high = _FLOAT8_MAX.get(to)
    with np.errstate(all="ignore"):
        exact = x.astype(np.longdouble)
        clamped = np.clip(exact, -high, high) if high else exact
        want = rounded_to(clamped, dtype(to).mantissa, dtype(to).name)
    np.testing.assert_array_equal(got, want)


def power(case: Case, got: np.ndarray) -> None:
    step, exact = case.evaluated("step")[0], case.evaluated("exact")[0]
    if got.dtype.kind in "iu":  # a last place of pow may decide about an integer
        near = np.abs(wide(got) - wide(step)) <= np.maximum(1.0, 1e-15 * np.abs(wide(step)))
        assert near.all()
    else:
        base, exponent = case.inputs.values()
        odd = exponent.astype(np.float32) if exponent.dtype.kind == "i" else exponent  # as the meaning does
        with np.errstate(all="ignore"):
            exact = np.power(wide(base), wide(odd)) if exponent.dtype.kind == "i" else exact
        assert_close(got, step, exact, 16)


def whole_power(case: Case, got: np.ndarray) -> None:
    base, exponent = case.inputs.values()
    bits = base.dtype.itemsize * 8
    for a, b, found in zip(base.tolist(), exponent.tolist(), got.tolist(), strict=True):
        if b >= 0:
            value = pow(a, b, 2**bits)
            value -= 2**bits if base.dtype.kind == "i" and value >= 2 ** (bits - 1) else 0
        else:
            value = {1: 1, -1: 1 if b % 2 == 0 else -1}.get(a, 0)
        assert found == value, (a, b)


def random_graph(case: Case, *results: np.ndarray) -> None:
    """Against float64 rounded at the casts alone: another rounding, or one left out, is found."""
    eps = 1e-6 if "float64" not in case.name.split("-")[2:] else 1e-6 if "float32" in case.name else 1e-14
    shifted = [rounded_once(case, s) for s in (0.0, eps, -eps)]
    for i, (name, got) in enumerate(zip(case.graph.outputs, results, strict=True)):
        if not dtype(case.graph.values[name].dtype).floating:
            np.testing.assert_array_equal(got, shifted[0][i], err_msg=name)
            continue
        with np.errstate(all="ignore"):
            wanted = [x[i].astype(got.dtype) for x in shifted]
            size = np.abs(wide(wanted[0]))
            near = [np.abs(wide(got) - wide(w)) <= 10 * eps * np.maximum(size, 1) + ulp(w) for w in wanted]
        same = [(wide(got) == wide(w)) | (np.isnan(wide(got)) & np.isnan(wide(w))) for w in wanted]
        wrong = ~np.logical_or.reduce([*near, *same])
        assert not wrong.any(), (name, np.flatnonzero(wrong)[:3], got[wrong][:3], wanted[0][wrong][:3])


def divided(case: Case, got: np.ndarray) -> None:
    """Correctly rounded, as IEEE division is; a subnormal quotient of normal numbers within a step."""
    step = case.evaluated("step")[0]
    with np.errstate(invalid="ignore"):
        subnormal = np.abs(wide(step)) < float(np.finfo(np.float32).tiny)
        near = np.abs(wide(got) - wide(step)) <= 2.0**-149
    same = (wide(got) == wide(step)) | (np.isnan(got) & np.isnan(step))
    assert (same | (subnormal & near)).all()
    np.testing.assert_array_equal(np.signbit(got[same & ~np.isnan(got)]), np.signbit(step[same & ~np.isnan(got)]))


JUDGES = {
    "operator": operator,
    "cast": cast,
    "kept": kept_cast,
    "power": power,
    "whole": whole_power,
    "divided": divided,
    "random": random_graph,
}


def judge(case: Case, results: list[np.ndarray]) -> None:
    """AssertionError where the results are not what the graph means."""
    JUDGES[case.kind](case, *results)


def all_cases() -> list[Case]:
    makers = (operator_cases, cast_cases, kept_casts, pow_cases, whole_powers, constant_divisors, random_cases)
    return [case for make in makers for case in make()]
