"""A small bf16 transformer encoder, exported: ``python examples/transformer_encoder.py [encoder.pt2]``.

Pre-norm layers in the style of ViT and BERT: LayerNorm, one QKV projection, scaled dot-product attention, output
projection, and an MLP with GELU. Every matrix product has M = 128 and N, K multiples of 16, so tensor-core kernels
apply, and it is small enough for the simulator. Weights and inputs are the same on every run.

Then: ``fusionreg match encoder.pt2`` or ``fusionreg run encoder.pt2``; without a file,
``fusionreg run examples.transformer_encoder:build``.
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, HIDDEN, LAYERS = 128, 4, 256, 2
BATCH, LENGTH = 2, 64


class Attention(nn.Module):
    """Multi-head self-attention; x and the result are (B S D)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, s, d = x.shape
        q, k, v = self.qkv(x).view(b, s, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v)  # (B H S D/H)
        return self.out(y.transpose(1, 2).reshape(b, s, d))


class Layer(nn.Module):
    """Pre-norm encoder layer; x and the result are (B S D)."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Encoder(nn.Module):
    """``LAYERS`` layers and a final LayerNorm."""

    def __init__(self, width: int = WIDTH, heads: int = HEADS, hidden: int = HIDDEN, layers: int = LAYERS) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width, heads, hidden) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


def build() -> tuple[nn.Module, tuple[Tensor]]:
    """The module in bf16 and inference mode, and its example input (2 64 128)."""
    generator = torch.Generator().manual_seed(0)
    module = Encoder().eval()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.dim() == 2:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[1] ** -0.5)
            elif "norm" not in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    x = torch.randn(BATCH, LENGTH, WIDTH, generator=generator)
    return module.bfloat16(), (x.bfloat16(),)


def main(path: str = "encoder.pt2") -> None:
    """Exports the module and saves it."""
    module, args = build()
    torch.export.save(torch.export.export(module, args), path)
    print(f"{path}: {sum(p.numel() for p in module.parameters()):,} parameters, input {list(args[0].shape)} bfloat16")


if __name__ == "__main__":
    main(*sys.argv[1:2])
