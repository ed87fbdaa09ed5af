"""Follows extents through the little integer tensors that models compute shapes with.

``Shape → Gather → Concat → Reshape`` and its kin: the target of the Reshape is known by name although no constant
holds it. Without this, values of one batch axis would end up with many names, and nothing would match across them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...core.ir import Dim, Shape, Value
from ...core.ops.inference import broadcast
from .monomials import product, quotient

#: Longest tensor that is followed: no shape is longer.
_LONGEST = 64

#: No axis is this long: a slice to here is a slice to the end.
_END = 10**9


@dataclass(frozen=True, slots=True)
class Extents:
    """Elements of an integer or bool tensor of rank 0 or 1; None for one that is unknown."""

    items: tuple[Dim | bool | None, ...]
    scalar: bool = False


def known(array: np.ndarray | None) -> Extents | None:
    """The elements of a constant, if it is one that shapes are computed with."""
    if array is None or array.ndim > 1 or array.size > _LONGEST or array.dtype.kind not in "iub":
        return None
    return Extents(tuple(v.item() for v in array.reshape(-1)), array.ndim == 0)


def follow(
    op: str, inputs: Sequence[Extents | None], types: Sequence[Value | None], attrs: Mapping[str, Any]
) -> Extents | None:
    """Elements of the first output; None when they are not followed."""
    rule = _RULES.get(op)
    if rule is None:
        return None
    try:
        found = rule(inputs, types, attrs)
    except (IndexError, ValueError, TypeError, AttributeError):  # an operand that is not followed, or malformed
        return None
    return found if found is not None and len(found.items) <= _LONGEST else None


def target(
    op: str, inputs: Sequence[Extents | None], types: Sequence[Value | None], attrs: Mapping[str, Any]
) -> tuple[Dim | None, ...] | None:
    """Shape of the first output of an operator that takes it, or part of it, as an operand; None when not followed."""
    if op == "Slice":
        return _sliced(inputs, types[0])
    if op == "Flatten":
        return _flattened(types[0], int(attrs.get("axis", 1)))
    index = 0 if op == "ConstantOfShape" else 1
    if op not in ("Reshape", "Expand", "ConstantOfShape") or len(inputs) <= index or inputs[index] is None:
        return None
    wanted = inputs[index].items  # type: ignore[union-attr]
    shape = types[0].shape if types[0] is not None else None
    if op == "ConstantOfShape":
        return tuple(wanted)
    if op == "Expand":
        return None if shape is None else broadcast(shape, tuple(wanted))
    return _reshaped(shape, wanted, bool(attrs.get("allowzero", 0)))


def _flattened(x: Value | None, axis: int) -> tuple[Dim | None, ...] | None:
    if x is None or x.shape is None:
        return None
    axis = axis + len(x.shape) if axis < 0 else axis
    return product(x.shape[:axis]), product(x.shape[axis:])


def _sliced(inputs: Sequence[Extents | None], x: Value | None) -> tuple[Dim | None, ...] | None:
    """A named axis keeps its name where the whole of it is taken; "to the end" has many spellings (tf2onnx: 10⁹)."""
    if x is None or x.shape is None or any(o is None for o in inputs[1:]):
        return None
    starts, ends, *rest = (o.items for o in inputs[1:] if o is not None)
    axes = rest[0] if rest else tuple(range(len(starts)))
    steps = rest[1] if len(rest) > 1 else (1,) * len(starts)
    dims: list[Dim | None] = list(x.shape)
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=False):
        if not (isinstance(start, int) and isinstance(end, int) and isinstance(axis, int) and isinstance(step, int)):
            return None
        extent = dims[axis]
        if isinstance(extent, int):
            dims[axis] = len(range(extent)[start:end:step])
        elif not (start == 0 and end >= _END and step == 1):
            dims[axis] = None
    return tuple(dims)


def _reshaped(shape: Shape | None, wanted: Sequence[Any], allowzero: bool) -> tuple[Dim | None, ...] | None:
    dims: list[Dim | None] = []
    for i, d in enumerate(wanted):
        if d == 0 and not allowzero:
            dims.append(shape[i] if shape is not None and i < len(shape) else None)
        else:
            dims.append(d)
    if -1 in dims:
        at = dims.index(-1)
        rest = [d for d in dims if d != -1]
        dims[at] = None if shape is None or None in rest else quotient(shape, rest)
    return tuple(dims)


Rule = Callable[[Any, Any, Any], Extents | None]


def _shape(inputs: Any, types: Any, attrs: Any) -> Extents:
    return Extents(tuple(types[0].shape[attrs.get("start", 0) : attrs.get("end", None)]))


def _size(inputs: Any, types: Any, attrs: Any) -> Extents:
    return Extents((product(types[0].shape),), True)


def _gather(inputs: Any, types: Any, attrs: Any) -> Extents:
    return Extents(tuple(inputs[0].items[i] for i in inputs[1].items), inputs[1].scalar)


def _slice(inputs: Any, types: Any, attrs: Any) -> Extents:
    step = inputs[4].items[0] if len(inputs) > 4 else 1
    (start,), (end,) = inputs[1].items, inputs[2].items
    return Extents(inputs[0].items[slice(start, end, step)])


def _concat(inputs: Any, types: Any, attrs: Any) -> Extents:
    return Extents(tuple(i for x in inputs for i in x.items))


def _same(inputs: Any, types: Any, attrs: Any) -> Extents:
    return inputs[0]


def _cast(inputs: Any, types: Any, attrs: Any) -> Extents | None:
    return inputs[0] if str(attrs.get("to", "")).startswith("int") else None


def _vector(inputs: Any, types: Any, attrs: Any) -> Extents | None:
    return Extents(inputs[0].items) if inputs[0].scalar else None


def _scalar(inputs: Any, types: Any, attrs: Any) -> Extents | None:
    return Extents(inputs[0].items, True) if len(inputs[0].items) == 1 else None


def _reshape(inputs: Any, types: Any, attrs: Any) -> Extents | None:
    rank = len(inputs[1].items)
    return Extents(inputs[0].items, rank == 0) if rank <= 1 else None


def _fill(inputs: Any, types: Any, attrs: Any) -> Extents | None:
    value = attrs.get("value", 0)
    (length,) = inputs[0].items
    return Extents((int(value),) * length) if attrs.get("dtype") == "int64" else None


def _pairs(inputs: Any) -> tuple[list[tuple[Any, ...]], bool]:
    """Elements of all operands, broadcast; and whether the result is a scalar."""
    length = max(len(x.items) for x in inputs)
    columns = [x.items * length if len(x.items) == 1 else x.items for x in inputs]
    return list(zip(*columns, strict=True)), all(x.scalar for x in inputs)


def _elementwise(how: Callable[..., Any]) -> Rule:
    def rule(inputs: Any, types: Any, attrs: Any) -> Extents:
        rows, scalar = _pairs(inputs)
        return Extents(tuple(None if None in row else how(*row) for row in rows), scalar)

    return rule


def _add(a: Any, b: Any) -> Any:
    if isinstance(a, str) or isinstance(b, str):
        return b if a == 0 else a if b == 0 else None
    return a + b


def _sub(a: Any, b: Any) -> Any:
    if isinstance(a, str) or isinstance(b, str):
        return 0 if a == b else a if b == 0 else None
    return a - b


def _mul(a: Any, b: Any) -> Any:
    if isinstance(a, str) or isinstance(b, str):
        negative = any(isinstance(v, int) and v < 0 for v in (a, b))
        return None if negative else product((a, b))
    return a * b


def _div(a: Any, b: Any) -> Any:
    if isinstance(a, str) or isinstance(b, str):
        return quotient((a,), (b,)) if b and not (isinstance(b, int) and b < 0) else None
    return int(a / b) if b else None  # ONNX truncates towards zero


def _equal(a: Any, b: Any) -> Any:
    if a == b:
        return True
    number = a if isinstance(b, str) else b
    if isinstance(a, str) or isinstance(b, str):
        return False if isinstance(number, int) and number < 0 else None  # no extent is negative
    return False


def _where(inputs: Any, types: Any, attrs: Any) -> Extents:
    rows, scalar = _pairs(inputs)
    return Extents(tuple(None if c is None else a if c else b for c, a, b in rows), scalar)


_RULES: Mapping[str, Rule] = {
    "Shape": _shape,
    "Size": _size,
    "Gather": _gather,
    "Slice": _slice,
    "Concat": _concat,
    "Identity": _same,
    "Cast": _cast,
    "Unsqueeze": _vector,
    "Squeeze": _scalar,
    "Reshape": _reshape,
    "ConstantOfShape": _fill,
    "Add": _elementwise(_add),
    "Sub": _elementwise(_sub),
    "Mul": _elementwise(_mul),
    "Div": _elementwise(_div),
    "Equal": _elementwise(_equal),
    "Where": _where,
}
