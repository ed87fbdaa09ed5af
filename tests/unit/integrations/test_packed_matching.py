"""Self-attention with one weight for q, k and v, with norms and rotations of heads: spellings, look-alikes, values."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import fusionreg

F = nn.functional
B, S, C, H, G, D = 2, 9, 32, 4, 2, 16
PACKED, GROUPS, ROPE = (f"attention.qkv_packed_{words}sdpa" for words in ("", "groups_", "rope_"))
NORM, TURNED, GEMMA = (f"attention.qkv_{words}_sdpa" for words in ("norm", "rope", "rope_norm"))


@pytest.fixture(scope="module")
def registry():
    return fusionreg.load_registry(allow=("attention",), device="sim")


def heads(t):
    return t.view(B, S, -1, D).transpose(1, 2)


def split(h, g):
    return [heads(t) for t in h.split([H * D, g * D, g * D], -1)]


def slices(h, g):
    """Phi's."""
    n, m = H * D, (H + g) * D
    return heads(h[..., :n]), heads(h[..., n:m]), heads(h[..., m:])


def cut_heads(h, g):
    return h.view(B, S, -1, D).transpose(1, 2).split([H, g, g], 1)


def cut_tokens(h, g):
    h = h.view(B, S, -1, D)
    return [t.transpose(1, 2) for t in (h[:, :, :H], h[:, :, H : H + g], h[:, :, H + g :])]


def chunks(h, g):
    return [heads(t) for t in h.chunk(3, -1)]


def three_first(h, g):
    """timm's."""
    return h.reshape(B, S, 3, H, D).permute(2, 0, 3, 1, 4).unbind(0)


def three_within(h, g):
    """FlashAttention's."""
    return [t.transpose(1, 2) for t in h.view(B, S, 3, H, D).unbind(2)]


def other_order(h, g):
    k, v, q = h.split([g * D, g * D, H * D], -1)
    return heads(q), heads(k), heads(v)


def values_first(h, g):
    q, v, k = split(h, g)
    return q, k, v


def turned_three(h, g):
    k, q, v = three_first(h, g)
    return q, k, v


def by_head(h, g):
    """GPT-NeoX's: q, k and v of one head lie beside each other."""
    return h.view(B, S, H, 3 * D).transpose(1, 2).chunk(3, -1)


def overlapping(h, g):
    return heads(h[..., : H * D]), heads(h[..., D : (g + 1) * D]), heads(h[..., (H + g) * D :])


