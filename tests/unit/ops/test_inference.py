"""Shape inference with symbols, and its refusals; ``test_node_cases`` compares it with real shapes."""

from __future__ import annotations

import numpy as np
import pytest

from fusionreg.core.errors import GraphError
from fusionreg.core.ir import Value
from fusionreg.core.ops import default_vocabulary, infer

OPS = default_vocabulary()


def shape_of(op: str, *operands, count: int | None = None, **attributes):
    """Inferred shapes; an operand is a shape, ``"?"`` for an unknown one, or an array, which is a known constant."""
    values, known = [], {}
    for i, o in enumerate(operands):
        if o is None:
            values.append(None)
        elif isinstance(o, np.ndarray):
            values.append(Value(f"i{i}", o.dtype.name, o.shape))
            known[i] = o
        else:
            values.append(Value(f"i{i}", "float32", None if o == "?" else o))
    shapes = [shape for _, shape in infer(OPS[op], values, attributes, known, count)]
    return shapes[0] if len(shapes) == 1 or count is None else shapes


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


@pytest.mark.parametrize(
    ("got", "want"),
    [
        (lambda: shape_of("Add", ("B", 1, 4), ("S", 4)), ("B", "S", 4)),
        (lambda: shape_of("Add", ("B", 4), ("C", 4)), (None, 4)),
        (lambda: shape_of("Add", ("B", 4), (7, 1)), (7, 4)),
        (lambda: shape_of("Add", "?", (4,)), None),
        (lambda: shape_of("Where", ("B", 1), (1, 3), ()), ("B", 3)),
        (lambda: shape_of("MatMul", ("B", "S", 8), (8, 3)), ("B", "S", 3)),
        (lambda: shape_of("MatMul", ("K",), ("B", "K", "N")), ("B", "N")),
        (lambda: shape_of("MatMul", ("M", "K"), ("K",)), ("M",)),
        (lambda: shape_of("MatMul", ("B", "K", "M"), ("N", "K"), transA=1, transB=1), ("B", "M", "N")),
        (lambda: shape_of("Gemm", ("M", 4), (8, 4), (8,), transB=1), ("M", 8)),
        (lambda: shape_of("Reshape", ("B", "S", 768), ints(0, 0, 12, 64)), ("B", "S", 12, 64)),
        (lambda: shape_of("Reshape", ("B", "S", 768), ints(0, 0, -1, 64)), ("B", "S", 12, 64)),
        (lambda: shape_of("Reshape", ("B", 12, 64), ints(-1, 768)), ("B", 768)),
        (lambda: shape_of("Reshape", ("B", "S", 8), ints(-1, 8)), (None, 8)),
        (lambda: shape_of("Reshape", ("B", 8), ints(0, 2, -1)), ("B", 2, 4)),
        (lambda: shape_of("Reshape", ("B", 8), (3,)), (None, None, None)),
        (lambda: shape_of("Reshape", (0, 8), ints(0, 4), allowzero=1), (0, 4)),
        (lambda: shape_of("Flatten", ("B", 3, 4)), ("B", 12)),
        (lambda: shape_of("Flatten", ("B", "C", 4), axis=2), (None, 4)),
        (lambda: shape_of("Transpose", ("A", "B", 3)), (3, "B", "A")),
        (lambda: shape_of("Squeeze", ("A", 1, 3), ints(-2)), ("A", 3)),
        (lambda: shape_of("Squeeze", ("A", 1, 3)), None),
        (lambda: shape_of("Unsqueeze", ("A", 3), ints(0, -1)), (1, "A", 3, 1)),
        (lambda: shape_of("Concat", ("B", 3), ("B", 4), axis=1), ("B", 7)),
        (lambda: shape_of("Concat", ("B", 3), (1, 3), axis=0), (None, 3)),
        (lambda: shape_of("Slice", ("B", 10), ints(2), ints(2**63 - 1), ints(1), ints(3)), ("B", 3)),
        (lambda: shape_of("Slice", ("B", 10), ints(0), ints(2**63 - 1), ints(0)), ("B", 10)),
        (lambda: shape_of("Slice", ("B", 10), ints(1), ints(5), ints(0)), (None, 10)),
        (lambda: shape_of("Slice", ("B", 10), ints(-1), ints(-11), ints(1), ints(-1)), ("B", 10)),
        (lambda: shape_of("Gather", ("V", 64), ("B", "S")), ("B", "S", 64)),
        (lambda: shape_of("GatherND", ("B", 3, 4), (5, 2)), (5, 4)),
        (lambda: shape_of("Expand", ("B", 1), ints(1, 7)), ("B", 7)),
        (lambda: shape_of("Tile", ("B", 3), ints(1, 2)), ("B", 6)),
        (lambda: shape_of("Pad", ("B", 3), ints(0, 1, 0, 2)), ("B", 6)),
        (lambda: shape_of("ReduceMean", ("B", "S", 8), ints(-1)), ("B", "S", 1)),
        (lambda: shape_of("ReduceMean", ("B", "S", 8), ints(1), keepdims=0), ("B", 8)),
        (lambda: shape_of("ReduceSum", ("B", "S"), (1,), keepdims=0), (None,)),
        (lambda: shape_of("Conv", ("B", 3, 32, "W"), (8, 3, 3, 1), pads=(1, 0, 1, 0)), ("B", 8, 32, "W")),
        (lambda: shape_of("Conv", ("B", 3, "H", 32), (8, 3, 3, 3), strides=(2, 2)), ("B", 8, None, 15)),
        (lambda: shape_of("Conv", ("B", 3, "H"), (8, 3, 3), auto_pad="SAME_UPPER"), ("B", 8, "H")),
        (lambda: shape_of("ConvTranspose", ("B", 3, 8), (3, 4, 2), strides=(2,)), ("B", 4, 16)),
        (lambda: shape_of("MaxPool", ("B", 3, 8, 8), kernel_shape=(2, 2), strides=(2, 2)), ("B", 3, 4, 4)),
        (lambda: shape_of("GlobalAveragePool", ("B", "C", "H", "W")), ("B", "C", 1, 1)),
        (lambda: shape_of("Einsum", ("B", "Q", 8), ("B", "K", 8), equation="bqd,bkd->bqk"), ("B", "Q", "K")),
        (lambda: shape_of("Einsum", ("B", "M", 4), (4, 5), equation="...ij,jk->...ik"), ("B", "M", 5)),
        (lambda: shape_of("ConstantOfShape", ints(2, 3)), (2, 3)),
        (lambda: shape_of("Range", ints(0), ints(10), ints(3)), (4,)),
        (lambda: shape_of("Shape", ("B", "S", 3), start=1), (2,)),
        (lambda: shape_of("OneHot", ("B",), ints(10), ints(0, 1)), ("B", 10)),
        (lambda: shape_of("TopK", ("B", 100), ints(5)), ("B", 5)),
        (lambda: shape_of("Resize", ("B", 3, 8, 8), None, None, ints(1, 3, 16, 16)), (1, 3, 16, 16)),
        (lambda: shape_of("Resize", ("B", 3, 8, 8), None, np.float32([1, 1, 2, 2])), ("B", 3, None, None)),
        (lambda: shape_of("DepthToSpace", ("B", 8, "H", 3), blocksize=2), ("B", 2, None, 6)),
        (lambda: shape_of("Attention", ("B", 8, "Q", 64), ("B", 2, "K", 64), ("B", 2, "K", 32)), ("B", 8, "Q", 32)),
        (lambda: shape_of("Attention", *[("B", "S", 64)] * 3, q_num_heads=4, kv_num_heads=4), ("B", "S", 64)),
    ],
)
def test_symbols_survive_where_they_can(got, want) -> None:
    assert got() == want


