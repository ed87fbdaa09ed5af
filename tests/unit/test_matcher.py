"""The matcher on plain patterns: options, alternatives, spellings, literals, attributes, and its near misses."""

from __future__ import annotations

import numpy as np
import pytest
from graphs import (
    FLOATS,
    Net,
    chain,
    fused,
    fusion,
    gemm,
    largest,
    matches_of,
    quick_gelu,
    reasons,
    sites,
    softmax_bias,
    vocabulary,
)

from fusionreg.core.matcher import find as matcher
from fusionreg.core.matcher import search
from fusionreg.core.matcher.find import find
from fusionreg.core.spec import AttributeSpec

# --- the plain case -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FLOATS)
def test_whole_chain_becomes_one_call(kind):
    graph = chain(kind=kind)
    assert sites(fused(graph, gemm())) == {"gemm.scale_bias": 1}
    m = largest(graph, gemm())
    assert m.nodes == tuple(n.name for n in graph.nodes)
    assert m.root == "Relu_relu" and m.spelling == 0 and m.plugin == "tests"
    assert dict(m.inputs) == {"x": "x", "w": "w", "scale": "c", "bias": "bias"}
    assert dict(m.outputs) == {"y": "relu"}
    assert dict(m.axes) == {"M": 4, "K": 8, "N": 16} and m.leading == ()
    assert dict(m.dtypes) == {"T": kind}
    assert dict(m.attributes) == {"transB": False} and type(m.attributes["transB"]) is bool
    assert dict(m.choices) == {"activation": "Relu"}
    assert dict(m.forms) == {"x": 0, "w": 0, "scale": 0, "bias": 0, "y": 0}


def test_every_root_has_its_largest_form():
    found = {m.root.split("_")[0]: len(m.nodes) for m in matches_of(chain(), gemm())}
    assert found == {"MatMul": 1, "Mul": 2, "Add": 3, "Relu": 4}


@pytest.mark.parametrize(
    ("steps", "choice"),
    [
        ((), "none"),
        (("Mul",), "none"),
        (("Add",), "none"),
        (("Gelu",), "Gelu"),
        (("Mul", "Gelu_tanh"), "gelu_tanh"),
        (("Add", "Tanh"), "Tanh"),
        (("Mul", "Add", "Sigmoid"), "Sigmoid"),
    ],
)
def test_optional_steps_and_alternatives(steps, choice):
    net = Net()
    v = net.op("MatMul", net.input("x", "float32", (5, 3)), net.weight((3, 7)))
    for step in steps:
        if step == "Mul":
            v = net.op("Mul", v, net.const(2.0))
        elif step == "Add":
            v = net.op("Add", v, net.weight((7,)))
        elif step == "Gelu_tanh":
            v = net.op("Gelu", v, approximate="tanh")
        else:
            v = net.op(step, v)
    m = largest(net.build([v]), gemm())
    assert len(m.nodes) == 1 + len(steps)
    assert m.choices["activation"] == choice
    assert ("scale" in m.inputs) == ("Mul" in steps) and ("bias" in m.inputs) == ("Add" in steps)
    fused(net.build([v]), gemm())


def test_an_operator_that_is_no_alternative_stays_outside():
    net = Net()
    h = net.op("MatMul", net.input("x", "float32", (5, 3)), net.weight((3, 7)))
    y = net.op("Elu", net.op("Add", h, net.weight((7,))))
    assert sites(fused(net.build([y]), gemm())) == {"gemm.scale_bias": 1, "Elu": 1}


# --- spellings that must still fuse ---------------------------------------------------------------------------------


@pytest.mark.parametrize("swap_scale", [False, True])
@pytest.mark.parametrize("swap_bias", [False, True])
@pytest.mark.parametrize("n", [16, 4])
def test_commutative_operands_in_any_order(swap_scale, swap_bias, n):
    net = Net()
    h = net.op("MatMul", net.input("x", "float32", (4, 4)), net.weight((4, n)))
    c, bias = net.const(0.25), net.weight((n,), name="bias")
    s = net.op("Mul", *((c, h) if swap_scale else (h, c)))
    y = net.op("Add", *((bias, s) if swap_bias else (s, bias)))
    graph = net.build([y])
    m = largest(graph, gemm())
    assert len(m.nodes) == 3 and m.inputs["scale"] == c and m.inputs["bias"] == bias
    assert sites(fused(graph, gemm())) == {"gemm.scale_bias": 1}


