"""Weights of 8 bits in front of a product: a cast times a scale is DequantizeLinear; a zero point of zero is none.
Floor 3.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..dtypes import DTYPES
from .engine import Rule
from .products import swaps_last
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


def _exact(site: Site) -> bool:
    """What w holds is a number of 16 bits as well."""
    row = DTYPES.get(site.attribute("kind"))
    return site.value("w").dtype in NARROW and row is not None and row.floating


def _one_factor(site: Site) -> bool:
    """c is one number for all, beside a matrix of weights in float32."""
    c = site.shape("c")
    return site.value("w").dtype in NARROW and site.rank("w") == 2 and c in ((), (1,), (1, 1))


def _rounds(site: Site) -> bool:
    return site.attribute("kind") != site.value("s").dtype


def _scales(site: Site) -> bool:
    """One scale belongs to x, for all of it or for each row, the other to w, for all or for each channel."""
    x, w, h = site.shape("sx"), site.shape("sw"), site.shape("h")
    if x is None or w is None or h is None or len(h) < 2 or site.rank("w") != 2:
        return False
    if site.value("x").dtype != "float8_e4m3fn" or site.value("w").dtype != "float8_e4m3fn":
        return False
    of_rows = x == (*h[:-1], 1)
    of_channels = len(w) >= 1 and w[-1] == h[-1] and all(d == 1 for d in w[:-1]) and len(w) <= len(h)
    return (of_rows or all(d == 1 for d in x)) and (of_channels or all(d == 1 for d in w))


def _swapped_below(site: Site) -> Mapping[str, Any] | None:
    return swaps_last("w", "transB")(site) if site.rank("w") == 2 else None


def _product(scaled: str) -> str:
    return f"y = MatMul(x, {scaled}, {_FLAGS})"


_CAST = _product("Mul(Cast(w, to=kind), s)")
#: Scaled in float32, and rounded to the dtype of x.
_WIDE_CAST = _product("Cast(Mul(Cast(w, to=kind), s), to=narrow)")
_SCALED = 'h = MatMul(Cast(x, to="float32"), Cast(w, to="float32"), transA=transA, transB=transB)\n'

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
    Rule("cast_times_scale", _WIDE_CAST, _product("Cast(DequantizeLinear(w, s), to=narrow)"), (_per_tensor,)),
    Rule("cast_times_scales", _WIDE_CAST, _product("Cast(DequantizeLinear(w, s), to=narrow)"), (_last_axis,)),
    Rule(
        "cast_times_column",
        _WIDE_CAST,
        _product("Cast(DequantizeLinear(w, Reshape(s, flat), axis=axis), to=narrow)"),
        (),
        _one_axis,
    ),
    Rule(
        "rounded_behind",
        "y = DequantizeLinear(w, s, axis=axis, block_size=block, output_dtype=kind)",
        "y = Cast(DequantizeLinear(w, s, axis=axis, block_size=block), to=kind)",
        (_rounds,),
    ),
    Rule("widened_twice", 'y = Cast(Cast(w, to=kind), to="float32")', 'y = Cast(w, to="float32")', (_exact,)),
    *(
        Rule(
            "factor_of_scales",
            f'y = {op}(Mul(Cast(w, to="float32"), s), c)',
            f'y = Mul(Cast(w, to="float32"), {op}(s, c))',
            (_one_factor,),
        )
        for op in ("Mul", "Div")
    ),
    Rule(
        "transposed_below_cast",
        f"y = MatMul(x, Cast(Transpose(w, perm=perm), to=kind), {_FLAGS})",
        f"y = MatMul(x, Cast(w, to=kind), {_FLAGS})",
        (),
        _swapped_below,
        shared=True,
    ),
    # torch._scaled_mm and kernels multiply by one scale after the other
    Rule(
        "scales_first",
        f"{_SCALED}y = Mul(h, Mul(sx, sw))",
        f"{_SCALED}y = Mul(Mul(h, sx), sw)",
        (_scales,),
    ),
)
