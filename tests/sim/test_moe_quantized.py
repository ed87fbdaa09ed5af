"""Routed experts with weights of 8 and 4 bits in the simulator, against float64 products of dequantised matrices."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from catalogs import shipped

from fusionreg.core.frozen import FrozenDict
from fusionreg.core.problem import bind
from fusionreg.core.runtime import Runtime, dispatch
from fusionreg.core.simulator import Checks

CATALOG = shipped("moe")
W8, W4 = "moe.routed_ffn_w8a16", "moe.routed_ffn_w4a16"
KINDS = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def runtime(fusion, kernel, cache, **params):
    key = f"{fusion}/{kernel}"
    return Runtime(CATALOG, "sim", cache, Checks.guarded(), measured={key: 1e-9}, tuned={key: FrozenDict(params)})


def weights(kind, experts, rows, depth, rng, *, block=128, form="channel"):
    """(stored, scales, the matrices in float64), small enough that activations bend."""
    if kind == "int4":
        numbers = rng.integers(-8, 8, (experts, rows, depth))
        stored = (numbers[..., 0::2] + 8 | numbers[..., 1::2] + 8 << 4).astype(np.uint8)
        scales = rng.uniform(0.5, 1.5, (experts, rows, depth // block)) * depth**-0.5 / 4
        wide = np.repeat(scales.astype(np.float32).astype(np.float64), block, axis=2)
    else:
        if kind == "int8":
            numbers = rng.integers(-128, 128, (experts, rows, depth))
            stored = numbers.astype(np.int8)
        else:
            stored = (32 * rng.standard_normal((experts, rows, depth))).astype(ml_dtypes.float8_e4m3fn)
            numbers = stored.astype(np.float64)
        scales = rng.uniform(0.5, 1.5, (experts, rows if form == "channel" else 1, 1)) * depth**-0.5 / 64
        wide = scales.astype(np.float32).astype(np.float64)
    return stored, scales.astype(np.float32), numbers * wide


def exact(x, logits, gate_up, down, k):
    """With softmax, renormalised, and SiLU."""
    y, x = np.zeros(x.shape), x.astype(np.float64)
    for m, row in enumerate(logits.astype(np.float64)):
        best = np.argsort(-row, kind="stable")[:k]
        shares = np.exp(row[best] - row.max())
        for e, share in zip(best, shares / shares.sum(), strict=True):
            gate, up = np.split(gate_up[e] @ x[m], 2)
            y[m] += share * (down[e] @ (gate / (1 + np.exp(-gate)) * up))
    return y


@pytest.mark.parametrize(
    ("kernel", "kind", "dtype", "tokens", "multiprocessors", "params", "further"),
    [
        ("decode", "int8", "bfloat16", 7, 4, {}, {}),
        ("decode", "float8_e4m3fn", "float16", 8, 2, {}, {"form": "expert"}),
        ("decode", "int4", "bfloat16", 8, 3, {}, {}),
        ("tiles", "int8", "float16", 70, 3, {"STAGES": 3, "CHUNKS": 2}, {}),
        ("tiles", "float8_e4m3fn", "bfloat16", 9, 2, {"STAGES": 4, "CHUNKS": 2}, {"form": "expert"}),
        ("tiles", "int4", "float16", 70, 2, {"STAGES": 2, "CHUNKS": 1}, {}),
        ("decode", "int4", "float16", 3, 2, {}, {"block": 32}),
        ("tiles", "int4", "bfloat16", 20, 2, {"STAGES": 2, "CHUNKS": 1}, {"block": 32}),
        ("tiles", "int4", "float16", 9, 2, {"STAGES": 4, "CHUNKS": 1}, {"block": 64}),
        ("plain", "int4", "bfloat16", 4, 4, {}, {"block": 64}),
    ],
)
def test_dequantised_experts(kernel, kind, dtype, tokens, multiprocessors, params, further, sim_cache, monkeypatch):
    """More tiles than blocks, more tokens of an expert than a tile has, and every scale another one."""
    rng = np.random.default_rng(3)
    channels, inner, experts = 384, 256 if kind == "int4" else 144, 3
    x = rng.standard_normal((tokens, channels)).astype(KINDS[dtype])
    logits = rng.standard_normal((tokens, experts)).astype(np.float32)
    gate_up = weights(kind, experts, 2 * inner, channels, rng, **further)
    down = weights(kind, experts, channels, inner, rng, **further)
    fusion = W4 if kind == "int4" else W8
    given = {"block": further.get("block", 128)} if kind == "int4" else {}
    run = runtime(fusion, kernel, sim_cache, **params)
    monkeypatch.setattr(dispatch, "bind", lambda *problem: bind(*problem[:4], multiprocessors))
    y = run.call(fusion, x, logits, *gate_up[:2], *down[:2], None, top_k=2, renormalise=1, activation="Swish", **given)
    assert run.kernels_used == {f"{fusion}/{kernel}": 1}
    wanted = exact(x, logits, gate_up[2], down[2], 2)
    error = np.abs(y.astype(np.float64) - wanted).max() / np.abs(wanted).max()
    assert error <= {"float16": 2**-9, "bfloat16": 2**-6}[dtype]