@pytest.mark.parametrize("order", range(6))
def test_quick_gelu_in_every_order(order):
    net = Net()
    x, c = net.input("x", "float32", (3, 5)), net.const(1.702)
    g = net.op("Sigmoid", net.op("Mul", *((x, c) if order % 2 else (c, x))))
    y = net.op("Mul", *((x, g) if order % 3 else (g, x)))
    assert sites(fused(net.build([y]), quick_gelu())) == {"act.quick_gelu": 1}


def test_several_spellings_are_one_fusion():
    both = fusion(
        "act.swish",
        ("y = Mul(x, Sigmoid(x))", "y = Div(x, Add(Exp(Neg(x)), 1.0))"),
        {"x": "T[... N]"},
        {"y": "T[... N]"},
    )
    net = Net()
    x = net.input("x", "float32", (3, 5))
    a = net.op("Mul", net.op("Sigmoid", x), x)
    b = net.op("Div", x, net.op("Add", net.const(1.0), net.op("Exp", net.op("Neg", x))))
    graph = net.build([a, b])
    assert [m.spelling for m in matches_of(graph, both)] == [0, 1]
    assert sites(fused(graph, both)) == {"act.swish": 2}


# --- literals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FLOATS)
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_literal_is_compared_after_rounding(kind, shape):
    net = Net()
    x = net.input("x", kind, (3, 5))
    c = net.const(np.full(shape, 1.702), kind)
    y = net.op("Mul", x, net.op("Sigmoid", net.op("Mul", x, c)))
    assert sites(fused(net.build([y]), quick_gelu())) == {"act.quick_gelu": 1}


@pytest.mark.parametrize("value", [1.7, 1.703, -1.702, float("nan"), 0.0])
def test_another_constant_is_refused(value):
    net = Net()
    x = net.input("x", "float32", (3, 5))
    graph = net.build([net.op("Mul", x, net.op("Sigmoid", net.op("Mul", x, net.const(value))))])
    assert not matches_of(graph, quick_gelu())
    assert any(clause == search.LITERAL for _, clause in reasons(graph, quick_gelu()))


def test_a_constant_that_a_caller_may_replace_is_no_literal():
    net = Net()
    x = net.input("x", "float32", (3, 5))
    c = net.const(1.702, overridable=True)
    graph = net.build([net.op("Mul", x, net.op("Sigmoid", net.op("Mul", x, c)))])
    assert not matches_of(graph, quick_gelu())


def test_an_overridable_weight_is_a_plain_input():
    net = Net()
    h = net.op("MatMul", net.input("x", "float32", (3, 5)), net.weight((5, 4), overridable=True))
    graph = net.build([net.op("Relu", h)])
    assert sites(fused(graph, gemm())) == {"gemm.scale_bias": 1}


def test_a_literal_that_broadcasts_the_result_is_refused():
    net = Net()
    x = net.input("x", "float32", (1, 5))
    wide = net.op("Mul", x, net.const(np.full((3, 1), 1.702)))
    graph = net.build([net.op("Mul", x, net.op("Sigmoid", wide))])
    assert not matches_of(graph, quick_gelu())


def test_integer_literals_do_not_match_by_rounding():
    half = fusion("act.half", "y = Add(Mul(x, 0.5), x)", {"x": "T[N]"}, {"y": "T[N]"}, dtypes={"T": ("int32",)})
    net = Net()
    x = net.input("x", "int32", (4,))
    graph = net.build([net.op("Add", net.op("Mul", x, net.const(0, "int32")), x)])
    assert not matches_of(graph, half)


# --- perms ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "perm", "fuses"),
    [
        ((4, 4), None, True),
        ((4, 4), (1, 0), True),
        ((4, 4), (0, 1), False),
        ((3, 4, 4), (0, 2, 1), False),
        ((3, 4, 4), None, False),
    ],
)
def test_a_transpose_is_what_its_perm_says(shape, perm, fuses):
    t = fusion("gemm.t", "y = Relu(Transpose(x, perm=(1, 0)))", {"x": "T[A B]"}, {"y": "T[B A]"})
    net = Net()
    x = net.input("x", "float32", shape)
    attrs = {} if perm is None else {"perm": perm}
    graph = net.build([net.op("Relu", net.op("Transpose", x, **attrs))])
    assert bool(matches_of(graph, t)) == fuses
    fused(graph, t)


