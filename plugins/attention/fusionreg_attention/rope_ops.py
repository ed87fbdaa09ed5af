"""Operators of decoding that ONNX lacks, domain ``attention``: rotation by position, and an append to a cache."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fusionreg.core.ops.attention import rotary_embedding
from fusionreg.core.spec import OpSpec


def _same(inputs: Any, attributes: Mapping[str, Any], constants: Any) -> list[tuple[str, Any]]:
    return [(inputs[0].dtype, inputs[0].shape)]


def _inside(xp: Any, at: Any, extent: int) -> tuple[Any, Any]:
    """Whether each index is one of ``extent``, and the index, 0 where it is not."""
    at = xp.cast(at, "int64")
    inside = (at >= 0) & (at < extent)
    return inside, xp.ns.where(inside, at, xp.ns.zeros_like(at))


def _rotated(xp: Any, x: Any, cos: Any, sin: Any, positions: Any, **attributes: int) -> Any:
    nothing = xp.full((), math.nan, x)
    if not cos.shape[0]:
        return xp.ns.zeros_like(x) + nothing
    inside, safe = _inside(xp, positions, cos.shape[0])
    y = rotary_embedding.meaning(xp, x, cos, sin, safe, num_heads=0, **attributes)
    return xp.ns.where(inside[:, None, :, None], y, nothing)


def _put(xp: Any, rows: Any, at: Any, new: Any) -> Any:
    """``rows`` [R W] with row ``at[m]`` replaced by ``new[m]``, by none where that is R; the last of equals wins."""
    count, width = rows.shape
    held = xp.ns.concat([rows, xp.full((1, width), 0.0, rows)], axis=0)
    flat = xp.ns.reshape(xp.ns.reshape(at, (-1, 1)) * width + xp.arange(width)[None, :], (-1,))
    y = xp.scatter(xp.ns.reshape(held, (-1,)), flat, xp.ns.reshape(new, (-1,)), "none")
    return xp.ns.reshape(y, (count + 1, width))[:count, :]


def _appended(xp: Any, cache: Any, x: Any, slots: Any) -> Any:
    b, g, places, d = cache.shape
    s = x.shape[2]
    inside, at = _inside(xp, slots, places)
    rows = (xp.arange(b)[:, None, None] * g + xp.arange(g)[None, :, None]) * places + at[:, None, :]
    rows = xp.ns.where(xp.ns.broadcast_to(inside[:, None, :], (b, g, s)), rows, xp.ns.zeros_like(rows) + b * g * places)
    y = _put(xp, xp.ns.reshape(cache, (b * g * places, d)), rows, xp.ns.reshape(x, (b * g * s, d)))
    return xp.ns.reshape(y, (b, g, places, d))


def _paged(xp: Any, cache: Any, x: Any, slots: Any, table: Any) -> Any:
    pages, places, g, d = cache.shape
    b, _, s, _ = x.shape
    none = pages * places
    if not none or not table.shape[1]:
        return cache
    inside, at = _inside(xp, slots, table.shape[1] * places)
    which = xp.ns.reshape(at // places + xp.arange(b)[:, None] * table.shape[1], (-1,))
    page = xp.ns.reshape(xp.ns.take(xp.ns.reshape(table, (-1,)), which, axis=0), (b, s))
    there, page = _inside(xp, page, pages)
    rows = page * places + at % places
    rows = xp.ns.where(inside & there, rows, xp.ns.zeros_like(rows) + none)
    new = xp.ns.reshape(xp.ns.permute_dims(x, (0, 2, 1, 3)), (b * s, g * d))
    return xp.ns.reshape(_put(xp, xp.ns.reshape(cache, (none, g * d)), rows, new), (pages, places, g, d))


OPS = (
    OpSpec(
        name="attention::Rotate",
        inputs=("x", "cos", "sin", "positions"),
        attributes={"interleaved": 0, "rotary_embedding_dim": 0},
        meaning=_rotated,
        infer=_same,
        summary="x[B H S D] as ONNX RotaryEmbedding has it, by positions[B S] of cos and sin [L R]; "
        "NaN where a position lies outside of them",
    ),
    OpSpec(
        name="attention::AppendCache",
        inputs=("cache", "x", "slots"),
        meaning=_appended,
        infer=_same,
        summary="cache[B G C D] with x[b, :, s] at slots[b, s] of sequence b; slots outside of [0, C) write nothing, "
        "of equal ones the last wins",
    ),
    OpSpec(
        name="attention::AppendPages",
        inputs=("cache", "x", "slots", "table"),
        meaning=_paged,
        infer=_same,
        summary="cache[N W G D] of pages with x[b, :, s] at slot slots[b, s] of sequence b, which is place slot % W of "
        "page table[b, slot // W]; slots outside of the table and pages outside of [0, N) write nothing, of equal "
        "places the last wins",
    ),
)
