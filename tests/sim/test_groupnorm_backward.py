"""Gradients of GroupNorm with Swish and dropout: against autograd, on inputs that went wrong in public, in rounds.

Calls go through the runtime, in the simulator, on NumPy arrays.
"""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch
from catalogs import shipped

from fusionreg.core.conformance import derive, executor_for, run, run_mutants, run_one
from fusionreg.core.conformance.mutants import edit
from fusionreg.core.frozen import FrozenDict
from fusionreg.core.ops import default_vocabulary, numpy_backend
from fusionreg.core.proof.report import Status
from fusionreg.core.runtime import Runtime

F16, BF16, F32 = np.dtype("float16"), np.dtype(ml_dtypes.bfloat16), np.dtype("float32")
CATALOG = shipped("norm")
WITH, WITHOUT = "norm.groupnorm_swish_dropout_backward", "norm.groupnorm_swish_backward"
NAMES = [k.spec.name for k in CATALOG[WITH].kernels if k.spec.name != "last_pixels"]  # which takes channels last alone
DROPOUT = default_vocabulary()["fusionreg::Dropout"].meaning
TOLERANCE = {F16: 4e-3, BF16: 3e-2, F32: 3e-6}


def only(name: str, sim_cache) -> Runtime:
    """A runtime in which each fusion has the kernel of this name alone."""
    found = {}
    for fusion in (WITH, WITHOUT):
        entry = CATALOG[fusion]
        kernel = entry.kernel(f"{fusion}/{name}")
        kernel = replace(kernel, spec=kernel.spec.model_copy(update={"pending": ""}))
        found[fusion] = replace(entry, kernels=(kernel,))
    return Runtime(replace(CATALOG, fusions=FrozenDict(found)), device="sim", cache=sim_cache)


@pytest.fixture(scope="module", params=NAMES)
def runtime(request, sim_cache):
    return only(request.param, sim_cache)


def rng(seed=11, offset=2):
    return np.array([seed, offset])


def inputs(shape, kind, seed=0):
    r, c = np.random.default_rng(seed), shape[1]
    dy, x = (r.standard_normal(shape).astype(kind) for _ in range(2))
    scale, bias = r.standard_normal(c).astype(kind), r.standard_normal(c).astype(kind)
    return dy, x, scale, bias


def wanted(dy, x, scale, bias, groups, mask=None, eps=1e-5):
    """By autograd, in float64."""
    tx, ts, tb = (torch.tensor(a.astype(np.float64), requires_grad=True) for a in (x, scale, bias))
    y = torch.nn.functional.silu(torch.nn.functional.group_norm(tx, groups, ts, tb, eps))
    (y if mask is None else y * torch.tensor(mask)).backward(torch.tensor(dy.astype(np.float64)))
    return [t.grad.numpy() for t in (tx, ts, tb)]


def agree(got, exact, kind, times=1.0):
    for g, e in zip(got, exact, strict=True):
        assert g.dtype == kind and g.shape == e.shape
        atol = times * TOLERANCE[kind] * max(1.0, np.abs(e).max())
        np.testing.assert_allclose(g.astype(np.float64), e, rtol=0, atol=atol)


@pytest.mark.parametrize(
    ("fusion", "kernels"),
    [("norm.swish_dropout_backward", None), (WITH, None), (WITHOUT, ["team"]), (f"{WITHOUT}.gated", ["cluster"])],
    ids=str,
)
def test_conforms(fusion, kernels, sim_cache):
    report = run(CATALOG, [fusion], kernels=kernels, device="sim", cases="quick", cache=sim_cache)
    assert report.ok, "\n".join(map(str, report.failures))


@pytest.mark.parametrize("kind", [F16, BF16, F32], ids=str)
def test_gradients_are_those_of_torch(runtime, kind):
    shape, groups = (2, 24, 16, 16), 2
    given = inputs(shape, kind)
    agree(runtime.call(WITHOUT, *given, groups=groups), wanted(*given, groups), kind)
    dy, x, scale, bias = given
    mask = DROPOUT(numpy_backend(), np.ones(shape), rng(), p=0.3)
    got = runtime.call(WITH, dy, x, rng(), scale, bias, groups=groups, p=0.3)
    agree(got, wanted(*given, groups, mask), kind)
    again = runtime.call(WITH, dy, x, rng(), scale, bias, groups=groups, p=0.3)
    for a, b in zip(got, again, strict=True):
        np.testing.assert_array_equal(a, b)
    assert not runtime.fallbacks and len(runtime.kernels_used) == 2


