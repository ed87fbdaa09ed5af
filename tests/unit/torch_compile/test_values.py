"""Fused models give what eager gives, forward and backward, with the rest run by either inner backend."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from .conftest import fused, same


class Block(nn.Module):
    """Linear, GELU, LayerNorm, an in-place addition, GroupNorm and SiLU on a view, and a split."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.linear, self.norm, self.groups = nn.Linear(32, 32), nn.LayerNorm(32), nn.GroupNorm(2, 4)
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(F.dropout(F.gelu(self.linear(x)), self.dropout, self.training))
        h = F.relu(h, inplace=True) * 2.0
        h += x
        a, b = F.silu(self.groups(h.view(-1, 4, 8))).chunk(2, 1)
        return a * b


@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_inference(compiled: Any, reports: Any, inner: str) -> None:
    torch.manual_seed(0)
    model, x = Block().eval(), torch.randn(6, 32)
    with torch.no_grad():
        same(compiled(model, inner=inner)(x), model(x))
    names = fused(reports)
    assert "norm.groupnorm_swish" in names
    assert any(n.startswith("norm.layernorm") for n in names), "LayerNorm, perhaps with what stands around it"


@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_training(compiled: Any, reports: Any, inner: str) -> None:
    torch.manual_seed(0)
    model, x = Block(), torch.randn(6, 32)
    reference = copy.deepcopy(model)
    mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    got, expected = compiled(model, inner=inner)(mine), reference(other)
    same(got, expected)
    weight = torch.linspace(-1, 2, got.numel()).view_as(got)
    (got * weight).sum().backward()
    (expected * weight).sum().backward()
    same(mine.grad, other.grad)
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert p.grad is not None, name
        same(p.grad, q.grad)
    sites = [s for r in reports if r.stage == "captured" for s in r.fused]
    assert all(s.differentiable and s.backward for s in sites)
    named = {s.fusion: s.backward for s in sites}
    assert named["norm.layernorm"] == "norm.layernorm_backward"
    assert named["norm.groupnorm_swish"] == "norm.groupnorm_swish_backward"


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.BatchNorm2d(4), nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.first(x), inplace=True)
        return F.relu(self.second(y) + x)


@pytest.mark.parametrize("training", [True, False])
def test_batch_normalisation(compiled: Any, reports: Any, training: bool) -> None:
    """Running statistics and the count of batches move as eager moves them, and gradients flow."""
    torch.manual_seed(1)
    model = Residual().train(training)
    reference = copy.deepcopy(model)
    step = compiled(model)
    for _ in range(2):
        x = torch.randn(3, 4, 5, 5)
        mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
        got, expected = step(mine), reference(other)
        same(got, expected)
        got.square().sum().backward()
        expected.square().sum().backward()
        same(mine.grad, other.grad, 2e-4)
    for (name, buffer), wanted in zip(model.named_buffers(), reference.buffers(), strict=True):
        assert torch.allclose(buffer, wanted, atol=1e-6), name
    if training:
        assert fused(reports) == ["norm.batchnorm_relu", "norm.batchnorm_add_relu"]


def test_unfused_batch_normalisation_keeps_its_place(compiled: Any) -> None:
    """Without a Relu behind it nothing fuses it, but its statistics still move once."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.BatchNorm1d(8), nn.LayerNorm(8))
    reference = copy.deepcopy(model)
    x = torch.randn(6, 8)
    got, expected = compiled(model)(x), reference(x)
    same(got, expected)
    got.sin().sum().backward()
    expected.sin().sum().backward()
    same(model[0].weight.grad, reference[0].weight.grad, 1e-4)
    assert torch.allclose(model[0].running_mean, reference[0].running_mean)
    assert torch.allclose(model[0].running_var, reference[0].running_var)
    assert int(model[0].num_batches_tracked) == 1


def _calls() -> list[tuple[str, Callable[..., Any], tuple[torch.Tensor, ...]]]:
    x, y = torch.randn(6, 16), torch.randn(6, 16)
    w = torch.randn(16)
    return [
        ("two results of one site", lambda a, b, c: (a + b, F.layer_norm(a + b, (16,), c)), (x, y, w)),
        ("a result that is an argument", lambda a, b, c: (a, F.layer_norm(a, (16,), c, c) * b), (x, y, w)),
        ("the same value twice", lambda a, b, c: [F.layer_norm(a, (16,), c, c)] * 2, (x, y, w)),
        ("a constant tensor", lambda a, b, c: F.layer_norm(a, (16,), c, c) + torch.tensor([1.0, 2.0] * 8), (x, y, w)),
        ("no tensor result", lambda a, b, c: (F.layer_norm(a, (16,), c, c), a.shape[0], None, 2.5), (x, y, w)),
        ("transposed", lambda a, b, c: F.layer_norm(a.t().contiguous().t(), (16,), c, c).t(), (x, y, w)),
        ("a strided slice", lambda a, b, c: F.layer_norm(a[::2], (16,), c, c) + b[1::2], (x, y, w)),
        ("a reshape behind", lambda a, b, c: F.layer_norm(a, (16,), c, c).reshape(3, 2, 16).flatten(1), (x, y, w)),
    ]


@pytest.mark.parametrize("case", _calls(), ids=lambda c: c[0])
def test_shapes_of_calls(compiled: Any, reports: Any, case: Any) -> None:
    _, f, given = case
    got, expected = compiled(f)(*given), f(*given)
    leaves = torch.utils._pytree.tree_leaves
    for mine, other in zip(leaves(got), leaves(expected), strict=True):
        if isinstance(other, torch.Tensor):
            same(mine, other)
            assert mine.stride() == other.stride()
        else:
            assert mine == other
    assert any(n.startswith("norm.layernorm") for n in fused(reports))
