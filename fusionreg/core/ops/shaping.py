"""Operators that change the shape and keep the elements. Floor 1."""

from __future__ import annotations

import math
from typing import Any

from .define import operator, specs_in
from .inference import (
    Attributes,
    Constants,
    Extent,
    Inputs,
    Type,
    axes_of,
    axis_of,
    broadcast,
    fail,
    known_ints,
    length_of,
    operand,
    plus,
    present,
    product,
    quotient,
    times,
)


def _unknown(dtype: str, rank: int | None) -> list[Type]:
    return [(dtype, None if rank is None else (None,) * rank)]


def _reshape_type(inputs: Inputs, attributes: Attributes, constants: Constants) -> list[Type]:
    x, target = operand(inputs, 0), known_ints(constants, 1)
    if target is None:
        return _unknown(x.dtype, length_of(operand(inputs, 1)))
    if x.shape is None:
        return [(x.dtype, tuple(d if d > 0 or (d == 0 and attributes["allowzero"]) else None for d in target))]
    shape: list[Extent] = []
    for i, d in enumerate(target):
        if d == 0 and not attributes["allowzero"]:
            if i >= len(x.shape):
                fail(f"0 at position {i} of {target}", f"an axis of the input of rank {len(x.shape)}")
            shape.append(x.shape[i])
        else:
            shape.append(d)
    if shape.count(-1) > 1:
        fail(f"{target}", "at most one -1")
    if -1 in shape:
        hole = shape.index(-1)
        rest = shape[:hole] + shape[hole + 1 :]
        shape[hole] = quotient(x.shape, rest)
    else:
        before, after = product(x.shape), product(shape)
        if isinstance(before, int) and isinstance(after, int) and before != after:
            fail(f"{before} elements into {tuple(shape)}", "as many elements")
    return [(x.dtype, tuple(shape))]


@operator("Reshape", "x shape", infer=_reshape_type, attributes={"allowzero": 0}, moves=True, host=("shape",))
def reshape(xp: Any, x: Any, shape: Any, *, allowzero: int) -> Any:
    target = list(xp.ints(shape))
    if not allowzero:
        target = [x.shape[i] if d == 0 else d for i, d in enumerate(target)]
    if -1 in target:
        hole = target.index(-1)
        rest = math.prod(target[:hole] + target[hole + 1 :])
        target[hole] = math.prod(x.shape) // rest if rest else 0
    return xp.ns.reshape(x, tuple(target))


def _flatten_type(inputs: Inputs, attributes: Attributes, constants: Constants) -> list[Type]:
    x, axis = operand(inputs, 0), attributes["axis"]
    if x.shape is None:
        return _unknown(x.dtype, 2)
    rank = len(x.shape)
    if not -rank <= axis <= rank:
        fail(f"axis {axis}", f"one of [{-rank}, {rank}]")
    axis = axis + rank if axis < 0 else axis
    return [(x.dtype, (product(x.shape[:axis]), product(x.shape[axis:])))]


@operator("Flatten", "x", infer=_flatten_type, attributes={"axis": 1}, moves=True)
def flatten(xp: Any, x: Any, *, axis: int) -> Any:
    axis = axis + x.ndim if axis < 0 else axis
    return xp.ns.reshape(x, (math.prod(x.shape[:axis]), math.prod(x.shape[axis:])))


def _transpose_type(inputs: Inputs, attributes: Attributes, constants: Constants) -> list[Type]:
    x, perm = operand(inputs, 0), attributes["perm"]
    if x.shape is None:
        return _unknown(x.dtype, len(perm) or None)
    perm = perm or tuple(reversed(range(len(x.shape))))
    if sorted(perm) != list(range(len(x.shape))):
        fail(f"perm {tuple(perm)} for rank {len(x.shape)}", "each axis once")
    return [(x.dtype, tuple(x.shape[p] for p in perm))]


@operator("Transpose", "x", infer=_transpose_type, attributes={"perm": ()}, moves=True)
def transpose(xp: Any, x: Any, *, perm: tuple[int, ...]) -> Any:
    """As ONNX Transpose; an empty perm reverses the axes."""
    return xp.ns.permute_dims(x, tuple(perm) or tuple(reversed(range(x.ndim))))


def _squeeze_type(inputs: Inputs, attributes: Attributes, constants: Constants) -> list[Type]:
    x, axes = operand(inputs, 0), known_ints(constants, 1)
    if x.shape is None or (axes is None and present(inputs, 1)):
        return _unknown(x.dtype, None)
    if axes is None:
        if not all(isinstance(d, int) for d in x.shape):
            return _unknown(x.dtype, None)
        return [(x.dtype, tuple(d for d in x.shape if d != 1))]
    gone = axes_of(axes, len(x.shape))
    for a in gone:
        if isinstance(x.shape[a], int) and x.shape[a] != 1:
            fail(f"axis {a} of extent {x.shape[a]}", "extent 1")
    return [(x.dtype, tuple(d for i, d in enumerate(x.shape) if i not in gone))]


