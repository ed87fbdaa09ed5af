"""Dequantised matrices in front of experts' products: what is found, what it computes, and what stays as it is."""

from __future__ import annotations

import pytest
import torch
from exported import OPS, agree
from torch import nn

import fusionreg
from fusionreg.core.evaluate.evaluator import evaluate
from fusionreg.core.lift import lift
from fusionreg.integrations.torch import export, import_exported
from fusionreg.integrations.torch.module import ExportedCallable

E, K, D, I, M, BLOCK = 4, 2, 32, 48, 6, 16
T = torch.bfloat16


def by_channel(stored, scale):
    return stored.to(T) * scale


def by_channel_wide(stored, scale):
    return (stored.float() * scale).to(T)


def by_block(stored, scale):
    low, high = (stored & 15).to(torch.int8) - 8, (stored >> 4).to(torch.int8) - 8
    wide = torch.stack((low, high), -1).flatten(-2).to(T)
    return (wide.view(*wide.shape[:2], -1, BLOCK) * scale.unsqueeze(-1)).view_as(wide)


class Layer(nn.Module):
    """transformers' batched_mm with stored matrices."""

    def __init__(self, kind, scales, dequantise, per="channel"):
        super().__init__()
        torch.manual_seed(0)
        self.dequantise = dequantise
        for name, rows, depth in (("gate_up", 2 * I, D), ("down", D, I)):
            shape = (E, rows, depth)
            if kind is torch.float8_e4m3fn:
                stored, size = (32 * torch.randn(shape)).to(kind), 1 / 32
            elif kind is torch.int8:
                stored, size = torch.randint(-128, 128, shape, dtype=kind), 1 / 64
            else:
                stored, size = torch.randint(0, 256, (E, rows, depth // 2), dtype=kind), 1 / 4
            many = {"channel": (rows, 1), "expert": (1, 1), "block": (rows, depth // BLOCK), "column": (1, depth)}[per]
            self.register_buffer(name, stored)
            self.register_buffer(f"{name}_scale", ((torch.rand(E, *many) + 0.5) * size * depth**-0.5).to(scales))

    def forward(self, x, logits):
        weights, ids = logits.softmax(-1).topk(K)
        rows, at = x.repeat_interleave(K, dim=0), ids.reshape(-1)
        gate_up, down = (self.dequantise(getattr(self, n), getattr(self, f"{n}_scale")) for n in ("gate_up", "down"))
        gate, up = torch.bmm(gate_up[at], rows.unsqueeze(-1)).squeeze(-1).chunk(2, dim=-1)
        h = nn.functional.silu(gate) * up
        y = torch.bmm(down[at], h.unsqueeze(-1)).squeeze(-1) * weights.to(T).reshape(-1).unsqueeze(-1)
        return y.view(x.size(0), K, D).sum(dim=1)


CASES = {
    "int8": ((torch.int8, T, by_channel), "moe.routed_ffn_w8a16"),
    "int8 in float32": ((torch.int8, torch.float32, by_channel_wide), "moe.routed_ffn_w8a16"),
    "e4m3 by expert": ((torch.float8_e4m3fn, T, by_channel, "expert"), "moe.routed_ffn_w8a16"),
    "int4": ((torch.uint8, T, by_block, "block"), "moe.routed_ffn_w4a16"),
}


@pytest.fixture(scope="module")
def registry():
    return fusionreg.load_registry(allow=("moe",), device="sim")


@pytest.mark.parametrize("case", CASES)
def test_they_are_found(registry, case) -> None:
    made, fusion = CASES[case]
    module, given = Layer(*made).eval(), (torch.randn(M, D).to(T), torch.randn(M, E))
    with torch.no_grad():
        imported = import_exported(export(module, given, None, None))
        graph = lift(imported.graph, OPS)
        assert fusion in [m.fusion for m in registry.match(graph).matches]
        agree(ExportedCallable(imported, lambda g: evaluate(graph, g, ops=OPS))(*given), module(*given), 0.03)


def test_a_scale_along_what_is_summed_stays(registry) -> None:
    module, given = Layer(torch.int8, T, by_channel, "column").eval(), (torch.randn(M, D).to(T), torch.randn(M, E))
    with torch.no_grad():
        found = {m.fusion for m in registry.match(module, *given).matches}
    assert "moe.routed_ffn" in found and "moe.routed_ffn_w8a16" not in found
