"""Every operator against ONNX's own node test cases: their models, inputs and expected outputs.

Each case runs through the evaluator on NumPy and on torch, and its inferred dtypes and shapes are compared with the
real ones, once with known extents and once with a symbol for every extent. ONNX makes the cases of an operator when its
module is imported, which takes seconds for all of them: a test here is one module, imported where it runs.
"""

from __future__ import annotations

import functools
import pkgutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from onnx.backend.test.case import node as onnx_cases

from fusionreg.core.dtypes import from_onnx
from fusionreg.core.errors import UnknownNameError
from fusionreg.core.evaluate.evaluator import evaluate
from fusionreg.core.ir import Graph, GraphBuilder, Value
from fusionreg.core.ops import CONTROL_FLOW, default_vocabulary, infer, named, normalise

#: Cases that the vocabulary refuses or reads differently, by reason.
EXCLUDED = {
    "needs a random stream that ONNX does not define": ("test_training_dropout", "test_bernoulli"),
    "an element type outside the dtype table": (
        "FNUZ",
        "INT4",
        "UINT4",
        "INT2",
        "UINT2",
        "FLOAT4",
        "E8M0",
        "float4",
        "int4",
        "int2",
    ),
    "a sequence or optional is not a tensor": (
        "identity_sequence",
        "sequence_",
        "_sequence_expanded",
        "optional",
        "_opt_",
    ),
    "text tensors are not computed with": ("string", "STRING"),
}


#: One for each operator, or for a few.
MODULES = [m.name for m in pkgutil.iter_modules(onnx_cases.__path__) if not m.ispkg and not m.name.startswith("_")]


@functools.cache
def _cases(module: str):
    made = onnx_cases._NodeTestCases
    before = len(made)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import_module(f"{onnx_cases.__name__}.{module}")
    return [c for c in made[before:] if c.model is not None and not any(n.domain for n in c.model.graph.node)]


def _reason(name: str) -> str:
    return next((why for why, parts in EXCLUDED.items() if any(p in name for p in parts)), "")


def _current(op: str, version: int) -> bool:
    """Whether an operator of that opset means what the newest one means (from 18 on only element types were added, and
    what was DFT's attribute is an input since 20)."""
    return (
        version >= (20 if op == "DFT" else 18)
        or onnx.defs.get_schema(op, version).since_version == onnx.defs.get_schema(op).since_version
    )


def _covered(case) -> bool:
    known = {*default_vocabulary(), *CONTROL_FLOW, "Constant"}
    version = max(o.version for o in case.model.opset_import if not o.domain)
    if not all(_current(n.op_type, version) for n in case.model.graph.node):
        return False  # frontends bring older forms up to date first
    return (
        bool(case.model.graph.node) and {n.op_type for n in case.model.graph.node} <= known and not _reason(case.name)
    )


def covered(module: str) -> list[Any]:
    """The cases of a module of ONNX's that the vocabulary covers."""
    return [case for case in _cases(module) if _covered(case)]


@contextmanager
def naming(case: Any) -> Iterator[None]:
    """What fails in here says in which case."""
    try:
        yield
    except BaseException as error:  # a failure of pytest's is no Exception
        error.add_note(f"in {case.name}")
        raise


def _sub_graph(proto: onnx.GraphProto, node: onnx.NodeProto, outer: dict[str, Value], symbolic: bool) -> Graph:
    """The body of a control-flow node, its inputs typed by the node's operands."""
    operands = [outer[name].dtype for name in node.input[2 if node.op_type == "Loop" else 0 :]]
    hints = ["int64", "bool", *operands] if node.op_type == "Loop" else operands
    return to_graph(proto, [], symbolic, outer, hints)


