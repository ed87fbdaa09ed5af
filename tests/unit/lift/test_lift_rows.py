"""Rows of a matrix that are put in one axis for a product, as GPT-2 does it: the product is of rows of any axes."""

from __future__ import annotations

import pytest
from lifting import Spell, assert_lifted, assert_not_lifted


def spelled(bias, after=(2, 5, 6), before=(2, 5, 8), flat=(10, 8), expose=False):
    n = Spell()
    x, w = n.x(*before), n.weight((8, 6))
    r = n.op("MatMul", n.op("Reshape", x, n.const(flat, "int64")), w)
    r = n.add(r, n.weight((6,), name="b")) if bias else r
    y = n.op("Reshape", r, n.const(after, "int64"))
    return n.done(*(y, r) if expose else (y,))


@pytest.mark.parametrize("bias", [False, True])
def test_rows_keep_their_axes(bias):
    graph = assert_lifted(spelled(bias), {"MatMul": 1, **({"Add": 1} if bias else {})}, 1e-12)
    assert graph.values[graph.nodes[0].outputs[0]].shape == (2, 5, 6)


def test_axes_of_the_result_are_those_that_count():
    """Merged heads: x has other axes than the rows of the result."""
    assert_lifted(spelled(True, before=(2, 5, 2, 4)), {"Reshape": 1, "MatMul": 1, "Add": 1}, 1e-12)


@pytest.mark.parametrize(
    ("facts", "count"),
    [({"after": (2, 5, 3, 2)}, 2), ({"after": (5, 12)}, 2), ({"flat": (2, 5, 8)}, 0), ({"expose": True}, 2)],
)
def test_what_stays(facts, count):
    """Columns taken apart, rows of two, what is flat for nobody, and flat rows that are read."""
    kinds = [node.op for node in assert_not_lifted(spelled(True, **facts)).nodes]
    assert kinds.count("Reshape") == count
