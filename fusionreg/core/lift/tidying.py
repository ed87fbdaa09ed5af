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


def _known_target(site: Site) -> Mapping[str, Any] | None:
    """The target as a constant, where the result's extents are known but for one: what computed it can go."""
    import numpy as np

    shape = site.shape("y")
    if shape is None or site.array("s") is not None or any(d == 0 for d in shape):
        return None
    target = [d if isinstance(d, int) else -1 for d in shape]
    if target.count(-1) > (1 if site.found.root.op == "Reshape" else 0):
        return None
    return {"target": np.asarray(target, np.int64)}


def _batched_swap(site: Site) -> Mapping[str, Any] | None:
    """Leading axes merged, the last two swapped, and split again: a swap of the last two axes."""
    x, middle, y = site.shape("x"), site.shape("r"), site.shape("y")
    if x is None or middle is None or y is None or len(x) < 3 or len(middle) != 3:
        return None
    if middle[1:] != x[-2:] or y != (*x[:-2], x[-1], x[-2]) or _permutation(site.attribute("p"), 3) != (0, 2, 1):
        return None
    return {"perm": (*range(len(x) - 2), len(x) - 1, len(x) - 2)}


def _merged_swap(site: Site) -> Mapping[str, Any] | None:
    """The same where the leading axes were others before: they are put together first."""
    import numpy as np

    middle, y = site.shape("r"), site.shape("y")
    if middle is None or y is None or len(middle) != 3 or len(y) < 3 or not all(isinstance(d, int) for d in y):
        return None
    if y[-2:] != (middle[2], middle[1]) or _permutation(site.attribute("p"), 3) != (0, 2, 1):
        return None
    target = np.asarray((*y[:-2], y[-1], y[-2]), np.int64)
    return {"perm": (*range(len(y) - 2), len(y) - 1, len(y) - 2), "target": target}


def _one_of(site: Site) -> Mapping[str, Any] | None:
    """A slice of one along the axis that is dropped then: an element of it."""
    import numpy as np

    starts, ends, axes, dropped, shape = (*map(site.ints, ("starts", "ends", "axes", "dropped")), site.shape("x"))
    if not starts or not ends or not axes or not dropped or shape is None or not len(starts) == len(dropped) == 1:
        return None
    axis, extent, start = axes[0] % len(shape), shape[axes[0]], starts[0]
    if dropped[0] % len(shape) != axis or not isinstance(extent, int):
        return None
    begin, end = (min(max(i + extent if i < 0 else i, 0), extent) for i in (start, ends[0]))
    return {"index": np.asarray(begin, np.int64), "axis": axis} if end - begin == 1 else None


def _above_minus_one(site: Site) -> Mapping[str, Any] | None:
    """A whole number is above -1 where it is 0 or more."""
    import numpy as np

    c, row = site.array("c"), DTYPES[site.value("x").dtype]
    whole = c is not None and not row.floating and bool((c == -1).all())
    return {"zero": np.zeros_like(c)} if whole else None


def _only(site: Site) -> Mapping[str, Any] | None:
    """The element of an axis that has one: x without the axis."""
    import numpy as np

    index, shape, axis = site.array("i"), site.shape("x"), site.attribute("axis")
    if index is None or index.ndim or int(index) not in (0, -1) or shape is None or shape[axis] != 1:
        return None
    return {"axes": np.asarray([axis % len(shape)], np.int64)}


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