@operator("Squeeze", "x axes?", infer=_squeeze_type, moves=True, host=("axes",))
def squeeze(xp: Any, x: Any, axes: Any = None) -> Any:
    gone = [i for i, d in enumerate(x.shape) if d == 1] if axes is None else axes_of(xp.ints(axes), x.ndim)
    if any(x.shape[a] != 1 for a in gone):
        raise ValueError(f"cannot squeeze axes {tuple(gone)} of shape {tuple(x.shape)}")
    return xp.ns.reshape(x, tuple(d for i, d in enumerate(x.shape) if i not in gone))


def _unsqueeze_type(inputs: Inputs, attributes: Attributes, constants: Constants) -> list[Type]:
    x, axes = operand(inputs, 0), known_ints(constants, 1)
    count = length_of(operand(inputs, 1)) if axes is None else len(axes)
    if x.shape is None or count is None:
        return _unknown(x.dtype, None)
    rank = len(x.shape) + count
    if axes is None:
        return _unknown(x.dtype, rank)
    new, old = axes_of(axes, rank), iter(x.shape)
    return [(x.dtype, tuple(1 if i in new else next(old) for i in range(rank)))]


@operator("Unsqueeze", "x axes", infer=_unsqueeze_type, moves=True, host=("axes",))
def unsqueeze(xp: Any, x: Any, axes: Any) -> Any:
    given = xp.ints(axes)
    new, old = axes_of(given, x.ndim + len(given)), iter(x.shape)
    return xp.ns.reshape(x, tuple(1 if i in new else next(old) for i in range(x.ndim + len(given))))


def _concat_type(inputs: Inputs, attributes: Attributes, constants: Constants) -> list[Type]:
    values = [v for v in inputs if v is not None]
    first = operand(inputs, 0)
    known = [v.shape for v in values if v.shape is not None]
    if not known:
        return _unknown(first.dtype, None)
    rank = len(known[0])
    if any(len(s) != rank for s in known):
        fail(f"ranks {[len(s) for s in known]}", "equal ranks")
    axis = axis_of(attributes["axis"], rank)
    shape: list[Extent] = []
    for i in range(rank):
        column = [s[i] for s in known]
        if i == axis:
            extent: Extent = 0
            for d in column:
                extent = plus(extent, d)
            shape.append(extent if len(known) == len(values) else None)
        else:
            numbers = {d for d in column if isinstance(d, int)}
            if len(numbers) > 1:
                fail(f"extents {sorted(numbers)} on axis {i}", "equal extents")
            shape.append(numbers.pop() if numbers else column[0])
    return [(first.dtype, tuple(shape))]


@operator("Concat", "args*", infer=_concat_type, attributes={"axis": "<required>"}, moves=True)
def concat(xp: Any, *args: Any, axis: int) -> Any:
    return xp.ns.concat(list(args), axis=axis)


