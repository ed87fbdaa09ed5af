"""Axes, broadcast directions and symbolic extents: square and non-square, fused exactly where they fit."""

from __future__ import annotations

import numpy as np
import pytest
from graphs import (
    Net,
    fused,
    fusion,
    gemm,
    largest,
    layernorm,
    matches_of,
    quick_gelu,
    reasons,
    sites,
    softmax_bias,
)

from fusionreg.core.matcher import find as matcher
from fusionreg.core.matcher import legality
from fusionreg.core.spec import AttributeSpec

# --- axes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", range(-3, 3))
@pytest.mark.parametrize("shape", [(2, 3, 4), (2, 2, 2)])
def test_only_the_last_axis_fuses_however_written(axis, shape):
    net = Net()
    x = net.input("x", "float32", shape)
    y = net.op("Softmax", net.op("Add", x, net.weight((shape[-1],))), axis=axis)
    want = {"softmax.bias": 1} if axis in (-1, 2) else {"Add": 1, "Softmax": 1}
    assert sites(fused(net.build([y]), softmax_bias())) == want


def test_axis_of_unknown_rank_is_refused():
    net = Net()
    x = net.input("x", "float32", None)
    a = net.op("Add", x, net.weight((4,)))
    y = net.op("Softmax", a, axis=2)
    assert not matches_of(net.build([y]), softmax_bias())


def ln(
    axes=(-1,), axes2=None, gamma=(4,), beta=(4,), eps=1e-5, shape=(2, 3, 4), runtime=False, swap=False, power=False
):
    net = Net()
    x = net.input("x", "float32", shape)
    a = net.input("axes", "int64", (len(axes),)) if runtime else net.const(axes, "int64")
    b = a if axes2 is None else net.const(axes2, "int64")
    c = net.op("Sub", x, net.op("ReduceMean", x, a))
    square = net.op("Pow", c, net.const(2.0)) if power else net.op("Mul", c, c)
    v = net.op("ReduceMean", square, b)
    n = net.op("Div", c, net.op("Sqrt", net.op("Add", v, net.const(eps))))
    g = net.weight(gamma, name="gamma")
    scaled = net.op("Mul", *((g, n) if swap else (n, g)))
    return net.build([net.op("Add", scaled, net.weight(beta, name="beta"))])


@pytest.mark.parametrize("knobs", [{}, {"axes": (2,)}, {"swap": True}, {"shape": (5, 4)}, {"shape": (4, 4, 4)}])
def test_layer_norm_fuses_in_canonical_form(knobs):
    assert sites(fused(ln(**knobs), layernorm())) == {"norm.layer": 1}


@pytest.mark.parametrize(
    "knobs",
    [
        {"axes": (1,)},
        {"axes": (1, 2)},
        {"axes": (-1,), "axes2": (1,)},
        {"axes": (0,), "shape": (4, 4, 4)},
        {"eps": 1e-4},
        {"power": True},
    ],
)
def test_other_axes_stay_out(knobs):
    graph = ln(**knobs)
    assert not matches_of(graph, layernorm())


def test_runtime_axes_stay_out():
    assert not matches_of(ln(runtime=True), layernorm())


def test_other_keepdims_stays_out():
    plain = fusion("red.mean", "y = Relu(ReduceMean(x, (-1,)))", {"x": "T[M N]"}, {"y": "T[M 1]"})
    net = Net()
    x = net.input("x", "float32", (4, 4))
    keep = net.op("Relu", net.op("ReduceMean", x, net.const([1], "int64")))
    drop = net.op("Relu", net.op("ReduceMean", x, net.const([1], "int64"), keepdims=0))
    assert [m.root for m in matches_of(net.build([keep, drop]), plain)] == ["Relu_relu"]


# --- which way an operand broadcasts --------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [4, 6])
@pytest.mark.parametrize(
    ("addend", "fuses"),
    [
        (lambda m, n: (n,), True),
        (lambda m, n: (1, n), True),
        (lambda m, n: (m, 1), False),
        (lambda m, n: (m, n), False),
        (lambda m, n: (1, 1), False),
        (lambda m, n: (), False),
        (lambda m, n: (1, 1, n), False),
        (lambda m, n: (2, 1, n), False),
        (lambda m, n: (2, m, 1), False),
    ],
)
@pytest.mark.parametrize("swap", [False, True])
def test_only_a_row_is_a_bias(n, addend, fuses, swap):
    net = Net()
    h = net.op("MatMul", net.input("x", "float32", (4, 3)), net.weight((3, n)))
    b = net.weight(addend(4, n), name="bias")
    y = net.op("Add", *((b, h) if swap else (h, b)))
    graph = net.build([y])
    assert any(len(m.nodes) == 2 for m in matches_of(graph, gemm())) == fuses
    fused(graph, gemm())


