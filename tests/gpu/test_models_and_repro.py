"""On a GPU: fused ONNX models on torch tensors, guards that fail, whole models checked there, and reproductions."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import plugin_kit
import pytest

torch = pytest.importorskip("torch", reason="the arrays are torch's")
pytest.importorskip("onnxruntime", reason="the models are ONNX")

import onnx  # noqa: E402
from onnx_models import model, node, ort  # noqa: E402

import fusionreg  # noqa: E402
from fusionreg.checking import check_model  # noqa: E402
from fusionreg.core.errors import ArgumentError  # noqa: E402
from fusionreg.core.proof import repro  # noqa: E402
from fusionreg.core.proof.report import Status  # noqa: E402
from fusionreg.core.runtime import FallbackWarning  # noqa: E402

pytestmark = pytest.mark.gpu

WRONG = plugin_kit.ADD_RELU.replace("bias[i % N]", "bias[0]")


def registry(folder, template=plugin_kit.ADD_RELU, device="auto", **changes):
    spec = plugin_kit.add_relu(inputs={"x": "T[M N]", "bias": "T[N]"}, outputs={"y": "T[M N]"}, **changes)
    return fusionreg.Registry(plugin_kit.catalog(folder, {"k.cu.j2": template}, spec), device=device)


def add_relu():
    nodes = [node("Add", ["x", "b"], ["s"]), node("Relu", ["s"], ["r"]), node("Neg", ["r"], ["y"])]
    return model(nodes, {"x": ["R", 8]}, {"y": ["R", 8]}, {"b": np.linspace(-1, 1, 8, dtype="f")})


def rows(n):
    return torch.randn(n, 8, generator=torch.Generator().manual_seed(n))


def same(got, proto, x):
    assert got.is_cuda and got.dtype == torch.float32
    np.testing.assert_allclose(got.cpu().numpy(), ort(proto, {"x": x.numpy()})["y"], rtol=1e-6, atol=1e-6)


def test_a_dynamic_batch_and_a_guard_that_fails(tmp_path):
    proto = add_relu()
    fused = registry(tmp_path / "p", constraints=("M % 2 == 0",)).fuse(proto)
    for n in (2, 64, 0):
        same(fused(x=rows(n).cuda())["y"], proto, rows(n))
    assert fused.sites[0].status == "fused"
    with pytest.warns(FallbackWarning, match="M % 2 == 0"):
        same(fused(x=rows(3).cuda())["y"], proto, rows(3))
    assert fused.sites[0].status == "fallback"


def test_constants_are_uploaded_once(tmp_path):
    fused = registry(tmp_path / "p").fuse(add_relu())
    x = rows(64).cuda()
    fused(x=x)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        fused(x=x)
        torch.cuda.synchronize()
    copies = [e.key for e in profile.key_averages() if "HtoD" in e.key]
    assert copies == []


def test_arrays_elsewhere_are_an_error_and_no_fallback(tmp_path):
    fused = registry(tmp_path / "p", device="sim").fuse(add_relu())
    with pytest.raises(ArgumentError, match="device='sim'"):
        fused(x=rows(2).cuda())


@pytest.mark.parametrize(("template", "status"), [(plugin_kit.ADD_RELU, "PASSED"), (WRONG, "INCORRECT_NUMERICAL")])
def test_whole_models_are_checked_on_the_gpu(tmp_path, template, status):
    onnx.save(add_relu(), tmp_path / "m.onnx")
    row = check_model(registry(tmp_path / "p", template), str(tmp_path / "m.onnx"), device="cuda").row
    assert row.status == status and row.facts["device"] == "cuda"
    assert [s["status"] for s in row.sites] == ["fused"]


@pytest.mark.parametrize(("template", "code"), [(plugin_kit.ADD_RELU, 0), (WRONG, 1)])
def test_a_case_of_the_gpu_replays_there_and_in_the_simulator(tmp_path, template, code):
    catalog = registry(tmp_path / "p", template).catalog
    case = "bfloat16-base"
    folder = repro.write(catalog, "acme.add_relu", "plain", case, device="cuda", folder=tmp_path / "case")
    found = repro.replay(folder)
    assert found.device not in ("sim", "") and found.status is (Status.INCORRECT_NUMERICAL if code else Status.PASSED)
    for device in ("cuda", "sim"):
        command = [sys.executable, str(folder / "run.py"), "--device", device]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == code, done.stdout + done.stderr
