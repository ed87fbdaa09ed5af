"""Gradients of routed experts: the definitions against torch's autograd in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from fusionreg.core.frozen import FrozenDict
from fusionreg.core.ir import Graph, Node, Value
from fusionreg.core.ops import default_vocabulary, numpy_backend
from fusionreg.integrations.torch.peers import torch_module

OPS = default_vocabulary()
RNG = np.random.default_rng(5)


def run(name, *arrays, **attributes):
    """The operator's meaning on NumPy; where it is one of gradients also as torch code, which must agree."""
    op = OPS[f"fusionreg::{name}"]
    y = op.meaning(numpy_backend(), *arrays, **(dict(op.attributes) | attributes))
    if name == "Route" or not arrays[0].size:
        return y
    names = [f"a{i}" for i in range(len(arrays))]
    values = {n: Value(n, a.dtype.name, a.shape) for n, a in zip(names, arrays, strict=True)}
    node = Node("n", op.name, tuple(names), ("y",), FrozenDict(attributes))
    graph = Graph("g", tuple(names), ("y",), (node,), FrozenDict(values | {"y": Value("y", "float64", y.shape)}))
    found = torch_module(graph, OPS)(*(torch.from_numpy(a.copy()) for a in arrays))
    np.testing.assert_allclose(found, y, rtol=1e-5, atol=1e-6)
    return y


@pytest.mark.parametrize("renormalise", [0, 1])
@pytest.mark.parametrize("scoring", ["softmax", "softmax_after", "sigmoid"])
def test_of_routing(scoring: str, renormalise: int) -> None:
    logits, slope = RNG.standard_normal((6, 7)), RNG.standard_normal((6, 3))
    given = {"scoring": scoring, "renormalise": renormalise, "scale": 1.5}
    weights, ids = run("Route", logits, top_k=3, **given)
    leaf = torch.from_numpy(logits).requires_grad_()
    scores = leaf.sigmoid() if scoring == "sigmoid" else leaf.softmax(-1)
    chosen = torch.from_numpy(ids)
    found = leaf.gather(1, chosen).softmax(-1) if scoring == "softmax_after" else scores.gather(1, chosen)
    if renormalise:
        found = found / found.sum(-1, keepdim=True)
    found = 1.5 * found
    np.testing.assert_allclose(found.detach(), weights, rtol=1e-12)
    (wanted,) = torch.autograd.grad(found, leaf, torch.from_numpy(slope))
    np.testing.assert_allclose(run("RouteGrad", slope, logits, ids, **given), wanted, rtol=1e-9, atol=1e-15)


def test_of_matrices_of_which_one_has_no_row() -> None:
    x, w = RNG.standard_normal((4, 1, 3)), RNG.standard_normal((5, 6, 3))
    ids, slope = np.array([[0, 2], [2, 4], [1, 2], [4, 4]]), RNG.standard_normal((4, 2, 6))
    leaf = torch.from_numpy(w).requires_grad_()
    y = torch.einsum("mk,mjnk->mjn", torch.from_numpy(x[:, 0]), leaf[torch.from_numpy(ids)])
    (wanted,) = torch.autograd.grad(y, leaf, torch.from_numpy(slope))
    found = run("RoutedOuter", slope, x, ids, w)
    np.testing.assert_allclose(found, wanted, rtol=1e-12)
    assert not found[3].any()
    assert run("RoutedOuter", slope[:0], x[:0], ids[:0], w).shape == w.shape


def test_of_a_squared_relu() -> None:
    x, dy = np.linspace(-9, 9, 37), RNG.standard_normal(37)
    leaf = torch.from_numpy(x).requires_grad_()
    (wanted,) = torch.autograd.grad(F.relu(leaf) ** 2, leaf, torch.from_numpy(dy))
    np.testing.assert_allclose(run("SquaredReluGrad", dy, x), wanted, rtol=1e-12)
    assert np.isnan(run("SquaredReluGrad", dy[:1], np.array([np.nan]))).all()
