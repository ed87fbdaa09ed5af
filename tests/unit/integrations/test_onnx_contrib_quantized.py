"""onnxruntime's operators on quantised tensors: within one step of what it computes, nearly everywhere the same."""

from __future__ import annotations

import numpy as np
import pytest
from onnx_models import model, node

from fusionreg.core.errors import ModelError
from fusionreg.core.evaluate.evaluator import evaluate
from fusionreg.core.ops import default_vocabulary
from fusionreg.integrations.onnx.load import load
from fusionreg.integrations.onnx.reference import Missing, run

OPS = default_vocabulary()
RNG = np.random.default_rng(23)
#: Of int8: without VNNI onnxruntime saturates sums of two products.
WEIGHTS = (-64, 64)
SCALES = {
    "sx": np.float32(0.0311), "zx": np.uint8(110), "sk": np.float32(0.0213), "zk": np.uint8(140),
    "sy": np.float32(0.04), "zy": np.uint8(120),
}  # fmt: skip


def made(op: str, names: list[str], shapes: dict, constants: dict, kind: str = "uint8", **attributes):
    given = {n: (shape, "uint8") for n, shape in shapes.items()}
    nodes = [node(op, names, ["y"], domain="com.microsoft", **attributes)]
    return model(nodes, given, {"y": (None, kind)}, constants, domains={"com.microsoft": 1})


def check(proto) -> None:
    graph = load(proto)
    assert {n.op for n in graph.nodes} <= set(OPS)
    feed = {n: RNG.integers(0, 256, graph.values[n].shape).astype(np.uint8) for n in graph.inputs}
    want = run(proto, feed)
    assert not isinstance(want, Missing), want
    got, expected = evaluate(graph, feed, ops=OPS)["y"], want["y"]
    assert got.dtype == expected.dtype and got.shape == expected.shape and expected.std() > 0.1
    if expected.dtype.kind == "f":
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)
        return
    assert np.abs(got.astype(int) - expected.astype(int)).max() <= 1
    assert (got == expected).mean() > 0.95


def pick(*names: str) -> dict:
    return {n: SCALES[n] for n in names}


@pytest.mark.parametrize("op", ["QLinearAdd", "QLinearMul"])
def test_two_operands(op: str) -> None:
    check(made(op, ["x", "sx", "zx", "k", "sk", "zk", "sy", "zy"], {"x": [3, 4, 8], "k": [4, 8]}, SCALES))


@pytest.mark.parametrize(
    ("op", "attributes"),
    [
        ("QLinearSigmoid", {}),
        ("QLinearLeakyRelu", {"alpha": 0.2}),
        ("QLinearGlobalAveragePool", {}),
        ("QLinearAveragePool", {"kernel_shape": [2, 2], "strides": [2, 1], "pads": [0, 1, 0, 0]}),
    ],
)
def test_one_operand(op: str, attributes: dict) -> None:
    constants = {**pick("sx", "zx", "zy"), "sy": np.float32(0.01), "zy": np.uint8(5)}
    if op == "QLinearLeakyRelu" or op.endswith("Pool"):
        constants |= pick("sy", "zy")
    check(made(op, ["x", "sx", "zx", "sy", "zy"], {"x": [2, 3, 6, 6]}, constants, **attributes))


def test_softmax() -> None:
    constants = {**pick("sx", "zx"), "sy": np.float32(1 / 256), "zy": np.uint8(0)}
    names = ["x", "sx", "zx", "sy", "zy"]
    check(made("QLinearSoftmax", names, {"x": [6, 5]}, constants, axis=-1, opset=13))


def test_concatenation() -> None:
    names = ["sy", "zy", "x", "sx", "zx", "k", "sk", "zk"]
    check(made("QLinearConcat", names, {"x": [3, 4], "k": [3, 5]}, SCALES, axis=1))


@pytest.mark.parametrize("bias", [False, True])
def test_product(bias: bool) -> None:
    constants = {
        **pick("sx", "zx"), "w": RNG.integers(*WEIGHTS, (6, 4)).astype(np.int8),
        "sw": RNG.uniform(0.01, 0.02, 4).astype(np.float32), "zw": np.zeros(4, np.int8),
        "b": RNG.standard_normal(4).astype(np.float32),
    }  # fmt: skip
    names = ["x", "w", "sx", "sw", "zx", "zw", *(["b"] if bias else [])]
    check(made("MatMulIntegerToFloat", names, {"x": [3, 6]}, constants, "float32"))


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("swap", [0, 1])
def test_gemm(swap: int, quantised: bool) -> None:
    weights = RNG.integers(*WEIGHTS, (4, 6) if swap else (6, 4)).astype(np.int8)
    constants = {
        **pick("sx", "zx"), "w": weights, "sw": RNG.uniform(0.01, 0.02, 4).astype(np.float32),
        "zw": np.zeros(4, np.int8), "c": RNG.integers(-900, 900, 4).astype(np.int32), "zy": np.uint8(120),
        "sy": np.float32(0.2),
    }  # fmt: skip
    names = ["x", "sx", "zx", "w", "sw", "zw", "c", *(["sy", "zy"] if quantised else [])]
    check(made("QGemm", names, {"x": [5, 6]}, constants, "uint8" if quantised else "float32", transB=swap))


def test_channels_last_is_refused() -> None:
    names = ["x", "sx", "zx", "sy", "zy"]
    proto = made("QLinearGlobalAveragePool", names, {"x": [1, 4, 4, 2]}, SCALES, channels_last=1)
    with pytest.raises(ModelError, match="channels_last = 1"):
        load(proto)
