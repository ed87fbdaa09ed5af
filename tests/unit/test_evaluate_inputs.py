"""What an evaluation takes: extents, dtypes and ranks that agree; operands of fused nodes by position."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fusionreg.core.errors import ArgumentError, GraphError
from fusionreg.core.evaluate.evaluator import evaluate
from fusionreg.core.frozen import FrozenDict
from fusionreg.core.ir import Graph, GraphBuilder, Value
from fusionreg.core.ops import default_vocabulary

OPS = default_vocabulary()


def _two_inputs() -> Graph:
    b = GraphBuilder("g")
    b.input("x", "float32", ("N", "K"))
    b.input("y", "float32", ("N",))
    b.node("Transpose", ["x"], [Value("t", "float32", ("K", "N"))])
    b.node("Add", ["t", "y"], [Value("z", "float32", ("K", "N"))])
    return b.build(["z"])


@pytest.mark.parametrize("make", [np.ones, lambda shape, dtype: torch.ones(shape)], ids=["numpy", "torch"])
def test_inputs_that_share_an_axis_have_one_extent(make) -> None:
    graph = _two_inputs()
    x, y = make((3, 2), np.float32), make((1,), np.float32)  # would broadcast in silence
    with pytest.raises(ArgumentError, match=r"axis 'N'.*1 in 'y'.*3, as in 'x'") as caught:
        evaluate(graph, {"x": x, "y": y}, ops=OPS)
    assert caught.value.facts["axis"] == "N" and caught.value.facts["inputs"] == ("x", "y")
    assert evaluate(graph, {"x": x, "y": make((3,), np.float32)}, ops=OPS)["z"].shape == (2, 3)


def test_an_axis_named_twice_in_one_input_has_one_extent() -> None:
    b = GraphBuilder("g")
    b.input("x", "float32", ("N", "N"))
    b.node("Relu", ["x"], [Value("y", "float32", ("N", "N"))])
    with pytest.raises(ArgumentError, match="axis 'N'"):
        evaluate(b.build(["y"]), {"x": np.ones((2, 3), np.float32)}, ops=OPS)


@pytest.mark.parametrize(
    ("y", "message"),
    [
        (np.ones(3, np.float64), "wrong dtype.*'y'.*float64.*float32"),
        (np.ones(3, np.int32), "wrong dtype.*'y'.*int32.*float32"),
        (np.ones((3, 1), np.float32), r"wrong shape.*'y'.*\(3, 1\)"),
    ],
)
def test_an_input_of_another_dtype_or_rank_is_refused(y: np.ndarray, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        evaluate(_two_inputs(), {"x": np.ones((3, 2), np.float32), "y": y}, ops=OPS)


def test_a_fused_body_is_called_by_position() -> None:
    """A body may call its inputs what the outer graph calls others: the names say nothing."""
    inner = GraphBuilder("body")
    inner.input("y", "float32", (1,))
    inner.input("x", "float32", (1,))
    inner.node("Sub", ["y", "x"], [Value("d", "float32", (1,))])
    b = GraphBuilder("g")
    b.input("x", "float32", (1,))
    b.input("y", "float32", (1,))
    body = FrozenDict({"body": inner.build(["d"])})
    b.node("fused::a.b", ["x", "y"], [Value("z", "float32", (1,))], graphs=body)
    x, y = np.array([5.0], np.float32), np.array([3.0], np.float32)
    assert evaluate(b.build(["z"]), {"x": x, "y": y}, ops=OPS)["z"].tolist() == [2.0]


@pytest.mark.parametrize("op", ["RandomNormal", "RandomUniformLike", "Multinomial", "Bernoulli"])
def test_an_operator_that_onnx_leaves_open_says_why(op: str) -> None:
    b = GraphBuilder("g")
    b.input("x", "float32", (1,))
    b.node(op, ["x"], [Value("y", "float32", (1,))])
    with pytest.raises(GraphError, match=f"{op}: its random stream is the library's own.*Replace it by an input"):
        evaluate(b.build(["y"]), {"x": np.ones(1, np.float32)}, ops=OPS)
