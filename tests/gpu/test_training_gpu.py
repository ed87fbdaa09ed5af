"""Training with fusions that name no backward fusion, on the device: gradients against float64, and what is saved."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")
nn, F = torch.nn, torch.nn.functional

pytestmark = pytest.mark.gpu


class Gated(nn.Module):
    def __init__(self, activation: Any, width: int = 256) -> None:
        super().__init__()
        self.activation, self.norm = activation, nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Any) -> Any:
        return x + torch.sigmoid(x) * self.down(self.activation(self.up(self.norm(x))))


@pytest.mark.parametrize("inner", ["eager", "inductor"])
@pytest.mark.parametrize("activation", [F.relu, torch.tanh, F.gelu], ids=["relu", "tanh", "gelu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_gradients_are_as_good_as_those_of_eager(inner: str, activation: Any, dtype: Any) -> None:
    """No more than twice the error of the unfused model against float64, and a few ulp."""
    torch.manual_seed(0)
    exact = Gated(activation).cuda().double()
    plain, fused = (copy.deepcopy(exact).to(dtype) for _ in range(2))
    x = torch.randn(512, 256, device="cuda", dtype=dtype)
    reports: list[Any] = []
    torch._dynamo.reset()
    options = {"report": reports.append, "policy": "aggressive", "strict": True, "inner": inner}
    step = torch.compile(fused, backend="fusionreg", options=options)
    found = []
    for model, run in ((exact, exact), (plain, plain), (fused, step)):
        given = x.to(next(model.parameters()).dtype).requires_grad_()
        y = run(given)
        way = torch.linspace(-1, 1, y.numel(), device="cuda").view_as(y).to(y.dtype)
        found.append([y, *torch.autograd.grad(y, [given, *model.parameters()], way)])
    for right, own, got in zip(*found, strict=True):
        scale = right.abs().max()
        allowed = 2 * (own.double() - right).abs().max() + 4 * torch.finfo(dtype).eps * scale
        assert got.dtype == dtype and (got.double() - right).abs().max() <= allowed
    sites = [s for r in reports if r.stage == "captured" for s in r.fused]
    assert sites and all(s.backward for s in sites), [str(r) for r in reports]


@pytest.mark.parametrize("activation", ["Relu", "Gelu"])
def test_saved_are_inputs_and_results(activation: str) -> None:
    from fusionreg.torch import ops

    x, w, b = (torch.randn(s, device="cuda", requires_grad=True) for s in ((512, 256), (256, 512), (512,)))
    saved: list[Any] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = ops.gemm.bias(x, w, b, activation=activation)
    assert {t.data_ptr() for t in saved} <= {t.data_ptr() for t in (x, w, b, y)}
    assert (y.data_ptr() in {t.data_ptr() for t in saved}) == (activation == "Relu")
