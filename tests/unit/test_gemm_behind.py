"""What stands behind a bare product becomes part of it: alpha and beta with C, residuals, vectors; batches too."""

from __future__ import annotations

import numpy as np
import pytest
from onnx_models import model, node

from fusionreg import load_registry

RNG = np.random.default_rng(4)
W, V = (RNG.standard_normal(shape).astype(np.float32) for shape in ((32, 48), (2, 3, 32, 48)))
X, C = [16, 32], [16, 48]


@pytest.fixture(scope="module")
def registry():
    return load_registry(allow=("gemm",), device="sim")


@pytest.mark.parametrize(
    ("nodes", "inputs", "fusion"),
    [
        ([node("Gemm", ["x", "w", "c"], ["y"], alpha=0.5, beta=2.0)], {"x": X, "c": C}, "gemm.matmul"),
        ([node("Gemm", ["x", "w", "c"], ["y"])], {"x": X, "c": C}, "gemm.matmul"),
        ([node("Gemm", ["xt", "w", "c"], ["y"], transA=1, alpha=0.5)], {"xt": X[::-1], "c": C}, "gemm.matmul"),
        ([node("MatMul", ["x", "w"], ["h"]), node("Add", ["c", "h"], ["y"])], {"x": X, "c": C}, "gemm.matmul"),
        (
            [node("MatMul", ["x", "v"], ["h"]), node("Mul", ["h", "s"], ["t"]), node("Add", ["t", "b"], ["y"])],
            {"x": [2, 3, *X], "s": [], "b": [48]},
            "gemm.batched",
        ),
        (
            [node("MatMul", ["x", "v"], ["h"]), node("Add", ["h", "r"], ["y"])],
            {"x": [2, 3, *X], "r": [2, 3, 16, 1]},
            "gemm.batched",
        ),
    ],
    ids=["alpha and beta", "C", "columns of x", "residual", "batched with scale and bias", "batched with a column"],
)
def test_everything_is_one_match(registry, nodes, inputs, fusion):
    weights = {name: value for name, value in {"w": W, "v": V}.items() if name in nodes[0].input}
    whole = model(nodes, inputs, {"y": [*inputs.get("x", X)[:-1], 48]}, weights)
    found = [m for m in registry.match(whole) if m.fusion.startswith(f"{fusion}.r")]
    assert {n.name for n in registry.graph(whole).nodes if n.op != "Transpose"} in [set(m.nodes) for m in found]
