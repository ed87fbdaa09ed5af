"""LayerNorm and RMSNorm as exporters spell them."""

from __future__ import annotations

import numpy as np
import pytest
from lifting import Spell, assert_lifted, assert_not_lifted, kinds, lifted, lifted_of, unlifted_of

EPS = 1e-5

INVERSES = {
    "/√": lambda n, d, a: n.div(d, n.op("Sqrt", a)),
    "/a^½": lambda n, d, a: n.div(d, n.pow(a, 0.5)),
    "·1/√": lambda n, d, a: n.mul(d, n.op("Reciprocal", n.op("Sqrt", a))),
    "·(1÷√)": lambda n, d, a: n.mul(d, n.div(1.0, n.op("Sqrt", a))),
    "·a^-½": lambda n, d, a: n.mul(d, n.pow(a, -0.5)),
    "rsqrt·": lambda n, d, a: n.mul(n.op("fusionreg::Rsqrt", a), d),
}
SQUARES = {
    "pow": lambda n, d: n.pow(d, 2.0),
    "d·d": lambda n, d: n.mul(d, d),
    "pow int": lambda n, d: n.op("Pow", d, n.const(2, "int64")),
}


def layer(n, x, axes=(-1,), square="pow", inverse="/√", twin="", axes2=None, axes3=None, eps=EPS, **attrs):
    """The decomposed LayerNorm of a tensor; ``twin``: what is computed a second time for the variance."""
    m = n.op("ReduceMean", x, n.ints(*axes), **attrs)
    d = n.sub(x, m)
    m2 = n.op("ReduceMean", x, n.ints(*(axes3 or axes)), **attrs) if twin == "mean" else m
    v = n.op("ReduceMean", SQUARES[square](n, n.sub(x, m2) if twin else d), n.ints(*(axes2 or axes)), **attrs)
    return INVERSES[inverse](n, d, n.add(v, eps))


@pytest.mark.parametrize(
    ("kind", "inverse"), [*(("float32", i) for i in INVERSES), ("float16", "/√"), ("bfloat16", "/√"), ("float64", "/√")]
)
@pytest.mark.parametrize("square", SQUARES)
@pytest.mark.parametrize("twin", ["", "difference", "mean"])
def test_layer_norm(kind, inverse, square, twin):
    n = Spell(kind)
    y = layer(n, n.x(2, 3, 8), square=square, inverse=inverse, twin=twin)
    y = n.add(n.mul(y, n.weight((8,))), n.weight((8,)))
    result = assert_lifted(n.done(y), {"LayerNormalization": 1}, 1e-9)
    node = result.nodes[0]
    assert len(node.inputs) == 3 and node.attrs.get("axis", -1) == -1
    assert node.attrs.get("epsilon", 1e-5) == pytest.approx(EPS, rel=0.01)


@pytest.mark.parametrize("inverse", ["·1/√", "·(1÷√)", "·a^-½", "rsqrt·"])
def test_scale_multiplied_into_the_inverse_first(inverse):
    """TensorFlow and JAX write d · (rsqrt(v + ε) · γ)."""
    n = Spell()
    x = n.x(2, 3, 8)
    d = n.sub(x, n.op("ReduceMean", x, n.ints(-1)))
    a = n.add(n.op("ReduceMean", n.mul(d, d), n.ints(-1)), EPS)
    r = {
        "·1/√": lambda: n.op("Reciprocal", n.op("Sqrt", a)),
        "·(1÷√)": lambda: n.div(1.0, n.op("Sqrt", a)),
        "·a^-½": lambda: n.pow(a, -0.5),
        "rsqrt·": lambda: n.op("fusionreg::Rsqrt", a),
    }[inverse]()
    y = n.add(n.mul(d, n.mul(r, n.weight((8,)))), n.weight((8,)))
    assert_lifted(n.done(y), {"LayerNormalization": 1}, 1e-9)