def to_graph(proto, arrays: list[np.ndarray], symbolic: bool = False, outer=None, hints: list[str] = ()) -> Graph:
    """A deliberately small ONNX reader: newest opset only, types by the vocabulary's own inference."""
    ops, outer = default_vocabulary(), outer or {}
    builder = GraphBuilder(proto.name or "g", taken=outer)
    values: dict[str, Value] = dict(outer)
    constants: dict[str, np.ndarray] = {}

    def put(value: Value) -> None:
        values[value.name] = value

    for tensor in proto.initializer:
        array = numpy_helper.to_array(tensor)
        builder.constant(tensor.name, array, from_onnx(tensor.data_type).name)
        constants[tensor.name] = array
        put(Value(tensor.name, from_onnx(tensor.data_type).name, array.shape))
    for i, info in enumerate(p for p in proto.input if p.name not in constants):
        code = info.type.tensor_type.elem_type
        dtype = from_onnx(code).name if code else hints[i]
        if arrays:
            shape = tuple(f"{info.name}_{a}" if symbolic else d for a, d in enumerate(arrays[i].shape))
        else:
            shape = None
        builder.input(info.name, dtype, shape)
        put(Value(info.name, dtype, shape))
    for node in proto.node:
        raw = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        if node.op_type == "Constant":
            array = _constant(raw)
            builder.constant(node.output[0], array, array.dtype.name)
            constants[node.output[0]] = array
            put(Value(node.output[0], array.dtype.name, array.shape))
            continue
        graphs = {k: _sub_graph(v, node, values, symbolic) for k, v in raw.items() if isinstance(v, onnx.GraphProto)}
        attrs = {k: v for k, v in raw.items() if k not in graphs}
        if node.op_type in CONTROL_FLOW:
            body = next(iter(graphs.values()))
            skip = 1 if node.op_type == "Loop" else 0
            outs = [Value(o, body.values[b].dtype) for o, b in zip(node.output, body.outputs[skip:], strict=True)]
            attrs = {k: tuple(v) if isinstance(v, list) else v for k, v in attrs.items()}
        else:
            spec = ops[node.op_type]
            attrs = dict(normalise(spec, {k: _array(v) for k, v in attrs.items()}))
            inputs = [values[i] if i else None for i in node.input]
            known = {i: constants[n] for i, n in enumerate(node.input) if n in constants}
            outs = named(node.output, infer(spec, inputs, attrs, known, len(node.output), node.op_type))
        for o in outs:
            put(o)
        builder.node(node.op_type, node.input, outs, attrs=attrs, graphs=_frozen(graphs))
    return builder.build([o.name for o in proto.output], outer)


def _frozen(graphs):
    from fusionreg.core.frozen import FrozenDict

    return FrozenDict(graphs)


def _array(value):
    """A tensor proto as an array, a NumPy scalar too; all else as it is."""
    if isinstance(value, onnx.TensorProto):
        return numpy_helper.to_array(value)
    return np.asarray(value) if isinstance(value, np.generic) else value


def _constant(raw) -> np.ndarray:
    ((name, value),) = raw.items()
    if name == "value":
        return numpy_helper.to_array(value)
    return np.array(value, np.int64 if name.startswith("value_int") else np.float32)


#: Cases whose expected values are written down with four decimals.
_FOUR_DECIMALS = ("test_averagepool_2d_ceil_last_window", "test_gridsample", "test_roialign")


def _tolerance(name: str, expected: np.ndarray) -> dict[str, float]:
    """ONNX's expected values were rounded by NumPy at every step; ours once per operator."""
    if name.startswith(_FOUR_DECIMALS):
        return {"rtol": 0.0, "atol": 1e-4 if name.startswith("test_roialign") else 6e-5}
    half = {"float16": 2e-3, "bfloat16": 2e-2}.get(expected.dtype.name)
    return {"rtol": half, "atol": half} if half else {"rtol": 1e-4, "atol": 2e-6}


def _compare(name: str, got: np.ndarray, expected: np.ndarray) -> None:
    assert got.dtype == expected.dtype, f"{name}: dtype"
    assert got.shape == expected.shape, f"{name}: shape"
    if expected.dtype.kind in "iub":
        np.testing.assert_array_equal(got, expected, err_msg=name)
    else:
        np.testing.assert_allclose(
            got.astype(np.float64), expected.astype(np.float64), err_msg=name, **_tolerance(name, expected)
        )


