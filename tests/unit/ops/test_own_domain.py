"""Domain ``fusionreg``: against SciPy, and gradients against torch's autograd, on NumPy and on torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import special

from fusionreg.core.ops import backend_of, complete, default_vocabulary, numpy_backend

OPS = default_vocabulary()
RNG = np.random.default_rng(3)
X = np.concatenate([RNG.standard_normal(200) * 3, [0.0, -0.0, 60.0, -60.0, 1e-9, 40.0, -1e4]])


def run(name: str, *arrays: np.ndarray, **attributes):
    """The meaning in float64, equal on both backends."""
    spec = OPS[name]
    attributes = complete(spec, attributes)
    with np.errstate(all="ignore"):
        got = spec.meaning(numpy_backend(), *arrays, **attributes)
    tensors = [torch.from_numpy(np.array(a)) for a in arrays]
    again = spec.meaning(backend_of(*tensors), *tensors, **attributes)
    pairs = zip(got, again, strict=True) if isinstance(got, tuple) else [(got, again)]
    for a, b in pairs:
        np.testing.assert_allclose(a, b.numpy(), rtol=1e-12, atol=1e-14)
    return got


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("Log1p", np.log1p),
        ("Expm1", np.expm1),
        ("Trunc", np.trunc),
        ("Log2", np.log2),
        ("Exp2", np.exp2),
        ("Rsqrt", lambda v: 1 / np.sqrt(v)),
        ("QuickGelu", lambda v: v * special.expit(1.702 * v)),
    ],
)
def test_point_functions(name: str, function) -> None:
    with np.errstate(all="ignore"):
        np.testing.assert_allclose(run(f"fusionreg::{name}", X), function(X), rtol=1e-12)


def test_atan2_and_hypot() -> None:
    a, b = X, X[::-1].copy()
    np.testing.assert_allclose(run("fusionreg::Atan2", a, b), np.arctan2(a, b), rtol=1e-13)
    np.testing.assert_allclose(run("fusionreg::Hypot", a, b), np.hypot(a, b), rtol=1e-13)


def autograd(function, *arrays: np.ndarray, dy: np.ndarray) -> list[np.ndarray]:
    tensors = [torch.from_numpy(np.array(a)).requires_grad_() for a in arrays]
    function(*tensors).backward(torch.from_numpy(dy))
    return [t.grad.numpy() for t in tensors]


F = torch.nn.functional
POINT = [
    ("ReluGrad", torch.relu, {}, False),
    ("LeakyReluGrad", lambda x: F.leaky_relu(x, 0.2), {"alpha": 0.2}, False),
    ("SigmoidGrad", torch.sigmoid, {}, True),
    ("TanhGrad", torch.tanh, {}, True),
    ("SwishGrad", F.silu, {}, False),
    ("SwishGrad", lambda x: x * torch.sigmoid(1.5 * x), {"alpha": 1.5}, False),
    ("GeluGrad", F.gelu, {}, False),
    ("GeluGrad", lambda x: F.gelu(x, approximate="tanh"), {"approximate": "tanh"}, False),
]


@pytest.mark.parametrize(("name", "function", "attributes", "of_result"), POINT)
def test_point_gradients(name: str, function, attributes, of_result: bool) -> None:
    dy = RNG.standard_normal(X.shape)
    saved = function(torch.from_numpy(X)).numpy() if of_result else X
    got = run(f"fusionreg::{name}", dy, saved, **attributes)
    np.testing.assert_allclose(got, autograd(function, X, dy=dy)[0], rtol=1e-9, atol=1e-12)


def test_relu_gradient_at_nan_and_zero_is_that_of_torch() -> None:
    x, dy = np.array([np.nan, np.inf, -np.inf, -0.0, 0.0, -1.0, 2.0]), np.arange(1.0, 8.0)
    np.testing.assert_array_equal(run("fusionreg::ReluGrad", dy, x), autograd(torch.relu, x, dy=dy)[0])


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_gradient_stays_finite_for_large_inputs(approximate: str) -> None:
    x = np.array([60.0, -60.0, 1e4, -1e4, 1e13, -1e13, 1e30, -1e30], np.float32)
    got = run_float32("fusionreg::GeluGrad", np.ones_like(x), x, approximate=approximate)
    np.testing.assert_array_equal(got, [1, 0] * 4)


def run_float32(name: str, *arrays: np.ndarray, **attributes):
    with np.errstate(all="ignore"):
        return OPS[name].meaning(numpy_backend(), *arrays, **complete(OPS[name], attributes))


@pytest.mark.parametrize(("name", "function"), [("SoftmaxGrad", torch.softmax), ("LogSoftmaxGrad", torch.log_softmax)])
@pytest.mark.parametrize("axis", [-1, 0])
def test_softmax_gradients(name: str, function, axis: int) -> None:
    x, dy = RNG.standard_normal((5, 7)), RNG.standard_normal((5, 7))
    y = function(torch.from_numpy(x), axis).numpy()
    want = autograd(lambda t: function(t, axis), x, dy=dy)[0]
    np.testing.assert_allclose(run(f"fusionreg::{name}", dy, y, axis=axis), want, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("ignored", [None, 2])
@pytest.mark.parametrize("shape", [(6, 5), (3, 5, 2)])
def test_cross_entropy_gradients(reduction: str, ignored: int | None, shape: tuple[int, ...]) -> None:
    """Classes lie along axis 1."""
    x, labels = RNG.standard_normal(shape), RNG.integers(0, 5, (shape[0], *shape[2:]))
    labels[0] = 2
    dy = RNG.standard_normal(labels.shape if reduction == "none" else ())
    index = -100 if ignored is None else ignored

    def loss(t):
        return torch.nn.functional.cross_entropy(t, torch.from_numpy(labels), reduction=reduction, ignore_index=index)

    attributes = {"reduction": reduction, "ignore_index": ignored}
    got = run("fusionreg::SoftmaxCrossEntropyGrad", dy, x, labels, **attributes)
    np.testing.assert_allclose(got, autograd(loss, x, dy=dy)[0], rtol=1e-10, atol=1e-13)
    outside = np.where(labels == 2, labels, 9)
    found = run("fusionreg::SoftmaxCrossEntropyGrad", dy, x, outside, **attributes)
    gone = np.broadcast_to(np.expand_dims(outside == 9, 1), shape)
    assert np.isnan(found[gone]).all() and np.isfinite(found[~gone]).all()


@pytest.mark.parametrize(
    "attributes",
    [{}, {"is_causal": 1}, {"left_window_size": 1, "right_window_size": 2}, {"left_window_size": 0, "softcap": 0.7},
     {"scale": 1.3, "is_causal": 1, "softcap": 2.0}],
    ids=str,
)
@pytest.mark.parametrize("masked", [False, True])
def test_attention_gradients(attributes, masked: bool) -> None:
    """From y and the log-sum-exp of scores; heads share keys, and where the window ends, or the mask says so, a query
    has none: its gradients are 0."""
    q, k, v, dy = (RNG.standard_normal((2, h, s, d)) for h, s, d in ((4, 6, 5), (2, 4, 5), (2, 4, 3), (4, 6, 3)))
    mask = (np.where(RNG.random((2, 1, 6, 4)) < 0.4, -np.inf, RNG.standard_normal((2, 1, 6, 4))),) if masked else ()
    if masked:
        mask[0][0, 0, 1] = -np.inf
    ahead = torch.arange(4)[None, :] - torch.arange(6)[:, None]
    left, right = attributes.get("left_window_size", 9), attributes.get("right_window_size", 9)
    seen = (ahead >= -left) & (ahead <= (0 if attributes.get("is_causal") else right))

    def scores(q, k):
        s = q @ k.repeat_interleave(2, 1).mT * attributes.get("scale", 5**-0.5)
        cap = attributes.get("softcap", 0.0)
        s = cap * torch.tanh(s / cap) if cap else s
        return (s + torch.from_numpy(mask[0]) if masked else s).masked_fill(~seen, -np.inf)

    def attention(q, k, v):
        s = scores(q, k)
        nothing = (s == -np.inf).all(-1, keepdim=True)
        return s.masked_fill(nothing, 0.0).softmax(-1).masked_fill(nothing, 0.0) @ v.repeat_interleave(2, 1)

    y, *_, lse = run("Attention", q, k, v, *mask, **attributes)
    tensors = [torch.from_numpy(x) for x in (q, k, v)]
    np.testing.assert_allclose(y, attention(*tensors), rtol=1e-10, atol=1e-13)
    np.testing.assert_allclose(lse, scores(*tensors[:2]).logsumexp(-1), rtol=1e-10)
    got = run("fusionreg::AttentionGrad", dy, q, k, v, y, lse, *mask, **attributes)
    for found, want in zip(got[:3], autograd(attention, q, k, v, dy=dy), strict=True):
        np.testing.assert_allclose(found, want, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("shape", [(2, 4, 6, 5), (1, 4, 6, 5), (2, 1, 1, 5), (6, 5), (1, 5)], ids=str)
@pytest.mark.parametrize("cap", [0.0, 1.5])
def test_gradients_of_a_position_bias(shape, cap: float) -> None:
    """Of what is added behind the cap, summed over the axes along which it is broadcast."""
    q, k, v, dy = (RNG.standard_normal((2, h, s, 3)) for h, s in ((4, 6), (2, 5), (2, 5), (4, 6)))
    bias = RNG.standard_normal(shape)

    def attention(bias):
        s = torch.from_numpy(q) @ torch.from_numpy(k).repeat_interleave(2, 1).mT * 3**-0.5
        s = (cap * torch.tanh(s / cap) if cap else s) + bias
        return s.softmax(-1) @ torch.from_numpy(v).repeat_interleave(2, 1)

    y, *_, lse = run("Attention", q, k, v, bias, softcap=cap)
    *_, got = run("fusionreg::AttentionGrad", dy, q, k, v, y, lse, bias, softcap=cap)
    np.testing.assert_allclose(got, autograd(attention, bias, dy=dy)[0], rtol=1e-9, atol=1e-12)


def test_gradients_read_no_mask_of_keys_that_are_hidden_by_position() -> None:
    q, k, v, dy = RNG.standard_normal((4, 1, 2, 3, 4))
    mask = np.triu(np.full((3, 3), np.nan), 1)
    y, *_, lse = run("Attention", q, k, v, is_causal=1)
    found = run("fusionreg::AttentionGrad", dy, q, k, v, y, lse, mask, is_causal=1)
    for got, want in zip(found, run("fusionreg::AttentionGrad", dy, q, k, v, y, lse, is_causal=1), strict=False):
        np.testing.assert_array_equal(got, want)


def test_a_boolean_mask_has_no_gradient() -> None:
    q, k, v, dy = RNG.standard_normal((4, 1, 2, 3, 4))
    mask = np.array([[True, False, True]])
    y, *_, lse = run("Attention", q, k, v, mask)
    assert len(run("fusionreg::AttentionGrad", dy, q, k, v, y, lse, mask)) == 3


@pytest.mark.parametrize("axis", [-1, 1])
def test_layer_normalization_gradient(axis: int) -> None:
    x, dy = RNG.standard_normal((3, 4, 6)), RNG.standard_normal((3, 4, 6))
    scale, bias = RNG.standard_normal(x.shape[axis:]), RNG.standard_normal(x.shape[axis:])
    _, mean, inverse = OPS["LayerNormalization"].meaning(
        numpy_backend(), x, scale, bias, axis=axis, epsilon=1e-5, stash_type="float32"
    )
    got = run("fusionreg::LayerNormalizationGrad", dy, x, scale, mean, inverse, axis=axis)
    want = autograd(lambda a, s, b: F.layer_norm(a, s.shape, s, b, 1e-5), x, scale, bias, dy=dy)
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-9, atol=1e-12)


def test_layer_normalization_gradient_takes_statistics_of_x_where_none_are_given() -> None:
    x, dy, scale = RNG.standard_normal((3, 4, 6)), RNG.standard_normal((3, 4, 6)), RNG.standard_normal(6)
    got = run("fusionreg::LayerNormalizationGrad", dy, x, scale, epsilon=1e-2)
    want = autograd(lambda a, s, b: F.layer_norm(a, (6,), s, b, 1e-2), x, scale, np.zeros(6), dy=dy)
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-9, atol=1e-12)


def test_an_infinity_spoils_of_an_rms_row_what_its_formula_spoils() -> None:
    got = run("RMSNormalization", np.array([[np.inf, 1.0, -2.0]]), np.ones(3), stash_type="float32")
    np.testing.assert_array_equal(got, [[np.nan, 0.0, -0.0]])


def test_rms_normalization_gradient() -> None:
    x, dy, scale = RNG.standard_normal((3, 4, 6)), RNG.standard_normal((3, 4, 6)), RNG.standard_normal(6)
    got = run("fusionreg::RMSNormalizationGrad", dy, x, scale)
    want = autograd(lambda a, s: F.rms_norm(a, (6,), s, 1e-5), x, scale, dy=dy)
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("shape", [(2, 6), (2, 6, 5), (1, 6, 2, 3, 2)], ids=str)
@pytest.mark.parametrize("groups", [1, 3, 6])
def test_group_normalization_gradient(shape: tuple[int, ...], groups: int) -> None:
    x, dy = RNG.standard_normal(shape), RNG.standard_normal(shape)
    scale, bias = RNG.standard_normal(6), RNG.standard_normal(6)
    got = run("fusionreg::GroupNormalizationGrad", dy, x, scale, num_groups=groups, epsilon=1e-3)
    want = autograd(lambda a, s, b: F.group_norm(a, groups, s, b, 1e-3), x, scale, bias, dy=dy)
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-9, atol=1e-12)


def test_products_by_row() -> None:
    """Indices outside have no matrix: 0, whatever stands in x; on NumPy no index counts from the end."""
    x, w = RNG.standard_normal((2, 3, 4)), RNG.standard_normal((5, 4, 6))
    x[1, 1] = np.nan
    ids = np.array([[0, -1, 4], [2, 5, 2**40]])
    wanted = np.zeros((2, 3, 6))
    for place in ((0, 0), (0, 2), (1, 0)):
        wanted[place] = x[place] @ w[ids[place]]
    np.testing.assert_allclose(run("fusionreg::RoutedMatMul", x, w, ids), wanted, rtol=1e-12)
    swapped = np.ascontiguousarray(w.swapaxes(1, 2))
    np.testing.assert_allclose(run("fusionreg::RoutedMatMul", x, swapped, ids, trans=1), wanted, rtol=1e-12)
    assert not run("fusionreg::RoutedMatMul", x, w[:0], ids).any()
    scales = RNG.standard_normal(5)
    wanted = np.where((ids >= 0) & (ids < 5), scales[np.where((ids >= 0) & (ids < 5), ids, 0)], 1.0)[..., None] * x
    np.testing.assert_allclose(run("fusionreg::RoutedScale", x, scales, ids), wanted, rtol=1e-12)
    assert run("fusionreg::RoutedScale", x, scales[:0], ids) is x or np.array_equal(
        run("fusionreg::RoutedScale", x, scales[:0], ids), x, equal_nan=True
    )


def test_ranks_of_matrices_and_of_rows() -> None:
    w, ranks = RNG.standard_normal((4, 3, 5)), np.array([0, 2, 9, -1])
    w[0], w[1, 2] = np.nan, np.inf
    wanted = w.copy()
    for e, rank in enumerate(ranks):
        wanted[e, max(rank, 0) :] = 0.0
    np.testing.assert_array_equal(run("fusionreg::LimitRank", w, ranks), wanted)
    swapped = np.ascontiguousarray(w.swapaxes(1, 2))
    np.testing.assert_array_equal(run("fusionreg::LimitRank", swapped, ranks, trans=1), wanted.swapaxes(1, 2))
    ids = np.array([1, -1, 2, 4, 0])
    x = np.where(np.arange(15).reshape(5, 3) == 5, np.nan, 1.0)
    limited = run("fusionreg::RoutedLimit", x, ranks, ids)
    np.testing.assert_array_equal(limited, [[1, 1, 0], [0, 0, 0], [1, 1, 1], [0, 0, 0], [0, 0, 0]])
    assert not run("fusionreg::RoutedLimit", x[:, :2], ranks[:0], ids).any()
