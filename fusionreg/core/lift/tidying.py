"""What changes no value: identities, moves that undo or follow each other, exact rescalings. Floor 3."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import frexp, inf, isfinite
from typing import Any

from ..dtypes import DTYPES
from .engine import Rule
from .site import Site, floats, shape_is

_REDUCTIONS = ("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin")


def _permutation(value: Any, rank: int) -> tuple[int, ...]:
    return tuple(range(rank))[::-1] if value is None else tuple(p % rank for p in value)


def _is_identity(site: Site) -> bool:
    rank = site.rank("x")
    return rank is not None and _permutation(site.attribute("p"), rank) == tuple(range(rank))


def _composed(site: Site) -> Mapping[str, Any] | None:
    rank = site.rank("x")
    if rank is None:
        return None
    first, second = _permutation(site.attribute("p"), rank), _permutation(site.attribute("q"), rank)
    return {"perm": tuple(first[i] for i in second)}


def _plain_target(site: Site) -> bool:
    """A constant shape without a 0 that would copy an extent of the shape in between."""
    target = site.ints("s2")
    return target is not None and (site.attribute("z2") == 1 or 0 not in target)


def _exact_reciprocal(site: Site) -> Mapping[str, Any] | None:
    """1/c where it is exact: c is a power of two whose reciprocal is a normal number."""
    import numpy as np

    number, row = site.number("c"), DTYPES[site.value("c").dtype]
    if number is None or not isfinite(number) or abs(frexp(number)[0]) != 0.5:
        return None
    array = site.array("c")
    assert array is not None
    smallest = float(2.0 ** {"float16": -14, "bfloat16": -126, "float32": -126, "float64": -1022}.get(row.name, 0))
    inverse = (1.0 / np.asarray(array, np.float64)).astype(row.numpy)
    return {"inverse": inverse} if smallest <= abs(1.0 / number) < inf and bool(np.isfinite(inverse).all()) else None


def _kept(site: Site) -> bool:
    """y is x with extents 1 in place of the reduced axes."""
    shape, axes = site.shape("x"), site.ints("axes")
    if shape is None or not axes:
        return False
    reduced = {a % len(shape) for a in axes}
    return site.shape("y") == tuple(1 if i in reduced else d for i, d in enumerate(shape))


def _no_lower(site: Site) -> bool:
    return site.number("c") == -inf


def _plain_reductions() -> Iterator[Rule]:
    """What to do without axes says nothing where there are axes."""
    for op in _REDUCTIONS:
        yield Rule(
            "axes_given",
            f"y = {op}(x, axes, keepdims=keep, noop_with_empty_axes=1)",
            f"y = {op}(x, axes, keepdims=keep)",
            (lambda site: bool(site.ints("axes")),),
        )


def _kept_dims() -> Iterator[Rule]:
    """A reduction whose axis is put back afterwards never dropped it (JAX writes reductions so)."""
    for op in _REDUCTIONS:
        for back in ("Reshape", "Unsqueeze"):
            yield Rule(
                "keepdims",
                f"y = {back}({op}(x, axes, keepdims=0), s)",
                f"y = {op}(x, axes)",
                (_kept,),
            )


RULES: tuple[Rule, ...] = (
    Rule("identity", "y = Identity(x)", "y = x"),
    Rule("dropout", "y = Dropout(x, seed=seed)", "y = x"),
    Rule("dropout", "y = Dropout(x, ratio, seed=seed)", "y = x"),
    Rule("dropout", "y = Dropout(x, ratio, False, seed=seed)", "y = x"),
    Rule("dropout", "y = Dropout(x, None, False, seed=seed)", "y = x"),
    Rule("cast_to_itself", "y = Cast(x, to=kind)", "y = x"),
    Rule("reshape_to_itself", "y = Reshape(x, s, allowzero=zero)", "y = x", (shape_is("x"),)),
    Rule("expand_to_itself", "y = Expand(x, s)", "y = x", (shape_is("x"),)),
    Rule("transpose_identity", "y = Transpose(x, perm=p)", "y = x", (_is_identity,)),
    Rule(
        "transpose_twice",
        "y = Transpose(Transpose(x, perm=p), perm=q)",
        "y = Transpose(x, perm=perm)",
        (),
        _composed,
        shared=True,
    ),
    Rule(
        "reshape_twice",
        "y = Reshape(Reshape(x, s1, allowzero=z1), s2, allowzero=z2)",
        "y = Reshape(x, s2, allowzero=z2)",
        (_plain_target,),
        shared=True,
    ),
    Rule("times_one", "y = Mul(x, 1.0)", "y = x", (shape_is("x"),)),
    Rule("by_one", "y = Div(x, 1.0)", "y = x", (shape_is("x"),)),
    Rule("above_minus_infinity", "y = Max(x, c)", "y = x", (floats("x", "c"), shape_is("x"), _no_lower)),
    Rule("by_power_of_two", "y = Div(x, c)", "y = Mul(x, inverse)", (floats("x", "c"),), _exact_reciprocal),
    *_plain_reductions(),
    *_kept_dims(),
)
