"""Rows by index and rows in groups: the definitions, against loops; and how a user of torch writes them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fusionreg.core.frozen import FrozenDict
from fusionreg.core.ir import Graph, Node, Value
from fusionreg.core.ops import default_vocabulary, numpy_backend
from fusionreg.integrations.torch.peers import torch_module

OPS = default_vocabulary()
RNG = np.random.default_rng(5)
X = RNG.standard_normal((4, 3))


def run(name, *arrays, **attributes):
    """The operator's meaning on NumPy; as torch code beside it, which must agree."""
    op = OPS[name]
    y = op.meaning(numpy_backend(), *arrays, **(dict(op.attributes) | attributes))
    names = [f"a{i}" for i in range(len(arrays))]
    values = {n: Value(n, a.dtype.name, a.shape) for n, a in zip(names, arrays, strict=True)}
    node = Node("n", name, tuple(names), ("y",), FrozenDict(attributes))
    graph = Graph("g", tuple(names), ("y",), (node,), FrozenDict(values | {"y": Value("y", "float64", y.shape)}))
    code = torch_module(graph, OPS)
    if all(a.size for a in arrays):
        np.testing.assert_allclose(code(*(torch.from_numpy(a.copy()) for a in arrays)).numpy(), y, rtol=1e-12)
    return y


@pytest.mark.parametrize("kind", ["int32", "int64"])
def test_rows_that_there_are_not_are_zeros(kind: str) -> None:
    index = np.array([3, -1, 0, 4, -4, -5], kind)
    none = np.zeros(3)
    np.testing.assert_array_equal(run("fusionreg::SelectRows", X, index), [X[3], none, X[0], none, none, none])
    wrapped = [X[3], X[3], X[0], none, X[0], none]
    np.testing.assert_array_equal(run("fusionreg::SelectRows", X, run("fusionreg::FromEnd", index, X)), wrapped)
    assert not run("fusionreg::SelectRows", X[:0], index).any()


def test_rows_are_added_as_often_as_they_are_named() -> None:
    index, updates = np.array([2, 9, 2, -1, 2]), RNG.standard_normal((5, 3))
    wanted = X.copy()
    wanted[2] += updates[0] + updates[2] + updates[4]
    np.testing.assert_allclose(run("fusionreg::AddRows", X, index, updates), wanted, rtol=1e-12)
    wanted[3] += updates[3]
    at = run("fusionreg::FromEnd", index, X)
    np.testing.assert_allclose(run("fusionreg::AddRows", X, at, updates), wanted, rtol=1e-12)
    updates[1] = np.nan  # of no row
    assert np.isfinite(run("fusionreg::AddRows", X, index, updates)).all()


@pytest.mark.parametrize("trans", [0, 1])
def test_a_row_has_the_matrix_of_the_first_group_that_ends_behind_it(trans: int) -> None:
    w = RNG.standard_normal((4, 3, 5))
    stored = np.ascontiguousarray(w.swapaxes(1, 2)) if trans else w
    rising = run("fusionreg::GroupedMatMul", X, stored, np.array([0, 2, 2, 3]), trans=trans)
    np.testing.assert_allclose(rising, [X[0] @ w[1], X[1] @ w[1], X[2] @ w[3], np.zeros(5)], rtol=1e-12)


def test_ends_that_do_not_rise_end_nothing() -> None:
    w = RNG.standard_normal((4, 3, 5))
    y = OPS["fusionreg::GroupedMatMul"].meaning(numpy_backend(), X, w, np.array([-7, 2, 1, 90]), trans=0)
    np.testing.assert_allclose(y, [X[0] @ w[1], X[1] @ w[1], X[2] @ w[3], X[3] @ w[3]], rtol=1e-12)


def test_an_index_below_0_names_the_last_matrix_only_where_it_wraps() -> None:
    w, ids = RNG.standard_normal((4, 3, 5)), np.array([-1, 2, -5, 4])
    none = np.zeros(5)
    np.testing.assert_allclose(run("fusionreg::RoutedMatMul", X, w, ids), [none, X[1] @ w[2], none, none])
    wanted = [X[0] @ w[3], X[1] @ w[2], none, none]
    np.testing.assert_allclose(run("fusionreg::RoutedMatMul", X, w, run("fusionreg::FromEnd", ids, w)), wanted)


def test_groups_end_where_ids_are_exceeded() -> None:
    ids = np.array([2, 0, 5, -1, 2, 3, 0, 4, 2])
    ends = OPS["fusionreg::GroupEnds"].meaning(numpy_backend(), ids, experts=4)
    np.testing.assert_array_equal(ends, np.cumsum([np.sum(ids == e) for e in range(4)]))
    assert ends.dtype == np.int32
