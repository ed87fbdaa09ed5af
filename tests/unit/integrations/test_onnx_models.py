"""Whole models against onnxruntime with optimisations off: a published network, and graphs as exporters write them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from graphs import gemm, plan_of
from onnx_models import OPS, check, count, model, node, ort, ours, random, same

from fusionreg.core import rewrite
from fusionreg.core.lift import lift
from fusionreg.integrations.onnx import load, save

I64 = np.int64
RNG = np.random.default_rng(11)


def w(*shape, scale=0.3):
    return (RNG.normal(size=shape) * scale).astype("f")


# --- a published model ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def magika():
    magika = pytest.importorskip("magika", reason="the model that ships inside the PyPI package magika")
    (path,) = Path(magika.__file__).parent.glob("models/standard_v3_3/model.onnx")
    return path


def test_magika(magika, tmp_path):
    """Real weights: ours raw, lifted, fused, and saved again, all give onnxruntime's answer."""
    graph = load(magika)
    assert len(graph.nodes) == 95
    rng = np.random.default_rng(0)
    inputs = {"bytes": rng.integers(0, 257, (3, 2048)).astype(np.int32)}
    expected = ort(magika, inputs)
    same(ours(graph, inputs), expected, rtol=1e-3, atol=2e-5)
    lifted = lift(graph, OPS)
    found = count(lifted)
    # its GELUs and its softmax are lifted; its LayerNorms (E[x²] − E[x]²) must not be
    assert found["Gelu"] == 2 and found["Softmax"] == 1 and found["MatMul"] == 2
    assert "LayerNormalization" not in found and "Tanh" not in found and "Exp" not in found
    same(ours(lifted, inputs), expected, rtol=1e-3, atol=2e-5)
    # every value of the batch has the batch's name
    assert {v.shape[0] for v in lifted.values.values() if v.shape and isinstance(v.shape[0], str)} == {"unk__214"}
    fused = rewrite.apply(lifted, plan_of(lifted, gemm()).chosen, {"gemm.scale_bias": gemm()})
    assert count(fused)["fused::gemm.scale_bias"] == 2
    save(fused, magika, tmp_path / "m.onnx")
    same(ort(str(tmp_path / "m.onnx"), inputs), expected, rtol=1e-4, atol=1e-6)


# --- a transformer layer, each value exposed in turn ------------------------------------------------------------------

B, S, D, H = 2, 5, 12, 3


