"""Scores behind masks in training: forward and backward fused, nothing kept but probabilities and masks."""

from __future__ import annotations

import math

import pytest
import softmax as kit
import torch

from fusionreg.api import Registry

from .conftest import fused, same

B, H, Q, K = 2, 2, 6, 8


@pytest.fixture(scope="module")
def scores():
    return Registry(kit.awake("rows"), device="sim")


def masked(x, m):
    return (x * 0.3).masked_fill(m, -math.inf).softmax(-1)


def causal(x, m):
    return torch.where(torch.ones(Q, K, dtype=torch.bool).tril(K - Q), x / 3.0, -1e9).softmax(-1)


def both(x, m):
    return x.masked_fill(m, -1e9).masked_fill(torch.ones(Q, K, dtype=torch.bool).triu(3), -1e9).softmax(-1)


@pytest.mark.parametrize(
    ("function", "names"),
    [(masked, "mask_softmax"), (causal, "causal_softmax"), (both, "mask_causal_softmax")],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_forward_and_backward(function, names, scores, compiled, reports):
    x, w = torch.randn(B, H, Q, K, requires_grad=True), torch.randn(B, H, Q, K)
    m = torch.rand(B, 1, 1, K) < 0.3
    m[0] = m[0].logical_and(torch.arange(K) > 0)  # the first sample has a key everywhere
    m[1] = True  # and the second none
    twin = x.detach().double().requires_grad_()
    want = function(twin, m)
    want.backward(w.double())
    step, saved = compiled(function, registry=scores), []
    step(x, m)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        got = step(x, m)
    got.backward(w)
    torch.testing.assert_close(got, want.float(), rtol=1e-5, atol=1e-6, equal_nan=True)
    torch.testing.assert_close(x.grad, twin.grad.float(), rtol=1e-5, atol=1e-6, equal_nan=True)
    assert f"attention.{names}" in fused(reports)
    kernels = scores.runtime.kernels_used
    assert {f"attention.{names}/rows", f"attention.{names}_backward/rows"} <= set(kernels)
    assert all(t.dtype == torch.bool or t.numel() <= 1 or t.data_ptr() == got.data_ptr() for t in saved)


def test_an_additive_mask_gets_its_gradient(scores, compiled, reports):
    x, bias = torch.randn(B, H, Q, K, requires_grad=True), torch.randn(H, Q, K, requires_grad=True)
    w = torch.randn(B, H, Q, K)
    twins = [t.detach().double().requires_grad_() for t in (x, bias)]

    def function(x, bias):
        return torch.softmax(x * 0.25 + bias, -1)

    function(*twins).backward(w.double())
    compiled(function, registry=scores)(x, bias).backward(w)
    for got, want in zip((x, bias), twins, strict=True):
        same(got.grad, want.grad.float())
    assert "attention.bias_softmax" in fused(reports)


@pytest.mark.filterwarnings("error:.*fused nothing in a graph")  # as it is captured, the loss is one operator
def test_log_softmax_of_a_loss(scores, compiled, reports):
    """Cross entropy as torch spells it: the logarithm and its gradient are kernels of ours, the loss is none."""
    x, label = torch.randn(6, 40, requires_grad=True), torch.tensor([3, 39, 0, 7, -100, 12])
    twin = x.detach().double().requires_grad_()
    want = torch.nn.functional.cross_entropy(twin, label)
    want.backward()
    step = compiled(lambda x: torch.nn.functional.cross_entropy(x, label), registry=scores)
    got = step(x)
    got.backward()
    torch.testing.assert_close(got, want.float())
    torch.testing.assert_close(x.grad, twin.grad.float())
    assert fused(reports, "forward") == ["attention.log_softmax"]
    assert {f"attention.log_softmax{b}/rows" for b in ("", "_backward")} <= set(scores.runtime.kernels_used)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy(reduction, registry, compiled, reports):
    """Forward and backward are kernels, and no probabilities are kept for it: scores and labels alone."""
    catalog = kit.ready("cross_entropy")
    kernels = Registry(catalog, device="sim")
    x, label = torch.randn(6, 40, requires_grad=True), torch.tensor([3, 39, 0, 7, -100, 12])
    twin, w = x.detach().double().requires_grad_(), torch.rand(6 if reduction == "none" else ())
    want = torch.nn.functional.cross_entropy(twin, label, reduction=reduction)
    want.backward(w.double())
    step = compiled(lambda x: torch.nn.functional.cross_entropy(x, label, reduction=reduction), registry=kernels)
    step(x)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        got = step(x)
    got.backward(w)
    torch.testing.assert_close(got, want.float())
    torch.testing.assert_close(x.grad, twin.grad.float())
    name = f"attention.cross_entropy{'_rows' if reduction == 'none' else ''}"
    assert set(fused(reports)) == {name}
    assert {f"{name}/rows", f"{name}_backward/rows"} <= set(kernels.runtime.kernels_used)
    assert all(t.numel() <= 6 or t.data_ptr() == x.data_ptr() for t in saved)
