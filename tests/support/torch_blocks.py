"""Blocks in the styles that published models are written in, added to the zoo of ``torch_zoo``."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_zoo import Built, Fn, weights, zoo

# -- transformers --------------------------------------------------------------------------------------------


@zoo
def mlp_gelu() -> Built:
    return nn.Sequential(nn.Linear(12, 48), nn.GELU(), nn.Linear(48, 12), nn.Dropout(0.1)), (torch.randn(2, 5, 12),)


@zoo
def mlp_gelu_tanh() -> Built:
    return nn.Sequential(nn.Linear(12, 48), nn.GELU("tanh"), nn.Linear(48, 12)), (torch.randn(2, 5, 12),)


class BertLayer(nn.Module):
    """Post-norm encoder layer with an additive padding mask."""

    def __init__(self, d: int = 24, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(d, d) for _ in range(4))
        self.up, self.down = nn.Linear(d, 2 * d), nn.Linear(2 * d, d)
        self.n1, self.n2 = nn.LayerNorm(d, eps=1e-12), nn.LayerNorm(d, eps=1e-12)
        self.drop = nn.Dropout(0.1)

    def split(self, x: Tensor) -> Tensor:
        return x.view(x.size(0), x.size(1), self.heads, -1).permute(0, 2, 1, 3)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (self.split(f(x)) for f in (self.q, self.k, self.v))
        scores = (
            torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(q.size(-1)) + (1.0 - mask[:, None, None, :]) * -10000.0
        )
        context = torch.matmul(self.drop(F.softmax(scores, dim=-1)), v)
        context = context.permute(0, 2, 1, 3).contiguous().view(x.size(0), x.size(1), -1)
        x = self.n1(x + self.drop(self.o(context)))
        return self.n2(x + self.drop(self.down(F.gelu(self.up(x)))))


@zoo
def bert_layer() -> Built:
    return BertLayer(), (torch.randn(2, 6, 24), (torch.arange(6) < torch.tensor([[4], [6]])).float())


class Conv1D(nn.Module):
    """GPT-2's linear layer: weight (in, out)."""

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(weights(n_in, n_out)), nn.Parameter(torch.randn(n_out))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], -1)


class Gpt2Block(nn.Module):
    """One fused QKV projection, causal mask by where with finfo.min, tanh GELU spelled out."""

    def __init__(self, d: int = 24, heads: int = 4, positions: int = 16) -> None:
        super().__init__()
        self.d, self.heads = d, heads
        self.ln_1, self.ln_2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.c_attn, self.c_proj = Conv1D(d, 3 * d), Conv1D(d, d)
        self.c_fc, self.mlp_proj = Conv1D(d, 4 * d), Conv1D(4 * d, d)
        causal = torch.tril(torch.ones(positions, positions, dtype=torch.bool)).view(1, 1, positions, positions)
        self.register_buffer("bias", causal, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.c_attn(self.ln_1(x)).split(self.d, dim=2)
        shape = (*x.shape[:-1], self.heads, self.d // self.heads)
        q, k, v = (t.view(shape).transpose(1, 2) for t in (q, k, v))
        scores = torch.matmul(q, k.transpose(-1, -2)) / (v.size(-1) ** 0.5)
        causal = self.bias[:, :, k.size(-2) - q.size(-2) : k.size(-2), : k.size(-2)]
        least = torch.full([], torch.finfo(scores.dtype).min, dtype=scores.dtype, device=scores.device)
        weights = F.softmax(torch.where(causal, scores, least), dim=-1).type(v.dtype)
        x = x + self.c_proj((weights @ v).transpose(1, 2).contiguous().view(*x.shape[:-1], self.d))
        h = self.c_fc(self.ln_2(x))
        h = 0.5 * h * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (h + 0.044715 * torch.pow(h, 3.0))))
        return x + self.mlp_proj(h)


@zoo
def gpt2_block() -> Built:
    return Gpt2Block(), (torch.randn(2, 7, 24),)


