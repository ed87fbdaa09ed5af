"""Masks of attention that is spelled out: which of them ``Attention`` may take in, and which are positions. Floor 3."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Any

from ..dtypes import dtype
from ..ir import Graph
from .site import Site

#: Operators that only move elements, and those that make finite numbers of finite numbers of ordinary size.
_MOVES = frozenset(("Identity", "Reshape", "Unsqueeze", "Squeeze", "Expand", "Slice", "Transpose", "Concat", "Gather"))
_TAMES = frozenset(("Add", "Sub", "Mul", "Where", "Cast"))


def _finite(graph: Graph, name: str, depth: int = 12) -> bool:
    """Whether every element is sure to be finite: made of finite constants, integers and bools."""
    import numpy as np

    if graph.values[name].dtype == "bool" or not dtype(graph.values[name].dtype).floating:
        return True
    if graph.is_constant(name):
        return bool(np.isfinite(graph.constants[name].astype(np.float64)).all())
    producer = graph.producers.get(name)
    if producer is None or depth == 0 or producer.op not in _MOVES | _TAMES:
        return False
    read = producer.inputs if producer.op in _TAMES or producer.op == "Concat" else producer.inputs[:1]
    return all(_finite(graph, i, depth - 1) for i in read)


def _mask(site: Site) -> str:
    """What the mask is called in the pattern."""
    return next(name for name in ("mask", "allowed", "hidden") if name in site.found.inputs)


def fits(site: Site) -> bool:
    """Broadcast over scores that it does not enlarge, one number a key."""
    scores, mask = site.shape("s"), site.shape(_mask(site))
    if scores is None or mask is None or mask[-1:] != scores[-1:]:
        return False
    most = 4 if len(scores) == 4 else 2  # heads of three axes get another in between
    return 2 <= len(mask) <= most and all(m in (1, s) for m, s in zip(mask[::-1], scores[::-1], strict=False))


def additive(site: Site) -> bool:
    import numpy as np

    if not fits(site):
        return False
    array = site.array("mask")
    if array is not None:
        wide = array.astype(np.float64)
        return not np.isnan(wide).any() and bool((wide.max(axis=-1, initial=-np.inf) > -np.inf).all())
    return _finite(site.graph, site.name("mask"))


def mild(site: Site) -> bool:
    """No number so low that adding the logarithm of a sum to it changes nothing: of a row of such numbers alone, which
    are weights alike, a log-sum-exp does not tell how many there are."""
    array = site.array("mask")
    if array is not None:
        return bool((array.astype("float64").max(axis=-1, initial=-inf) >= -_LOW).all())
    return _most(site.graph, site.name("mask")) <= _LOW


#: In float32 there are ten bits behind the point of a number of that size.
_LOW = 2.0**14


def _most(graph: Graph, name: str, depth: int = 12) -> float:
    """The largest size of the constants that something is made of."""
    import numpy as np

    if graph.is_constant(name):
        array = graph.constants[name]
        floating = array.size > 0 and dtype(graph.values[name].dtype).floating
        return float(np.abs(array.astype(np.float64)).max()) if floating else 0.0
    producer = graph.producers.get(name)
    if producer is None or depth == 0:
        return 0.0
    return max((_most(graph, i, depth - 1) for i in producer.inputs if i), default=0.0)


def boolean(site: Site) -> bool:
    """A constant of keys with one allowed in every row, and a fill that underflows to nothing beside any score."""
    mask, low = site.array(_mask(site)), site.number("low", like="s")
    if mask is None or low is None or not fits(site):
        return False
    allowed = ~mask if _mask(site) == "hidden" else mask
    if not bool(allowed.any(axis=-1).all()):
        return False
    return low <= -0.99 * _largest(site.value("s").dtype)


def _largest(kind: str) -> float:
    """What a fill is compared with, where scores are of that dtype."""
    import numpy as np

    return 65504.0 if kind == "float16" else float(np.finfo(np.float32).max)


def guard(site: Site) -> bool:
    """0 where the largest score is −∞, and a mask whose own fill, if it has one, is that."""
    if site.number("lowest", like="s") != -inf or site.number("zero", like="s") != 0.0 or not fits(site):
        return False
    return "low" not in site.found.inputs or site.number("low", like="s") == -inf


def positions(site: Site) -> Mapping[str, Any] | None:
    """A constant mask by positions alone, the same for all: keys up to a diagonal at or above the main one, and from
    one at or below it on."""
    import numpy as np

    array, queries, keys = site.array("mask"), site.shape("q"), site.shape("k")
    if array is None or array.ndim < 2 or not array.size or queries is None or keys is None:
        return None
    rows, columns = array.shape[-2:]
    free = all(site.attribute(n) == d for n, d in (("causal", 0), ("left", -1), ("right", -1)))
    if not free or (rows, columns) != (queries[2], keys[2]):
        return None
    mask, *others = array.reshape(-1, rows, columns)
    if not all(np.array_equal(mask, other) for other in others):
        return None
    if mask.dtype == bool:
        allowed = mask
    else:
        allowed = mask == 0
        if not bool((allowed | (mask <= -0.99 * _largest(site.value("q").dtype))).all()):
            return None
    seen = np.nonzero(allowed.any(axis=1))[0]
    if not seen.size or seen[0] > 0 or not allowed[0, 0]:
        return None
    right, last = int(allowed[0].sum()) - 1, int(seen[-1])
    left = last - int(allowed[last].argmax())  # how far back the last query sees, unless that is to the first key
    ahead = np.arange(columns)[None] - np.arange(rows)[:, None]
    for bound in (-1, left):
        if bool((allowed == ((ahead <= right) & ((ahead >= -bound) | (bound < 0)))).all()):
            causal = right == 0
            return {"causal": int(causal), "left": bound, "right": -1 if causal or right + 1 >= columns else right}
    return None


def clear(site: Site) -> bool:
    """0 where a weight is none, and a mask of any numbers."""
    masked = {"mask", "allowed", "hidden"} & set(site.found.inputs)
    if site.number("zero", like="s") != 0.0 or (masked and not fits(site)):
        return False
    return "low" not in site.found.inputs or site.number("low", like="s") == -inf
