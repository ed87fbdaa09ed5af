"""Blocks of well-known models, as torch programs and as torch exports them to ONNX: which sites are found."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn
from torch_blocks import RMSNorm, _rotate, bert_layer, gpt2_block, llama_block, vit_block

import fusionreg

F = nn.functional
THREE, PACKED, ROTARY = (f"attention.qkv_{words}sdpa" for words in ("", "packed_", "rope_"))
SDPA, TRAINING, HALVES = "attention.sdpa", "attention.sdpa_training", "attention.rope_half"


@pytest.fixture(scope="module")
def registry():
    return fusionreg.load_registry(allow=("attention",), device="sim")


class QwenAttention(nn.Module):
    """Qwen3's: heads of q and k are normalised in front of their rotation. ``parts``: what look-alikes change."""

    def __init__(self, width=16, heads=4, groups=2, **parts):
        super().__init__()
        d, self.heads, self.groups, self.width, self.parts = 32, heads, groups, width, parts
        self.q, self.o = nn.Linear(d, heads * width, bias=False), nn.Linear(heads * width, d, bias=False)
        self.k, self.v = (nn.Linear(d, groups * width, bias=False) for _ in "kv")
        self.normalise = parts.get("normalise", "heads")
        wide = {"heads": (width, width), "rows": (heads * width, groups * width)}
        self.norms = nn.ModuleList(map(RMSNorm, wide.get(self.normalise, wide["heads"])))

    def head(self, x, heads, norm):
        b, s, _ = x.shape
        if norm is not None and self.normalise == "rows":
            return norm(x).view(b, s, heads, self.width).transpose(1, 2)
        x = x.view(b, s, heads, self.width)
        if norm is not None:
            x = norm(x)
        return x.transpose(1, 2)

    def forward(self, x, cos, sin):
        b, s, _ = x.shape
        one, two = self.norms if self.normalise != "q" else (self.norms[0], None)
        q, k = self.head(self.q(x), self.heads, one), self.head(self.k(x), self.groups, two)
        v = self.head(self.v(x), self.groups, None)
        turn = self.parts.get("rotate", _rotate)
        q = q * cos + turn(q) * sin
        k = k * cos.flip(-1) + turn(k) * sin if "tables" in self.parts else k * cos + turn(k) * sin
        v = v * cos + turn(v) * sin if "values" in self.parts else v
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(y.transpose(1, 2).reshape(b, s, -1))


class CrossAttention(nn.Module):
    """Of SDXL's UNet: q of the image, k and v of the text."""

    def __init__(self):
        super().__init__()
        self.q, (self.k, self.v) = nn.Linear(32, 64, bias=False), (nn.Linear(24, 64, bias=False) for _ in "kv")
        self.out = nn.Linear(64, 32)

    def forward(self, x, text):
        q, k, v = (t.view(t.shape[0], -1, 4, 16).transpose(1, 2) for t in (self.q(x), self.k(text), self.v(text)))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape[0], -1, 64))


class T5Attention(nn.Module):
    """Spelled out: no scale, a bias for each head and bucket of distances, the softmax in float32."""

    def __init__(self, heads=4, width=16):
        super().__init__()
        self.heads, self.width = heads, width
        self.q, self.k, self.v = (nn.Linear(32, heads * width, bias=False) for _ in "qkv")
        self.o, self.bias = nn.Linear(heads * width, 32, bias=False), nn.Embedding(8, heads)

    def forward(self, x):
        b, s, _ = x.shape
        q, k, v = (p(x).view(b, -1, self.heads, self.width).transpose(1, 2) for p in (self.q, self.k, self.v))
        ahead = torch.arange(s)[None, :] - torch.arange(s)[:, None]
        far = (2 + torch.log2(ahead.abs().clamp(min=1).float())).long().clamp(max=3)
        buckets = (ahead > 0).long() * 4 + torch.where(ahead.abs() < 2, ahead.abs(), far)
        scores = torch.matmul(q, k.transpose(3, 2)) + self.bias(buckets).permute(2, 0, 1).unsqueeze(0)
        weights = F.softmax(scores.float(), dim=-1).type_as(scores)
        return self.o(torch.matmul(weights, v).transpose(1, 2).contiguous().view(b, s, -1))


def qwen(**parts):
    return QwenAttention(**parts), (torch.randn(2, 7, 32), torch.randn(2, 1, 7, 16), torch.randn(2, 1, 7, 16))


class Masked(nn.Module):
    """A layer whose mask is made of tokens, so that what is added to scores is sure to be finite."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, tokens):
        return self.layer(x, (tokens != 0).to(x.dtype))


def bert():
    layer, (x, mask) = bert_layer()
    return Masked(layer), (x, mask.long())


def found(registry, model):
    return Counter(m.fusion for m in registry.match(*model).matches)


ALONE = {SDPA: 1, TRAINING: 1}
MASKED = {"attention.sdpa_masked": 1, "attention.sdpa_masked_training": 1, "attention.sdpa_position_bias_training": 1}
BLOCKS = {
    "bert": (bert, {THREE: 1, **MASKED}),
    "gpt2": (gpt2_block, {PACKED: 1, **ALONE}),
    "vit": (vit_block, {PACKED: 1, **ALONE}),
    "llama": (llama_block, {ROTARY: 1, HALVES: 2, **ALONE}),
    "qwen3": (qwen, {ROTARY: 1, HALVES: 2, **ALONE}),
    "t5": (lambda: (T5Attention(), (torch.randn(2, 7, 32),)), {THREE: 1, **MASKED}),
    "sdxl": (lambda: (CrossAttention(), (torch.randn(2, 9, 32), torch.randn(2, 5, 24))), ALONE),
}


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("how", ["program", "onnx"])
def test_blocks(registry, tmp_path, name, how):
    build, sites = BLOCKS[name]
    module, given = build()
    model = (module.eval(), *given)
    if how == "onnx":
        torch.onnx.export(module, given, dynamo=True, verbose=False).save(tmp_path / "m.onnx")
        model = (tmp_path / "m.onnx",)
    assert found(registry, model) == sites


def test_what_a_rotation_binds(registry):
    module, given = qwen()
    (match,) = (m for m in registry.match(module.eval(), *given).matches if m.fusion == ROTARY)
    assert {"gq", "gk", "cos", "sin"} <= set(match.inputs) and not {"bq", "bk", "bv", "mask"} & set(match.inputs)
    assert [match.attributes[n] for n in ("H", "G", "is_causal", "middle")] == [4, 2, 1, 8]
    assert match.attributes["epsilon"] == pytest.approx(1e-6)


def other_way(x):
    a, b = x.chunk(2, -1)
    return torch.cat((b, -a), -1)


def pairs(x):
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


def unequal(x):
    return torch.cat((-x[..., 6:], x[..., :6]), -1)


@pytest.mark.parametrize(
    "parts",
    [
        {"rotate": other_way},  # by the negative angle
        {"rotate": pairs},  # neighbours, as GPT-J does it
        {"rotate": unequal},  # cut beside the middle
        {"tables": 1},  # k by other angles than q
        {"values": 1},  # v rotated, too
        {"normalise": "rows"},  # OLMo's: over all heads together
        {"normalise": "q"},  # q alone
    ],
    ids=["other_way", "pairs", "unequal", "tables", "values", "rows", "q"],
)
def test_look_alikes(registry, parts):
    assert ROTARY not in found(registry, (qwen(**parts)[0].eval(), *qwen()[1]))
