"""Training of layers of routed experts: one fused call forward and one backward, with the gradients of all weights."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from .conftest import fused

WIDTH, HIDDEN, EXPERTS, TOP = 32, 24, 5, 2


class Layer(nn.Module):
    """As Mixtral and Qwen-MoE have it in transformers, with the matrices of all rows gathered."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.gate_up = nn.Parameter(0.2 * torch.randn(EXPERTS, 2 * HIDDEN, WIDTH))
        self.down = nn.Parameter(0.2 * torch.randn(EXPERTS, WIDTH, HIDDEN))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids = torch.softmax(self.router(x), dim=-1).topk(TOP, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        rows, at = x.repeat_interleave(TOP, dim=0), ids.reshape(-1)
        gate, up = torch.bmm(self.gate_up[at], rows.unsqueeze(-1)).squeeze(-1).chunk(2, dim=-1)
        h = nn.functional.silu(gate) * up
        y = torch.bmm(self.down[at], h.unsqueeze(-1)).squeeze(-1) * weights.reshape(-1).unsqueeze(-1)
        return y.view(x.size(0), TOP, WIDTH).sum(dim=1)


def test_a_layer_trains_with_fused_passes(compiled: Any, reports: Any) -> None:
    torch.manual_seed(0)
    exact = Layer().double()
    layer = copy.deepcopy(exact).float()
    x = torch.randn(9, WIDTH, requires_grad=True)
    wide, way = x.detach().double().requires_grad_(), torch.randn(9, WIDTH)
    step, saved = compiled(layer), []
    step(x)  # where it is traced, what it says is not what is kept
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = step(x)
    y.backward(way)
    exact(wide).backward(way.double())
    assert fused(reports) == ["gemm.matmul", "moe.routed_ffn"]
    (site,) = [s for r in reports if r.stage == "captured" for s in r.fused if s.fusion == "moe.routed_ffn"]
    assert site.backward == "moe.routed_ffn_backward"
    kept = {tuple(p.shape) for p in layer.parameters()} | {(9, WIDTH), (9, EXPERTS)}
    assert saved and {tuple(t.shape) for t in saved} <= kept, "inputs alone"
    found = [x, *layer.parameters()]
    for mine, right in zip(found, [wide, *exact.parameters()], strict=True):
        torch.testing.assert_close(mine.grad.double(), right.grad, rtol=1e-4, atol=1e-5)
