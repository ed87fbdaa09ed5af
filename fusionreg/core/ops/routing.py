"""Products with one of many matrices for each row, domain ``fusionreg``. Floor 1.

An index outside of ``[0, number of matrices)`` means that the row has none: nothing is read, and no index is counted
from the end, unless ``FromEnd`` has said so.
"""

from __future__ import annotations

from math import prod
from typing import Any

from .define import operator, specs_in
from .inference import Attributes, Constants, Inputs, Type, broadcast, operand, same

#: Elements of matrices gathered for all rows beyond which memory is worth more than a call for each matrix.
GATHERED = 1 << 26


def _one_by_one(xp: Any, x: Any, w: Any, ids: Any) -> Any:
    """x[m] @ w[ids[m]], matrix by matrix."""
    y = xp.full((x.shape[0], w.shape[2]), 0.0, x)
    for e in range(w.shape[0]):
        (rows,) = xp.ns.nonzero(ids == e)
        if rows.shape[0]:
            y[rows] = xp.matmul(xp.ns.take(x, rows, axis=0), w[e])
    return y


def _inside(xp: Any, ids: Any, count: int) -> tuple[Any, Any]:
    """Whether each index is one, and the index, 0 where it is not."""
    ids = xp.cast(ids, "int64")
    inside = (ids >= 0) & (ids < count)
    return inside, xp.ns.where(inside, ids, xp.ns.zeros_like(ids))


def _routed_type(inputs: Inputs, attributes: Attributes, constants: Constants) -> list[Type]:
    x, w = operand(inputs, 0), operand(inputs, 1)
    ids = operand(inputs, 2)
    if x.shape is None or w.shape is None or ids.shape is None:
        return [(x.dtype, None)]
    return [(x.dtype, (*(broadcast(x.shape[:-1], ids.shape) or ()), w.shape[1 if attributes["trans"] else 2]))]


@operator("fusionreg::RoutedMatMul", "x w ids", infer=_routed_type, attributes={"trans": 0})
def routed_matmul(xp: Any, x: Any, w: Any, ids: Any, *, trans: int) -> Any:
    """x[m] @ w[ids[m]] for each row m; with trans the matrices are transposed first. 0 for a row without a matrix.
    Rows and ids are broadcast: those of x[:, None] and ids[m, k] are the products of row m with several matrices."""
    inside, safe = _inside(xp, ids, w.shape[0])
    x = xp.ns.broadcast_to(x, (*ids.shape, x.shape[-1]))
    shape = (*ids.shape, w.shape[1] if trans else w.shape[2])
    if not w.shape[0]:
        return xp.full(shape, 0.0, x)
    w = xp.ns.matrix_transpose(w) if trans else w
    rows, flat = xp.ns.reshape(x, (prod(x.shape[:-1]), 1, x.shape[-1])), xp.ns.reshape(safe, (-1,))
    if prod(shape) * x.shape[-1] > GATHERED:
        y = xp.ns.reshape(_one_by_one(xp, rows[:, 0], w, flat), shape)
    else:
        y = xp.ns.reshape(xp.matmul(rows, xp.ns.take(w, flat, axis=0)), shape)
    return xp.ns.where(inside[..., None], y, xp.ns.zeros_like(y))


@operator("fusionreg::RoutedScale", "x scales ids", infer=same)
def routed_scale(xp: Any, x: Any, scales: Any, ids: Any) -> Any:
    """x[m] · scales[ids[m]] for each row m; x[m] for a row without a scale."""
    inside, safe = _inside(xp, ids, scales.shape[0])
    if not scales.shape[0]:
        return x
    chosen = xp.ns.reshape(xp.ns.take(scales, xp.ns.reshape(safe, (-1,)), axis=0), (*ids.shape, 1))
    return xp.ns.where(inside[..., None], x * chosen, x)


def _below(xp: Any, extent: int, limits: Any) -> Any:
    """Whether 0, 1, … extent - 1 are below each limit, along a new last axis."""
    return xp.arange(extent) < xp.cast(limits, "int64")[..., None]


@operator("fusionreg::RoutedLimit", "x limits ids", infer=same)
def routed_limit(xp: Any, x: Any, limits: Any, ids: Any) -> Any:
    """Row m of x with 0 in all places from limits[ids[m]] on, whatever stands there; 0 for a row without a limit."""
    inside, safe = _inside(xp, ids, limits.shape[0])
    if not limits.shape[0]:
        return xp.ns.zeros_like(x)
    chosen = xp.ns.reshape(xp.ns.take(limits, xp.ns.reshape(safe, (-1,)), axis=0), tuple(ids.shape))
    return xp.ns.where(inside[..., None] & _below(xp, x.shape[-1], chosen), x, xp.ns.zeros_like(x))


