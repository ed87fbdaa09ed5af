"""GEMM fusions on inputs that went wrong somewhere in public: overflow before a scale, lost tails, dropped NaNs.

Calls go through the runtime, in the simulator, on NumPy arrays.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from catalogs import shipped

from fusionreg.core.errors import ArgumentError
from fusionreg.core.runtime import FallbackWarning, Runtime

F16, BF16, F32 = np.dtype("float16"), np.dtype(ml_dtypes.bfloat16), np.dtype("float32")
HALVES = pytest.mark.parametrize("kind", [F16, BF16], ids=str)
ALL = pytest.mark.parametrize("kind", [F16, BF16, F32], ids=str)


@pytest.fixture(scope="module")
def catalog():
    return shipped("gemm")


@pytest.fixture(scope="module")
def runtime(catalog):
    return Runtime(catalog, device="sim")


def preferring(catalog, kernel):
    """A runtime that takes this kernel wherever it accepts the call."""
    return Runtime(catalog, device="sim", measured={f"{name}/{kernel}": 0.0 for name in catalog.fusions})


def aligned(array: np.ndarray) -> np.ndarray:
    """A copy at an address that tensor cores accept."""
    raw = np.full(array.nbytes + 512, 0xFF, np.uint8)
    start = -raw.__array_interface__["data"][0] % 256
    view = raw[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    view[...] = array
    return view


def call(runtime, fusion, *arrays, kernel=None, **attributes):
    key = f"{fusion}/{kernel}"
    before = runtime.kernels_used.get(key, 0)
    y = runtime.call(fusion, *[aligned(np.asarray(a)) for a in arrays], **attributes)
    assert kernel is None or runtime.kernels_used[key] == before + 1
    return y.astype(np.float64)


def full(shape, value, kind):
    return np.full(shape, value, kind)


@ALL
@pytest.mark.parametrize("k", [5, 8])
def test_relu_keeps_nan_and_flushes_nothing(runtime, kind, k):
    """fmaxf(x, 0) eats NaN; a NaN in one row must spoil that row alone."""
    special = np.array([np.nan, np.inf, -np.inf, -0.0, 0.0, -1.0, 2.0])
    x = np.zeros((7, k))
    x[:, 0] = special
    w = np.zeros((k, 8))
    w[0] = 1.0
    y = call(runtime, "gemm.bias", x.astype(kind), w.astype(kind), full((8,), 0, kind), activation="Relu", transB=0)
    expected = np.array([np.nan, np.inf, 0, 0, 0, 0, 2])
    expected[1:3] = [np.nan, np.nan] if k > 1 else expected[1:3]  # inf * 0 in the other terms
    w_all = np.ones((k, 8))
    single = call(
        runtime, "gemm.activation", x[:, :1].astype(kind), w_all[:1].astype(kind), activation="Relu", transB=0
    )
    np.testing.assert_array_equal(single, np.repeat([[np.nan], [np.inf], [0], [0], [0], [0], [2]], 8, axis=1))
    np.testing.assert_array_equal(y[3:], np.repeat(expected[3:, None], 8, axis=1))
    assert np.isnan(y[0]).all()


@pytest.mark.parametrize("k", [2, 8])
def test_scale_comes_before_the_cast(runtime, k):
    x, w = full((3, k), 256, F16), full((k, 8), 256, F16)
    y = call(runtime, "gemm.scale", x, w, full((), 1e-3, F16), activation="none", transB=0)
    exact = 65536.0 * k * float(np.float16(1e-3))
    np.testing.assert_array_equal(y, np.full((3, 8), float(np.float16(exact))))
    if k == 2:
        assert y[0, 0] == 131.125


@pytest.mark.parametrize("kernel", ["plain", "tensor_core", "skinny"])
def test_a_long_sum_is_scaled_before_the_cast(catalog, kernel):
    """70,000 is no half: the sum itself would be infinite."""
    x, w = full((1, 70_000), 1, F16), full((70_000, 8), 1, F16)
    if kernel == "plain":
        w = w[:, :7]  # rows that are no whole chunks
    args = x, w, full((), 1e-3, F16)
    y = call(preferring(catalog, kernel), "gemm.scale", *args, activation="none", transB=0, kernel=kernel)
    np.testing.assert_array_equal(y, np.full(y.shape, float(np.float16(70_000 * float(np.float16(1e-3))))))


@HALVES
def test_bias_comes_before_the_cast(runtime, kind):
    x, w = full((3, 8), 48, kind), full((8, 8), 256, kind)
    y = call(runtime, "gemm.bias", x, w, full((8,), -65504, kind), activation="none", transB=0)
    exact = 8 * 48 * 256 + float(np.asarray(-65504, kind))
    np.testing.assert_array_equal(y, np.full((3, 8), float(np.asarray(exact, kind))))


@HALVES
@pytest.mark.parametrize(("k", "kernel"), [(514, "plain"), (520, "tensor_core"), (520, "skinny")])
def test_partial_sums_are_wide(catalog, kind, k, kernel):
    half = (k - 1) // 2
    x = np.concatenate([np.ones(half), [0.5], -np.ones(half), np.zeros(k - 2 * half - 1)])[None]
    args = x.astype(kind), np.ones((k, 8), kind), full((), 1, kind)
    y = call(preferring(catalog, kernel), "gemm.scale", *args, activation="none", transB=0, kernel=kernel)
    np.testing.assert_array_equal(y, np.full((1, 8), 0.5))


def test_subnormals_are_kept(runtime):
    x = np.array([[1.1754944e-38, 0], [2e-45, 0]], F32)
    y = call(runtime, "gemm.scale", x, np.ones((2, 3), F32), full((), 0.5, F32), activation="none", transB=0)
    assert (y[0] == np.float64(np.float32(5.877472e-39))).all()
    half = call(runtime, "gemm.scale", full((2, 8), 6e-8, F16), np.eye(8).astype(F16), full((), 1, F16),
                activation="none", transB=0)  # fmt: skip
    np.testing.assert_array_equal(half, np.full((2, 8), float(np.float16(6e-8))))


@ALL
@pytest.mark.parametrize("shape", [(0, 8), (8, 0), (3, 0, 96), (0, 0)], ids=str)
def test_empty_operands(runtime, kind, shape):
    """No rows: an empty result. Nothing to sum: the activation of the bias, not what the memory held."""
    x, w = np.zeros(shape, kind), np.ones((shape[-1], 8), kind)
    y = call(runtime, "gemm.bias", x, w, np.arange(-4, 4).astype(kind), activation="Relu", transB=0)
    assert y.shape == (*shape[:-1], 8)
    np.testing.assert_array_equal(y, np.broadcast_to(np.maximum(np.arange(-4, 4), 0), y.shape))
    none = call(
        runtime,
        "gemm.scale",
        np.ones((4, 8), kind),
        np.ones((8, 0), kind),
        full((), 2, kind),
        activation="none",
        transB=0,
    )
    assert none.shape == (4, 0)


@pytest.mark.parametrize("leading", [(65536, 1), (70000,)], ids=str)
def test_more_rows_than_a_grid_axis_holds(runtime, leading):
    x = np.zeros((*leading, 8), F16)
    x[-1] = 1
    y = call(runtime, "gemm.activation", x, np.ones((8, 8), F16), activation="Relu", transB=0)
    assert (y[-1] == 8).all() and y.sum() == 64


@pytest.mark.parametrize("kind", [F16, F32], ids=str)
@pytest.mark.parametrize("transB", [0, 1])
def test_tails_are_neither_dropped_nor_read_past(runtime, kind, transB):
    """All ones, so that y == K exactly; what lies beside the operands is NaN."""
    for k in (1, 7, 8, 9, 15, 17, 31, 33, 63, 65, 127, 129, 192, 200, 1152):
        for m, n in ((1, 1), (2, 199), (33, 7), (2, 257)) if k < 100 else ((33, 7),):
            x = np.full((m + 2, k + 3), np.nan, kind)
            w = np.full((n + 2, k + 3) if transB else (k + 2, n + 3), np.nan, kind)
            xs, ws = x[1:-1, 1 : k + 1], w[1:-1, 1:-2]
            xs[...], ws[...] = 1, 1
            y = runtime.call("gemm.scale", xs, ws, np.ones((), kind), activation="none", transB=transB)
            assert (y.astype(float) == k).all(), (m, k, n)


@ALL
def test_strided_and_offset_weights(runtime, kind):
    """A view's offset and strides are applied once: W[2:6], W.T, every other column, reversed rows."""
    rng = np.random.default_rng(5)
    big, x = rng.integers(-3, 4, (12, 16)).astype(kind), rng.integers(-3, 4, (4, 4)).astype(kind)
    for view in (big[2:6], big[:, :4].T, big[4:8, ::2], big[11:7:-1]):
        y = runtime.call("gemm.scale", x, view, np.ones((), kind), activation="none", transB=0)
        np.testing.assert_array_equal(y.astype(float), x.astype(float) @ view.astype(float))


