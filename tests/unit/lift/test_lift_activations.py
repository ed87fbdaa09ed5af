"""Activations: every public spelling is lifted, values equal the spelled-out chain, and near misses are not lifted."""

from __future__ import annotations

from itertools import product
from math import pi, sqrt

import numpy as np
import pytest
from lifting import ERF, TANH, Spell, assert_lifted, assert_not_lifted, kinds, lifted_of, unlifted_of

from fusionreg.core.ops import default_vocabulary

# --- GELU -----------------------------------------------------------------------------------------------------------

HALVES = {
    "x·a·½": lambda n, x, a: n.mul(n.mul(x, a), 0.5),
    "x·½·a": lambda n, x, a: n.mul(n.mul(x, 0.5), a),
    "½·x·a": lambda n, x, a: n.mul(n.mul(0.5, x), a),
    "a·(½·x)": lambda n, x, a: n.mul(a, n.mul(0.5, x)),
    "½·(x·a)": lambda n, x, a: n.mul(0.5, n.mul(x, a)),
    "x·(a·½)": lambda n, x, a: n.mul(x, n.mul(a, 0.5)),
    "(½·a)·x": lambda n, x, a: n.mul(n.mul(0.5, a), x),
    "x·a/2": lambda n, x, a: n.div(n.mul(x, a), 2.0),
    "x/2·a": lambda n, x, a: n.mul(n.div(x, 2.0), a),
}
ERFS = {
    "x/√2": lambda n, x: n.op("Erf", n.div(x, sqrt(2.0))),
    "x/1.41421": lambda n, x: n.op("Erf", n.div(x, 1.4142099618911743)),
    "x·√½": lambda n, x: n.op("Erf", n.mul(x, sqrt(0.5))),
    "√½·x": lambda n, x: n.op("Erf", n.mul(0.7071067690849304, x)),
}
K = sqrt(2.0 / pi)
INNER = {
    "pow": lambda n, x: n.mul(K, n.add(x, n.mul(0.044715, n.pow(x, 3.0)))),
    "pow int": lambda n, x: n.mul(n.add(x, n.mul(n.op("Pow", x, n.const(3, "int64")), 0.044715)), K),
    "x·x·x": lambda n, x: n.mul(n.add(x, n.mul(n.mul(n.mul(x, x), x), 0.044715)), 0.7978845608),
    "x·(x·x)": lambda n, x: n.mul(n.add(n.mul(0.044715, n.mul(x, n.mul(x, x))), x), 0.7978845608028654),
    "jax": lambda n, x: n.mul(K, n.add(x, n.mul(x, n.mul(x, n.mul(0.044715, x))))),
    "c·x²·x": lambda n, x: n.mul(K, n.add(x, n.mul(n.mul(0.044715, n.mul(x, x)), x))),
    "fast": lambda n, x: n.mul(n.mul(x, 0.7978845608), n.add(1.0, n.mul(n.mul(0.044715, x), x))),
    "factored": lambda n, x: n.mul(x, n.mul(0.7978845608, n.add(n.mul(0.044715, n.mul(x, x)), 1.0))),
    "keras": lambda n, x: n.mul(n.mul(x, n.add(1.0, n.mul(0.044715, n.pow(x, 2.0)))), 0.7978845608),
}


def combinations(spellings, *kinds):
    """Every spelling with every product in float32, and each spelling with one product in the other dtypes."""
    return [(s, h, "float32") for s, h in product(spellings, HALVES)] + [
        (s, "x·½·a", k) for s, k in product(spellings, kinds)
    ]


@pytest.mark.parametrize(("erf", "half", "kind"), combinations(ERFS, "float16", "bfloat16", "float64"))
def test_erf_gelu(erf, half, kind):
    """rten#675 (½ last): each association of each spelling."""
    n = Spell(kind)
    x = n.x(3, 5)
    graph = n.done(HALVES[half](n, x, n.add(ERFS[erf](n, x), 1.0)))
    if kind == "float64" and erf in ("x/1.41421", "√½·x"):  # seven digits are another number there
        assert_not_lifted(graph, "Gelu")
    else:
        assert_lifted(graph, {"Gelu": 1}, ERF)


@pytest.mark.parametrize(("inner", "half", "kind"), combinations(INNER, "float16", "bfloat16"))
def test_tanh_gelu(inner, half, kind):
    n = Spell(kind)
    x = n.x(3, 5)
    graph = n.done(HALVES[half](n, x, n.add(1.0, n.op("Tanh", INNER[inner](n, x)))))
    assert_lifted(graph, {"Gelu": 1}, TANH)
    assert lifted_of(graph).nodes[-1].attrs["approximate"] == "tanh"


@pytest.mark.parametrize("op", ["div", "mul"])
def test_distributed_half(op):
    n = Spell()
    x = n.x(4)
    e = n.op("Erf", n.div(x, sqrt(2.0)) if op == "div" else n.mul(x, sqrt(0.5)))
    assert_lifted(n.done(n.mul(x, n.add(n.mul(e, 0.5), 0.5))), {"Gelu": 1}, ERF)


