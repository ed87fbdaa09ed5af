"""Running the command line in this process, and plugins for it to find."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import plugin_kit
import pytest

from fusionreg.cli.main import main


@dataclass(frozen=True)
class Ran:
    """What one command did."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def cli(capsys):
    """``cli("list", "--json")`` → :class:`Ran`; a traceback fails the test."""

    def run(*args: Any) -> Ran:
        capsys.readouterr()
        code = 0
        try:
            main([str(a) for a in args])
        except SystemExit as e:
            code = e.code if isinstance(e.code, int) else int(e.code is not None)
        out, err = capsys.readouterr()
        return Ran(code, out, err)

    return run


SPEC = """
from fusionreg import AttributeSpec, FusionSpec, KernelSpec, hookimpl

SPEC = FusionSpec(
    api=1, name="acme.add_relu", summary="relu(x + bias)", tags=("demo",),
    pattern="y = Relu(Add(x, bias))",
    inputs={"x": "T[M N]", "bias": "T[N]"}, outputs={"y": "T[M N]"}, dtypes={"T": ("float32",)},
    kernels=[KernelSpec(name="plain", template="k.cu.j2", grid="ceildiv(M * N, 256)", block="256")],
)

@hookimpl
def register_fusions():
    return [SPEC]
"""


@pytest.fixture
def acme(site, monkeypatch):
    """The installed plugin ``acme`` with ``acme.add_relu``, and no other one; its CUDA may be replaced."""
    site.plugin("acme", SPEC, {"k.cu.j2": plugin_kit.ADD_RELU})
    monkeypatch.setenv("FUSIONREG_LOAD_PLUGINS", "acme")
    return site


@pytest.fixture
def wrong_acme(acme):
    """The same with a kernel that takes one bias for all."""
    acme.write({"fusionreg_acme/k.cu.j2": plugin_kit.ADD_RELU.replace("bias[i % N]", "bias[0]")})
    return acme


@pytest.fixture
def add_relu_model(tmp_path: Path) -> Path:
    """An ONNX file with one site of ``acme.add_relu`` and an operator behind it."""
    import numpy as np
    from onnx_models import model, node

    nodes = [
        node("Add", ["x", "b"], ["s"], name="add"),
        node("Relu", ["s"], ["r"], name="relu"),
        node("Neg", ["r"], ["y"], name="neg"),
    ]
    constants = {"b": np.linspace(-1, 1, 8, dtype="f")}
    path = tmp_path / "add_relu.onnx"
    onnx.save(model(nodes, {"x": [4, 8]}, {"y": [4, 8]}, constants), path)
    return path


@pytest.fixture
def plain_model(tmp_path: Path) -> Path:
    """An ONNX file in which nothing can be fused."""
    from onnx_models import model, node

    path = tmp_path / "plain.onnx"
    onnx.save(model([node("Neg", ["x"], ["y"], name="neg")], {"x": [4, 8]}, {"y": [4, 8]}), path)
    return path