@operator("fusionreg::LimitRank", "w ranks", infer=same, attributes={"trans": 0})
def limit_rank(xp: Any, w: Any, ranks: Any, *, trans: int) -> Any:
    """Matrices w[e] with 0 in all rows from ranks[e] on, whatever stands there; with trans stored transposed."""
    live = _below(xp, w.shape[2 if trans else 1], ranks)
    return xp.ns.where(live[:, None, :] if trans else live[:, :, None], w, xp.ns.zeros_like(w))


@operator("fusionreg::FromEnd", "index things", infer=same)
def from_end(xp: Any, index: Any, things: Any) -> Any:
    """Indices of things, along their first axis, of which those below 0 count from the end, as indices that do not."""
    return xp.ns.where(index < 0, index + things.shape[0], index)


def _selected_type(inputs: Inputs, attributes: Attributes, constants: Constants) -> list[Type]:
    x, index = operand(inputs, 0), operand(inputs, 1)
    if x.shape is None or index.shape is None:
        return [(x.dtype, None)]
    return [(x.dtype, (*index.shape, *x.shape[1:]))]


@operator("fusionreg::SelectRows", "x index", infer=_selected_type)
def select_rows(xp: Any, x: Any, index: Any) -> Any:
    """Row index[p] of x for each p; zeros where there is no such row."""
    shape = (*index.shape, *x.shape[1:])
    if not x.shape[0]:
        return xp.full(shape, 0.0, x)
    inside, safe = _inside(xp, index, x.shape[0])
    rows = xp.ns.reshape(xp.ns.take(x, xp.ns.reshape(safe, (-1,)), axis=0), shape)
    return xp.ns.where(xp.ns.reshape(inside, (*index.shape, *[1] * (x.ndim - 1))), rows, xp.ns.zeros_like(rows))


@operator("fusionreg::AddRows", "x index updates", infer=same)
def add_rows(xp: Any, x: Any, index: Any, updates: Any) -> Any:
    """x [M N] with updates[p] added to its row index[p] for each p; those of no row are left out."""
    if not x.shape[0]:
        return x
    inside, safe = _inside(xp, index, x.shape[0])
    kept = xp.ns.where(inside[:, None], updates, xp.ns.zeros_like(updates))
    at = xp.ns.reshape(safe[:, None] * x.shape[1] + xp.arange(x.shape[1])[None, :], (-1,))
    y = xp.scatter(xp.ns.reshape(x, (-1,)), at, xp.ns.reshape(kept, (-1,)), "add")
    return xp.ns.reshape(y, tuple(x.shape))


def _grouped_type(inputs: Inputs, attributes: Attributes, constants: Constants) -> list[Type]:
    x, w = operand(inputs, 0), operand(inputs, 1)
    if x.shape is None or w.shape is None:
        return [(x.dtype, None)]
    return [(x.dtype, (x.shape[0], w.shape[1 if attributes["trans"] else 2]))]


@operator("fusionreg::GroupedMatMul", "x w ends", infer=_grouped_type, attributes={"trans": 0})
def grouped_matmul(xp: Any, x: Any, w: Any, ends: Any, *, trans: int) -> Any:
    """x[p] @ w[e] for the rows p of group e, which begins where the largest end before it is, and ends before row
    ends[e]; with trans the matrices are transposed first. 0 for a row of no group."""
    before = xp.arange(x.shape[0])[:, None] >= xp.cast(ends, "int64")[None, :]  # of each end: whether it is at most p
    ids = xp.ns.sum(xp.cast(xp.ns.cumulative_prod(xp.cast(before, "int64"), axis=1), "int64"), axis=1)
    return routed_matmul.meaning(xp, x, w, ids, trans=trans)


def _ends_type(inputs: Inputs, attributes: Attributes, constants: Constants) -> list[Type]:
    return [("int32", (attributes["experts"],))]


@operator("fusionreg::GroupEnds", "ids", infer=_ends_type, attributes={"experts": 1})
def group_ends(xp: Any, ids: Any, *, experts: int) -> Any:
    """Where the rows of each expert end once rows are sorted by ids: how many ids from 0 on are at most its own."""
    ids = xp.cast(ids, "int64")[None, :]
    until = (ids >= 0) & (ids <= xp.arange(experts)[:, None])
    return xp.cast(xp.ns.sum(xp.cast(until, "int64"), axis=1), "int32")


OPS = specs_in(globals())
