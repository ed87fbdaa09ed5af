"""Products that torch has more names for: sums of products, bilinear layers."""

from __future__ import annotations

import pytest
import torch

import fusionreg


@pytest.fixture(scope="module")
def registry():
    return fusionreg.load_registry(device="sim")


class Called(torch.nn.Module):
    def __init__(self, call):
        super().__init__()
        self.call = call

    def forward(self, *args):
        return self.call(*args)


@pytest.mark.parametrize("shape", [(4, 8), (8,), (4, 1), (1,)])
@pytest.mark.parametrize(("beta", "alpha"), [(1, 1), (0.5, 2.0), (0, 1)])
def test_sums_of_products_are_one_product(registry, shape, beta, alpha):
    torch.manual_seed(0)
    args = torch.randn(shape), torch.randn(3, 4, 5), torch.randn(3, 5, 8)
    module = Called(lambda c, a, b: torch.addbmm(c, a, b, beta=beta, alpha=alpha).relu())
    fused = registry.fuse(torch.export.export(module, args))
    assert any(s.fusion.startswith("gemm.") for s in fused.sites)
    c, a, b = (v.double() for v in args)
    exact = (beta * c + alpha * torch.einsum("bmk,bkn->mn", a, b)).relu()
    torch.testing.assert_close(fused(*args).double(), exact.expand(4, 8), rtol=1e-5, atol=1e-5)


def test_nothing_of_what_beta_leaves_out_comes_through(registry):
    args = torch.full((4, 8), torch.nan), torch.randn(3, 4, 5), torch.randn(3, 5, 8)
    module = Called(lambda c, a, b: torch.addbmm(c, a, b, beta=0).relu())
    assert registry.fuse(torch.export.export(module, args))(*args).isfinite().all()


def test_bilinear_layers(registry):
    torch.manual_seed(0)
    args = torch.randn(3, 4), torch.randn(3, 6), torch.randn(5, 4, 6), torch.randn(5)
    fused = registry.fuse(torch.export.export(Called(torch.nn.functional.bilinear), args))
    a, b, w, bias = (v.double() for v in args)
    exact = torch.einsum("bi,bj,oij->bo", a, b, w) + bias
    torch.testing.assert_close(fused(*args).double(), exact, rtol=1e-5, atol=1e-5)
