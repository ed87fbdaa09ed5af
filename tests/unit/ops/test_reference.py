"""Operators against ``onnx.reference`` on random and edge inputs: empty, rank 0, NaN, infinities, signed zeros."""

from __future__ import annotations

import functools

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import helper
from onnx.reference import ReferenceEvaluator

from fusionreg.core.dtypes import dtype
from fusionreg.core.evaluate.evaluator import evaluate
from fusionreg.core.ir import GraphBuilder, Value
from fusionreg.core.ops import default_vocabulary, infer, named

OPS = default_vocabulary()
EDGES = np.array(
    [np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-40, -1e-40, 1.5, -1.5, 0.5, 2.5, 1e30, -1e30, 88.8], np.float32
)
RNG = np.random.default_rng(7)
RANDOM = RNG.standard_normal((3, 4, 5)).astype(np.float32)
SHAPES = {
    "random": RANDOM,
    "edges": EDGES,
    "empty": np.zeros((0, 3), np.float32),
    "scalar": np.float32(0.7).reshape(()),
}

UNARY = [
    "Abs", "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "Ceil", "Celu", "Cos", "Cosh", "Elu", "Erf", "Exp",
    "Floor", "HardSigmoid", "Identity", "IsInf", "IsNaN", "LeakyRelu", "Log", "Neg", "Reciprocal", "Relu", "Round",
    "Selu", "Sigmoid", "Sign", "Sin", "Sinh", "Softplus", "Softsign", "Sqrt", "Tan", "Tanh", "ThresholdedRelu",
]  # fmt: skip
BINARY = [
    "Add", "Sub", "Mul", "Div", "Pow", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Max", "Min", "Sum",
    "Mean", "PRelu",
]  # fmt: skip
REDUCE = [f"Reduce{k}" for k in ("Sum", "Mean", "Max", "Min", "Prod", "L1", "L2", "SumSquare", "LogSumExp", "LogSum")]

#: Where ONNX's reference and its text part, or the reference itself overflows: not compared, with the reason.
DIFFERS = {
    ("Softplus", "edges"): "the reference computes log(exp(x) + 1), which overflows beyond x = 88",
    ("Selu", "edges"): "the reference multiplies the branch not taken: 0 · inf",
    ("ThresholdedRelu", "edges"): "the reference gives 0 for NaN; ours keeps it",
    ("Softsign", "scalar"): "the reference fails on rank 0",
}


@functools.cache
def _program(op: str, count: int, attributes: tuple, outputs: int = 1) -> ReferenceEvaluator:
    names = [f"i{k}" for k in range(count)]
    outs = [f"o{k}" for k in range(outputs)]
    node = helper.make_node(op, names, outs, **dict(attributes))
    infos = [helper.make_tensor_value_info(n, 0, None) for n in names]
    graph = helper.make_graph([node], "g", infos, [helper.make_tensor_value_info(o, 0, None) for o in outs])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", min(25, onnx.defs.onnx_opset_version()))])
    return ReferenceEvaluator(model)


def reference(op: str, *arrays: np.ndarray, outputs: int = 1, **attributes) -> list[np.ndarray]:
    """What onnx.reference computes."""
    frozen = tuple((k, tuple(v) if isinstance(v, list) else v) for k, v in attributes.items())
    program = _program(op, len(arrays), frozen, outputs)
    with np.errstate(all="ignore"):
        return program.run(None, {f"i{k}": a for k, a in enumerate(arrays)})


def ours(op: str, *arrays: np.ndarray, outputs: int = 1, mode: str = "step", **attributes) -> list[np.ndarray]:
    """The same through the evaluator; inferred types are checked against the results."""
    attributes = {k: tuple(v) if isinstance(v, list) else v for k, v in attributes.items()}
    builder = GraphBuilder("g")
    values = []
    for k, array in enumerate(arrays):
        builder.input(f"i{k}", array.dtype.name, array.shape)
        values.append(Value(f"i{k}", array.dtype.name, array.shape))
    known = {k: a for k, a in enumerate(arrays) if a.dtype == np.int64 and a.ndim <= 1}
    outs = named([f"o{k}" for k in range(outputs)], infer(OPS[op], values, attributes, known, outputs))
    builder.node(op, [v.name for v in values], outs, attrs=attributes)
    graph = builder.build([o.name for o in outs])
    got = evaluate(graph, {f"i{k}": a for k, a in enumerate(arrays)}, ops=OPS, mode=mode)
    for o in outs:
        if o.shape is not None:
            expected = tuple(d if isinstance(d, int) else n for d, n in zip(o.shape, got[o.name].shape, strict=True))
            assert got[o.name].shape == expected
    return [got[o.name] for o in outs]


