"""Softmax of scores in memory: widths, corners of the causal mask, rows without keys, gradients, in the simulator."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
import softmax as kit

from fusionreg.core.conformance import run
from fusionreg.core.errors import FusionregError
from fusionreg.core.ops import default_vocabulary, numpy_backend
from fusionreg.core.runtime import Runtime

BF16, F32 = np.dtype(ml_dtypes.bfloat16), np.dtype("float32")
DROPOUT = default_vocabulary()["fusionreg::Dropout"].meaning
CATALOG = kit.awake()
INF = math.inf


@pytest.fixture(scope="module")
def runtime(sim_cache):
    return Runtime(CATALOG, device="sim", cache=sim_cache)


def normal(*shape, kind=F32, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(kind)


#: Each template once, where rows are few; every kernel of every fusion runs its cases on a GPU.
@pytest.mark.parametrize(
    "kernel",
    [
        "attention.softmax/block",
        "attention.softmax/long",
        "attention.softmax_backward/cluster",
        "attention.mask_softmax/rows",
        "attention.causal_softmax_dropout_backward/rows",
    ],
)
def test_conforms(kernel, sim_cache):
    report = run(CATALOG, [kernel.split("/")[0]], device="sim", cases="quick", kernels=[kernel], cache=sim_cache)
    assert report.ok, "\n".join(map(str, report.failures))


@pytest.mark.parametrize("width", [1, 7, 33, 129, 257, 1025, 2049, 8200, 40969])
def test_widths(width, runtime):
    """Below a warp, across the ends of what registers hold, and no multiple of anything."""
    x = normal(2, width, kind=BF16)
    got = runtime.call("attention.softmax", x).astype(np.float64)
    np.testing.assert_allclose(got, kit.softmax(x.astype(np.float64)), rtol=2**-8, atol=1e-30)
    assert not runtime.fallbacks


@pytest.mark.parametrize(
    ("queries", "keys", "diagonal", "first"), [(2, 4, 0, [1, 1.5]), (2, 4, 2, [2, 2.5]), (4, 2, -2, [0, 0, 1, 1.5])]
)
def test_corners(queries, keys, diagonal, first, runtime):
    """Uniform scores: the mean of 1, 2, … over visible keys, aligned to the first ones or to the last."""
    x = np.zeros((1, queries, keys), np.float32)
    y = runtime.call("attention.causal_softmax", x, diagonal=diagonal)[0]
    means = y.astype(np.float64) @ np.arange(1.0, keys + 1)
    seen = kit.visible(queries, keys, diagonal).any(axis=1)
    np.testing.assert_allclose(means[seen], np.array(first)[seen], rtol=1e-6)
    assert np.isnan(means[~seen]).all()
    fill = runtime.call("attention.causal_softmax", x, diagonal=diagonal, causal_fill=-1e4)[0]
    assert np.allclose(fill[~seen], 1 / keys), "a finite number makes rows without keys uniform"


def test_a_row_without_keys_is_nobody_elses(runtime):
    """Row 2 of a bool mask is all hidden: NaN, as the operators have it, and the others as without it."""
    x, mask = normal(1, 2, 4, 8), np.zeros((1, 1, 4, 8), bool)
    mask[:, :, 2] = True
    y = runtime.call("attention.mask_softmax", x, None, mask)
    want = kit.softmax(np.where(mask, -INF, x.astype(np.float64)))
    np.testing.assert_allclose(y, want, rtol=1e-6)
    assert np.isnan(y[:, :, 2]).all() and not np.isnan(np.delete(y, 2, axis=2)).any()
    dx = runtime.call("attention.mask_softmax_backward", normal(1, 2, 4, 8, seed=1), y, None, mask)
    assert not np.isnan(dx).any() and (dx[:, :, 2] == 0).all(), "what the mask replaced has no gradient"
    even = runtime.call("attention.mask_softmax", x, None, mask, fill=-1e4)
    np.testing.assert_allclose(even[:, :, 2], 1 / 8, rtol=1e-6)


def test_hidden_scores_are_not_read(runtime):
    """NaN behind either mask is nobody's; one that is visible is its row's alone."""
    x, mask = normal(1, 2, 6, 8), np.zeros((1, 1, 1, 8), bool)
    mask[..., 1] = True
    clean = runtime.call("attention.mask_causal_softmax", x, None, mask)
    x[..., 1] = np.nan
    x[:, :, ~kit.visible(6, 8)] = np.nan
    np.testing.assert_array_equal(runtime.call("attention.mask_causal_softmax", x, None, mask), clean)
    x[0, 1, 3, 2] = np.nan
    y = runtime.call("attention.mask_causal_softmax", x, None, mask)
    bad = np.isnan(y).all(axis=-1)
    assert bad[0, 1, 3] and bad.sum() == 1 and np.isnan(y).sum() == 8


def test_probabilities_that_underflow_are_not_masked(runtime):
    """Scores [0, -200]: y is [1, 0], and a NaN in the gradient of the second one is seen."""
    y = runtime.call("attention.softmax", np.array([[0, -200.0]], np.float32))
    np.testing.assert_array_equal(y, [[1, 0]])
    assert np.isnan(runtime.call("attention.softmax_backward", np.array([[1, np.nan]], np.float32), y)).all()


@pytest.mark.parametrize("causal_fill", [-INF, 0.25])
def test_gradient_by_differences(causal_fill, runtime):
    """Of Σ w y with respect to x, hidden keys that have a share of the sum included."""
    x, w = normal(1, 5, 7), normal(1, 5, 7, seed=2)
    seen = kit.visible(5, 7)

    def loss(x):
        return (w * kit.softmax(np.where(seen, x, causal_fill))).sum()

    step, want = 1e-5, np.zeros(x.shape)
    for i in np.ndindex(*x.shape):
        d = np.zeros(x.shape)
        d[i] = step
        want[i] = (loss(x.astype(np.float64) + d) - loss(x.astype(np.float64) - d)) / (2 * step)
    y = runtime.call("attention.causal_softmax", x, causal_fill=causal_fill)
    dx = runtime.call("attention.causal_softmax_backward", w, y)
    np.testing.assert_allclose(dx, want, rtol=1e-4, atol=1e-6)


def test_dropout_is_drawn_again(runtime):
    """The mask of the forward pass, from its two words."""
    rng, p = np.array([11, 2]), 0.4
    dy, y = normal(2, 6, 24), kit.softmax(normal(2, 6, 24, seed=1).astype(np.float64)).astype(np.float32)
    g = DROPOUT(numpy_backend(), dy.astype(np.float64), rng, p=p)
    y[:, ~kit.visible(6, 24)] = 0
    want = kit.gradient(g, y.astype(np.float64))
    got = runtime.call("attention.causal_softmax_dropout_backward", dy, y, rng, p=p)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_one_scale_for_all_heads(runtime):
    """A number on the device, read at every call; one for each head is an error, not its first one for all."""
    x = normal(1, 3, 2, 8)
    mask = np.zeros((8,), bool)
    for scale in (0.5, 2.0):
        y = runtime.call("attention.mask_softmax", x, np.array(scale, np.float32), mask, scaling="Mul")
        np.testing.assert_allclose(y, kit.softmax(x.astype(np.float64) * scale), rtol=1e-5)
    with pytest.raises(FusionregError, match="scale"):
        runtime.call("attention.mask_softmax", x, np.ones((3, 1, 1), np.float32), mask, scaling="Mul")