@pytest.mark.parametrize("axes", [(-1,), (2,), (-2, -1), (1, 2), (2, 1), (0, 1, 2), (-1, 0, 1)])
def test_last_axes_in_any_order(axes):
    n = Spell()
    result = assert_lifted(n.done(layer(n, n.x(2, 3, 4), axes)), {"LayerNormalization": 1}, 1e-9)
    assert result.nodes[0].attrs.get("axis", -1) == -len(axes)


@pytest.mark.parametrize(
    ("axes", "axes2"), [((1,), None), ((0,), None), ((0, 2), None), ((-1,), (-2,)), ((-1,), (1, 2)), ((1, 2), (2,))]
)
def test_other_axes_stay(axes, axes2):
    """onnxruntime#15844: not the last axes, or not the same in both reductions."""
    n = Spell()
    assert_not_lifted(n.done(layer(n, n.x(3, 3, 3), axes, axes2=axes2)), "LayerNormalization")


def test_a_second_mean_over_other_axes_stays():
    n = Spell()
    assert_not_lifted(n.done(layer(n, n.x(3, 3, 3), twin="mean", axes3=(1,))), "LayerNormalization")


def test_axes_absent_mean_all():
    """onnxruntime#15844: a reduction without axes is over everything."""
    n = Spell()
    x = n.x(3, 4)
    m = n.op("ReduceMean", x)
    d = n.sub(x, m)
    assert_not_lifted(n.done(n.div(d, n.op("Sqrt", n.add(n.op("ReduceMean", n.mul(d, d)), EPS)))), "LayerNormalization")


def test_runtime_axes_stay():
    """onnxruntime#15844: axes that a caller passes are not known."""
    n = Spell()
    x, axes = n.x(3, 4), n.input("axes", "int64", (1,))
    m = n.op("ReduceMean", x, axes)
    d = n.sub(x, m)
    graph = n.done(n.div(d, n.op("Sqrt", n.add(n.op("ReduceMean", n.mul(d, d), axes), EPS))))
    assert "LayerNormalization" not in kinds(graph)
    inputs = {"x": np.random.default_rng(0).normal(size=(3, 4)).astype("f"), "axes": np.array([0])}
    np.testing.assert_allclose(lifted_of(graph, inputs), unlifted_of(graph, inputs), rtol=1e-6)


@pytest.mark.parametrize("axes", ["constant", "replaceable"])
def test_replaceable_axes_stay(axes):
    n = Spell()
    x = n.x(3, 4)
    if axes == "replaceable":
        n.input("a", "int64", (1,))
    a = n.constant("a", np.array([-1]), "int64", overridable=axes == "replaceable")
    d = n.sub(x, n.op("ReduceMean", x, a))
    graph = n.done(n.div(d, n.op("Sqrt", n.add(n.op("ReduceMean", n.mul(d, d), a), EPS))))
    assert ("LayerNormalization" in kinds(graph)) == (axes == "constant")


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("runtime", [False, True])
@pytest.mark.parametrize("shape", [(), (1,), (4,), (1, 4), (3, 4), (3, 1), (2, 3, 4), (1, 1, 4), (2, 1, 1)])
def test_scale_shapes(shape, runtime, swap):
    """onnxruntime#25855: a scale of exactly the normalised extents is taken in; any other stays a product."""
    n = Spell()
    y = layer(n, n.x(2, 3, 4))
    scale = n.x(*shape) if runtime else n.weight(shape)
    graph = n.done(n.mul(scale, y) if swap else n.mul(y, scale))
    if shape == (4,):
        assert_lifted(graph, {"LayerNormalization": 1}, 1e-9)
    else:
        assert_lifted(graph, {"LayerNormalization": 1, "Mul": 1}, 1e-9)


@pytest.mark.parametrize("bias", [(), (1,), (4,), (3, 1), (1, 3, 4)])
def test_bias_of_another_shape_than_the_scale(bias):
    n = Spell()
    graph = n.done(n.add(n.mul(layer(n, n.x(2, 3, 4)), n.weight((4,))), n.weight(bias)))
    expected = {"LayerNormalization": 1} | ({} if bias == (4,) else {"Add": 1})
    assert_lifted(graph, expected, 1e-9)


