"""The logarithm of softmax and its gradient, in the simulator: all kernels, widths, infinities, differences."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import softmax as kit

from fusionreg.core.conformance import run
from fusionreg.core.runtime import Runtime

BF16, F32 = np.dtype(ml_dtypes.bfloat16), np.dtype("float32")
INF = np.inf
CATALOG = kit.awake()


@pytest.fixture(scope="module")
def runtime(sim_cache):
    return Runtime(CATALOG, device="sim", cache=sim_cache)


def log_softmax(scores: np.ndarray) -> np.ndarray:
    wide = scores.astype(np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        apart = wide - wide.max(axis=-1, keepdims=True)
        return apart - np.log(np.exp(apart).sum(axis=-1, keepdims=True))


def normal(*shape, kind=F32, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(kind)


@pytest.mark.parametrize("kernel", ["attention.log_softmax/rows", "attention.log_softmax_backward/block"])
def test_conforms(kernel, sim_cache):
    report = run(CATALOG, [kernel.split("/")[0]], device="sim", cases="quick", kernels=[kernel], cache=sim_cache)
    assert report.ok, "\n".join(map(str, report.failures))


@pytest.mark.parametrize("kernel", ["rows", "block", "cluster", "long"])
@pytest.mark.parametrize("kind", [BF16, F32])
def test_every_kernel(kernel, kind, sim_cache):
    made = Runtime(kit.awake(kernel), device="sim", cache=sim_cache)
    width = {"rows": 1000, "block": 3000, "cluster": 9000, "long": 5000}[kernel]
    x, dy, scale = normal(3, width, kind=kind), normal(3, width, kind=kind, seed=1), np.array(2.5, kind)
    y = made.call("attention.log_softmax", x, scale, scaling="Div")
    want = log_softmax(x.astype(np.float64) / 2.5)
    near = 2**-8 if kind is BF16 else 1e-6
    np.testing.assert_allclose(y.astype(np.float64), want, rtol=near)
    dx = made.call("attention.log_softmax_backward", dy, y, scale, scaling="Mul").astype(np.float64)
    wide, p = dy.astype(np.float64), np.exp(y.astype(np.float64))
    exact = (wide - p * wide.sum(axis=-1, keepdims=True)) * 2.5
    np.testing.assert_allclose(dx, exact, rtol=near, atol=near)
    assert made.kernels_used == {f"attention.{f}/{kernel}": 1 for f in ("log_softmax", "log_softmax_backward")}


@pytest.mark.parametrize("width", [1, 7, 33, 257, 2049])
def test_widths(width, runtime):
    x = normal(5, width)
    y = runtime.call("attention.log_softmax", x)
    np.testing.assert_allclose(y, log_softmax(x), rtol=1e-5, atol=1e-6)
    assert not runtime.fallbacks


def test_far_scores_and_infinities(runtime):
    """Logarithms of what no exponential could hold; -inf has no share, and rows of it, with +inf or NaN are NaN."""
    x = np.array([[0, -500, 3, -1e4], [-INF, 1, 1, -INF], [-INF] * 4, [0, INF, 0, 0], [0, 1, np.nan, 2]], np.float32)
    y = runtime.call("attention.log_softmax", x)
    np.testing.assert_allclose(y[:2], log_softmax(x[:2]), rtol=1e-6)
    assert y[0, 3] < -1e4 and (y[1, [0, 3]] == -INF).all() and np.isnan(y[2:]).all()


def test_gradient_by_differences(runtime):
    x, w = normal(2, 9), normal(2, 9, seed=3)
    dx = runtime.call("attention.log_softmax_backward", w, runtime.call("attention.log_softmax", x))
    step = 1e-4
    for i in np.ndindex(x.shape):
        moved = np.zeros(x.shape)
        moved[i] = step
        wide = x.astype(np.float64)
        change = (w * (log_softmax(wide + moved) - log_softmax(wide - moved))).sum() / (2 * step)
        assert dx[i] == pytest.approx(change, rel=1e-4, abs=1e-5)
