"""Operators of routed experts, against torch and against numbers of the literature."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fusionreg.core.errors import GraphError
from fusionreg.core.ir import Value
from fusionreg.core.ops import backend_of, complete, default_vocabulary, infer, numpy_backend, routing

OPS = default_vocabulary()
ROUTE = OPS["fusionreg::Route"]


def route(logits: np.ndarray, bias: np.ndarray | None = None, **attributes):
    """Weights and ids, equal on NumPy and torch."""
    attributes = complete(ROUTE, attributes)
    operands = [logits] if bias is None else [logits, bias]
    with np.errstate(invalid="ignore"):
        weights, ids = ROUTE.meaning(numpy_backend(), *operands, **attributes)
    tensors = [torch.from_numpy(a) for a in operands]
    again = ROUTE.meaning(backend_of(*tensors), *tensors, **attributes)
    np.testing.assert_allclose(weights, again[0].numpy(), rtol=1e-12)
    np.testing.assert_array_equal(ids, again[1].numpy())
    return weights, ids


@pytest.mark.parametrize(
    ("attributes", "wanted"),
    [
        ({}, [0.6439, 0.2369]),
        ({"renormalise": 1}, [0.7311, 0.2689]),
        ({"scoring": "softmax_after"}, [0.7311, 0.2689]),
        ({"scoring": "sigmoid"}, [0.8808, 0.7311]),
        ({"scoring": "sigmoid", "renormalise": 1, "scale": 2.5}, [2.5 * 0.54645, 2.5 * 0.45355]),
    ],
)
def test_what_the_chosen_experts_count(attributes, wanted) -> None:
    weights, ids = route(np.array([[2.0, 1.0, 0.0, -1.0]]), top_k=2, **attributes)
    np.testing.assert_allclose(weights, [wanted], atol=5e-5)
    np.testing.assert_array_equal(ids, [[0, 1]])


def test_softmax_routing_is_that_of_torch() -> None:
    logits = np.random.default_rng(0).standard_normal((50, 16))
    values, indices = torch.softmax(torch.from_numpy(logits), -1).topk(5)
    weights, ids = route(logits, top_k=5)
    np.testing.assert_array_equal(ids, indices.numpy())
    np.testing.assert_allclose(weights, values.numpy(), rtol=1e-12)
    values = values / values.sum(-1, keepdim=True)
    np.testing.assert_allclose(route(logits, top_k=5, renormalise=1)[0], values.numpy(), rtol=1e-12)


def test_a_bias_chooses_and_does_not_weigh() -> None:
    rng = np.random.default_rng(1)
    logits, bias = rng.standard_normal((30, 12)), rng.standard_normal(12)
    scores = torch.sigmoid(torch.from_numpy(logits))
    indices = (scores + torch.from_numpy(bias)).topk(3).indices
    chosen = scores.gather(1, indices)
    weights, ids = route(logits, bias, top_k=3, scoring="sigmoid", renormalise=1, scale=2.5)
    np.testing.assert_array_equal(ids, indices.numpy())
    np.testing.assert_allclose(weights, (2.5 * chosen / (chosen.sum(-1, keepdim=True) + 1e-20)).numpy(), rtol=1e-12)
    assert (route(logits, top_k=3, scoring="sigmoid")[1] != ids).any()


@pytest.mark.parametrize("leaders", [1, 2])
def test_experts_of_the_best_groups_alone(leaders) -> None:
    """As DeepSeek-V3 writes it."""
    rng = np.random.default_rng(2)
    logits, bias = rng.standard_normal((40, 12)), rng.standard_normal(12)
    scores = torch.sigmoid(torch.from_numpy(logits))
    ranked = scores + torch.from_numpy(bias)
    sums = ranked.view(-1, 4, 3).topk(leaders, dim=-1)[0].sum(dim=-1)
    mask = torch.zeros_like(sums).scatter_(1, sums.topk(2, dim=-1)[1], 1)
    mask = mask.unsqueeze(-1).expand(-1, 4, 3).reshape(-1, 12)
    indices = ranked.masked_fill(~mask.bool(), float("-inf")).topk(5).indices
    given = {"top_k": 5, "scoring": "sigmoid", "groups": 4, "kept_groups": 2, "leaders": leaders}
    weights, ids = route(logits, bias, **given)
    np.testing.assert_array_equal(ids, indices.numpy())
    np.testing.assert_allclose(weights, scores.gather(1, indices).numpy(), rtol=1e-12)
    assert (route(logits, bias, top_k=5, scoring="sigmoid")[1] != ids).any()
    sums = scores.view(-1, 4, 3).topk(leaders, dim=-1)[0].sum(dim=-1)
    best = route(logits, **given)[1] // 3  # without a bias
    assert (np.sort(best, axis=-1)[:, [0, -1]] == np.sort(sums.topk(2, dim=-1)[1].numpy(), axis=-1)).all()
    with pytest.raises(GraphError, match="7 of the best 2 groups"):
        infer(ROUTE, [Value("l", "float32", ("M", 12)), None], {**given, "top_k": 7})


def test_ties_and_special_logits_have_an_order() -> None:
    np.testing.assert_array_equal(route(np.zeros((1, 5)), top_k=3)[1], [[0, 1, 2]])
    np.testing.assert_array_equal(route(np.array([[-0.0, 0.0, -1.0]]), top_k=2)[1], [[0, 1]])
    weights, ids = route(np.array([[1.0, np.nan, 2.0, -np.inf]]), top_k=2)
    np.testing.assert_array_equal(ids, [[1, 2]])
    assert np.isnan(weights).all()
    weights, ids = route(np.array([[-np.inf, 3.0, -np.inf]]), top_k=2)
    np.testing.assert_array_equal(ids, [[1, 0]])
    np.testing.assert_array_equal(weights, [[1.0, 0.0]])


def test_more_choices_than_experts_are_refused() -> None:
    with pytest.raises(GraphError, match="top_k = 5 of 4 experts"):
        infer(ROUTE, [Value("l", "float32", ("M", 4)), None], {"top_k": 5})
    types = infer(ROUTE, [Value("l", "bfloat16", ("M", 4)), None], {"top_k": 3})
    assert types == [("float32", ("M", 3)), ("int64", ("M", 3))]


@pytest.mark.parametrize("gathered", [1 << 26, 0])
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_rows_times_several_matrices_each(gathered: int, library: str, monkeypatch) -> None:
    monkeypatch.setattr(routing, "GATHERED", gathered)
    rng = np.random.default_rng(2)
    x, w = rng.standard_normal((5, 7)), rng.standard_normal((4, 6, 7))
    ids = rng.integers(-1, 5, (5, 3))
    spec = OPS["fusionreg::RoutedMatMul"]
    given = [x[:, None], w, ids] if library == "numpy" else [torch.from_numpy(v) for v in (x[:, None], w, ids)]
    got = np.asarray(spec.meaning(backend_of(*given), *given, **complete(spec, {"trans": 1})))
    for m in range(5):
        for k in range(3):
            e = ids[m, k]
            np.testing.assert_allclose(got[m, k], w[e] @ x[m] if 0 <= e < 4 else 0.0 * got[m, k], rtol=1e-12)
    values = [Value("x", "float16", ("M", 1, 7)), Value("w", "float16", (4, 6, 7)), Value("i", "int64", ("M", 3))]
    assert infer(spec, values, {"trans": 1}) == [("float16", ("M", 3, 6))]


def test_weighted_sums_round_once() -> None:
    spec = OPS["fusionreg::RoutedSum"]
    x, weights = np.array([[[1.0, 2.0], [4.0, -8.0], [0.5, np.nan]]]), np.array([[0.5, 0.25, 2.0]])
    np.testing.assert_array_equal(spec.meaning(numpy_backend(), x, weights), [[2.5, np.nan]])
    x = np.concatenate([np.full((1, 1, 1), 2048.0), np.ones((1, 8, 1))], axis=1).astype(np.float32)
    assert spec.meaning(numpy_backend(), x, np.ones((1, 9), np.float32)) == 2056.0


def test_squared_relu() -> None:
    x = np.array([np.nan, -np.inf, np.inf, -2.0, -0.0, 3.0])
    got = OPS["fusionreg::SquaredRelu"].meaning(numpy_backend(), x)
    np.testing.assert_array_equal(got, [np.nan, 0.0, np.inf, 0.0, 0.0, 9.0])