def test_transposed_batch_axes(runtime):
    """Last stride 1 and yet not contiguous."""
    rng = np.random.default_rng(6)
    x = rng.integers(-3, 4, (5, 3, 8)).astype(F32).transpose(1, 0, 2)
    w = rng.integers(-3, 4, (8, 4)).astype(F32)
    with pytest.warns(FallbackWarning, match="no common stride"):
        y = runtime.call("gemm.activation", x, w, activation="Relu", transB=0)
    np.testing.assert_array_equal(y, np.maximum(x @ w, 0))


@pytest.mark.parametrize(
    ("bias", "expected"),
    [
        (np.array([10, 20]), [[11, 22], [13, 24]]),
        (np.array([[10], [20]]), [[11, 12], [23, 24]]),
        (np.array([[10, 20]]), [[11, 22], [13, 24]]),
        (np.array([[5]]), [[6, 7], [8, 9]]),
        (np.array(5), [[6, 7], [8, 9]]),
        (np.array([[[10, 20]]]), [[11, 22], [13, 24]]),
    ],
    ids=lambda v: str(np.shape(v)),
)
def test_a_bias_broadcasts_along_the_axis_it_names(runtime, bias, expected):
    w = np.array([[1, 2], [3, 4]], F32)
    y = call(runtime, "gemm.bias", np.eye(2, dtype=F32), w, bias.astype(F32), activation="none", transB=0)
    np.testing.assert_array_equal(y, expected)


