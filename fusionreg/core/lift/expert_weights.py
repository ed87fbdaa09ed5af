"""Matrices of experts that are stored in 8 or 4 bits, dequantised in front of a product. Floor 3.

Models round dequantised weights to the dtype of the tokens; what they are lifted to keeps them in float32 and rounds
the product alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from ..dtypes import dtype
from .engine import Rule
from .quantization import NARROW
from .site import Derive, Site

_PRODUCT = "y = fusionreg.RoutedMatMul(x, {}, ids, trans=1)"
_WIDE = 'y = Cast(fusionreg.RoutedMatMul(Cast(x, to="float32"), {}, ids, trans=1), to=kind_)'
_SCALED = 'Mul(Cast(w, to="float32"), {})'
_BLOCKS = "DequantizeLinear(w, {}, axis=2, block_size=block_)"


def _halves(axis: int, site: Site) -> bool:
    """Whether bytes are taken apart, and their halves put side by side along the last axis."""
    p, y = site.value("p"), site.shape("y")
    if p.dtype != "uint8" or p.shape is None or y is None or len(p.shape) != len(y):
        return False
    rank, inner = len(p.shape), p.shape[-1]
    ends = {site.ints(n) for n in ("last", "last_too")}
    return (
        axis in (rank, -1)
        and ends <= {(rank,), (-1,)}
        and site.ints("mask") == (15,)
        and site.ints("four") == (4,)
        and site.ints("eight") == site.ints("eight_too") == (8,)
        and isinstance(inner, int)
        and y == (*p.shape[:-1], 2 * inner)
    )


#: Two numbers of a byte, each 8 less than its half: before constants are folded, which would spread them.
UNPACKING: tuple[Rule, ...] = tuple(
    Rule(
        "two_of_a_byte",
        'low = Sub(Cast(BitwiseAnd(p, mask), to="int8"), eight)\n'
        'high = Sub(Cast(BitShift(p, four, direction="RIGHT"), to="int8"), eight_too)\n'
        f"y = Reshape(Concat(Unsqueeze(low, last), Unsqueeze(high, last_too), axis={axis}), shape)",
        "y = fusionreg.UnpackInt4(p)",
        (partial(_halves, axis),),
    )
    for axis in (2, 3, -1)
)


def _kind(site: Site) -> str | None:
    """The dtype of the tokens, 16 bits, which the weights are brought to."""
    kind = site.value("x").dtype
    told = "kind" not in site.found.attributes or site.attribute("kind") == kind
    return kind if told and dtype(kind).floating and dtype(kind).bits == 16 else None


def _of_channels(site: Site) -> Mapping[str, Any] | None:
    """Scales [E N 1] or [E 1 1] of matrices [E N K] of 8 bits."""
    w, s, kind = site.value("w"), site.shape("s"), _kind(site)
    if kind is None or w.dtype not in NARROW or w.shape is None or len(w.shape) != 3 or s is None or len(s) != 3:
        return None
    alike = s[0] == w.shape[0] and s[1] in (w.shape[1], 1) and s[2] == 1
    return {"kind_": kind} if alike and w.shape[2] != 1 and site.value("s").dtype in ("float32", kind) else None


def _of_blocks(site: Site) -> Mapping[str, Any] | None:
    """Scales [E N G] of matrices [E N K], one for K / G of a row."""
    import numpy as np

    w, s, kind = site.shape("w"), site.shape("s"), _kind(site)
    if s is not None and len(s) == 4 and s[3] == 1 and "end" not in site.found.inputs:
        s = s[:3]
    if kind is None or w is None or s is None or len(w) != 3 or len(s) != 3 or w[:2] != s[:2]:
        return None
    if not isinstance(w[2], int) or not isinstance(s[2], int) or not s[2] or w[2] % s[2]:
        return None
    block = w[2] // s[2]
    if "block" in site.found.attributes:
        as_said = site.attribute("block") == block
    else:
        apart = site.shape("b")
        as_said = apart == (*s, block) and ("end" not in site.found.inputs or site.ints("end") in ((3,), (-1,)))
    if not as_said or site.value("s").dtype not in ("float32", kind):
        return None
    return {"kind_": kind, "block_": block, "last_": np.asarray([3], np.int64)}


def _scale_is(wide: bool, site: Site) -> bool:
    return (site.value("s").dtype == "float32") == wide


def _dequantised(found: str, made: str, derive: Derive, scales: str = "s") -> tuple[Rule, ...]:
    """Scales in float32, and of the tokens' dtype, which are brought to float32. ``scales``: as [E N G]."""
    return tuple(
        Rule(
            "dequantised_experts",
            found,
            _WIDE.format(made.format(scale)),
            (partial(_scale_is, wide),),
            derive,
        )
        for scale, wide in ((scales, True), (f'Cast({scales}, to="float32")', False))
    )


#: A scale for each block, step by step, in the dtype of the tokens and in float32.
_APART = """
b = Reshape(Cast(w, to=kind), blocks)
y = fusionreg.RoutedMatMul(x, Reshape(Mul(b, {}), whole), ids, trans=1)
"""
_APART_WIDE = """
b = Reshape(Cast(w, to="float32"), blocks)
y = fusionreg.RoutedMatMul(x, Cast(Reshape(Mul(b, {}), whole), to=kind), ids, trans=1)
"""

RULES: tuple[Rule, ...] = (
    *_dequantised(_PRODUCT.format("Mul(Cast(w, to=kind), s)"), _SCALED, _of_channels),
    *_dequantised(_PRODUCT.format("Mul(Cast(w, to=kind), Cast(s, to=kind))"), _SCALED, _of_channels),
    *_dequantised(_PRODUCT.format('Cast(Mul(Cast(w, to="float32"), s), to=kind)'), _SCALED, _of_channels),
    *_dequantised(_PRODUCT.format("DequantizeLinear(w, s, axis=2, block_size=block)"), _BLOCKS, _of_blocks),
    *_dequantised(
        _PRODUCT.format("Cast(DequantizeLinear(w, s, axis=2, block_size=block), to=kind)"), _BLOCKS, _of_blocks
    ),
    *_dequantised(_APART.format("Unsqueeze(s, end)"), _BLOCKS, _of_blocks),
    *_dequantised(_APART_WIDE.format("Unsqueeze(s, end)"), _BLOCKS, _of_blocks),
    *_dequantised(_APART.format("s"), _BLOCKS, _of_blocks, "Squeeze(s, last_)"),
    *_dequantised(_APART_WIDE.format("s"), _BLOCKS, _of_blocks, "Squeeze(s, last_)"),
)