def test_split_counts() -> None:
    assert shape_of("Split", ("B", 7), num_outputs=3, axis=1, count=3) == [("B", 3), ("B", 3), ("B", 1)]
    assert shape_of("Split", ("B", 7), ints(5, 2), axis=1, count=2) == [("B", 5), ("B", 2)]
    assert shape_of("Split", (6, 2), (3,), count=3) == [(None, 2)] * 3
    assert shape_of("Split", ("B", 2), num_outputs=2, count=2) == [(None, 2)] * 2


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: shape_of("Gather", (5, 64), ints(4, -5, 5)), "index 5"),
        (lambda: shape_of("Gather", ("N", 3), ints(-4), axis=1), "index -4"),
        (lambda: shape_of("Add", (2, 3), (2, 4)), r"extents \[3, 4\]"),
        (lambda: shape_of("MatMul", (2, 3), (4, 5)), "inner extents 3 and 4"),
        (lambda: shape_of("MatMul", (), (4, 5)), "rank 0"),
        (lambda: shape_of("MatMul", (3,), (3, 5), transA=1), "transposed operand of rank 1"),
        (lambda: shape_of("Gemm", (1, 2, 3), (3, 5)), "rank 3"),
        (lambda: shape_of("Reshape", (2, 3), ints(4, -1)), "6 elements"),
        (lambda: shape_of("Reshape", (2, 3), ints(7)), "6 elements"),
        (lambda: shape_of("Reshape", (2, 3), ints(-1, -1)), "at most one -1"),
        (lambda: shape_of("Reshape", (2,), ints(1, 0)), "position 1"),
        (lambda: shape_of("Transpose", (2, 3), perm=(0, 0)), "each axis once"),
        (lambda: shape_of("Squeeze", (2, 3), ints(0)), "extent 2"),
        (lambda: shape_of("Concat", (2, 3), (3, 3), axis=1), r"\[2, 3\] on axis 0"),
        (lambda: shape_of("Concat", (2, 3), (3,), axis=0), "ranks"),
        (lambda: shape_of("Split", (5,), ints(2, 2)), "of extent 5"),
        (lambda: shape_of("Softmax", (2, 3), axis=2), "axis 2"),
        (lambda: shape_of("ReduceSum", (2, 3), ints(1, -1)), "repeat"),
        (lambda: shape_of("Conv", (1, 3, 8), (8, 4, 3)), "3 channels"),
        (lambda: shape_of("Conv", (1, 3, 2), (8, 3, 3)), "window of 3"),
        (lambda: shape_of("Pad", (2, 3), ints(1, 1)), "2 pads"),
        (lambda: shape_of("TopK", (2, 3), ints(4)), "k = 4 of 3"),
        (lambda: shape_of("Einsum", (2, 3), equation="ijk->i"), "'ijk'"),
        (lambda: shape_of("GroupNormalization", (1, 6, 2), (6,), (6,), num_groups=4), "6 channels"),
        (lambda: shape_of("DepthToSpace", (1, 6, 2, 2), blocksize=2), "extent 6"),
        (lambda: shape_of("Slice", (5,), ints(0), ints(3), ints(0), ints(0)), "step of 0"),
    ],
)
def test_what_does_not_fit_is_refused(call, words: str) -> None:
    with pytest.raises(GraphError, match=words):
        call()