def test_leading_ones_are_fine_where_the_result_does_not_grow():
    net = Net()
    h = net.op("MatMul", net.input("x", "float32", (2, 4, 3)), net.weight((3, 4)))
    graph = net.build([net.op("Add", h, net.weight((1, 1, 4)))])
    assert len(largest(graph, gemm()).nodes) == 2
    fused(graph, gemm())


@pytest.mark.parametrize("lead", [(1,), (2,), (1, 1)])
def test_a_column_bias_needs_unfolded_rows(lead):
    column = fusion(
        "gemm.column",
        "y = Add(MatMul(x, w), bias)",
        {"x": "T[... M K]", "w": "T[K N]", "bias": "T[M 1]"},
        {"y": "T[... M N]"},
    )
    net = Net()
    h = net.op("MatMul", net.input("x", "float32", (*lead, 4, 3)), net.weight((3, 4)))
    graph = net.build([net.op("Add", h, net.weight((4, 1)))])
    assert bool(matches_of(graph, column)) == (set(lead) == {1})
    fused(graph, column)


@pytest.mark.parametrize("first", [(4, 3), (1, 3)])
@pytest.mark.parametrize("second", [(4, 3), (1, 3)])
def test_a_product_that_broadcasts_is_no_accumulator(first, second):
    twice = fusion(
        "gemm.twice",
        "y = Add(MatMul(a, b), MatMul(c, d))",
        {"a": "T[M K]", "b": "T[K N]", "c": "T[M K]", "d": "T[K N]"},
        {"y": "T[M N]"},
    )
    net = Net()
    left = net.op("MatMul", net.input("p", "float32", first), net.weight((3, 5)))
    right = net.op("MatMul", net.input("q", "float32", second), net.weight((3, 5)))
    graph = net.build([net.op("Add", left, right)])
    assert bool(matches_of(graph, twice)) == (first == second)
    fused(graph, twice)


@pytest.mark.parametrize("shape", [(2, 3, 4), (4, 4, 4)])
@pytest.mark.parametrize(("gamma", "fuses"), [((), 0), ((1,), 0), ((4,), 1), ((3, 4), 0), ((3, 1), 0), ((1, 1, 4), 1)])
def test_gamma_must_cover_the_normalised_axis(shape, gamma, fuses):
    gamma = tuple(shape[1] if d == 3 else d for d in gamma)
    graph = ln(gamma=gamma, shape=shape)
    assert len(matches_of(graph, layernorm())) == fuses
    fused(graph, layernorm())


def test_beta_of_another_shape():
    assert not matches_of(ln(beta=(1,)), layernorm())


@pytest.mark.parametrize("swap", [False, True])
def test_gamma_is_never_an_interior_value(swap):
    graph = ln(shape=(4,), swap=swap)
    m = largest(graph, layernorm())
    assert m.inputs["gamma"] == "gamma" and m.inputs["beta"] == "beta"
    assert sites(fused(graph, layernorm())) == {"norm.layer": 1}


def test_an_input_computed_inside_is_refused():
    product = fusion("act.product", "y = Mul(Relu(x), z)", {"x": "T[N]", "z": "T[N]"}, {"y": "T[N]"})
    net = Net()
    r = net.op("Relu", net.input("x", "float32", (4,)))
    graph = net.build([net.op("Mul", r, r)])
    assert not matches_of(graph, product)
    assert ("Mul_mul", legality.INSIDE) in reasons(graph, product)


def test_rank_three_is_no_matrix():
    flat = fusion("gemm.flat", "y = Relu(MatMul(x, w))", {"x": "T[M K]", "w": "T[K N]"}, {"y": "T[M N]"})
    for shape, fuses in (((4, 3), 1), ((2, 4, 3), 0), ((1, 4, 3), 0)):
        net = Net()
        y = net.op("Relu", net.op("MatMul", net.input("x", "float32", shape), net.weight((3, 4))))
        assert len(matches_of(net.build([y]), flat)) == fuses, shape


def test_a_batch_of_weights_is_no_shared_weight():
    net = Net()
    h = net.op("MatMul", net.input("x", "float32", (2, 4, 4)), net.weight((2, 4, 4)))
    assert not matches_of(net.build([net.op("Relu", h)]), gemm())


# --- scalars --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "fuses"), [((), True), ((1,), True), ((1, 1), True), ((4,), True), ((2, 1, 1), False), ((4, 1), False)]
)
def test_scale_shapes(shape, fuses):
    net = Net()
    h = net.op("MatMul", net.input("x", "float32", (2, 4, 3)), net.weight((3, 4)))
    graph = net.build([net.op("Mul", h, net.input("scale", "float32", shape))])
    m = largest(graph, gemm())
    assert (len(m.nodes) == 2) == fuses
    if fuses:
        assert m.inputs["scale"] == "scale"  # read anew at each call, never frozen
    fused(graph, gemm())


