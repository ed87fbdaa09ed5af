"""Softmax, GroupNorm and InstanceNorm as exporters spell them."""

from __future__ import annotations

import numpy as np
import pytest
from lifting import Spell, assert_lifted, assert_not_lifted, kinds, lifted_of, unlifted_of

# --- Softmax --------------------------------------------------------------------------------------------------------


def softmax(n, x, axis=-1, axis2=None, shift=True, tail="/", **attrs):
    e = n.op("Exp", n.sub(x, n.op("ReduceMax", x, n.ints(axis))) if shift else x)
    s = n.op("ReduceSum", e, n.ints(axis if axis2 is None else axis2), **attrs)
    return n.div(e, s) if tail == "/" else n.mul(e, n.op("Reciprocal", s))


@pytest.mark.parametrize("kind", ["float16", "float32"])
@pytest.mark.parametrize("axis", [-1, -2, 0, 1, 2])
@pytest.mark.parametrize("tail", ["/", "·1/"])
def test_softmax(kind, axis, tail):
    n = Spell(kind)
    result = assert_lifted(n.done(softmax(n, n.x(3, 4, 5), axis, tail=tail)), {"Softmax": 1}, 1e-9)
    assert result.nodes[0].attrs.get("axis", -1) % 3 == axis % 3


def test_softmax_that_is_none():
    for changes in ({"shift": False}, {"axis": -1, "axis2": 0}, {"axis": 1, "axis2": -2}):
        n = Spell()
        assert_not_lifted(n.done(softmax(n, n.x(3, 3), **changes)), "Softmax")
    n = Spell()
    x, z = n.x(3, 3), n.x(3, 3)
    e = n.op("Exp", n.sub(x, n.op("ReduceMax", z, n.ints(-1))))
    graph = n.done(n.div(e, n.op("ReduceSum", e, n.ints(-1))))
    assert_not_lifted(graph, "Softmax")


def test_softmax_as_jax_writes_it():
    """Reductions that drop the axis and put it back, max(−inf, ·), and an Expand to the same shape."""
    n = Spell()
    x = n.x(5, 7)
    m = n.op("Max", n.const(-np.inf), n.op("ReduceMax", x, n.ints(1), keepdims=0))
    m = n.op("Expand", n.op("Reshape", m, n.ints(5, 1)), n.ints(5, 1))
    e = n.op("Exp", n.sub(x, m))
    s = n.op("ReduceSum", e, n.ints(1), keepdims=0, noop_with_empty_axes=1)
    assert_lifted(n.done(n.div(e, n.op("Reshape", s, n.ints(5, 1)))), {"Softmax": 1}, 1e-9)


def test_reshape_that_puts_the_axis_elsewhere():
    n = Spell()
    x = n.x(5, 5)
    m = n.op("Reshape", n.op("ReduceMax", x, n.ints(1), keepdims=0), n.ints(1, 5))
    e = n.op("Exp", n.sub(x, m))
    assert_not_lifted(n.done(n.div(e, n.op("ReduceSum", e, n.ints(1)))), "Softmax")


def test_softmax_of_minus_infinity_rows_stays_nan():
    n = Spell()
    graph = n.done(softmax(n, n.x(2, 3)))
    x = {"x": np.array([[-np.inf] * 3, [0, -np.inf, 1]], "f")}
    np.testing.assert_allclose(lifted_of(graph, x), unlifted_of(graph, x), rtol=1e-6)


# --- GroupNorm ------------------------------------------------------------------------------------------------------


def group(n, x, groups, shape, scale=1.0, back=None):
    r = n.op("Reshape", x, n.ints(0, groups, -1))
    y = n.op("InstanceNormalization", r, n.const(np.full(groups, scale)), n.const(np.zeros(groups)), epsilon=1e-6)
    return n.op("Reshape", y, back or n.ints(*shape))


@pytest.mark.parametrize("channels", [64, 96])
@pytest.mark.parametrize("affine", ["γβ", "γ", "none"])
@pytest.mark.parametrize("lead", [(), (1,)])
def test_group_norm(channels, affine, lead):
    """onnxruntime#17869: where 32 divides the channels."""
    n = Spell()
    y = group(n, n.x(2, channels, 3, 3), 32, (2, channels, 3, 3))
    if "γ" in affine:
        y = n.mul(y, n.weight((*lead, channels, 1, 1)))
    if "β" in affine:
        y = n.add(y, n.weight((*lead, channels, 1, 1)))
    result = assert_lifted(n.done(y), {"GroupNormalization": 1}, 1e-9)
    assert result.nodes[0].attrs["num_groups"] == 32
    assert result.values[result.nodes[0].inputs[1]].shape == (channels,)


def test_group_norm_with_swish():
    n = Spell()
    y = n.add(n.mul(group(n, n.x(2, 8, 3, 3), 4, (2, 8, 3, 3)), n.weight((8, 1, 1))), n.weight((8, 1, 1)))
    assert_lifted(n.done(n.mul(y, n.op("Sigmoid", y))), {"GroupNormalization": 1, "Swish": 1}, 1e-9)


def test_group_norm_of_symbolic_extents():
    """Reshape back to Shape(x): batch and image extents are names."""
    n = Spell()
    x = n.x("N", 8, "H", "H")
    r = n.op("Reshape", x, n.ints(0, 4, -1))
    y = n.op("InstanceNormalization", r, n.const(np.ones(4)), n.const(np.zeros(4)))
    y = n.op("Reshape", y, n.ints(0, 8, -1))
    graph = n.done(n.op("Reshape", y, n.op("Shape", x)))
    # the shape that Shape(x) gives is only known to the ONNX frontend, which follows it; here it stays as it is
    assert kinds(graph)["InstanceNormalization"] == 1


def test_groups_that_cut_a_channel():
    """48 channels in 32 groups: the groups of the Reshape are no groups of channels."""
    n = Spell()
    assert_not_lifted(n.done(group(n, n.x(2, 48, 4, 4), 32, (2, 48, 4, 4))), "GroupNormalization")


@pytest.mark.parametrize("scale", [2.0, 0.5])
def test_instance_norm_with_a_scale_of_its_own(scale):
    n = Spell()
    assert_not_lifted(n.done(group(n, n.x(2, 8, 3, 3), 4, (2, 8, 3, 3), scale)), "GroupNormalization")


def test_reshape_back_to_another_shape():
    n = Spell()
    assert_not_lifted(n.done(group(n, n.x(2, 8, 3, 4), 4, (2, 8, 4, 3))), "GroupNormalization")


@pytest.mark.parametrize("shape", [(8,), (3, 1), (1, 3, 1), (8, 8, 1, 1), (8, 3, 3), ()])
def test_scale_that_is_not_per_channel(shape):
    n = Spell()
    x = n.x(8, 8, 3, 8)
    graph = n.done(n.mul(group(n, x, 4, (8, 8, 3, 8)), n.weight(shape if shape != (8, 3, 3) else (8, 3, 1))))
    assert_lifted(graph, {"GroupNormalization": 1, "Mul": 1}, 1e-9)
