"""Routed adapters in the simulator, against float64 products of NumPy, token by token."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from catalogs import shipped

from fusionreg.core.frozen import FrozenDict
from fusionreg.core.runtime import Runtime
from fusionreg.core.simulator import Checks

CATALOG = shipped("gemm")
FUSION = "gemm.lora_routed"
KINDS = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}


def exact(base, x, a, b, ids, ranks=None, scale=None, scales=None, transA=1, transB=1):
    """As the definition has it, in float64: adapters outside of [0, E) and ranks from ranks[e] on do not exist."""
    base, x, a, b = (v.astype(np.float64) for v in (base, x, a, b))
    a = a if transA else a.swapaxes(1, 2)
    b = b if transB else b.swapaxes(1, 2)
    y = base.copy()
    for m, e in enumerate(ids):
        if 0 <= e < len(a):
            live = a.shape[1] if ranks is None else min(max(int(ranks[e]), 0), a.shape[1])
            with np.errstate(invalid="ignore", over="ignore"):
                delta = b[e][:, :live] @ (a[e][:live] @ x[m])
                y[m] += delta * (1.0 if scale is None else float(scale)) * (1.0 if scales is None else float(scales[e]))
    return y


def operands(tokens, n, k, adapters, rank, dtype, seed=0, transA=1, transB=1):
    rng = np.random.default_rng(seed)
    kind = KINDS[dtype]

    def draw(*shape, size=1.0):
        return (size * rng.standard_normal(shape)).astype(kind)

    a = draw(adapters, rank, k, size=k**-0.5) if transA else draw(adapters, k, rank, size=k**-0.5)
    b = draw(adapters, n, rank) if transB else draw(adapters, rank, n)
    return draw(tokens, n), draw(tokens, k), a, b


def runtime(kernel, cache, *, checked=True, **params):
    """Dispatch that takes this kernel, with these parameters."""
    key = f"{FUSION}/{kernel}"
    checks = Checks.full() if checked else Checks.guarded()
    return Runtime(CATALOG, "sim", cache, checks, measured={key: 1e-9}, tuned={key: FrozenDict(params)})


def close(got, wanted, dtype, tolerance=None):
    eps = {"float16": 2**-10, "bfloat16": 2**-7, "float32": 2**-18}[dtype]
    found = got.astype(np.float64)
    assert np.array_equal(np.isnan(found), np.isnan(wanted)) and np.array_equal(np.isinf(found), np.isinf(wanted))
    finite = np.isfinite(wanted)
    assert np.array_equal(np.sign(found[~finite]), np.sign(wanted[~finite]), equal_nan=True)
    with np.errstate(invalid="ignore"):
        error = np.abs(found - wanted)[finite] / (1.0 + np.abs(wanted[finite]))
    assert not error.size or error.max() <= (tolerance or eps), error.max()


@pytest.mark.parametrize(
    ("kernel", "dtype", "rank", "trans", "params"),
    [
        ("plain", "float16", 5, (1, 0), {}),
        ("decode", "bfloat16", 16, (1, 1), {"SPLIT": 1}),
        ("decode", "float32", 32, (0, 0), {"SPLIT": 1}),
        ("decode_cluster", "float16", 128, (1, 0), {"SPLIT": 4}),
        ("decode_cluster", "bfloat16", 8, (0, 1), {"SPLIT": 2}),
        ("resident", "bfloat16", 16, (1, 1), {"SPLIT": 2}),
        ("resident", "float16", 64, (1, 1), {"SPLIT": 4}),
        ("grouped", "bfloat16", 16, (1, 1), {"BM": 16, "SPLIT": 1}),
        ("grouped_cluster", "float16", 64, (1, 1), {"BM": 32, "SPLIT": 2}),
        ("grouped_cluster", "bfloat16", 128, (1, 1), {"BM": 16, "SPLIT": 4}),
    ],
)
def test_adapters_of_mixed_rank_in_any_order(kernel, dtype, rank, trans, params, sim_cache):
    """NaN stands in every rank and adapter that no token uses, also in the last one, which ids of -1 would wrap to."""
    keywords = dict(zip(("transA", "transB"), trans, strict=True))
    tokens = 45 if kernel.startswith("grouped") else 14
    base, x, a, b = operands(tokens, 104, 136, 5, rank, dtype, **keywords)
    ids = np.random.default_rng(1).choice([-1, 0, 1, 2, 7, -3, 5], tokens).astype(np.int32)
    ids[8:28] = 2  # more than a group holds
    ranks = np.array([rank, rank // 2 + 1, rank - 1, 3, 3], np.int32)
    for e, live in enumerate(ranks):
        dead = slice(live if e not in (3, 4) else 0, None)
        (a if trans[0] else a.swapaxes(1, 2))[e, dead] = np.nan
        (b.swapaxes(1, 2) if trans[1] else b)[e, dead] = np.inf
    scale = np.array(0.75, KINDS[dtype])
    scales = None if dtype == "bfloat16" else np.array([2, 1, -0.5, np.nan, np.nan], KINDS[dtype])
    run = runtime(kernel, sim_cache, **params)
    y = run.call(FUSION, base, x, a, b, ids, ranks, scale, scales, **keywords)
    assert run.kernels_used == {f"{FUSION}/{kernel}": 1}
    close(y, exact(base, x, a, b, ids, ranks, scale, scales, **keywords), dtype)
    none = (ids < 0) | (ids >= 5)
    assert none.any() and y[none].tobytes() == base[none].tobytes()


@pytest.mark.parametrize("kernel", ["plain", "decode", "decode_cluster", "grouped", "grouped_cluster"])
def test_no_tokens_no_adapters_and_one_for_all(kernel, sim_cache):
    run = runtime(kernel, sim_cache, checked=False)
    base, x, a, b = operands(70, 40, 72, 3, 16, "bfloat16")
    for ids in (np.full(70, -1), np.full(70, 2), np.full(70, 2**62)):
        close(run.call(FUSION, base, x, a, b, ids), exact(base, x, a, b, ids), "bfloat16")
    assert run.call(FUSION, base[:0], x[:0], a, b, ids[:0]).shape == (0, 40)
    nothing = run.call(FUSION, base, x, a[:0], b[:0], np.zeros(70, np.int64))
    assert nothing.tobytes() == base.tobytes()
    one = run.call(FUSION, base[:1], x[:1], a, b, np.zeros(1, np.int64))
    close(one, exact(base[:1], x[:1], a, b, [0]), "bfloat16")


@pytest.mark.parametrize("kernel", ["decode_cluster", "grouped_cluster"])
def test_a_token_s_result_does_not_depend_on_its_neighbours(kernel, sim_cache):
    run = runtime(kernel, sim_cache, checked=False)
    base, x, a, b = operands(50, 72, 264, 4, 16, "float16", seed=3)
    ids = np.random.default_rng(4).integers(-1, 4, 50)
    y = run.call(FUSION, base, x, a, b, ids)
    order = np.random.default_rng(5).permutation(50)
    turned = run.call(FUSION, base[order], x[order], a, b, ids[order])
    assert turned.tobytes() == y[order].tobytes()
    alone = run.call(FUSION, base[7:8], x[7:8], a, b, ids[7:8])
    assert alone.tobytes() == y[7:8].tobytes()


@pytest.mark.parametrize("kernel", ["decode", "grouped", "grouped_cluster"])
def test_infinities_and_sums_beyond_fp16(kernel, sim_cache):
    """h is no fp16 number, nor does it meet an infinity of B in two parts."""
    run = runtime(kernel, sim_cache, checked=False)
    base, x, a, b = operands(20, 40, 72, 3, 16, "float16", seed=6)
    x[:, 0], a[:, 0, 0], b[:, :, 0] = 300, 300, 1e-3
    b[1, 5, 3], b[1, 9, 2], a[2, 4, 7] = np.inf, np.nan, -np.inf
    x[3, 11] = np.nan
    ids = np.arange(20) % 4 - 1
    wanted = exact(base, x, a, b, ids)
    assert np.isinf(wanted[2]).sum() == 1 and np.isnan(wanted[2]).sum() == 1  # of adapter 1, elsewhere finite
    close(run.call(FUSION, base, x, a, b, ids), wanted, "float16", 2**-9)


def test_h_is_kept_in_fp32(sim_cache):
    """h = 1 + 2^-13 is neither a bfloat16 nor a tf32 number: rounded to one, nothing is left of the difference."""
    k, n = 128, 64
    base = np.full((16, n), -256.0, ml_dtypes.bfloat16)
    x, a = np.zeros((16, k)), np.zeros((1, 16, k))
    x[:, :2], a[0, 0, 0], a[0, 0, 1] = 1.0, 1.0, 2.0**-13
    b = np.zeros((1, n, 16))
    b[0, :, 0] = 256.0
    x, a, b = (v.astype(ml_dtypes.bfloat16) for v in (x, a, b))
    for kernel in ("plain", "decode", "grouped"):
        y = runtime(kernel, sim_cache, checked=False).call(FUSION, base, x, a, b, np.zeros(16, np.int64))
        assert np.all(y.astype(np.float32) == 2.0**-5), kernel


def test_only_the_ranks_that_occur_are_compiled(sim_cache, monkeypatch):
    """The rank is part of the unit, tokens and adapters are not: one unit for each rank that comes along."""
    built = []
    from fusionreg.core import simulator

    original = simulator.compile

    def compile(source, **options):
        built.append(source.digest)
        return original(source, **options)

    monkeypatch.setattr(simulator, "compile", compile)
    run = Runtime(CATALOG, "sim", sim_cache, Checks(), measured={f"{FUSION}/decode": 1e-9})
    for rank, tokens, adapters in ((8, 3, 2), (8, 5, 4), (32, 3, 2), (8, 7, 1), (32, 1, 6), (32, 2, 2)):
        base, x, a, b = operands(tokens, 40, 72, adapters, rank, "float16")
        ids = np.arange(tokens) % adapters
        close(run.call(FUSION, base, x, a, b, ids), exact(base, x, a, b, ids), "float16", 2**-9)
    assert len(set(built)) == 2 and run.kernels_used == {f"{FUSION}/decode": 6}


@pytest.mark.parametrize(
    ("kernel", "text", "other"),
    [
        ("grouped", "place[i] >= 0 && place[i] < BM", "place[i] < BM && (place[i] = place[i] < 0 ? 0 : place[i]) >= 0"),
        ("grouped", "if (w < warp) place[i] += found[i][w];", ""),
        ("grouped", "fr::cp_async_wait<AHEAD - 1>();", ""),
        ("grouped", "if (finite) {", "if (true) {"),
        ("decode_cluster", "v += fr::cluster_load(mine + r, q);", "v = fr::cluster_load(mine + r, q);"),
        ("decode_cluster", "if (r0 + e < live) ", ""),
        ("decode_cluster", "fr::cluster_sync();\n  for", "for"),
        ("resident", "if (r0 + e < live) ", ""),
        ("resident", "fr::mbarrier_wait(&complete, 0);", "__syncthreads();"),
        ("plain", "id < 0 ? 0 : ", ""),
    ],
)
def test_what_the_kernels_must_not_lack(kernel, text, other):
    from fusionreg.core.conformance.cases import derive
    from fusionreg.core.conformance.execute import Job, execute, prepare
    from fusionreg.core.conformance.mutants import changed
    from fusionreg.core.conformance.simulated import SimExecutor

    entry = CATALOG[FUSION]
    executor = SimExecutor()
    base = next(t for t in derive(entry, entry.kernel(kernel), executor.target) if t.name.endswith("int64-mixed"))
    many = kernel == "grouped"
    whole = {"x": "integers", "a": "integers", "b": "special"}  # what one part of h holds whole, the other lacks
    values = {**whole, "ids": "zeros", "ranks": "16"} if many else {"ids": "integers", "ranks": "3", "b": "special"}
    trial = replace(
        base, axes=base.axes | {"M": 80 if many else 12, "R": 16, "E": 1}, dtypes=base.dtypes | {"T": "bfloat16"},
        values=FrozenDict(values),
        attributes=base.attributes | {"transA": 1, "transB": 1}, forms=base.forms | {"a": 1, "b": 1},
    )  # fmt: skip
    job = prepare(entry, entry.kernel(kernel), trial, executor)
    assert isinstance(job, Job), job
    assert text in job.source.text
    broken = replace(job, source=changed(job.source, job.source.text.replace(text, other)))
    assert execute(broken, executor, CATALOG.ops, stress=True).status.failed
