"""Rows in groups times the matrices of experts in the simulator, against float64 products of NumPy, row by row."""

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
GROUPED, SELECT, SCATTER = "moe.grouped_gemm", "moe.index_select_gemm", "moe.gemm_scatter_add"
KINDS = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}
EPS = {"float16": 2**-10, "bfloat16": 2**-7, "float32": 2**-16}


def row_of(i, rows, wrap):
    i = int(i) + (rows if wrap and i < 0 else 0)
    return i if 0 <= i < rows else None


def products(x, w, ends, trans):
    """Row p times the matrix of the first group that ends behind it."""
    w = w.astype(np.float64).swapaxes(1, 2) if trans else w.astype(np.float64)
    y = np.zeros((len(x), w.shape[2]))
    for p, row in enumerate(x.astype(np.float64)):
        e = next((e for e, end in enumerate(np.asarray(ends).tolist()) if end > p), None)
        if e is not None:
            y[p] = row @ w[e]
    return y


def selected(x, index, w, ends, trans=0, wrap=0):
    at = [row_of(i, len(x), wrap) for i in index]
    return products(np.array([np.zeros(x.shape[1]) if i is None else x[i] for i in at]), w, ends, trans)


def combined(base, x, w, ends, weights, index, trans=0, wrap=0):
    y = base.astype(np.float64)
    for p, row in enumerate(products(x, w, ends, trans)):
        at = row_of(index[p], len(base), wrap)
        if at is not None:
            y[at] += row * (1.0 if weights is None else float(weights[p, 0]))
    return y


def operands(m, n, k, rows, experts, dtype, trans, seed=0):
    """(rows of M, rows of P, matrices, weights)."""
    rng = np.random.default_rng(seed)
    shapes = ((m, k), (rows, k), (experts, n, k) if trans else (experts, k, n), (rows, 1))
    return tuple((rng.standard_normal(s) * (k**-0.5 if len(s) == 3 else 1)).astype(KINDS[dtype]) for s in shapes)


def runtime(fusion, kernel, cache, *, checked=True, **params):
    """Dispatch that takes this kernel, with these parameters."""
    key = f"{fusion}/{kernel}"
    checks = Checks.full() if checked else Checks.guarded()
    return Runtime(CATALOG, "sim", cache, checks, measured={key: 1e-9}, tuned={key: FrozenDict(params)})


def close(got, wanted, dtype):
    error = np.abs(got.astype(np.float64) - wanted) / (1.0 + np.abs(wanted))
    assert not error.size or error.max() <= EPS[dtype], error.max()


@pytest.mark.parametrize("fusion", [SELECT, SCATTER])
def test_conforms(fusion, sim_cache):
    """Nothing to sum or to store, special values, and the declared cases; GPUs run all cases."""
    entry, executor = CATALOG[fusion], SimExecutor(sim_cache)
    ends = ("special-w", "K0", "M0", "P0", "E0", "N1", "rising", "wrapped", "descending", "one_row", "small_onto_large")
    trials = derive(entry, entry.kernel("tensor_core"), executor.target, "all")
    names = {f"bfloat16,int64,int32-{end}" for end in ends}
    results = [run_one(CATALOG, fusion, "tensor_core", t, executor) for t in trials if t.name in names]
    assert not [str(r) for r in results if r.status.failed]
    assert sum(r.status is Status.PASSED for r in results) >= 5


