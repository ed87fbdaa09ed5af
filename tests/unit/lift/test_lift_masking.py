"""Masks in front of a softmax: what replaces scores by a number is found in every spelling, and nothing else is."""

from __future__ import annotations

import numpy as np
import pytest
from lifting import OPS, Spell, assert_lifted, kinds, lifted_of

from fusionreg.core.evaluate.evaluator import evaluate

FILL, CAUSAL = "fusionreg::MaskedFill", "fusionreg::CausalMask"
INF = float("-inf")


def softmax(scores):
    """Over the last axis, in float64, by its definition."""
    with np.errstate(invalid="ignore"):
        e = np.exp(scores - scores.max(axis=-1, keepdims=True))
        return e / e.sum(axis=-1, keepdims=True)


def visible(queries, keys, diagonal=0):
    return np.tri(queries, keys, diagonal, dtype=bool)


def check(graph, scores):
    """The lifted graph's result for random inputs is the softmax of what ``scores`` makes of them."""
    rng = np.random.default_rng(3)
    given = {}
    for name in graph.inputs:
        value = graph.values[name]
        drawn = rng.standard_normal(value.shape)
        given[name] = drawn > 0 if value.dtype == "bool" else drawn.astype(value.dtype)
    got = evaluate(lifted_of(graph), given, ops=OPS)[graph.outputs[0]]
    want = softmax(scores(*(v if v.dtype == bool else v.astype(np.float64) for v in given.values())))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(2, 1, 1, 5), (2, 1, 4, 5), (1, 3, 4, 5), (4, 5), (5,), (4, 1), (2, 3, 4, 5)])
@pytest.mark.parametrize("keep", [False, True])
def test_a_mask_given_at_run_time(shape, keep):
    n = Spell()
    x, mask, low = n.x(2, 3, 4, 5), n.x(*shape, kind="bool"), n.const(-9.0)
    graph = n.done(n.op("Softmax", n.op("Where", mask, *((x, low) if keep else (low, x))), axis=3))
    lifted = lifted_of(graph)
    assert [node.op for node in lifted.nodes] == [FILL, "Softmax"]
    assert lifted.nodes[0].attrs.get("value") == -9.0 and lifted.nodes[0].attrs.get("keep", 0) == keep
    check(graph, lambda x, m: np.where(m == keep, x, -9.0))


@pytest.mark.parametrize(
    ("queries", "keys", "diagonal"), [(4, 5, 0), (4, 6, 2), (6, 4, -2), (5, 5, 1), (5, 5, -1), (3, 3, 2), (3, 3, -3)]
)
@pytest.mark.parametrize("keep", [False, True])
def test_a_triangle(queries, keys, diagonal, keep):
    n = Spell()
    x, triangle = n.x(2, queries, keys), visible(queries, keys, diagonal)
    mask = n.const(triangle if keep else ~triangle, "bool")
    graph = n.done(n.op("Softmax", n.op("Where", mask, *((x, n.const(-7.0)) if keep else (n.const(-7.0), x))), axis=-1))
    lifted = lifted_of(graph)
    assert [node.op for node in lifted.nodes] == [CAUSAL, "Softmax"]
    check(graph, lambda x: np.where(triangle, x, -7.0))


def test_no_triangle():
    """One key too many, the upper half, a window: a mask like any other."""
    base = visible(4, 4)
    more = base.copy()
    more[1, 3] = True
    for mask in (more, ~base & ~np.eye(4, dtype=bool), base & visible(4, 4)[::-1, ::-1].T & ~visible(4, 4, -2)):
        n = Spell()
        graph = n.done(n.op("Softmax", n.op("Where", n.const(mask, "bool"), n.x(2, 4, 4), n.const(-7.0)), axis=-1))
        assert kinds(graph).get(FILL) == 1 and CAUSAL not in kinds(graph)
        check(graph, lambda x, mask=mask: np.where(mask, x, -7.0))


