"""Attention with masks and position biases in training: forward and backward fused, gradients of biases among them."""

from __future__ import annotations

import attention as kit
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F

from fusionreg.api import Registry
from fusionreg.integrations.torch.compile import inner

from .conftest import fused, same

BATCH, LENGTH, HEADS, WIDTH = 2, 24, 4, 64


class Heads(nn.Module):
    """Self-attention with all its projections; ``attend`` gets (q, k, v)."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, 3 * WIDTH)
        self.merge = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, mask, scale=None):
        q, k, v = self.project(x).view(BATCH, LENGTH, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
        return self.merge(y.transpose(1, 2).reshape(BATCH, LENGTH, WIDTH))


class Bert(nn.Module):
    """A block whose keys end where a sentence does."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.norm = Heads(), nn.LayerNorm(WIDTH)

    def forward(self, x, lengths):
        real = torch.arange(LENGTH)[None] < lengths[:, None]
        return self.norm(x + self.heads(x, real[:, None, None, :]))


class T5(nn.Module):
    """A block with a bias for each head and distance, which is trained, and no scale."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.bias = Heads(), nn.Embedding(8, HEADS)

    def forward(self, x, lengths):
        ahead = torch.arange(LENGTH)[None, :] - torch.arange(LENGTH)[:, None]
        bias = self.bias((ahead // 4).clamp(-4, 3) + 4).permute(2, 0, 1)[None]  # [1 heads L L]
        return x + self.heads(x, bias, scale=1.0)


class Padded(T5):
    """The same with padding: the bias is of every batch then."""

    def forward(self, x, lengths):
        ahead = torch.arange(LENGTH)[None, :] - torch.arange(LENGTH)[:, None]
        real = torch.arange(LENGTH)[None] < lengths[:, None]
        bias = self.bias((ahead // 4).clamp(-4, 3) + 4).permute(2, 0, 1)[None]
        return x + self.heads(x, bias.masked_fill(~real[:, None, None, :], torch.finfo(x.dtype).min), scale=1.0)


@pytest.mark.parametrize(
    ("block", "words", "dtype"),
    [(Bert, "masked", torch.float32), (T5, "position_bias", torch.float32), (T5, "position_bias", torch.bfloat16),
     (Padded, "position_bias", torch.float32)],
    ids=lambda p: getattr(p, "__name__", str(p)),
)  # fmt: skip
def test_a_block_trains(block, words, dtype, compiled, reports):
    torch.manual_seed(0)
    kernel = "plain" if dtype is torch.float32 else "tensor_core"
    registry = Registry(kit.awake(kernel), device="sim")
    x, way = torch.randn(2, BATCH, LENGTH, WIDTH).to(dtype)
    lengths = torch.tensor([LENGTH, 7])
    mine = block().to(dtype)
    exact = block().double()
    exact.load_state_dict(mine.state_dict())
    step, saved = compiled(mine, registry=registry), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        got = step(x, lengths)
    (got * way).sum().backward()
    want = exact(x.double(), lengths)
    (want * way.double()).sum().backward()
    tolerance = 2e-5 if dtype is torch.float32 else 4e-2
    same(got.double(), want, tolerance)
    for (name, found), other in zip(mine.named_parameters(), exact.parameters(), strict=True):
        scale = max(1.0, other.grad.abs().max().item())
        assert (found.grad.double() - other.grad).abs().max().item() <= tolerance * scale, name
    assert fused(reports) == [f"attention.sdpa_{words}_training"]
    assert fused(reports, "backward") == [f"attention.sdpa_{words}_backward"]
    used = dict(registry.runtime.kernels_used)
    assert used == {f"attention.sdpa_{words}_{n}/{kernel}": 1 for n in ("training", "backward")}
    scores = BATCH * HEADS * LENGTH * LENGTH
    kept = [t for t in saved if not isinstance(t, FakeTensor) and t.numel() == scores]
    assert len(kept) == (block is Padded)  # the bias with its mask, an input


def test_a_mask_without_a_gradient_is_a_constant(compiled, reports):
    """Added, of four axes: its gradient would cost a third more."""
    registry = Registry(kit.awake("plain"), device="sim")
    q, k, v = (torch.randn(1, 2, 8, 16, requires_grad=True) for _ in range(3))
    mask, way = torch.randn(1, 2, 8, 8), torch.randn(1, 2, 8, 16)
    function = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask)  # noqa: E731
    step = compiled(function, registry=registry)
    mine, other = (torch.autograd.grad(f(q, k, v), (q, k, v), way) for f in (step, function))
    for a, b in zip(mine, other, strict=True):
        same(a, b)
    assert fused(reports) == ["attention.sdpa_masked_training"]


@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_scale_that_is_trained(shape, compiled, reports):
    """pytorch#191203: read at every call, of any sign, with a gradient of its own."""
    registry = Registry(kit.awake("plain"), device="sim")
    function = lambda q, k, v, c: (q @ k.transpose(-2, -1) * c).softmax(-1) @ v  # noqa: E731
    step = compiled(function, registry=registry)
    q, k, v, way = (torch.randn(1, 2, 8, 16, requires_grad=True) for _ in range(4))
    for value in (0.5, -2.0):
        given = (q, k, v, torch.full(shape, value, requires_grad=True))
        mine, other = (torch.autograd.grad(f(*given), given, way) for f in (step, function))
        for a, b in zip(mine, other, strict=True):
            same(a, b, 1e-4)
    assert fused(reports) == ["attention.sdpa_training"]
    assert dict(registry.runtime.kernels_used) == {f"attention.sdpa_{n}/plain": 2 for n in ("training", "backward")}


