"""Point-wise regions of whole models, executed: what is fused, the values, and the saved file."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from fusionreg import load_registry


@pytest.fixture(scope="module")
def registry():
    return load_registry(device="sim")


def _model(path) -> str:
    """Seven operators around a product, a reduction in the middle, two outputs."""
    nodes = [
        helper.make_node("Mul", ["x", "gain"], ["a"]),
        helper.make_node("Add", ["a", "bias"], ["b"]),
        helper.make_node("Sigmoid", ["b"], ["gate"]),
        helper.make_node("Mul", ["b", "gate"], ["c"]),
        helper.make_node("ReduceMean", ["c"], ["m"], axes=[-1], keepdims=1),
        helper.make_node("Sub", ["c", "m"], ["d"]),
        helper.make_node("Clip", ["d", "low", "high"], ["e"]),
        helper.make_node("Greater", ["e", "zero"], ["positive"]),
        helper.make_node("Where", ["positive", "e", "c"], ["y"]),
    ]
    constants = {"gain": [1.5] * 24, "bias": np.linspace(-1, 1, 24), "low": -0.5, "high": 0.5, "zero": 0.0}
    initializers = [onnx.numpy_helper.from_array(np.asarray(v, "float32"), n) for n, v in constants.items()]
    graph = helper.make_graph(
        nodes, "model", [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", 24])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["rows", 24]),
         helper.make_tensor_value_info("positive", TensorProto.BOOL, ["rows", 24])], initializers,
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    onnx.save(model, path)
    return str(path)


def test_an_onnx_model(registry, tmp_path):
    path = _model(tmp_path / "model.onnx")
    fused = registry.fuse(path)
    assert [s.fusion.rpartition(".")[0] for s in fused.sites] == ["pointwise.region"] * 2
    assert sorted(len(s.nodes) for s in fused.sites) == [3, 4]  # x * sigmoid(x) is one operator, Swish
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    rng = np.random.default_rng(0)
    for rows in (5, 1, 64):  # one plan for every extent
        x = rng.standard_normal((rows, 24), dtype="float32")
        found = fused(x)
        for name, want in zip(("y", "positive"), session.run(None, {"x": x}), strict=True):
            np.testing.assert_allclose(found[name], want, atol=1e-6)
        assert all(s.status == "fused" and s.kernel.startswith("pointwise.region.r") for s in fused.sites)
    fused.save(tmp_path / "fused.onnx")
    again = onnxruntime.InferenceSession(tmp_path / "fused.onnx", providers=["CPUExecutionProvider"])
    for mine, theirs in zip(again.run(None, {"x": x}), session.run(None, {"x": x}), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    names = {n.op_type for n in onnx.load(tmp_path / "fused.onnx").graph.node}
    assert not names & {"Sigmoid", "Where", "Sub"}


def test_a_module_and_its_casts(registry):
    import torch

    class Module(torch.nn.Module):
        def forward(self, x, r):
            h = torch.nn.functional.silu(x.float() * 2.0).to(torch.bfloat16)
            return torch.where(r > 0, h + r, h - r).abs().clamp(max=3.0)

    x, r = torch.randn(2, 3, 40, dtype=torch.bfloat16), torch.randn(3, 1, dtype=torch.bfloat16)
    call = registry.fuse(Module(), x, r)
    want = Module()(x.double(), r.double())
    got = call(x, r)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), want, rtol=2**-7, atol=2**-7)
    assert any(k.startswith("pointwise.region.") for k in registry.runtime.kernels_used)


def test_conservative_leaves_regions_alone(registry, tmp_path):
    path = _model(tmp_path / "model.onnx")
    assert not registry.fuse(path, policy="conservative").sites
