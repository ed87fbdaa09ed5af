"""Every status arises where it should, and every way of being wrong is noticed."""

from __future__ import annotations

import numpy as np
import pytest

from fusionreg.core.conformance import derive, mutants, run, run_mutants, run_one
from fusionreg.core.conformance.mutants import LAUNCH_MUTANTS, edit, mutants_of
from fusionreg.core.errors import (
    CompileError,
    GraphError,
    LaunchError,
    SimulatorError,
    UnknownNameError,
    UnsupportedError,
)
from fusionreg.core.ops import default_vocabulary
from fusionreg.core.proof.report import Status

FUSION = "gemm.scale_bias"


def trial(catalog, name: str, kernel: str = "plain"):
    entry = catalog[FUSION]
    return next(t for t in derive(entry, entry.kernel(kernel), "sm_90a") if t.name == name)


def judge(catalog, fake, name="float32-base", kernel="plain", **kwargs):
    return run_one(catalog, FUSION, kernel, trial(catalog, name, kernel), fake(**kwargs))


@pytest.mark.parametrize("kernel", ["plain", "tensor_core"])
def test_a_perfect_kernel_passes_every_case(catalog, fake, kernel):
    report = run(catalog, [FUSION], executor=fake(), cases="quick", kernels=[kernel])
    assert report.ok, report.failures[:3]
    assert report.counts["PASSED"] > 30
    assert all(e.device == "fake" and e.target == "sm_90a" for e in report.evaluations)


def test_units_compile_once_each_ahead_of_use(catalog, fake):
    executor = fake()
    report = run(catalog, ["gemm.scale"], executor=executor, cases="quick")
    known = {e.digest for e in report.evaluations if e.digest}
    compared = {e.digest for e in report.evaluations if e.max_abs}
    assert compared <= set(executor.compiled) <= known
    assert len(set(executor.compiled)) < 10 * len(catalog["gemm.scale"].kernels)
    cases = {digest: sum(e.digest == digest for e in report.evaluations) for digest in known}
    assert executor.alone and max(cases[digest] for digest in executor.alone) < max(cases.values())


def test_a_kernel_that_refuses_is_skipped_with_its_reason(catalog, fake):
    found = judge(catalog, fake, "bfloat16-K1", "tensor_core")
    assert found.status is Status.SKIPPED_UNSUPPORTED and "K % 8 == 0" in found.reason
    found = judge(catalog, fake, refuses="it needs wings")
    assert found.status is Status.SKIPPED_UNSUPPORTED and found.reason == "it needs wings"


def test_parameters_give_way_to_the_shape_unless_they_are_what_is_tried(catalog, fake):
    made = trial(catalog, "float32-base").with_("t", params={"BM": 48})
    assert run_one(catalog, FUSION, "plain", made, fake()).status is Status.PASSED
    found = run_one(catalog, FUSION, "plain", made.with_("t", exactly=True), fake())
    assert found.status is Status.SKIPPED_UNSUPPORTED and "not valid here" in found.reason


def test_quick_stresses_units_that_differ_in_more_than_dtype_and_choice(catalog, fake):
    """Barriers and races are the same in every dtype; the full set stresses each unit all the same."""
    asked = []

    class Stressed(fake):
        def stress(self, code, job, expected):
            asked.append((job.entry.name, job.candidate.params, job.trial.forms, job.trial.absent))
            return ""

    executor = Stressed()
    run(catalog, ["gemm.scale"], executor=executor, cases="quick", kernels=["tensor_core"])
    assert 1 < len(asked) == len(set(asked)) < len(set(executor.compiled))


def test_kernels_of_a_fusion_share_references(catalog, fake, monkeypatch):
    from fusionreg.core.conformance import reference as module

    made: list[str] = []
    real = module.reference
    monkeypatch.setattr(module, "reference", lambda e, t, a, o: made.append(t.name) or real(e, t, a, o))
    shared = module.References(default_vocabulary())
    entry = catalog[FUSION]
    first = trial(catalog, "float16-K15")
    for params in ({"BM": 64}, {"BM": 128}):
        again = first.with_(first.name, params=params)
        assert shared.of(entry, again, again.arrays(entry)).exact["y"].shape == (32, 64)
    assert made == ["float16-K15"]
    other = first.with_("float16-K15", axes={"M": 3})
    assert shared.of(entry, other, other.arrays(entry)).exact["y"].shape == (3, 64) and len(made) == 2


