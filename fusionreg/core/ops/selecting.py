"""Operators whose result decides its own extent, and those that put windows back. Floor 1.

NonMaxSuppression and Unique compare on the host: what they give has an extent that only the values tell.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from .convolution import pad_spatial, per_axis
from .define import operator, specs_in
from .inference import Attributes, Constants, Extent, Inputs, Type, axes_of, axis_of, fail, known_ints, operand, product


def _selection_type(inputs: Inputs, attributes: Attributes, constants: Constants) -> list[Type]:
    for i in (0, 1):
        shape = operand(inputs, i).shape
        if shape is not None and len(shape) != 3:
            fail(f"rank {len(shape)}", "rank 3: [batches boxes 4] and [batches classes boxes]")
    return [("int64", (None, 3))]


@operator(
    "NonMaxSuppression",
    "boxes scores max_output_boxes_per_class? iou_threshold? score_threshold?",
    outputs="selected",
    infer=_selection_type,
    attributes={"center_point_box": 0},
    host=("boxes", "scores", "max_output_boxes_per_class", "iou_threshold", "score_threshold"),
)
def non_max_suppression(
    xp: Any,
    boxes: Any,
    scores: Any,
    most: Any = None,
    iou_threshold: Any = None,
    score_threshold: Any = None,
    *,
    center_point_box: int,
) -> Any:
    """As ONNX NonMaxSuppression: rows (batch, class, box), the best score first, of equal ones the lower box."""
    import numpy as np

    count = max(0, xp.ints(most)[0]) if most is not None and math.prod(most.shape) else 0
    overlap = 0.0 if iou_threshold is None else xp.scalar(iou_threshold)
    floor = None if score_threshold is None else xp.scalar(score_threshold)
    places, values = (_plain(xp.to_numpy(v)) for v in (boxes, scores))
    rows: list[tuple[int, int, int]] = []
    for batch in range(values.shape[0] if count else 0):
        corners = _corners(places[batch], center_point_box)
        for label in range(values.shape[1]):
            score = values[batch, label]
            order = np.argsort(-score, kind="stable")
            left = order if floor is None else order[score[order] > floor]
            kept = 0
            while len(left) and kept < count:
                best, left = left[0], left[1:]
                rows.append((batch, label, int(best)))
                kept += 1
                left = left[~(_overlaps(corners, best, left) > overlap)]
    return xp.asarray(np.asarray(rows, np.int64).reshape(-1, 3))


def _plain(values: Any) -> Any:
    """float32 for the small floats that NumPy compares slowly or not at all."""
    return values.astype("float32") if values.dtype.itemsize < 4 else values


def _corners(boxes: Any, center: int) -> Any:
    """(low 0, low 1, high 0, high 1) of every box, whichever corner came first."""
    import numpy as np

    if center:
        half = boxes[:, 2:] / 2
        return np.concatenate([boxes[:, :2] - half, boxes[:, :2] + half], axis=1)
    return np.concatenate([np.minimum(boxes[:, :2], boxes[:, 2:]), np.maximum(boxes[:, :2], boxes[:, 2:])], axis=1)


def _overlaps(corners: Any, one: int, others: Any) -> Any:
    """Intersection over union of a box with others; 0 where either is empty."""
    import numpy as np

    a, b = corners[one], corners[others]
    sides = np.minimum(a[2:], b[:, 2:]) - np.maximum(a[:2], b[:, :2])
    shared = np.where((sides > 0).all(axis=1), sides[:, 0] * sides[:, 1], 0)
    area, areas = np.prod(a[2:] - a[:2]), np.prod(b[:, 2:] - b[:, :2], axis=1)
    union = area + areas - shared
    sound = (shared > 0) & (area > 0) & (areas > 0) & (union > 0)
    return np.where(sound, shared / np.where(sound, union, 1), 0)


def _unique_type(inputs: Inputs, attributes: Attributes, constants: Constants) -> list[Type]:
    x, axis = operand(inputs, 0), attributes["axis"]
    vector: Type = ("int64", (None,))
    if axis is None:
        return [(x.dtype, (None,)), vector, ("int64", (None if x.shape is None else product(x.shape),)), vector]
    if x.shape is None:
        return [(x.dtype, None), vector, vector, vector]
    axis = axis_of(axis, len(x.shape))
    shape = (*x.shape[:axis], None, *x.shape[axis + 1 :])
    return [(x.dtype, shape), vector, ("int64", (x.shape[axis],)), vector]


@operator(
    "Unique",
    "x",
    outputs="y indices? inverse_indices? counts?",
    infer=_unique_type,
    attributes={"axis": None, "sorted": 1},
    moves=True,
    host=("x",),
)
def unique(xp: Any, x: Any, *, axis: int | None, sorted: int) -> Any:
    """As ONNX Unique: of equal elements (or slices along ``axis``) the first; sorted, or in order of occurrence."""
    import numpy as np

    values = xp.to_numpy(x)
    if axis is None:
        values, axis = values.reshape(-1), 0
    axis = axis_of(axis, values.ndim)
    keys = _plain(values) if values.dtype.kind not in "biu" else values
    _, first, inverse, counts = np.unique(
        keys, return_index=True, return_inverse=True, return_counts=True, axis=None if keys.ndim == 1 else axis
    )
    inverse = inverse.reshape(-1)
    if not sorted:
        order = np.argsort(first, kind="stable")
        rank = np.empty_like(order)
        rank[order] = np.arange(len(order))
        first, counts, inverse = first[order], counts[order], rank[inverse]
    found = (np.take(values, first, axis=axis), *(v.astype(np.int64) for v in (first, inverse, counts)))
    return tuple(xp.asarray(v) for v in found)


def _unpool_shape(shape: tuple[Extent, ...], attributes: Mapping[str, Any]) -> list[Extent]:
    kernel = tuple(attributes["kernel_shape"])
    n = len(kernel)
    strides, pads = per_axis(attributes["strides"], n), per_axis(attributes["pads"], 2 * n, 0)
    return [
        (d - 1) * s - (pads[i] + pads[n + i]) + k if isinstance(d, int) else None
        for i, (d, s, k) in enumerate(zip(shape[2:], strides, kernel, strict=True))
    ]


def _unpool_type(inputs: Inputs, attributes: Attributes, constants: Constants) -> list[Type]:
    x, wanted = operand(inputs, 0), known_ints(constants, 2)
    if wanted is not None:
        return [(x.dtype, wanted)]
    if x.shape is None:
        return [(x.dtype, None)]
    if len(inputs) > 2 and inputs[2] is not None:
        return [(x.dtype, (None,) * len(x.shape))]
    return [(x.dtype, (*x.shape[:2], *_unpool_shape(x.shape, attributes)))]


@operator(
    "MaxUnpool",
    "x indices output_shape?",
    infer=_unpool_type,
    attributes={"kernel_shape": "<required>", "pads": (), "strides": ()},
    host=("output_shape",),
    moves=True,
)
def max_unpool(xp: Any, x: Any, indices: Any, output_shape: Any = None, **attributes: Any) -> Any:
    """As ONNX MaxUnpool: indices count in the shape that the geometry tells; output_shape adds zeros after it."""
    own = (*x.shape[:2], *(int(d or 0) for d in _unpool_shape(tuple(x.shape), attributes)))
    flat = xp.full((math.prod(own),), 0, x)
    flat = xp.scatter(flat, xp.cast(xp.ns.reshape(indices, (-1,)), "int64"), xp.ns.reshape(x, (-1,)), "none")
    y = xp.ns.reshape(flat, own)
    if output_shape is None:
        return y
    return pad_spatial(xp, y, [(0, w - d) for w, d in zip(xp.ints(output_shape), own, strict=True)], 0)


def _col2im_type(inputs: Inputs, attributes: Attributes, constants: Constants) -> list[Type]:
    x, image, block = operand(inputs, 0), known_ints(constants, 1), known_ints(constants, 2)
    if x.shape is None:
        return [(x.dtype, None)]
    columns, channels = x.shape[1], None
    if block is not None and isinstance(columns, int):
        if columns % math.prod(block):
            fail(f"{columns} rows", f"a multiple of the block's {math.prod(block)} elements")
        channels = columns // math.prod(block)
    length = operand(inputs, 1).shape
    n = len(image) if image is not None else length[0] if length else None
    spatial: Any = image if image is not None else (None,) * n if isinstance(n, int) else None
    return [(x.dtype, None if spatial is None else (x.shape[0], channels, *spatial))]


@operator(
    "Col2Im",
    "x image_shape block_shape",
    infer=_col2im_type,
    attributes={"dilations": (), "pads": (), "strides": ()},
    host=("image_shape", "block_shape"),
)
def col2im(xp: Any, x: Any, image_shape: Any, block_shape: Any, **attributes: Any) -> Any:
    """As ONNX Col2Im: every column added back where its block stood."""
    import numpy as np

    image, block = xp.ints(image_shape), xp.ints(block_shape)
    n = len(image)
    strides, dilations = per_axis(attributes["strides"], n), per_axis(attributes["dilations"], n)
    pads = per_axis(attributes["pads"], 2 * n, 0)
    counts = [
        (image[i] + pads[i] + pads[n + i] - dilations[i] * (block[i] - 1) - 1) // strides[i] + 1 for i in range(n)
    ]
    if math.prod(counts) != x.shape[2]:
        raise ValueError(f"{x.shape[2]} columns where {counts} blocks fit")
    flat, inside = np.zeros((*block, *counts), np.int64), np.ones((*block, *counts), bool)
    for i, at in enumerate(np.indices(block)):
        start = np.indices(counts)[i] * strides[i] - pads[i]
        place = at.reshape(*block, *[1] * n) * dilations[i] + start
        inside &= (place >= 0) & (place < image[i])
        flat = flat * image[i] + place
    size, channels = math.prod(image), x.shape[1] // math.prod(block)
    planes = x.shape[0] * channels
    index = np.where(inside, flat, size).reshape(1, -1) + np.arange(planes)[:, None] * (size + 1)  # size: thrown away
    y = xp.full((planes * (size + 1),), 0, x)
    y = xp.scatter(y, xp.asarray(index.reshape(-1)), xp.ns.reshape(x, (-1,)), "add")
    return xp.ns.reshape(xp.ns.reshape(y, (planes, size + 1))[:, :size], (x.shape[0], channels, *image))


def _crop_type(inputs: Inputs, attributes: Attributes, constants: Constants) -> list[Type]:
    x, wanted = operand(inputs, 0), known_ints(constants, 1)
    if x.shape is None:
        return [(x.dtype, None)]
    over = axes_of(attributes["axes"], len(x.shape)) or tuple(range(len(x.shape)))
    if wanted is not None and len(wanted) != len(over):
        fail(f"{len(wanted)} extents for {len(over)} axes", "one each")
    shape: list[Extent] = list(x.shape)
    for i, axis in enumerate(over):
        shape[axis] = None if wanted is None else wanted[i]
    return [(x.dtype, tuple(shape))]


@operator("CenterCropPad", "x shape", infer=_crop_type, attributes={"axes": ()}, host=("shape",), moves=True)
def center_crop_pad(xp: Any, x: Any, shape: Any, *, axes: tuple[int, ...]) -> Any:
    """As ONNX CenterCropPad: the odd element is cut, or put, at the end."""
    over = axes_of(axes, x.ndim) or tuple(range(x.ndim))
    amounts = [(0, 0)] * x.ndim
    for axis, wanted in zip(over, xp.ints(shape), strict=True):
        extra = wanted - x.shape[axis]
        before = abs(extra) // 2 * (1 if extra > 0 else -1)
        amounts[axis] = (before, extra - before)
    return pad_spatial(xp, x, amounts, 0)


OPS = specs_in(globals())
