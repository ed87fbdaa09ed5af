"""One opset: for every operator whose form or meaning changed, ``evaluate(load(m))`` is onnxruntime's answer at every
opset from 7 to 23."""

from __future__ import annotations

import numpy as np
import pytest
from onnx_models import OPS, check, model, node, ours

from fusionreg.integrations.onnx.load import load

I64 = np.int64
OPSETS = range(7, 24)


def axes(opset: int, since: int, op: str, values, **attrs):
    """(nodes, constants): the axes as an attribute before ``since``, as an input from then on."""
    if values is None:
        return [node(op, ["x"], ["y"], **attrs)], {}
    if opset < since:
        return [node(op, ["x"], ["y"], axes=list(values), **attrs)], {}
    return [node(op, ["x", "axes"], ["y"], **attrs)], {"axes": np.array(values, I64)}


@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.parametrize("op", ["Softmax", "LogSoftmax", "Hardmax"])
def test_softmax_means_what_its_opset_says(op, opset):
    for axis in (None, 0, 1, 2, -1, -2):
        attrs = {} if axis is None else {"axis": axis}
        check(model([node(op, ["x"], ["y"], **attrs)], {"x": [2, 3, 4]}, ["y"], opset=opset))


@pytest.mark.parametrize("opset", OPSETS)
def test_coerced_softmax_keeps_a_symbolic_shape(opset):
    m = model([node("Softmax", ["x"], ["y"], axis=1)], {"x": ["N", 3, 4]}, ["y"], opset=opset)
    lifted = check(m, N=5)
    assert len(lifted.values["y"].shape) == 3


@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.parametrize("op", ["ReduceMean", "ReduceMax", "ReduceMin", "ReduceL2", "ReduceProd", "ReduceLogSumExp"])
def test_reductions(op, opset):
    for values, keep in (((1,), 1), ((-1, 0), 0), (None, 0)):
        nodes, constants = axes(opset, 18, op, values, keepdims=keep)
        check(model(nodes, {"x": [2, 3, 4]}, ["y"], constants, opset))


@pytest.mark.parametrize("opset", OPSETS)
def test_sum_squeeze_unsqueeze(opset):
    nodes, constants = axes(opset, 13, "ReduceSum", (1,), keepdims=0)
    check(model(nodes, {"x": [2, 3, 4]}, ["y"], constants, opset))
    nodes, constants = axes(opset, 13, "Squeeze", (0, 2))
    check(model(nodes, {"x": [1, 3, 1, 2]}, ["y"], constants, opset))
    check(model([node("Squeeze", ["x"], ["y"])], {"x": [1, 3, 1]}, ["y"], opset=opset))
    nodes, constants = axes(opset, 13, "Unsqueeze", (0, -1))
    check(model(nodes, {"x": [3, 2]}, ["y"], constants, opset))


@pytest.mark.parametrize("opset", OPSETS)
def test_split(opset):
    attrs = {"num_outputs": 3} if opset >= 18 else {}
    check(model([node("Split", ["x"], ["a", "b", "c"], axis=1, **attrs)], {"x": [2, 6]}, ["a", "b", "c"], opset=opset))
    if opset < 13:
        nodes, constants = [node("Split", ["x"], ["a", "b"], axis=1, split=[1, 5])], {}
    else:
        nodes, constants = [node("Split", ["x", "s"], ["a", "b"], axis=1)], {"s": np.array([1, 5], I64)}
    check(model(nodes, {"x": [2, 6]}, ["a", "b"], constants, opset))


@pytest.mark.parametrize("opset", OPSETS)
def test_dropout_is_the_identity(opset):
    attrs = {"ratio": 0.9} if opset < 12 else {}
    inputs = ["x"] if opset < 12 else ["x", "r"]
    constants = {} if opset < 12 else {"r": np.float32(0.9)}
    nodes = [node("Dropout", inputs, ["d"], **attrs), node("Relu", ["d"], ["y"])]
    lifted = check(model(nodes, {"x": [4, 4]}, ["y"], constants, opset))
    assert [n.op for n in lifted.nodes] == ["Relu"]


@pytest.mark.parametrize("opset", OPSETS)
def test_batch_normalization(opset):
    constants = {k: np.array(v, np.float32) for k, v in {"s": [2], "b": [0.5], "m": [1], "v": [4]}.items()}
    m = model([node("BatchNormalization", ["x", "s", "b", "m", "v"], ["y"])], {"x": [3, 1, 1]}, ["y"], constants, opset)
    x = np.array([0, 1, 3], np.float32).reshape(3, 1, 1)
    check(m, {"x": x})
    y = ours(load(m), {"x": x})["y"].reshape(-1)  # pytorch#45474: gamma 2, beta 0.5, mean 1, variance 4
    np.testing.assert_allclose(y, [-0.499999, 0.5, 2.499998], rtol=1e-5)