class RMSNorm(nn.Module):
    """Llama's: statistics in float32, cast back before the scale."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(d) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        h = x.to(torch.float32)
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * h.to(x.dtype)


def _rotate(x: Tensor) -> Tensor:
    a, b = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-b, a), dim=-1)


class LlamaBlock(nn.Module):
    """RMSNorm, rotary embedding from computed positions, grouped key/value heads, SwiGLU."""

    def __init__(self, d: int = 32, heads: int = 4, kv: int = 2, hidden: int = 48) -> None:
        super().__init__()
        self.heads, self.kv, self.width = heads, kv, d // heads
        self.n1, self.n2 = RMSNorm(d), RMSNorm(d)
        self.q, self.o = nn.Linear(d, d, bias=False), nn.Linear(d, d, bias=False)
        self.k, self.v = nn.Linear(d, kv * self.width, bias=False), nn.Linear(d, kv * self.width, bias=False)
        self.gate, self.up = nn.Linear(d, hidden, bias=False), nn.Linear(d, hidden, bias=False)
        self.down = nn.Linear(hidden, d, bias=False)
        self.register_buffer("inv_freq", 1.0 / (10000 ** (torch.arange(0, self.width, 2).float() / self.width)))

    @torch.no_grad()
    def rotary(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(device_type="cpu", enabled=False):
            freqs = (self.inv_freq.float()[None, :, None] @ positions[:, None, :].float()).transpose(1, 2)
            emb = torch.cat((freqs, freqs), dim=-1)
            return emb.cos().to(x.dtype), emb.sin().to(x.dtype)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        positions = torch.arange(s, device=x.device).unsqueeze(0)
        cos, sin = (t.unsqueeze(1) for t in self.rotary(x, positions))
        h = self.n1(x)
        q = self.q(h).view(b, s, self.heads, self.width).transpose(1, 2)
        k, v = (f(h).view(b, s, self.kv, self.width).transpose(1, 2) for f in (self.k, self.v))
        q, k = (t * cos + _rotate(t) * sin for t in (q, k))
        groups = self.heads // self.kv
        k, v = (
            t[:, :, None].expand(b, self.kv, groups, s, self.width).reshape(b, self.heads, s, self.width)
            for t in (k, v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).contiguous().view(b, s, -1))
        h = self.n2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


@zoo
def llama_block() -> Built:
    return LlamaBlock(), (torch.randn(2, 7, 32),)


class VitBlock(nn.Module):
    """Patch embedding by a strided convolution, class token, pre-norm block with one QKV projection."""

    def __init__(self, d: int = 24, heads: int = 3) -> None:
        super().__init__()
        self.heads = heads
        self.patch = nn.Conv2d(3, d, 4, stride=4)
        self.cls, self.pos = nn.Parameter(torch.randn(1, 1, d)), nn.Parameter(torch.randn(1, 7, d))
        self.n1, self.n2, self.qkv, self.proj = nn.LayerNorm(d), nn.LayerNorm(d), nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.mlp = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))
        self.head = nn.Linear(d, 10)

    def forward(self, image: Tensor) -> Tensor:
        x = self.patch(image).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls.expand(x.shape[0], -1, -1), x), dim=1) + self.pos
        b, n, c = x.shape
        q, k, v = self.qkv(self.n1(x)).reshape(b, n, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, c))
        x = x + self.mlp(self.n2(x))
        return self.head(x[:, 0])


@zoo
def vit_block() -> Built:
    return VitBlock(), (torch.randn(2, 3, 8, 12),)


class T5FeedForward(nn.Module):
    """T5 v1.1: RMS norm, tanh GELU gate, and the relative position buckets that its attention adds."""

    def __init__(self, d: int = 16, hidden: int = 40, heads: int = 2) -> None:
        super().__init__()
        self.norm, self.table = RMSNorm(d), nn.Embedding(8, heads)
        self.wi_0, self.wi_1, self.wo = (
            nn.Linear(d, hidden, False),
            nn.Linear(d, hidden, False),
            nn.Linear(hidden, d, False),
        )

    def buckets(self, s: int) -> Tensor:
        relative = torch.arange(s)[None, :] - torch.arange(s)[:, None]
        bucket = (relative > 0).to(torch.long) * 4
        distance = torch.abs(relative)
        large = 2 + (torch.log(distance.float() / 2) / math.log(16 / 2) * 2).to(torch.long)
        large = torch.min(large, torch.full_like(large, 3))
        return bucket + torch.where(distance < 2, distance, large)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.norm(x)
        y = self.wo(F.gelu(self.wi_0(h), approximate="tanh") * self.wi_1(h))
        return x + y, self.table(self.buckets(x.shape[1])).permute(2, 0, 1).unsqueeze(0)


@zoo
def t5_ffn() -> Built:
    return T5FeedForward(), (torch.randn(2, 6, 16),)


@zoo
def torch_encoder_layer() -> Built:
    return nn.TransformerEncoderLayer(24, 4, 48, activation="gelu", batch_first=True), (torch.randn(2, 5, 24),)


@zoo
def torch_multihead_attention() -> Built:
    attention = nn.MultiheadAttention(24, 4, batch_first=True)
    return Fn_module(attention), (torch.randn(2, 5, 24), torch.arange(5) < torch.tensor([[3], [5]]))


class Fn_module(nn.Module):
    def __init__(self, attention: nn.MultiheadAttention) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, x: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
        return self.attention(x, x, x, key_padding_mask=~keep, need_weights=True)


@zoo
def sdpa_masks() -> Built:
    def f(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        plain = F.scaled_dot_product_attention(q, k, v, scale=0.3)
        masked = F.scaled_dot_product_attention(q, k, v, attn_mask=keep)
        added = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return plain, masked, added, F.scaled_dot_product_attention(q, k, v, is_causal=True)

    q, k, v = (torch.randn(2, 3, s, 8) for s in (4, 6, 6))
    keep = torch.rand(2, 1, 4, 6) < 0.6
    keep[0, 0, 1] = False  # a fully masked row: torch gives zeros
    return Fn(f), (q, k, v, keep, torch.randn(4, 6))


@zoo
def losses() -> Built:
    """All that becomes a loss of classes by number."""

    def f(x: Tensor, image: Tensor, t: Tensor, pixels: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        cross = F.cross_entropy
        plain = [cross(x, t, reduction=how, ignore_index=3) for how in ("mean", "sum", "none")]
        weighed = cross(x, t, weight=w), cross(image, pixels), cross(x[0], t[0]), cross(x[0], t[0], reduction="none")
        logs = F.log_softmax(x, -1)
        forward = torch.ops.aten.nll_loss_forward(logs, t, w, 1, 3)
        return *plain, *weighed, F.nll_loss(logs, t), *forward

    x, image = torch.randn(6, 5), torch.randn(2, 5, 3, 4)
    t, pixels = torch.tensor([3, 1, 0, 4, 3, 2]), torch.randint(0, 5, (2, 3, 4))
    return Fn(f), (x, image, t, pixels, torch.rand(5) + 0.5)


# -- convolutional nets --------------------------------------------------------------------------------------


@zoo
def conv_bn_relu() -> Built:
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
    )
    net[1].running_mean.uniform_(-1, 1)
    net[1].running_var.uniform_(0.5, 2)
    return net, (torch.randn(2, 3, 15, 13),)


class BasicBlock(nn.Module):
    """ResNet's: in-place ReLU, strided 1×1 shortcut, global pool and classifier."""

    def __init__(self, c: int = 4, out: int = 6) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(c, out, 3, 2, 1, bias=False), nn.BatchNorm2d(out)
        self.conv2, self.bn2 = nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out)
        self.down = nn.Sequential(nn.Conv2d(c, out, 1, 2, bias=False), nn.BatchNorm2d(out))
        self.relu, self.pool, self.fc = nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d((1, 1)), nn.Linear(out, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        y += self.down(x)
        return self.fc(torch.flatten(self.pool(self.relu(y)), 1))


@zoo
def resnet_basic_block() -> Built:
    return BasicBlock(), (torch.randn(2, 4, 7, 7),)


class ConvNextBlock(nn.Module):
    """Depthwise convolution, channels-last LayerNorm, layer scale."""

    def __init__(self, c: int = 6) -> None:
        super().__init__()
        self.dw, self.norm = nn.Conv2d(c, c, 7, padding=3, groups=c), nn.LayerNorm(c, eps=1e-6)
        self.up, self.down, self.gamma = nn.Linear(c, 4 * c), nn.Linear(4 * c, c), nn.Parameter(torch.rand(c))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.dw(x).permute(0, 2, 3, 1))
        return x + (self.gamma * self.down(F.gelu(self.up(h)))).permute(0, 3, 1, 2)