@pytest.mark.parametrize("hidden", [0, 3])
def test_a_mask_that_torch_has_no_fused_kernel_for(compiled, reports, monkeypatch, hidden) -> None:
    """As transformers has it where nobody gave one: it is expanded over the keys, so that torch multiplies in float32.
    Where it allows all, it goes, and is laid out where it does not; other masks stay as they are."""
    attentions = []
    monkeypatch.setattr(inner, "eager", lambda module, *_: attentions.extend(_attentions(module)) or module.forward)

    def attend(q, known):
        rows = (torch.arange(24)[:, None] >= hidden).expand(2, 1, 24, 24)
        y = F.scaled_dot_product_attention(q, q, q, attn_mask=rows)
        return F.scaled_dot_product_attention(y, q, q, attn_mask=rows) + F.scaled_dot_product_attention(q, y, q, known)

    q, known = torch.randn(2, 4, 24, 16), torch.ones(24, 24, dtype=torch.bool)
    with torch.no_grad():
        same(compiled(attend, policy="balanced")(q, known), attend(q, known))
        assert attentions == [torch.ops.aten.contiguous.default if hidden else None] * 2 + ["L_known_"]
        assert reports[0].masks == 2 and "left out where they allow all: 2" in str(reports[0])
        same(compiled(attend, policy="conservative")(q, known), attend(q, known))
    assert reports[1].masks == 0


def _attentions(module):
    """What makes the masks of all attentions of a graph."""
    target = torch.ops.aten.scaled_dot_product_attention.default
    found = module.graph.find_nodes(op="call_function", target=target)
    given = [n.kwargs.get("attn_mask", n.args[3] if len(n.args) > 3 else None) for n in found]
    return [m and m.target for m in given]


@pytest.mark.parametrize("shape", [(8, 8), (2, 1, 8)])
@pytest.mark.parametrize("trained", [True, False])
def test_masks_of_fewer_axes(shape, trained, compiled, reports):
    """Added, the same for all batches: their gradients are summed over those, and over axes of one number."""
    registry = Registry(kit.awake("plain"), device="sim")
    q, k, v, way = (torch.randn(2, 2, 8, 16, requires_grad=True) for _ in range(4))
    given = (q, k, v, torch.randn(shape, requires_grad=trained))
    function = lambda q, k, v, mask: F.scaled_dot_product_attention(q, k, v, attn_mask=mask)  # noqa: E731
    step = compiled(function, registry=registry)
    mine, other = (torch.autograd.grad(f(*given), given[: 3 + trained], way) for f in (step, function))
    for a, b in zip(mine, other, strict=True):
        same(a, b)
    words = "position_bias" if trained else "masked"
    assert fused(reports) == [f"attention.sdpa_{words}_training"]
    assert fused(reports, "backward") == [f"attention.sdpa_{words}_backward"]


def sdpa_of_bools(q, k, v, seen):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)


def filled(q, k, v, seen):
    return (q @ k.mT).masked_fill(~seen, -torch.inf).softmax(-1) @ v


def added_infinity(q, k, v, seen):
    return (q @ k.mT + torch.where(seen, 0.0, -torch.inf)).softmax(-1) @ v


def added_lowest(q, k, v, seen):
    """NVIDIA/apex#1444: weights alike, which a log-sum-exp of such scores does not tell."""
    return (q @ k.mT + torch.where(seen, 0.0, torch.finfo(q.dtype).min)).softmax(-1) @ v


def added_a_little(q, k, v, seen):
    return (q @ k.mT + torch.where(seen, 0.0, -1e3)).softmax(-1) @ v


@pytest.mark.parametrize(
    ("function", "forward", "backward"),
    [
        (sdpa_of_bools, "sdpa_masked_training", "sdpa_masked_backward"),
        (filled, "mask_softmax", "mask_softmax_backward"),
        (added_infinity, "bias_softmax", "softmax_backward"),
        (added_lowest, "bias_softmax", "softmax_backward"),
        (added_a_little, "sdpa_masked_training", "sdpa_masked_backward"),
    ],
    ids=lambda p: getattr(p, "__name__", ""),
)
def test_rows_without_a_key(function, forward, backward, compiled, reports):
    """They are what the operators make of them, NaN, 0 or the mean of v, in both directions, and no other row is."""
    torch.manual_seed(0)
    registry = Registry(kit.shipped("attention"), device="sim")
    seen = torch.ones(2, 1, 8, 8, dtype=torch.bool).tril()
    seen[0, :, 3] = seen[1, :, :2] = False
    q, k, v, way = (torch.randn(2, 2, 8, 16, requires_grad=True) for _ in range(4))
    step = compiled(function, registry=registry)
    results = [(y := f(q, k, v, seen), *torch.autograd.grad(y, (q, k, v), way)) for f in (step, function)]
    for mine, other in zip(*results, strict=True):
        assert torch.equal(mine.isnan(), other.isnan())
        same(mine.nan_to_num(), other.nan_to_num(), 1e-4)
    assert fused(reports) == [f"attention.{forward}"]
    assert f"attention.{backward}" in fused(reports, "backward") + fused(reports, "captured")
