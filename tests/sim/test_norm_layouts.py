"""Rows of unusual shape and place: apart in memory, very short, few and long; without bias; hard ones among others."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from catalogs import shipped

from fusionreg import load_registry
from fusionreg.core.conformance import run_mutants
from fusionreg.core.conformance.mutants import edit
from fusionreg.core.ops import default_vocabulary, numpy_backend
from fusionreg.core.runtime import Runtime

F16, BF16, F32 = np.dtype("float16"), np.dtype(ml_dtypes.bfloat16), np.dtype("float32")
CATALOG = shipped("norm")


@pytest.fixture
def runtime(sim_cache):
    return Runtime(CATALOG, device="sim", cache=sim_cache)


def numbers(shape, kind, seed=5):
    return np.random.default_rng(seed).standard_normal(shape).astype(kind)


def normalised(x, scale, bias=0.0, eps=1e-5):
    x = x.astype(np.float64)
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) / np.sqrt(variance + eps) * scale.astype(np.float64) + np.float64(bias)


def used(runtime):
    (key,) = runtime.kernels_used
    return key.split("/")[1]


@pytest.mark.parametrize(("wide", "n"), [(64, 24), (61, 24), (600, 520), (64, 1)])
def test_rows_that_lie_apart_are_read_where_they_are(runtime, wide, n):
    whole, scale, bias = numbers((3, wide), F32), numbers(n, F32, 6), numbers(n, F32, 7)
    x = whole[:, 1 : n + 1] if wide == 61 else whole[:, :n]
    y = runtime.call("norm.layernorm", x, scale, bias)
    np.testing.assert_allclose(y, normalised(x, scale, bias), rtol=2e-5, atol=2e-5)
    assert used(runtime) == "strided" and y.flags.c_contiguous


def test_a_strided_residual(runtime):
    x, residual, scale = numbers((4, 40), BF16), numbers((4, 80), BF16, 6)[:, 16:56], numbers(40, BF16, 7)
    y, h = runtime.call("norm.residual_rmsnorm", x, residual, scale)
    total = x.astype(np.float64) + residual.astype(np.float64)
    np.testing.assert_allclose(h.astype(np.float64), total, rtol=2**-8)
    want = total / np.sqrt((total**2).mean(-1, keepdims=True) + 1e-5) * scale.astype(np.float64)
    np.testing.assert_allclose(y.astype(np.float64), want, rtol=2**-7, atol=1e-6)
    assert used(runtime) == "strided"


@pytest.mark.parametrize("n", [1, 7, 33, 64, 65, 100, 128, 129])
def test_several_short_rows_to_a_warp(runtime, n):
    """One row overflows when it is squared: its neighbours in the warp keep their own scale."""
    x, scale, bias = numbers((37, n), F32), numbers(n, F32, 6), numbers(n, F32, 7)
    x[5] *= np.float32(1e30)
    x[6, 0] = np.nan
    y = runtime.call("norm.layernorm", x, scale, bias)
    good = np.arange(37) != 6
    np.testing.assert_allclose(y[good], normalised(x[good], scale, bias), rtol=1e-4, atol=1e-4)
    assert np.isnan(y[6]).all()


def test_few_long_rows_take_the_whole_chip(runtime):
    x, scale, bias = numbers((2, 70000), BF16), numbers(70000, BF16, 6), numbers(70000, BF16, 7)
    x[1, 9] = 3e38  # squares overflow in one part of the second row alone
    y = runtime.call("norm.layernorm", x, scale, bias)
    want = normalised(x, scale, bias.astype(np.float64))
    np.testing.assert_allclose(y.astype(np.float64), want, rtol=2**-7, atol=2**-7)
    assert used(runtime) == "spread"


@pytest.mark.parametrize("kind", [F16, BF16, F32], ids=str)
def test_no_bias(runtime, kind):
    x, scale = numbers((5, 48), kind), numbers(48, kind, 6)
    y = runtime.call("norm.layernorm_unbiased", x, scale)
    np.testing.assert_allclose(y.astype(np.float64), normalised(x, scale), rtol=2**-7, atol=2**-9)


@pytest.mark.parametrize("n", [24, 512, 4104])
def test_gradients_of_rows_that_are_taken_one_by_one(runtime, n):
    """Far from zero, constant, huge: beside rows whose sums are taken in one pass, with the same sums over rows."""
    x, dy, scale = numbers((6, n), BF16), numbers((6, n), BF16, 6), numbers(n, BF16, 7)
    x[1] = (x[1].astype(F32) + 40.0).astype(BF16)
    x[2] = 3.0
    x[3] = (x[3].astype(F32) * 1e25).astype(BF16)
    found = runtime.call("norm.layernorm_backward", dy, x, scale)
    assert used(runtime) == "columns"
    t = torch.tensor(x.astype(np.float64), requires_grad=True)
    s = torch.tensor(scale.astype(np.float64), requires_grad=True)
    b = torch.zeros(n, dtype=torch.float64, requires_grad=True)
    torch.nn.functional.layer_norm(t, (n,), s, b, 1e-5).backward(torch.tensor(dy.astype(np.float64)))
    for value, want in zip(found, (t.grad, s.grad, b.grad), strict=True):
        want = want.numpy()
        limit = 2**-7 * np.abs(want).max(-1, keepdims=True)
        assert (np.abs(value.astype(np.float64) - want) <= limit).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_bad_element_spoils_its_row_of_dx_alone(runtime, bad):
    x, dy, scale = numbers((5, 344), BF16), numbers((5, 344), BF16, 6), numbers(344, BF16, 7)
    x[2, 17] = bad
    dx, _, dbias = runtime.call("norm.layernorm_backward", dy, x, scale)
    assert used(runtime) == "columns"
    assert np.isnan(dx[2].astype(F32)).all() and np.isfinite(np.delete(dx, 2, 0).astype(F32)).all()
    np.testing.assert_allclose(dbias.astype(F32), dy.astype(np.float64).sum(0), rtol=2**-7, atol=2**-7)


def kept(shape, p, state):
    return default_vocabulary()["fusionreg::Dropout"].meaning(numpy_backend(), np.ones(shape), state, p=p) > 0


@pytest.mark.parametrize(("p", "kernel"), [(0.0, "packed"), (0.1, "packed"), (0.5, "packed"), (0.6, "stream")])
def test_gradients_behind_gelu_and_dropout(runtime, p, kernel):
    """All but equal, equal, huge, NaN: beside rows whose sums are taken in one pass."""
    n, state = 264, np.array([11, 2])
    x, dy, scale, mask = numbers((6, n), BF16), numbers((6, n), BF16, 6), numbers(n, BF16, 7), kept((6, n), p, state)
    x[1] = np.where(np.arange(n) % 80 == 7, 1032.0, 1024.0)
    x[2] = 3.0
    x[3] = (x[3].astype(F32) * 1e25).astype(BF16)
    x[5, np.flatnonzero(mask[5])[3]] = np.nan
    dx, dscale, dbias = runtime.call("norm.gelu_dropout_layernorm_backward", dy, x, state, scale, p=p)
    assert used(runtime) == kernel
    t, s, b = (torch.tensor(a.astype(np.float64), requires_grad=True) for a in (x, scale, np.zeros(n)))
    v = torch.where(torch.tensor(mask), torch.nn.functional.gelu(t), 0.0) / (1 - round(p * 65536) / 65536)
    torch.nn.functional.layer_norm(v, (n,), s, b, 1e-5).backward(torch.tensor(dy.astype(np.float64)))
    want = t.grad.numpy()
    wrong = np.abs(dx.astype(np.float64) - want) > 2**-6 * np.abs(want).max(-1, keepdims=True)
    assert not wrong[:5].any() and np.isnan(dx[5][mask[5]].astype(F32)).all() and np.isnan(dscale.astype(F32)).all()
    assert not dx[:5][~mask[:5]].astype(F32).any()
    np.testing.assert_allclose(dbias.astype(np.float64), b.grad.numpy(), rtol=2**-7, atol=2**-7)


ONE_MASK = edit("one_mask", "dropout.draw(block + r * each + i * LANES", "dropout.draw(lane + i * LANES")
FACTOR = edit("epsilon_without_the_factor", "epsilon / (dropout.factor * dropout.factor)", "epsilon")


def test_what_only_packed_rows_can_get_wrong(sim_cache):
    verdicts = run_mutants(
        CATALOG, ["norm.gelu_dropout_layernorm_backward"], kernels=["packed"], device="sim", extra=[ONE_MASK, FACTOR],
        only=[ONE_MASK.name, FACTOR.name], cache=sim_cache,
    )  # fmt: skip
    assert not [str(v) for v in verdicts if v.survived]
    assert {ONE_MASK.name, FACTOR.name} <= {v.mutant for v in verdicts if v.applies}


def gradients(dy, x, scale):
    """What torch has for LayerNorm in float64: dx, dscale, dbias."""
    t, s = (torch.tensor(a.astype(np.float64), requires_grad=True) for a in (x, scale))
    b = torch.zeros_like(s, requires_grad=True)
    torch.nn.functional.layer_norm(t, s.shape, s, b, 1e-5).backward(torch.tensor(dy.astype(np.float64)))
    return [a.grad.numpy() for a in (t, s, b)]


@pytest.mark.parametrize(("wide", "first"), [(64, 0), (64, 16), (61, 1)])
def test_gradients_of_rows_that_lie_apart(runtime, wide, first):
    """Either or both are parts of wider tensors; dx is a tensor of its own."""
    n, scale = 40, numbers(40, F32, 8)
    wide_dy, wide_x = numbers((9, wide), F32), numbers((9, wide), F32, 6)
    dy, x = wide_dy[:, first : first + n], wide_x[:, :n]
    for pair in ((dy, x), (dy, np.ascontiguousarray(x)), (np.ascontiguousarray(dy), x)):
        found = runtime.call("norm.layernorm_backward", *pair, scale)
        for value, want in zip(found, gradients(dy, x, scale), strict=True):
            np.testing.assert_allclose(value, want, rtol=2e-5, atol=2e-5)
        assert found[0].flags.c_contiguous
    assert used(runtime) == "strided"


@pytest.mark.parametrize(("rows", "n"), [(2, 70000), (3, 12289)])
def test_gradients_of_few_long_rows_take_the_whole_chip(runtime, rows, n):
    dy, x, scale = numbers((rows, n), F32), numbers((rows, n), F32, 6), numbers(n, F32, 7)
    x[1] += 100.0
    x[0, : n // 3] *= 1e30  # squares overflow in some parts of the first row
    found = runtime.call("norm.layernorm_backward", dy, x, scale)
    assert used(runtime) == "spread"
    for value, want in zip(found, gradients(dy, x, scale), strict=True):
        np.testing.assert_allclose(value, want, rtol=1e-4, atol=1e-4 * max(1.0, np.abs(want).max()))


class Sum(torch.nn.Module):
    """A layer of a transformer: the sum that is normalised is what the next sum starts from."""

    def __init__(self, n):
        super().__init__()
        self.norm, self.inner = torch.nn.LayerNorm(n), torch.nn.Linear(n, n)

    def forward(self, x, r):
        h = x + r
        return h + self.inner(self.norm(h))


def test_a_sum_that_is_read_again_is_stored_by_the_kernel_that_normalises_it():
    model, found = Sum(48).eval(), load_registry(device="sim", allow=("norm",))
    x, r = torch.randn(2, 3, 5, 48, generator=torch.Generator().manual_seed(1))
    (match,) = found.plan(model, x, r).chosen
    assert set(match.outputs) == {"x", "y"} and match.base == "norm.layernorm" and len(match.nodes) == 2
    with torch.no_grad():
        np.testing.assert_allclose(found.fuse(model, x, r)(x, r), model(x, r), atol=1e-5)
    assert set(found.runtime.kernels_used) == {f"{match.fusion}/rows"}


@pytest.mark.parametrize(("kernel", "shape"), [("rows", (5, 40)), ("spread", (2, 33000)), ("long", (70, 33000))])
def test_what_is_kept_is_the_sum(runtime, kernel, shape):
    a, residual, (scale, bias) = numbers(shape, F32), numbers(shape, F32, 6), numbers((2, shape[1]), F32, 7)
    a[0] *= 1e25  # its squares overflow: the value is computed once more, and stored as it is
    y, x = runtime.call("norm.layernorm.residual", a, residual, scale, bias)
    np.testing.assert_array_equal(x, a + residual)
    np.testing.assert_allclose(y, normalised(x, scale, bias.astype(np.float64)), rtol=1e-4, atol=1e-4)
    assert used(runtime) == kernel