@pytest.mark.parametrize("shape", [(2, 2), (3,), (2, 3), (3, 1), (1, 2, 2)], ids=str)
def test_other_biases_are_refused(runtime, shape):
    with pytest.raises(ArgumentError, match="bias"):
        call(runtime, "gemm.bias", np.eye(2, dtype=F32), np.eye(2, dtype=F32), np.ones(shape, F32), activation="none")


def test_a_weight_in_the_other_layout_is_an_error(runtime):
    x, w = np.ones((3, 4), F32), np.ones((4, 7), F32)
    call(runtime, "gemm.scale", x, w, np.ones((), F32), activation="none", transB=0)
    with pytest.raises(ArgumentError):
        call(runtime, "gemm.scale", x, w, np.ones((), F32), activation="none", transB=1)
    square = np.arange(16, dtype=F32).reshape(4, 4)
    for transB in (0, 1):
        y = call(runtime, "gemm.scale", x, square, np.ones((), F32), activation="none", transB=transB)
        np.testing.assert_array_equal(y, x @ (square.T if transB else square))


@pytest.mark.parametrize(
    ("activation", "at", "right"),
    [
        ("Gelu", 2.7, 2.6906389), ("Gelu", -2.7, -0.0093610), ("gelu_tanh", -2.7, -0.0088876), ("gelu_tanh", 1e4, 1e4),
        ("gelu_tanh", -1e4, 0.0), ("gelu_tanh", 11.0, 11.0), ("Swish", -1e4, 0.0), ("Swish", 1e4, 1e4),
        ("Sigmoid", -1e4, 0.0), ("Sigmoid", 1e4, 1.0), ("Tanh", 1e4, 1.0), ("gelu_tanh", 1e30, 1e30),
    ],
)  # fmt: skip
def test_activations_at_their_tails(runtime, activation, at, right):
    y = call(runtime, "gemm.activation", full((5, 1), at, F32), full((1, 3), 1, F32), activation=activation, transB=0)
    np.testing.assert_allclose(y, np.full((5, 3), right), rtol=1e-5, atol=1e-7)
