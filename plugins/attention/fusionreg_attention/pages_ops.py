"""Keys that lie in pages, as those of a sequence: domain ``attention``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fusionreg.core.ops.inference import times
from fusionreg.core.spec import OpSpec


def _pages_type(inputs: Any, attributes: Mapping[str, Any], constants: Any) -> list[tuple[str, Any]]:
    cache, table = inputs
    if cache.shape is None or table.shape is None:
        return [(cache.dtype, None)]
    _, places, heads, width = cache.shape
    return [(cache.dtype, (table.shape[0], heads, times(table.shape[1], places), width))]


def _pages(xp: Any, cache: Any, table: Any) -> Any:
    pages, places, heads, width = cache.shape
    sequences, many = table.shape
    at = xp.cast(table, "int64")
    at = xp.ns.clip(xp.ns.where(at < 0, at + pages, at), 0, max(pages - 1, 0))
    found = xp.ns.take(cache, xp.ns.reshape(at, (-1,)), axis=0)
    found = xp.ns.reshape(found, (sequences, many * places, heads, width))
    return xp.ns.permute_dims(found, (0, 2, 1, 3))


OPS = (
    OpSpec(
        name="attention::Pages",
        inputs=("cache", "table"),
        meaning=_pages,
        infer=_pages_type,
        summary="keys [B G M*W D] of sequences from the pages [N W G D] that table[B M] names; numbers below 0 count "
        "from the last page, what names none is the nearest one",
    ),
)
