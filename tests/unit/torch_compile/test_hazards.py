"""Mistakes that matchers make, met through torch.compile: each with the values that went wrong elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from .conftest import fused, same


@pytest.fixture(autouse=True)
def inference():
    with torch.no_grad():
        yield


def test_an_intermediate_that_is_returned_is_still_there(compiled: Any, reports: Any) -> None:
    def f(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> Any:
        t = a @ b + c
        return {"z": torch.relu(t), "nested": ([t],)}

    given = torch.randn(4, 8), torch.randn(8, 8), torch.randn(8)
    got, expected = compiled(f)(*given), f(*given)
    same(got["z"], expected["z"])
    same(got["nested"][0][0], expected["nested"][0][0])


def test_no_product_is_computed_twice(compiled: Any) -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> Any:
        h = x @ w
        return h * 0.5, torch.relu(h) + h

    seen: list[torch.fx.GraphModule] = []
    from fusionreg.integrations.torch.compile import segment

    made = segment.Fuser._woven

    def watch(self: Any, planned: Any) -> Any:
        found = made(self, planned)
        if found is not None:
            seen.append(found)
        return found

    segment.Fuser._woven = watch  # type: ignore[method-assign]
    try:
        x, w = torch.randn(4, 8), torch.randn(8, 8)
        for mine, other in zip(compiled(f)(x, w), f(x, w), strict=True):
            same(mine, other)
    finally:
        segment.Fuser._woven = made  # type: ignore[method-assign]
    assert seen
    for module in seen:
        words = ("mm", "matmul", "fusionreg.gemm")
        products = [n for n in module.graph.nodes if any(w in str(n.target) for w in words)]
        assert len(products) <= 1


@pytest.mark.parametrize("axis", [0, -2, 1, -1])
def test_normalisation_over_another_axis_stays(compiled: Any, reports: Any, axis: int) -> None:
    s = torch.tensor([[0.0, 1.0], [2.0, 0.0]])

    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x, axis) @ torch.eye(2) + F.layer_norm(x.transpose(0, axis), (2,))

    same(compiled(f)(s), f(s))
    assert ("attention.softmax" in fused(reports)) == (axis in (1, -1))


@pytest.mark.parametrize("shape", [(), (1,), (4, 1), (1, 8), (4, 8)])
def test_a_scale_is_read_at_every_call(compiled: Any, shape: tuple[int, ...]) -> None:
    def f(x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return (x @ w) * scale + bias

    step = compiled(f)
    x, w, bias = torch.randn(4, 8), torch.randn(8, 8), torch.randn(8)
    for value in (0.5, 2.0):
        scale = torch.full(shape, value)
        same(step(x, w, scale, bias), f(x, w, scale, bias))


@pytest.mark.parametrize("shape", [(4,), (1, 4), (4, 1), (4, 4), (1, 1), ()])
def test_a_bias_goes_along_its_own_axis(compiled: Any, reports: Any, shape: tuple[int, ...]) -> None:
    def f(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return x @ w + bias

    x, w, bias = torch.randn(4, 4), torch.randn(4, 4), torch.randn(shape)
    same(compiled(f)(x, w, bias), f(x, w, bias))
    assert fused(reports)


def test_nothing_is_fused_across_a_write(compiled: Any) -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        h = x * 2.0
        before = h + 1.0
        h.mul_(w)
        return F.layer_norm(before + h, (8,), w, w) + h

    x, w = torch.randn(4, 8), torch.rand(8) + 0.5
    same(compiled(f)(x, w), f(x, w))


def test_a_cast_in_between_rounds(compiled: Any, reports: Any) -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = F.layer_norm(x, (8,), w, w).to(torch.bfloat16)
        return torch.sigmoid(y.float() * 3.0) - 0.5

    x, w = torch.randn(16, 8), torch.ones(8)
    same(compiled(f)(x, w), f(x, w), 0.02)
    got = compiled(lambda a: (a.to(torch.bfloat16).float() * 3.0) * 1.0)(x)
    assert torch.equal(got, x.to(torch.bfloat16).float() * 3.0), "the kept cast rounds once, exactly"


def test_extents_that_vary_keep_their_meaning(compiled: Any, reports: Any) -> None:
    def f(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(x + bias) * x.shape[0]

    step = compiled(f, dynamic=True)
    for rows, columns in ((8, 8), (4, 8), (8, 6), (5, 5)):
        x = torch.randn(rows, columns)
        same(step(x, torch.randn(columns) * 0 + 1), f(x, torch.ones(columns)))


@pytest.mark.parametrize(
    "f",
    [
        lambda x: x * torch.sigmoid(x) + 1.0,
        lambda x: torch.sigmoid(x) * x + 1.0,
        lambda x: F.silu(x) + 1.0,
        lambda x: F.silu(x).contiguous().view(4, 8).clone() + 1.0,
    ],
)
def test_legal_spellings_are_one_region(compiled: Any, reports: Any, f: Any) -> None:
    x = torch.randn(4, 8)
    same(compiled(f)(x), f(x))
    assert fused(reports) == ["pointwise.region"]


def test_nan_stays(compiled: Any) -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.relu(torch.clamp(F.layer_norm(x, (8,), w, w), -1.0, 1.0))

    x, w = torch.randn(4, 8), torch.ones(8)
    x[1, 3] = float("nan")
    got, expected = compiled(f)(x, w), f(x, w)
    assert torch.equal(torch.isnan(got), torch.isnan(expected)) and bool(torch.isnan(got[1]).all())
