"""Training with fusions that name no backward fusion: what is saved, what is computed again, what the report says."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fusionreg.api import Registry

from .conftest import fused, same


def gate(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.sigmoid(x * w + 1.0) * x


def dense(activation: Callable[..., Any]) -> Callable[..., Any]:
    def f(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return activation(F.linear(x, w, b))

    return f


def summed(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Of both products together, less would be to keep than of each."""
    return F.gelu(x @ w + x @ v) @ w


CASES: dict[str, Any] = {
    "region": (gate, [(4, 16), (16,)]),
    "relu": (dense(F.relu), [(8, 16), (32, 16), (32,)]),
    "gelu": (dense(F.gelu), [(8, 16), (32, 16), (32,)]),
    "sum": (summed, [(64, 16), (16, 16), (16, 16)]),
}


@pytest.mark.parametrize(("name", "inner"), [*((n, "eager") for n in CASES), ("gelu", "inductor"), ("sum", "inductor")])
def test_values_gradients_and_what_is_saved(compiled: Any, reports: Any, inner: str, name: str) -> None:
    """No mask and no value from inside a fused call is kept, whatever the partitioner would rather."""
    f, shapes = CASES[name]
    torch.manual_seed(0)
    given = [torch.randn(s, requires_grad=True) for s in shapes]
    step, saved = compiled(f, inner=inner), []
    step(*given)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        got = step(*given)
    expected, way = f(*given), torch.randn(got.shape)
    same(got, expected)
    for mine, other in zip(
        torch.autograd.grad(got, given, way), torch.autograd.grad(expected, given, way), strict=True
    ):
        same(mine, other)
    assert fused(reports), "something is fused although gradients are wanted"
    allowed = [*given, got]
    if name == "sum":  # operands and results of the fused call
        x, w, v = given
        allowed += [x @ w, x @ v, F.gelu(x @ w + x @ v)]
    for t in saved:
        assert t.dtype == torch.float32 and any(_is(t, a) for a in allowed), tuple(t.shape)


EMPTY: dict[str, Any] = {
    "no rows": (dense(F.relu), [(0, 16), (8, 16), (8,)]),
    "nothing to sum": (dense(F.relu), [(4, 0), (8, 0), (8,)]),
    "no keys": (F.scaled_dot_product_attention, [(1, 2, 4, 32), (1, 2, 0, 32), (1, 2, 0, 32)]),
}


@pytest.mark.parametrize("name", EMPTY)
def test_gradients_of_nothing_are_zeros(compiled: Any, reports: Any, name: str) -> None:
    f, shapes = EMPTY[name]
    given = [torch.randn(s, requires_grad=True) for s in shapes]
    got, expected = compiled(f)(*given), f(*given)
    same(got, expected)
    way = torch.ones_like(expected)
    for mine, other in zip(
        torch.autograd.grad(got, given, way), torch.autograd.grad(expected, given, way), strict=True
    ):
        same(mine, other)
    assert fused(reports)


def test_dropout_of_one_branch_is_none_of_the_other(compiled: Any, reports: Any) -> None:
    """An adapter's input drops elements, the same in both directions; the input of the weight beside it does not."""

    def f(x: torch.Tensor, w: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return x @ w + 2.0 * ((F.dropout(x, 0.25) @ a) @ b)

    step, x, one, none = compiled(f), torch.ones(32, 16, requires_grad=True), torch.eye(16), torch.zeros(16, 16)
    y = step(x, none, one, one)
    assert fused(reports) and y.detach().unique().tolist() == [0.0, pytest.approx(8 / 3)]
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], y)
    assert torch.equal(step(x, one, none, one), x), "what is added is 0 times what was kept"