def gelu_with(n, x, root=2**0.5, one=1.0, half=0.5):
    return n.mul(n.mul(x, n.add(n.op("Erf", n.div(x, root)), one)), half)


@pytest.mark.parametrize(
    "changes", [{"root": 1.4}, {"root": 1.4143}, {"root": -sqrt(2.0)}, {"one": 1.01}, {"half": 0.25}]
)
def test_another_constant_is_another_function(changes):
    n = Spell()
    assert_not_lifted(n.done(gelu_with(n, n.x(4), **changes)), "Gelu")


@pytest.mark.parametrize("c", [0.04, 0.0447, 0.45])
def test_another_cubic_factor(c):
    n = Spell()
    x = n.x(4)
    u = n.mul(K, n.add(x, n.mul(c, n.pow(x, 3.0))))
    assert_not_lifted(n.done(n.mul(n.mul(x, 0.5), n.add(1.0, n.op("Tanh", u)))), "Gelu")


def test_two_different_tensors():
    n = Spell()
    x, z = n.x(4), n.x(4)
    assert_not_lifted(n.done(n.mul(n.mul(z, n.add(n.op("Erf", n.div(x, sqrt(2.0))), 1.0)), 0.5)), "Gelu")


@pytest.mark.parametrize("where", ["erf", "sum", "product"])
def test_interior_value_that_is_an_output_or_has_another_reader(where):
    """onnxruntime#4110, #15109: exposed values stay; nothing is computed twice."""
    for expose in ("output", "reader"):
        n = Spell()
        x = n.x(4)
        e = n.op("Erf", n.div(x, sqrt(2.0)))
        s = n.add(e, 1.0)
        p = n.mul(x, s)
        inner = {"erf": e, "sum": s, "product": p}[where]
        y = n.mul(p, 0.5)
        graph = n.done(y, inner) if expose == "output" else n.done(y, n.op("Neg", inner))
        assert_not_lifted(graph, "Gelu")


def test_constants_that_broadcast_the_result():
    """A constant of more axes or extents than x changes the shape: no activation does."""
    for shape in ((1, 1, 1), (2, 1, 4)):
        n = Spell()
        x = n.x(1, 4)
        y = n.mul(n.mul(x, n.add(n.op("Erf", n.div(x, n.const(np.full(shape, sqrt(2.0))))), 1.0)), 0.5)
        assert_not_lifted(n.done(y), "Gelu")


def test_constant_that_broadcasts_a_symbolic_axis():
    n = Spell()
    x = n.x("N", 4)
    y = n.mul(n.mul(x, n.add(n.op("Erf", n.div(x, sqrt(2.0))), n.const(np.ones((3, 1))))), 0.5)
    assert_not_lifted(n.done(y), "Gelu", N=1)


def test_constants_of_extent_one_and_full_extent_are_the_number():
    n = Spell()
    x = n.x(2, 4)
    y = n.mul(
        n.mul(x, n.add(n.op("Erf", n.div(x, n.const(np.full((1, 1), sqrt(2.0))))), n.const(np.ones((2, 4))))), 0.5
    )
    assert_lifted(n.done(y), {"Gelu": 1}, ERF)


def test_a_replaceable_constant_is_no_constant():
    n = Spell()
    x = n.x(4)
    c = n.input("c", "float32", ())
    n.constant("c", np.asarray(sqrt(2.0), "f"), "float32", overridable=True)
    assert_not_lifted(n.done(n.mul(n.mul(x, n.add(n.op("Erf", n.div(x, c)), 1.0)), 0.5)), "Gelu", skip=("c",))


def test_casts_inside_stay():
    """pytorch#171190, onnxruntime#32421: a cast to another type is part of the function; so is one to integers."""
    for kind in ("float64", "int32"):
        n = Spell()
        x = n.x(4)
        e = n.op("Cast", n.op("Cast", n.op("Erf", n.div(x, sqrt(2.0))), to=kind), to="float32")
        assert_not_lifted(n.done(n.mul(n.mul(x, n.add(e, 1.0)), 0.5)), "Gelu")


def test_t5_gated_ffn():
    """rten#708: H is read four times, and still there is one GELU and each product once."""
    n = Spell()
    x = n.x(3, 4)
    h = n.op("MatMul", x, n.weight((4, 6)))
    g = n.mul(n.mul(0.5, h), n.add(1.0, n.op("Tanh", INNER["pow"](n, h))))
    y = n.op("MatMul", n.mul(g, n.op("MatMul", x, n.weight((4, 6)))), n.weight((6, 4)))
    assert_lifted(n.done(y), {"MatMul": 3, "Gelu": 1, "Mul": 1}, 1e-5)


# --- Swish and its kin ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["float16", "bfloat16", "float32"])
def test_swish(kind):
    n = Spell(kind)
    x = n.x(3, 5)
    assert_lifted(n.done(n.mul(x, n.op("Sigmoid", x))), {"Swish": 1}, 1e-6)
    n = Spell(kind)
    x = n.x(3, 5)
    assert_lifted(n.done(n.mul(n.op("Sigmoid", x), x)), {"Swish": 1}, 1e-6)
    n = Spell(kind)
    x = n.x(3, 5)
    assert_lifted(n.done(n.div(x, n.add(1.0, n.op("Exp", n.op("Neg", x))))), {"Swish": 1}, 1e-6)


