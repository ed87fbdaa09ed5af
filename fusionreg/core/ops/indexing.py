"""Gathering, scattering, sorting, selecting; and arrays made from shapes. Floor 1.

Negative indices count from the end; on the host an index out of range is an error.
"""

from __future__ import annotations

import math
from typing import Any

from .define import operator, specs_in
from .inference import Attributes, Constants, Extent, Inputs, Type, axis_of, fail, known_ints, operand, same


def wrapped(xp: Any, index: Any, extent: int) -> Any:
    """int64 indices with the negative ones counted from the end; :class:`IndexError` outside ``[-extent, extent)``.

    Only host arrays are checked: on a GPU the check would wait for the stream. There CuPy takes an element modulo the
    extent and torch ends the process's CUDA context by an assertion; constant indices are checked by inference.
    """
    index = xp.cast(index, "int64")
    if xp.name == "numpy" and index.size and not (-extent <= index.min() and index.max() < extent):
        raise IndexError(f"an index outside [{-extent}, {extent})")
    return xp.ns.where(index < 0, index + extent, index)


def _inside(indices: tuple[int, ...] | None, extent: Extent) -> None:
    """:class:`GraphError` for a constant index outside a known extent."""
    if indices and isinstance(extent, int) and not (-extent <= min(indices) and max(indices) < extent):
        bad = next(i for i in indices if not -extent <= i < extent)
        fail(f"index {bad}", f"one of [{-extent}, {extent})")


def _gather_type(inputs: Inputs, attributes: Attributes, constants: Constants) -> list[Type]:
    x, index = operand(inputs, 0), operand(inputs, 1)
    if x.shape is None or index.shape is None:
        return [(x.dtype, None)]
    axis = axis_of(attributes["axis"], len(x.shape))
    _inside(known_ints(constants, 1), x.shape[axis])
    return [(x.dtype, (*x.shape[:axis], *index.shape, *x.shape[axis + 1 :]))]


@operator("Gather", "x indices", infer=_gather_type, attributes={"axis": 0}, moves=True)
def gather(xp: Any, x: Any, indices: Any, *, axis: int) -> Any:
    axis = axis_of(axis, x.ndim)
    flat = xp.ns.reshape(wrapped(xp, indices, x.shape[axis]), (-1,))
    shape = (*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :])
    return xp.ns.reshape(xp.ns.take(x, flat, axis=axis), shape)


def _like_indices(inputs: Inputs, attributes: Attributes, constants: Constants) -> list[Type]:
    return [(operand(inputs, 0).dtype, operand(inputs, 1).shape)]


def _positions(xp: Any, x: Any, index: Any, axis: int) -> Any:
    """Flat positions in ``x`` of an index array along ``axis``, all other coordinates being the index array's own."""
    flat = 0
    for i in range(x.ndim):
        if i == axis:
            coordinate = wrapped(xp, index, x.shape[i])
        else:
            shape = [1] * x.ndim
            shape[i] = index.shape[i]
            coordinate = xp.ns.reshape(xp.arange(index.shape[i]), tuple(shape))
        flat = flat + coordinate * math.prod(x.shape[i + 1 :])
    return flat


@operator("GatherElements", "x indices", infer=_like_indices, attributes={"axis": 0}, moves=True)
def gather_elements(xp: Any, x: Any, indices: Any, *, axis: int) -> Any:
    flat = _positions(xp, x, indices, axis_of(axis, x.ndim))
    picked = xp.ns.take(xp.ns.reshape(x, (-1,)), xp.ns.reshape(flat, (-1,)), axis=0)
    return xp.ns.reshape(picked, tuple(indices.shape))


def _tuple_positions(xp: Any, shape: tuple[int, ...], indices: Any) -> Any:
    """Flat positions of index tuples (last axis) into ``shape``, in units of the remaining block."""
    flat: Any = xp.ns.zeros(tuple(indices.shape[:-1]), dtype=xp.storage("int64"), device=xp.device)
    depth = indices.shape[-1]
    for i in range(depth):
        flat = flat + wrapped(xp, indices[..., i], shape[i]) * math.prod(shape[i + 1 : depth])
    return flat


def _gather_nd_type(inputs: Inputs, attributes: Attributes, constants: Constants) -> list[Type]:
    x, index, batch = operand(inputs, 0), operand(inputs, 1), attributes["batch_dims"]
    if x.shape is None or index.shape is None or not isinstance(index.shape[-1], int):
        return [(x.dtype, None)]
    return [(x.dtype, (*index.shape[:-1], *x.shape[batch + index.shape[-1] :]))]


@operator("GatherND", "x indices", infer=_gather_nd_type, attributes={"batch_dims": 0}, moves=True)
def gather_nd(xp: Any, x: Any, indices: Any, *, batch_dims: int) -> Any:
    batches, depth = math.prod(x.shape[:batch_dims]), indices.shape[-1]
    block = tuple(x.shape[batch_dims + depth :])
    inner = tuple(x.shape[batch_dims : batch_dims + depth])
    table = xp.ns.reshape(x, (batches * math.prod(inner), math.prod(block)))
    index = xp.ns.reshape(indices, (batches, math.prod(indices.shape[batch_dims:-1]), depth))
    flat = _tuple_positions(xp, inner, index) + xp.arange(batches)[:, None] * math.prod(inner)
    rows = xp.ns.take(table, xp.ns.reshape(flat, (-1,)), axis=0)
    return xp.ns.reshape(rows, (*indices.shape[:-1], *block))


