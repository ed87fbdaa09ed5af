"""torch.compile(backend="fusionreg") on the device: by name, with both inner backends, captured, on two streams."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")
nn, F = torch.nn, torch.nn.functional

pytestmark = pytest.mark.gpu


class Layer(nn.Module):
    def __init__(self, width: int = 256, dropout: float = 0.1) -> None:
        super().__init__()
        self.up, self.norm, self.dropout = nn.Linear(width, width), nn.LayerNorm(width), nn.Dropout(dropout)

    def forward(self, x: Any) -> Any:
        return x + self.norm(self.dropout(F.gelu(self.up(x))))


def _compiled(model: Any, reports: list[Any], **options: Any) -> Any:
    torch._dynamo.reset()
    given = {"report": reports.append, "policy": "aggressive", "strict": True, **options}
    return torch.compile(model, backend="fusionreg", options=given)


def _fused(reports: list[Any], stage: str = "captured") -> list[str]:
    return [s.fusion for r in reports if r.stage == stage for s in r.fused]


@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_a_training_step(inner: str) -> None:
    torch.manual_seed(0)
    model = Layer(dropout=0.0).cuda()
    reference = copy.deepcopy(model)
    x = torch.randn(512, 256, device="cuda")
    reports: list[Any] = []
    got, expected = _compiled(model, reports, inner=inner)(x), reference(x)
    torch.testing.assert_close(got, expected, atol=2e-3, rtol=1e-3)  # products may use TF32
    (got * x).sum().backward()
    (expected * x).sum().backward()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, atol=0.05, rtol=0.02)
    assert any(n.startswith("norm.layernorm") for n in _fused(reports))


def test_graphs_of_inductor() -> None:
    """A mode in which Inductor captures forward and backward pass, fused calls among them."""
    torch.manual_seed(0)
    model = Layer(dropout=0.0).cuda()
    reference = copy.deepcopy(model)
    reports: list[Any] = []
    step = _compiled(model, reports, mode="reduce-overhead")
    for _ in range(4):
        x = torch.randn(512, 256, device="cuda")
        torch.compiler.cudagraph_mark_step_begin()
        got, expected = step(x), reference(x)
        torch.testing.assert_close(got, expected, atol=2e-3, rtol=1e-3)
        (got * x).sum().backward()
        (expected * x).sum().backward()
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, atol=0.05, rtol=0.02)
        model.zero_grad(set_to_none=True)
        reference.zero_grad(set_to_none=True)
    assert _fused(reports)


def test_dropout_in_training() -> None:
    model = Layer().cuda().bfloat16()
    reports: list[Any] = []
    step = _compiled(model, reports)
    x = torch.randn(512, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    torch.manual_seed(1)
    first = step(x)
    first.float().square().mean().backward()
    gradient = x.grad.clone()
    x.grad = None
    assert "norm.gelu_dropout_layernorm" in _fused(reports)
    torch.manual_seed(1)
    again = step(x)
    again.float().square().mean().backward()
    assert torch.equal(first, again) and torch.equal(gradient, x.grad)
    assert not torch.equal(step(x), again)


@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_inference_in_a_graph(inner: str) -> None:
    model = Layer().cuda().half().eval()
    reports: list[Any] = []
    step = _compiled(model, reports, inner=inner, cuda_graph=True)
    with torch.no_grad():
        for rows in (64, 96, 64, 96):
            for _ in range(3):
                x = torch.randn(rows, 256, device="cuda", dtype=torch.float16)
                torch.testing.assert_close(step(x), model(x), atol=5e-3, rtol=5e-3)
    assert _fused(reports)


def test_the_stream_of_the_caller() -> None:
    model = Layer().cuda().half().eval()
    step = _compiled(model, [], inner="eager")
    side = torch.cuda.Stream()
    x = torch.randn(2048, 256, device="cuda", dtype=torch.float16)
    with torch.no_grad():
        step(x)
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(50_000_000)
            y = x * 3
            got = step(y)
        side.synchronize()
        torch.testing.assert_close(got, model(x * 3), atol=5e-3, rtol=5e-3)


def test_autocast_in_training() -> None:
    torch.manual_seed(0)
    model = Layer(dropout=0.0).cuda()
    reference = copy.deepcopy(model)
    x = torch.randn(512, 256, device="cuda")
    reports: list[Any] = []
    step = _compiled(model, reports)
    with torch.autocast("cuda", torch.bfloat16):
        got, expected = step(x), reference(x)
    assert got.dtype == expected.dtype
    torch.testing.assert_close(got, expected, atol=0.05, rtol=0.05)
    got.square().mean().backward()
    expected.square().mean().backward()
    torch.testing.assert_close(model.up.weight.grad, reference.up.weight.grad, atol=1e-3, rtol=0.1)
    assert any(n.startswith("norm.layernorm") for n in _fused(reports))