def _is(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether a tensor, or its transpose, has these values."""
    ways = [found, found.t()] if found.dim() == 2 else [found]
    return any(t.shape == wanted.shape and torch.allclose(t, wanted, atol=1e-5) for t in ways)


@pytest.mark.filterwarnings("ignore::fusionreg.torch.FusionWarning")
def test_the_report_says_how_gradients_are_computed(compiled: Any, reports: Any, capsys: Any) -> None:
    given = [torch.randn(s, requires_grad=True) for s in CASES["relu"][1]]
    said = {}
    for name, policy in (("relu", "aggressive"), ("gelu", "aggressive"), ("gelu", "balanced"), ("region", "balanced")):
        reports.clear()
        f, shapes = CASES[name]
        given = [torch.randn(s, requires_grad=True) for s in shapes]
        compiled(f, policy=policy, explain=True)(*given)
        said[name, policy] = str(reports[0])
        assert str(reports[0]) in capsys.readouterr().out
    assert "gemm.bias: aten.linear → aten.relu" in said["relu", "aggressive"]
    assert "backward: from x, w, y" in said["relu", "aggressive"]
    assert "backward: computes MatMul, Add again" in said["gelu", "aggressive"]
    assert "aten.gelu at" not in said["gelu", "balanced"], "a product is not computed twice"
    reason = "its backward pass would compute MatMul again, which only policy aggressive takes"
    assert "not fused: gemm.bias at" in said["gelu", "balanced"] and reason in said["gelu", "balanced"]
    assert "backward: computes Mul, Add, Sigmoid again" in said["region", "balanced"]
    assert "saves 12.00 µs" in said["region", "balanced"], "three launches of the forward pass; what is read is as much"


def test_what_a_backward_pass_computes_is_fused_too(compiled: Any, reports: Any) -> None:
    given = [torch.randn(s, requires_grad=True) for s in CASES["region"][1]]
    compiled(gate)(*given).sum().backward()
    assert fused(reports) == ["pointwise.region"] and fused(reports, "forward") == []
    assert "pointwise.region" in fused(reports, "backward")


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


@pytest.mark.parametrize(
    ("way", "inner"), [("plain", "inductor"), ("checkpoint", "eager"), ("autocast", "eager"), ("dynamic", "eager")]
)
def test_a_block_in_every_mode(compiled: Any, reports: Any, inner: str, way: str) -> None:
    torch.manual_seed(1)
    model = Mlp()
    reference = copy.deepcopy(model)

    def run(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if way == "autocast":
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return block(x).float()
        return checkpoint(block, x, use_reentrant=False) if way == "checkpoint" else block(x)

    step = compiled(lambda x: run(model, x), inner=inner, dynamic=way == "dynamic", strict=way != "checkpoint")
    for rows in (6, 5) if way == "dynamic" else (6,):
        x = torch.randn(rows, 16)
        mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
        got, expected = step(mine), run(reference, other)
        tolerance = 2e-2 if way == "autocast" else 5e-5
        same(got, expected, tolerance)
        got.square().sum().backward()
        expected.square().sum().backward()
        same(mine.grad, other.grad, tolerance)
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            same(p.grad, q.grad, tolerance)
            p.grad = q.grad = None
    assert any(n.startswith("gemm.") for n in fused(reports))


def test_a_product_that_is_read_elsewhere_is_computed_for_its_readers_too(
    compiled: Any, reports: Any, monkeypatch: Any
) -> None:
    """Policy aggressive alone: the fused layer computes it once more, a launch is saved, and gradients add up. Without
    ``gemm.matmul``, that is, whose kernels store what others read."""
    fusions = Registry._fusions.fget
    known = property(lambda self: tuple(e for e in fusions(self) if e.name != "gemm.matmul"))
    monkeypatch.setattr(Registry, "_fusions", known)

    def f(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = x @ w
        return torch.relu(h + b), h.cumsum(-1)

    torch.manual_seed(4)
    given = [torch.randn(s, requires_grad=True) for s in ((8, 16), (16, 32), (32,))]
    got, expected = compiled(f)(*given), f(*given)
    for mine, other in zip(got, expected, strict=True):
        same(mine, other)
    for mine, other in zip(
        torch.autograd.grad((got[0] + got[1]).square().sum(), given),
        torch.autograd.grad((expected[0] + expected[1]).square().sum(), given),
        strict=True,
    ):
        same(mine, other)
    (site,) = [s for r in reports if r.stage == "captured" for s in r.fused if s.fusion.startswith("gemm.")]
    assert site.again == ("aten.matmul",) and "computes aten.matmul once more" in str(site)
    assert site.operators == ("aten.matmul", "aten.add", "aten.relu")
    reports.clear()
    compiled(f, policy="balanced")(*given)
    assert not any(n.startswith("gemm.") for n in fused(reports))
