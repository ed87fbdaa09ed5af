"""``match`` and ``run`` on models."""

from __future__ import annotations

import json

import pytest

SITE = "acme.add_relu"


def test_match_says_what_would_be_fused_where(cli, acme, add_relu_model):
    ran = cli("match", add_relu_model)
    assert ran.code == 0 and ran.out.splitlines()[0].strip() == "fused"
    (line,) = (line for line in ran.out.splitlines() if line.startswith(SITE))
    assert line.split()[1:3] == ["2", "relu"] and line.rstrip().endswith(" add relu")


def test_match_as_json(cli, acme, add_relu_model):
    found = cli("match", add_relu_model, "--json", "--explain").json
    assert found["model"] == str(add_relu_model) and found["nodes"] == 3 and found["policy"] == "balanced"
    (site,) = found["chosen"]
    assert site["fusion"] == SITE and site["nodes"] == ["add", "relu"] and site["saved"]["launches"] == 1
    assert found["losers"] == [] and isinstance(found["failures"], list)


def test_match_of_nothing_is_status_five(cli, acme, plain_model, add_relu_model):
    assert cli("match", plain_model).code == 5
    ran = cli("match", plain_model, "--json")
    assert ran.code == 5 and ran.json["chosen"] == []
    off = cli("match", add_relu_model, "--policy", "off")
    assert off.code == 5 and "not taken" in off.out and SITE in off.out


def test_match_explains_near_misses(cli, acme, tmp_path):
    """The Add's other operand is no row: found and expected are named, and the node."""
    import numpy as np
    import onnx
    from onnx_models import model, node

    nodes = [node("Add", ["x", "b"], ["s"], name="plus"), node("Relu", ["s"], ["y"], name="bend")]
    onnx.save(model(nodes, {"x": [4, 8]}, {"y": [4, 8]}, {"b": np.ones((4, 1), "f")}), tmp_path / "m.onnx")
    ran = cli("match", tmp_path / "m.onnx", "--explain")
    assert ran.code == 5 and "nearly" in ran.out and SITE in ran.out
    (failure,) = cli("match", tmp_path / "m.onnx", "--explain", "--json").json["failures"]
    assert failure["fusion"] == SITE and failure["clause"] and failure["node"] in ("plus", "bend")
    assert "nearly" not in cli("match", tmp_path / "m.onnx").out


@pytest.mark.parametrize("command", ["match", "run"])
@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("missing.onnx", None, "no such file"),
        ("missing.pt2", None, "no such file"),
        ("model.tflite", b"x", "the suffix '.tflite'"),
        ("model.pt", b"x", "the suffix '.pt'"),
        ("empty.onnx", b"", "empty.onnx"),
        ("noise.onnx", b"\xff\x00noise", "noise.onnx"),
        ("noise.pt2", b"PK\x03\x04noise", "noise.pt2"),
        ("no.module.here:thing", None, "ModuleNotFoundError"),
        ("os:no_such_thing", None, "AttributeError"),
        ("os:getcwd", None, "a str"),
        ("a b:c d", None, "no import path"),
    ],
)
def test_what_is_no_model(cli, tmp_path, command, name, content, says):
    path = name if ":" in name else tmp_path / name
    if content is not None:
        path.write_bytes(content)
    ran = cli(command, path)
    assert ran.code == 1 and ran.err.startswith("error: ") and says in ran.err, ran.err
    assert "Traceback" not in ran.err and not ran.out
    assert len(ran.err.strip().splitlines()) == 1


def test_run_compares_with_the_original(cli, acme, add_relu_model, tmp_path):
    report = tmp_path / "report.json"
    ran = cli("run", add_relu_model, "--device", "sim", "--report", report, "--junit", tmp_path / "report.xml")
    assert ran.code == 0, ran.out + ran.err
    for word in ("3 nodes", "fused", "acme.add_relu/plain", "against the original", "PASSED"):
        assert word in ran.out
    found = json.loads(report.read_text())
    assert set(found) >= {"environment", "evaluations", "models"} and found["evaluations"] == []
    (model,) = found["models"]
    assert set(model) >= {"model", "nodes", "sites", "max_abs", "max_rel", "status"}
    assert model["model"] == str(add_relu_model) and model["nodes"] == 3 and model["status"] == "PASSED"
    (site,) = model["sites"]
    assert site["fusion"] == SITE and site["nodes"] == ["add", "relu"]
    assert site["kernel"] == "acme.add_relu/plain" and site["status"] == "fused"
    assert 'testcase classname="models"' in (tmp_path / "report.xml").read_text()


def test_run_without_the_gpu_it_asks_for(cli, acme, add_relu_model, monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    ran = cli("run", add_relu_model, "--device", "cuda")
    assert ran.code == 1 and ran.err.startswith("error: cannot use a GPU") and "--device sim" in ran.err


def test_run_fails_on_a_wrong_kernel(cli, wrong_acme, add_relu_model, tmp_path):
    report = tmp_path / "report.json"
    ran = cli("run", add_relu_model, "--device", "sim", "--report", report)
    assert ran.code == 1 and "INCORRECT_NUMERICAL" in ran.out and "from float64" in ran.out
    (model,) = json.loads(report.read_text())["models"]
    assert model["status"] == "INCORRECT_NUMERICAL" and model["max_abs"] > 0.1
    assert cli("run", add_relu_model, "--device", "sim", "--policy", "off").code == 0


def test_run_as_json_prints_nothing_else(cli, acme, add_relu_model):
    ran = cli("run", add_relu_model, "--device", "sim", "--json")
    assert ran.code == 0 and ran.json["models"][0]["status"] == "PASSED"


def test_expectations_of_kernels(cli, acme, add_relu_model, plain_model):
    assert cli("run", add_relu_model, "--device", "sim", "--expect", "*/plain").code == 0
    ran = cli("run", add_relu_model, "--device", "sim", "--expect", "*/tensor_core")
    assert ran.code == 1 and "no site ran a kernel like */tensor_core: ['acme.add_relu/plain']" in ran.err
    assert cli("run", plain_model, "--device", "sim", "--expect", "*").code == 1


def test_a_missing_reference_is_skipped_and_says_why(cli, acme, add_relu_model, monkeypatch):
    from dataclasses import replace

    from fusionreg import checking

    opened = checking.open_model
    monkeypatch.setattr(
        checking, "open_model", lambda *a, **k: replace(opened(*a, **k), reference=None, reason="no onnxruntime here")
    )
    ran = cli("run", add_relu_model, "--device", "sim")
    assert "SKIPPED_UNSUPPORTED" in ran.out and "no onnxruntime here" in ran.out
    (row,) = cli("run", add_relu_model, "--device", "sim", "--json").json["models"]
    assert row["status"] == "SKIPPED_UNSUPPORTED" != "PASSED"


def test_a_callable_is_a_model(cli, tmp_path, monkeypatch):
    name = "cli_model_of_a_test"
    (tmp_path / f"{name}.py").write_text(
        "import torch\n"
        "def build():\n"
        "    torch.manual_seed(0)\n"
        "    block = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU()).eval()\n"
        "    return block, (torch.randn(8, 16),)\n"
        "def broken():\n    return 1 / 0\n"
    )
    monkeypatch.chdir(tmp_path)
    ran = cli("run", f"{name}:build", "--device", "sim", "--json")
    assert ran.code == 0, ran.err
    (row,) = ran.json["models"]
    assert row["status"] == "PASSED" and [s["fusion"] for s in row["sites"]] == ["gemm.bias"]
    ran = cli("match", f"{name}:broken")
    assert ran.code == 1 and "ZeroDivisionError" in ran.err
