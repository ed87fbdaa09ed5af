"""QLinearConv against onnxruntime: per tensor and per filter, with bias, groups, padding at the zero point."""

from __future__ import annotations

import numpy as np
import pytest
from onnx_models import model, node

from fusionreg.core.evaluate.evaluator import evaluate
from fusionreg.core.ops import default_vocabulary
from fusionreg.integrations.onnx.load import load
from fusionreg.integrations.onnx.reference import run

OPS = default_vocabulary()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("per_filter", [False, True])
@pytest.mark.parametrize("weights", ["uint8", "int8"])
def test_values(weights: str, per_filter: bool, bias: bool) -> None:
    rng = np.random.default_rng(2)
    low, high = (0, 256) if weights == "uint8" else (-64, 64)  # without VNNI onnxruntime saturates sums of two products
    filters = 4
    scale = rng.uniform(0.01, 0.02, filters if per_filter else ()).astype(np.float32)
    zero = np.zeros(filters if per_filter else (), weights) + (0 if weights == "int8" else np.uint8(120))
    constants = {
        "sx": np.float32(0.03), "zx": np.uint8(110), "w": rng.integers(low, high, (filters, 1, 3, 3)).astype(weights),
        "sw": scale, "zw": zero.astype(weights), "sy": np.float32(0.2), "zy": np.uint8(128),
    }  # fmt: skip
    names = ["x", "sx", "zx", "w", "sw", "zw", "sy", "zy"]
    if bias:
        constants["b"] = rng.integers(-3000, 3000, filters).astype(np.int32)
        names.append("b")
    made = node("QLinearConv", names, ["y"], group=2, pads=[1, 0, 1, 2], strides=[2, 1])
    proto = model([made], {"x": ([2, 2, 7, 6], "uint8")}, {"y": (None, "uint8")}, constants)
    feed = {"x": rng.integers(0, 256, (2, 2, 7, 6)).astype(np.uint8)}
    graph, want = load(proto), run(proto, feed)["y"]
    got = evaluate(graph, feed, ops=OPS)["y"]
    assert graph.values["y"].shape == want.shape and want.std() > 10
    assert np.abs(got.astype(int) - want.astype(int)).max() <= 1  # a half that float32 rounds the other way
    assert (got == want).mean() > 0.98
