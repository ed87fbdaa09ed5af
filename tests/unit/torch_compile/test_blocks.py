"""One training step of a block of a transformer: loss and gradients of eager, and how deep what is fused goes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from functorch.compile import aot_function, make_boxed_func
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch_blocks import BertLayer, LlamaBlock

import fusionreg

from .conftest import fused, same


class Calls(TorchDispatchMode):
    """Notes the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def bert() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    model = BertLayer(32, 4)
    model.drop.p = 1e-7  # rounded to a multiple of 1/65536 it drops nothing
    return model, (torch.randn(2, 6, 32), (torch.arange(6) < torch.tensor([[4], [6]])).float())


def llama() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return LlamaBlock(), (torch.randn(2, 7, 32),)


@pytest.mark.parametrize(
    ("made", "forward", "backward"),
    [
        (bert, {"norm.dropout_residual_layernorm"}, {"norm.dropout_residual_layernorm_backward"}),
        (
            llama,
            {"norm.rmsnorm", "norm.residual_rmsnorm", "pointwise.region"},
            {"norm.residual_rmsnorm_backward.", "pointwise.region"},
        ),
    ],
)
def test_a_step(compiled: Any, reports: Any, made: Any, forward: set[str], backward: set[str]) -> None:
    torch.manual_seed(0)
    model, (x, *rest) = made()
    reference = copy.deepcopy(model)
    alone = fusionreg.load_registry(device="sim", allow=("norm", "pointwise"))  # products would take residuals in
    step = compiled(model, policy="balanced", registry=alone)
    mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    loss, expected = (f(t, *rest).square().mean() for f, t in ((step, mine), (reference, other)))
    same(loss, expected, 1e-6)
    with Calls() as ran:
        loss.backward()
    expected.backward()
    same(mine.grad, other.grad, 1e-6)
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert p.grad is not None, name
        same(p.grad, q.grad, 1e-6)
    assert forward <= set(fused(reports))
    for name in backward:
        called = f"fusionreg.{name.replace('.', '_')}"
        assert any(n.startswith(called) for n in ran.names), name


def test_seven_operators_deep_in_both_directions(compiled: Any, reports: Any) -> None:
    """A spelled-out RMSNorm behind a residual addition, as transformers write it: one kernel each way."""

    def f(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = x + residual
        wide = h.to(torch.float32)
        variance = wide.pow(2).mean(-1, keepdim=True)
        return weight * (wide * torch.rsqrt(variance + 1e-6)).to(h.dtype), h

    def count(module: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append([n for n in module.graph.nodes if n.op == "call_function"])
        return make_boxed_func(module.forward)

    given = [torch.randn(s, requires_grad=True) for s in ((5, 24), (5, 24), (24,))]
    graphs: list[list[torch.fx.Node]] = []
    y, h = aot_function(f, count)(*given)
    other = torch.autograd.grad((y.square() + h.sin()).sum(), given)
    assert len(graphs[1]) >= 7, "operators of the graph that autograd makes"

    y, h = compiled(f)(*given)
    gradients = [2.0 * y.detach(), h.detach().cos()]
    with Calls() as ran:
        mine = torch.autograd.grad((y, h), given, gradients)
    for a, b in zip(mine, other, strict=True):
        same(a, b)
    (called,) = (n for n in ran.names if "detach" not in n)
    assert called.startswith("fusionreg.norm_residual_rmsnorm_backward")
    (site,) = reports[0].fused
    assert site.fusion == "norm.residual_rmsnorm" and site.differentiable
    assert site.operators == (
        "aten.add", "aten.to", "aten.pow", "aten.mean", "aten.add", "aten.rsqrt", "aten.mul", "aten.to", "aten.mul"
    )  # fmt: skip
    assert reports[0].deepest >= 7
