"""Backward operators in a program, written by hand or by a transform, and calls of fusions in what autograd made."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from fusionreg.integrations.torch.compile import lowering

from .conftest import fused, same

A = torch.ops.aten


@pytest.fixture
def given() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=generator) for s in ((8, 16), (8, 16), (16,), (16,))]


def layer_norm(dy: Any, x: Any, w: Any, b: Any) -> Any:
    _, mean, rstd = A.native_layer_norm(x, [16], w, b, 1e-3)
    return A.native_layer_norm_backward(dy, x, [16], mean, rstd, w, b, [True, True, True])


def rms_norm(dy: Any, x: Any, w: Any, b: Any) -> Any:
    _, rstd = A._fused_rms_norm(x, [16], w, 1e-3)
    return A._fused_rms_norm_backward(dy, x, [16], rstd, w, [True, True])


def group_norm(dy: Any, x: Any, w: Any, b: Any) -> Any:
    x, dy, w, b = x.view(2, 8, 4, 2), dy.view(2, 8, 4, 2), w[:8].contiguous(), b[:8].contiguous()
    y, mean, rstd = A.native_group_norm(x, w, b, 2, 8, 8, 2, 1e-3)
    return A.native_group_norm_backward(A.silu_backward(dy, y), x, mean, rstd, w, 2, 8, 8, 2, [True, True, True])


def plain(kind: str, dy: Any, *given: Any) -> Any:
    """The same by torch's own automatic differentiation, of functions that call none of these operators."""
    leaves = [t.clone().requires_grad_() for t in given]
    x, w, b = leaves
    if kind == "layer":
        y, wanted = F.layer_norm(x, (16,), w, b, 1e-3), leaves
    elif kind == "rms":
        y, wanted = x * (x.square().mean(-1, keepdim=True) + 1e-3).rsqrt() * w, leaves[:2]
    else:
        y, wanted = F.silu(F.group_norm(x.view(2, 8, 4, 2), 2, w[:8], b[:8], 1e-3)), leaves
        dy = dy.view(2, 8, 4, 2)
    found = torch.autograd.grad(y, wanted, dy)
    return found if kind != "group" else (found[0].view(2, 8, 4, 2), found[1][:8], found[2][:8])


@pytest.mark.parametrize(
    ("f", "kind", "name"),
    [
        (layer_norm, "layer", "norm.layernorm_backward"),
        (rms_norm, "rms", "norm.rmsnorm_backward"),
        (group_norm, "group", "norm.groupnorm_swish_backward"),
    ],
)
def test_a_backward_operator_reads_no_statistics_that_stand_beside_it(
    compiled: Any, reports: Any, given: Any, f: Any, kind: str, name: str
) -> None:
    with torch.no_grad():
        got = compiled(f)(*given)
    for mine, other in zip(got, plain(kind, *given), strict=True):
        same(mine, other)
    assert fused(reports) == [name]


def test_statistics_of_another_tensor_are_read(compiled: Any, reports: Any, given: Any) -> None:
    def f(dy: Any, x: Any, w: Any, b: Any) -> Any:
        _, mean, rstd = A.native_layer_norm(x + 1.0, [16], w, b, 1e-3)
        return A.native_layer_norm_backward(dy, x, [16], mean, rstd, w, b, [True, True, True])

    with torch.no_grad():
        for mine, other in zip(compiled(f)(*given), f(*given), strict=True):
            same(mine, other)
    assert "norm.layernorm_backward" not in fused(reports)


def test_a_forward_whose_statistics_are_asked_for_does_not_run_twice(compiled: Any, reports: Any, given: Any) -> None:
    def f(dy: Any, x: Any, w: Any, b: Any) -> Any:
        y, mean, rstd = A.native_group_norm(x.view(2, 8, 4, 2), w[:8], b[:8], 2, 8, 8, 2, 1e-3)
        return F.silu(y), mean, rstd

    with torch.no_grad():
        for mine, other in zip(compiled(f)(*given), f(*given), strict=True):
            same(mine, other)
    assert not any(n.startswith("norm.") for n in fused(reports))
    assert any("would run beside it" in s.reason for r in reports for s in r.lost)


