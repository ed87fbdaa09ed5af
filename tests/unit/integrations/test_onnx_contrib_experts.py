"""onnxruntime's layers of experts: what is imported computes what onnxruntime does, and is found as one fusion."""

from __future__ import annotations

import numpy as np
import pytest
from onnx_models import model, node

import fusionreg
from fusionreg.core.evaluate.evaluator import evaluate
from fusionreg.core.ops import default_vocabulary
from fusionreg.integrations.onnx.load import load
from fusionreg.integrations.onnx.reference import Missing, run

OPS = default_vocabulary()
E, K, D, I, M = 4, 2, 64, 64, 6
SWIGLU = {"k": K, "activation_type": "swiglu", "swiglu_fusion": 1, "normalize_routing_weights": 1}
#: Inputs of the quantised operator that are left out at the end of the others.
NAMES = ["x", "logits", "up", "up_scales", "", "down", "down_scales", ""]


def quantised(bits: int, block: int = 0, shape=(M, D), kind: str = "float32", **changes):
    rng = np.random.default_rng(bits + block)
    packed = 8 // bits
    constants = {
        "up": rng.integers(0, 256, (E, 2 * I, D // packed)).astype(np.uint8),
        "down": rng.integers(0, 256, (E, D, I // packed)).astype(np.uint8),
        "up_scales": rng.uniform(0.5, 1.5, (E, 2 * I) + ((D // block,) if block else ())) / 2**bits / 4,
        "down_scales": rng.uniform(0.5, 1.5, (E, D) + ((I // block,) if block else ())) / 2**bits / 4,
    }
    constants = {n: a if a.dtype == np.uint8 else a.astype(kind) for n, a in constants.items()}
    attributes = {**SWIGLU, "expert_weight_bits": bits, **({"block_size": block} if block else {}), **changes}
    nodes = [node("QMoE", NAMES, ["y"], domain="com.microsoft", **attributes)]
    inputs = {"x": (shape, kind), "logits": ((M, E), kind)}
    return model(nodes, inputs, {"y": (None, kind)}, constants, domains={"com.microsoft": 1})


def plain(**changes):
    rng = np.random.default_rng(1)
    constants = {
        "up": (rng.standard_normal((E, 2 * I, D)) / 8).astype(np.float32),
        "down": (rng.standard_normal((E, D, I)) / 8).astype(np.float32),
    }
    nodes = [node("MoE", ["x", "logits", "up", "", "down"], ["y"], domain="com.microsoft", **(SWIGLU | changes))]
    inputs = {"x": (M, D), "logits": (M, E)}
    return model(nodes, inputs, ["y"], constants, domains={"com.microsoft": 1})


def check(proto, tolerance: float = 2e-4) -> None:
    graph = load(proto)
    assert {n.op for n in graph.nodes} <= set(OPS)
    rng = np.random.default_rng(3)
    feed = {n: rng.standard_normal(graph.values[n].shape).astype(graph.values[n].dtype) for n in graph.inputs}
    want = run(proto, feed)
    assert not isinstance(want, Missing), want
    got, expected = evaluate(graph, feed, ops=OPS)["y"], want["y"]
    assert got.shape == expected.shape and got.dtype == expected.dtype and expected.std() > 0.01
    np.testing.assert_allclose(got, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("normalised", [0, 1])
def test_floats(normalised) -> None:
    check(plain(normalize_routing_weights=normalised))


@pytest.mark.parametrize(("bits", "block"), [(4, 0), (4, 32), (8, 0), (8, 32)])
def test_fewer_bits(bits, block) -> None:
    check(quantised(bits, block), 0.01 if (bits, block) == (8, 32) else 2e-4)  # there it rounds tokens to 8 bits, too


def test_tokens_of_sequences() -> None:
    check(quantised(4, 32, shape=(2, 3, D)))


@pytest.mark.parametrize(
    ("proto", "fusion"),
    [
        (plain(), "moe.routed_ffn"),
        (quantised(8, kind="float16"), "moe.routed_ffn_w8a16"),
        (quantised(4, 32, kind="float16"), "moe.routed_ffn_w4a16"),
    ],
    ids=["floats", "bytes", "halves of bytes"],
)
def test_it_is_one_fusion(proto, fusion) -> None:
    found = fusionreg.load_registry(allow=("moe",), device="sim").match(proto).matches
    assert max(found, key=lambda m: len(m.nodes)).fusion == fusion


@pytest.mark.parametrize(
    "changes",
    [
        {"normalize_routing_weights": 0}, {"activation_alpha": 1.702}, {"swiglu_limit": 7.0}, {"use_sparse_mixer": 1},
        {"activation_type": "relu"}, {"weights_prepacked": 1},
    ],
    ids=str,
)  # fmt: skip
def test_what_is_not_taken(changes) -> None:
    assert [n.op for n in load(quantised(4, 32, **changes)).nodes] == ["com.microsoft::QMoE"]