@pytest.mark.parametrize("runtime", [False, True])
@pytest.mark.parametrize("swap", [False, True])
def test_vector(swap, runtime):
    """onnxruntime#31147: rank 1, where every operand has the scale's shape; none inside may be taken for it."""
    n = Spell()
    y = layer(n, n.x(4))
    scale, bias = (n.x(4), n.x(4)) if runtime else (n.weight((4,)), n.weight((4,)))
    y = n.mul(scale, y) if swap else n.mul(y, scale)
    result = assert_lifted(n.done(n.add(bias, y) if swap else n.add(y, bias)), {"LayerNormalization": 1}, 1e-9)
    assert result.nodes[0].inputs == ("x", scale, bias)


def test_square_extents():
    """Equal extents everywhere hide a wrong axis: (4, 4, 4), scale (4, 1) must not be taken for (4,)."""
    n = Spell()
    graph = n.done(n.mul(layer(n, n.x(4, 4, 4)), n.weight((4, 1))))
    assert_lifted(graph, {"LayerNormalization": 1, "Mul": 1}, 1e-9)


@pytest.mark.parametrize("expose", ["mean", "centred", "variance", "normalised"])
def test_exposed_interior(expose):
    """onnxruntime#4110: a value that is read elsewhere is not swallowed; the normalised one may be the result."""
    n = Spell()
    x = n.x(2, 4)
    m = n.op("ReduceMean", x, n.ints(-1))
    d = n.sub(x, m)
    v = n.op("ReduceMean", n.mul(d, d), n.ints(-1))
    y = n.div(d, n.op("Sqrt", n.add(v, EPS)))
    z = n.add(n.mul(y, n.weight((4,))), n.weight((4,)))
    inner = {"mean": m, "centred": d, "variance": v, "normalised": y}[expose]
    graph = n.done(z, inner)
    result = assert_not_lifted(graph)
    found = kinds(graph)
    if expose == "normalised":
        assert found == {"LayerNormalization": 1, "Mul": 1, "Add": 1}
    else:
        assert "LayerNormalization" not in found
    assert {o for node in result.nodes for o in node.outputs} >= {z, inner}


def test_symbolic_batch_and_symbolic_tail():
    """The batch may be symbolic; a symbolic tail has no ones to scale with, but a scale of that extent is enough."""
    n = Spell()
    y = n.mul(layer(n, n.x("N", 3, 8)), n.weight((8,)))
    assert_lifted(n.done(y), {"LayerNormalization": 1}, 1e-9)
    n = Spell()
    assert_not_lifted(n.done(layer(n, n.x(2, "D"))), "LayerNormalization")


def test_mean_of_squares_minus_square_of_mean_is_never_lifted():
    """pytorch#54293: E[x²] − E[x]² cancels: with x near 10⁴ it is noise, and the operator is not."""
    n = Spell()
    x = n.x(3, 16)
    m = n.op("ReduceMean", x, n.ints(-1))
    v = n.sub(n.op("ReduceMean", n.mul(x, x), n.ints(-1)), n.mul(m, m))
    graph = n.done(n.div(n.sub(x, m), n.op("Sqrt", n.add(v, EPS))))
    assert_not_lifted(graph, "LayerNormalization", "RMSNormalization")


def test_means_of_two_tensors():
    n = Spell()
    x, z = n.x(3, 8), n.x(3, 8)
    d = n.sub(x, n.op("ReduceMean", z, n.ints(-1)))
    y = n.div(d, n.op("Sqrt", n.add(n.op("ReduceMean", n.mul(d, d), n.ints(-1)), EPS)))
    # what remains is an RMSNorm of d
    assert_lifted(n.done(y), {"ReduceMean": 1, "Sub": 1, "RMSNormalization": 1}, 1e-9)


