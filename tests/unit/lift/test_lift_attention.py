"""Attention: every spelling of scale, mask and softmax precision, and masks that must stay outside."""

from __future__ import annotations

import numpy as np
import pytest
from lifting import Spell, assert_lifted, assert_not_lifted, kinds, lifted_of, unlifted_of

B, H, S, T, D = 2, 3, 4, 5, 8
ROOT = D**-0.5

SCORES = {
    "plain": (lambda n, q, k: n.op("MatMul", q, k, transB=1), 1.0),
    "·c": (lambda n, q, k: n.mul(n.op("MatMul", q, k, transB=1), ROOT), None),
    "/c": (lambda n, q, k: n.div(n.op("MatMul", q, k, transB=1), 1 / ROOT), None),
    "/3": (lambda n, q, k: n.div(n.op("MatMul", q, k, transB=1), 3.0), 1 / 3),
    "q·c": (lambda n, q, k: n.op("MatMul", n.mul(q, ROOT), k, transB=1), None),
    "q/c": (lambda n, q, k: n.op("MatMul", n.div(q, 1 / ROOT), k, transB=1), None),
    "k·c": (lambda n, q, k: n.op("MatMul", q, n.mul(k, ROOT), transB=1), None),
    "√c both": (lambda n, q, k: n.op("MatMul", n.mul(q, ROOT**0.5), n.mul(k, ROOT**0.5), transB=1), None),
}


def operands(n, shared=False):
    return n.x(B, H, S, D), n.x(B, 1 if shared else H, T, D), n.x(B, H, T, D)


def attend(n, scores, v, cast=False):
    p = n.op("Softmax", n.op("Cast", scores, to="float32") if cast else scores)
    return n.op("MatMul", n.op("Cast", p, to=n.kind) if cast else p, v)


@pytest.mark.parametrize("kind", ["float16", "float32"])
@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("cast", [False, True])
def test_scales_and_precision(scores, kind, cast):
    n = Spell(kind)
    q, k, v = operands(n)
    spell, scale = SCORES[scores]
    result = assert_lifted(n.done(attend(n, spell(n, q, k), v, cast and kind == "float16")), {"Attention": 1}, 1e-5)
    attrs = result.nodes[0].attrs
    assert attrs.get("scale") == (None if scale is None else pytest.approx(scale, rel=1e-3))
    assert attrs.get("softmax_precision", "") == ("float32" if cast and kind == "float16" else "")


def test_heads_split_by_transposes():
    """[B S H D] inputs: kᵀ comes as one Transpose (0, 2, 3, 1); it becomes k's own, and no more are made."""
    n = Spell()
    q, k, v = (n.op("Transpose", n.x(B, s, H, D), perm=(0, 2, 1, 3)) for s in (S, T, T))
    kt = n.op("Transpose", n.x(B, T, H, D), perm=(0, 2, 3, 1))
    del k
    y = attend(n, n.mul(n.op("MatMul", q, kt), ROOT), v)
    assert_lifted(n.done(n.op("Transpose", y, perm=(0, 2, 1, 3))), {"Attention": 1, "Transpose": 4}, 1e-6)


@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("mask", [None, (S, T), (1, T)])
@pytest.mark.parametrize("cast", [False, True])
def test_heads_in_the_batch_are_batches_of_one_head(scores, mask, cast):
    """As torch.bmm and torch.baddbmm take them."""
    n = Spell("float16" if cast else "float32")
    q, k, v = n.x(B, S, D), n.x(B, T, D), n.x(B, T, D)
    s = SCORES[scores][0](n, q, k)
    if mask is not None:
        s = n.add(s, n.const(np.where(np.arange(T) < 3, 0.0, -np.inf) + np.zeros(mask)))
    assert_lifted(n.done(attend(n, s, v, cast)), {"Unsqueeze": 3, "Attention": 1, "Squeeze": 1}, 1e-5)


