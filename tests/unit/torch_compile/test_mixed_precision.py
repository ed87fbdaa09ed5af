"""Rows that stay in 16 bits until they are normalised in float32: the cast does not break the site."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from .conftest import same

#: Rounded to a multiple of 1/65536 it is none: masks drop nothing, here and in torch, and values can be compared.
P = 1e-7


def gelu_before(x: Any, r: Any, w: Any, b: Any) -> Any:
    return F.layer_norm(F.dropout(F.gelu(x, approximate="tanh"), P, True).to(w.dtype), (16,), w, b)


def residual_in_float32(x: Any, r: Any, w: Any, b: Any) -> Any:
    return F.layer_norm(F.dropout(x, P, True) + r.to(w.dtype), (16,), w, b)


def residual_in_16_bits(x: Any, r: Any, w: Any, b: Any) -> Any:
    return F.layer_norm((F.dropout(x, P, True) + r).to(w.dtype), (16,), w)


@pytest.mark.parametrize(
    ("f", "name", "operators"),
    [
        (gelu_before, "norm.gelu_dropout_layernorm", "gelu dropout to layer_norm"),
        (residual_in_float32, "norm.dropout_residual_layernorm", "dropout add layer_norm"),
        (residual_in_16_bits, "norm.dropout_residual_layernorm_unbiased", "dropout add to layer_norm"),
    ],
)
def test_a_widening_cast_stands_before_the_site(
    compiled: Any, reports: Any, f: Any, name: str, operators: str
) -> None:
    generator = torch.Generator().manual_seed(0)
    row = [torch.randn(8, 16, generator=generator).bfloat16().requires_grad_() for _ in range(2)]
    given = [*row, *(torch.rand(16, generator=generator).requires_grad_() for _ in range(2))]
    used = [t for t in given if t is not given[3] or "unbiased" not in name]
    used = [t for t in used if t is not given[1] or "residual" in name]
    got, expected = compiled(f)(*given), f(*given)
    exact = f(*(t.detach().double() for t in given))
    assert got.dtype == torch.float32
    error, unfused = ((y - exact).abs().max() for y in (got, expected))
    assert error < 1e-5 and error <= unfused, "no farther than operator by operator"
    mine = torch.autograd.grad(got.sin().sum(), used)
    for one, other in zip(mine, torch.autograd.grad(expected.sin().sum(), used), strict=True):
        same(one, other, 0.03)
    (site,) = reports[0].fused
    assert site.fusion == name and site.differentiable
    assert " ".join(o.removeprefix("aten.").replace("_to_copy", "to") for o in site.operators) == operators


def test_what_a_site_takes_the_place_of_is_told_where_its_result_is_cast_too(compiled: Any, reports: Any) -> None:
    block = torch.nn.Sequential(torch.nn.GELU(), torch.nn.Dropout(P), torch.nn.LayerNorm(16))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        compiled(block)(torch.randn(8, 16).bfloat16())
    (site,) = reports[0].fused
    assert site.operators == ("aten.gelu", "aten.dropout", "aten.layer_norm") and reports[0].deepest == 3


def test_who_wants_every_operator_rounded_gets_it(compiled: Any, reports: Any) -> None:
    x, w = torch.randn(8, 16).bfloat16(), torch.rand(16)
    with torch.no_grad():
        compiled(gelu_before, policy="conservative")(x, x, w, w)
    assert not any("gelu_dropout" in s.fusion for r in reports for s in (*r.fused, *r.lost))


def test_a_cast_that_narrows_stays(compiled: Any, reports: Any) -> None:
    """What is asked for in 16 bits is rounded there, whatever is wide behind it."""

    def f(x: Any, w: Any) -> Any:
        return F.layer_norm(F.dropout(x.bfloat16(), P, True).float(), (16,), w, w)

    x, w = torch.randn(8, 16), torch.rand(16)
    with torch.no_grad():
        got, rounded = compiled(f)(x, w), F.layer_norm(x.bfloat16().float(), (16,), w, w)
    same(got, rounded, 1e-6)
    assert (got - F.layer_norm(x, (16,), w, w)).abs().max() > 1e-3