@pytest.mark.parametrize("opset", OPSETS)
def test_clip_pad_slice_topk(opset):
    if opset < 11:
        check(model([node("Clip", ["x"], ["y"], min=-0.5, max=0.25)], {"x": [4, 4]}, ["y"], opset=opset))
        check(model([node("Clip", ["x"], ["y"], max=0.25)], {"x": [4, 4]}, ["y"], opset=opset))
        check(model([node("Pad", ["x"], ["y"], pads=[0, 1, 2, 0], value=7.0)], {"x": [2, 3]}, ["y"], opset=opset))
        check(model([node("Pad", ["x"], ["y"], pads=[0, 1, 2, 0], mode="reflect")], {"x": [3, 3]}, ["y"], opset=opset))
    if opset < 10:
        cut = {"starts": [1, 0], "ends": [-1, 2], "axes": [1, 0]}
        check(model([node("Slice", ["x"], ["y"], **cut)], {"x": [3, 5]}, ["y"], opset=opset))
        check(model([node("Slice", ["x"], ["y"], starts=[1], ends=[9])], {"x": [3, 5]}, ["y"], opset=opset))
        outs = {"v": None, "i": (None, "int64")}
        check(model([node("TopK", ["x"], ["v", "i"], k=2)], {"x": [3, 5]}, outs, opset=opset))
    if opset < 11:
        return
    check(model([node("Clip", ["x", "lo", ""], ["y"])], {"x": [4, 4]}, ["y"], {"lo": np.float32(0)}, opset))
    check(model([node("Clip", ["x", "", "hi"], ["y"])], {"x": [4, 4]}, ["y"], {"hi": np.float32(0)}, opset))
    pads = {"p": np.array([0, 1, 2, 0], I64), "v": np.float32(7)}
    check(model([node("Pad", ["x", "p", "v"], ["y"])], {"x": [2, 3]}, ["y"], pads, opset))
    check(model([node("Pad", ["x", "p"], ["y"], mode="reflect")], {"x": [3, 3]}, ["y"], {"p": pads["p"]}, opset))
    cuts = {
        "s": np.array([4, 0], I64),
        "e": np.array([-100, 2], I64),
        "a": np.array([1, 0], I64),
        "t": np.array([-2, 1], I64),
    }
    check(model([node("Slice", ["x", "s", "e", "a", "t"], ["y"])], {"x": [3, 5]}, ["y"], cuts, opset))
    k = {"k": np.array([2], I64)}
    outs = {"v": None, "i": (None, "int64")}
    check(model([node("TopK", ["x", "k"], ["v", "i"], largest=0)], {"x": [3, 5]}, outs, k, opset))


@pytest.mark.parametrize("mode", ["nearest", "linear"])
@pytest.mark.parametrize(("op", "opset"), [("Upsample", 7), ("Upsample", 8), ("Upsample", 9), ("Resize", 10)])
def test_upsample_and_the_first_resize(op, opset, mode):
    for scales in ([1, 1, 2, 3], [1, 1, 1.5, 1], *([[1, 1, 0.5, 0.4]] if op == "Resize" else [])):
        array = np.array(scales, np.float32)
        if opset < 9:
            nodes, constants = [node(op, ["x"], ["y"], mode=mode, scales=array.tolist())], {}
        else:
            nodes, constants = [node(op, ["x", "s"], ["y"], mode=mode)], {"s": array}
        check(model(nodes, {"x": [1, 2, 4, 5]}, ["y"], constants, opset))


def test_upsample_by_a_computed_factor():
    nodes = [node("Identity", ["given"], ["s"]), node("Upsample", ["x", "s"], ["y"], mode="nearest")]
    m = model(nodes, {"x": [1, 2, 4, 5], "given": [4]}, ["y"], opset=9)
    check(m, {"x": np.arange(40, dtype=np.float32).reshape(1, 2, 4, 5), "given": np.array([1, 1, 2, 3], np.float32)})


@pytest.mark.parametrize("opset", [9, 10])
def test_scatter(opset):
    constants = {"i": np.array([[1, 0, 2]], I64), "u": np.array([[5, 6, 7]], np.float32)}
    check(model([node("Scatter", ["x", "i", "u"], ["y"], axis=1)], {"x": [2, 3]}, ["y"], constants, opset))


@pytest.mark.parametrize("opset", range(11, 24))
def test_resize_with_empty_operands(opset):
    """Exporters before 13 spell "not given" as an empty tensor."""
    roi = {"roi": np.zeros(0, np.float32), "scales": np.array([1, 1, 2, 2], np.float32)}
    m = model([node("Resize", ["x", "roi", "scales"], ["y"], mode="nearest")], {"x": [1, 1, 2, 3]}, ["y"], roi, opset)
    check(m)
    sizes = {"none": np.zeros(0, np.float32), "sizes": np.array([1, 1, 3, 5], I64)}
    names = ["x", "none", "none", "sizes"] if opset < 13 else ["x", "", "", "sizes"]
    attrs = {"mode": "linear", "coordinate_transformation_mode": "align_corners"}
    check(model([node("Resize", names, ["y"], **attrs)], {"x": [1, 1, 2, 3]}, ["y"], sizes, opset))