# --- growth that a later step hides ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("shape", "fuses"), [((), True), ((1, 1), True), ((1, 5), True), ((3, 1), False)])
def test_a_constant_that_repeats_rows_before_a_sum_is_refused(shape, fuses):
    total = fusion("red.total", "y = ReduceSum(Mul(x, 2.0), keepdims=0)", {"x": "T[M N]"}, {"y": "T[]"})
    net = Net()
    m = net.op("Mul", net.input("x", "float32", (1, 5)), net.const(np.full(shape, 2.0)))
    graph = net.build([net.op("ReduceSum", m, keepdims=0)])
    assert bool(matches_of(graph, total)) == fuses
    fused(graph, total)


@pytest.mark.parametrize(
    ("x", "b", "fuses"), [((3, 4), (4,), 1), ((3, 4), (1, 4), 1), ((3, 4), (1, 1, 4), 0), ((1, 3, 4), (4,), 0)]
)
def test_leading_ones_that_shift_a_later_axis_are_refused(x, b, fuses):
    rows = fusion(
        "red.rows",
        "y = ReduceSum(Add(x, b), (0,), keepdims=0)",
        {"x": "T[M N]", "b": "T[N]"},
        {"y": "T[N] | T[M N]"},
    )
    net = Net()
    h = net.op("Add", net.input("x", "float32", x), net.weight(b))
    graph = net.build([net.op("ReduceSum", h, net.const([0], "int64"), keepdims=0)])
    assert len(matches_of(graph, rows)) == fuses
    fused(graph, rows)


# --- symbolic extents -----------------------------------------------------------------------------------------------


def test_symbolic_extents_bind_by_name():
    net = Net()
    h = net.op("MatMul", net.input("x", "float32", ("B", "S", 4)), net.weight((4, 6)))
    graph = net.build([net.op("Add", h, net.weight((6,)))])
    m = largest(graph, gemm())
    assert m.leading == ("B",) and dict(m.axes) == {"M": "S", "K": 4, "N": 6} and m.guards == ()
    fused(graph, gemm())


@pytest.mark.parametrize(("second", "fuses"), [("S", True), ("R", False), (4, False)])
def test_what_may_differ_is_not_one_axis(second, fuses):
    pair = fusion("act.pair", "y = Relu(Concat(a, b, axis=-1))", {"a": "T[M N]", "b": "T[M N]"}, {"y": "T[M P]"})
    net = Net()
    c = net.op("Concat", net.input("a", "float32", ("S", 4)), net.input("b", "float32", (second, 4)), axis=1)
    graph = net.build([net.op("Relu", c)])
    assert bool(matches_of(graph, pair)) == fuses


@pytest.mark.parametrize(("k", "guards", "fuses"), [(8, (), True), (12, (), False), ("K", ("K % 8 == 0",), True)])
def test_constraints_over_symbolic_axes_become_guards(k, guards, fuses):
    even = fusion(
        "gemm.even",
        "y = Relu(MatMul(x, w))",
        {"x": "T[... M K]", "w": "T[K N]"},
        {"y": "T[... M N]"},
        constraints=("K % 8 == 0", "N < 100"),
    )
    net = Net()
    y = net.op("Relu", net.op("MatMul", net.input("x", "float32", (3, k)), net.input("w", "float32", (k, 4))))
    found = matches_of(net.build([y]), even)
    assert [m.guards for m in found] == ([guards] if fuses else [])


def test_constraints_see_attributes_choices_forms_and_folded_axes():
    def spec(text):
        return fusion(
            "gemm.cond",
            'y = optional(any_of(Relu, Tanh), "act")(Add(MatMul(x, w, transB=transB), bias))',
            {"x": "T[... M K]", "w": "T[K N] | T[N K]", "bias": "T[] | T[N]"},
            {"y": "T[... M N]"},
            attributes={"transB": AttributeSpec(type="bool", default=False)},
            constraints=(text,),
        )

    net = Net()
    h = net.op("MatMul", net.input("x", "float32", (2, 3, 4)), net.weight((4, 5)))
    graph = net.build([net.op("Relu", net.op("Add", h, net.weight((5,))))])
    for text, holds in (
        ("M == 6", True),
        ("M == 3", False),
        ("not transB", True),
        ('act == "Relu"', True),
        ('act in ("Tanh", "none")', False),
        ('T == "float32" and bits(T) == 32', True),
        ("present(bias) and form(bias) == 1 and rank(bias) == 1", True),
        ("shape(x, 0) == 6 and shape(w, 1) == N", True),
        ("N // (M - 6) == 1", False),
    ):
        assert any(len(m.nodes) == 3 for m in matches_of(graph, spec(text))) == holds, text
    assert largest(graph, spec("contiguous(x)")).guards == ("contiguous(x)",)


def test_unknown_rank_matches_nothing():
    net = Net()
    x = net.input("x", "float32", None)
    graph = net.build([net.op("Mul", x, net.op("Sigmoid", net.op("Mul", x, net.const(1.702))))])
    assert not matches_of(graph, quick_gelu())
    assert any(c == matcher.SHAPE for _, c in reasons(graph, quick_gelu()))