@pytest.mark.parametrize("spelling", ["and", "or", "mask first", "triangle first"])
def test_a_mask_and_a_triangle(spelling):
    n = Spell()
    x, mask, low, triangle = n.x(2, 3, 4, 4), n.x(2, 1, 1, 4, kind="bool"), n.const(-8.0), visible(4, 4)
    if spelling == "and":
        s = n.op("Where", n.op("And", n.const(triangle, "bool"), mask), x, low)
    elif spelling == "or":
        s = n.op("Where", n.op("Or", mask, n.const(~triangle, "bool")), low, x)
    else:
        steps = [lambda s: n.op("Where", mask, s, low), lambda s: n.op("Where", n.const(triangle, "bool"), s, low)]
        s = x
        for step in steps if spelling == "mask first" else steps[::-1]:
            s = step(s)
    graph = n.done(n.op("Softmax", s, axis=-1))
    assert [node.op for node in lifted_of(graph).nodes] == [FILL, CAUSAL, "Softmax"]
    hidden = spelling == "or"
    check(graph, lambda x, m: np.where((m != hidden) & triangle, x, -8.0))


def test_numbers_that_differ_keep_their_order():
    """The later of two masks decides what a score becomes that both replace."""
    n = Spell()
    s = n.op("Where", n.const(visible(4, 4), "bool"), n.x(2, 4, 4), n.const(-1.0))
    mask = n.x(4, kind="bool")
    graph = n.done(n.op("Softmax", n.op("Where", mask, s, n.const(-2.0)), axis=-1))
    assert [node.op for node in lifted_of(graph).nodes] == [CAUSAL, FILL, "Softmax"]
    check(graph, lambda x, m: np.where(m, np.where(visible(4, 4), x, -1.0), -2.0))


def test_an_added_triangle_stays():
    """-inf + NaN is NaN: what is hidden by addition is not replaced."""
    n = Spell()
    bias = np.where(visible(4, 4), 0.0, INF)
    graph = n.done(n.op("Softmax", n.add(n.x(2, 4, 4), n.const(bias)), axis=-1))
    assert kinds(graph) == {"Add": 1, "Softmax": 1}


@pytest.mark.parametrize("what", ["axis", "shared", "output", "number", "wider", "no softmax"])
def test_what_is_no_mask_of_scores(what):
    n = Spell()
    x, mask, low = n.x(2, 3, 4, 4), n.x(2, 1, 1, 4, kind="bool"), n.const(-8.0)
    if what == "wider":  # the mask makes more of the scores
        x = n.x(1, 3, 4, 4)
    if what == "number":  # not one number
        low = n.const(np.arange(4.0))
    s = n.op("Where", mask, x, low)
    y = n.op("Relu", s) if what == "no softmax" else n.op("Softmax", s, axis=2 if what == "axis" else 3)
    outputs = [y, *([s] if what == "output" else []), *([n.op("Relu", s)] if what == "shared" else [])]
    found = kinds(n.done(*outputs))
    assert FILL not in found and found["Where"] == 1


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("low", [0.0, 1.0])
def test_a_gradient_behind_a_mask(keep, low):
    """What autograd makes of a mask in front of a softmax; any other number is none."""
    n = Spell()
    g = n.op("fusionreg::SoftmaxGrad", n.x(2, 3, 4, 5), n.x(2, 3, 4, 5))
    mask, zero = n.x(2, 1, 1, 5, kind="bool"), n.const(low)
    graph = n.done(n.op("Where", mask, *((g, zero) if keep else (zero, g))))
    assert [node.op for node in lifted_of(graph).nodes][1] == ("Where" if low else FILL)
    assert low or lifted_of(graph).nodes[1].attrs.get("keep", 0) == keep


def test_attention_takes_its_own_mask():
    """What is a whole attention is found first."""
    n = Spell()
    q, k, v = n.x(2, 3, 4, 8), n.x(2, 3, 4, 8), n.x(2, 3, 4, 8)
    s = n.op("Where", n.const(visible(4, 4), "bool"), n.op("MatMul", q, k, transB=1), n.const(INF))
    assert kinds(n.done(n.op("MatMul", n.op("Softmax", s, axis=-1), v))) == {"Attention": 1}


def test_softmax_in_float32():
    n = Spell("bfloat16")
    wide = n.op("Softmax", n.op("Cast", n.x(3, 5), to="float32"), axis=-1)
    assert_lifted(n.done(n.op("Cast", wide, to="bfloat16")), {"Softmax": 1})
    n = Spell("bfloat16")
    wide = n.op("Softmax", n.op("Cast", n.x(3, 5), to="float32"), axis=-1)
    assert kinds(n.done(n.op("Cast", wide, to="float16"))) == {"Cast": 2, "Softmax": 1}
