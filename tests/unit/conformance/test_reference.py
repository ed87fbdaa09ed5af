"""The references: float64 for values, the unfused chain for how wrong a kernel may be."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import region_kit

from fusionreg.core.conformance import derive
from fusionreg.core.conformance.reference import graph_of, in_order, reference
from fusionreg.core.spec import Tolerance


def test_in_order_is_the_plain_loop():
    rng = np.random.default_rng(3)
    a, b = rng.standard_normal((2, 3, 40)).astype(np.float32), rng.standard_normal((40, 5)).astype(np.float32)
    expected = np.zeros((2, 3, 5), np.float32)
    for i, j, n in np.ndindex(2, 3, 5):
        total = np.float32(0)
        for k in range(40):
            total = np.float32(np.float64(a[i, j, k]) * np.float64(b[k, n]) + np.float64(total))
        expected[i, j, n] = total
    np.testing.assert_array_equal(in_order(a, b), expected)
    np.testing.assert_array_equal(in_order(a[0, 0, :0, None], b[:1, :0]), np.zeros((0, 0)))


@pytest.mark.parametrize(("a", "b"), [((3,), (3, 2)), ((2, 3), (3,))])
def test_vectors_and_other_dtypes_go_to_numpy(a, b):
    x, y = np.ones(a, np.float32), np.ones(b, np.float32)
    assert in_order(x, y).shape == np.matmul(x, y).shape
    assert in_order(np.ones((2, 3), np.int64), np.ones((3, 2), np.int64)).dtype == np.int64


def trial(catalog, name, fusion="gemm.scale_bias"):
    entry = catalog[fusion]
    return entry, next(t for t in derive(entry, entry.kernel("plain"), "sm_90a") if t.name == name)


def test_exact_and_chain_of_a_gemm(catalog):
    import scipy.special

    entry, t = trial(catalog, "bfloat16-base")
    t = t.with_("bfloat16-gelu", choices={"activation": "Gelu"})
    arrays = t.arrays(entry)
    found = reference(entry, t, arrays, catalog.ops)
    x, w, scale, bias = (arrays[n].astype(np.float64) for n in ("x", "w", "scale", "bias"))
    v = x @ (w.T if t.attributes["transB"] else w) * scale + bias
    np.testing.assert_allclose(found.exact["y"], v * scipy.special.ndtr(v), rtol=1e-12, atol=1e-12)
    chain = found.chain["y"]
    assert chain.dtype == ml_dtypes.bfloat16
    h = in_order(x.astype(np.float32), (w.T if t.attributes["transB"] else w).astype(np.float32))
    for operand, op in ((scale, np.multiply), (bias, np.add)):
        h = op(h.astype(ml_dtypes.bfloat16).astype(np.float32), operand.astype(np.float32))
    h = h.astype(ml_dtypes.bfloat16).astype(np.float64)
    stepped = (h * scipy.special.ndtr(h)).astype(np.float32).astype(ml_dtypes.bfloat16)
    np.testing.assert_allclose(chain.astype(float), stepped.astype(float), rtol=2.0**-7, atol=1e-6)
    assert (found.allowed["y"] >= np.abs(chain.astype(float) - found.exact["y"]) - 1e-12).mean() > 0.5


def test_small_outputs_take_further_values_into_the_pool(catalog):
    entry, t = trial(catalog, "float32-ones")
    found = reference(entry, t, t.arrays(entry), catalog.ops)
    assert found.exact["y"].shape == (1, 1) and found.allowed["y"].shape == (1, 1)
    assert found.allowed["y"].item() > 0


def test_graph_has_the_chosen_operators_alone(catalog):
    entry, t = trial(catalog, "float32-base")
    ops = [n.op for n in graph_of(entry, t.with_("x", choices={"activation": "none"}), catalog.ops).nodes]
    assert ops == ["MatMul", "Mul", "Add"]
    ops = [n.op for n in graph_of(entry, t.with_("x", choices={"activation": "gelu_tanh"}), catalog.ops).nodes]
    assert ops == ["MatMul", "Mul", "Add", "Gelu"]


def test_displaced_inputs_stand_for_the_luck_of_a_chain(catalog):
    """All terms equal: the chain's sums are exact, a kernel's in another order are not."""
    entry, base = trial(catalog, "float32-base")
    made = base.with_("t", values=dict.fromkeys(entry.inputs, "ones"))
    plain = reference(entry, made, made.arrays(entry), catalog.ops)
    assert not plain.allowed["y"].any()
    loose = Tolerance(dtype="float32", ulp=1.0, inputs=2.0, reason="a test")
    lenient = replace(entry, spec=entry.spec.model_copy(update={"tolerances": (loose,)}))
    again = reference(lenient, made, made.arrays(entry), catalog.ops)
    k = made.axes["K"]
    assert 0 < again.allowed["y"].max() < 4 * k * 2.0**-23
    np.testing.assert_array_equal(again.exact["y"], plain.exact["y"])


X = np.array([1.0, 300.0, 1000.0, -300.0], np.float32)  # squares: 1, 90000 and 1e6, of which float16 holds the first
CASTS = """
v0 = Mul(x, x)
v1 = Cast(v0, to="float16")
v2 = Cast(v1, to="float32")
y = Sub(v2, {last})"""


@pytest.mark.parametrize(
    ("pattern", "dtype", "expected"),
    [
        (CASTS.format(last="1.0"), "float32", [False, True, True, True]),  # inf - 1
        (CASTS.format(last="v2"), "float32", [False, True, True, True]),  # inf - inf, NaN
        (CASTS.replace("Sub(v2, {last})", "Clip(v2, 0.0, 7.0)"), "float32", [False] * 4),  # finite again
        ('v0 = Mul(x, x)\ny = Cast(v0, to="float32")', "float16", [False] * 4),  # no cast overflows
        ('v0 = Mul(x, x)\ny = Cast(v0, to="float16")', "float32", [False] * 4),  # that of the output does
    ],
)
def test_elements_behind_an_overflowed_cast(pattern, dtype, expected):
    out = "float16" if pattern.endswith('"float16")') else "float32"
    catalog = region_kit.catalog(squares=(pattern.strip(), {"x": f"{dtype}[A0]"}, {"y": f"{out}[A0]"}))
    entry = catalog["pointwise.squares"]
    made = derive(entry, entry.kernel("strided"), "sm_90a")[0]
    made = made.with_(made.name, axes={"A0": 4})
    found = reference(entry, made, {"x": X.astype(dtype)}, catalog.ops)
    np.testing.assert_array_equal(np.isinf(found.allowed["y"]), expected)


def test_one_value_of_a_swept_row_has_its_own_bound():
    """Its neighbours are larger, and their error would hide that of a function's tail."""
    text = ("v0 = Sigmoid(x)\ny = Mul(x, v0)", {"x": "float32[A0 A1]"}, {"y": "float32[A0 A1]"})
    catalog = region_kit.catalog(swish=text)
    entry = catalog["pointwise.swish"]
    made = derive(entry, entry.kernel("strided"), "sm_90a")[0].with_("t", axes={"A0": 32, "A1": 24})
    bounds = {}
    for name, values in (("sweep", {"x": "sweep"}), ("other", {"x": "normal"})):
        t = made.with_("t", values=values)
        arrays = made.with_("t", values={"x": "sweep"}).arrays(entry)
        bounds[name] = reference(entry, t, arrays, catalog.ops).allowed["y"][:, 0]
    tail = np.flatnonzero(arrays["x"][:, 0] == -15.0)  # -4.6e-6, beside 1e4
    assert (bounds["sweep"][tail] < 1e-11).all() and (bounds["other"][tail] > 1e-9).all()
