"""Loops over low-rank adapters, unrolled by torch.export, become products with the adapter of each token."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fusionreg

T, K, N, E = 6, 32, 24, 3


class Loop(nn.Module):
    def __init__(self, way, ranks=(8, 8, 8), scales=(0.5, 0.5, 0.5), adapters=range(E)):
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.ParameterList(torch.randn(r, K) for r in ranks)
        self.b = nn.ParameterList(torch.randn(N, r) for r in ranks)
        self.w, self.scales, self.way, self.adapters = nn.Parameter(torch.randn(N, K)), scales, way, adapters

    def forward(self, x, ids):
        y = nn.functional.linear(x, self.w)
        for i in self.adapters:
            a, b, s, mask = self.a[i], self.b[i], self.scales[i], ids == i
            if self.way in ("where", "read"):
                y = y + torch.where(mask[:, None], x @ a.T @ b.T * s, 0.0)
            elif self.way == "where one":
                y = y + torch.where(mask[:, None], x @ a.T @ b.T * s, 1.0)
            elif self.way == "whole":
                y = torch.where(mask[:, None], y + s * nn.functional.linear(x @ a.T, b), y)
            elif self.way == "in place":
                y[mask] += x[mask] @ a.T @ b.T * s
            elif self.way == "rows":
                (token,) = torch.where(mask)
                y = y.index_add(0, token, x[token] @ a.T @ b.T * s)
            elif self.way == "overwritten":
                y[mask] = x[mask] @ a.T @ b.T * s
            else:
                y = y + mask[:, None].to(x.dtype) * (x @ a.T @ b.T * s)
        return (y, mask) if self.way == "read" else y


@pytest.fixture(scope="module")
def registry():
    return fusionreg.load_registry(device="sim")


def run(registry, module):
    x, ids = torch.randn(T, K), torch.tensor([0, -1, 2, 2, 1, 7])
    fused = registry.fuse(torch.export.export(module.eval(), (x, ids)))
    with torch.no_grad():
        exact = module.double()(x.double(), ids)
    torch.testing.assert_close(fused(x, ids), exact, rtol=1e-5, atol=1e-4, check_dtype=False)
    return any(s.fusion.startswith("gemm.lora_") for s in fused.sites)


@pytest.mark.parametrize(
    ("way", "options"),
    [
        ("where", {"adapters": (2, 0, 1)}),
        ("whole", {"scales": (1.0, 1.0, 1.0)}),
        ("in place", {"ranks": (8, 4, 16)}),
        ("rows", {"scales": (0.5, 2.0, 1.0)}),
    ],
)
def test_loops(registry, way, options):
    assert run(registry, Loop(way, **options))


@pytest.mark.parametrize(
    ("way", "options"),
    [
        ("where", {"adapters": (0, 2)}),
        ("whole", {"adapters": (0, 1, 2, 1)}),
        ("overwritten", {}),
        ("where one", {}),
        ("read", {}),  # the mask of the last turn is a result
        ("multiplied", {}),  # lets a NaN of other adapters through
    ],
)
def test_near_misses(registry, way, options):
    assert not run(registry, Loop(way, **options))
