"""Products with few rows: one template for weights of 16 and 8 bits, in the simulator."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from gemm_trials import CATALOG, made

from fusionreg.core.cache import Cache
from fusionreg.core.conformance import derive, run, run_one
from fusionreg.core.conformance.execute import empty_outputs, execute
from fusionreg.core.conformance.mutants import changed
from fusionreg.core.conformance.simulated import SimExecutor
from fusionreg.core.proof.report import Status
from fusionreg.core.runtime.launch import argument_values
from fusionreg.core.simulator import Checks

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)


def test_conforms():
    report = run(CATALOG, ["gemm.scale_bias"], kernels=["skinny"], device="sim", cases="quick", cache=Cache())
    assert report.ok, "\n".join(map(str, report.failures))
    assert report.counts["PASSED"] >= 30


@pytest.mark.parametrize(
    ("fusion", "kernel", "dtypes"),
    [
        ("gemm.cast_scale", "skinny", "bfloat16,int8"),
        ("gemm.dequantize", "skinny", "float16,float8_e4m3fn"),
        ("gemm.dequantize", "plain", "bfloat16,float8_e4m3fn"),
        ("gemm.scaled", "plain", "float16"),
        ("gemm.scaled_bias", "skinny", "bfloat16,float32"),
    ],
)
def test_products_with_8_bits_conform(fusion, kernel, dtypes):
    """Special values of every operand, every byte, nothing to sum; GPUs run all cases."""
    entry, executor = CATALOG[fusion], SimExecutor(Cache())
    names = {f"{dtypes}-{end}" for end in ("special-x", "special-w", "extremes", "K0", "M0", "long_sum", "tails")}
    trials = [t for t in derive(entry, entry.kernel(kernel), executor.target, "all") if t.name in names]
    results = [run_one(CATALOG, fusion, kernel, t, executor) for t in trials]
    assert not [str(r) for r in results if r.status.failed]
    assert sum(r.status is Status.PASSED for r in results) >= 4


@pytest.mark.parametrize(
    ("fusion", "name", "transposed", "params"),
    [
        ("gemm.scale_bias", "bfloat16-base", 1, {"BM": 64, "SPLIT": 2}),
        ("gemm.scale_bias", "float16-base", 0, {"BM": 32, "SPLIT": 8}),
        ("gemm.cast_scale", "float16,int8-base", 1, {"BM": 8, "SPLIT": 4}),
        ("gemm.cast_scale", "bfloat16,int8-base", 0, {"BM": 32, "SPLIT": 1}),
        ("gemm.dequantize", "bfloat16,float8_e4m3fn-base", 1, {"BM": 16, "SPLIT": 2}),
        ("gemm.scaled_float32", "float32-base", 0, {"BM": 16, "SPLIT": 2}),
        ("gemm.bias.residual", "bfloat16-base", 1, {"BM": 16, "SPLIT": 4}),  # operators at the slot of y
    ],
)
def test_layouts_and_tiles(fusion, name, transposed, params):
    """More steps than stages, several row and column tiles, and tails of all."""
    job = made(fusion, "skinny", name, {"M": 70, "K": 1328, "N": 272}, transposed, **params)
    result = execute(job, SimExecutor(Cache()), CATALOG.ops)
    assert result.status is Status.PASSED, result


@pytest.mark.parametrize("fusion", ["gemm.scale_bias", "gemm.cast_scale"])
def test_shared_memory_has_no_bank_conflicts(fusion):
    executor = SimExecutor(Cache())
    name = "float16-base" if fusion == "gemm.scale_bias" else "float16,float8_e4m3fn-base"
    job = made(fusion, "skinny", name, {"M": 16, "K": 1024, "N": 128}, 1, BM=16, SPLIT=2)
    arrays = {**job.arrays, **empty_outputs(job, 0.0)}
    values = argument_values(job.problem, job.source.arguments)
    arguments = [arrays[a.name] if a.pointer else values[a.parameter] for a in job.source.arguments]
    report = executor.compile(job.source).launch(arguments, job.candidate.launch, checks=Checks.full(banks=True))
    assert report.counters["mma"] == 1024 // 16 * (128 // 16) * 2  # two mma tiles for 16 rows
    assert not report.bank_conflicts, [str(b) for b in report.bank_conflicts]


@pytest.mark.parametrize(
    ("text", "other"),
    [
        ("(row * XC +", "(0 * XC +"),
        ("step < count; ++step", "step < count - 1; ++step"),
        ("v[i] += part[i];", "v[i] = part[i];"),  # the last block's sum alone
        ("= sum[r][j][i];", "= fr::to_float(fr::from_float<T>(sum[r][j][i]));"),  # partial sums rounded to bfloat16
        ("fr::cp_async_wait<STAGES - 2>();", ""),
        ("fr::cluster_sync();", "__syncthreads();"),
        ("8 * c < channels : c < depth", "true : c < depth"),  # channels beyond the weight
        ("transB ? depth :", "transB ? RUN :"),  # k beyond it
    ],
)
def test_what_the_kernel_must_not_lack(text, other):
    job = made("gemm.scale_bias", "skinny", "bfloat16-cancel-x", {"M": 19, "K": 2056, "N": 136}, 1, BM=16, SPLIT=2)
    source = job.source.text
    assert source.count(text) >= 1
    broken = replace(job, source=changed(job.source, source.replace(text, other, 1)))
    assert execute(broken, SimExecutor(Cache()), CATALOG.ops).status.failed


@pytest.mark.parametrize("split", [1, 8])
def test_sums_are_fp32_for_long_k(split):
    """64k terms of both signs: within fp32's rounding of the sum of their magnitudes, which half is far from."""
    k, rng = 65536, np.random.default_rng(8)
    x, w = (rng.standard_normal(shape).astype(E4M3) for shape in ((1, k), (16, k)))
    job = made("gemm.scaled_float32", "skinny", "float32-base", {"M": 1, "K": k, "N": 16}, 1, BM=8, SPLIT=split)
    one = np.ones((), np.float32)
    job = replace(job, arrays={**job.arrays, "x": x, "w": w, "scale_x": one, "scale_w": np.ones(16, np.float32)})
    executor = SimExecutor(Cache())
    y = executor.launch(executor.compile(job.source), job, 0.0)["y"].astype(np.float64)
    terms = x.astype(np.float64) * w.astype(np.float64)
    error = np.abs(y[0] - terms.sum(axis=1)) / np.abs(terms).sum(axis=1)
    assert error.max() < 2.0**-18, error.max()
    half = np.abs(terms.sum(axis=1).astype(np.float16) - terms.sum(axis=1)) / np.abs(terms).sum(axis=1)
    assert error.max() < half.max()


@pytest.mark.parametrize("kernel", ["skinny", "stream", "plain"])
def test_a_scale_that_is_not_finite_stands_in_front_of_the_sum(kernel):
    """inf * 0 is NaN in front of a product; behind it, the sum of the others would be infinite."""
    job = made("gemm.dequantize", kernel, "float16,int8-base", {"M": 2, "K": 32, "N": 16}, 1, {"scale": 1})
    w = np.full((16, 32), 2, np.int8)
    w[1, 3], w[2, 5] = 0, -1
    scale = np.ones(16, np.float16)
    scale[:3], scale[3] = np.inf, np.nan
    x = np.ones((2, 32), np.float16)
    bias = {n: np.zeros_like(a) for n, a in job.arrays.items() if n == "bias"}
    job = replace(job, arrays={**job.arrays, **bias, "x": x, "w": w, "scale": scale})
    executor = SimExecutor(Cache())
    y = executor.launch(executor.compile(job.source), job, 0.0)["y"].astype(float)
    expected = np.full((2, 16), 64.0)
    expected[:, :4] = [np.inf, np.nan, np.nan, np.nan]
    np.testing.assert_array_equal(y, expected)