class Gemma(nn.Module):
    """1 + weight in float32, rounded once."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width) * 0.1)

    def forward(self, x):
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (h * (1.0 + self.weight.float())).type_as(x)


class Diffusers(Gemma):
    """The product with the inverse casts x once more; the weight scales what is rounded."""

    def forward(self, x):
        h = x * torch.rsqrt(x.to(torch.float32).pow(2).mean(-1, keepdim=True) + 1e-6)
        return (h.to(x.dtype) if x.dtype != torch.float32 else h) * self.weight


def turn(x, cos, sin):
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


class Attend(nn.Module):
    """``cut``: how a packed product becomes heads, None for three weights; ``where``: norms behind the transpose or
    in front of it."""

    def __init__(self, cut=None, norm=None, rope=False, groups=G, where="behind", scaled=False):
        super().__init__()
        self.cut, self.rope, self.groups, self.where, self.scaled = cut, rope, groups, where, scaled
        columns = [H * D, groups * D, groups * D]
        self.project = nn.ModuleList(nn.Linear(C, n) for n in ([sum(columns)] if cut else columns))
        self.norms = nn.ModuleList(norm(D) if norm else nn.Identity() for _ in "qk")

    def forward(self, x, cos, sin):
        parts = [p(x) for p in self.project]
        if self.scaled:
            parts[0] = parts[0] * D**-0.5
        q, k, v = self.cut(parts[0], self.groups) if self.cut else (t.view(B, S, -1, D) for t in parts)
        one, two = self.norms
        if self.cut or self.where == "front":
            q, k = one(q), two(k)
        if not self.cut:
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
            q, k = (one(q), two(k)) if self.where == "behind" else (q, k)
        if self.rope:
            q, k = turn(q, cos, sin), turn(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, enable_gqa=True, scale=1.0 if self.scaled else None)
        return y.transpose(1, 2).reshape(B, S, -1)


def given(kind=torch.float32):
    angles = torch.rand(1, 1, S, D // 2) * 6
    cos, sin = (torch.cat((t, t), -1).to(kind) for t in (angles.cos(), angles.sin()))
    return torch.randn(B, S, C).to(kind), cos, sin


def found(registry, module, kind=torch.float32):
    matches = registry.match(module.to(kind).eval(), *given(kind)).matches
    return [m.fusion for m in matches if m.fusion.startswith("attention.qkv")]


@pytest.mark.parametrize("cut", [split, slices, cut_heads, cut_tokens], ids=lambda f: f.__name__)
@pytest.mark.parametrize("rope", [False, True])
def test_one_weight(registry, cut, rope):
    module = Attend(cut, rope=rope)
    (match,) = (m for m in registry.match(module.eval(), *given()).matches if m.fusion.startswith("attention.qkv"))
    assert match.fusion == (ROPE if rope else GROUPS)
    assert {n: match.attributes[n] for n in ("H", "G", "columns_q", "columns_k")} == {
        "H": H, "G": G, "columns_q": H * D, "columns_k": G * D,
    }  # fmt: skip


@pytest.mark.parametrize("cut", [chunks, three_first, three_within], ids=lambda f: f.__name__)
def test_as_many_heads(registry, cut):
    """With a norm or a rotation each is a fusion of its own, without it is the one of models with biases alone."""
    assert found(registry, Attend(cut, groups=H)) == [PACKED]
    assert found(registry, Attend(cut, nn.RMSNorm, groups=H)) == [GROUPS]
    assert found(registry, Attend(cut, rope=True, groups=H)) == [ROPE]


@pytest.mark.parametrize(
    ("options", "kind", "fusion"),
    [
        ({"norm": nn.RMSNorm}, torch.bfloat16, NORM),
        ({"norm": nn.RMSNorm, "where": "front"}, torch.float16, NORM),
        ({"norm": Diffusers}, torch.bfloat16, NORM),
        ({"norm": nn.RMSNorm, "rope": True}, torch.bfloat16, TURNED),
        ({"norm": Gemma, "rope": True}, torch.float32, TURNED),
        ({"norm": Gemma, "rope": True}, torch.bfloat16, GEMMA),
        ({"norm": Gemma, "rope": True, "where": "front"}, torch.bfloat16, GEMMA),
        ({"norm": nn.RMSNorm, "rope": True, "cut": slices}, torch.bfloat16, ROPE),
        ({"scaled": True}, torch.float32, "attention.qkv_sdpa"),
    ],
)
def test_steps_between(registry, options, kind, fusion):
    assert found(registry, Attend(**options), kind) == [fusion]


@pytest.mark.parametrize(
    ("cut", "groups"),
    [(other_order, G), (values_first, G), (overlapping, G), (turned_three, H), (by_head, H), (other_order, H)],
    ids=lambda p: getattr(p, "__name__", str(p)),
)
def test_look_alikes(registry, cut, groups):
    """What is read as q must be q: as many heads in another order have the same shapes."""
    for rope in (False, True):
        assert found(registry, Attend(cut, rope=rope, groups=groups)) == []


@pytest.mark.parametrize(
    "options",
    [
        {"cut": slices, "rope": True}, {"cut": cut_tokens, "norm": nn.RMSNorm}, {"norm": Diffusers},
        {"norm": Gemma, "rope": True}, {"scaled": True},
    ],
    ids=["phi", "grouped", "diffusers", "gemma", "whisper"],
)  # fmt: skip
def test_values(registry, options):
    torch.manual_seed(0)
    module = Attend(**options).eval()
    x = given()
    with torch.no_grad():
        want = copy.deepcopy(module).double()(*(t.double() for t in x))
        fused = registry.fuse(module.bfloat16(), *(t.bfloat16() for t in x), policy="aggressive")
        y = fused(*(t.bfloat16() for t in x))
    assert [s.fusion.startswith("attention.qkv") for s in fused.model.sites if "pointwise" not in s.fusion] == [True]
    assert (y.double() - want).abs().max() < 0.03 * want.abs().max()


class InBatch(nn.Module):
    """Diffusers' first processor: heads become batches, and scores a baddbmm with beta=0."""

    def __init__(self):
        super().__init__()
        self.project = nn.ModuleList(nn.Linear(C, H * D, bias=False) for _ in "qkv")

    def forward(self, x):
        q, k, v = (p(x).reshape(B, S, H, D).permute(0, 2, 1, 3).reshape(B * H, S, D) for p in self.project)
        nothing = torch.empty(B * H, S, S)
        weights = torch.baddbmm(nothing, q, k.transpose(-1, -2), beta=0, alpha=D**-0.5).softmax(-1)
        return torch.bmm(weights, v).reshape(B, H, S, D).permute(0, 2, 1, 3).reshape(B, S, H * D)


@pytest.mark.parametrize("how", ["program", "onnx"])
def test_heads_in_the_batch(registry, tmp_path, how):
    model = InBatch().eval(), torch.randn(B, S, C)
    if how == "onnx":
        torch.onnx.export(*model[:1], (model[1],), dynamo=True, verbose=False).save(tmp_path / "m.onnx")
        model = (tmp_path / "m.onnx",)
    assert [m.fusion for m in registry.match(*model).matches if "qkv" in m.fusion] == ["attention.qkv_sdpa"]
