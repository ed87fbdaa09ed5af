"""The vocabulary on a GPU: ONNX's node cases on torch CUDA and CuPy arrays, against ONNX's expected outputs."""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from fusionreg.core.evaluate.evaluator import evaluate
from fusionreg.core.ops import Backend, backend_of, default_vocabulary

pytestmark = pytest.mark.gpu

_PATH = Path(__file__).parents[1] / "unit" / "ops" / "test_node_cases.py"
_SPEC = importlib.util.spec_from_file_location("fusionreg_node_cases", _PATH)
assert _SPEC is not None and _SPEC.loader is not None
cases = importlib.util.module_from_spec(_SPEC)
sys.modules["fusionreg_node_cases"] = cases
_SPEC.loader.exec_module(cases)


def _backend(library: str) -> Backend:
    if library == "torch":
        torch = pytest.importorskip("torch")
        return backend_of(torch.zeros(1, device="cuda"))
    cupy = pytest.importorskip("cupy")
    return backend_of(cupy.zeros(1))


def _few(found, limit: int):
    """At most ``limit`` cases per operator, whole graphs (expanded functions) left out: CuPy compiles on first use."""
    seen: Counter[str] = Counter()
    for case in found:
        op = case.model.graph.node[0].op_type
        seen[op] += 1
        if seen[op] <= limit and not case.name.endswith("_expanded"):
            yield case


@pytest.mark.parametrize("module", cases.MODULES)
@pytest.mark.parametrize("library", ["torch", "cupy"])
def test_cases(library: str, module: str) -> None:
    xp, found = _backend(library), cases.covered(module)
    for case in found if library == "torch" else _few(found, 2):
        with cases.naming(case):
            _check(xp, case)


def _check(xp: Backend, case) -> None:
    for given, expected in case.data_sets:
        arrays = [cases._array(a) for a in given]
        graph = cases.to_graph(case.model.graph, arrays)
        feed = {k: xp.asarray(v) for k, v in zip(graph.inputs, arrays, strict=True)}
        got = evaluate(graph, feed, ops=default_vocabulary(), backend=xp)
        for out, want in zip(graph.outputs, expected, strict=True):
            assert backend_of(got[out]) is xp
            cases._compare(case.name, xp.to_numpy(got[out]), cases._array(want))


@pytest.mark.parametrize("library", ["torch", "cupy"])
@pytest.mark.parametrize("reduction", ["none", "add", "mul", "min", "max"])
def test_scatter_with_repeated_indices(library: str, reduction: str) -> None:
    xp = _backend(library)
    x, index, updates = np.arange(5.0), np.array([3, 1, 3, 3, 0]), np.array([10.0, 20.0, 30.0, 2.0, 5.0])
    want = x.copy()
    how = {"none": lambda a, b: b, "add": np.add, "mul": np.multiply, "min": np.minimum, "max": np.maximum}[reduction]
    for i, u in zip(index, updates, strict=True):
        want[i] = how(want[i], u)
    got = xp.scatter(xp.asarray(x), xp.asarray(index), xp.asarray(updates), reduction)
    np.testing.assert_array_equal(xp.to_numpy(got), want)


def test_half_products_accumulate_wide_on_tensor_cores() -> None:
    torch = pytest.importorskip("torch")
    xp = _backend("torch")
    from fusionreg.core.ir import GraphBuilder, Value

    b = GraphBuilder("g")
    b.input("x", "float16", (16, 65536))
    b.input("w", "float16", (65536, 16))
    b.node("MatMul", ["x", "w"], [Value("y", "float16", (16, 16))])
    graph = b.build(["y"])
    x = torch.full((16, 65536), 0.125, dtype=torch.float16, device="cuda")
    before = torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction
    got = evaluate(graph, {"x": x, "w": x.T.contiguous()}, ops=default_vocabulary())["y"]
    assert (got == 1024).all() and backend_of(got) is xp
    assert torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction == before
