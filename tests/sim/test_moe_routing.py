"""What is around experts that are computed elsewhere, in the simulator: choices and sums, against loops."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from catalogs import shipped

from fusionreg.core.runtime import Runtime
from fusionreg.core.simulator import Checks

CATALOG = shipped("moe")


def runtime(cache):
    return Runtime(CATALOG, "sim", cache, Checks.full())


@pytest.mark.parametrize(
    ("experts", "k", "given"),
    [
        (7, 3, {"scoring": "softmax", "renormalise": 1}),
        (40, 4, {"scoring": "sigmoid", "renormalise": 1, "scale": 2.5}),
        (520, 2, {"scoring": "softmax"}),
    ],
)
def test_choices_weights_and_gradients(experts, k, given, sim_cache):
    """Best first, of equal ones the lower index first; the gradient of the weights is torch's in float64."""
    rng = np.random.default_rng(0)
    logits = (rng.integers(-9, 9, (5, experts)) / 4).astype(np.float32)  # ties
    run = runtime(sim_cache)
    weights, ids = run.call("moe.route", logits, None, top_k=k, **given)
    wanted = [sorted(range(experts), key=lambda e, row=row: (-row[e], e))[:k] for row in logits]
    np.testing.assert_array_equal(ids, wanted)
    leaf = torch.from_numpy(logits.astype(np.float64)).requires_grad_()
    scores = leaf.sigmoid() if given["scoring"] == "sigmoid" else leaf.softmax(-1)
    exact = scores.gather(1, torch.from_numpy(ids))
    exact = given.get("scale", 1.0) * (exact / exact.sum(-1, keepdim=True) if given.get("renormalise") else exact)
    np.testing.assert_allclose(weights, exact.detach(), rtol=1e-5)
    slope = rng.standard_normal((5, k)).astype(np.float32)
    found = run.call("moe.route_backward", slope, logits, None, top_k=k, **given)
    (right,) = torch.autograd.grad(exact, leaf, torch.from_numpy(slope.astype(np.float64)))
    np.testing.assert_allclose(found, right, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("width", "kernel"), [(24, "vector"), (7, "plain")])
def test_rows_are_weighed_and_added_up(width, kernel, sim_cache):
    rng = np.random.default_rng(1)
    x, index = rng.standard_normal((6, width)).astype(np.float16), rng.integers(-2, 8, (9, 3))
    weights = rng.standard_normal((9, 3)).astype(np.float32)
    run = runtime(sim_cache)
    y = run.call("moe.gather_sum", x, index, weights)
    exact = np.zeros((9, width))
    for m, j in np.ndindex(9, 3):
        if 0 <= index[m, j] < 6:
            exact[m] += float(weights[m, j]) * x[index[m, j]].astype(np.float64)
    assert np.abs(y - exact).max() < 2**-9 * (1 + np.abs(exact).max())
    assert run.kernels_used == {f"moe.gather_sum/{kernel}": 1}
