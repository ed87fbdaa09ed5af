"""Windows of convolutions and pools: padding becomes numbers, what the weights say again goes; values are ONNX's."""

from __future__ import annotations

import numpy as np
import onnx_models as om
import pytest

W = np.random.default_rng(0).normal(size=(4, 2, 3, 2)).astype("f")
B = np.arange(4, dtype="f")


def convolution(attributes, before=(), x="x", shape=(1, 2, 7, 6), bias=True, **constants):
    nodes = [*before, om.node("Conv", [x, "w", "b"] if bias else [x, "w"], ["y"], **attributes)]
    return om.model(nodes, {"x": shape}, ["y"], {"w": W, "b": B, **constants} if bias else {"w": W, **constants})


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("attributes", "pads"),
    [
        ({"kernel_shape": [3, 2]}, ()),
        ({"kernel_shape": [3, 2], "pads": [1, 0, 2, 1], "strides": [2, 1]}, (1, 0, 2, 1)),
        ({"auto_pad": "SAME_UPPER", "strides": [2, 2]}, (1, 0, 1, 0)),
        ({"auto_pad": "SAME_LOWER", "strides": [1, 1]}, (1, 1, 1, 0)),
        ({"auto_pad": "SAME_UPPER", "kernel_shape": [3, 2], "strides": [1, 1]}, (1, 0, 1, 1)),
        ({"auto_pad": "VALID"}, ()),
    ],
)
def test_a_convolution_says_its_padding_alone(attributes, pads, bias):
    (node,) = om.check(convolution(attributes, bias=bias), atol=1e-5).nodes
    assert node.op == "Conv" and tuple(node.attrs.get("pads", ())) == pads
    assert not {"kernel_shape", "auto_pad"} & set(node.attrs)


def test_same_padding_of_extents_that_are_not_known_stays():
    model = convolution({"auto_pad": "SAME_UPPER", "strides": [2, 2]}, shape=(1, 2, "h", 6))
    (node,) = om.check(model, atol=1e-5, h=5).nodes
    assert node.attrs["auto_pad"] == "SAME_UPPER"


@pytest.mark.parametrize(
    ("around", "value", "attributes", "pads"),
    [
        ([0, 0, 1, 2, 0, 0, 0, 1], None, {}, (1, 2, 0, 1)),
        ([0, 0, 1, 2, 0, 0, 0, 1], 0.0, {"pads": [1, 1, 1, 1], "strides": [2, 1]}, (2, 3, 1, 2)),
        ([0, 0, 1, 2, 0, 0, 0, 1], 1.0, {}, None),  # what is not zero stays
        ([0, 1, 0, 0, 0, 0, 0, 0], None, {}, None),  # so do channels
        ([0, 0, -1, 0, 0, 0, 0, 0], None, {}, None),  # and what is cut off
    ],
)
def test_zeros_around_a_convolution_become_its_own(around, value, attributes, pads):
    constants = {"around": np.array(around, np.int64), **({} if value is None else {"v": np.float32(value)})}
    pad = om.node("Pad", ["x", "around", *(["v"] if value is not None else [])], ["p"])
    channels = 2 - around[1] - around[5]
    model = convolution(attributes, [pad], "p", (1, channels, 7, 6), **constants)
    lifted = om.check(model, atol=1e-5)
    assert om.count(lifted) == ({"Conv": 1} if pads is not None else {"Pad": 1, "Conv": 1})
    assert pads is None or tuple(lifted.nodes[-1].attrs.get("pads", ())) == pads


def test_an_edge_is_no_padding_of_zeros():
    pad = om.node("Pad", ["x", "around"], ["p"], mode="edge")
    model = convolution({}, [pad], "p", around=np.array([0, 0, 1, 1, 0, 0, 1, 1], np.int64))
    assert om.count(om.check(model, atol=1e-5)) == {"Pad": 1, "Conv": 1}


@pytest.mark.parametrize("op", ["MaxPool", "AveragePool"])
def test_a_pool_says_its_padding_in_numbers(op):
    pool = om.node(op, ["x"], ["y"], kernel_shape=[3, 2], strides=[2, 2], auto_pad="SAME_UPPER")
    (node,) = om.check(om.model([pool], {"x": [1, 2, 7, 6]}, ["y"])).nodes
    assert tuple(node.attrs["pads"]) == (1, 0, 1, 0) and "auto_pad" not in node.attrs


@pytest.mark.parametrize("op", ["MaxPool", "AveragePool"])
def test_a_dilation_of_one_is_none(op):
    """Exporters write it down."""
    for dilations in ([1, 1], [1, 2]):
        pool = om.node(op, ["x"], ["y"], kernel_shape=[3, 2], dilations=dilations)
        (node,) = om.check(om.model([pool], {"x": [1, 2, 7, 6]}, ["y"], opset=19)).nodes
        assert ("dilations" in node.attrs) is (dilations == [1, 2])


@pytest.mark.parametrize("training", [0, 1])
def test_momentum_means_nothing_in_inference(training):
    constants = {n: np.array(v, "f") for n, v in {"s": [2, 1], "b": [0, 1], "m": [1, 0], "v": [4, 1]}.items()}
    outputs = ["y", "mean", "var"][: 3 if training else 1]
    node = om.node("BatchNormalization", ["x", "s", "b", "m", "v"], outputs, momentum=0.5, training_mode=training)
    (found,) = om.check(om.model([node], {"x": [3, 2, 4, 5]}, outputs, constants), atol=1e-5).nodes
    assert ("momentum" in found.attrs) is bool(training)


@pytest.mark.parametrize("op", ["MaxPool", "AveragePool"])
@pytest.mark.parametrize(
    ("window", "extents", "pads"),
    [
        ({"kernel_shape": [2, 2], "strides": [2, 2]}, (7, 9), (0, 0, 1, 1)),
        ({"kernel_shape": [3, 2], "strides": [2, 3], "pads": [1, 0, 1, 1]}, (8, 8), (1, 0, 2, 1)),
        ({"kernel_shape": [2, 2], "strides": [3, 3], "pads": [1, 1, 1, 1]}, (5, 6), (1, 1, 1, 1)),  # none begins there
        ({"kernel_shape": [2, 2], "strides": [2, 2]}, (8, 6), ()),  # all are whole
    ],
)
def test_windows_that_end_outside_are_padding(op, window, extents, pads):
    model = om.model([om.node(op, ["x"], ["y"], ceil_mode=1, **window)], {"x": (1, 2, *extents)}, ["y"])
    (node,) = om.check(model, atol=1e-6).nodes
    assert tuple(node.attrs.get("pads", ())) == pads and not node.attrs.get("ceil_mode")


@pytest.mark.parametrize(
    ("op", "more", "shape"),
    [
        ("AveragePool", {"count_include_pad": 1}, (1, 2, 7, 9)),  # it divides by less than such padding would make it
        ("MaxPool", {"dilations": [2, 2]}, (1, 2, 7, 9)),
        ("MaxPool", {}, (1, 2, "h", 9)),
    ],
)
def test_windows_that_end_outside_stay(op, more, shape):
    node = om.node(op, ["x"], ["y"], ceil_mode=1, kernel_shape=[2, 2], strides=[2, 2], **more)
    (found,) = om.check(om.model([node], {"x": shape}, ["y"]), atol=1e-6, h=7).nodes
    assert found.attrs["ceil_mode"] == 1
