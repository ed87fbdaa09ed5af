"""Interpolation at computed places: GridSample, AffineGrid, RoiAlign. Floor 1."""

from __future__ import annotations

import math
from itertools import product as combinations
from typing import Any

from .define import operator, specs_in
from .inference import Attributes, Constants, Extent, Inputs, Type, fail, known_ints, operand


def _grid_type(inputs: Inputs, attributes: Attributes, constants: Constants) -> list[Type]:
    x, grid = operand(inputs, 0), operand(inputs, 1)
    for name, known in (("mode", ("linear", "nearest", "cubic")), ("padding_mode", ("zeros", "border", "reflection"))):
        if attributes[name] not in known:
            fail(f"{name} {attributes[name]!r}", f"one of {', '.join(known)}")
    if x.shape is None or grid.shape is None:
        return [(x.dtype, None)]
    n = len(x.shape) - 2
    if len(grid.shape) != n + 2 or (isinstance(grid.shape[-1], int) and grid.shape[-1] != n):
        fail(f"a grid {list(grid.shape)} for an input of rank {len(x.shape)}", f"[N, {n} extents, {n}]")
    return [(x.dtype, (*x.shape[:2], *grid.shape[1:-1]))]


def _reflected(xp: Any, at: Any, low: float, high: float) -> Any:
    """``at`` folded back at the borders until it lies inside."""
    span = high - low
    if span <= 0:
        return xp.ns.zeros_like(at)
    away = xp.ns.abs(at - low)
    turns = xp.ns.floor(away / span)
    rest = away - turns * span
    inside = xp.ns.where(turns - 2.0 * xp.ns.floor(turns / 2.0) == 0, low + rest, high - rest)
    return xp.ns.where(xp.ns.logical_and(at >= low, at <= high), at, inside)


def _taps(xp: Any, at: Any, mode: str) -> list[tuple[Any, Any]]:
    """(place, weight) of every element that the value at ``at`` is made of; a weight of None is 1."""
    if mode == "nearest":
        return [(at, None)]
    first = xp.ns.floor(at)
    t = at - first
    if mode == "linear":
        return [(first, 1.0 - t), (first + 1.0, t)]
    a = -0.75  # Keys' cubic convolution, as ONNX and torch take it

    def near(d: Any) -> Any:
        return ((a + 2.0) * d - (a + 3.0)) * d * d + 1.0

    def far(d: Any) -> Any:
        return ((a * d - 5.0 * a) * d + 8.0 * a) * d - 4.0 * a

    weights = (far(t + 1.0), near(t), near(1.0 - t), far(2.0 - t))
    return [(first + float(i - 1), w) for i, w in enumerate(weights)]


