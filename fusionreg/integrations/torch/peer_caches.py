"""Rotary embedding and caches of keys as plain torch calls: operators of the family ``attention``, and some around."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fusionreg.core.frozen import FrozenDict

from .peer_site import Site, Writer, unwritten
from .schemas import torch_dtype


def _gather(s: Site) -> Any:
    axis = s.attributes["axis"]
    if isinstance(s.args[1], int | float):
        return torch.select(s.args[0], axis, int(s.args[1]))
    raise unwritten(s.node, "several indices")


def _inside(index: Any, extent: int, otherwise: int) -> tuple[Any, Any]:
    inside = torch.logical_and(index >= 0, index < extent)
    return inside, torch.where(inside, index.long(), otherwise)


def _rotate(s: Site) -> Any:
    x, interleaved = s.args[0], s.attributes["interleaved"]
    inside, position = _inside(s.args[3], s.extents(1)[0], 0)
    cos, sin = (table[position][:, None] for table in s.args[1:3])
    width = 2 * s.extents(1)[1]
    turned, rest = x[..., :width], x[..., width:]
    a, b = (turned[..., 0::2], turned[..., 1::2]) if interleaved else turned.split(width // 2, -1)
    real, imaginary = a * cos - b * sin, a * sin + b * cos
    y = torch.stack([real, imaginary], -1).flatten(-2) if interleaved else torch.cat([real, imaginary], -1)
    return torch.where(inside[:, None, :, None], torch.cat([y, rest], -1), torch.nan)


def _put(cache: Any, index: tuple[Any, ...], rows: Any, narrow: bool) -> Any:
    """Rows replaced, and one more row at the end for those that have no place; fp8 by its bytes."""
    cache, rows = (t.view(torch.uint8) if narrow else t for t in (cache, rows.contiguous()))
    return torch.index_put(cache, index, rows)


def _append(s: Site) -> Any:
    cache, x, slots = s.args
    batch, _, places, _ = s.extents(0)
    narrow = s.dtype().itemsize == 1
    _, at = _inside(slots, places, places)
    rows = torch.cat([cache, cache[:, :, :1]], 2).transpose(1, 2)
    each = torch.arange(batch, device=slots.device)[:, None]
    return _put(rows, (each, at), x.transpose(1, 2), narrow)[:, :places].transpose(1, 2).view(s.dtype())


def _append_pages(s: Site) -> Any:
    cache, x, slots, table = s.args
    pages, places, heads, width = s.extents(0)
    narrow = s.dtype().itemsize == 1
    known, slot = _inside(slots, s.extents(3)[1] * places, 0)
    there, page = _inside(torch.gather(table.long(), 1, slot // places), pages, 0)
    at = torch.where(torch.logical_and(known, there), page * places + slot % places, pages * places)
    rows = torch.cat([cache.flatten(0, 1), cache[0, :1]], 0)
    put = _put(rows, (at.flatten(),), x.transpose(1, 2).flatten(0, 1), narrow)
    return put[: pages * places].reshape(pages, places, heads, width).view(s.dtype())


def _pages(s: Site) -> Any:
    cache, table = s.args
    pages, places, heads, width = s.extents(0)
    sequences, many = s.extents(1)
    at = table.long()
    at = torch.where(at < 0, at + pages, at).clamp(0, max(pages - 1, 0))
    return cache[at.flatten()].reshape(sequences, many * places, heads, width).transpose(1, 2)


def _quantize(s: Site) -> Any:
    kind = s.attributes["output_dtype"]
    if kind != "float8_e4m3fn" or s.given(2) or s.rank(1):
        raise unwritten(s.node, "to another dtype, or by axis")
    return (s.args[0] / s.args[1].to(s.dtype())).clamp(-448.0, 448.0).to(torch_dtype(kind))


WRITERS: Mapping[str, Writer] = FrozenDict(
    {
        "Gather": _gather,
        "QuantizeLinear": _quantize,
        "attention::Rotate": _rotate,
        "attention::AppendCache": _append,
        "attention::AppendPages": _append_pages,
        "attention::Pages": _pages,
    }
)
