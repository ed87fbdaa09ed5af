"""Tensors made from numbers: constants where export knows the size, Expand and Range where it does not."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from fusionreg.core.frozen import FrozenDict

from ..emitter import Emitter, V

#: Above this many elements a filled tensor is an Expand of one number instead of stored data.
_STORED = 1024


def filled(e: Emitter, value: Any, sizes: Sequence[Any]) -> V:
    """A tensor of one number in the recorded dtype and shape."""
    dtype, shape = e.out.dtype, e.out.shape
    if (
        all(isinstance(d, int) for d in shape)
        and not isinstance(value, V)
        and math.prod(int(d) for d in shape) <= _STORED
    ):
        return e.const(value, dtype, [int(d) for d in shape])
    items = [d if isinstance(d, int) else s for s, d in zip(sizes, shape, strict=True)]
    return e.op("Expand", e.operand(value, dtype), e.ints(items), shape=shape)


def full(e: Emitter, size: Sequence[Any], fill_value: Any, **_: Any) -> V:
    return filled(e, fill_value, size)


def fill_of(value: Any) -> Any:
    """zeros, ones, and empty, whose contents nothing may rely on."""

    def emit(e: Emitter, size: Sequence[Any], **_: Any) -> V:
        return filled(e, value, size)

    return emit


def like(value: Any) -> Any:
    def emit(e: Emitter, self: V, **_: Any) -> V:
        return filled(e, value, [e.size(self, i) for i in range(self.rank)])

    return emit


def full_like(e: Emitter, self: V, fill_value: Any, **_: Any) -> V:
    return filled(e, fill_value, [e.size(self, i) for i in range(self.rank)])


def fill(e: Emitter, self: V, value: Any, **_: Any) -> V:
    return filled(e, value, [e.size(self, i) for i in range(self.rank)])


def new_full(e: Emitter, self: V, size: Sequence[Any], fill_value: Any, **_: Any) -> V:
    return filled(e, fill_value, size)


def new_of(value: Any) -> Any:
    def emit(e: Emitter, self: V, size: Sequence[Any], **_: Any) -> V:
        return filled(e, value, size)

    return emit


def scalar_tensor(e: Emitter, s: Any, **_: Any) -> V:
    return e.operand(s, e.out.dtype)


def arange(e: Emitter, end: Any, start: Any = 0, step: Any = 1, **_: Any) -> V:
    dtype = e.out.dtype
    fixed = not any(isinstance(v, V) for v in (start, end, step))
    if fixed:
        e.stored(math.ceil((end - start) / step))
        return e.const(
            np.arange(start, end, step, dtype=np.float64 if isinstance(start + end + step, float) else np.int64), dtype
        )
    inner = "int64" if not dtype.startswith(("float", "bfloat")) else "float32" if dtype != "float64" else dtype
    made = e.op("Range", *(e.operand(v, inner) for v in (start, end, step)), shape=e.out.shape)
    return e.cast(made, dtype)


def linspace(e: Emitter, start: Any, end: Any, steps: int, **_: Any) -> V:
    e.stored(steps)
    return e.const(np.linspace(start, end, steps), e.out.dtype)


def eye(e: Emitter, n: Any, m: Any = None, **_: Any) -> V:
    columns = n if m is None else m
    if not isinstance(n, int) or not isinstance(columns, int):
        raise e.refuse("an identity matrix of symbolic size", "a size known at export")
    e.stored(n, columns)
    return e.const(np.eye(n, columns), e.out.dtype)


def tri_indices(lower: bool) -> Any:
    def emit(e: Emitter, row: int, col: int, offset: int = 0, **_: Any) -> V:
        e.stored(row, col)
        rows, columns = np.tril_indices(row, offset, col) if lower else np.triu_indices(row, offset, col)
        return e.const(np.stack([rows, columns]), e.out.dtype)

    return emit


TABLE: FrozenDict[str, Any] = FrozenDict(
    {
        "aten.full.default": full,
        "aten.zeros.default": fill_of(0),
        "aten.ones.default": fill_of(1),
        "aten.empty.memory_format": fill_of(0),
        "aten.zeros_like.default": like(0),
        "aten.ones_like.default": like(1),
        "aten.empty_like.default": like(0),
        "aten.full_like.default": full_like,
        "aten.fill.Scalar": fill,
        "aten.fill.Tensor": fill,
        "aten.zero.default": like(0),
        "aten.new_zeros.default": new_of(0),
        "aten.new_ones.default": new_of(1),
        "aten.new_empty.default": new_of(0),
        "aten.new_full.default": new_full,
        "aten.scalar_tensor.default": scalar_tensor,
        "aten.arange.default": arange,
        "aten.arange.start": arange,
        "aten.arange.start_step": arange,
        "aten.linspace.default": linspace,
        "aten.eye.default": eye,
        "aten.eye.m": eye,
        "aten.tril_indices.default": tri_indices(True),
        "aten.triu_indices.default": tri_indices(False),
    }
)