@pytest.mark.parametrize("kind", ["float16", "bfloat16", "float32"])
def test_quick_gelu(kind):
    """onnxruntime#15109: the third GELU, with and without σ as an output."""
    n = Spell(kind)
    x = n.x(3, 5)
    s = n.op("Sigmoid", n.mul(1.702, x))
    assert_lifted(n.done(n.mul(x, s)), {"fusionreg::QuickGelu": 1}, 1e-6)
    n = Spell(kind)
    x = n.x(3, 5)
    s = n.op("Sigmoid", n.mul(1.702, x))
    assert_not_lifted(n.done(n.mul(x, s), s), "fusionreg::QuickGelu", "Swish")


def test_scaled_swish_keeps_its_factor():
    n = Spell()
    x = n.x(3, 5)
    graph = n.done(n.mul(x, n.op("Sigmoid", n.mul(x, 1.5))))
    assert_lifted(graph, {"Swish": 1}, 1e-6)
    assert lifted_of(graph).nodes[0].attrs["alpha"] == 1.5


def test_sigmoid():
    n = Spell()
    assert_lifted(n.done(n.div(1.0, n.add(1.0, n.op("Exp", n.op("Neg", n.x(4)))))), {"Sigmoid": 1}, 1e-6)
    n = Spell()
    assert_lifted(n.done(n.op("Reciprocal", n.add(n.op("Exp", n.op("Neg", n.x(4))), 1.0))), {"Sigmoid": 1}, 1e-6)
    n = Spell()
    assert_not_lifted(n.done(n.div(2.0, n.add(1.0, n.op("Exp", n.op("Neg", n.x(4)))))), "Sigmoid")
    n = Spell()
    assert_not_lifted(n.done(n.div(1.0, n.add(1.0, n.op("Exp", n.x(4))))), "Sigmoid")


def relu6(n, x, low=0.0, high=6.0):
    return n.op("Clip", n.add(x, 3.0), n.const(low), n.const(high))


HARD = {
    "x·r/6": lambda n, x: n.div(n.mul(x, relu6(n, x)), 6.0),
    "x·(r/6)": lambda n, x: n.mul(x, n.div(relu6(n, x), 6.0)),
    "x·r·⅙": lambda n, x: n.mul(n.mul(x, relu6(n, x)), 1 / 6),
    "x·(r·⅙)": lambda n, x: n.mul(x, n.mul(relu6(n, x), 1 / 6)),
    "hard sigmoid": lambda n, x: n.mul(x, n.op("HardSigmoid", x, alpha=float(np.float32(1 / 6)), beta=0.5)),
}


@pytest.mark.parametrize("spelling", HARD)
@pytest.mark.parametrize("kind", ["float16", "float32"])
def test_hard_swish(spelling, kind):
    n = Spell(kind)
    x = n.x(4, 9, scale=4.0)
    assert_lifted(n.done(HARD[spelling](n, x)), {"HardSwish": 1}, 1e-5)


def test_not_quite_hard_swish():
    for low, high in ((0.0, 5.0), (-1.0, 6.0)):
        n = Spell()
        x = n.x(4)
        assert_not_lifted(n.done(n.div(n.mul(x, relu6(n, x, low, high)), 6.0)), "HardSwish")
    n = Spell()
    x = n.x(4)
    assert_not_lifted(n.done(n.mul(x, n.op("HardSigmoid", x, alpha=0.2, beta=0.5))), "HardSwish")


def test_mish():
    n = Spell()
    x = n.x(4)
    assert_lifted(n.done(n.mul(x, n.op("Tanh", n.op("Softplus", x)))), {"Mish": 1}, 1e-5)


@pytest.mark.parametrize("op", ["Swish", "Gelu", "Sigmoid"])
def test_special_values(op):
    """NaN and infinities give what the spelled-out chain gives."""
    n = Spell()
    x = n.x(7)
    graph = n.done(
        {
            "Swish": lambda: n.mul(x, n.op("Sigmoid", x)),
            "Gelu": lambda: gelu_with(n, x),
            "Sigmoid": lambda: n.div(1.0, n.add(1.0, n.op("Exp", n.op("Neg", x)))),
        }[op]()
    )
    special = {"x": np.array([np.nan, np.inf, -np.inf, -0.0, 0.0, 1e30, -1e30], "f")}
    np.testing.assert_array_equal(lifted_of(graph, special), unlifted_of(graph, special))
    assert kinds(graph) == {op: 1}


def test_integer_graphs_are_left_alone():
    n = Spell("int32")
    x = n.x(4)
    graph = n.done(n.mul(x, n.const(1, "int32")))
    assert_not_lifted(graph, "Gelu", "Swish")
    assert default_vocabulary()["Swish"].attributes["alpha"] == 1.0
