"""Evidence stands as long as nothing changes that could break a kernel, and falls with the first thing that does."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from fusionreg.core.errors import FusionregError, ModelError
from fusionreg.core.proof import evidence
from fusionreg.core.proof.report import Evaluation, Report, Status
from fusionreg.core.registry.catalog import load


@pytest.fixture
def entry(catalog):
    return catalog["gemm.activation"]


def with_spec(entry, kernel, **changes):
    fresh = replace(kernel, spec=kernel.spec.model_copy(update=changes))
    return replace(entry, kernels=tuple(fresh if k is kernel else k for k in entry.kernels)), fresh


def test_digest_is_stable_across_loads(entry):
    again = load(allow=("gemm",))["gemm.activation"]
    assert evidence.digest(entry, entry.kernel("plain")) == evidence.digest(again, again.kernel("plain"))


@pytest.mark.parametrize(
    "changes",
    [{"shared_memory": "1"}, {"requires": ("M > 3",)}, {"max_registers": 64}, {"rounding": "per_op"}],
    ids=str,
)
def test_digest_changes_with_what_can_break_a_kernel(entry, changes):
    kernel = entry.kernel("plain")
    assert evidence.digest(*with_spec(entry, kernel, **changes)) != evidence.digest(entry, kernel)


def test_digest_ignores_prose(entry):
    kernel = entry.kernel("plain")
    assert evidence.digest(*with_spec(entry, kernel, summary="other words")) == evidence.digest(entry, kernel)


def test_digest_follows_the_template_but_not_its_comments(entry, tmp_path):
    kernel = entry.kernel("plain")
    for source in (kernel.root / "templates").iterdir():
        (tmp_path / source.name).write_text(source.read_text())
    copy = replace(kernel, root=tmp_path)
    moved = replace(entry, kernels=(copy,))
    assert evidence.digest(moved, copy) == evidence.digest(entry, kernel)
    text = (tmp_path / "plain.cu.j2").read_text()
    (tmp_path / "plain.cu.j2").write_text(text.replace("Each k tile is summed", "\n  // Every k tile is summed"))
    assert evidence.digest(moved, copy) == evidence.digest(entry, kernel)
    (tmp_path / "plain.cu.j2").write_text(text.replace("PAD = 4", "PAD = 8"))
    assert evidence.digest(moved, copy) != evidence.digest(entry, kernel)


def test_stripped_keeps_strings():
    text = 'a // one\n#line 7 "x.cu.j2"\n  b /* two\n three */ c "no // comment" d'
    assert evidence.stripped(text) == 'a b c "no // comment" d'


def report(*statuses: Status, device="NVIDIA H200", cases="all") -> Report:
    rows = [
        Evaluation("gemm.activation", kernel, f"c{i}", "float16", s, max_abs=i, device=device)
        for kernel in ("plain", "tensor_core")
        for i, s in enumerate(statuses)
    ]
    return Report(
        tuple(rows),
        environment={
            "device": device,
            "target": "sm_90a",
            "gpu": device,
            "driver": "13.0",
            "nvrtc": "13.0",
            "cases": cases,
        },
    )


def test_collect_needs_a_gpu_a_pass_and_no_failure(entry):
    found = evidence.collect(report(Status.PASSED, Status.PASSED, Status.SKIPPED_UNSUPPORTED), [entry])
    assert [(e.kernel, e.passed, e.skipped, e.max_abs) for e in found] == [
        ("gemm.activation/plain", 2, 1, 1),
        ("gemm.activation/tensor_core", 2, 1, 1),
    ]
    assert evidence.collect(report(Status.PASSED, Status.TIMEOUT), [entry]) == []
    assert evidence.collect(report(Status.SKIPPED_UNSUPPORTED), [entry]) == []
    with pytest.raises(FusionregError, match="simulator"):
        evidence.collect(report(Status.PASSED, device="sim"), [entry])
    with pytest.raises(FusionregError, match="all cases"):
        evidence.collect(report(Status.PASSED, cases="quick"), [entry])


def test_write_keeps_rows_of_other_kernels(entry, tmp_path):
    path = tmp_path / "evidence" / "h200.json"
    first = evidence.collect(report(Status.PASSED), [entry])
    evidence.write(path, first)
    evidence.write(path, [replace(first[0], passed=9)])
    assert [(e.kernel, e.passed) for e in evidence.read(path)] == [
        ("gemm.activation/plain", 9),
        ("gemm.activation/tensor_core", 1),
    ]


@pytest.mark.parametrize(
    "text", ["", "[]", '{"format": 99, "kernels": []}', '{"format": 1, "kernels": [{"kernel": 1}]}']
)
def test_a_broken_file_is_a_typed_error(tmp_path, text):
    (tmp_path / "e.json").write_text(text)
    with pytest.raises(ModelError, match=r"e\.json"):
        evidence.read(tmp_path / "e.json")


def test_state(entry, tmp_path):
    root = tmp_path / "package"
    kernel = replace(entry.kernel("plain"), root=root)
    (root / "templates").mkdir(parents=True)
    for source in (entry.kernel("plain").root / "templates").iterdir():
        (root / "templates" / source.name).write_text(source.read_text())
    mine = replace(entry, kernels=(kernel,))
    assert evidence.state(mine, kernel) == "none"
    rows = evidence.collect(report(Status.PASSED), [mine])
    evidence.write(tmp_path / "evidence" / "a.json", rows)
    assert evidence.state(mine, kernel) == "proven"
    body = json.loads((tmp_path / "evidence" / "a.json").read_text())
    body["kernels"][0]["digest"] = "0" * 64
    (tmp_path / "evidence" / "a.json").write_text(json.dumps(body))
    assert evidence.state(mine, kernel) == "stale"
    assert evidence.state(*with_spec(mine, kernel, pending="not run yet")) == "pending"


def test_every_shipped_kernel_has_evidence_or_a_reason_why_not(kernel_states):
    """A kernel change forces a GPU run: ``fusionreg run --device cuda --evidence FILE``."""
    assert kernel_states.keys() >= {k.key for e in load().entries() for k in e.kernels}
    assert not {k: found for k, found in kernel_states.items() if found not in ("proven", "pending")}