def _rows(site: Site) -> Mapping[str, Any] | None:
    """Rows of a matrix, put in one axis for a product and taken apart again: x with the axes that y has."""
    import numpy as np

    flat, product, y = site.shape("r"), site.shape("p"), site.shape("y")
    if flat is None or product is None or y is None or site.rank("w") != 2 or len(flat) != 2 or len(y) < 3:
        return None
    if not all(isinstance(d, int) for d in (*flat, *y)) or y[-1] != product[-1]:
        return None
    return {"target": np.asarray((*y[:-1], flat[1]), np.int64)}


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
    Rule("sum_of_two", "y = Sum(a, b)", "y = Add(a, b)"),
    Rule("dropout", "y = Dropout(x, seed=seed)", "y = x"),
    Rule("dropout", "y = Dropout(x, ratio, seed=seed)", "y = x"),
    Rule("dropout", "y = Dropout(x, ratio, False, seed=seed)", "y = x"),
    Rule("dropout", "y = Dropout(x, None, False, seed=seed)", "y = x"),
    Rule("cast_to_itself", "y = Cast(x, to=kind)", "y = x"),
    Rule("reshape_to_itself", "y = Reshape(x, s, allowzero=zero)", "y = x", (shape_is("x"),)),
    Rule("expand_to_itself", "y = Expand(x, s)", "y = x", (shape_is("x"),)),
    Rule("squeezed_back", "y = Unsqueeze(Squeeze(x, a), b)", "y = x", (shape_is("x"),), shared=True),
    Rule("squeezed_back", "y = Squeeze(Unsqueeze(x, a), b)", "y = x", (shape_is("x"),), shared=True),
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
    Rule(
        "transpose_in_a_batch",
        "r = Reshape(x, s1)\ny = Reshape(Transpose(r, perm=p), s2)",
        "y = Transpose(x, perm=perm)",
        (),
        _batched_swap,
        shared=True,
    ),
    Rule(
        "transpose_in_a_batch",
        "r = Reshape(x, s1)\ny = Reshape(Transpose(r, perm=p), s2)",
        "y = Transpose(Reshape(x, target), perm=perm)",
        (),
        _merged_swap,
        shared=True,
    ),
    Rule(
        "rows_of_a_product",
        "r = Reshape(x, s1)\np = MatMul(r, w, transB=t)\ny = Reshape(Add(p, b), s2)",
        "y = Add(MatMul(Reshape(x, target), w, transB=t), b)",
        (lambda site: site.rank("b") == 1,),
        _rows,
    ),
    Rule(
        "rows_of_a_product",
        "r = Reshape(x, s1)\np = MatMul(r, w, transB=t)\ny = Reshape(p, s2)",
        "y = MatMul(Reshape(x, target), w, transB=t)",
        (),
        _rows,
    ),
    *(
        Rule(
            "one_of",
            f"y = Squeeze(Slice(x, starts, ends, axes{step}), dropped)",
            "y = Gather(x, index, axis=axis)",
            derive=_one_of,
        )
        for step in ("", ", (1,)")
    ),
    # what a 0 means says nothing where there is none
    Rule(
        "no_zero",
        "y = Reshape(x, s, allowzero=1)",
        "y = Reshape(x, s)",
        (lambda site: 0 not in (site.ints("s") or (0,)),),
    ),
    Rule("known_target", "y = Reshape(x, s, allowzero=zero)", "y = Reshape(x, target)", (), _known_target),
    Rule("known_target", "y = Expand(x, s)", "y = Expand(x, target)", (), _known_target),
    Rule("nothing_added", "y = Concat(a, b, axis=axis)", "y = a", (floats("a", "b"), shape_is("a"))),
    # baddbmm of torch with beta=0, as it is exported
    Rule("plus_zero", "x = Mul(MatMul(a, b, transB=t), c)\ny = Add(x, 0.0)", "y = Mul(MatMul(a, b, transB=t), c)"),
    Rule("times_one", "y = Mul(x, 1.0)", "y = x", (shape_is("x"),)),
    Rule("by_one", "y = Div(x, 1.0)", "y = x", (shape_is("x"),)),
    Rule("above_minus_infinity", "y = Max(x, c)", "y = x", (floats("x", "c"), shape_is("x"), _no_lower)),
    Rule("by_power_of_two", "y = Div(x, c)", "y = Mul(x, inverse)", (floats("x", "c"),), _exact_reciprocal),
    *_plain_reductions(),
    *_kept_dims(),
)

LATE: tuple[Rule, ...] = (
    Rule("from_zero", "y = Greater(x, c)", "y = GreaterOrEqual(x, zero)", derive=_above_minus_one),
    Rule("below_zero", "y = LessOrEqual(x, c)", "y = Less(x, zero)", derive=_above_minus_one),
    Rule("only_element", "y = Gather(x, i, axis=axis)", "y = Squeeze(x, axes)", derive=_only),
)
"""How fusions write what people write otherwise, too."""
