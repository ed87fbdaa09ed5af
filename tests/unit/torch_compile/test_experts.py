"""Training of layers of routed experts: one fused call forward and one backward, with the gradients of all weights."""

from __future__ import annotations

from typing import Any

import pytest
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


class Grouped(Layer):
    """The same with rows sorted by expert."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids = torch.softmax(self.router(x).float(), dim=-1).topk(TOP, dim=-1)
        weights = (weights / weights.sum(dim=-1, keepdim=True)).to(x.dtype)
        own, order = torch.sort(ids.reshape(-1))
        counts = torch.histc(own.float(), bins=EXPERTS, min=0, max=EXPERTS - 1)
        ends, token = torch.cumsum(counts, dim=0, dtype=torch.int32), order // TOP
        gate, up = torch._grouped_mm(x[token], self.gate_up.transpose(-2, -1), offs=ends).chunk(2, dim=-1)
        h = nn.functional.silu(gate) * up
        y = torch._grouped_mm(h, self.down.transpose(-2, -1), offs=ends) * weights.reshape(-1)[order].unsqueeze(-1)
        back = torch.empty_like(order)
        back[order] = torch.arange(order.size(0))
        return y[back].view(x.size(0), TOP, WIDTH).sum(dim=1)


@pytest.mark.parametrize(("kind", "dtype", "error"), [(Layer, torch.float32, 1e-5), (Grouped, torch.bfloat16, 0.02)])
def test_a_layer_trains_with_fused_passes(compiled: Any, reports: Any, kind: Any, dtype: Any, error: float) -> None:
    torch.manual_seed(0)
    layer = kind().to(dtype)
    exact = Layer().double()
    exact.load_state_dict(layer.state_dict())
    x = torch.randn(9, WIDTH, dtype=dtype, requires_grad=True)
    wide, way = x.detach().double().requires_grad_(), torch.randn(9, WIDTH, dtype=dtype)
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
    for mine, right in zip([x, *layer.parameters()], [wide, *exact.parameters()], strict=True):
        assert mine.grad.dtype == dtype
        assert (mine.grad.double() - right.grad).norm() <= error * right.grad.norm()


class Shared(Layer):
    """A layer with a shared expert, as DeepSeek has it, or ``gated`` by a sigmoid, as Qwen2-MoE."""

    def __init__(self, gated: bool) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.out, self.gated = nn.Linear(HIDDEN, WIDTH, bias=False), gated
        self.share = nn.Linear(WIDTH, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shared = self.out(nn.functional.silu(self.gate(x)) * self.up(x))
        return super().forward(x) + (torch.sigmoid(self.share(x)) * shared if self.gated else shared)


@pytest.mark.parametrize("gated", [False, True])
def test_a_shared_expert_is_two_products_of_which_the_second_adds_the_routed_ones(
    compiled: Any, reports: Any, gated: bool
) -> None:
    torch.manual_seed(0)
    layer, x = Shared(gated).eval(), torch.randn(9, WIDTH)
    with torch.no_grad():
        torch.testing.assert_close(compiled(layer)(x), layer(x), rtol=1e-4, atol=1e-5)
    sites = [s for r in reports if r.stage == "captured" for s in r.fused]
    (last,) = [s for s in sites if s.fusion.startswith("gemm.matmul.r")]
    assert "aten.add" in str(last), "the routed experts' result is a residual of the shared one's second product"
    router = ["gemm.activation"] if gated else []
    assert sorted(s.fusion for s in sites if s is not last) == [*router, "gemm.gated", "gemm.matmul", "moe.routed_ffn"]