def check(op: str, *arrays: np.ndarray, rtol: float = 2e-6, **attributes) -> None:
    want, got = reference(op, *arrays, **attributes), ours(op, *arrays, **attributes)
    for w, g in zip(want, got, strict=True):
        w = np.asarray(w)
        assert g.shape == w.shape and g.dtype == w.dtype
        np.testing.assert_allclose(g.astype(float), w.astype(float), rtol=rtol, atol=1e-6)


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("op", UNARY)
def test_unary(op: str, kind: str) -> None:
    if (op, kind) in DIFFERS:
        assert DIFFERS[op, kind]
        x = SHAPES[kind]
        with np.errstate(all="ignore"):
            got, exact = ours(op, x)[0], ours(op, x, mode="exact")[0].astype(np.float32)
        np.testing.assert_allclose(got, exact, rtol=1e-5)  # then at least both of our widths agree
        return
    check(op, SHAPES[kind], rtol=1e-5)


@pytest.mark.parametrize("op", BINARY)
def test_binary_broadcasts(op: str) -> None:
    check(op, np.abs(RANDOM) + 0.5, np.abs(RANDOM[0, :, :1]) + 0.25)
    check(op, np.zeros((0, 4), np.float32), np.ones((4,), np.float32))
    check(op, np.float32(2).reshape(()), np.float32(3).reshape(()))


@pytest.mark.parametrize("op", [op for op in BINARY if op not in ("PRelu", "Mean")])  # not broadcast there
def test_binary_on_edge_values(op: str) -> None:
    check(op, EDGES[:, None], EDGES[None, :], rtol=1e-5)


@pytest.mark.parametrize("kind", ["int8", "int32", "int64", "uint8", "uint32"])
@pytest.mark.parametrize("op", ["Add", "Sub", "Mul", "Div", "Max", "Min", "Equal", "Less"])
def test_integers(op: str, kind: str) -> None:
    a = np.array([7, -7, 100, 5], np.int64).astype(kind)
    b = np.array([2, 2, 3, -5 if kind[0] == "i" else 4], np.int64).astype(kind)
    check(op, a, b)


def test_integer_division_truncates_toward_zero() -> None:
    a, b = np.array([7, -7, 7, -7], np.int32), np.array([2, 2, -2, -2], np.int32)
    assert ours("Div", a, b)[0].tolist() == [3, -3, -3, 3]
    assert ours("Mod", a, b)[0].tolist() == [1, 1, -1, -1]
    assert ours("Mod", a, b, fmod=1)[0].tolist() == [1, -1, 1, -1]


@pytest.mark.parametrize("keepdims", [0, 1])
@pytest.mark.parametrize("axes", [None, [1], [-1, 0], []])
@pytest.mark.parametrize("op", REDUCE)
def test_reductions(op: str, axes: list[int] | None, keepdims: int) -> None:
    operands = (np.abs(RANDOM) + 0.1, *([] if axes is None else [np.array(axes, np.int64)]))
    check(op, *operands, rtol=1e-5, keepdims=keepdims)
    check(op, *operands, rtol=1e-5, keepdims=keepdims, noop_with_empty_axes=1) if axes else None


@pytest.mark.parametrize(
    ("op", "value"),
    [("ReduceSum", 0), ("ReduceProd", 1), ("ReduceMax", -np.inf), ("ReduceMin", np.inf), ("ReduceLogSumExp", -np.inf)],
)
def test_reductions_of_nothing_give_the_neutral_element(op: str, value: float) -> None:
    assert ours(op, np.zeros((2, 0), np.float32), np.array([1], np.int64), keepdims=0)[0].tolist() == [value] * 2


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("op", ["Softmax", "LogSoftmax", "Hardmax", "ArgMax", "ArgMin"])
def test_along_an_axis(op: str, axis: int) -> None:
    check(op, RANDOM, axis=axis)


