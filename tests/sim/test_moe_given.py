"""Experts whose choice is given, in the simulator: ids twice for a token and of no expert, against float64 products."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from catalogs import shipped

from fusionreg.core.problem import bind
from fusionreg.core.runtime import Runtime, dispatch
from fusionreg.core.simulator import Checks

CATALOG = shipped("moe")
FUSION = "moe.expert_ffn"
E, D, I = 5, 72, 40


def exact(x, ids, weights, gate_up, down):
    x, gate_up, down = (v.astype(np.float64) for v in (x, gate_up, down))
    y = np.zeros(x.shape)
    for m, row in enumerate(ids):
        for e, weight in zip(row, weights[m].astype(np.float64), strict=True):
            if 0 <= e < E:
                gate, up = np.split(gate_up[e] @ x[m], 2)
                y[m] += weight * (down[e] @ (gate / (1 + np.exp(-gate)) * up))
    return y


@pytest.mark.parametrize(
    ("kernel", "tokens"), [("decode", 8), ("decode", 1), ("tiles", 70), ("wgmma", 40), ("plain", 6)]
)
def test_ids_of_any_kind(kernel, tokens, sim_cache, monkeypatch):
    rng = np.random.default_rng(7)
    bf16 = ml_dtypes.bfloat16
    x = rng.standard_normal((tokens, D)).astype(bf16)
    gate_up = (rng.standard_normal((E, 2 * I, D)) / 8).astype(bf16)
    down = (rng.standard_normal((E, D, I)) / 6).astype(bf16)
    gate_up[3], down[3] = np.nan, np.nan  # which nobody names
    choices = np.array([-1, 0, 0, 1, 2, 4, E, 2**40])
    ids = rng.choice(choices, (tokens, 4))
    ids[0] = (2, 2, 2, 2)
    weights = rng.standard_normal((tokens, 4)).astype(np.float32)
    monkeypatch.setattr(dispatch, "bind", lambda *problem: bind(*problem[:4], 3))
    run = Runtime(CATALOG, "sim", sim_cache, Checks.guarded(), measured={f"{FUSION}/{kernel}": 1e-9})
    y = run.call(FUSION, x, ids, weights, gate_up, down, activation="Swish")
    assert run.kernels_used == {f"{FUSION}/{kernel}": 1}
    finite = (np.nan_to_num(w.astype(np.float32)) for w in (gate_up, down))
    wanted = exact(x, ids, weights, *finite)
    assert np.abs(y.astype(np.float64) - wanted).max() <= 2**-6 * (1 + np.abs(wanted).max())
    nobody = run.call(FUSION, x, np.full_like(ids, -1), weights, gate_up, down, activation="Swish")
    assert not nobody.astype(np.float32).any()
