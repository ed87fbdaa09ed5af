"""Attention in training: forward and backward fused, and no value of queries by keys anywhere."""

from __future__ import annotations

import math
from itertools import pairwise

import attention as kit
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fusionreg.torch
from fusionreg.api import Registry

from .conftest import fused, same

QUERIES, KEYS = 24, 24
ONE = {"left_window_size": 0, "right_window_size": 0}  # a query sees the key at its own place


@pytest.fixture(scope="module")
def registry():
    return Registry(kit.awake("plain"), device="sim")


class Block(nn.Module):
    """Grouped heads behind one projection, causal."""

    def __init__(self, width: int, heads: int, groups: int) -> None:
        super().__init__()
        self.heads, self.groups, self.head = heads, groups, width // heads
        self.norm = nn.LayerNorm(width)
        self.project = nn.Linear(width, (heads + 2 * groups) * self.head)
        self.merge = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, s, width = x.shape
        parts = self.project(self.norm(x)).view(n, s, -1, self.head).transpose(1, 2)
        q, k, v = parts.split((self.heads, self.groups, self.groups), dim=1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return x + self.merge(y.transpose(1, 2).reshape(n, s, width))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_block_trains(dtype, compiled, reports):
    torch.manual_seed(0)
    kernel = "plain" if dtype is torch.float32 else "tensor_core"
    registry = Registry(kit.awake(kernel), device="sim")
    block, (x, way) = Block(64, 4, 2).to(dtype), torch.randn(2, 2, QUERIES, 64).to(dtype)
    exact = Block(64, 4, 2).double()
    exact.load_state_dict(block.state_dict())
    step, saved = compiled(block, registry=registry), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        got = step(x)
    (got * way).sum().backward()
    want = exact(x.double())
    (want * way.double()).sum().backward()
    tolerance = 2e-5 if dtype is torch.float32 else 3e-2
    same(got.double(), want, tolerance)
    for mine, other in zip(block.parameters(), exact.parameters(), strict=True):
        same(mine.grad.double(), other.grad, tolerance)
    assert fused(reports) == ["attention.sdpa_training"]
    assert fused(reports, "backward") == ["attention.sdpa_backward"]
    assert {f"attention.sdpa_{n}/{kernel}": 1 for n in ("training", "backward")} == dict(registry.runtime.kernels_used)
    assert not any(math.prod(t.shape[-2:]) == QUERIES * KEYS for t in saved)
    assert sum(t.shape == (2, 4, QUERIES) and t.dtype == torch.float32 for t in saved) >= 1  # of each query


def written_out(q, k, v):
    seen = torch.ones(QUERIES, KEYS, dtype=torch.bool).tril()
    scores = torch.where(seen, q @ k.transpose(-1, -2) / 4.0, torch.finfo(q.dtype).min)
    return scores.softmax(-1) @ v


def filled(q, k, v):
    scores = q @ k.transpose(-1, -2) / 4.0
    return scores.masked_fill(torch.triu(torch.ones_like(scores), 1).bool(), -math.inf).softmax(-1) @ v


def windows(q, k, v):
    return F.scaled_dot_product_attention(q, k[:, :1], v[:, :1], scale=0.3, enable_gqa=True)


@pytest.mark.parametrize("function", [written_out, filled, windows], ids=lambda f: f.__name__)
def test_gradients_are_those_of_torch(function, registry, compiled, reports):
    given = [torch.randn(2, 2, n, 16, requires_grad=True) for n in (QUERIES, KEYS, KEYS)]
    step, way = compiled(function, registry=registry), torch.randn(2, 2, QUERIES, 16)
    mine, other = (torch.autograd.grad(f(*given), given, way) for f in (step, function))
    for a, b in zip(mine, other, strict=True):
        same(a, b)
    assert fused(reports) == ["attention.sdpa_training"]


@pytest.mark.parametrize("able", [True, False])
def test_without_gradients_nothing_is_given_for_them(able, registry, compiled, reports, monkeypatch):
    """One line for each site, whether a kernel takes it or none does."""
    if not able:
        monkeypatch.setattr(type(registry.runtime), "refusal", lambda self, match: "no kernel")
    q, k, v = torch.randn(3, 1, 2, 8, 16)
    step = compiled(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), registry=registry)
    same(step(q, k, v), F.scaled_dot_product_attention(q, k, v, is_causal=True))
    assert fused(reports) == (["attention.sdpa"] if able else [])
    lost = [x.fusion for r in reports if r.stage == "captured" for x in r.lost]
    assert lost == ([] if able else ["attention.sdpa"]), "what also gives statistics is no choice"


def test_called_directly(registry):
    """Queries that see no key have gradients of 0, and lse has none of its own."""
    q, k, v = (torch.randn(1, 2, n, 16, requires_grad=True) for n in (6, 3, 3))
    y, lse = fusionreg.torch.ops.use(registry).attention.sdpa_training(q, k, v, **ONE, scaling="usual")
    assert lse.shape == (1, 2, 6) and not lse.requires_grad and torch.isneginf(lse[..., 3:]).all()
    seen = torch.eye(6, 3, dtype=torch.bool)
    scores = (q @ k.mT / 4.0).masked_fill(~seen, -math.inf)
    torch.testing.assert_close(lse[..., :3], scores.logsumexp(-1)[..., :3])
    for found, want in zip(
        torch.autograd.grad(y.sum(), (q, k, v)), (torch.zeros_like(q), torch.zeros_like(k), torch.ones_like(v)),
        strict=True,
    ):  # fmt: skip
        torch.testing.assert_close(found, want, rtol=0, atol=1e-6)


def test_sequences_one_behind_the_other_train(registry, compiled, reports):
    """torch's varlen has no kernel for the CPU: both passes are ours, or there is an error."""
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    ends = torch.tensor([0, 9, 10, 10, 26], dtype=torch.int32)

    def packed(q, k, v):
        return varlen.varlen_attn(q * 1.5, k, v, ends, ends, 16, 16, window_size=(-1, 0), enable_gqa=True).sin()

    def alone(q, k, v):
        several = ([x[a:b].transpose(0, 1) for x in (q * 1.5, k, v)] for a, b in pairwise(ends.tolist()))
        parts = [F.scaled_dot_product_attention(*x, is_causal=True, enable_gqa=True) for x in several]
        return torch.cat(parts, 1).transpose(0, 1).sin()

    given = [torch.randn(26, h, 16, requires_grad=True) for h in (4, 2, 2)]
    step, way = compiled(packed, registry=registry), torch.randn(26, 4, 16)
    mine, other = (torch.autograd.grad(f(*given), given, way) for f in (step, alone))
    for a, b in zip(mine, other, strict=True):
        same(a, b)
    assert fused(reports) == ["attention.sdpa_varlen_training"]
    assert fused(reports, "backward") == ["attention.sdpa_varlen_backward"]