def test_a_pattern_that_contradicts_its_tensors_fails_alone(catalog, fake, monkeypatch):
    def fails(*args):
        raise GraphError("shape inference failed", "Add", "extents [32, 48] meet", "equal extents")

    monkeypatch.setattr("fusionreg.core.conformance.reference.reference", fails)
    found = judge(catalog, fake)
    assert found.status is Status.RUNTIME_ERROR and "extents [32, 48] meet" in found.reason


def test_compile_error(catalog, fake):
    def fails(source):
        raise CompileError("cannot compile", source.kernel, "expected ;")

    found = judge(catalog, fake, compiles=fails)
    assert found.status is Status.COMPILE_ERROR and "expected ;" in found.reason


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (SimulatorError("race", "in k", detector="race"), Status.RUNTIME_ERROR),
        (SimulatorError("too long", "in k", detector="timeout"), Status.TIMEOUT),
    ],
)
def test_errors_of_the_launch(catalog, fake, error, status):
    def fails(outputs, job, poison):
        raise error

    assert judge(catalog, fake, wrong=fails).status is status


def test_a_unit_that_does_not_end_is_run_once(catalog, fake):
    """Each case would take the whole limit again: an endless loop must not cost an hour."""
    units = []

    def hangs(outputs, job, poison):
        units.append(job.source.digest)
        raise SimulatorError("too long", "in k", detector="timeout")

    found = run(catalog, [FUSION], kernels=["plain"], cases="quick", executor=fake(wrong=hangs)).evaluations
    assert len(units) == len(set(units)) > 1
    late = [e for e in found if e.status is Status.TIMEOUT]
    assert len(late) > len(units) and sum("not run: the same unit" in e.reason for e in late) == len(late) - len(units)


def changed(change):
    def wrong(outputs, job, poison):
        return {n: change(a, job, poison) for n, a in outputs.items()}

    return wrong


def off_by_two_ulp(a, job, poison):
    return np.nextafter(np.nextafter(a, np.inf, dtype=a.dtype), np.inf, dtype=a.dtype)


@pytest.mark.parametrize(
    ("change", "status"),
    [
        (lambda a, job, poison: a[:1], Status.INCORRECT_SHAPE),
        (lambda a, job, poison: a.astype(np.float64), Status.INCORRECT_DTYPE),
        (lambda a, job, poison: a * np.float32(1.001), Status.INCORRECT_NUMERICAL),
        (lambda a, job, poison: np.where(a == a.max(), poison, a).astype(a.dtype), Status.INCORRECT_NUMERICAL),
        (lambda a, job, poison: a + a.dtype.type(np.isnan(poison) * 1e-9), Status.INCORRECT_NUMERICAL),
    ],
    ids=["shape", "dtype", "numerical", "stale element", "depends on what the output held"],
)
def test_wrong_outputs(catalog, fake, change, status):
    assert judge(catalog, fake, wrong=changed(change)).status is status


def test_a_changed_input_is_noticed(catalog, fake):
    def scribbles(outputs, job, poison):
        job.arrays["x"][0, 0] = 7
        return outputs

    found = judge(catalog, fake, wrong=scribbles)
    assert found.status is Status.RUNTIME_ERROR and "input x" in found.reason


def test_a_stress_difference_fails(catalog, fake):
    class Stressed(fake):
        def stress(self, code, job, expected):
            return "on the default stream, y differs in 3 of 9 elements"

    found = run_one(catalog, FUSION, "plain", trial(catalog, "float32-base"), Stressed())
    assert found.status is Status.INCORRECT_NUMERICAL and "default stream" in found.reason