@operator(
    "GridSample",
    "x grid",
    infer=_grid_type,
    attributes={"align_corners": 0, "mode": "linear", "padding_mode": "zeros"},
)
def grid_sample(xp: Any, x: Any, grid: Any, *, align_corners: int, mode: str, padding_mode: str) -> Any:
    """As ONNX GridSample (opset 20), any number of spatial axes; coordinates are computed in the grid's dtype."""
    n, spatial = x.ndim - 2, tuple(x.shape[2:])
    places = tuple(grid.shape[1:-1])
    if math.prod(x.shape) == 0 or math.prod(places) == 0:
        return xp.full((*x.shape[:2], *places), 0, x)
    axes = []
    for i, extent in enumerate(spatial):
        g = grid[..., n - 1 - i]
        at = (g + 1.0) / 2.0 * (extent - 1) if align_corners else ((g + 1.0) * extent - 1.0) / 2.0
        low, high = (0.0, extent - 1.0) if align_corners else (-0.5, extent - 0.5)
        if mode == "nearest":
            at = xp.ns.round(at)
        if padding_mode == "border" and mode != "cubic":  # torch and onnxruntime bound its four elements alone
            at = xp.ns.where(at < low, xp.full((), 0.0, at), xp.ns.where(at > high, xp.full((), extent - 1.0, at), at))
        elif padding_mode == "reflection":
            at = _reflected(xp, at, low, high)
        taps = []
        for place, share in _taps(xp, at, mode):
            if padding_mode == "reflection":
                place = _reflected(xp, place, low, high)
            outside = xp.ns.logical_or(place < 0, place > extent - 1) if padding_mode == "zeros" else None
            place = xp.ns.where(place == place, xp.ns.clip(place, 0.0, extent - 1.0), xp.ns.zeros_like(place))
            taps.append((xp.cast(place, "int64"), share, outside))
        axes.append(taps)
    flat = xp.ns.reshape(x, (*x.shape[:2], math.prod(spatial)))
    result: Any = None
    for chosen in combinations(*axes):
        index: Any = 0
        weight: Any = None
        hidden: Any = None
        for (place, w, outside), extent in zip(chosen, spatial, strict=True):
            index = index * extent + place
            weight = w if weight is None else weight if w is None else weight * w
            hidden = outside if hidden is None else hidden if outside is None else xp.ns.logical_or(hidden, outside)
        index = xp.ns.reshape(index, (x.shape[0], 1, math.prod(places)))
        picked = xp.take_along(flat, xp.ns.broadcast_to(index, (*x.shape[:2], index.shape[-1])), -1)
        if weight is not None:
            picked = picked * xp.cast(xp.ns.reshape(weight, tuple(index.shape)), xp.name_of(x))
        if hidden is not None:
            picked = xp.ns.where(xp.ns.reshape(hidden, tuple(index.shape)), xp.ns.zeros_like(picked), picked)
        result = picked if result is None else result + picked
    return xp.ns.reshape(result, (*x.shape[:2], *places))


def _affine_type(inputs: Inputs, attributes: Attributes, constants: Constants) -> list[Type]:
    theta, size = operand(inputs, 0), known_ints(constants, 1)
    if size is not None:
        return [(theta.dtype, (size[0], *size[2:], len(size) - 2))]
    if theta.shape is not None and isinstance(theta.shape[1], int):
        n = theta.shape[1]
        return [(theta.dtype, (theta.shape[0], *(None,) * n, n))]
    return [(theta.dtype, None)]


@operator("AffineGrid", "theta size", infer=_affine_type, attributes={"align_corners": 0}, host=("size",))
def affine_grid(xp: Any, theta: Any, size: Any, *, align_corners: int) -> Any:
    """As ONNX AffineGrid: theta times the homogeneous coordinates of every place, the last axis's first."""
    extents = xp.ints(size)[2:]
    n, columns = len(extents), []
    for i, extent in reversed(list(enumerate(extents))):
        steps = xp.cast(xp.arange(extent), xp.name_of(theta))
        at = steps * (2.0 / max(extent - 1, 1)) - 1.0 if align_corners else (2.0 * steps + 1.0) / extent - 1.0
        shape = [1] * n
        shape[i] = extent
        columns.append(xp.ns.broadcast_to(xp.ns.reshape(at, tuple(shape)), extents))
    columns.append(xp.full(extents, 1.0, theta))
    places = xp.ns.reshape(xp.ns.stack(columns, axis=-1), (math.prod(extents), n + 1))
    grid = xp.matmul(places, xp.ns.matrix_transpose(theta))
    return xp.ns.reshape(grid, (theta.shape[0], *extents, n))


def _roi_type(inputs: Inputs, attributes: Attributes, constants: Constants) -> list[Type]:
    x, rois = operand(inputs, 0), operand(inputs, 1)
    if x.shape is not None and len(x.shape) != 4:
        fail(f"rank {len(x.shape)}", "rank 4")
    rows: Extent = None if rois.shape is None else rois.shape[0]
    channels: Extent = None if x.shape is None else x.shape[1]
    return [(x.dtype, (rows, channels, attributes["output_height"], attributes["output_width"]))]