SPECIAL = [-7.0, -3.0, -1.0, -0.5, 0.0, -0.0, 0.3, 1.0, 3.0, 9.0, float("nan")]


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("gelu_backward", ()), ("silu_backward", ()), ("sigmoid_backward", ()), ("tanh_backward", ()),
        ("threshold_backward", (0,)), ("threshold_backward", (0.5,)), ("leaky_relu_backward", (0.1, False)),
        ("softplus_backward", (1.0, 20.0)), ("mish_backward", ()), ("hardswish_backward", ()),
    ],
)  # fmt: skip
def test_a_pointwise_backward_operator_is_part_of_a_region(
    compiled: Any, reports: Any, name: str, more: tuple[Any, ...]
) -> None:
    def f(dy: Any, x: Any) -> Any:
        return getattr(A, name)(dy * 2.0, x, *more) + 1.0

    values = SPECIAL[:-1] if name == "hardswish_backward" else SPECIAL  # at NaN torch's own depends on the processor
    x = torch.tensor([values, values])
    dy = torch.linspace(-1, 2, x.numel()).view_as(x)
    with torch.no_grad():
        got, expected = compiled(f)(dy, x), f(dy, x)
    assert torch.allclose(got, expected, rtol=1e-5, atol=1e-6, equal_nan=True)
    (site,) = reports[0].fused
    assert site.operators == ("aten.mul", f"aten.{name}", "aten.add") and reports[0].lost == ()


def test_gelu_tanh_dropout_and_softmax(compiled: Any, reports: Any, given: Any) -> None:
    def f(dy: Any, x: Any) -> Any:
        y = torch.softmax(x, -1)
        dropped = A.native_dropout_backward(dy, x > 0, 1.25)
        return A.gelu_backward(dropped, x, approximate="tanh"), A._softmax_backward_data(dy, y, -1, x.dtype)

    with torch.no_grad():
        for mine, other in zip(compiled(f)(*given[:2]), f(*given[:2]), strict=True):
            same(mine, other)
    assert sorted(fused(reports)) == ["attention.softmax", "attention.softmax_backward", "pointwise.region"]


def test_a_backward_call_takes_in_what_stands_around_it(compiled: Any, reports: Any, given: Any) -> None:
    """The gradient that comes back along the residual is added in the kernel that computes that of the norm."""
    _, x, w, b = given

    def block(x: Any, w: Any, b: Any) -> Any:
        return x + torch.tanh(F.layer_norm(x, (16,), w, b))

    leaves = [t.clone().requires_grad_() for t in (x, w, b)]
    found = torch.autograd.grad(compiled(block)(*leaves).sin().sum(), leaves)
    for mine, other in zip(found, torch.autograd.grad(block(*leaves).sin().sum(), leaves), strict=True):
        same(mine, other)
    assert fused(reports) == ["norm.layernorm", "pointwise.region"]
    (site,) = [s for r in reports if r.stage == "backward" for s in r.fused]
    assert site.fusion.startswith("norm.layernorm_backward.r")
    assert site.operators == ("aten.tanh", "aten.tanh_backward", "fusionreg.norm_layernorm_backward", "aten.add")


def test_a_mask_stays_the_one_that_was_drawn(
    compiled: Any, reports: Any, given: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backward call with a seed is taken in by a larger one, with the same seed."""
    _, x, w, b = given
    leaves = [t.clone().requires_grad_() for t in (x, w, b)]

    def block(x: Any, w: Any, b: Any) -> Any:
        return x + F.layer_norm(F.dropout(F.gelu(x), 0.5, True), (16,), w, b)

    def gradients() -> Any:
        step = compiled(block)
        step(*leaves)
        torch.manual_seed(4)
        return torch.autograd.grad(step(*leaves).sin().sum(), leaves)

    mine = gradients()
    assert any(n.startswith("norm.gelu_dropout_layernorm_backward.r") for n in fused(reports, "backward"))
    monkeypatch.setattr(lowering, "unfold", lambda *_: False)
    for one, other in zip(mine, gradients(), strict=True):
        same(one, other)


def test_calls_by_hand_are_taken_in_too(compiled: Any, reports: Any, given: Any, registry: Any) -> None:
    from fusionreg.torch import ops

    _, x, w, b = given
    norm = ops.use(registry).norm

    def f(x: Any, w: Any, b: Any) -> Any:
        return torch.sigmoid(norm.layernorm(x, w, b)) * 2.0, norm.rmsnorm(x, w)

    with torch.no_grad():
        got = compiled(f)(x, w, b)
    same(got[0], torch.sigmoid(F.layer_norm(x, (16,), w, b)) * 2.0)
    same(got[1], F.rms_norm(x, (16,), w, 1e-5))
    (name,) = fused(reports)
    assert name.startswith("norm.layernorm.r"), "and the other stays the call that it was"