@pytest.mark.parametrize("shape", [(S, D), (B, S, D)])
def test_scores_of_two_axes_and_a_mask_for_each_batch_stay(shape):
    n = Spell()
    q, k, v = (n.x(*shape[:-2], e, D) for e in (S, T, T))
    s = n.op("MatMul", q, k, transB=1)
    if len(shape) == 3:  # an operator with heads would take it for a mask of heads
        s = n.add(s, n.const(np.ones((B, S, T))))
    assert_not_lifted(n.done(attend(n, s, v)), "Attention")


def test_transposed_key_that_is_an_input_stays():
    n = Spell()
    q, kt, v = n.x(B, H, S, D), n.x(B, H, D, T), n.x(B, H, T, D)
    assert_not_lifted(n.done(attend(n, n.op("MatMul", q, kt), v)), "Attention")


@pytest.mark.parametrize("shape", [(S, T), (1, T), (1, 1, S, T), (B, 1, 1, T), (B, H, S, T)])
@pytest.mark.parametrize("swap", [False, True])
def test_constant_masks(shape, swap):
    n = Spell()
    q, k, v = operands(n)
    values = np.where(np.arange(T) < 3, 0.0, -np.inf) + np.zeros(shape)
    s, mask = n.mul(n.op("MatMul", q, k, transB=1), ROOT), n.const(values)
    graph = n.done(attend(n, n.add(mask, s) if swap else n.add(s, mask), v))
    result = assert_lifted(graph, {"Attention": 1}, 1e-6)
    assert result.nodes[0].inputs[3] == mask  # torch-spyre#4526: the mask is an input of the operator


def test_padding_mask_of_finite_numbers():
    """(1 − m) · lowest, m an integer input: no row becomes −∞; padded values do not show (torch-spyre#4526)."""
    n = Spell()
    q, k, v = operands(n)
    m = n.op("Unsqueeze", n.input("m", "int64", (B, T)), n.ints(1, 2))
    mask = n.mul(n.sub(1.0, n.op("Cast", m, to="float32")), float(np.finfo("f").min))
    graph = n.done(attend(n, n.add(n.mul(n.op("MatMul", q, k, transB=1), ROOT), mask), v))
    assert kinds(graph)["Attention"] == 1
    rng = np.random.default_rng(0)
    inputs = {name: rng.normal(size=(B, H, s, D)).astype("f") for name, s in ((q, S), (k, T), (v, T))}
    inputs[v][:, :, 3:] = 1e3
    inputs["m"] = np.array([[1, 1, 1, 0, 0]] * B)
    found = lifted_of(graph, inputs)
    np.testing.assert_allclose(found, unlifted_of(graph, inputs), rtol=1e-5, atol=1e-6)
    assert np.abs(found).max() < 10
    inputs["m"][:] = 1
    assert np.abs(lifted_of(graph, inputs)).max() > 100


@pytest.mark.parametrize("case", ["input", "row", "nan", "one a row", "too wide", "vector"])
def test_masks_that_stay_outside(case):
    """A mask that could forbid a whole row (NaN in the chain, 0 in the operator), or that is no mask of keys."""
    n = Spell()
    q, k, v = operands(n)
    values = {
        "input": None,
        "row": np.where(np.eye(S, T) > 2, 0.0, -np.inf),
        "nan": np.full((S, T), np.nan),
        "one a row": np.ones((S, 1)),
        "too wide": np.zeros((2, B, H, S, T)),
        "vector": np.ones(T),
    }[case]
    mask = n.x(S, T) if values is None else n.const(values)
    graph = n.done(attend(n, n.add(n.mul(n.op("MatMul", q, k, transB=1), ROOT), mask), v))
    assert "Attention" not in kinds(graph)


@pytest.mark.parametrize("low", [-np.inf, float(np.finfo("f").min), -1e4])
def test_where_with_a_causal_constant(low):
    """pytorch#119760: where(allowed, scores, lowest). A fill of −10⁴ is a number that a score can reach: it stays."""
    n = Spell()
    q, k, v = n.x(B, H, S, D), n.x(B, H, S, D), n.x(B, H, S, D)
    allowed = n.const(np.tril(np.ones((1, 1, S, S), bool)), "bool")
    s = n.op("Where", allowed, n.mul(n.op("MatMul", q, k, transB=1), ROOT), n.const(low))
    graph = n.done(attend(n, s, v))
    if low == -1e4:
        assert_not_lifted(graph, "Attention")
    else:
        assert_lifted(graph, {"Attention": 1}, 1e-6)


