"""onnxruntime's own operators: read as ONNX's, with the values that onnxruntime computes."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx_models import model, node

from fusionreg.core.errors import ModelError
from fusionreg.core.evaluate.evaluator import evaluate
from fusionreg.core.lift import lift
from fusionreg.core.ops import default_vocabulary
from fusionreg.integrations.onnx.load import load
from fusionreg.integrations.onnx.reference import Missing, example_inputs, run

OPS = default_vocabulary()
RNG = np.random.default_rng(17)
B, S, D, N = 2, 5, 8, 2


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def ms(op: str, inputs: list[str], outputs: list[str], **attributes) -> onnx.NodeProto:
    return node(op, inputs, outputs, domain="com.microsoft", **attributes)


def check(proto: onnx.ModelProto, feed: dict | None = None, rtol: float = 2e-5, atol: float = 2e-5):
    """Our graph, none of whose operators is onnxruntime's own."""
    graph = load(proto)
    assert {n.op for n in graph.nodes} <= set(OPS)
    feed = example_inputs(graph) if feed is None else feed
    want = run(proto, feed)
    assert not isinstance(want, Missing), want
    for made in (graph, lift(graph, OPS)):
        got = evaluate(made, feed, ops=OPS)
        for name, expected in want.items():
            np.testing.assert_allclose(got[name], expected, rtol=rtol, atol=atol, err_msg=name)
    return graph


def one(op: str, shapes: dict, attributes: dict, constants: dict | None = None, outputs=("y",), order=None, **kw):
    names = order or [*shapes, *(constants or {})]
    return model(
        [ms(op, names, list(outputs), **attributes)], shapes, [o for o in outputs if o], constants,
        domains={"com.microsoft": 1}, **kw,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("op", "constants", "attributes"),
    [
        ("Gelu", {}, {}), ("BiasGelu", {"b": normal(D)}, {}), ("FastGelu", {}, {}), ("FastGelu", {"b": normal(D)}, {}),
        ("QuickGelu", {}, {}), ("QuickGelu", {}, {"alpha": 1.3}),
    ],
)  # fmt: skip
def test_gelus(op: str, constants: dict, attributes: dict) -> None:
    check(one(op, {"x": [B, S, D]}, attributes, constants))


@pytest.mark.parametrize(
    ("a", "b", "attributes"),
    [
        ([3, 4], [4, 5], {}),
        ([3, 4], [4, 5], {"alpha": 0.5}),
        ([4, 3], [5, 4], {"transA": 1, "transB": 1, "alpha": 2.0}),
        ([2, 3, 4], [2, 5, 4], {"transB": 1}),
    ],
)
def test_fused_matmul(a: list, b: list, attributes: dict) -> None:
    check(one("FusedMatMul", {"a": a, "b": b}, attributes))


def test_fused_matmul_that_swaps_the_batch_is_refused() -> None:
    with pytest.raises(ModelError, match="transBatchA = 1"):
        load(one("FusedMatMul", {"a": [2, 3, 4], "b": [3, 4, 5]}, {"transBatchA": 1}))


@pytest.mark.parametrize(
    ("activation", "extra"),
    [("Relu", {}), ("Tanh", {}), ("Sigmoid", {}), ("LeakyRelu", {"activation_params": [0.3]}),
     ("Clip", {"activation_params": [-0.5, 0.7]}), ("HardSigmoid", {"activation_params": [0.3, 0.4]})],
)  # fmt: skip
def test_fused_convolution(activation: str, extra: dict) -> None:
    constants = {"w": normal(4, 3, 3, 3), "b": normal(4)}
    attributes = {"activation": activation, "pads": [1, 1, 1, 1], **extra}
    check(one("FusedConv", {"x": [1, 3, 6, 6]}, attributes, constants))


def test_fused_gemm() -> None:
    constants = {"w": normal(5, 4), "b": normal(5)}
    check(one("FusedGemm", {"x": [3, 4]}, {"activation": "LeakyRelu", "activation_alpha": 0.2, "transB": 1}, constants))


@pytest.mark.parametrize("outputs", [("y",), ("y", "", "", "s")])
@pytest.mark.parametrize("names", [["x", "k", "g"], ["x", "k", "g", "b"], ["x", "k", "g", "b", "c"]])
def test_skip_layer_normalization(outputs: tuple, names: list) -> None:
    constants = {n: normal(D) for n in names[2:]}
    proto = one(
        "SkipLayerNormalization", {"x": [B, S, D], "k": [B, S, D]}, {"epsilon": 1e-5}, constants, outputs, names
    )
    graph = check(proto)
    assert graph.outputs == tuple(o for o in outputs if o)


@pytest.mark.parametrize("outputs", [("y",), ("y", "", "", "s")])
def test_skip_simplified_layer_normalization(outputs: tuple) -> None:
    constants = {"g": normal(D)}
    shapes = {"x": [B, S, D], "k": [B, S, D]}
    check(one("SkipSimplifiedLayerNormalization", shapes, {"epsilon": 1e-5}, constants, outputs))


