"""Pad and Resize. Floor 1.

Resize is separable: one gather (nearest) or one matrix product (linear, cubic) per resized axis; the matrices are made
on the host in float64.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .convolution import pad_spatial
from .define import operator, specs_in
from .inference import Attributes, Constants, Extent, Inputs, Type, axes_of, fail, known_ints, operand, plus, present

if TYPE_CHECKING:
    import numpy


def _pad_type(inputs: Inputs, attributes: Attributes, constants: Constants) -> list[Type]:
    x, pads, axes = operand(inputs, 0), known_ints(constants, 1), known_ints(constants, 3)
    if x.shape is None:
        return [(x.dtype, None)]
    if pads is None or (axes is None and present(inputs, 3)):
        return [(x.dtype, (None,) * len(x.shape))]
    over = tuple(range(len(x.shape))) if axes is None else axes_of(axes, len(x.shape))
    if len(pads) != 2 * len(over):
        fail(f"{len(pads)} pads for {len(over)} axes", f"{2 * len(over)}")
    shape: list[Extent] = list(x.shape)
    for i, axis in enumerate(over):
        shape[axis] = plus(shape[axis], pads[i] + pads[i + len(over)])
    return [(x.dtype, tuple(shape))]


@operator(
    "Pad",
    "x pads constant_value? axes?",
    infer=_pad_type,
    attributes={"mode": "constant"},
    moves=True,
    host=("pads", "constant_value", "axes"),
)
def pad(xp: Any, x: Any, pads: Any, constant_value: Any = None, axes: Any = None, *, mode: str) -> Any:
    """As ONNX Pad, negative pads included: constant, edge, reflect (without repeating the edge) or wrap."""
    over = tuple(range(x.ndim)) if axes is None else axes_of(xp.ints(axes), x.ndim)
    amounts, n = xp.ints(pads), len(over)
    table = {axis: (amounts[i], amounts[i + n]) for i, axis in enumerate(over)}
    if mode == "constant":
        value = 0 if constant_value is None else xp.scalar(constant_value)
        return pad_spatial(xp, x, [table.get(axis, (0, 0)) for axis in range(x.ndim)], value)
    for axis, (before, after) in table.items():
        if before or after:
            source = [_source(i, x.shape[axis], mode) for i in range(-before, x.shape[axis] + after)]
            x = xp.ns.take(x, xp.asarray(source, "int64"), axis=axis)
    return x


def _source(i: int, extent: int, mode: str) -> int:
    """Where the element at (possibly outside) position ``i`` comes from."""
    if mode == "edge":
        return min(max(i, 0), extent - 1)
    if mode == "wrap":
        return i % extent
    period = max(1, 2 * (extent - 1))
    i %= period
    return min(i, period - i) if extent > 1 else 0


RESIZE: Mapping[str, Any] = {
    "antialias": 0,
    "axes": (),
    "coordinate_transformation_mode": "half_pixel",
    "cubic_coeff_a": -0.75,
    "exclude_outside": 0,
    "extrapolation_value": 0.0,
    "keep_aspect_ratio_policy": "stretch",
    "mode": "nearest",
    "nearest_mode": "round_prefer_floor",
}


def _plan(
    shape: Sequence[int], attributes: Mapping[str, Any], scales: Sequence[float], sizes: Sequence[int]
) -> dict[int, tuple[int, float]]:
    """Per resized axis its new extent and its scale."""
    axes = axes_of(attributes["axes"], len(shape)) or tuple(range(len(shape)))
    if not sizes:
        return {a: (math.floor(shape[a] * s), s) for a, s in zip(axes, scales, strict=True)}
    ratios = {a: size / shape[a] for a, size in zip(axes, sizes, strict=True)}
    policy = attributes["keep_aspect_ratio_policy"]
    if policy == "stretch":
        return {a: (size, ratios[a]) for a, size in zip(axes, sizes, strict=True)}
    scale = (min if policy == "not_larger" else max)(ratios.values())
    return {a: (int(scale * shape[a] + 0.5), scale) for a in axes}


def _resize_type(inputs: Inputs, attributes: Attributes, constants: Constants) -> list[Type]:
    x = operand(inputs, 0)
    scales, sizes = constants.get(2), known_ints(constants, 3) or ()
    if x.shape is None:
        return [(x.dtype, None)]
    axes = axes_of(attributes["axes"], len(x.shape)) or tuple(range(len(x.shape)))
    factors = [float(s) for s in scales.reshape(-1)] if scales is not None else []
    numbers = [d for d in x.shape if isinstance(d, int)]
    if len(numbers) == len(x.shape) and (factors or sizes):
        plan = _plan(numbers, attributes, factors, sizes)
        return [(x.dtype, tuple(plan[i][0] if i in plan else d for i, d in enumerate(numbers)))]
    shape: list[Extent] = list(x.shape)
    for i, axis in enumerate(axes):
        if sizes and attributes["keep_aspect_ratio_policy"] == "stretch":
            shape[axis] = sizes[i]
        elif not factors or factors[i] != 1.0:
            shape[axis] = None
    return [(x.dtype, tuple(shape))]


@operator("Resize", "x roi? scales? sizes?", infer=_resize_type, attributes=RESIZE, host=("roi", "scales", "sizes"))
def resize(xp: Any, x: Any, roi: Any = None, scales: Any = None, sizes: Any = None, **attributes: Any) -> Any:
    """As ONNX Resize: nearest, linear and cubic, antialias included."""
    factors = [float(v) for v in xp.to_numpy(scales).reshape(-1)] if scales is not None else []
    plan = _plan(tuple(x.shape), attributes, factors, xp.ints(sizes) if sizes is not None else ())
    windows = _regions(xp, roi, list(plan))
    dtype = xp.name_of(x)
    if attributes["mode"] != "nearest" and not xp.floating(x):
        x = xp.cast(x, "float64")
    for axis, (extent, scale) in plan.items():
        unchanged = extent == x.shape[axis] and scale == 1.0 and windows[axis] == (0.0, 1.0)
        if not unchanged:
            x = _resize_axis(xp, x, axis, extent, scale, windows[axis], attributes)
    return xp.cast(x, dtype)


def _regions(xp: Any, roi: Any, axes: list[int]) -> dict[int, tuple[float, float]]:
    ends = [] if roi is None else [float(v) for v in xp.to_numpy(roi).reshape(-1)]
    if not ends:
        return dict.fromkeys(axes, (0.0, 1.0))
    return {a: (ends[i], ends[i + len(axes)]) for i, a in enumerate(axes)}


def _resize_axis(
    xp: Any, x: Any, axis: int, extent: int, scale: float, region: tuple[float, float], attributes: Mapping[str, Any]
) -> Any:
    import numpy as np

    width, mode = x.shape[axis], attributes["coordinate_transformation_mode"]
    at = coordinates(extent, width, scale, region, mode)
    if attributes["mode"] == "nearest":
        index = np.clip(_nearest(at, attributes["nearest_mode"]), 0, width - 1).astype(np.int64)
        x = xp.ns.take(x, xp.asarray(index), axis=axis)
    else:
        matrix = xp.cast(xp.asarray(_weights(at, width, scale, attributes)), xp.name_of(x))
        x = xp.ns.moveaxis(xp.matmul(xp.ns.moveaxis(x, axis, -1), xp.ns.matrix_transpose(matrix)), -1, axis)
    if mode != "tf_crop_and_resize":
        return x
    shape = [1] * x.ndim
    shape[axis] = extent
    outside = xp.ns.reshape(xp.asarray((at < 0) | (at > width - 1)), tuple(shape))
    return xp.ns.where(outside, xp.full((), attributes["extrapolation_value"], x), x)


def _nearest(at: numpy.ndarray, mode: str) -> numpy.ndarray:
    import numpy as np

    if mode == "round_prefer_floor":
        return np.ceil(at - 0.5)
    if mode == "round_prefer_ceil":
        return np.floor(at + 0.5)
    return np.floor(at) if mode == "floor" else np.ceil(at)


def coordinates(extent: int, width: int, scale: float, region: tuple[float, float], mode: str) -> numpy.ndarray:
    """Where each of ``extent`` new elements lies among the ``width`` old ones."""
    import numpy as np

    i, resized = np.arange(extent, dtype=np.float64), scale * width
    if mode == "align_corners":
        return i * (width - 1) / (resized - 1) if resized != 1 else np.zeros(extent)
    if mode == "asymmetric":
        return i / scale
    if mode == "pytorch_half_pixel":
        return (i + 0.5) / scale - 0.5 if resized != 1 else np.full(extent, -0.5)
    if mode == "half_pixel_symmetric":
        return width / 2 * (1 - extent / resized) + (i + 0.5) / scale - 0.5
    if mode == "tf_crop_and_resize":
        first, last = region
        span = (last - first) * (width - 1)
        inner = i * span / (resized - 1) if resized != 1 else np.full(extent, span / 2)
        return inner + first * (width - 1)
    return (i + 0.5) / scale - 0.5


def _weights(at: numpy.ndarray, width: int, scale: float, attributes: Mapping[str, Any]) -> numpy.ndarray:
    """The matrix ``[new old]`` of interpolation weights."""
    import numpy as np

    shrink = min(scale, 1.0) if attributes["antialias"] else 1.0
    radius = 1 if attributes["mode"] == "linear" else 2
    reach = math.ceil(radius / shrink)
    taps = np.floor(at).astype(np.int64)[:, None] + np.arange(-reach, reach + 2)[None, :]
    distance = np.abs(taps - at[:, None]) * shrink
    if radius == 1:
        weights = np.clip(1.0 - distance, 0.0, None)
    else:
        a, d = attributes["cubic_coeff_a"], distance
        near = ((a + 2) * d - (a + 3)) * d * d + 1
        far = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
        weights = np.where(d <= 1, near, np.where(d < 2, far, 0.0))
    if attributes["exclude_outside"]:
        weights = np.where((taps < 0) | (taps >= width), 0.0, weights)
    if attributes["exclude_outside"] or attributes["antialias"]:
        weights = weights / weights.sum(axis=1, keepdims=True)
    matrix = np.zeros((len(at), width))
    np.add.at(matrix, (np.arange(len(at))[:, None], np.clip(taps, 0, width - 1)), weights)
    return matrix


OPS = specs_in(globals())