@pytest.mark.parametrize(
    "case", ["axis", "runtime scale of heads", "per head", "negative", "v transposed", "shared head"]
)
def test_refusals(case):
    n = Spell()
    q, k, v = operands(n, case == "shared head")
    scale = {
        "runtime scale of heads": lambda: n.x(H, 1, 1),
        "per head": lambda: n.const(np.arange(1.0, 1.0 + H).reshape(H, 1, 1)),
        "negative": lambda: -ROOT,
    }
    s = n.mul(n.op("MatMul", q, k, transB=1), scale.get(case, lambda: ROOT)())
    p = n.op("Softmax", s, axis=2 if case == "axis" else -1)
    if case == "v transposed":
        y = n.op("MatMul", p, n.x(B, H, D, T), transB=1)
    else:
        y = n.op("MatMul", p, v)
    assert_not_lifted(n.done(y), "Attention")


@pytest.mark.parametrize(("cap", "times"), [(49.0, 49.0), (4.0, 4.0), (3.0, 2.0), (4.0, 2.0), (-3.0, -3.0)])
def test_scores_below_a_number(cap, times):
    """Gemma's, in front of the mask; with one number alone it is that of the operator."""
    n = Spell()
    q, k, v = operands(n)
    s = n.mul(n.op("Tanh", n.div(n.mul(n.op("MatMul", q, k, transB=1), ROOT), cap)), times)
    graph = n.done(attend(n, n.add(s, n.const(np.where(np.arange(T) < 3, 0.0, -np.inf) + np.zeros((S, T)))), v))
    if cap == times > 0:
        assert assert_lifted(graph, {"Attention": 1}, 1e-5).nodes[0].attrs["softcap"] == cap
    else:
        assert_not_lifted(graph, "Attention")


@pytest.mark.parametrize("by", ["Mul", "Div"])
@pytest.mark.parametrize("shape", [(), (1, 1, 1)])
@pytest.mark.parametrize("masked", [False, True])
def test_a_scale_that_is_computed_is_that_of_q(by, shape, masked):
    """pytorch#191203, pytorch#194444: a tensor of one element, of any sign."""
    n = Spell()
    q, k, v = operands(n)
    s = n.op(by, n.op("MatMul", q, k, transB=1), n.x(*shape))
    if masked:
        s = n.add(s, n.const(np.where(np.arange(T) < 3, 0.0, -np.inf)[None]))
    result = assert_lifted(n.done(attend(n, s, v)), {by: 1, "Attention": 1}, 1e-5)
    assert result.nodes[-1].attrs["scale"] == 1.0


@pytest.mark.parametrize("before", [None, 0.25])
def test_a_number_in_front_of_attention_joins_its_scale(before):
    n = Spell()
    q, k, v = operands(n)
    given = {} if before is None else {"scale": before}
    result = assert_lifted(n.done(n.op("Attention", n.mul(q, 0.5), k, v, **given)), {"Attention": 1}, 1e-5)
    assert result.nodes[0].attrs["scale"] == pytest.approx(0.5 * (before or ROOT))


@pytest.mark.parametrize("expose", ["scores", "chances"])
def test_exposed_interior_stays(expose):
    n = Spell()
    q, k, v = operands(n)
    s = n.op("MatMul", q, k, transB=1)
    p = n.op("Softmax", s)
    assert_not_lifted(n.done(n.op("MatMul", p, v), s if expose == "scores" else p), "Attention")


def test_symbolic_batch_and_length():
    n = Spell()
    q, k, v = n.x("B", H, "S", D), n.x("B", H, "S", D), n.x("B", H, "S", D)
    y = attend(n, n.mul(n.op("MatMul", q, k, transB=1), ROOT), v)
    assert_lifted(n.done(y), {"Attention": 1}, 1e-6, B=2, S=5)