@pytest.mark.parametrize("a", [(3,), (2, 3), (5, 2, 3), (1, 4, 2, 3), (0, 3)])
@pytest.mark.parametrize("b", [(3,), (3, 4), (1, 3, 4), (3, 0)])
def test_matmul(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    check("MatMul", RNG.standard_normal(a).astype(np.float32), RNG.standard_normal(b).astype(np.float32), rtol=1e-5)


@pytest.mark.parametrize("swap", [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_matmul_folds_transposes(swap: tuple[int, int]) -> None:
    a, b = RNG.standard_normal((2, 3, 4)).astype(np.float32), RNG.standard_normal((4, 5)).astype(np.float32)
    stored_a, stored_b = a.swapaxes(-1, -2) if swap[0] else a, b.T if swap[1] else b
    got = ours("MatMul", stored_a, stored_b, transA=swap[0], transB=swap[1])[0]
    np.testing.assert_allclose(got, a @ b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("group", [1, 2, 4])
@pytest.mark.parametrize("spatial", [1, 2, 3])
def test_conv(spatial: int, group: int) -> None:
    x = RNG.standard_normal((2, 4, *(7, 6, 5)[:spatial])).astype(np.float32)
    w = RNG.standard_normal((8, 4 // group, *(3, 2, 2)[:spatial])).astype(np.float32)
    geometry = {"strides": [2] * spatial, "pads": [1, 0, 1][:spatial] + [0, 1, 1][:spatial], "group": group}
    check("Conv", x, w, np.ones(8, np.float32), rtol=1e-4, **geometry)


@pytest.mark.parametrize("group", [1, 2, 4])
@pytest.mark.parametrize("spatial", [1, 2, 3])
def test_conv_transpose_is_that_of_torch(spatial: int, group: int) -> None:  # onnx.reference fails on groups
    import torch

    x = RNG.standard_normal((2, 4, *(5, 4, 3)[:spatial])).astype(np.float32)
    w = RNG.standard_normal((4, 2, *(3, 2, 2)[:spatial])).astype(np.float32)
    function = getattr(torch.nn.functional, f"conv_transpose{spatial}d")
    steps, pads, extra, dilations = (v[:spatial] for v in ((2, 1, 3), (1, 0, 1), (1, 0, 2), (1, 2, 1)))
    want = function(torch.from_numpy(x), torch.from_numpy(w), None, steps, pads, extra, group, dilations).numpy()
    geometry = {"strides": steps, "pads": pads * 2, "output_padding": extra, "dilations": dilations, "group": group}
    np.testing.assert_allclose(ours("ConvTranspose", x, w, **geometry)[0], want, rtol=1e-4, atol=1e-5)


def test_global_lp_pool_and_reverse_sequence() -> None:
    x = RNG.standard_normal((2, 3, 4, 4)).astype(np.float32)
    np.testing.assert_allclose(
        ours("GlobalLpPool", x, p=3)[0][..., 0, 0], (abs(x) ** 3).sum((2, 3)) ** (1 / 3), rtol=1e-5
    )
    check("ReverseSequence", RANDOM, np.array([1, 3, 2, 0], np.int64), batch_axis=1, time_axis=0)


@pytest.mark.parametrize("epsilon", [1e-5, 1e-2])
@pytest.mark.parametrize("axis", [-1, 1])
def test_layer_normalization_gives_all_three_outputs(axis: int, epsilon: float) -> None:
    shape = RANDOM.shape[axis:]
    scale, bias = RNG.standard_normal(shape).astype(np.float32), RNG.standard_normal(shape).astype(np.float32)
    check("LayerNormalization", RANDOM, scale, bias, outputs=3, axis=axis, epsilon=epsilon, rtol=1e-5)


@pytest.mark.parametrize("kind", ["float16", "bfloat16", "float32", "int32", "uint8", "bool"])
@pytest.mark.parametrize("to", ["float16", "bfloat16", "float32", "float64", "int32", "int8", "bool"])
def test_cast_is_that_of_numpy(kind: str, to: str) -> None:
    x = np.array([0, 1, 2.5, 3.5, 100.7, 7.99]).astype(dtype(kind).numpy)
    got = ours("Cast", x, to=to)[0]
    np.testing.assert_array_equal(got, x.astype(dtype(to).numpy))
    assert got.dtype == dtype(to).numpy


def test_cast_rounds_once_to_nearest_even() -> None:
    x = np.array([1 + 2**-8, 1 + 3 * 2**-8, 3.4e38, -0.0, np.nan], np.float32)
    got = ours("Cast", x, to="bfloat16")[0].astype(np.float64)
    assert got[:4].tolist() == [1.0, 1 + 2**-6, np.inf, 0.0] and np.signbit(got[3]) and np.isnan(got[4])
    wide = np.array([1 + 2**-11 + 2**-40])  # rounds up, unless it goes through float32, where it becomes a tie
    assert ours("Cast", wide, to="float16")[0][0] == np.float16(1 + 2**-10)
    wide = np.array([1 + 2**-8 + 2**-40])
    assert ours("Cast", wide, to="bfloat16")[0].astype(float)[0] == 1 + 2**-7


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
@pytest.mark.parametrize("op", ["Add", "Mul", "Gelu", "Softmax", "ReduceSum", "Sigmoid", "LayerNormalization"])
def test_small_floats_are_computed_wide_and_rounded_once(op: str, kind: str) -> None:
    small = np.dtype(ml_dtypes.bfloat16) if kind == "bfloat16" else np.dtype(np.float16)
    x = (RNG.standard_normal((4, 64)) * 3).astype(small)
    operands = (x, x[0]) if op in ("Add", "Mul", "LayerNormalization") else (x,)
    wide = ours(op, *[a.astype(np.float32) for a in operands])[0]
    got = ours(op, *operands)[0]
    assert got.dtype == small
    np.testing.assert_array_equal(got, wide.astype(small))
