"""Self-attention from its input on, as models spell it, found as one rule; and what only looks like it, refused."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch_blocks import gpt2_block, vit_block

import fusionreg

F = nn.functional
B, S, H, D = 2, 9, 4, 16
THREE, PACKED = "attention.qkv_sdpa", "attention.qkv_packed_sdpa"


@pytest.fixture(scope="module")
def registry():
    return fusionreg.load_registry(allow=("attention",), device="sim")


class Attend(nn.Module):
    """Bert's layer, each part of which may be replaced."""

    def __init__(self, groups=H, bias=True, packed=False, **parts):
        super().__init__()
        self.groups, self.parts, n = groups, parts, H * D
        if packed:
            self.qkv = nn.Linear(n, 3 * n, bias=bias)
        else:
            self.q, self.k, self.v = nn.Linear(n, n, bias=bias), *(nn.Linear(n, groups * D, bias=bias) for _ in "kv")

    def split(self, x, heads):
        return x.view(B, x.shape[1], heads, D).transpose(1, 2)

    def scores(self, q, k, mask):
        s = q @ k.transpose(-1, -2) / math.sqrt(D)
        return s if mask is None else s + (1.0 - mask[:, None, None, :].to(s.dtype)) * torch.finfo(s.dtype).min

    def merge(self, y):
        return y.transpose(1, 2).reshape(B, -1, H * D)

    def forward(self, x, other=None, mask=None):
        part = {**{n: getattr(self, n) for n in ("split", "scores", "merge")}, "softmax": lambda s: s.softmax(-1)}
        part |= {n: f.__get__(self) if n != "softmax" else f for n, f in self.parts.items() if n in part}
        if hasattr(self, "qkv"):
            q, k, v = self.qkv(x).split(H * D, -1)
        else:
            q, k, v = self.q(x), self.k(x if other is None else other), self.v(x if other is None else other)
        q, k, v = part["split"](q, H), part["split"](k, self.groups), part["split"](v, self.groups)
        if self.groups != H:
            return part["merge"](F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))
        y = part["merge"](part["softmax"](part["scores"](q, k, mask)) @ v)
        return (y, q) if self.parts.get("exposed") else y


def found(registry, module, *given):
    return [m for m in registry.match(module.eval(), *given).matches if m.fusion in (THREE, PACKED)]


X, MASK = torch.randn(B, S, H * D), (torch.arange(S) < torch.tensor([[4], [6]])).long()


class Bias(nn.Module):
    """T5: no scale, a learned bias for each head and distance."""

    def __init__(self):
        super().__init__()
        self.attend, self.table = Attend(bias=False), nn.Embedding(S, H)

    def forward(self, x):
        far = (torch.arange(S)[:, None] - torch.arange(S)[None, :]).abs()
        bias = self.table(far).permute(2, 0, 1)[None]
        q, k, v = (self.attend.split(f(x), H) for f in (self.attend.q, self.attend.k, self.attend.v))
        return self.attend.merge((q @ k.transpose(-1, -2) + bias).softmax(-1) @ v)


@pytest.mark.parametrize(
    ("build", "given", "fusion", "facts"),
    [
        (lambda: Attend(), (X, None, MASK), THREE, {"H": 4, "G": 4}),
        (lambda: Attend(bias=False), (X,), THREE, {"is_causal": 0}),
        (lambda: Attend(groups=2), (X,), THREE, {"H": 4, "G": 2, "is_causal": 1}),
        (lambda: Attend(packed=True), (X, None, MASK), PACKED, {"H": 4}),
        (lambda: gpt2_block()[0], gpt2_block()[1], PACKED, {"H": 4, "transB": 0, "is_causal": 1}),
        (lambda: vit_block()[0], vit_block()[1], PACKED, {"H": 3, "transB": 1}),
    ],
    ids=["bert", "no_bias", "grouped", "packed", "gpt2", "vit"],
)
def test_models(registry, build, given, fusion, facts):
    matches = found(registry, build(), *given)
    assert [m.fusion for m in matches] == [fusion]
    assert {n: matches[0].attributes[n] for n in facts} == facts
    assert ("mask" in matches[0].inputs) == (len(given) == 3)


def test_position_bias(registry):
    (match,) = found(registry, Bias(), X)
    assert match.fusion == THREE and match.choices["scaling"] == "given" and match.attributes["scale"] == 1.0
    assert "mask" in match.inputs and not {"bq", "bk", "bv"} & set(match.inputs)


def test_a_key_without_bias(registry):
    """Whisper's."""
    module = Attend()
    module.k = nn.Linear(H * D, H * D, bias=False)
    (match,) = found(registry, module, X)
    assert {"bq", "bv"} <= set(match.inputs) and "bk" not in match.inputs


def permuted(self, q, k, mask):
    return q @ k.reshape(B, H, D, S) / math.sqrt(D)


def temperature(self, q, k, mask):
    return q @ k.transpose(-1, -2) * torch.arange(1.0, H + 1).reshape(H, 1, 1)


def by_query(self, q, k, mask):
    return q @ k.transpose(-1, -2) / math.sqrt(D) + mask[:, None, :, None].to(q.dtype)


@pytest.mark.parametrize(
    ("parts", "given"),
    [
        ({}, (X, torch.randn(B, 5, H * D))),  # keys of another source
        ({"scores": permuted}, (X,)),  # k laid out anew: no transpose
        ({"softmax": lambda s: s.softmax(-2)}, (X,)),
        ({"softmax": lambda s: s.softmax(1)}, (X,)),
        ({"scores": temperature}, (X,)),
        ({"scores": by_query}, (X, None, MASK)),  # a number for each query
        ({"split": lambda self, x, h: x.view(B, x.shape[1], D, h).permute(0, 3, 1, 2)}, (X,)),  # heads innermost
        ({"split": lambda self, x, h: x.view(B, h, x.shape[1], D)}, (X,)),  # rows cut up
        ({"merge": lambda self, y: y.reshape(B, -1, H * D)}, (X,)),  # heads one below the other
        ({"merge": lambda self, y: y.permute(0, 2, 3, 1).reshape(B, -1, H * D)}, (X,)),
        ({"exposed": True}, (X,)),  # q is read elsewhere
    ],
    ids=[
        "cross", "permuted", "queries", "heads", "temperature", "by_query", "innermost", "rows", "stacked", "turned",
        "exposed",
    ],
)  # fmt: skip
def test_look_alikes(registry, parts, given):
    assert found(registry, Attend(**parts), *given) == []
    assert len(found(registry, Attend(), X)) == 1


def test_packed_in_another_order(registry):
    """k, q, v; and two for one: what is read as q must be q."""

    class Other(Attend):
        def forward(self, x, other=None, mask=None):
            k, q, v = self.qkv(x).split(H * D, -1)
            q, k, v = (self.split(t, H) for t in (q, k, v))
            return self.merge(self.scores(q, k, None).softmax(-1) @ v)

    assert found(registry, Other(packed=True), X) == []


def test_the_output_projection_is_the_next_site():
    """With its bias and the residual: two launches from one normalisation to the next."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.attend, self.out = Attend(packed=True), nn.Linear(H * D, H * D)

        def forward(self, x):
            return x + self.out(self.attend(x))

    registry = fusionreg.load_registry(allow=("attention", "gemm"), device="sim")
    attention, product = registry.plan(Layer().bfloat16().eval(), X.bfloat16())
    assert attention.fusion == PACKED and product.fusion.startswith("gemm.bias.r")
    assert product.nodes[-1].endswith("Add") and not {*attention.nodes} & {*product.nodes}
