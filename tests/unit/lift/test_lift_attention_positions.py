"""Masks that are triangles, rows that the chain itself makes 0, and heads of k and v that are repeated."""

from __future__ import annotations

import numpy as np
import pytest
from lifting import Spell, assert_lifted, kinds, lifted_of, unlifted_of

B, H, S, T, D = 2, 4, 5, 7, 8
LOWEST = float(np.finfo("f").min)


def scores(n, q, k):
    return n.mul(n.op("MatMul", q, k, transB=1), D**-0.5)


def masked(n, mask, rows=S, keys=T, hides=None):
    """``hides``: what torch's masked_fill puts in where ``mask`` is false, as it has it: where its own is true."""
    q, k, v = n.x(B, H, rows, D), n.x(B, H, keys, D), n.x(B, H, keys, D)
    if hides is not None:
        s = n.op("Where", n.const(~mask, "bool"), n.const(hides), scores(n, q, k))
    elif mask.dtype == bool:
        s = n.op("Where", n.const(mask, "bool"), scores(n, q, k), n.const(-np.inf))
    else:
        s = n.add(scores(n, q, k), n.const(mask))
    return n.done(n.op("MatMul", n.op("Softmax", s), v))


@pytest.mark.parametrize("low", [None, -np.inf, LOWEST])
@pytest.mark.parametrize(("keys", "beyond"), [(T, 0), (T, T - S), (S, 0), (3, 0), (T, T - 1), (T, 1)])
@pytest.mark.parametrize("leading", [(), (1, 1), (B, H)])
def test_triangles(low, keys, beyond, leading):
    allowed = np.broadcast_to(np.tri(S, keys, beyond, dtype=bool), (*leading, S, keys))
    mask = allowed if low is None else np.where(allowed, 0.0, low)
    node = assert_lifted(masked(Spell(), mask, keys=keys), {"Attention": 1}).nodes[0]
    assert len(node.inputs) == 3
    assert node.attrs.get("is_causal", 0) == (beyond == 0)
    assert node.attrs.get("right_window_size", -1) == (-1 if beyond in (0, keys - 1) else beyond)


@pytest.mark.parametrize("low", [-np.inf, LOWEST])
@pytest.mark.parametrize(("keys", "beyond"), [(T, 0), (T, T - S), (3, 0)])
def test_triangles_that_hide(low, keys, beyond):
    graph = masked(Spell(), np.tri(S, keys, beyond, dtype=bool), keys=keys, hides=low)
    node = assert_lifted(graph, {"Attention": 1}).nodes[0]
    assert len(node.inputs) == 3 and node.attrs.get("is_causal", 0) == (beyond == 0)


@pytest.mark.parametrize(("low", "beyond"), [(-1.0, 0), (-np.inf, -1), (0.0, 0)])
def test_what_hides_otherwise_stays(low, beyond):
    """A number that counts beside scores, and a first row without a key: NaN here, 0 in Attention."""
    assert "Attention" not in kinds(masked(Spell(), np.tri(S, T, beyond, dtype=bool), hides=low))


def band(keys, left=2, right=1):
    ahead = np.arange(keys) - np.arange(S)[:, None]
    return (ahead >= -left) & (ahead <= right)


@pytest.mark.parametrize("low", [None, -np.inf, LOWEST])
@pytest.mark.parametrize(("left", "right", "keys"), [(2, 0, T), (0, 0, S), (2, 1, T), (1, 2, 4), (0, T, T), (3, T, 4)])
def test_bands_are_windows(low, left, right, keys):
    """A sliding window; also where the last queries see no key but the last."""
    allowed = band(keys, left, right)
    mask = allowed if low is None else np.where(allowed, 0.0, low)
    node = assert_lifted(masked(Spell(), mask, keys=keys), {"Attention": 1}).nodes[0]
    assert len(node.inputs) == 3 and node.attrs["left_window_size"] == left
    assert node.attrs.get("is_causal", 0) == (right == 0)
    assert node.attrs.get("right_window_size", -1) == (right if 0 < right < keys - 1 else -1)


@pytest.mark.parametrize("case", ["hole", "more", "per head", "finite", "one row", "padding", "ahead"])
def test_what_is_no_triangle_stays_a_mask(case):
    allowed = np.tri(S, T, 0, dtype=bool)
    if case == "hole":
        allowed[3, 1] = False
    if case == "more":
        allowed[1, 5] = True
    mask = {
        "ahead": band(T)[:, ::-1],  # the first query sees no first key
        "per head": np.stack([allowed] * (H - 1) + [np.tri(S, T, 1, dtype=bool)]),
        "finite": np.where(allowed, 0.0, -1e4),  # a number that a score can reach
        "one row": allowed[-1:],
        "padding": np.where(np.arange(T) < 4, 0.0, -np.inf) + np.zeros((S, 1)),
    }.get(case, allowed)
    node = assert_lifted(masked(Spell(), mask), {"Attention": 1}).nodes[0]
    assert len(node.inputs) == 4 and not node.attrs.get("is_causal")


def test_a_mask_for_all_keys_alike_stays():
    """[S 1], as torch's attention broadcasts it: no triangle of one key."""
    n = Spell()
    q, k, v = n.x(B, H, S, D), n.x(B, H, T, D), n.x(B, H, T, D)
    node = n.done(n.op("Attention", q, k, v, n.const(np.ones((S, 1), bool), "bool"))).nodes[-1]
    assert len(node.inputs) == 4 and not node.attrs.get("is_causal")