def test_simplified_layer_normalization() -> None:
    proto = model([node("SimplifiedLayerNormalization", ["x", "g"], ["y"], axis=-1, epsilon=1e-5)], {"x": [B, S, D]},
                  ["y"], {"g": normal(D)})  # fmt: skip
    graph = check(proto)
    assert [n.op for n in graph.nodes] == ["RMSNormalization"]


@pytest.mark.parametrize("segments", [False, True])
@pytest.mark.parametrize("mask", [False, True])
def test_embeddings(segments: bool, mask: bool) -> None:
    shapes = {"ids": ([B, S], "int32")}
    feed = {"ids": RNG.integers(0, 9, (B, S)).astype(np.int32)}
    if segments:
        shapes["segments"] = ([B, S], "int32")
        feed["segments"] = RNG.integers(0, 2, (B, S)).astype(np.int32)
    if mask:
        shapes["mask"] = ([B, S], "int32")
        feed["mask"] = (np.arange(S) < np.array([[3], [5]])).astype(np.int32)
    constants = {"words": normal(9, D), "places": normal(7, D), "kinds": normal(2, D), "g": normal(D), "b": normal(D)}
    if not segments:
        del constants["kinds"]
    names = ["ids", "segments" * segments, "words", "places", "kinds" * segments, "g", "b", "mask" * mask]
    outputs = {"y": None, "n": (None, "int32")} if mask else {"y": None}
    proto = model(
        [ms("EmbedLayerNormalization", names, list(outputs), epsilon=1e-5)] if mask
        else [ms("EmbedLayerNormalization", names[:7], ["y", "unread"], epsilon=1e-5)],
        shapes, outputs, constants, domains={"com.microsoft": 1},
    )  # fmt: skip
    if mask:
        check(proto, feed)
        return
    with pytest.raises(ModelError, match="without a mask"):
        load(proto)
    proto.graph.node[0].output[1] = ""
    check(proto, feed)


MASKS = {
    "none": None,
    "raw": (np.arange(S) < np.array([[3], [5]])).astype(np.int32),
    "lengths": np.array([3, 5], np.int32),
    "per query": RNG.integers(0, 2, (B, S, S)).astype(np.int32) | np.eye(S, dtype=np.int32),
}


@pytest.mark.parametrize("kind", list(MASKS))
@pytest.mark.parametrize("attributes", [{}, {"unidirectional": 1}, {"scale": 0.3}])
def test_attention(kind: str, attributes: dict) -> None:
    constants = {"w": normal(D, 3 * D), "b": normal(3 * D)}
    shapes, feed = {"x": [B, S, D]}, {"x": normal(B, S, D)}
    names = ["x", "w", "b"]
    if MASKS[kind] is not None:
        shapes["m"], feed["m"] = (list(MASKS[kind].shape), "int32"), MASKS[kind]
        names.append("m")
    graph = check(one("Attention", shapes, {"num_heads": N, **attributes}, constants, order=names), feed, atol=5e-5)
    assert "Attention" in {n.op for n in graph.nodes}


def test_attention_that_is_more_than_onnx_has_is_refused() -> None:
    constants = {"w": normal(D, 3 * D), "b": normal(3 * D)}
    with pytest.raises(ModelError, match="do_rotary = 1"):
        load(one("Attention", {"x": [B, S, D]}, {"num_heads": N, "do_rotary": 1}, constants))
    past = one(
        "Attention", {"x": [B, S, D], "p": [2, B, N, 3, D // N]}, {"num_heads": N}, constants,
        order=["x", "w", "b", "", "p"],
    )  # fmt: skip
    with pytest.raises(ModelError, match="with a past"):
        load(past)
    lengths = one(
        "Attention", {"x": [B, S, D], "m": ([2 * B], "int32")}, {"num_heads": N}, constants, order=["x", "w", "b", "m"]
    )
    with pytest.raises(ModelError, match="4 lengths for 2 sequences"):
        load(lengths)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("mask", [False, True])
def test_multi_head_attention(bias: bool, mask: bool) -> None:
    keys = 6
    shapes = {"q": [B, S, D], "k": [B, keys, D], "v": [B, keys, D]}
    feed = {n: normal(*shape) for n, shape in shapes.items()}
    constants = {"b": normal(3 * D)} if bias else {}
    names = ["q", "k", "v", "b" * bias]
    if mask:
        shapes["m"] = ([B, keys], "int32")
        feed["m"] = (np.arange(keys) < np.array([[4], [6]])).astype(np.int32)
        names.append("m")
    check(one("MultiHeadAttention", shapes, {"num_heads": N}, constants, order=names), feed, atol=5e-5)


def test_rotary_embedding() -> None:
    shapes = {"x": [B, N, S, 4], "p": ([B, S], "int64")}
    feed = {"x": normal(B, N, S, 4), "p": RNG.integers(0, 9, (B, S))}
    angles = normal(9, 2)
    constants = {"c": np.cos(angles), "s": np.sin(angles)}
    check(one("RotaryEmbedding", shapes, {}, constants, order=["x", "p", "c", "s"]), feed)