def encoder(opset: int) -> tuple[list[onnx.NodeProto], dict]:
    """A BERT layer as exporters of that opset spell it."""
    c = {"eps": np.float32(1e-5), "two": np.float32(2), "half": np.float32(0.5), "one": np.float32(1)}
    rng = np.random.default_rng(5)

    def w(*shape):
        return (rng.normal(size=shape) * 0.3).astype("f")

    c |= {"sqrt2": np.float32(1.4142135), "root": np.float32((D // H) ** 0.5)}
    c |= {"split": np.array([0, 0, H, D // H], I64), "join": np.array([0, 0, D], I64)}
    n = []

    def linear(x, name, rows, columns):
        c[f"w_{name}"], c[f"b_{name}"] = w(rows, columns), w(columns)
        n.append(node("MatMul", [x, f"w_{name}"], [f"{name}_h"]))
        n.append(node("Add", [f"b_{name}", f"{name}_h"], [name]))
        return name

    def mean(x, y):
        if opset < 18:
            n.append(node("ReduceMean", [x], [y], axes=[-1]))
        else:
            c["axes"] = np.array([-1], I64)
            n.append(node("ReduceMean", [x, "axes"], [y]))

    def norm(x, name):
        c[f"g_{name}"], c[f"o_{name}"] = w(D), w(D)
        mean(x, f"{name}_m")
        n.append(node("Sub", [x, f"{name}_m"], [f"{name}_d"]))
        n.append(node("Pow", [f"{name}_d", "two"], [f"{name}_p"]))
        mean(f"{name}_p", f"{name}_v")
        n.append(node("Add", [f"{name}_v", "eps"], [f"{name}_e"]))
        n.append(node("Sqrt", [f"{name}_e"], [f"{name}_s"]))
        n.append(node("Div", [f"{name}_d", f"{name}_s"], [f"{name}_n"]))
        n.append(node("Mul", [f"{name}_n", f"g_{name}"], [f"{name}_g"]))
        n.append(node("Add", [f"{name}_g", f"o_{name}"], [name]))
        return name

    def heads(x, perm):
        n.append(node("Reshape", [x, "split"], [f"{x}_r"]))
        n.append(node("Transpose", [f"{x}_r"], [f"{x}_t"], perm=perm))
        return f"{x}_t"

    q = heads(linear("x", "q", D, D), [0, 2, 1, 3])
    k = heads(linear("x", "k", D, D), [0, 2, 3, 1])
    v = heads(linear("x", "v", D, D), [0, 2, 1, 3])
    n.append(node("MatMul", [q, k], ["qk"]))
    n.append(node("Div", ["qk", "root"], ["scaled"]))
    n.append(node("Add", ["scaled", "mask"], ["masked"]))
    n.append(node("Softmax", ["masked"], ["probs"], axis=3))
    n.append(node("MatMul", ["probs", v], ["ctx"]))
    n.append(node("Transpose", ["ctx"], ["ctx_t"], perm=[0, 2, 1, 3]))
    n.append(node("Reshape", ["ctx_t", "join"], ["ctx_r"]))
    n.append(node("Add", [linear("ctx_r", "out", D, D), "x"], ["res"]))
    h = norm("res", "ln1")
    linear(h, "up", D, 2 * D)
    n.append(node("Div", ["up", "sqrt2"], ["gd"]))
    n.append(node("Erf", ["gd"], ["ge"]))
    n.append(node("Add", ["ge", "one"], ["ga"]))
    n.append(node("Mul", ["up", "ga"], ["gm"]))
    n.append(node("Mul", ["gm", "half"], ["gelu"]))
    n.append(node("Add", [linear("gelu", "down", 2 * D, D), h], ["res2"]))
    norm("res2", "y")
    return n, c


def layer(opset, *expose):
    nodes, constants = encoder(opset)
    proto = model(nodes, {"x": ["B", S, D], "mask": ["B", 1, 1, S]}, {"y": ["B", S, D]}, constants, opset)
    proto.graph.output.extend(onnx.helper.make_tensor_value_info(e, 1, None) for e in expose)
    return proto


@pytest.mark.parametrize("opset", [11, 13, 17, 18, 21])
def test_encoder_layer(opset):
    proto = layer(opset)
    lifted = check(proto, rtol=1e-4, atol=1e-5, B=2)
    found = count(lifted)
    assert found["LayerNormalization"] == 2 and found["Gelu"] == 1 and found["MatMul"] == 8
    assert not {"Erf", "Sqrt", "Pow", "ReduceMean", "Sub"} & set(found)
    # the mask is an input that could be −∞ in a whole row: attention stays spelled out, the key's Transpose as it is
    assert found["Softmax"] == 1 and found["Transpose"] == 4


def test_each_intermediate_exposed_in_turn():
    """onnxruntime#4110: the exposed value is still an output, everything else is lifted and fused as before."""
    nodes, _ = encoder(17)
    names = [o for n in nodes for o in n.output if o != "y"]
    whole = layer(17, *names)
    inputs = random(whole, B=2)
    values = ort(whole, inputs)
    for name in names:
        graph = lift(load(layer(17, name)), OPS)
        same(ours(graph, inputs), {"y": values["y"], name: values[name]}, rtol=1e-4, atol=1e-5)
        found = count(graph)
        assert found["Gelu" if name not in ("gd", "ge", "ga", "gm") else "Erf"] == 1
        inside = [n for n in ("ln1", "y") if name in {f"{n}_{k}" for k in "mdpves"}]
        assert found["LayerNormalization"] == 2 - len(inside)
        fused = rewrite.apply(graph, plan_of(graph, gemm()).chosen, {"gemm.scale_bias": gemm()})
        same(ours(fused, inputs), {"y": values["y"], name: values[name]}, rtol=1e-4, atol=1e-5)
        assert count(fused)["fused::gemm.scale_bias"] >= 5


# --- group and layer norms at the opsets that spell them differently --------------------------------------------------


@pytest.mark.parametrize("channels", [64, 48])
@pytest.mark.parametrize("opset", [11, 17, 18])
def test_diffusion_group_norm(channels, opset):
    """Reshape(0, 32, −1) → InstanceNormalization → Reshape(Shape(x)) → γ → β → x·σ(x), symbolic extents."""
    constants = {"to": np.array([0, 32, -1], I64), "i1": np.ones(32, "f"), "i0": np.zeros(32, "f")}
    constants |= {"g": w(channels, 1, 1), "b": w(channels, 1, 1)}
    nodes = [
        node("Reshape", ["x", "to"], ["r"]),
        node("InstanceNormalization", ["r", "i1", "i0"], ["i"]),
        node("Shape", ["x"], ["s"]),
        node("Reshape", ["i", "s"], ["o"]),
        node("Mul", ["o", "g"], ["m"]),
        node("Add", ["m", "b"], ["a"]),
        node("Sigmoid", ["a"], ["z"]),
        node("Mul", ["a", "z"], ["y"]),
    ]
    proto = model(nodes, {"x": ["N", channels, "H", "W"]}, ["y"], constants, opset)
    found = count(check(proto, rtol=1e-3, atol=1e-4, N=2, H=4, W=6))
    if channels % 32:
        assert "GroupNormalization" not in found and found["Swish"] == 1
    else:
        assert found == {"GroupNormalization": 1, "Swish": 1}


@pytest.mark.parametrize("opset", [11, 17, 18])
@pytest.mark.parametrize("axes", [[-1], [2], [1], [1, 2], None])
@pytest.mark.parametrize("scale", [(4,), (1,), (3, 4), (3, 1), ()])
def test_decomposed_layer_norm(opset, axes, scale):
    """onnxruntime#25855, #15844: which axes, at which opset, with which scale."""
    constants = {"two": np.float32(2), "eps": np.float32(1e-5), "g": w(*scale)}
    nodes = []
    for x, y in (("x", "m"), ("p", "v")):
        if opset < 18:
            nodes.append(node("ReduceMean", [x], [y], **({} if axes is None else {"axes": axes})))
        else:
            constants["axes"] = np.array(axes or [], I64)
            nodes.append(node("ReduceMean", [x, "axes"] if axes else [x], [y]))
        if x == "x":
            nodes += [node("Sub", ["x", "m"], ["d"]), node("Pow", ["d", "two"], ["p"])]
    nodes += [
        node("Add", ["v", "eps"], ["e"]),
        node("Sqrt", ["e"], ["s"]),
        node("Div", ["d", "s"], ["n"]),
        node("Mul", ["g", "n"], ["y"]),
    ]
    found = count(check(model(nodes, {"x": ["N", 3, 4]}, ["y"], constants, opset), rtol=1e-4, N=2))
    lifts = axes in ([-1], [2], [1, 2])
    assert ("LayerNormalization" in found) == lifts
    tail = {1: (4,), 2: (3, 4)}[len(axes or [0])]
    assert ("Mul" in found) == (not lifts or scale != tail)


def test_quick_gelu_whose_sigmoid_is_an_output():
    """onnxruntime#15109: one consumer, inside the pattern, and still visible."""
    nodes = [node("Mul", ["x", "k"], ["t2"]), node("Sigmoid", ["t2"], ["t3"]), node("Mul", ["x", "t3"], ["y"])]
    constants = {"k": np.float32(1.702)}
    assert count(check(model(nodes, {"x": [2, 3]}, ["y"], constants))) == {"fusionreg::QuickGelu": 1}
    assert count(check(model(nodes, {"x": [2, 3]}, ["y", "t3"], constants))) == {"Mul": 2, "Sigmoid": 1}


def test_bias_softmax_axes():
    """onnxruntime#12517: Add → Softmax at opset 13 over X = arange(4).reshape(1, 2, 2), axis 1."""
    nodes = [node("Add", ["x", "b"], ["a"]), node("Softmax", ["a"], ["y"], axis=1)]
    proto = model(nodes, {"x": [1, 2, 2]}, ["y"], {"b": np.zeros(2, "f")}, 13)
    x = {"x": np.arange(4, dtype="f").reshape(1, 2, 2)}
    np.testing.assert_allclose(ours(lift(load(proto), OPS), x)["y"], [[[0.1192, 0.1192], [0.8808, 0.8808]]], atol=1e-4)
    check(proto, x)


def test_identity_transpose_beside_a_product():
    """onnxruntime#32228 through ONNX: perm [0, 1] toggles nothing, a missing perm reverses."""
    for attrs, want in (
        ({"perm": [0, 1]}, [[3, 2], [7, 4]]),
        ({"perm": [1, 0]}, [[4, 3], [6, 4]]),
        ({}, [[4, 3], [6, 4]]),
    ):
        nodes = [
            node("Transpose", ["a"], ["t"], **attrs),
            node("MatMul", ["t", "b"], ["m"]),
            node("Add", ["m", "z"], ["y"]),
        ]
        proto = model(nodes, {"a": [2, 2], "b": [2, 2]}, ["y"], {"z": np.zeros(2, "f")})
        inputs = {"a": np.array([[1, 2], [3, 4]], "f"), "b": np.array([[1, 0], [1, 1]], "f")}
        lifted = check(proto, inputs)
        np.testing.assert_array_equal(ours(lifted, inputs)["y"], want)
        turned = {} if attrs == {"perm": [0, 1]} else {"Transpose": 1}  # what an Add is behind reads columns
        assert count(lifted) == turned | {"MatMul": 1, "Add": 1}


def test_two_alike_shape_computations():
    """onnxruntime#20951: u = a·len(a), w = c·len(c): equal nodes on different inputs stay apart."""
    nodes = []
    for x, y in (("a", "u"), ("c", "v")):
        nodes += [
            node("Shape", [x], [f"{x}s"]),
            node("Cast", [f"{x}s"], [f"{x}f"], to=1),
            node("Mul", [x, f"{x}f"], [y]),
        ]
    check(model(nodes, {"a": [3], "c": [5]}, ["u", "v"]))
    check(model(nodes, {"a": ["A"], "c": ["C"]}, ["u", "v"]), A=3, C=5)


def test_product_reshape_batch_norm():
    """onnxruntime#22762: MatMul over three axes → Reshape → BatchNormalization → Reshape keeps rank 3."""
    constants = {"k": w(4, 6), "flat": np.array([-1, 6], I64), "back": np.array([-1, 3, 6], I64)}
    constants |= {"s": w(6), "o": w(6), "m": w(6), "v": np.abs(w(6)) + 0.1}
    nodes = [
        node("MatMul", ["x", "k"], ["h"]),
        node("Reshape", ["h", "flat"], ["f"]),
        node("BatchNormalization", ["f", "s", "o", "m", "v"], ["n"]),
        node("Reshape", ["n", "back"], ["r"]),
        node("Add", ["r", "h"], ["y"]),
    ]
    lifted = check(model(nodes, {"x": ["N", 3, 4]}, ["y"], constants), rtol=1e-4, N=2)
    assert lifted.values["y"].shape == ("N", 3, 6)


@pytest.mark.slow
def test_a_model_that_torch_exports(tmp_path):
    """torch's exporter at a symbolic batch: attention, norms and GELUs are lifted, no extent loses its name."""
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    block = torch.nn.TransformerEncoderLayer(32, 4, 64, activation="gelu", batch_first=True)
    net = torch.nn.TransformerEncoder(block, 1, enable_nested_tensor=False).eval()
    x = torch.randn(3, 6, 32)
    batch = torch.export.Dim("batch")
    with torch.no_grad():
        program = torch.onnx.export(
            net, (x,), dynamo=True, opset_version=18, dynamic_shapes=({0: batch},), verbose=False
        )
    path = tmp_path / "encoder.onnx"
    program.save(path)
    lifted = check(str(path), {load(path).inputs[0]: x.numpy()}, rtol=1e-3, atol=1e-5)
    found = count(lifted)
    assert (found["Attention"], found["LayerNormalization"], found["Gelu"]) == (1, 2, 1)
    assert lifted.values[lifted.outputs[0]].shape == ("batch", 6, 32)
    assert any("transformer.py:" in n.source for n in lifted.nodes)