@operator("ScatterElements", "x indices updates", infer=same, attributes={"axis": 0, "reduction": "none"})
def scatter_elements(xp: Any, x: Any, indices: Any, updates: Any, *, axis: int, reduction: str) -> Any:
    """As ONNX ScatterElements; without a reduction the last of equal indices wins."""
    flat = xp.ns.reshape(_positions(xp, x, indices, axis_of(axis, x.ndim)), (-1,))
    y = xp.scatter(xp.ns.reshape(x, (-1,)), flat, xp.ns.reshape(updates, (-1,)), reduction)
    return xp.ns.reshape(y, tuple(x.shape))


@operator("ScatterND", "x indices updates", infer=same, attributes={"reduction": "none"})
def scatter_nd(xp: Any, x: Any, indices: Any, updates: Any, *, reduction: str) -> Any:
    """As ONNX ScatterND; without a reduction the last of equal indices wins."""
    depth = indices.shape[-1]
    block = math.prod(x.shape[depth:])
    rows = xp.ns.reshape(_tuple_positions(xp, tuple(x.shape), indices), (-1, 1))
    flat = xp.ns.reshape(rows * block + xp.arange(block)[None, :], (-1,))
    y = xp.scatter(xp.ns.reshape(x, (-1,)), flat, xp.ns.reshape(updates, (-1,)), reduction)
    return xp.ns.reshape(y, tuple(x.shape))


def _one_hot_type(inputs: Inputs, attributes: Attributes, constants: Constants) -> list[Type]:
    index, values, depth = operand(inputs, 0), operand(inputs, 2), known_ints(constants, 1)
    if index.shape is None:
        return [(values.dtype, None)]
    axis = axis_of(attributes["axis"], len(index.shape) + 1)
    return [(values.dtype, (*index.shape[:axis], depth[0] if depth else None, *index.shape[axis:]))]


@operator("OneHot", "indices depth values", infer=_one_hot_type, attributes={"axis": -1}, host=("depth",))
def one_hot(xp: Any, indices: Any, depth: Any, values: Any, *, axis: int) -> Any:
    """As ONNX OneHot: values[1] at the index, which may count from the end; values[0] elsewhere."""
    n = xp.ints(depth)[0]
    index = xp.cast(indices, "int64")
    index = xp.ns.expand_dims(xp.ns.where(index < 0, index + n, index), axis=axis_of(axis, indices.ndim + 1))
    shape = [1] * index.ndim
    shape[axis] = n
    return xp.ns.where(index == xp.ns.reshape(xp.arange(n), tuple(shape)), values[1], values[0])


def _nonzero_type(inputs: Inputs, attributes: Attributes, constants: Constants) -> list[Type]:
    x = operand(inputs, 0)
    return [("int64", (None if x.shape is None else len(x.shape), None))]


@operator("NonZero", "x", infer=_nonzero_type)
def nonzero(xp: Any, x: Any) -> Any:
    if x.ndim == 0:
        count = int(bool(xp.scalar(x)))
        return xp.ns.zeros((0, count), dtype=xp.storage("int64"), device=xp.device)
    return xp.cast(xp.ns.stack(list(xp.ns.nonzero(x)), axis=0), "int64")


def _top_k_type(inputs: Inputs, attributes: Attributes, constants: Constants) -> list[Type]:
    x, k = operand(inputs, 0), known_ints(constants, 1)
    if x.shape is None:
        return [(x.dtype, None), ("int64", None)]
    axis = axis_of(attributes["axis"], len(x.shape))
    extent = x.shape[axis]
    if k and isinstance(extent, int) and k[0] > extent:
        fail(f"k = {k[0]} of {extent}", f"at most {extent}")
    shape = (*x.shape[:axis], k[0] if k else None, *x.shape[axis + 1 :])
    return [(x.dtype, shape), ("int64", shape)]


@operator(
    "TopK",
    "x k",
    outputs="values indices",
    infer=_top_k_type,
    attributes={"axis": -1, "largest": 1, "sorted": 1},
    host=("k",),
)
def top_k(xp: Any, x: Any, k: Any, *, axis: int, largest: int, sorted: int) -> Any:
    """As ONNX TopK; of equal elements the lower index comes first."""
    axis = axis_of(axis, x.ndim)
    head = (slice(None),) * axis + (slice(0, xp.ints(k)[0]),)
    index = xp.cast(xp.ns.argsort(x, axis=axis, descending=bool(largest), stable=True)[head], "int64")
    return xp.take_along(x, index, axis), index