def guarded(n, q, k, v, mask, low=-np.inf, floor=-np.inf, zero=0.0):
    s = scores(n, q, k)
    s = n.op("Where", mask, s, n.const(low)) if low is not None else n.add(s, mask)
    dead = n.op("Equal", n.op("ReduceMax", s, n.ints(-1), keepdims=1), n.const(floor))
    return n.op("MatMul", n.op("Where", dead, n.const(zero), n.op("Softmax", s)), v)


@pytest.mark.parametrize("shape", [(S, T), (B, 1, S, T), (B, 1, 1, T)])
@pytest.mark.parametrize("kind", ["bool", "float32"])
def test_rows_that_the_chain_makes_0(shape, kind):
    """pytorch#103963: a mask of the caller may forbid a whole row."""
    n = Spell()
    q, k, v, mask = n.x(B, H, S, D), n.x(B, H, T, D), n.x(B, H, T, D), n.x(*shape, kind=kind)
    graph = n.done(guarded(n, q, k, v, mask, -np.inf if kind == "bool" else None))
    assert kinds(graph) == {"Attention": 1}
    rng = np.random.default_rng(0)
    inputs = {name: rng.standard_normal(graph.values[name].shape).astype("f") for name in (q, k, v)}
    allowed = rng.random(shape) < 0.5
    allowed[..., 0, :] = False
    inputs[mask] = allowed if kind == "bool" else np.where(allowed, 0.25, -np.inf).astype("f")
    found = lifted_of(graph, inputs)
    np.testing.assert_allclose(found, unlifted_of(graph, inputs), rtol=1e-5, atol=1e-6)
    assert (found[:, :, 0] == 0).all() and np.isfinite(found).all()


@pytest.mark.parametrize("shape", [None, (S, T), (B, 1, 1, T)])
def test_weights_that_are_cleared(shape):
    """torch's exporter: rows that a mask forbids are NaN, and become 0."""
    n = Spell()
    q, k, v = n.x(B, H, S, D), n.x(B, H, T, D), n.x(B, H, T, D)
    mask = shape and n.x(*shape)
    p = n.op("Softmax", n.add(scores(n, q, k), mask) if mask else scores(n, q, k))
    graph = n.done(n.op("MatMul", n.op("Where", n.op("IsNaN", p), n.const(0.0), p), v))
    assert kinds(graph) == {"Attention": 1}
    rng = np.random.default_rng(0)
    inputs = {name: rng.standard_normal(graph.values[name].shape).astype("f") for name in (q, k, v)}
    if mask:
        allowed = rng.random(shape) < 0.5
        allowed[..., 0, :] = False
        inputs[mask] = np.where(allowed, 0.25, -np.inf).astype("f")
    found = lifted_of(graph, inputs)
    np.testing.assert_allclose(found, unlifted_of(graph, inputs), rtol=1e-5, atol=1e-6)
    assert np.isfinite(found).all() and (mask is None or (found[:, :, 0] == 0).all())


def test_weights_that_are_cleared_to_another_number_stay():
    n = Spell()
    q, k, v = n.x(B, H, S, D), n.x(B, H, T, D), n.x(B, H, T, D)
    p = n.op("Softmax", scores(n, q, k))
    graph = n.done(n.op("MatMul", n.op("Where", n.op("IsNaN", p), n.const(0.5), p), v))
    assert "Attention" not in kinds(graph)


@pytest.mark.parametrize("changed", [{"low": LOWEST}, {"floor": 0.0}, {"zero": 1.0}])
def test_other_guards_stay(changed):
    n = Spell()
    q, k, v, mask = n.x(B, H, S, D), n.x(B, H, T, D), n.x(B, H, T, D), n.x(S, T, kind="bool")
    assert "Attention" not in kinds(n.done(guarded(n, q, k, v, mask, **changed)))


def repeated(n, x, groups, times, axis=2):
    shape = [B, groups, T, D]
    shape.insert(axis, times)
    wide = n.op("Expand", n.op("Unsqueeze", x, n.ints(axis)), n.ints(*shape))
    return n.op("Reshape", wide, n.ints(B, groups * times, T, D))


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("mask", [False, True])
def test_heads_that_are_repeated_are_shared(groups, mask):
    n = Spell()
    q, k, v = n.x(B, H, S, D), n.x(B, groups, T, D), n.x(B, groups, T, D)
    s = scores(n, q, repeated(n, k, groups, H // groups))
    s = n.add(s, n.const(np.arange(T) / 4 + np.zeros((B, 1, 1, T)))) if mask else s
    graph = n.done(n.op("MatMul", n.op("Softmax", s), repeated(n, v, groups, H // groups)))
    node = assert_lifted(graph, {"Attention": 1}).nodes[0]
    assert list(node.inputs[:3]) == [q, k, v]


@pytest.mark.parametrize("case", ["tiled", "one of them"])
def test_heads_in_another_order_stay(case):
    """Repeated as a whole (0 1 0 1), and not each (0 0 1 1): head h of q has another one of k."""
    n = Spell()
    q, k, v = n.x(B, H, S, D), n.x(B, 2, T, D), n.x(B, H if case == "one of them" else 2, T, D)
    wide = repeated(n, k, 2, 2, 1 if case == "tiled" else 2)
    values = v if case == "one of them" else repeated(n, v, 2, 2, 1)
    graph = n.done(n.op("MatMul", n.op("Softmax", scores(n, q, wide)), values))
    found = kinds(graph)
    assert found["Attention"] == 1 and found["Expand"] == (1 if case == "one of them" else 2)