@pytest.mark.parametrize("n", [4, 6])
@pytest.mark.parametrize("flag", [0, 1])
def test_trans_flags_are_bound(n, flag):
    net = Net()
    w = net.weight((n, 4) if flag else (4, n))
    graph = net.build([net.op("Relu", net.op("MatMul", net.input("x", "float32", (5, 4)), w, transB=flag))])
    m = largest(graph, gemm())
    assert m.attributes["transB"] is bool(flag) and m.axes["N"] == n
    fused(graph, gemm())


def test_an_attribute_that_is_not_named_must_be_the_default():
    net = Net()
    h = net.op("MatMul", net.input("x", "float32", (4, 4)), net.weight((4, 4)), transA=1)
    graph = net.build([net.op("Relu", h)])
    assert not matches_of(graph, gemm())
    failed = reasons(graph, gemm())["Relu_relu", search.ATTRIBUTE]
    assert "transA" in failed.found and failed.depth == 1


def test_an_attribute_outside_its_choices_is_refused():
    leaky = fusion(
        "act.leaky",
        "y = Relu(LeakyRelu(x, alpha=alpha))",
        {"x": "T[N]"},
        {"y": "T[N]"},
        attributes={"alpha": AttributeSpec(type="float", choices=(0.5, 0.25))},
    )
    for alpha, fuses in ((0.5, 1), (0.3, 0)):
        net = Net()
        y = net.op("Relu", net.op("LeakyRelu", net.input("x", "float32", (4,)), alpha=alpha))
        assert len(matches_of(net.build([y]), leaky)) == fuses


def test_one_attribute_name_is_one_value():
    twice = fusion(
        "act.twice",
        "y = LeakyRelu(LeakyRelu(x, alpha=alpha), alpha=alpha)",
        {"x": "T[N]"},
        {"y": "T[N]"},
        attributes={"alpha": AttributeSpec(type="float")},
    )
    for second, fuses in ((0.25, 1), (0.5, 0)):
        net = Net()
        h = net.op("LeakyRelu", net.input("x", "float32", (4,)), alpha=0.25)
        assert len(matches_of(net.build([net.op("LeakyRelu", h, alpha=second)]), twice)) == fuses


# --- gates ----------------------------------------------------------------------------------------------------------


def test_two_steps_gated_by_one_input_come_together():
    affine = fusion(
        "act.affine",
        "h = optional(Mul)(Relu(x), s)\ny = optional(Add)(h, s)",
        {"x": "T[N]", "s": "T[N]"},
        {"y": "T[N]"},
    )
    for ops, size in ((("Mul", "Add"), 3), (("Mul",), 1), (("Add",), 1), ((), 1)):
        net = Net()
        s = net.input("s", "float32", (4,))
        v = net.op("Relu", net.input("x", "float32", (4,)))
        for op in ops:
            v = net.op(op, v, s)
        graph = net.build([v])
        assert len(largest(graph, affine).nodes) == size, ops
        fused(graph, affine)


# --- failures -------------------------------------------------------------------------------------------------------


def test_a_failure_is_a_sentence_about_the_deepest_try():
    net = Net()
    x = net.input("x", "float32", (3, 4))
    h = net.op("MatMul", x, net.weight((4, 4)), source="model.py:7")
    b = net.op("Add", h, net.weight((3, 1)), source="model.py:8")
    graph = net.build([net.op("Relu", b, source="model.py:9")])
    found = find(graph, [gemm()], vocabulary(), explain=True)
    failed = next(f for f in found.failures if f.root == "Relu_relu")
    assert failed.depth == 3 and failed.clause == matcher.SHAPE and failed.source == "model.py:9"
    assert "bias" in failed.found and "T[N]" in failed.expected
    assert str(failed).startswith(
        "gemm.scale_bias at Relu_relu, 3 steps matched: the shape fails at Relu_relu (model.py:9)"
    )
    assert not find(graph, [gemm()], vocabulary()).failures


def test_failures_name_the_operator_found_and_wanted():
    net = Net()
    y = net.op("Softmax", net.op("Mul", net.input("x", "float32", (3, 4)), net.const(2.0)))
    failed = reasons(net.build([y]), softmax_bias())["Softmax_softmax", search.OPERATOR]
    assert (failed.found, failed.expected, failed.node, failed.depth) == ("Mul", "expected Add", "Mul_mul", 1)


def test_matches_do_not_depend_on_the_order_of_fusions():
    graph = chain()
    a = find(graph, [gemm(), quick_gelu(), softmax_bias()], vocabulary())
    b = find(graph, [softmax_bias(), quick_gelu(), gemm()], vocabulary())
    assert a.matches == b.matches
