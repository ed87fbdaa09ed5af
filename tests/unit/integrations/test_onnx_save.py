"""Saved models: stock onnxruntime, knowing nothing of fusions, gives the original's answers."""

from __future__ import annotations

import json
import os

import numpy as np
import onnx
import pytest
from graphs import gemm, plan_of, quick_gelu, softmax_bias
from onnx_models import OPS, model, node, ort, ours, random, same

from fusionreg.core import rewrite
from fusionreg.core.errors import ModelError
from fusionreg.core.lift import lift
from fusionreg.integrations.onnx import load, save

RNG = np.random.default_rng(5)
FUSIONS = {f.name: f for f in (gemm(), softmax_bias(), quick_gelu())}


def weights(**shapes):
    return {k: RNG.normal(size=v).astype("f") for k, v in shapes.items()}


def fuse(proto, *names):
    graph = lift(load(proto), OPS)
    chosen = plan_of(graph, *(FUSIONS[n] for n in names or FUSIONS))
    assert chosen.chosen
    return rewrite.apply(graph, chosen, FUSIONS)


def mlp(opset=17):
    nodes = [
        node("MatMul", ["x", "w1"], ["a"], name="up"),
        node("Add", ["a", "b1"], ["b"], name="bias"),
        node("Relu", ["b"], ["c"], name="act"),
        node("Transpose", ["w2"], ["t"], perm=[1, 0]),
        node("MatMul", ["c", "t"], ["d"], name="down"),
        node("Add", ["b2", "d"], ["e"]),
        node("Relu", ["e"], ["y"]),
    ]
    return model(nodes, {"x": ["N", 8]}, {"y": ["N", 8]}, weights(w1=(8, 16), b1=(16,), w2=(8, 16), b2=(8,)), opset)


@pytest.mark.parametrize("opset", [11, 13, 17, 21])
def test_fused_model_runs_in_stock_onnxruntime(tmp_path, opset):
    proto, path = mlp(opset), tmp_path / "fused.onnx"
    save(fuse(proto), proto, path, FUSIONS)
    written = onnx.load(path)
    onnx.checker.check_model(written, full_check=True)
    assert [n.domain for n in written.graph.node] == ["fusionreg", "fusionreg"]
    bodies = [[n.op_type for n in f.node] for f in written.functions]
    # the transposed weight is spelled as a Transpose before a stock MatMul
    assert sorted(bodies) == [["MatMul", "Add", "Relu"], ["Transpose", "MatMul", "Add", "Relu"]]
    for size in (1, 5):
        x = random(proto, seed=size, N=size)
        same(ort(str(path), x), ort(proto, x))


def test_the_file_says_what_was_fused(tmp_path):
    proto, path = mlp(), tmp_path / "fused.onnx"
    proto.metadata_props.add(key="author", value="somebody")
    proto.doc_string, proto.model_version = "a network", 7
    save(fuse(proto), proto, path, FUSIONS)
    written = onnx.load(path)
    props = {p.key: p.value for p in written.metadata_props}
    assert props["author"] == "somebody" and written.doc_string == "a network" and written.model_version == 7
    record = json.loads(props["fusionreg.gemm.scale_bias"])
    assert record == {"fusion": "gemm.scale_bias", "version": "1.0.0", "kernels": ""}
    call = {p.key: p.value for p in written.graph.node[0].metadata_props}
    assert call["fusionreg.fusion"] == "gemm.scale_bias" and "activation=Relu" in call["fusionreg.attributes"]


def test_equal_bodies_share_a_function(tmp_path):
    """Three layers of one shape are three calls of one function; another activation is another function."""
    constants, nodes, last = {}, [], "x"
    for i, act in enumerate(["Relu", "Relu", "Relu", "Tanh"]):
        constants |= weights(**{f"w{i}": (8, 8), f"b{i}": (8,)})
        nodes += [
            node("MatMul", [last, f"w{i}"], [f"h{i}"]),
            node("Add", [f"h{i}", f"b{i}"], [f"s{i}"]),
            node(act, [f"s{i}"], [f"y{i}"]),
        ]
        last = f"y{i}"
    proto, path = model(nodes, {"x": [3, 8]}, [last], constants), tmp_path / "m.onnx"
    save(fuse(proto), proto, path)
    written = onnx.load(path)
    assert len(written.functions) == 2 and len(written.graph.node) == 4
    x = random(proto)
    same(ort(str(path), x), ort(proto, x))