@pytest.mark.parametrize(
    ("kernel", "dtype", "trans", "wrap", "params"),
    [
        ("plain", "float32", 1, 0, {}),
        ("tensor_core", "bfloat16", 1, 0, {"BM": 16}),
        ("tensor_core", "float16", 0, 1, {"BM": 64}),
        ("tensor_core", "bfloat16", 0, 0, {"BM": 128}),
        ("wgmma", "bfloat16", 1, 0, {}),
        ("wgmma", "float16", 0, 1, {}),
    ],
)
def test_groups_of_every_size(kernel, dtype, trans, wrap, params, sim_cache):
    """Empty groups, one larger than a tile, rows behind all; NaN in the matrices of empty groups."""
    small, indices = kernel == "plain", "FromEnd" if wrap else "none"
    m, n, k, rows = (9, 40, 24, 60) if small else (40, 136, 200, 190)
    base, x, w, weights = operands(m, n, k, rows, 7, dtype, trans)
    ends = np.array([0, 3, 3, rows - 30, rows - 30, rows - 12, rows - 12], np.int32 if trans else np.int64)
    w[[0, 2, 4, 6]] = np.nan
    index = np.random.default_rng(1).choice([*range(-3, m // 2), m, 2**31 - 1], rows)
    index = index.astype(np.int32 if trans and small else np.int64)
    x_rows, _, _, _ = operands(m, n, k, rows, 7, dtype, trans, seed=2)
    run = runtime(SELECT, kernel, sim_cache, **params)
    y = run.call(SELECT, x_rows, index, w, ends, trans=trans, indices=indices)
    close(y, selected(x_rows, index, w, ends, trans, wrap), dtype)
    assert not y[-12:].astype(np.float32).any() and run.kernels_used == {f"{SELECT}/{kernel}": 1}
    run = runtime(GROUPED, kernel, sim_cache, checked=False, **params)
    close(run.call(GROUPED, x, w, ends, trans=trans), products(x, w, ends, trans), dtype)
    assert run.kernels_used == {f"{GROUPED}/{kernel}": 1}
    base = base[:, :1].repeat(n, axis=1)
    run = runtime(SCATTER, kernel, sim_cache, **params)
    for factor in (weights, None):
        y = run.call(SCATTER, base, x, w, ends, factor, index, trans=trans, indices=indices)
        close(y, combined(base, x, w, ends, factor, index, trans, wrap), dtype)
    untouched = [i for i in range(m) if i not in {row_of(j, m, wrap) for j in index}]
    assert untouched and y[untouched].tobytes() == base[untouched].tobytes()
    assert run.kernels_used == {f"{SCATTER}/{kernel}": 2}


@pytest.mark.parametrize(("dtype", "base", "part", "count", "sum_"), [
    ("bfloat16", 1.0, 2.0**-9, 256, 1.5), ("float16", 2048.0, 1.0, 8, 2056.0),
])  # fmt: skip
def test_sums_are_rounded_once(dtype, base, part, count, sum_, sim_cache):
    """What additions in the dtype of the result would lose; more products than a row lists, and fewer."""
    x = np.zeros((count, 16), KINDS[dtype])
    x[:, 0] = part
    w = np.zeros((1, 16, 8), KINDS[dtype])
    w[0, 0] = 1.0
    old = np.full((2, 8), base, KINDS[dtype])
    run = runtime(SCATTER, "tensor_core", sim_cache, BM=16)
    y = run.call(SCATTER, old, x, w, np.array([count]), None, np.zeros(count, np.int64), trans=0)
    assert np.all(y[0].astype(np.float32) == sum_) and y[1].tobytes() == old[1].tobytes()


def test_all_experts_without_rows_and_no_experts(sim_cache):
    base, x, w, weights = operands(5, 16, 16, 12, 3, "float16", 0)
    index = np.arange(12) % 5
    run = runtime(SCATTER, "tensor_core", sim_cache, checked=False, BM=16)
    for matrices, ends in ((w, np.zeros(3, np.int64)), (w[:0], np.zeros(0, np.int64))):
        assert run.call(SCATTER, base, x, matrices, ends, weights, index, trans=0).tobytes() == base.tobytes()
    assert (
        run.call(SCATTER, base, x[:0], w, np.zeros(3, np.int64), weights[:0], index[:0], trans=0).tobytes()
        == base.tobytes()
    )
    run = runtime(SELECT, "tensor_core", sim_cache, checked=False, BM=16)
    assert not run.call(SELECT, x, index, w[:0], np.zeros(0, np.int64), trans=0).astype(np.float32).any()
    assert not run.call(SELECT, x[:0], index, w, np.full(3, 12), trans=0).astype(np.float32).any()


@pytest.mark.parametrize(
    ("fusion", "text", "other"),
    [
        (SELECT, "if (lane >= offset && other > end) end = other;", ""),
        (SELECT, "static_cast<int>(local % own) * BM", "0"),
        (SELECT, "r < rows && e < groups ? static_cast<int>(moe::expert", "true ? static_cast<int>(moe::expert"),
        (SELECT, "row >= 0 && k0 + 8 * c < K", "k0 + 8 * c < K"),
        (SCATTER, "fr::grid_sync();\n  for", "for"),
        (SCATTER, "for (int i = 0; i < count; ++i) before += ", "for (int i = 0; i < 0; ++i) before += "),
        (SCATTER, "if (m < 0) continue;", ""),
        (SCATTER, "if (at < LISTED) ", ""),
        (SCATTER, "v[i] *= weight;", ""),
    ],
)
def test_what_the_kernels_must_not_lack(fusion, text, other, sim_cache):
    entry, executor = CATALOG[fusion], SimExecutor(sim_cache)
    kernel = entry.kernel("tensor_core")
    base = next(t for t in derive(entry, kernel, executor.target, "all") if t.name == "bfloat16,int64,int32-descending")
    axes = {"M": 3, "N": 24, "K": 72, "P": 130, "E": 12}
    trial = replace(
        base, axes=base.axes | axes, params=FrozenDict({"BM": 16}), exactly=True,
        values=FrozenDict({
            "index": "1" if "LISTED" in text else "integers", "ends": "integers" if "other > end" in text else "rising",
        }),
    )  # fmt: skip
    job = prepare(entry, kernel, trial, executor)
    assert isinstance(job, Job), job
    assert text in job.source.text
    broken = replace(job, source=changed(job.source, job.source.text.replace(text, other, 1)))
    assert execute(broken, executor, CATALOG.ops, stress=True).status.failed