def test_nothing_runs_on_a_device_that_is_lost(catalog, fake):
    """The kernel at fault is told once; what comes behind it is left out, and no kernel of it counts as proven."""
    launched = []

    class Trapped(fake):
        def launch(self, code, job, poison):
            launched.append(job.trial.name)
            if len(launched) == 3:
                raise LaunchError("cannot run", job.kernel.key, "an illegal instruction")
            return super().launch(code, job, poison)

        def lost(self):
            return "an illegal instruction was encountered" if len(launched) >= 3 else ""

    report = run(catalog, ["gemm.activation"], executor=Trapped(), cases="quick", kernels=["plain", "tensor_core"])
    assert len(launched) == 3
    (failed,) = report.failures
    assert failed.status is Status.RUNTIME_ERROR and "an illegal instruction" in failed.reason
    left = [e for e in report.evaluations if e.reason.startswith("not run: the device is lost since ")]
    assert left and {e.status for e in left} == {Status.SKIPPED_UNSUPPORTED} and failed.key in left[0].reason
    other = "tensor_core" if failed.kernel == "plain" else "plain"
    assert report.unproven == (f"gemm.activation/{other}",)


def test_empty_outputs_launch_nothing(catalog, fake):
    def never(*_):
        raise AssertionError("launched, or compiled")

    assert judge(catalog, fake, "float32-M0", wrong=never, compiles=never).status is Status.PASSED


def test_progress_counts_to_the_end(catalog, fake):
    seen = []
    report = run(
        catalog, ["gemm.activation"], executor=fake(), cases="quick", progress=lambda i, n, e: seen.append((i, n, e))
    )
    total = len(report.evaluations)
    assert [(i, n) for i, n, _ in seen] == [(i, total) for i in range(1, total + 1)]
    assert [e for *_, e in seen] == list(report.evaluations)


def test_unknown_names(catalog, fake):
    with pytest.raises(UnknownNameError, match=r"did you mean gemm\.bias"):
        run(catalog, ["gemm.bais"], executor=fake())
    with pytest.raises(UnknownNameError, match="plain"):
        run(catalog, [FUSION], executor=fake(), kernels=["plane"])


def test_every_launch_mutant_dies(catalog, fake):
    verdicts = run_mutants(catalog, [FUSION], executor=fake(), only=[m.name for m in LAUNCH_MUTANTS])
    assert len(verdicts) == len(catalog[FUSION].kernels) * len(LAUNCH_MUTANTS)
    assert not [str(v) for v in verdicts if v.survived]


def test_a_mutant_that_changes_nothing_does_not_apply(catalog, fake):
    extra, names = [edit("none", "no such text", "")], ["none", "missing_barrier_1"]
    missed, none = run_mutants(catalog, [FUSION], executor=fake(), kernels=["plain"], extra=extra, only=names)
    assert not none.applies and not none.survived and "does not apply" in str(none)
    assert missed.survived and "survived" in str(missed)  # the fake executes no source, so it cannot see it


def test_source_mutants_remove_one_occurrence_each_and_spare_the_library():
    body = "a; __syncthreads(); b; __syncthreads(); fr::relu(v)"
    unit = f'library __syncthreads(); fr::relu(\n#line 1 "prelude of f/k"\n{body}'
    made = {m.name: m.source(unit) for m in mutants_of(unit) if m.source}
    head, _, _ = unit.partition("\n")
    assert all(text.startswith(head) for text in made.values())
    assert made["missing_barrier_1"].endswith("a; ; b; __syncthreads(); fr::relu(v)")
    assert made["missing_barrier_2"].endswith("a; __syncthreads(); b; ; fr::relu(v)")
    assert made["relu_drops_nan"].endswith("fmaxf(0.0f, v)")
    assert made["tanh_for_erf"] == unit
    assert mutants.missing(unit, mutants._WAIT, "missing_wait") == []


def test_what_a_library_has_no_call_for_is_skipped(catalog, fake):
    def wrong(found, job, poison):
        raise UnsupportedError("cannot prepare", "a product", "no algorithm")

    report = run(catalog, ["gemm.activation"], kernels=["plain"], executor=fake(wrong=wrong), cases="quick")
    launched = {e.status for e in report.evaluations if "no algorithm" in e.reason}
    assert report.ok and launched == {Status.SKIPPED_UNSUPPORTED}
