"""On a GPU: fused sites against the operators that they replaced, both there, on torch tensors."""

from __future__ import annotations

import numpy as np
import plugin_kit
import pytest

torch = pytest.importorskip("torch", reason="the arrays are torch's")
pytest.importorskip("onnxruntime", reason="the models are ONNX")

from onnx_models import model, node  # noqa: E402

import fusionreg  # noqa: E402
from fusionreg.checking import chosen_device  # noqa: E402
from fusionreg.core.proof.report import Status  # noqa: E402

pytestmark = pytest.mark.gpu

WRONG = plugin_kit.ADD_RELU.replace("bias[i % N]", "bias[0]")


def two_sites(kind):
    """relu(x + b), −, relu(· × c)."""
    nodes = [
        node("Add", ["x", "b"], ["s"], name="plus"), node("Relu", ["s"], ["r"], name="bend"),
        node("Neg", ["r"], ["n"], name="neg"),
        node("Mul", ["n", "c"], ["m"], name="times"), node("Relu", ["m"], ["y"], name="bend_2"),
    ]  # fmt: skip
    b = np.linspace(-1, 1, 64).astype(kind)
    return model(nodes, {"x": ([33, 64], kind)}, {"y": ([33, 64], kind)}, {"b": b, "c": -np.abs(b) - b.dtype.type(1)})


def registry(folder, template=plugin_kit.ADD_RELU):
    second = {"name": "acme.mul_relu", "pattern": "y = Relu(Mul(x, bias))"}
    templates = {"k.cu.j2": template, "m.cu.j2": plugin_kit.ADD_RELU.replace("+ fr::to_float", "* fr::to_float")}
    specs = plugin_kit.add_relu(), plugin_kit.add_relu(**second, kernel_template="m.cu.j2")
    return fusionreg.Registry(plugin_kit.catalog(folder, templates, *specs))


@pytest.mark.parametrize("kind", ["float32", "float16"])
def test_right_and_wrong_kernels(tmp_path, kind):
    """``auto`` is the GPU; the wrong kernel is named, and not the site behind it."""
    assert chosen_device("auto") == "cuda"
    found = fusionreg.verify(two_sites(kind), registry=registry(tmp_path / "right"), runs=2)
    assert found.device == "cuda" and found.ok and found.executed == 2, str(found)
    assert all(0 < s.max_abs < (1e-6 if kind == "float32" else 4e-3) for s in found.sites), str(found)
    found = fusionreg.verify(two_sites(kind), registry=registry(tmp_path / "wrong", WRONG))
    assert [s.fusion for s in found.failures] == ["acme.add_relu"] and found.executed == 2, str(found)
    assert found.drift.status is Status.INCORRECT_NUMERICAL


def test_a_nan_that_disappears(tmp_path):
    x = np.ones((33, 64), "f")
    x[7, 9] = np.nan
    template = plugin_kit.ADD_RELU.replace("fr::relu(", "fmaxf(0.0f, ")
    found = fusionreg.verify(two_sites("float32"), registry=registry(tmp_path, template), runs=1, data=[{"x": x}])
    site = {s.fusion: s for s in found.sites}["acme.add_relu"]
    assert site.status is Status.INCORRECT_NUMERICAL and site.run == 1 and "nan" in site.reason


def test_a_live_encoder():
    """Tensor-core products and normalisations in bfloat16, on values that a real model makes."""
    found = fusionreg.verify("examples.transformer_encoder:build", runs=2)
    assert found.ok and found.device == "cuda" and found.drift.status is Status.PASSED, str(found)
    assert found.executed >= 6, str(found)
