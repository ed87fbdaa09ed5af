"""GroupNorm with Swish and dropout on inputs that went wrong somewhere in public, for every kernel and memory order.

Calls go through the runtime, in the simulator, on NumPy arrays.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from catalogs import shipped

from fusionreg.core.conformance import run
from fusionreg.core.conformance.cases import parameters
from fusionreg.core.conformance.devices import executor_for
from fusionreg.core.conformance.execute import Job, execute, prepare
from fusionreg.core.conformance.mutants import changed
from fusionreg.core.conformance.simulated import SimExecutor
from fusionreg.core.conformance.trial import Trial
from fusionreg.core.errors import FusionregError
from fusionreg.core.frozen import FrozenDict
from fusionreg.core.ops import default_vocabulary, numpy_backend
from fusionreg.core.proof.report import Status
from fusionreg.core.runtime import Runtime
from fusionreg.core.simulator import Checks

F16, F32 = np.dtype("float16"), np.dtype("float32")
CATALOG = shipped("norm")
SWISH, DROPPED = "norm.groupnorm_swish", "norm.groupnorm_swish_dropout"
OPS, NUMPY = default_vocabulary(), numpy_backend()
LAST = ("last_cluster", "last_stream", "last_tiles", "last_pixels")  # last_grid has the template of last_tiles
SHORT = ("ring", "last_tiles", "last_grid", "last_pixels", "last_whole")  # 16-bit tensors only
WIDE = pytest.mark.parametrize("kernel", ["plain", "strided", "cluster", "stream", *LAST[:2]])
EACH = pytest.mark.parametrize("kernel", ["plain", "strided", "cluster", "stream", *LAST])


@pytest.fixture(scope="module")
def call(sim_cache):
    """``call(fusion, kernel, x, scale, bias, …)``: that kernel or none."""

    def one(fusion, kernel, x, *rest, last=None, **keywords):
        entry = CATALOG[fusion]
        kernels = tuple(k for k in entry.kernels if kernel in ("", k.spec.name))
        catalog = replace(CATALOG, fusions=FrozenDict({fusion: replace(entry, kernels=kernels)}))
        runtime = Runtime(catalog, device="sim", cache=sim_cache)
        y = None
        if kernel.startswith("last") if last is None else last:
            x, y = channels_last(x), channels_last(np.full(x.shape, np.nan).astype(x.dtype))
        found = runtime.call(fusion, x, *rest, out=y, **keywords)
        if kernel:
            assert not x.size or list(runtime.kernels_used) == [f"{fusion}/{kernel}"]
        return found

    return one


def channels_last(x):
    return np.moveaxis(np.ascontiguousarray(np.moveaxis(x, 1, -1)), -1, 1)


def ones(channels, kind=F32):
    return np.ones(channels, kind), np.zeros(channels, kind)


def wanted(x, scale, bias, groups, eps=1e-5):
    """torch, in float64."""
    x, scale, bias = (torch.tensor(np.asarray(a, np.float64)) for a in (x, scale, bias))
    return torch.nn.functional.silu(torch.nn.functional.group_norm(x, groups, scale, bias, eps)).numpy()


def wanted_normalized(x, groups, eps=1e-5):
    g = np.asarray(x, np.float64).reshape(x.shape[0], groups, -1)
    g = (g - g.mean(-1, keepdims=True)) / np.sqrt(g.var(-1, keepdims=True) + eps)
    return g.reshape(x.shape)


def rng(seed=11, offset=2):
    return np.array([seed, offset])


def kept(shape, p, seed=11, offset=2):
    return OPS["fusionreg::Dropout"].meaning(NUMPY, np.ones(shape), rng(seed, offset), p=p) > 0


#: Of fusions without dropout some kernels here: their templates are those of the fusion with it.
CONFORMING = [
    (SWISH, [f"{SWISH}/{k}" for k in ("cluster", "last_tiles", "last_whole")] + [f"{SWISH}.between/last_cluster"]),
    (f"{SWISH}.between", ["plain"]),
    (DROPPED, [k.key for k in CATALOG[DROPPED].kernels]),
    ("norm.groupnorm.film", ["last_grid"]),
    ("norm.swish_dropout", None),
]


@pytest.mark.parametrize(("fusion", "kernels"), CONFORMING, ids=[f for f, _ in CONFORMING])
def test_conforms(fusion, kernels, sim_cache):
    report = run(CATALOG, [fusion], device="sim", cases="quick", kernels=kernels, cache=sim_cache)
    assert report.ok, "\n".join(map(str, report.failures))


@EACH
@pytest.mark.parametrize("shape", [(2, 16, 8), (2, 16, 4, 6), (1, 8, 2, 2, 8)], ids=str)
def test_any_number_of_spatial_axes(call, kernel, shape):
    r = np.random.default_rng(0)
    kind, error = (F16, 2e-3) if kernel in SHORT else (F32, 2e-6)
    x, (scale, bias) = r.standard_normal(shape).astype(kind), r.standard_normal((2, shape[1])).astype(kind)
    y = call(SWISH, kernel, x, scale, bias, groups=2)
    assert y.shape == shape
    np.testing.assert_allclose(y, wanted(x, scale, bias, 2), atol=error)


@EACH
@pytest.mark.parametrize("at", [0.0, 8.0, 1024.0])
def test_near_zero_and_far_from_it(call, kernel, at):
    """A mean of up to 32 deviations is folded into the offset of a channel; beyond, little would be left of values."""
    r = np.random.default_rng(8)
    x = (at + r.integers(-2, 3, (2, 16, 40))).astype(F16)
    scale, bias = (1 + r.standard_normal((2, 16)) / 4).astype(F16)
    y = call(SWISH, kernel, x, scale, bias, groups=2)
    np.testing.assert_allclose(y, wanted(x, scale, bias, 2), rtol=1e-3, atol=at * 2e-6 + 1e-6)


@pytest.mark.parametrize("kernel", ["plain", "strided", "cluster", "stream", *LAST, "last_whole"])
def test_channels_do_not_spoil_each_other(call, kernel):
    """Elements share reciprocals; the largest and smallest Swish, infinities and NaN stay with their own."""
    x = (2 + np.random.default_rng(9).standard_normal((2, 24, 40))).astype(F16)
    scale, bias = ones(24, F16)  # of which the last eight are as others
    bias[[1, 4, 6, 8, 11]] = [-np.inf, np.nan, np.inf, -300.0, 3e4]
    scale[14] = np.inf
    centred = wanted_normalized(x, 3) * scale.astype(np.float64)[:, None] + bias.astype(np.float64)[:, None]
    with np.errstate(over="ignore", invalid="ignore"):
        want = centred / (1 + np.exp(-centred))
    y = call(SWISH, kernel, x, scale, bias, groups=3).astype(np.float64)
    np.testing.assert_allclose(y, want, rtol=1e-3, atol=1e-3)
    assert np.isnan(y[:, [1, 4]]).all() and np.isfinite(np.delete(y, [1, 4, 6, 14], axis=1)).all()


@pytest.mark.parametrize("kernel", ["ring", "stream"])
@pytest.mark.parametrize("at", [0.0, 1024.0])
def test_chunks_of_one_channel(call, kernel, at):
    """Sums by the tensor cores, and once more where they would cancel; a channel's infinity and NaN are its own, and a
    NaN of x spoils its group alone."""
    r = np.random.default_rng(10)
    x = (at + r.integers(-2, 3, (3, 8, 1024))).astype(F16)
    x[2, 5, 3] = np.nan
    scale, bias = (1 + r.standard_normal((2, 8)) / 4).astype(F16)
    bias[[1, 4]] = [np.nan, np.inf]
    y = call(SWISH, kernel, x, scale, bias, groups=4)
    np.testing.assert_allclose(y, wanted(x, scale, bias, 4), rtol=1e-3, atol=at * 2e-6 + 1e-6)


@WIDE
@pytest.mark.parametrize(("at", "step"), [(2e4, 0.25), (1e4, 1.0)])
def test_variance_does_not_cancel(call, kernel, at, step):
    x = np.tile(at + step * np.arange(4), 16).reshape(1, 8, 8).astype(F32)
    y = call(SWISH, kernel, x, *ones(8), groups=2, epsilon=0.0)
    np.testing.assert_allclose(y, wanted(x, *ones(8), 2, 0.0), rtol=1e-5)


@WIDE
def test_squares_that_overflow(call, kernel):
    """One group does; its neighbours must not be scaled down with it."""
    x = np.random.default_rng(1).standard_normal((2, 16, 640)).astype(F32)
    x[1, 4:8] = np.where(x[1, 4:8] > 0, F32.type(1e30), F32.type(-1e30))
    x[0, 0:4] *= F32.type(1e-4)
    y = call(SWISH, kernel, x, *ones(16), groups=4)
    np.testing.assert_allclose(y, wanted(x, *ones(16), 4), rtol=2e-5, atol=1e-6)


@WIDE
def test_a_nan_spoils_its_group_alone(call, kernel):
    x = np.random.default_rng(2).standard_normal((2, 16, 8)).astype(F32)
    x[1, 9, 5] = np.nan
    y = call(SWISH, kernel, x, *ones(16), groups=2)
    assert np.isnan(y[1, 8:]).all() and np.isfinite(y[0]).all() and np.isfinite(y[1, :8]).all()


@EACH
@pytest.mark.parametrize("shape", [(3, 16, 8, 6), (2, 24, 40)], ids=str)
def test_one_mask_for_every_kernel_and_memory_order(call, kernel, shape):
    """Element i of the shape, row-major, is dropped or not; channels last changes nothing."""
    x, p = np.random.default_rng(3).standard_normal(shape).astype(F16), 0.3
    channels = shape[1]
    bias = np.full(channels, 3.0, F16)  # Swish is never 0
    y = call(DROPPED, kernel, x, rng(), np.ones(channels, F16), bias, groups=4, p=p)
    mask = kept(shape, p)
    np.testing.assert_array_equal(y != 0, mask)
    want = wanted(x, np.ones(channels), bias, 4) * 65536 / (65536 - round(p * 65536))
    np.testing.assert_allclose(y[mask].astype(np.float64), want[mask], rtol=2e-3, atol=2e-3)


@EACH
def test_dropout_of_nothing_and_of_everything(call, kernel):
    x, (one, zero) = np.random.default_rng(4).standard_normal((2, 16, 8)).astype(F16), ones(16, F16)
    x[0, 0, 0] = np.nan
    assert not call(DROPPED, kernel, x, rng(), one, zero, groups=2, p=1.0).any()
    x[0, 0, 0] = 0.0
    y = call(DROPPED, kernel, x, rng(), one, zero, groups=2, p=0.0).astype(np.float64)
    np.testing.assert_allclose(y, wanted(x, one, zero, 2), rtol=1e-3, atol=1e-3)


def test_scale_is_by_channel_whatever_the_groups(call):
    """opset 18 had one scale a group; with as many groups as channels the two are told apart by nothing but length."""
    x, scale = np.random.default_rng(5).standard_normal((1, 4, 8)).astype(F32), np.array([1, 2, 10, 20], F32)
    y = call(SWISH, "", x, scale, np.zeros(4, F32), groups=2)
    np.testing.assert_allclose(y, wanted(x, scale, np.zeros(4), 2), atol=1e-5)
    with pytest.raises(FusionregError, match="scale"):
        call(SWISH, "", x, scale[:2], np.zeros(4, F32), groups=2)


@pytest.mark.parametrize(
    "keywords", [{"groups": 3}, {"groups": 0}, {"groups": -2}, {"groups": 16}, {"p": 1.5}, {"p": -0.1}]
)
def test_what_is_no_problem_is_refused(call, keywords):
    x = np.ones((1, 8, 8), F32)
    with pytest.raises(FusionregError):
        call(DROPPED, "", x, rng(), *ones(8), **{"groups": 2, "p": 0.5, **keywords})


@pytest.mark.parametrize("eps", [0.0, -1.0, -1e-3])
def test_an_epsilon_that_is_not_positive_is_the_unfused_result(call, eps):
    x = np.random.default_rng(6).standard_normal((2, 8, 8)).astype(F32)
    x[0, :4] = 1.0  # no variance
    norm = OPS["GroupNormalization"].meaning(NUMPY, x, *ones(8), num_groups=2, epsilon=eps, stash_type="float32")
    want = norm / (1 + np.exp(-norm))
    for kernel in ("plain", "cluster"):
        np.testing.assert_allclose(call(SWISH, kernel, x, *ones(8), groups=2, epsilon=eps), want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("shape", [(0, 8, 8), (2, 8, 0), (2, 8, 4, 0)], ids=str)
def test_nothing_to_do(call, shape):
    assert call(SWISH, "", np.ones(shape, F32), *ones(8), groups=2).shape == shape


#: Kernel and parameters, what is taken out of its unit, what is put there.
@pytest.mark.parametrize("fusion", [SWISH, f"{SWISH}_backward"])
def test_channels_last_has_no_bank_conflicts(fusion, sim_cache):
    """Threads of a row have channels that lie as far apart as all banks are wide."""
    entry, r = CATALOG[fusion], np.random.default_rng(0)
    kernels = tuple(k for k in entry.kernels if k.spec.name in ("last", "last_cluster"))
    catalog = replace(CATALOG, fusions=FrozenDict({fusion: replace(entry, kernels=kernels)}))
    runtime = Runtime(catalog, device="sim", cache=sim_cache, checks=Checks(accesses=True, banks=True))
    maps = [channels_last(r.standard_normal((1, 64, 64)).astype(F32)) for _ in range(2 if "backward" in fusion else 1)]
    out = None if "backward" in fusion else channels_last(np.full((1, 64, 64), np.nan, F32))
    runtime.call(fusion, *maps, *ones(64), out=out, groups=4)
    (prepared,) = runtime._prepared.values()
    assert prepared.report is not None and prepared.report.shared
    assert not prepared.report.bank_conflicts, [str(c) for c in prepared.report.bank_conflicts]


@pytest.mark.parametrize("items", [1, 4])
def test_more_pixels_than_stay_in_shared_memory(items, sim_cache):
    """Samples whose first tiles are read twice, and whose places are filled in turns from either end."""
    entry = CATALOG[SWISH]
    executor = SimExecutor(sim_cache, target="sm_90a", multiprocessors=1)
    trial = Trial(
        "again", FrozenDict({"T": "float16"}), FrozenDict({"N": 3, "C": 64, "S": 2564}),
        attributes=FrozenDict({"groups": 4, "epsilon": 1e-5}), layouts=FrozenDict({"x": "channels_last"}),
        params=FrozenDict({"TEAMS": 1, "ITEMS": items, "THREADS": 544, "SPAN": 1}), exactly=True,
    )  # fmt: skip
    job = prepare(entry, entry.kernel(f"{SWISH}/last_whole"), trial, executor)
    assert isinstance(job, Job)
    assert job.candidate.launch.shared_memory < 2564 * 64 * 2 < 2 * job.candidate.launch.shared_memory
    result = execute(job, executor, OPS)
    assert result.status is Status.PASSED, result


FAULTS = {
    "blocks_do_not_wait": ("cluster", {"SPREAD": 2}, "barrier_wait(&told.bar, round);", ""),
    "own_moments_alone": ("cluster", {"SPREAD": 2}, "told.pairs[round][e]", "told.pairs[round][e % WARPS]"),
    "channels_last_does_not_wait": ("last_cluster", {"SPREAD": 2}, "fr::cluster_sync();", ""),
    "channels_too_early": ("stream", {"TEAMS": 1}, "if (round >= 2) fr::mbarrier_wait", "if (false) fr::mbarrier_wait"),
    "not_yet_loaded": ("stream", {"TEAMS": 2}, "fr::mbarrier_wait(full + place.slot, place.parity);", ""),
    "group_not_yet_loaded": ("ring", {"SPREAD": 2}, "group::barrier_wait(full + round", "(void)(full + round"),
    "neighbour_not_yet_heard": ("ring", {"SPREAD": 2}, "group::barrier_wait(told_all + b", "(void)(told_all + b"),
    "tiles_of_a_cluster": ("last_tiles", {"SPREAD": 2, "SLICE": 1}, "barrier_wait(&told.bar, round);", ""),
    "tiles_of_a_grid": ("last_grid", {"SLICE": 2}, "__syncthreads();  // the", "// the"),
    "pixels_on_their_way": ("last_pixels", {"SLICE": 2, "TEAMS": 1}, "cp_async_wait<0>();", "cp_async_wait<TILES>();"),
    "tile_not_yet_loaded": ("last_whole", {"TEAMS": 1}, "fr::mbarrier_wait(full + place, phases >> place & 1u);", ""),
    "place_not_yet_read": ("last_whole", {"TEAMS": 1}, "fr::mbarrier_wait(empty + place, phases >> place & 1u);", ""),
    "table_of_the_round_before": ("last_stream", {"TEAMS": 2}, "__syncthreads();  // `table`", "// `table`"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_missing_barrier_is_found(fault, sim_cache):
    name, wanted, old, new = FAULTS[fault]
    entry, executor = CATALOG[SWISH], executor_for("sim", sim_cache, ahead=False)
    kernel = entry.kernel(f"{SWISH}/{name}")
    trial = Trial(
        fault, FrozenDict({"T": "float16" if name in SHORT else "float32"}),
        FrozenDict({"N": 2, "C": 16, "S": 1024 if name == "ring" else 640}),
        attributes=FrozenDict({"groups": 2, "epsilon": 1e-5}),
        layouts=FrozenDict({"x": "channels_last"} if name.startswith("last") else {}),
    )  # fmt: skip
    every = parameters(entry, kernel, trial, executor.target)
    chosen = next(p for p in every if wanted.items() <= p.items())
    job = prepare(entry, kernel, trial.with_(fault, params=chosen, exactly=True), executor)
    assert execute(job, executor, OPS, stress=True).status is Status.PASSED
    text = job.source.text.replace(old, new)
    assert text != job.source.text
    outcome = execute(replace(job, source=changed(job.source, text)), executor, OPS, stress=True)
    assert outcome.status.failed, outcome
