"""Experts whose choice is given, in the simulator: ids twice for a token and of no expert, against float64 products."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from catalogs import shipped

from fusionreg.core.errors import MisfitError
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
    ("kernel", "tokens", "kind"),
    [
        ("decode", 8, np.int32),
        ("decode", 1, np.int64),
        ("token", 1, np.int32),
        ("tiles", 70, np.int32),
        ("wgmma", 40, np.int32),
        ("plain", 6, np.int32),
    ],
)
def test_ids_of_any_kind(kernel, tokens, kind, sim_cache, monkeypatch):
    rng = np.random.default_rng(7)
    bf16 = ml_dtypes.bfloat16
    x = rng.standard_normal((tokens, D)).astype(bf16)
    gate_up = (rng.standard_normal((E, 2 * I, D)) / 8).astype(bf16)
    down = (rng.standard_normal((E, D, I)) / 6).astype(bf16)
    gate_up[3], down[3] = np.nan, np.nan  # which nobody names
    choices = np.array([-1, 0, 0, 1, 2, 4, E, 2**40 if kind is np.int64 else 2**31 - 1])
    ids = rng.choice(choices, (tokens, 4)).astype(kind)
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


@pytest.mark.parametrize(("kernel", "kind"), [("wgmma", np.int32), ("tensor_core", np.int32), ("plain", np.int64)])
def test_gradients_are_torch_s(kernel, kind, sim_cache):
    """Of tokens, weights and matrices; a choice of no expert has none, nor has an expert that nobody names."""
    rng, tokens, width, hidden = np.random.default_rng(9), 45, 64, 120
    dy, x = (rng.standard_normal((tokens, width)).astype(np.float16) for _ in range(2))
    gate_up = (rng.standard_normal((E, 2 * hidden, width)) / 8).astype(np.float16)
    down = (rng.standard_normal((E, width, hidden)) / 6).astype(np.float16)
    far = 2**40 if kind is np.int64 else 2**31 - 1
    ids = rng.choice(np.array([-1, 0, 1, 2, 4, E, far]), (tokens, 3)).astype(kind)
    ids[0], ids[1] = (2, 2, 2), -1
    weights = rng.standard_normal(ids.shape).astype(np.float32)
    leaves = [torch.from_numpy(v.astype(np.float64)).requires_grad_() for v in (x, weights, gate_up, down)]
    y = torch.zeros(tokens, width, dtype=torch.float64)
    for e in range(E):
        gate, up = (leaves[0] @ leaves[2][e].T).chunk(2, -1)
        own = (leaves[1] * torch.from_numpy(ids == e)).sum(-1, keepdim=True)
        y = y + own * ((torch.nn.functional.silu(gate) * up) @ leaves[3][e].T)
    wanted = torch.autograd.grad(y, leaves, torch.from_numpy(dy.astype(np.float64)))
    gate_up[3], down[3] = np.nan, np.nan
    fusion = f"{FUSION}_backward"
    run = Runtime(CATALOG, "sim", sim_cache, Checks.guarded(), measured={f"{fusion}/{kernel}": 1e-9})
    found = run.call(fusion, dy, x, ids, weights, gate_up, down, activation="Swish")
    assert run.kernels_used == {f"{fusion}/{kernel}": 1}
    for got, right in zip(found, wanted, strict=True):
        assert np.abs(got.astype(np.float64) - right.numpy()).max() <= 2**-8 * (1 + float(right.abs().max()))
    outside = (ids < 0) | (ids >= E)
    assert not found[1][outside].any() and not found[0][1].any() and not found[2][3].any() and not found[3][3].any()


@pytest.mark.parametrize("kind", [np.uint8, np.float32])
def test_what_are_no_ids(kind, sim_cache):
    x, gate_up, down = (np.zeros(shape, np.float32) for shape in ((3, 16), (2, 32, 16), (2, 16, 16)))
    ids, weights = np.zeros((3, 2), kind), np.ones((3, 2), np.float32)
    with pytest.raises(MisfitError, match="int64 or int32"):
        Runtime(CATALOG, "sim", sim_cache).call(FUSION, x, ids, weights, gate_up, down, activation="Swish")


def test_more_rows_than_16_bits_number():
    """They are on the first axis of a grid, as the others end at 65535."""
    assert all(len(kernel.spec.grid) <= 1 for kernel in CATALOG.kernels)