@pytest.mark.parametrize("kind", [BF16, F32], ids=str)
def test_squares_that_overflow(runtime, kind):
    dy, x, scale, bias = inputs((1, 24, 256), kind, 5)
    x = (1e30 * np.sign(x.astype(np.float64))).astype(kind)
    dx, dscale, dbias = runtime.call(WITHOUT, dy, x, scale, bias, groups=2)
    exact = wanted(dy, x, scale, bias, 2)
    agree((dscale, dbias), exact[1:], kind)
    largest = np.abs(exact[0]).max()
    np.testing.assert_allclose(dx.astype(np.float64) / largest, exact[0] / largest, atol=TOLERANCE[kind])


@pytest.mark.parametrize("kind", [F16, F32], ids=str)
def test_a_mean_far_from_zero_does_not_cancel(runtime, kind):
    dy, x, scale, bias = inputs((1, 24, 256), kind, 6)
    x = (x.astype(np.float64) + 500.0).astype(kind)
    got = runtime.call(WITHOUT, dy, x, scale, bias, groups=2)
    agree(got, wanted(dy, x, scale, bias, 2), kind, 10.0)  # the mean itself is rounded; squares would be off by 2e-2


def test_a_nan_spoils_its_group_alone(runtime):
    dy, x, scale, bias = inputs((2, 24, 256), F16, 7)
    x[1, 15, 17] = np.nan
    dx, dscale, dbias = runtime.call(WITHOUT, dy, x, scale, bias, groups=2)
    spoilt = np.zeros((2, 24), bool)
    spoilt[1, 12:] = True
    np.testing.assert_array_equal(np.isnan(dx).all(axis=2), spoilt)
    np.testing.assert_array_equal(np.isnan(dx).any(axis=2), spoilt)
    for sums in (dscale, dbias):
        np.testing.assert_array_equal(np.isnan(sums), spoilt[1])


def test_nothing_dropped_and_everything_dropped(runtime):
    dy, x, scale, bias = inputs((1, 24, 256), F16, 8)
    kept = runtime.call(WITH, dy, x, rng(), scale, bias, groups=2, p=0.0)
    for a, b in zip(kept, runtime.call(WITHOUT, dy, x, scale, bias, groups=2), strict=True):
        np.testing.assert_allclose(a.astype(np.float64), b.astype(np.float64), atol=1e-3)
    for gone in runtime.call(WITH, dy, x, rng(), scale, bias, groups=2, p=1.0):
        assert not gone.any()


@pytest.mark.parametrize(("name", "shape"), [*((n, (0, 24, 256)) for n in NAMES), ("plain", (2, 24, 0))], ids=str)
def test_no_samples_and_no_pixels(name, shape, sim_cache):
    dy, x, scale, bias = inputs(shape, F16)
    dx, dscale, dbias = only(name, sim_cache).call(WITHOUT, dy, x, scale, bias, groups=2)
    assert dx.shape == shape and not dscale.any() and not dbias.any() and dscale.shape == (24,)


@pytest.mark.parametrize(
    ("name", "params"), [("cluster", {"K": 2}), ("team", {"K": 2, "ITEMS": 1}), ("team", {})], ids=str
)
def test_one_team_takes_group_after_group(name, params, sim_cache):
    """Stages and what blocks tell one another are used again and again where a device has few multiprocessors."""
    executor, entry = executor_for("sim", sim_cache), CATALOG[WITH]
    executor.multiprocessors = 1
    kernel = entry.kernel(f"{WITH}/{name}")
    trials = [t for t in derive(entry, kernel, executor.target) if t.name == "float16-base"]
    (trial,) = trials
    chosen = trial.with_(trial.name, params={**trial.params, **params}, exactly=True)
    found = run_one(CATALOG, WITH, name, chosen, executor)
    assert found.status is Status.PASSED, str(found)


@pytest.mark.parametrize("name", ["last", "plain"])
def test_channels_last_gives_channels_last(name, sim_cache):
    runtime, shape, groups = only(name, sim_cache), (2, 16, 4, 10), 4
    given = inputs(shape, F16, 9)
    dy, x = (np.ascontiguousarray(a.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2) for a in given[:2])
    got = runtime.call(WITHOUT, dy, x, *given[2:], groups=groups)
    assert got[0].strides == x.strides and not runtime.fallbacks
    agree(got, wanted(*given, groups), F16)


NO_WAIT = edit("stage_not_awaited", "if (mine > 0) group::barrier_wait(&full[stage], parity);", "")
OTHER_MASK = edit("mask_of_the_group", "keep(static_cast<unsigned>(start / VEC) + i * 32,", "keep(i * 32,")


def test_every_mutant_dies(sim_cache):
    extra = [NO_WAIT, OTHER_MASK]
    names = [m.name for m in extra]
    verdicts = run_mutants(CATALOG, [WITH], kernels=["team"], device="sim", extra=extra, only=names, cache=sim_cache)
    assert not [str(v) for v in verdicts if v.survived]
    assert {m.name for m in extra} <= {v.mutant for v in verdicts if v.applies}