def test_interface_weights_and_names_are_kept(tmp_path):
    """Input and output order, symbolic axes, initialisers under their names, replaceable ones still replaceable."""
    proto = model(
        [node("MatMul", ["x", "w"], ["h"]), node("Add", ["h", "b"], ["s"]), node("Relu", ["s"], ["y"])],
        {"b": [4], "x": ["batch", 3]}, {"y": ["batch", 4], "x": ["batch", 3]}, weights(w=(3, 4), b=(4,)),
    )  # fmt: skip
    path = tmp_path / "m.onnx"
    save(fuse(proto), proto, path, FUSIONS)
    written = onnx.load(path)
    assert [i.SerializeToString() for i in written.graph.input] == [i.SerializeToString() for i in proto.graph.input]
    assert [o.name for o in written.graph.output] == ["y", "x"]
    assert {t.name for t in written.graph.initializer} == {"w", "b"}
    x = random(proto, batch=2)
    for inputs in (x, {**x, "b": np.full(4, -3, "f")}):
        same(ort(str(path), inputs), ort(proto, inputs))


def test_exposed_intermediate_is_still_an_output(tmp_path):
    """onnxruntime#4110: both outputs equal the unfused run."""
    proto = mlp()
    proto.graph.output.append(onnx.helper.make_tensor_value_info("b", 1, None))
    path = tmp_path / "m.onnx"
    save(fuse(proto), proto, path, FUSIONS)
    x = random(proto, N=3)
    same(ort(str(path), x), ort(proto, x))


def test_every_operator_beyond_the_written_opset_is_spelled_out(tmp_path):
    """What lifting brings in (Swish, QuickGelu, RMSNormalization) is in no opset 21: plain operators take its place."""
    nodes = [
        node("Sigmoid", ["x"], ["s"]),
        node("Mul", ["x", "s"], ["swish"]),
        node("Mul", ["swish", "k"], ["q1"]),
        node("Sigmoid", ["q1"], ["q2"]),
        node("Mul", ["swish", "q2"], ["quick"]),
        node("Mul", ["quick", "half"], ["p1"]),
        node("Sigmoid", ["p1"], ["p2"]),
        node("Mul", ["quick", "p2"], ["scaled"]),
        node("Mul", ["scaled", "scaled"], ["sq"]),
        node("ReduceMean", ["sq"], ["ms"], axes=[-1]),
        node("Add", ["ms", "eps"], ["e"]),
        node("Sqrt", ["e"], ["r"]),
        node("Div", ["scaled", "r"], ["n"]),
        node("Mul", ["n", "g"], ["y"]),
    ]
    constants = {"k": np.float32(1.702), "half": np.float32(0.5), "eps": np.float32(1e-6), **weights(g=(8,))}
    proto, path = model(nodes, {"x": ["N", 8]}, ["y"], constants), tmp_path / "m.onnx"
    lifted = lift(load(proto), OPS)
    assert [n.op for n in lifted.nodes] == ["Swish", "fusionreg::QuickGelu", "Swish", "RMSNormalization"]
    save(lifted, proto, path)
    written = onnx.load(path)
    onnx.checker.check_model(written, full_check=True)
    assert {n.op_type for n in written.graph.node} <= {"Sigmoid", "Mul", "ReduceMean", "Add", "Sqrt", "Div", "Constant"}
    x = random(proto, N=3)
    same(ort(str(path), x), ort(proto, x))


def test_half_precision_norm_keeps_its_wide_inside(tmp_path):
    nodes = [
        node("Cast", ["x"], ["f"], to=1),
        node("Mul", ["f", "f"], ["sq"]),
        node("ReduceMean", ["sq"], ["ms"], axes=[-1]),
        node("Add", ["ms", "eps"], ["e"]),
        node("Sqrt", ["e"], ["r"]),
        node("Div", ["f", "r"], ["n"]),
        node("Cast", ["n"], ["c"], to=10),
        node("Mul", ["c", "g"], ["y"]),
    ]
    constants = {"eps": np.float32(1e-6), "g": RNG.normal(size=8).astype("f2")}
    proto = model(nodes, {"x": ([2, 8], "float16")}, {"y": (None, "float16")}, constants)
    lifted = lift(load(proto), OPS)
    assert [n.op for n in lifted.nodes] == ["RMSNormalization"]
    save(lifted, proto, tmp_path / "m.onnx")
    x = {"x": (RNG.normal(size=(2, 8)) * 300).astype("f2")}  # x² overflows in float16
    same(ort(str(tmp_path / "m.onnx"), x), ort(proto, x), rtol=2e-3)


@pytest.mark.parametrize("mask", ["none", "added", "chosen"])
def test_attention_is_spelled_out(tmp_path, mask):
    constants = {"c": np.float32(0.3), "m": np.where(np.tri(4), 0, -1e9).astype("f")[None], "low": np.float32(-np.inf)}
    constants["b"] = np.tri(4) > 0
    nodes = [
        node("Transpose", ["k"], ["kt"], perm=[0, 1, 3, 2]),
        node("MatMul", ["q", "kt"], ["s"]),
        node("Mul", ["s", "c"], ["t"]),
        {
            "none": node("Identity", ["t"], ["u"]),
            "added": node("Add", ["t", "m"], ["u"]),
            "chosen": node("Where", ["b", "t", "low"], ["u"]),
        }[mask],
        node("Softmax", ["u"], ["p"], axis=-1),
        node("MatMul", ["p", "v"], ["y"]),
    ]
    shapes = {name: ["N", 2, 4, 8] for name in "qkv"}
    proto, path = model(nodes, shapes, ["y"], constants), tmp_path / "m.onnx"
    lifted = lift(load(proto), OPS)
    assert [n.op for n in lifted.nodes] == ["Attention"]
    save(lifted, proto, path)
    onnx.checker.check_model(onnx.load(path), full_check=True)
    x = random(proto, N=3)
    same(ours(lifted, x), ort(proto, x))
    same(ort(str(path), x), ort(proto, x))


