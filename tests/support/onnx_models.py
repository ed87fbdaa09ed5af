"""ONNX models for tests, in a line each, and three ways to run one: onnxruntime unoptimised, ours raw, ours lifted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from fusionreg.core.dtypes import dtype
from fusionreg.core.evaluate.evaluator import evaluate
from fusionreg.core.ir import Graph
from fusionreg.core.lift import lift
from fusionreg.core.ops import default_vocabulary
from fusionreg.integrations.onnx import reference
from fusionreg.integrations.onnx.load import load

OPS = default_vocabulary()

node = helper.make_node


def info(name: str, shape: Sequence[Any] | None, kind: str = "float32") -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype(kind).onnx, shape)


def model(
    nodes: Sequence[onnx.NodeProto],
    inputs: Mapping[str, Any],
    outputs: Sequence[str] | Mapping[str, Any],
    constants: Mapping[str, Any] | None = None,
    opset: int = 17,
    functions: Sequence[onnx.FunctionProto] = (),
    domains: Mapping[str, int] | None = None,
    **fields: Any,
) -> onnx.ModelProto:
    """A model. ``inputs``: name → shape, or (shape, dtype); outputs without a type are float32 of unknown shape."""

    def typed(names: Any) -> list[onnx.ValueInfoProto]:
        table = names if isinstance(names, Mapping) else dict.fromkeys(names)
        found = []
        for name, given in table.items():
            shape, kind = (
                given
                if isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], str)
                else (given, "float32")
            )
            found.append(info(name, shape, kind))
        return found

    tensors = [numpy_helper.from_array(np.asarray(v), k) for k, v in (constants or {}).items()]
    graph = helper.make_graph(list(nodes), "g", typed(inputs), typed(outputs), tensors, **fields)
    imports = [helper.make_opsetid("", opset)] + [helper.make_opsetid(d, v) for d, v in (domains or {}).items()]
    version = 8 if opset <= 18 else 10
    return helper.make_model(graph, opset_imports=imports, ir_version=version, functions=list(functions))


def random(proto: Any, seed: int = 0, **sizes: int) -> dict[str, np.ndarray]:
    return reference.example_inputs(load(proto), seed, sizes)


def ort(proto: Any, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """onnxruntime's answer; a test that has none fails."""
    found = reference.run(proto, inputs)
    assert not isinstance(found, reference.Missing), found.reason
    return found


def ours(graph: Graph, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return evaluate(graph, dict(inputs), ops=OPS)


def same(
    found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray], rtol: float = 1e-5, atol: float = 1e-6
) -> None:
    """Equal names, shapes, dtypes and, up to rounding, values."""
    assert list(found) == list(expected)
    for name, want in expected.items():
        got = np.asarray(found[name])
        assert got.shape == want.shape and got.dtype == want.dtype, (name, got.shape, got.dtype, want.shape, want.dtype)
        if want.dtype.kind in "fV" or want.dtype.name == "bfloat16":
            np.testing.assert_allclose(got.astype("f8"), want.astype("f8"), rtol=rtol, atol=atol, err_msg=name)
        else:
            np.testing.assert_array_equal(got, want, err_msg=name)


def check(
    proto: onnx.ModelProto,
    inputs: Mapping[str, np.ndarray] | None = None,
    rtol: float = 1e-5,
    atol: float = 1e-6,
    **sizes: int,
) -> Graph:
    """Ours raw and ours lifted equal onnxruntime; the lifted graph."""
    inputs = random(proto, **sizes) if inputs is None else inputs
    expected = ort(proto, inputs)
    raw = load(proto)
    same(ours(raw, inputs), expected, rtol, atol)
    lifted = lift(raw, OPS)
    same(ours(lifted, inputs), expected, rtol, atol)
    return lifted


def count(graph: Graph) -> dict[str, int]:
    """Operator → how often it stands in the graph."""
    found: dict[str, int] = {}
    for n in graph.nodes:
        found[n.op] = found.get(n.op, 0) + 1
    return found


def function(name, inputs, outputs, nodes, opset=17, attributes=(), defaults=(), domains=()) -> onnx.FunctionProto:
    """A model-local function of domain ``local``."""
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("local", 1)]
    return helper.make_function("local", name, inputs, outputs, nodes, imports, list(attributes), list(defaults))


def loop_body() -> onnx.GraphProto:
    """The body of a Loop that adds, grows and scans."""
    return helper.make_graph(
        [
            node("Add", ["acc", "x"], ["acc2"]),
            node("Concat", ["all", "acc2"], ["all2"], axis=0),
            node("Mul", ["acc2", "two"], ["scan"]),
        ],
        "body",
        [info("i", [], "int64"), info("go", [], "bool"), info("acc", None), info("all", None)],
        [info("go", [], "bool"), info("acc2", None), info("all2", None), info("scan", None)],
        [numpy_helper.from_array(np.float32(2), "two")],
    )


__all__ = [
    "OPS", "TensorProto", "check", "count", "function", "info", "loop_body", "model", "node", "ort", "ours", "random",
    "same",
]  # fmt: skip
