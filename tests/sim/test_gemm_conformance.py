"""The gemm family in the simulator: every kernel conforms, and every planted fault is noticed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from catalogs import shipped

from fusionreg.core.cache import Cache
from fusionreg.core.conformance import derive, run, run_mutants, run_one
from fusionreg.core.conformance.cases import parameters
from fusionreg.core.conformance.execute import Job, execute, prepare
from fusionreg.core.conformance.mutants import edit
from fusionreg.core.conformance.simulated import SimExecutor
from fusionreg.core.frozen import FrozenDict
from fusionreg.core.proof.report import Status
from fusionreg.core.runtime.launch import argument_values
from fusionreg.core.simulator import Checks, SimKernel

WHOLE = shipped("gemm")
#: The fusions without what stands around them.
CATALOG = replace(WHOLE, fusions=FrozenDict({f: replace(e, members=()) for f, e in WHOLE.fusions.items()}))
#: Of the templates that serve whole products; the others have modules of their own. The epilogue of ``wgmma`` is
#: the same for all fusions, so it is left to some.
TEMPLATES = ("plain.cu.j2", "tensor_core.cu.j2", "gated_plain.cu.j2", "wgmma.cu.j2")
KERNELS = [
    (f, k.name)
    for f, e in CATALOG.fusions.items()
    for k in e.kernels
    if k.spec.template in TEMPLATES and (k.name != "wgmma" or f in ("gemm.scale_bias", "gemm.gated", "gemm.scaled"))
    if f not in ("gemm.matmul", "gemm.batched")  # what stands behind them is what they are for
]
#: Each template's slot once, and with several outputs.
SLOTS = [
    ("gemm.bias.residual", "tensor_core"),
    ("gemm.bias.residual", "wgmma"),
    ("gemm.scale.widened", "plain"),
    ("gemm.batched.combined", "tensor_core"),
    ("gemm.batched.narrowed", "plain"),
    ("gemm.matmul.narrowed", "skinny"),
]

#: The chain of fp16 operators casts here; a fused kernel must not.
CAST_BEFORE_SCALE = edit("cast_before_scale", "v *= scale;", "v = fr::to_float(fr::from_float<T>(v)) * scale;")
CAST_BEFORE_BIAS = edit("cast_before_bias", "v += bias;", "v = fr::to_float(fr::from_float<T>(v)) + bias;")
COLUMN_AS_ROW = edit(
    "bias_along_the_other_axis",
    "FORM == 1) return n < N ? fr::to_float(p[n])",
    "FORM == 1) return n < N ? fr::to_float(p[0])",
)
NO_K_TAIL = edit("k_tail_dropped", "step < steps; ++step", "step < static_cast<int>(K / BK); ++step")


@pytest.mark.parametrize(("fusion", "kernel"), KERNELS + SLOTS)
def test_conforms(fusion, kernel):
    catalog = WHOLE if (fusion, kernel) in SLOTS else CATALOG
    report = run(catalog, [fusion], kernels=[kernel], device="sim", cases="quick", cache=Cache())
    assert report.ok, "\n".join(map(str, report.failures))
    assert report.counts["PASSED"] >= 20
    for e in report.evaluations:
        assert e.status is Status.PASSED or e.reason, e


@pytest.mark.parametrize(
    ("fusion", "kernel", "extra"),
    [
        ("gemm.scale", "plain", [CAST_BEFORE_SCALE]),
        ("gemm.bias", "tensor_core", [CAST_BEFORE_BIAS, COLUMN_AS_ROW, NO_K_TAIL]),
    ],
)
def test_every_mutant_dies(fusion, kernel, extra):
    verdicts = run_mutants(CATALOG, [fusion], kernels=[kernel], device="sim", cache=Cache(), extra=extra)
    assert not [str(v) for v in verdicts if v.survived]
    applied = {v.mutant for v in verdicts if v.applies}
    assert {"zero", "identity", "stale", "dropped_tail", "missing_barrier_1", "missing_barrier_2"} <= applied
    assert {m.name for m in extra} <= applied and "relu_drops_nan" in applied


def job(executor: SimExecutor, fusion: str, kernel: str, name: str) -> Job:
    entry = CATALOG[fusion]
    trial = next(t for t in derive(entry, entry.kernel(kernel), executor.target) if t.name == name)
    found = prepare(entry, entry.kernel(kernel), trial, executor)
    assert isinstance(found, Job), found
    return found


def test_a_unit_that_is_compiled_alone_is_instrumented_in_every_order_and_nothing_else(monkeypatch):
    ran, launch, executor = [], SimKernel._launch, SimExecutor(Cache())
    monkeypatch.setattr(SimKernel, "_launch", lambda *a: ran.append((a[1], a[4].orders)) or launch(*a))
    made = job(executor, "gemm.bias", "plain", "float32-base")
    executor.compile(made.source, stressed=True, alone=True)
    assert execute(made, executor, CATALOG.ops, stress=True).status is Status.PASSED
    assert ran == [("checked", (order,)) for order in Checks.full().orders]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_shared_memory_of_the_tensor_core_kernel_has_no_bank_conflicts(dtype):
    executor = SimExecutor(Cache())
    made = job(executor, "gemm.bias", "tensor_core", f"{dtype}-tails")
    outputs = {"y": __import__("numpy").empty(made.problem.shapes["y"], made.arrays["x"].dtype)}
    values = argument_values(made.problem, made.source.arguments)
    arguments = [
        {**made.arrays, **outputs}[a.name] if a.pointer else values[a.parameter] for a in made.source.arguments
    ]
    report = executor.compile(made.source).launch(arguments, made.candidate.launch, checks=Checks.full(banks=True))
    assert report.counters["mma"] > 0
    assert not report.bank_conflicts, [str(b) for b in report.bank_conflicts]


def test_partial_sums_are_wide_for_every_tile():
    """Where a tile ends, half of a sum stands: 256.5, which is no bfloat16."""
    entry, executor = CATALOG["gemm.bias"], SimExecutor(Cache(), ahead=False)
    kernel = entry.kernel("tensor_core")
    trial = next(t for t in derive(entry, kernel, executor.target) if t.name == "bfloat16-partial_sums")
    tried = parameters(entry, kernel, trial, executor.target)
    for params in tried:
        made = trial.with_("tile", params=params, exactly=True)
        found = run_one(CATALOG, "gemm.bias", "tensor_core", made, executor)
        assert found.status is Status.PASSED, (dict(params), found)
        job = prepare(entry, kernel, made, executor)
        y = executor.launch(executor.compile(job.source), job, 0.0)["y"].astype(float)
        assert (y == (0.5 + job.arrays["bias"].astype(float)).astype(job.arrays["bias"].dtype)).all()
    assert len(tried) > 3


def test_a_forced_kernel_never_hides_behind_its_sibling():
    entry = CATALOG["gemm.bias"]
    trial = next(t for t in derive(entry, entry.kernel("plain"), "sm_90a") if t.name == "float16-K17")
    executor = SimExecutor(Cache())
    assert run_one(CATALOG, "gemm.bias", "plain", trial, executor).status is Status.PASSED
    refused = run_one(CATALOG, "gemm.bias", "tensor_core", trial.with_(trial.name, params={}), executor)
    assert refused.status is Status.SKIPPED_UNSUPPORTED and "K % 8 == 0 (K = 17)" in refused.reason


def test_sanitized_builds_are_part_of_the_stress_on_request(monkeypatch):
    from fusionreg.core.conformance import derive, executor_for, run_one
    from fusionreg.core.conformance.simulated import SimExecutor
    from fusionreg.core.errors import ArgumentError
    from fusionreg.core.proof.report import Status
    from fusionreg.core.registry.catalog import load

    catalog, seen = load(allow=("gemm",)), []
    inner = SimExecutor._run

    def recorded(self, code, job, poison, checks):
        seen.append(checks.sanitize)
        return inner(self, code, job, poison, checks)

    monkeypatch.setattr(SimExecutor, "_run", recorded)
    executor = executor_for("auto", sanitize=True)
    entry = catalog["gemm.bias"]
    trial = next(iter(derive(entry, entry.kernel("plain"), executor.target, "quick")))
    assert run_one(catalog, "gemm.bias", "plain", trial, executor).status is Status.PASSED
    assert seen.count(True) == 1 and len(seen) == 4
    with pytest.raises(ArgumentError, match="compute-sanitizer"):
        executor_for("cuda", sanitize=True)
