"""Reports: JSON that any reader accepts, JUnit that CI reads, and what counts as success."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest

from fusionreg.core.proof.report import Evaluation, ModelRow, Report, Status


def row(case: str, status: Status = Status.PASSED, **kwargs) -> Evaluation:
    return Evaluation("acme.f", "plain", case, "float16", status, **kwargs)


def test_ok_needs_a_pass_and_no_failure():
    assert Report((row("a"), row("b", Status.SKIPPED_UNSUPPORTED, reason="x"))).ok
    assert not Report((row("a", Status.SKIPPED_UNSUPPORTED, reason="x"),)).ok
    assert not Report((row("a"), row("b", Status.TIMEOUT))).ok
    assert Report(()).ok
    assert not Report((row("a"),), (ModelRow("m", 1, (), Status.INCORRECT_NUMERICAL),)).ok


@pytest.mark.parametrize("status", list(Status))
def test_every_status_but_two_is_a_failure(status):
    assert status.failed is (status not in ("PASSED", "SKIPPED_UNSUPPORTED"))


def test_json_is_strict_and_complete(tmp_path):
    site = {"fusion": "acme.f", "nodes": ("a", "b"), "kernel": "plain", "status": "PASSED"}
    report = Report((row("a", max_rel=float("inf")),), (ModelRow("m.onnx", 7, (site,), Status.PASSED, 0.5),))
    report.write_json(tmp_path / "deep" / "r.json")
    body = json.loads((tmp_path / "deep" / "r.json").read_text())
    assert body["counts"] == {"PASSED": 1}
    assert body["evaluations"][0] | {"fusion": "acme.f", "max_rel": "inf"} == body["evaluations"][0]
    assert {"fusion", "kernel", "case", "status", "max_abs", "max_rel", "device"} <= set(body["evaluations"][0])
    assert body["models"][0]["sites"][0]["nodes"] == ["a", "b"]
    assert body["environment"]["python"]


def test_junit(tmp_path):
    rows = (row("a"), row("b", Status.RUNTIME_ERROR, reason="a \x07 <fault>"), row("c", Status.SKIPPED_UNSUPPORTED))
    Report(rows).write_junit(tmp_path / "r.xml")
    suite = ElementTree.parse(tmp_path / "r.xml").getroot()[0]
    assert suite.attrib | {"name": "acme.f/plain", "tests": "3", "failures": "1", "skipped": "1"} == suite.attrib
    failure = suite.find("testcase[@name='b']/failure")
    assert failure is not None and failure.attrib == {"type": "RUNTIME_ERROR", "message": "a ? <fault>"}


def test_reports_add_up():
    both = Report((row("a"),)) + Report((row("b"),))
    assert [e.case for e in both.evaluations] == ["a", "b"]