def test_negative_epsilon_and_dropped_axes():
    n = Spell()
    assert_not_lifted(n.done(layer(n, n.x(3, 8), eps=-1e-5)), "LayerNormalization")
    n = Spell()
    x = n.x(8, 8)
    d = n.sub(x, n.op("ReduceMean", x, n.ints(-1), keepdims=0))  # broadcasts along the wrong axis: another function
    graph = n.done(n.div(d, n.op("Sqrt", n.add(n.op("ReduceMean", n.mul(d, d), n.ints(-1)), EPS))))
    assert "LayerNormalization" not in kinds(graph)


def test_layer_norm_in_float32_around_half():
    """x → float32 → norm → float16 is what the operator does by itself."""
    n = Spell("float32")
    x = n.x(2, 3, 8, kind="float16")
    y = n.op("Cast", layer(n, n.op("Cast", x, to="float32")), to="float16")
    y = n.op("Add", n.op("Mul", y, n.weight((8,), "float16")), n.weight((8,), "float16"))
    result = assert_lifted(n.done(y), {"LayerNormalization": 1})
    assert result.values[result.nodes[0].inputs[1]].dtype == "float16"


@pytest.mark.parametrize("to", ["int32", "float64", "bfloat16"])
def test_casts_to_another_dtype_stay(to):
    n = Spell("float32")
    y = n.op("Cast", layer(n, n.op("Cast", n.x(2, 8, kind="float16"), to="float32")), to=to)
    assert_lifted(n.done(y), {"Cast": 2, "LayerNormalization": 1})


def test_mixed_scale_dtype_stays():
    n = Spell("float32")
    y = n.op("Cast", layer(n, n.x(2, 8)), to="float16")
    assert_lifted(n.done(n.op("Mul", y, n.weight((8,), "float16"))), {"LayerNormalization": 1, "Cast": 1, "Mul": 1})


# --- RMSNorm --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bfloat16", "float32"])
@pytest.mark.parametrize("inverse", INVERSES)
@pytest.mark.parametrize("square", SQUARES)
def test_rms_norm(kind, inverse, square):
    n = Spell(kind)
    x = n.x(2, 3, 8)
    y = INVERSES[inverse](n, x, n.add(n.op("ReduceMean", SQUARES[square](n, x), n.ints(-1)), 1e-6))
    result = assert_lifted(n.done(n.mul(n.weight((8,)), y)), {"RMSNormalization": 1}, 1e-9)
    assert result.nodes[0].attrs["epsilon"] == pytest.approx(1e-6, rel=0.01)


def test_llama_rms_norm():
    """weight · x.float()-normalised .to(dtype)."""
    n = Spell("float32")
    x = n.x(2, 3, 8, kind="bfloat16")
    f = n.op("Cast", x, to="float32")
    y = n.mul(f, n.op("fusionreg::Rsqrt", n.add(n.op("ReduceMean", n.pow(f, 2.0), n.ints(-1)), 1e-6)))
    y = n.op("Mul", n.weight((8,), "bfloat16"), n.op("Cast", y, to="bfloat16"))
    assert_lifted(n.done(y), {"RMSNormalization": 1})


def test_rms_norm_over_other_axes_or_other_tensor():
    n = Spell()
    x = n.x(3, 3)
    r = n.op("Sqrt", n.add(n.op("ReduceMean", n.mul(x, x), n.ints(0)), 1e-6))
    assert_not_lifted(n.done(n.div(x, r)), "RMSNormalization")
    n = Spell()
    x, z = n.x(3, 3), n.x(3, 3)
    r = n.op("Sqrt", n.add(n.op("ReduceMean", n.mul(z, z), n.ints(1)), 1e-6))
    assert_not_lifted(n.done(n.div(x, r)), "RMSNormalization")


def test_lifting_twice_changes_nothing():
    n = Spell()
    y = n.add(n.mul(layer(n, n.x(2, 3, 8)), n.weight((8,))), n.weight((8,)))
    once = lifted(n.done(y))
    assert repr(lifted(once)) == repr(once)
