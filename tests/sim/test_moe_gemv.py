"""Rows times the matrices of experts in the simulator, against float64 products of NumPy, row by row."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from catalogs import shipped

from fusionreg.core.conformance import run_one
from fusionreg.core.conformance.cases import derive
from fusionreg.core.conformance.execute import Job, execute, prepare
from fusionreg.core.conformance.mutants import changed
from fusionreg.core.conformance.simulated import SimExecutor
from fusionreg.core.frozen import FrozenDict
from fusionreg.core.proof.report import Status
from fusionreg.core.runtime import Runtime
from fusionreg.core.simulator import Checks

CATALOG = shipped("moe")
FUSION = "moe.expert_gemv"
KINDS = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}
EPS = {"float16": 2**-10, "bfloat16": 2**-7, "float32": 2**-16}


def exact(x, w, ids, trans=0, wrap=0):
    """As the definition has it, in float64; zeros for a row without an expert."""
    x, w = x.astype(np.float64), w.astype(np.float64)
    w = w.swapaxes(1, 2) if trans else w
    y = np.zeros((len(x), w.shape[2]))
    for m, e in enumerate(np.asarray(ids).tolist()):
        e += len(w) if wrap and e < 0 else 0
        if 0 <= e < len(w):
            y[m] = x[m] @ w[e]
    return y


def operands(rows, n, k, experts, dtype, trans, seed=0):
    rng = np.random.default_rng(seed)
    shape = (experts, n, k) if trans else (experts, k, n)
    return (rng.standard_normal(s).astype(KINDS[dtype]) for s in ((rows, k), shape))


def runtime(kernel, cache, *, checked=True, **params):
    """Dispatch that takes this kernel, with these parameters."""
    key = f"{FUSION}/{kernel}"
    checks = Checks.full() if checked else Checks.guarded()
    return Runtime(CATALOG, "sim", cache, checks, measured={key: 1e-9}, tuned={key: FrozenDict(params)})


def close(got, wanted, dtype):
    error = np.abs(got.astype(np.float64) - wanted) / (1.0 + np.abs(wanted))
    assert not error.size or error.max() <= EPS[dtype], error.max()


@pytest.mark.parametrize(("kernel", "dtypes"), [("stream_cluster", "bfloat16,int64"), ("plain", "float32,int32")])
def test_conforms(kernel, dtypes, sim_cache):
    """Nothing to sum or to store, special values, tails, and the declared cases; GPUs run all cases."""
    entry, executor = CATALOG[FUSION], SimExecutor(sim_cache)
    ends = ("special-x", "special-w", "cancel-x", "K0", "M0", "E0", "N1", "tails", "mixed", "wrapped", "many_experts")
    trials = derive(entry, entry.kernel(kernel), executor.target, "all")
    names = {f"{dtypes}-{end}" for end in ends}
    results = [run_one(CATALOG, FUSION, kernel, t, executor) for t in trials if t.name in names]
    assert not [str(r) for r in results if r.status.failed]
    assert sum(r.status is Status.PASSED for r in results) >= 7


@pytest.mark.parametrize(
    ("kernel", "dtype", "trans", "experts", "wrap", "params"),
    [
        ("plain", "float16", 0, 5, 1, {}),
        ("stream", "float32", 0, 5, 0, {"SPLIT": 1}),
        ("stream", "bfloat16", 1, 60, 1, {"SPLIT": 1}),  # more experts than rows
        ("stream_cluster", "float32", 1, 5, 1, {"SPLIT": 4}),
        ("stream_cluster", "bfloat16", 0, 60, 0, {"SPLIT": 2}),
        ("offloaded", "float16", 1, 5, 0, {"SPLIT": 1}),
        ("decode", "bfloat16", 0, 5, 1, {"SPLIT": 1}),
        ("rows", "bfloat16", 1, 60, 1, {}),
        ("rows", "float32", 1, 5, 0, {}),
        ("resident", "float32", 0, 5, 1, {"BN": 16}),
        ("resident", "float32", 1, 60, 0, {"BN": 32}),
        ("resident_narrow", "float16", 0, 60, 0, {"BN": 32}),
        ("resident_narrow", "bfloat16", 1, 5, 1, {"BN": 16}),
    ],
)
def test_experts_in_any_order(kernel, dtype, trans, experts, wrap, params, sim_cache):
    """NaN stands in every matrix that no row names, also in the last one, which ids of -1 wrap to only on request."""
    rng = np.random.default_rng(1)
    x, w = operands(45, 40, 1160, experts, dtype, trans)
    ids = rng.choice([-1, 0, 1, 3, 99, -experts - 1, experts], 45).astype(np.int32 if trans else np.int64)
    ids[8:30] = 1  # more rows than are multiplied at a time
    w[[e for e in range(experts) if e not in (0, 1, 3) and not (wrap and e == experts - 1)]] = np.nan
    run = runtime(kernel, sim_cache, checked=kernel != "plain", **params)
    y = run.call(FUSION, x, w, ids, trans=trans, indices="FromEnd" if wrap else "none")
    assert run.kernels_used == {f"{FUSION}/{kernel}": 1}
    close(y, exact(x, w, ids, trans, wrap), dtype)
    assert not y[ids == 99].astype(np.float32).any() and y[ids == -1].astype(np.float32).any() == bool(wrap)


@pytest.mark.parametrize("kernel", ["plain", "stream_cluster", "rows"])
def test_no_rows_no_experts_and_one_for_all(kernel, sim_cache):
    run = runtime(kernel, sim_cache, checked=False)
    x, w = operands(37, 64, 72, 3, "bfloat16", 1)
    for ids in (np.full(37, -1), np.full(37, 2), np.full(37, 2**62)):
        close(run.call(FUSION, x, w, ids, trans=1), exact(x, w, ids, 1), "bfloat16")
    assert run.call(FUSION, x[:0], w, ids[:0], trans=1).shape == (0, 64)
    assert not run.call(FUSION, x, w[:0], np.zeros(37, np.int64), trans=1).astype(np.float32).any()


@pytest.mark.parametrize("split", [1, 4])
def test_a_row_s_result_does_not_depend_on_its_neighbours(split, sim_cache):
    run = runtime("stream_cluster" if split > 1 else "stream", sim_cache, checked=False, SPLIT=split)
    x, w = operands(40, 64, 584, 3, "float32", 0, seed=3)
    ids = np.random.default_rng(4).integers(-1, 3, 40)
    y = run.call(FUSION, x, w, ids, trans=0)
    order = np.random.default_rng(5).permutation(40)
    assert run.call(FUSION, x[order], w, ids[order], trans=0).tobytes() == y[order].tobytes()
    assert run.call(FUSION, x[7:8], w, ids[7:8], trans=0).tobytes() == y[7:8].tobytes()


def test_a_matrix_is_read_once_for_all_its_rows(sim_cache):
    """One expert has all 12 rows: its matrix moves once. Of experts that no row names, nothing does."""
    _, w = operands(12, 64, 512, 40, "float32", 0)
    entry, executor = CATALOG[FUSION], SimExecutor(sim_cache)
    base = next(t for t in derive(entry, entry.kernel("stream"), executor.target) if t.name == "float32,int64-base")
    trial = replace(base, axes=base.axes | {"M": 12, "N": 64, "K": 512, "E": 40}, values=FrozenDict({"ids": "7"}))
    job = prepare(entry, entry.kernel("stream"), trial, executor)
    assert isinstance(job, Job), job
    copies = "fr::cp_async_16(own_tile"
    counted = job.source.text.replace(copies, "if (inside) atomicAdd(reinterpret_cast<int*>(y), 1);\n        " + copies)
    counted = counted.replace("y[tokens[i / BN] * N + n] = ", "if (false) y[0] = ")
    assert counted != job.source.text
    job = replace(job, source=changed(job.source, counted), arrays={**job.arrays})
    y = executor.launch(executor.compile(job.source), job, 0.0)["y"]
    assert int(y.reshape(-1)[:1].view(np.int32)[0]) == w[0].nbytes // 16 - 1  # outputs begin with all bits set


@pytest.mark.parametrize(
    ("text", "other"),
    [
        ("place >= 0 && place < ROWS", "place < ROWS && (place = place < 0 ? 0 : place) >= 0"),
        ("if (i < warp) place += found[i];", ""),
        ("v += fr::cluster_load(mine + i, p);", "v = fr::cluster_load(mine + i, p);"),
        ("fr::cluster_sync();", ""),
        ("fr::cp_async_wait<STAGES - 1>();", ""),
        ("at >= 0 && at < E ? at : -1", "at < E ? (at < 0 ? 0 : at) : -1"),
        ("v[j] = mine + __shfl_xor_sync(0xffffffffu, other, LANE);", "v[j] = mine;"),
    ],
)
def test_what_the_kernel_must_not_lack(text, other, sim_cache):
    entry, executor = CATALOG[FUSION], SimExecutor(sim_cache)
    kernel = entry.kernel("stream_cluster")
    base = next(t for t in derive(entry, kernel, executor.target) if t.name == "float32,int64-mixed")
    trial = replace(
        base, axes=base.axes | {"M": 40, "N": 40, "K": 552, "E": 2}, params=FrozenDict({"SPLIT": 2}), exactly=True,
        values=FrozenDict({"ids": "integers" if "at >= 0" in text else "1"}),
    )  # fmt: skip
    job = prepare(entry, kernel, trial, executor)
    assert isinstance(job, Job), job
    assert text in job.source.text
    broken = replace(job, source=changed(job.source, job.source.text.replace(text, other, 1)))
    assert execute(broken, executor, CATALOG.ops, stress=True).status.failed
