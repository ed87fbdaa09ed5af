"""What autocast does to an operator's inputs: defined, per fusion, and the same with gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fusionreg.core.errors import ArgumentError

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def low():
    return torch.autocast("cpu", BF16)


def close(found, expected, tolerance=2e-5):
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_products_are_lowered(operators):
    """As torch's: float32 in, bfloat16 out; a bias of another dtype follows."""
    x, w, bias = torch.randn(4, 16), torch.randn(16, 8), torch.randn(8)
    with low():
        y = operators["gemm.bias"](x, w.to(BF16), bias)
        assert y.dtype == torch.mm(x, w).dtype == BF16
    assert torch.equal(y, operators["gemm.bias"](x.to(BF16), w.to(BF16), bias.to(BF16)))


def test_convolutions_are_lowered_and_statistics_are_not(operators):
    """As torch's: -257 is no number of bfloat16."""
    x, w = torch.randn(1, 4, 5, 5), torch.randn(8, 4, 3, 3)
    statistics = [torch.ones(8), torch.full((8,), -256.0), torch.full((8,), -257.0), torch.ones(8)]
    with low():
        y = operators["conv.conv_bn_relu"](x, w, None, *statistics)
        assert y.dtype == F.conv2d(x, w).dtype == BF16
    low_product = F.conv2d(x.to(BF16).double(), w.to(BF16).double())
    close(y.double(), torch.relu((low_product + 257.0) / (1.0 + 1e-5) ** 0.5 - 256.0), 0.01)


def test_normalisations_are_raised(operators):
    """As torch's on a GPU: half precision in, float32 out."""
    x, scale, bias = torch.randn(4, 40).to(BF16), torch.randn(40), torch.randn(40)
    with low():
        y = operators["norm.layernorm"](x, scale, bias)
        assert operators["norm.layernorm"](x, scale.to(BF16), bias.to(BF16)).dtype == F32
    assert y.dtype == F32
    close(y, F.layer_norm(x.float(), (40,), scale, bias))


@pytest.mark.parametrize(
    ("gate", "wide"), [(BF16, BF16), (F32, F32)], ids=["alike", "mixed"]
)
def test_others_are_promoted(operators, gate, wide):
    """All inputs of one dtype variable take the widest dtype among them; other inputs stay as they are."""
    x = torch.randn(2, 4, 6).to(BF16)
    statistics = [torch.randn(4).abs() + 0.5 for _ in range(4)]
    with low():
        y, *running = operators["norm.batchnorm_add_relu"](x, *statistics, x.to(gate))
    assert y.dtype == wide and {r.dtype for r in running} == {F32}
    expected = F.batch_norm(x.float(), None, None, *statistics[:2], True) + x.float()
    close(y.float(), expected.relu(), 2e-5 if wide == F32 else 2e-2)


def test_outside_of_autocast_mixed_dtypes_stay_an_error(operators):
    x, scale, bias = torch.randn(4, 40).to(BF16), torch.randn(40), torch.randn(40)
    with pytest.raises(ArgumentError, match="scale is float32 — bfloat16"):
        operators["norm.layernorm"](x, scale, bias)
    with low(), torch.autocast("cpu", enabled=False), pytest.raises(ArgumentError, match="scale is float32 — bfloat16"):
        operators["norm.layernorm"](x, scale, bias)


def test_float64_is_left_alone(operators):
    """Nothing is cast down behind the caller's back: the call is refused as outside of autocast."""
    with low(), pytest.raises(ArgumentError, match="float64"):
        operators["norm.layernorm"](torch.randn(4, 40, dtype=F64), torch.randn(40), torch.randn(40))


@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
def test_gradients_come_back_in_the_dtypes_of_the_leaves(operators, inside):
    """The backward pass may run inside of autocast or outside of it: it sees what the forward pass saw."""
    x = torch.randn(4, 40).to(BF16).requires_grad_()
    scale, bias = torch.randn(40, requires_grad=True), torch.randn(40, requires_grad=True)
    with low():
        loss = operators["norm.layernorm"](x, scale, bias).pow(2).sum()
        if inside:
            loss.backward()
    if not inside:
        loss.backward()
    assert [t.grad.dtype for t in (x, scale, bias)] == [BF16, F32, F32]
    twin = [t.detach().clone().requires_grad_() for t in (x, scale, bias)]
    F.layer_norm(twin[0].float(), (40,), *twin[1:]).pow(2).sum().backward()
    for found, right in zip((x, scale, bias), twin, strict=True):
        close(found.grad, right.grad, 1e-4)


def test_a_compiled_region_casts_alike(operators):
    op = operators["norm.layernorm"]
    x, scale, bias = torch.randn(4, 40).to(BF16).requires_grad_(), torch.randn(40), torch.randn(40)

    def f(x):
        with low():
            return op(x, scale, bias) * 2

    torch._dynamo.reset()
    results = []
    for g in (f, torch.compile(f, backend="aot_eager", fullgraph=True)):
        y = g(x)
        results.append((y, torch.autograd.grad(y.sum(), x)[0]))
    for eager, made in zip(*results, strict=True):
        assert made.dtype == eager.dtype
        close(made, eager)


def test_graphs_compiled_under_autocast(operators):
    """autocast around the compiled function, as in a training loop."""
    op = operators["gemm.bias"]
    x, w, bias = torch.randn(4, 16), torch.randn(16, 8), torch.randn(8)
    torch._dynamo.reset()
    f = torch.compile(lambda x: op(x, w, bias), backend="aot_eager", fullgraph=True)
    with low():
        assert torch.equal(f(x), op(x, w, bias)) and f(x).dtype == BF16
    assert f(x).dtype == F32
