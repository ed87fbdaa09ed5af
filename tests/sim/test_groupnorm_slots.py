"""Point-wise operators around GroupNorm, in every kernel that has slots: on chip, in either memory order."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from catalogs import shipped

import fusionreg
from fusionreg.core.frozen import FrozenDict
from fusionreg.core.ops import numpy_backend
from fusionreg.core.problem import Tensor, bind, select
from fusionreg.core.runtime import Runtime

CATALOG = shipped("norm")
F = torch.nn.functional
LAST = ("last_cluster", "last_stream", "last_tiles", "last_pixels")
FRONT = ("plain", "cluster", "last_cluster", "last_tiles")
BEHIND = (*FRONT, "stream", "last_stream", "last_pixels")


@pytest.fixture(scope="module")
def call(sim_cache):
    """``call(member, kernel, maps, …)``: that kernel or none; maps channels last where it takes them so."""

    def one(member, kernel, *arrays, **keywords):
        entry = CATALOG[member]
        base = CATALOG[entry.base]
        made = replace(entry, kernels=(entry.kernel(kernel),))
        catalog = replace(CATALOG, fusions=FrozenDict({base.name: replace(base, members=(made,))}))
        runtime = Runtime(catalog, device="sim", cache=sim_cache)
        order = torch.channels_last if kernel in LAST else torch.contiguous_format
        given = [a.contiguous(memory_format=order) if a.ndim == 4 and a.shape[-1] > 1 else a for a in arrays]
        z = runtime.call(member, *given, **keywords)
        assert list(runtime.kernels_used) == [f"{member}/{kernel}"]
        assert z.is_contiguous(memory_format=order) and z.dtype == arrays[0].dtype
        return z.double()

    return one


def random(*shape, dtype=torch.bfloat16, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def normalized(x, groups, scale, bias, eps=1e-5):
    return F.group_norm(x.double(), groups, scale.double(), bias.double(), eps)


def close(z, want, dtype=torch.bfloat16):
    unit = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[dtype]
    np.testing.assert_allclose(z, want, rtol=3 * unit, atol=3 * unit)


@pytest.mark.parametrize("kernel", BEHIND)
@pytest.mark.parametrize("size", [(4, 6), (8, 8)], ids=str)
def test_gain_and_shift_of_each_channel_of_a_sample_behind(call, kernel, size):
    """Vectors of row-major maps of 24 pixels stay within a channel, in float16 too."""
    dtype = torch.float16 if size == (8, 8) else torch.bfloat16
    x, (scale, bias) = random(2, 32, *size, dtype=dtype), random(2, 32, dtype=dtype, seed=1)
    gain, shift = random(2, 64, 1, 1, dtype=dtype, seed=2).chunk(2, dim=1)  # strided, as networks have them
    z = call("norm.groupnorm.film", kernel, x, scale, bias, gain, shift, groups=4)
    want = F.silu(normalized(x, 4, scale, bias) * (1 + gain.double()) + shift.double())
    close(z, want, dtype)


@pytest.mark.parametrize("kernel", FRONT)
def test_embedding_of_each_channel_of_a_sample_in_front(call, kernel):
    a, embedding, (scale, bias) = random(2, 32, 4, 6), random(2, 32, 1, 1, seed=1), random(2, 32, seed=2)
    z = call("norm.groupnorm_swish.embedded", kernel, a, scale, bias, embedding, groups=4)
    close(z, F.silu(normalized((a + embedding), 4, scale, bias)))


@pytest.mark.parametrize("kernel", [k for k in FRONT if k != "plain"])
def test_both_ends_and_a_mask(call, kernel):
    h, embedding, residual = random(2, 32, 4, 6), random(2, 32, 1, 1, seed=1), random(2, 32, 4, 6, seed=2)
    rng, (scale, bias), p = torch.tensor([7, 3]), random(2, 32, seed=3), 0.25
    bias = bias + 4  # Swish is never 0
    z = call("norm.groupnorm_swish_dropout.added", kernel, h, rng, scale, bias, embedding, residual, groups=4, p=p)
    drop = CATALOG.ops["fusionreg::Dropout"].meaning
    kept = torch.from_numpy(drop(numpy_backend(), np.ones(h.shape), rng.numpy(), p=p))
    want = F.silu(normalized(h + embedding, 4, scale, bias)) * kept
    np.testing.assert_allclose(z, want + residual.double(), rtol=0.02, atol=0.05)
    assert 0.15 < (kept == 0).double().mean() < 0.35


@pytest.mark.parametrize("kernel", ["cluster", "last_cluster", "last_tiles"])
def test_squares_that_overflow_in_front(call, kernel):
    """What is in front of x is computed once more: its sum overflows when it is squared, a + embedding does not."""
    a, embedding = random(1, 32, 8, 8), torch.zeros(1, 32, 1, 1, dtype=torch.bfloat16)
    a[0, 8:16] = torch.where(a[0, 8:16] > 0, 1e30, -1e30)
    embedding[0, 8:16] = 1e29
    scale, bias = torch.ones(32, dtype=torch.bfloat16), torch.zeros(32, dtype=torch.bfloat16)
    z = call("norm.groupnorm_swish.embedded", kernel, a, scale, bias, embedding, groups=4)
    close(z, F.silu(normalized(a + embedding, 4, scale, bias)))


@pytest.mark.parametrize("kernel", ["cluster", "stream"])
def test_vectors_that_hold_two_channels(call, kernel):
    x, (scale, bias) = random(2, 16, 7, 7), random(2, 16, seed=1)
    gain, shift = random(2, 2, 16, 1, 1, seed=2)
    z = call("norm.groupnorm.film", kernel, x, scale, bias, gain, shift, groups=2)
    close(z, F.silu(normalized(x, 2, scale, bias) * (1 + gain.double()) + shift.double()))


class Conditioned(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.GroupNorm(4, 32)

    def forward(self, x, e):
        gain, shift = e[:, :, None, None].chunk(2, dim=1)
        return F.silu(self.norm(x) * (1 + gain) + shift)


def test_a_model_is_one_kernel():
    model, found = Conditioned().eval(), fusionreg.load_registry(device="sim", allow=("norm",))
    x, e = random(2, 32, 8, 8, dtype=torch.float32), random(2, 64, dtype=torch.float32, seed=1)
    fused = found.fuse(model, x, e)
    with torch.no_grad():
        want = model(x, e)
        np.testing.assert_allclose(fused(x, e), want, atol=1e-5)
    (used,) = found.runtime.kernels_used
    name, _, kernel = used.partition("/")
    assert name.startswith("norm.groupnorm.r") and kernel == "cluster"
    gain, shift = e[:, :, None, None].chunk(2, dim=1)
    x = x.contiguous(memory_format=torch.channels_last)
    y = found.call(name, x, model.norm.weight.detach(), model.norm.bias.detach(), gain, shift, groups=4)
    np.testing.assert_allclose(y, want, atol=1e-5)
    assert f"{name}/last_cluster" in found.runtime.kernels_used and y.stride() == x.stride()


def test_operands_that_lie_differently_are_refused():
    """One place in memory serves all that have every axis; the caller's maps need not agree."""
    entry = CATALOG["norm.groupnorm_swish.between"]
    shape, strides = (2, 32, 8, 8), (2048, 1, 256, 32)
    last, rows = Tensor("bfloat16", shape, strides), Tensor.contiguous("bfloat16", shape)
    row = Tensor.contiguous("bfloat16", (32,))
    given = {"a": last, "scale": row, "bias": row, "before": last, "residual": last, "gate": last}
    found = select(entry, bind(entry, given, {"groups": 4}, "sm_90a"), pending=True)
    assert {c.kernel.name for c in found.accepted} == {"last_cluster", "last_tiles"}
    found = select(entry, bind(entry, {**given, "gate": rows}, {"groups": 4}, "sm_90a"), pending=True)
    assert not found and "lie in memory in different orders" in found.reason