def _compress_type(inputs: Inputs, attributes: Attributes, constants: Constants) -> list[Type]:
    x, axis = operand(inputs, 0), attributes["axis"]
    if axis is None:
        return [(x.dtype, (None,))]
    if x.shape is None:
        return [(x.dtype, None)]
    axis = axis_of(axis, len(x.shape))
    return [(x.dtype, (*x.shape[:axis], None, *x.shape[axis + 1 :]))]


@operator("Compress", "x condition", infer=_compress_type, attributes={"axis": None}, moves=True, host=("condition",))
def compress(xp: Any, x: Any, condition: Any, *, axis: int | None) -> Any:
    """As ONNX Compress; without an axis (None) x is flattened first."""
    if axis is None:
        x, axis = xp.ns.reshape(x, (-1,)), 0
    keep = [i for i, flag in enumerate(xp.ints(condition)) if flag]
    return xp.ns.take(x, xp.asarray(keep, "int64"), axis=axis_of(axis, x.ndim))


@operator("ReverseSequence", "x sequence_lens", infer=same, attributes={"batch_axis": 1, "time_axis": 0}, moves=True)
def reverse_sequence(xp: Any, x: Any, sequence_lens: Any, *, batch_axis: int, time_axis: int) -> Any:
    steps = xp.arange(x.shape[time_axis])[:, None]
    lengths = xp.cast(sequence_lens, "int64")[None, :]
    source = xp.ns.where(steps < lengths, lengths - 1 - steps, steps)
    source = source if time_axis == 0 else xp.ns.permute_dims(source, (1, 0))
    source = xp.ns.reshape(source, (*source.shape, *[1] * (x.ndim - 2)))
    return xp.take_along(x, xp.ns.broadcast_to(source, tuple(x.shape)), time_axis)


def _shape_type(inputs: Inputs, attributes: Attributes, constants: Constants) -> list[Type]:
    x = operand(inputs, 0)
    if x.shape is None:
        return [("int64", (None,))]
    end = len(x.shape) if attributes["end"] is None else attributes["end"]
    return [("int64", (len(x.shape[attributes["start"] : end]),))]


@operator("Shape", "x", infer=_shape_type, attributes={"start": 0, "end": None})
def shape(xp: Any, x: Any, *, start: int, end: int | None) -> Any:
    """As ONNX Shape; ``end`` None means the rank."""
    return xp.asarray(list(x.shape[start : x.ndim if end is None else end]), "int64")


def _size_type(inputs: Inputs, attributes: Attributes, constants: Constants) -> list[Type]:
    return [("int64", ())]


@operator("Size", "x", infer=_size_type)
def size(xp: Any, x: Any) -> Any:
    return xp.asarray(math.prod(x.shape), "int64")


def _range_type(inputs: Inputs, attributes: Attributes, constants: Constants) -> list[Type]:
    dtype = operand(inputs, 0).dtype
    if not all(i in constants for i in range(3)):
        return [(dtype, (None,))]
    first, last, step = (constants[i].reshape(-1)[0].item() for i in range(3))
    return [(dtype, (max(0, math.ceil((last - first) / step)),))]


@operator("Range", "start limit delta", infer=_range_type, attributes={"stash_type": "float32"})
def range_(xp: Any, start: Any, limit: Any, delta: Any, *, stash_type: str) -> Any:
    """As ONNX Range: start + i · delta, computed wide."""
    first, last, step = xp.scalar(start), xp.scalar(limit), xp.scalar(delta)
    count = xp.arange(max(0, math.ceil((last - first) / step)))
    return xp.cast(count, xp.name_of(start)) * delta + start


def _filled_type(inputs: Inputs, attributes: Attributes, constants: Constants) -> list[Type]:
    shape, length = known_ints(constants, 0), operand(inputs, 0)
    rank = length.shape[0] if length.shape else None
    extents: tuple[Extent, ...] | None = (
        shape if shape is not None else (None,) * rank if isinstance(rank, int) else None
    )
    return [(attributes["dtype"], extents)]


@operator(
    "ConstantOfShape", "shape", infer=_filled_type, attributes={"value": 0.0, "dtype": "float32"}, host=("shape",)
)
def constant_of_shape(xp: Any, shape: Any, *, value: float, dtype: str) -> Any:
    """As ONNX ConstantOfShape; its tensor attribute is written as two: ``value`` (a number) and ``dtype``."""
    return xp.ns.full(xp.ints(shape), value, dtype=xp.dtype(dtype), device=xp.device)


def _eye_type(inputs: Inputs, attributes: Attributes, constants: Constants) -> list[Type]:
    x = operand(inputs, 0)
    return [(attributes["dtype"] or x.dtype, x.shape)]


@operator("EyeLike", "x", infer=_eye_type, attributes={"dtype": "", "k": 0})
def eye_like(xp: Any, x: Any, *, dtype: str, k: int) -> Any:
    """As ONNX EyeLike; an empty dtype means x's."""
    kind = xp.dtype(dtype) if dtype else x.dtype
    rows, columns = x.shape
    diagonal = xp.arange(columns)[None, :] - xp.arange(rows)[:, None] == k
    return xp.ns.astype(diagonal, kind)


OPS = specs_in(globals())