def _compare_exact(name: str, got: np.ndarray, expected: np.ndarray) -> None:
    """float64 throughout: near ONNX's values wherever those did not overflow a smaller float."""
    if got.dtype.kind != "f" and expected.dtype.kind in "iub":
        assert got.dtype == expected.dtype, name
        step = int("dynamicquantizelinear" in name)  # a float32 quotient just over a half is just under it in float64
        assert np.abs(got.astype(object) - expected.astype(object)).max(initial=0) <= step, name
        return
    assert got.dtype == np.float64 and got.shape == expected.shape, name
    small = {"float8_e4m3fn": 0.07, "float8_e5m2": 0.13}.get(expected.dtype.name)
    bounds = {"rtol": small, "atol": small} if small else _tolerance(name, expected)
    want = expected.astype(np.float64)
    if expected.dtype.itemsize < 4:  # casts to small floats are the identity here: no overflow, no saturation
        within = np.abs(want) < (_FLOAT8_MAX.get(expected.dtype.name) or 6e4)
        got, want = got[within], want[within]
    np.testing.assert_allclose(got, want, err_msg=name, **bounds)


_FLOAT8_MAX = {"float8_e4m3fn": 448, "float8_e5m2": 57344}


def _check_types(graph: Graph, arrays: dict[str, np.ndarray], name: str) -> None:
    """Inferred dtypes and extents are those of the arrays; a symbol stands for one number throughout."""
    bound: dict[str, int] = {}
    for value_name in (*graph.inputs, *arrays):
        value, array = graph.values[value_name], arrays.get(value_name)
        if array is None:
            continue
        assert value.dtype == array.dtype.name, f"{name}: {value}"
        if value.shape is None:
            continue
        assert len(value.shape) == array.ndim, f"{name}: {value} against {array.shape}"
        for dim, extent in zip(value.shape, array.shape, strict=True):
            want = dim if isinstance(dim, int) else bound.setdefault(dim, extent)
            assert want == extent, f"{name}: {value} against {array.shape}"


def test_there_are_cases() -> None:
    assert len(MODULES) > 150
    assert len(covered("reduce_log_sum_exp")) > 8


@pytest.mark.parametrize("module", MODULES)
def test_cases(module: str) -> None:
    for case in covered(module):
        with naming(case):
            _check(case)


def _check(case) -> None:
    import torch

    name = case.name
    for given, expected in case.data_sets:
        proto = case.model.graph
        arrays, expected = [_array(a) for a in given], [_array(a) for a in expected]
        graph = to_graph(proto, arrays)
        feed = dict(zip(graph.inputs, arrays, strict=True))
        trace: dict[str, np.ndarray] = {}
        got = evaluate(graph, feed, ops=default_vocabulary(), trace=trace)
        for out, want in zip(graph.outputs, expected, strict=True):
            _compare(name, got[out], want)
        exact = evaluate(graph, feed, ops=default_vocabulary(), mode="exact")
        for out, want in zip(graph.outputs, expected, strict=True):
            _compare_exact(f"{name} (exact)", exact[out], want)
        seen = {k: np.asarray(v) for k, v in trace.items() if k in graph.values}
        _check_types(graph, seen, name)
        symbols = to_graph(proto, arrays, symbolic=True)
        _check_types(symbols, seen, f"{name} (symbolic)")
        # torch agrees with NumPy, on the same graph
        from fusionreg.core.ops import backend_of

        xp = backend_of(torch.zeros(1))
        try:
            tensors = {k: xp.asarray(v) for k, v in feed.items()}
        except (TypeError, UnknownNameError):
            pytest.fail(f"{name}: no torch tensor for {[v.dtype.name for v in feed.values()]}")
        again = evaluate(graph, tensors, ops=default_vocabulary(), backend=xp)
        for out, want in zip(graph.outputs, expected, strict=True):
            _compare(f"{name} (torch)", xp.to_numpy(again[out]), want)