@zoo
def convnext_block() -> Built:
    return ConvNextBlock(), (torch.randn(2, 6, 9, 8),)


class UNetResBlock(nn.Module):
    """GroupNorm, SiLU, time embedding added per channel, nearest upsampling."""

    def __init__(self, c: int = 8, out: int = 12, t: int = 10) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(4, c), nn.Conv2d(c, out, 3, padding=1)
        self.time, self.norm2 = nn.Linear(t, out), nn.GroupNorm(4, out, eps=1e-6)
        self.conv2, self.skip = nn.Conv2d(out, out, 3, padding=1), nn.Conv2d(c, out, 1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x))) + self.time(F.silu(t))[:, :, None, None]
        y = self.skip(x) + self.conv2(F.dropout(F.silu(self.norm2(h)), 0.1, training=self.training))
        return F.interpolate(y, scale_factor=2.0, mode="nearest")


@zoo
def unet_resblock() -> Built:
    return UNetResBlock(), (torch.randn(2, 8, 5, 6), torch.randn(2, 10))


@zoo
def pools_and_pads() -> Built:
    def f(x: Tensor) -> tuple[Tensor, ...]:
        return (
            F.avg_pool2d(x, 3, 2, 1), F.avg_pool2d(x, 2, ceil_mode=True, count_include_pad=False),
            F.adaptive_avg_pool2d(x, (3, 2)), F.adaptive_avg_pool2d(x, (4, 3)), F.max_pool2d(x, 2, ceil_mode=True),
            F.pad(x, (1, 2, 0, 1), value=0.5), F.pad(x, (1, 1, 2, 0), mode="reflect"),
            F.pad(x, (0, 1, 2, 0), mode="replicate"), F.pad(x, (-1, 2, 1, -2)),
            F.interpolate(x, size=(6, 11), mode="bilinear"),
            F.interpolate(x, size=(6, 11), mode="bilinear", align_corners=True),
            F.conv2d(x, x.new_ones(2, 3, 3, 3), padding="same"), F.max_pool1d(x[:, :, 0], 3, 2),
            F.pixel_unshuffle(F.pixel_shuffle(torch.cat([x, x[:, :1]], 1), 2), 2),
        )  # fmt: skip

    return Fn(f), (torch.randn(2, 3, 9, 8),)