def test_sub_graphs_and_opaque_operators_survive(tmp_path):
    then = onnx.helper.make_graph(
        [node("MatMul", ["h", "w"], ["t"])], "then", [], [onnx.helper.make_tensor_value_info("t", 1, None)]
    )
    other = onnx.helper.make_graph(
        [node("Neg", ["h"], ["e"])], "else", [], [onnx.helper.make_tensor_value_info("e", 1, None)]
    )
    nodes = [
        node("MatMul", ["x", "w"], ["m"]),
        node("Add", ["m", "b"], ["s"]),
        node("Relu", ["s"], ["h"]),
        node("If", ["c"], ["y"], then_branch=then, else_branch=other),
    ]
    proto = model(nodes, {"x": [2, 4], "c": ([], "bool")}, ["y"], weights(w=(4, 4), b=(4,)))
    path = tmp_path / "m.onnx"
    save(fuse(proto), proto, path, FUSIONS)
    for c in (True, False):
        x = {"x": RNG.normal(size=(2, 4)).astype("f"), "c": np.array(c)}
        same(ort(str(path), x), ort(proto, x))
    nodes[3] = node("SampleOp", ["h"], ["y"], domain="com.microsoft")  # an operator that nobody here knows
    proto = model(
        nodes, {"x": [2, 4], "c": ([], "bool")}, ["y"], weights(w=(4, 4), b=(4,)), domains={"com.microsoft": 1}
    )
    save(fuse(proto), proto, path, FUSIONS)
    x = {"x": RNG.normal(size=(2, 4)).astype("f"), "c": np.array(True)}
    same(ort(str(path), x), ort(proto, x))


def test_a_saved_model_can_be_read_and_fused_again(tmp_path):
    proto = mlp()
    save(fuse(proto), proto, tmp_path / "one.onnx", FUSIONS)
    again = fuse(str(tmp_path / "one.onnx"))
    assert [n.op for n in again.nodes] == ["fused::gemm.scale_bias"] * 2
    save(again, str(tmp_path / "one.onnx"), tmp_path / "two.onnx", FUSIONS)
    x = random(proto, N=2)
    same(ort(str(tmp_path / "two.onnx"), x), ort(proto, x))
    same(ours(again, x), ort(proto, x))


def test_large_weights_go_beside_the_model(tmp_path):
    proto, path = mlp(), tmp_path / "big.onnx"
    save(fuse(proto), proto, path, FUSIONS, external_above=100)
    assert sorted(os.listdir(tmp_path)) == ["big.onnx", "big.onnx.data"]
    x = random(proto, N=2)
    same(ort(str(path), x), ort(proto, x))
    again = load(path)
    np.testing.assert_array_equal(again.constants["w1"], load(proto).constants["w1"])
    save(again, path, path, external_above=100)  # onto itself: the weights are mapped from the file being replaced
    same(ort(str(path), x), ort(proto, x))


def test_bfloat16_weights_keep_their_bits(tmp_path):
    import ml_dtypes

    w = RNG.normal(size=(4, 4)).astype(ml_dtypes.bfloat16)
    tensor = onnx.TensorProto(name="w", data_type=16, dims=[4, 4], raw_data=w.tobytes())
    proto = model([node("MatMul", ["x", "w"], ["y"])], {"x": ([2, 4], "bfloat16")}, {"y": ([2, 4], "bfloat16")})
    proto.graph.initializer.append(tensor)
    save(load(proto), proto, tmp_path / "m.onnx")
    assert load(tmp_path / "m.onnx").constants["w"].tobytes() == w.tobytes()


def test_failures_leave_nothing_behind(tmp_path):
    proto = mlp()
    graph = fuse(proto)
    with pytest.raises(ModelError, match="cannot save"):
        save(graph, proto, tmp_path / "nowhere" / "m.onnx")
    (tmp_path / "dir.onnx").mkdir()
    with pytest.raises(ModelError, match="cannot save"):
        save(graph, proto, tmp_path / "dir.onnx", external_above=100)
    assert os.listdir(tmp_path) == ["dir.onnx"]


def test_an_operator_without_a_spelling_is_named(tmp_path):
    from lifting import Spell

    n = Spell()
    with pytest.raises(ModelError, match="fusionreg::Log1p"):
        save(n.done(n.op("fusionreg::Log1p", n.x(3))), None, tmp_path / "m.onnx")
    assert not os.listdir(tmp_path)
