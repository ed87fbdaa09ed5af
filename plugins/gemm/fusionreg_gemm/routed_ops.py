"""Operators of domain ``gemm``: a product with one of many matrices for each row, as ONNX would need a Gather of whole
matrices for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from fusionreg.core.spec import OpSpec


def _inside(xp: Any, ids: Any, count: int) -> tuple[Any, Any]:
    """Whether each id names a matrix, and the id, 0 where it does not."""
    ids = xp.cast(ids, "int64")
    inside = (ids >= 0) & (ids < count)
    return inside, xp.ns.where(inside, ids, xp.ns.zeros_like(ids))


def _routed(xp: Any, x: Any, w: Any, ids: Any, *, trans: int) -> Any:
    inside, safe = _inside(xp, ids, w.shape[0])
    columns = w.shape[1] if trans else w.shape[2]
    if not w.shape[0]:
        return xp.full((*x.shape[:-1], columns), 0.0, x)
    chosen = xp.ns.take(w, xp.ns.reshape(safe, (-1,)), axis=0)
    chosen = xp.ns.matrix_transpose(chosen) if trans else chosen
    y = xp.matmul(xp.ns.reshape(x, (prod(x.shape[:-1]), 1, x.shape[-1])), chosen)
    y = xp.ns.reshape(y, (*x.shape[:-1], columns))
    return xp.ns.where(inside[..., None], y, xp.ns.zeros_like(y))


def _routed_type(inputs: Sequence[Any], attributes: Mapping[str, Any], constants: Any) -> list[tuple[str, Any]]:
    x, w, _ = inputs
    if x.shape is None or w.shape is None:
        return [(x.dtype, None)]
    return [(x.dtype, (*x.shape[:-1], w.shape[1 if attributes["trans"] else 2]))]


def _ranked(xp: Any, w: Any, ranks: Any, *, axis: int, trans: int) -> Any:
    axis = 3 - axis if trans else axis
    shape = [1, 1, 1]
    shape[axis] = w.shape[axis]
    place = xp.ns.reshape(xp.arange(w.shape[axis]), tuple(shape))
    live = place < xp.ns.reshape(xp.cast(ranks, "int64"), (-1, 1, 1))
    return xp.ns.where(live, w, xp.ns.zeros_like(w))


ROUTED = OpSpec(
    name="gemm::Routed",
    inputs=("x", "w", "ids"),
    attributes={"trans": 0},
    meaning=_routed,
    infer=_routed_type,
    summary=(
        "x[m] @ w[ids[m]] for each row m; with trans w[ids[m]] is transposed first. 0 where ids[m] is outside of "
        "[0, number of matrices)"
    ),
)
RANKED = OpSpec(
    name="gemm::Ranked",
    inputs=("w", "ranks"),
    attributes={"axis": 1, "trans": 0},
    meaning=_ranked,
    infer=lambda inputs, attributes, constants: [(inputs[0].dtype, inputs[0].shape)],
    summary=(
        "matrix w[e] with 0 in all rows (axis 1) or columns (axis 2) from ranks[e] on, whatever stands there; with "
        "trans it is stored transposed"
    ),
)
OPS = (ROUTED, RANKED)
