"""Rows times the matrices of experts that are stored in 8 or 4 bits, against float64 products, row by row."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from catalogs import shipped

from fusionreg.core.runtime import Runtime
from fusionreg.core.simulator import Checks

CATALOG = shipped("moe")
E, N = 5, 40


def stored(bits: int, k: int, rng: np.random.Generator):
    """(matrices as they are stored, their scales, what both mean)."""
    if bits == 8:
        w, scale = rng.integers(-128, 128, (E, N, k)).astype(np.int8), rng.uniform(0.005, 0.02, (E, N, 1))
        numbers, wide = w.astype(np.float64), scale
    else:
        w, scale = rng.integers(0, 256, (E, N, k // 2)).astype(np.uint8), rng.uniform(0.05, 0.2, (E, N, k // 128))
        numbers = np.stack((w & 15, w >> 4), -1).reshape(E, N, k) - 8.0
        wide = np.repeat(scale, 128, axis=2)
    scale = scale.astype(np.float32)
    return w, scale, numbers * wide.astype(np.float32).astype(np.float64)


@pytest.mark.parametrize(
    ("bits", "kernel", "k", "wrap"),
    [(8, "decode", 1104, False), (4, "decode", 1152, True), (8, "plain", 50, True), (4, "plain", 256, False)],
)
def test_ids_of_any_kind(bits, kernel, k, wrap, sim_cache):
    """More rows of an expert than are multiplied at a time; NaN for the scales of experts that no row names."""
    rng = np.random.default_rng(bits)
    w, scale, exact = stored(bits, k, rng)
    x = rng.standard_normal((30, k)).astype(ml_dtypes.bfloat16)
    ids = rng.choice(np.array([-1, 0, 1, 3, 99, -E - 1, E]), 30)
    ids[5:20] = 1
    scale[[2] if wrap else [2, 4]] = np.nan
    fusion = f"moe.expert_gemv_w{bits}a16"
    run = Runtime(CATALOG, "sim", sim_cache, Checks.full(), measured={f"{fusion}/{kernel}": 1e-9})
    y = run.call(fusion, x, w, scale, ids, indices="FromEnd" if wrap else "none")
    assert run.kernels_used == {f"{fusion}/{kernel}": 1}
    at = np.where(ids < 0, ids + E, ids) if wrap else ids
    inside = (at >= 0) & (at < E)
    wanted = np.einsum("mk,mnk->mn", x.astype(np.float64), exact[np.where(inside, at, 0)]) * inside[:, None]
    got = y.astype(np.float64)
    assert np.abs(got - wanted).max() <= 2**-7 * (1 + np.abs(wanted).max()) and not got[~inside].any()
