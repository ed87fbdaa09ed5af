"""Weights of 8 bits in front of a product: a cast times a scale is DequantizeLinear; a zero point of zero is none.
Floor 3.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .engine import Rule
from .site import Site

#: What weights are stored in, and products dequantise.
NARROW = frozenset({"int8", "float8_e4m3fn"})

_FLAGS = "transA=transA, transB=transB"


def _no_offset(site: Site) -> bool:
    zero = site.array("z")
    return zero is not None and not zero.astype("float32").any()


def _narrow_weight(site: Site) -> bool:
    """w is a matrix of 8 bits, cast to the dtype of its scale."""
    return site.value("w").dtype in NARROW and site.rank("w") == 2 and site.attribute("kind") == site.value("s").dtype


def _per_tensor(site: Site) -> bool:
    return _narrow_weight(site) and site.shape("s") in ((), (1,))


def _last_axis(site: Site) -> bool:
    w, s = site.shape("w"), site.shape("s")
    return _narrow_weight(site) and w is not None and s is not None and len(s) == 1 and s[0] == w[1] != 1


def _one_axis(site: Site) -> Mapping[str, Any] | None:
    """The axis of w along which a scale of rank 2 runs, and what makes it one of rank 1."""
    import numpy as np

    w, s = site.shape("w"), site.shape("s")
    if not _narrow_weight(site) or w is None or s is None or len(s) != 2:
        return None
    for axis in (0, 1):
        if s[axis] == w[axis] and s[1 - axis] == 1 and s[axis] != 1:
            return {"axis": axis, "flat": np.asarray([-1], np.int64)}
    return None


def _product(scaled: str) -> str:
    return f"y = MatMul(x, {scaled}, {_FLAGS})"


_CAST = _product("Mul(Cast(w, to=kind), s)")

RULES: tuple[Rule, ...] = (
    Rule(
        "zero_point_of_zero",
        "y = DequantizeLinear(x, s, z, axis=axis, block_size=block, output_dtype=kind)",
        "y = DequantizeLinear(x, s, axis=axis, block_size=block, output_dtype=kind)",
        (_no_offset,),
    ),
    Rule("cast_times_scale", _CAST, _product("DequantizeLinear(w, s)"), (_per_tensor,)),
    Rule("cast_times_scales", _CAST, _product("DequantizeLinear(w, s)"), (_last_axis,)),
    Rule("cast_times_column", _CAST, _product("DequantizeLinear(w, Reshape(s, flat), axis=axis)"), (), _one_axis),
)