@zoo
def transposed_convolutions() -> Built:
    net = nn.Sequential(
        nn.ConvTranspose2d(3, 4, 3, 2, 1, output_padding=1), nn.LeakyReLU(0.2), nn.ConvTranspose2d(4, 2, 2, bias=False)
    )
    return net, (torch.randn(2, 3, 5, 4),)


@zoo
def conv1d_and_3d() -> Built:
    def f(x: Tensor, y: Tensor, w1: Tensor, w3: Tensor) -> tuple[Tensor, ...]:
        return F.conv1d(x, w1, padding=2, dilation=2), F.conv3d(y, w3, stride=(1, 2, 1)), F.conv1d(x[0], w1)

    args = (torch.randn(2, 3, 11), torch.randn(1, 2, 4, 5, 3))
    return Fn(f, w1=torch.randn(4, 3, 3), w3=torch.randn(3, 2, 2, 2, 1)), args


@zoo
def norms_without_scale() -> Built:
    net = nn.Sequential(
        nn.BatchNorm2d(4, affine=False), nn.GroupNorm(2, 4, affine=False), nn.InstanceNorm2d(4, affine=True),
        nn.BatchNorm2d(4, track_running_stats=False), nn.LayerNorm(5, elementwise_affine=False),
        nn.RMSNorm((3, 5), eps=1e-5),
    )  # fmt: skip
    return net, (torch.randn(2, 4, 3, 5),)