def split_sizes(extent: int, count: int) -> tuple[int, ...]:
    """Equal parts, the last one smaller where they do not divide."""
    part = -(-extent // count)
    return (*[part] * (count - 1), extent - part * (count - 1))


def _split_type(inputs: Inputs, attributes: Attributes, constants: Constants) -> list[Type]:
    x, sizes, count = operand(inputs, 0), known_ints(constants, 1), attributes["num_outputs"]
    if count == 0 and sizes is None and present(inputs, 1):
        count = length_of(operand(inputs, 1)) or 0
    if x.shape is None:
        return [(x.dtype, None)] * (len(sizes) if sizes else count or 1)
    axis = axis_of(attributes["axis"], len(x.shape))
    extent = x.shape[axis]
    parts: tuple[Extent, ...]
    if sizes is not None:
        if isinstance(extent, int) and sum(sizes) != extent:
            fail(f"split {sizes} of extent {extent}", "sizes that sum to it")
        parts = sizes
    elif isinstance(extent, int) and count and not present(inputs, 1):
        parts = split_sizes(extent, count)
    else:
        parts = (None,) * (count or 1)
    return [(x.dtype, (*x.shape[:axis], p, *x.shape[axis + 1 :])) for p in parts]


@operator(
    "Split",
    "x split?",
    outputs="outs*",
    infer=_split_type,
    attributes={"axis": 0, "num_outputs": 0},
    moves=True,
    host=("split",),
)
def split(xp: Any, x: Any, split: Any = None, *, axis: int, num_outputs: int) -> Any:
    """As ONNX Split (opset 18); one of ``split`` and ``num_outputs`` is given."""
    axis = axis_of(axis, x.ndim)
    sizes = split_sizes(x.shape[axis], num_outputs) if split is None else xp.ints(split)
    parts, start = [], 0
    for size in sizes:
        parts.append(x[(slice(None),) * axis + (slice(start, start + size),)])
        start += size
    return tuple(parts)


def slice_bounds(start: int, end: int, step: int, extent: int) -> tuple[int, int]:
    """First index and length of an ONNX slice: out-of-range bounds are clamped."""
    if step == 0:
        fail("a step of 0", "a non-zero step")
    first, stop, _ = slice(start, end if step > 0 or end >= -extent else None, step).indices(extent)
    return first, max(0, -(-(stop - first) // step))


def _slice_type(inputs: Inputs, attributes: Attributes, constants: Constants) -> list[Type]:
    x = operand(inputs, 0)
    if x.shape is None:
        return _unknown(x.dtype, None)
    starts, ends = known_ints(constants, 1), known_ints(constants, 2)
    axes, steps = known_ints(constants, 3), known_ints(constants, 4)
    if axes is None and present(inputs, 3):
        return _unknown(x.dtype, len(x.shape))
    count = len(starts) if starts is not None else len(ends) if ends is not None else length_of(operand(inputs, 1))
    if axes is None and count is None:
        return _unknown(x.dtype, len(x.shape))
    over = axes_of(range(count or 0) if axes is None else axes, len(x.shape))
    shape: list[Extent] = list(x.shape)
    for i, axis in enumerate(over):
        if starts is None or ends is None or (steps is None and present(inputs, 4)):
            shape[axis] = None
            continue
        step = steps[i] if steps is not None else 1
        extent = x.shape[axis]
        if isinstance(extent, int):
            shape[axis] = slice_bounds(starts[i], ends[i], step, extent)[1]
        elif not (starts[i] == 0 and ends[i] >= 2**31 - 1 and step == 1):  # the whole axis keeps its symbol
            shape[axis] = None
    return [(x.dtype, tuple(shape))]


@operator(
    "Slice", "x starts ends axes? steps?", infer=_slice_type, moves=True, host=("starts", "ends", "axes", "steps")
)
def slice_(xp: Any, x: Any, starts: Any, ends: Any, axes: Any = None, steps: Any = None) -> Any:
    first, last = xp.ints(starts), xp.ints(ends)
    over = axes_of(range(len(first)) if axes is None else xp.ints(axes), x.ndim)
    by = (1,) * len(first) if steps is None else xp.ints(steps)
    for start, end, axis, step in zip(first, last, over, by, strict=True):
        begin, length = slice_bounds(start, end, step, x.shape[axis])
        head = (slice(None),) * axis
        if step > 0:
            x = x[(*head, slice(begin, begin + (length - 1) * step + 1 if length else begin, step))]
        else:
            low = begin + (length - 1) * step
            x = x[(*head, slice(low, begin + 1, -step) if length else slice(0, 0))]
            x = xp.ns.flip(x, axis=axis)
    return x


def _expand_type(inputs: Inputs, attributes: Attributes, constants: Constants) -> list[Type]:
    x, target = operand(inputs, 0), known_ints(constants, 1)
    if target is not None:
        return [(x.dtype, broadcast(x.shape, target))]
    length = length_of(operand(inputs, 1))
    return _unknown(x.dtype, None if length is None or x.shape is None else max(length, len(x.shape)))


@operator("Expand", "x shape", infer=_expand_type, moves=True, host=("shape",))
def expand(xp: Any, x: Any, shape: Any) -> Any:
    """As ONNX Expand: both ways, so an extent 1 in ``shape`` keeps x's."""
    return xp.ns.broadcast_to(x, broadcast(tuple(x.shape), xp.ints(shape)))


def _tile_type(inputs: Inputs, attributes: Attributes, constants: Constants) -> list[Type]:
    x, repeats = operand(inputs, 0), known_ints(constants, 1)
    if x.shape is None or repeats is None:
        return _unknown(x.dtype, None if x.shape is None else len(x.shape))
    return [(x.dtype, tuple(times(d, r) for d, r in zip(x.shape, repeats, strict=True)))]


@operator("Tile", "x repeats", infer=_tile_type, moves=True, host=("repeats",))
def tile(xp: Any, x: Any, repeats: Any) -> Any:
    return xp.ns.tile(x, xp.ints(repeats))


OPS = specs_in(globals())