def _samples(start: float, length: float, bins: int, ratio: int, extent: int) -> tuple[Any, Any, Any, Any, int]:
    """Lower and upper element of every sample along one axis, their weights, and the samples of a bin."""
    import numpy as np

    each = ratio if ratio > 0 else max(0, math.ceil(length / bins))
    size = length / bins
    at = start + np.arange(bins)[:, None] * size + (np.arange(each)[None, :] + 0.5) * size / max(each, 1)
    at = at.reshape(-1)
    inside = (at >= -1.0) & (at <= extent)
    at = np.clip(at, 0.0, None)
    low = np.minimum(at.astype(np.int64), extent - 1)
    high = np.minimum(low + 1, extent - 1)
    part = np.where(low >= extent - 1, 0.0, at - low)
    return low, high, np.where(inside, 1.0 - part, 0.0), np.where(inside, part, 0.0), each


def _averaging(row: tuple[Any, Any, Any, Any, int], bins: int, extent: int) -> Any:
    """The matrix [bins extent] that averages a bin's samples."""
    import numpy as np

    low, high, near, far, each = row
    matrix = np.zeros((bins * each, extent))
    np.add.at(matrix, (np.arange(len(low)), low), near)
    np.add.at(matrix, (np.arange(len(low)), high), far)
    return matrix.reshape(bins, each, extent).sum(axis=1) / max(each, 1)


@operator(
    "RoiAlign",
    "x rois batch_indices",
    infer=_roi_type,
    attributes={
        "coordinate_transformation_mode": "half_pixel",
        "mode": "avg",
        "output_height": 1,
        "output_width": 1,
        "sampling_ratio": 0,
        "spatial_scale": 1.0,
    },
    host=("rois", "batch_indices"),
)
def roi_align(
    xp: Any,
    x: Any,
    rois: Any,
    batch_indices: Any,
    *,
    coordinate_transformation_mode: str,
    mode: str,
    output_height: int,
    output_width: int,
    sampling_ratio: int,
    spatial_scale: float,
) -> Any:
    """As ONNX RoiAlign; mode max takes the largest of the four weighted neighbours, as ONNX does.

    The boxes decide how much is sampled, so they are read on the host.
    """
    half, (height, width), name = coordinate_transformation_mode == "half_pixel", x.shape[2:], xp.name_of(x)
    out = []
    for box, batch in zip(xp.to_numpy(rois).astype("float64"), xp.ints(batch_indices), strict=True):
        x0, y0, x1, y1 = (float(v) * spatial_scale - (0.5 if half else 0.0) for v in box)
        tall, wide = (y1 - y0, x1 - x0) if half else (max(y1 - y0, 1.0), max(x1 - x0, 1.0))
        rows = _samples(y0, tall, output_height, sampling_ratio, height)
        columns = _samples(x0, wide, output_width, sampling_ratio, width)
        image = x[batch]
        if not rows[4] or not columns[4]:
            out.append(xp.full((x.shape[1], output_height, output_width), 0.0, x))
        elif mode == "avg":
            left = xp.cast(xp.asarray(_averaging(rows, output_height, height)), name)
            right = xp.cast(xp.asarray(_averaging(columns, output_width, width)), name)
            out.append(xp.matmul(xp.matmul(left, image), xp.ns.matrix_transpose(right)))
        else:
            out.append(_largest(xp, image, rows, columns, (output_height, output_width)))
    return xp.ns.stack(out, axis=0) if out else xp.full((0, x.shape[1], output_height, output_width), 0.0, x)


def _largest(xp: Any, image: Any, rows: Any, columns: Any, bins: tuple[int, int]) -> Any:
    """The largest weighted neighbour among all samples of every bin."""
    best: Any = None
    for y in (0, 1):
        for x in (0, 1):
            picked = xp.ns.take(xp.ns.take(image, xp.asarray(rows[y]), axis=1), xp.asarray(columns[x]), axis=2)
            weight = rows[2 + y][:, None] * columns[2 + x][None, :]
            picked = picked * xp.cast(xp.asarray(weight), xp.name_of(image))
            best = picked if best is None else xp.ns.maximum(best, picked)
    best = xp.ns.reshape(best, (image.shape[0], bins[0], rows[4], bins[1], columns[4]))
    return xp.ns.max(best, axis=(2, 4))


OPS = specs_in(globals())
