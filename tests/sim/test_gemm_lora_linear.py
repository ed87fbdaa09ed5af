"""A product with routed adapters in one launch, in the simulator, against float64 products of NumPy, token by token."""

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
FUSION = "gemm.lora_linear"
LINE = {"transW": 1, "transA": 1, "transB": 1}
KINDS = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


@pytest.mark.parametrize(
    ("dtype", "tokens", "n", "k", "rank", "cluster", "scaled"),
    [
        ("bfloat16", 300, 136, 200, 16, 2, True),
        ("bfloat16", 45, 72, 72, 32, 1, False),
        ("bfloat16", 130, 8, 8, 32, 1, True),
    ],
)
def test_adapters_of_mixed_rank_in_any_order(dtype, tokens, n, k, rank, cluster, scaled, sim_cache):
    """NaN and infinities stand in ranks and adapters that no token uses; adapter 4 gives its own tokens NaN alone."""
    rng = np.random.default_rng(0)
    kind = KINDS[dtype]

    def draw(*shape):
        return rng.standard_normal(shape).astype(kind)

    x, weight, bias = draw(tokens, k), (rng.standard_normal((n, k)) * k**-0.5).astype(kind), draw(n)
    a, b = (rng.standard_normal((6, rank, k)) * k**-0.5).astype(kind), draw(6, n, rank)
    ids = rng.choice(np.array([-1, 0, 1, 2, 4, 7, -3], np.int32), tokens)
    ids[8:28] = 2  # more than a group has
    ranks = np.array([rank, rank // 2 + 1, rank - 1, 3, 3, 0], np.int32)
    for e, live in enumerate(ranks):
        a[e, live if e not in (3, 5) else 0 :] = np.nan
        b[e, :, live if e not in (3, 5) else 0 :] = np.inf
    b[4, 3, 1] = np.nan
    scale = np.array(0.75, kind) if scaled else None
    scales = np.array([2, 1, -0.5, np.nan, 1.5, np.nan], kind) if scaled else None
    key = f"{FUSION}/wgmma"
    tuned = {key: FrozenDict(CLUSTER=cluster)}
    run = Runtime(CATALOG, "sim", sim_cache, Checks.full(), measured={key: 1e-9}, tuned=tuned)
    y = run.call(FUSION, x, weight, bias if scaled else None, a, b, ids, ranks, scale, scales, **LINE)
    assert run.kernels_used == {key: 1}

    x, weight, bias, a, b = (v.astype(np.float64) for v in (x, weight, bias, a, b))
    wanted = x @ weight.T + (bias if scaled else 0.0)
    for m, e in enumerate(ids):
        if 0 <= e < 6:
            delta = b[e, :, : ranks[e]] @ (a[e, : ranks[e]] @ x[m])
            wanted[m] += delta * float(scale) * float(scales[e]) if scaled else delta
    strange = np.isnan(wanted)
    assert strange.sum() == (ids == 4).sum() and np.array_equal(np.isnan(y), strange)
    error = np.abs(y.astype(np.float64) - wanted)[~strange] / (1.0 + np.abs(wanted[~strange]))
    assert error.max() <= {"float16": 2**-10, "bfloat16": 2**-7}[dtype]


@pytest.mark.parametrize(
    ("text", "other"),
    [
        ("others[i] == own && j + i < thread", "others[i] == own && j + i <= thread"),
        ("before % EACH ? 0 : ", "before ? 0 : "),
        ("at + g < end ? at + g : at", "at"),
        ("if (at + 2 * t + c >= end) continue;", ""),
        ("if (p < none) continue;", ""),
        ("if (threadIdx.x < ADAPTERS) fr::grid_sync();", ""),
        ("own < 0 || ", ""),
        ("fr::mbarrier_wait(empty + stage, phase_of(k) ^ 1);", ""),
        ("fr::mbarrier_wait(full + stage_of(k), phase_of(k));", ";"),
        ("fr::barrier_sync(2, CONSUMERS * 128 + OTHERS);\n    expand(8", "expand(8"),
        ("fr::barrier_sync(4, CONSUMERS * 128 + OTHERS);", ""),
        (" - (begin == 1)", ""),
        ("if (p >= end) continue;", ""),
        ("if (!(fabsf(v) < fr::infinity())", "if (false"),
        ("places[group * PART + warp * 16 + lane / 4 + 8 * q]", "group * PART + warp * 16 + lane / 4 + 8 * q"),
    ],
)
def test_what_the_kernel_must_not_lack(text, other):
    from fusionreg.core.conformance.cases import derive
    from fusionreg.core.conformance.execute import Job, execute, prepare
    from fusionreg.core.conformance.mutants import changed
    from fusionreg.core.conformance.simulated import SimExecutor

    entry = CATALOG[FUSION]
    kernel, executor = entry.kernel("wgmma"), SimExecutor()
    base = next(t for t in derive(entry, kernel, executor.target) if t.name.endswith("int64-mixed"))
    trial = replace(
        base, axes=base.axes | {"M": 100, "N": 32, "K": 520, "R": 16, "E": 3}, dtypes=base.dtypes | {"T": "bfloat16"},
        values=FrozenDict({"ids": "integers", "ranks": "12", "b": "special"}),
        attributes=base.attributes | LINE, forms=base.forms | {"weight": 1, "a": 1, "b": 1},
    )  # fmt: skip
    job = prepare(entry, kernel, trial, executor)
    assert isinstance(job, Job), job
    assert text in job.source.text
    broken = replace(job, source=changed(job.source, job.source.text.replace(text, other)))
    assert execute(broken, executor, CATALOG.ops, stress=True).status.failed
