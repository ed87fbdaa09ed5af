"""RNN, GRU, LSTM: ONNX's reference ignores lengths, clip and activations, so onnxruntime judges them."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from onnx import helper

from fusionreg.core.errors import GraphError
from fusionreg.core.evaluate.evaluator import evaluate
from fusionreg.core.ir import GraphBuilder, Value
from fusionreg.core.ops import backend_of, default_vocabulary, infer, named, normalise

ort = pytest.importorskip("onnxruntime")
OPS = default_vocabulary()
T, B, I, H = 5, 3, 4, 2
GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
OPERANDS = ("x", "w", "r", "bias", "sequence_lens", "initial_h", "initial_c", "peepholes")


def operands(op: str, directions: int, optional: bool, layout: int = 0) -> list[np.ndarray | None]:
    rng = np.random.default_rng(3)
    g = GATES[op]

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    state = (B, directions, H) if layout else (directions, B, H)
    given = [
        normal(B, T, I) if layout else normal(T, B, I), normal(directions, g * H, I), normal(directions, g * H, H),
        normal(directions, 2 * g * H), np.array([5, 2, 3], np.int32), normal(*state),
    ]  # fmt: skip
    if op == "LSTM":
        given += [normal(*state), normal(directions, 3 * H)]
    return given if optional else [*given[:3]]


def ours(op: str, given: list, attributes: dict, to=None) -> list[np.ndarray]:
    arrays = {n: a for n, a in zip(OPERANDS, given, strict=False) if a is not None}
    builder = GraphBuilder("g")
    values = []
    for name, array in zip(OPERANDS, given, strict=False):
        values.append(None if array is None else Value(name, array.dtype.name, array.shape))
        if array is not None:
            builder.input(name, array.dtype.name, array.shape)
    outs = named(["y", "y_h", "y_c"][: 3 if op == "LSTM" else 2], infer(OPS[op], values, attributes))
    builder.node(
        op, [n if a is not None else "" for n, a in zip(OPERANDS, given, strict=False)], outs, attrs=attributes
    )
    graph = builder.build([o.name for o in outs])
    xp = backend_of(torch.zeros(1)) if to == "torch" else None
    feed = {k: xp.asarray(v) for k, v in arrays.items()} if xp else arrays
    got = evaluate(graph, feed, ops=OPS)
    results = [xp.to_numpy(got[o.name]) if xp else got[o.name] for o in outs]
    assert [r.shape for r in results] == [o.shape for o in outs]
    return results


def theirs(op: str, given: list, attributes: dict) -> list[np.ndarray]:
    names = [n if a is not None else "" for n, a in zip(OPERANDS, given, strict=False)]
    outs = ["y", "y_h", "y_c"][: 3 if op == "LSTM" else 2]
    raw = {k: list(v) if isinstance(v, tuple) else v for k, v in {"hidden_size": H, **attributes}.items()}
    infos = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
        for n, a in zip(names, given, strict=True)
        if n
    ]
    ends = [helper.make_tensor_value_info(o, 1, None) for o in outs]
    graph = helper.make_graph([helper.make_node(op, names, outs, **raw)], "g", infos, ends)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 14)], ir_version=8)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {n: a for n, a in zip(names, given, strict=True) if n})


def check(op: str, given: list, attributes: dict) -> None:
    want = theirs(op, given, attributes)
    for to in (None, "torch"):
        for got, expected in zip(ours(op, given, attributes, to), want, strict=True):
            np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("op", "direction", "optional"),
    list(product(GATES, ("forward", "reverse", "bidirectional"), (False, True))),
)
def test_directions_lengths_and_states(op: str, direction: str, optional: bool) -> None:
    check(op, operands(op, 1 + (direction == "bidirectional"), optional), {"direction": direction})


@pytest.mark.parametrize(
    ("op", "attributes"),
    [
        ("GRU", {"linear_before_reset": 1}),
        ("LSTM", {"input_forget": 1}),
        ("RNN", {"clip": 0.3}),
        ("GRU", {"clip": 0.3}),
        ("LSTM", {"clip": 0.3}),
        ("RNN", {"activations": ("LeakyRelu",), "activation_alpha": (0.3,)}),
        ("RNN", {"activations": ("Affine",), "activation_alpha": (0.3,), "activation_beta": (0.1,)}),
        ("LSTM", {"activations": ("HardSigmoid", "Softsign", "ScaledTanh"), "activation_alpha": (0.3, 0.7),
                  "activation_beta": (0.4, 0.9)}),
        ("GRU", {"activations": ("Sigmoid", "Relu")}),
        ("RNN", {"activations": ("Elu",)}),
        ("RNN", {"activations": ("Softplus",)}),
        ("RNN", {"activations": ("ThresholdedRelu",), "activation_alpha": (0.2,)}),
    ],
)  # fmt: skip
def test_attributes(op: str, attributes: dict) -> None:
    check(op, operands(op, 1, True), attributes)


@pytest.mark.parametrize("op", GATES)
def test_batch_first_is_time_first_transposed(op: str) -> None:
    first = operands(op, 2, True)
    second = list(first)
    for i in (0, 5, 6):
        if i < len(first):
            second[i] = np.swapaxes(first[i], 0, 1)
    direction = {"direction": "bidirectional"}
    y, *last = ours(op, first, direction)
    y2, *last2 = ours(op, second, {**direction, "layout": 1})
    np.testing.assert_array_equal(y2, np.transpose(y, (2, 0, 1, 3)))
    for a, b in zip(last, last2, strict=True):
        np.testing.assert_array_equal(np.swapaxes(a, 0, 1), b)


def test_what_lies_past_a_length_is_not_read() -> None:
    given = operands("LSTM", 2, True)
    given[0] = given[0].copy()
    given[0][2:, 1] = np.nan
    y, h, c = ours("LSTM", given, {"direction": "bidirectional"})
    assert np.isfinite(h).all() and np.isfinite(c).all() and (y[2:, :, 1] == 0).all()


def test_no_steps_give_the_initial_state() -> None:
    given = operands("GRU", 1, True)
    given[0], given[4] = given[0][:0], None
    y, h = ours("GRU", given, {})
    assert y.shape == (0, 1, B, H)
    np.testing.assert_array_equal(h, given[5])


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"direction": "bidirectional"}, "1 directions"),
        ({"direction": "sideways"}, "'sideways'"),
        ({"hidden_size": 7}, "hidden_size 7"),
    ],
)
def test_weights_that_do_not_fit(attributes: dict, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        ours("LSTM", operands("LSTM", 1, False), attributes)


@pytest.mark.parametrize("activations", [("Wobble",), ("Tanh",) * 3])
def test_activations_that_do_not_fit(activations: tuple) -> None:
    with pytest.raises(GraphError, match="activation"):
        ours("RNN", operands("RNN", 1, False), {"activations": activations})


def test_onnx_attributes_arrive_in_our_form() -> None:
    assert dict(normalise(OPS["LSTM"], {"hidden_size": H, "activations": [b"Tanh"]})) == {
        "hidden_size": H,
        "activations": ("Tanh",),
    }