@pytest.mark.parametrize("opset", range(18, 24))
def test_group_normalization_scale_length(opset):
    """onnx#5466: one scale a group up to opset 20, one a channel from 21 on; both models mean the same."""
    per = {"s": np.array([1, 10], np.float32), "b": np.array([0, -1], np.float32)}
    if opset >= 21:
        per = {k: np.repeat(v, 2) for k, v in per.items()}
    m = model([node("GroupNormalization", ["x", "s", "b"], ["y"], num_groups=2)], {"x": [2, 4, 3]}, ["y"], per, opset)
    x = np.random.default_rng(1).normal(size=(2, 4, 3)).astype(np.float32)
    lifted = check(m, {"x": x}, rtol=1e-4)
    groups = x.reshape(2, 2, 6).astype("f8")
    y = ((groups - groups.mean(-1, keepdims=True)) / np.sqrt(groups.var(-1, keepdims=True) + 1e-5)).reshape(2, 4, 3)
    want = y * np.array([1, 1, 10, 10])[:, None] + np.array([0, 0, -1, -1])[:, None]
    np.testing.assert_allclose(ours(lifted, {"x": x})["y"], want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("opset", range(18, 21))
def test_group_normalization_runtime_scale(opset):
    shapes = {"x": [2, 4, 3], "s": [2], "b": [2]}
    check(
        model([node("GroupNormalization", ["x", "s", "b"], ["y"], num_groups=2)], shapes, ["y"], {}, opset), rtol=1e-4
    )


@pytest.mark.parametrize("opset", range(16, 23))
def test_grid_sample_mode_names(opset):
    modes = ("bilinear", "bicubic", "nearest") if opset < 20 else ("linear", "cubic", "nearest")
    grid = np.random.default_rng(0).uniform(-1, 1, (1, 2, 3, 2)).astype(np.float32)
    x = np.random.default_rng(1).normal(size=(1, 2, 4, 4)).astype(np.float32)
    for mode in modes:
        m = model(
            [node("GridSample", ["x", "g"], ["y"], mode=mode)],
            {"x": [1, 2, 4, 4], "g": [1, 2, 3, 2]},
            ["y"],
            opset=opset,
        )
        if "GridSample" in OPS:
            check(m, {"x": x, "g": grid}, rtol=1e-4, atol=1e-5)
        else:  # the vocabulary has no meaning for it: it stays as it is, its mode in today's words
            (found,) = load(m).nodes
            assert found.attrs["mode"] in ("linear", "cubic", "nearest") and found.op == "GridSample"


@pytest.mark.parametrize("opset", OPSETS)
def test_unchanged_operators(opset):
    """A small network of operators that merely gained types."""
    w = np.random.default_rng(2).normal(size=(4, 3, 3, 3)).astype(np.float32)
    constants = {
        "w": w,
        "fc": np.random.default_rng(3).normal(size=(4, 5)).astype(np.float32),
        "s": np.array([0, -1], I64),
    }
    constants["fb"] = np.arange(5, dtype=np.float32)
    nodes = [
        node("Conv", ["x", "w"], ["c"], pads=[1, 1, 1, 1], strides=[2, 2]),
        node("LeakyRelu", ["c"], ["r"], alpha=0.2),
        node("MaxPool", ["r"], ["p"], kernel_shape=[2, 2]),
        node("GlobalAveragePool", ["p"], ["g"]),
        node("Reshape", ["g", "s"], ["f"]),
        node("Gemm", ["f", "fc", "fb"], ["o"], alpha=0.5),
        node("ArgMax", ["o"], ["i"], axis=1),
    ]
    check(model(nodes, {"x": ["N", 3, 9, 9]}, {"o": None, "i": (None, "int64")}, constants, opset), N=2, rtol=1e-4)


@pytest.mark.parametrize("opset", OPSETS)
def test_shape_arithmetic(opset):
    """Reshape to a shape computed from the input: the extents keep their names."""
    constants = {"zero": np.array(0, I64), "twelve": np.array([12], I64), "ax": np.array([0], I64)}
    unsqueeze = node("Unsqueeze", ["n"], ["n1"], axes=[0]) if opset < 13 else node("Unsqueeze", ["n", "ax"], ["n1"])
    nodes = [
        node("Shape", ["x"], ["sh"]),
        node("Gather", ["sh", "zero"], ["n"]),
        unsqueeze,
        node("Concat", ["n1", "twelve"], ["to"], axis=0),
        node("Reshape", ["x", "to"], ["y"]),
    ]
    lifted = check(model(nodes, {"x": ["batch", 3, 4]}, ["y"], constants, opset), batch=5)
    assert lifted.values["y"].shape == ("batch", 12)
