"""Pools over sliding windows and over all spatial axes. Floor 1."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from .convolution import pad_spatial, per_axis, same_count, window_count, window_pads
from .define import operator, specs_in
from .inference import Attributes, Constants, Extents, Inputs, Type, fail, operand
from .reductions import mean_of

_GEOMETRY: Mapping[str, Any] = {
    "auto_pad": "NOTSET",
    "ceil_mode": 0,
    "dilations": (),
    "kernel_shape": "<required>",
    "pads": (),
    "strides": (),
}


def _pool_shape(shape: Extents, attributes: Attributes) -> Extents:
    kernel = tuple(attributes["kernel_shape"])
    n, mode = len(kernel), attributes["auto_pad"]
    if shape is None:
        return None
    if len(shape) != n + 2:
        fail(f"rank {len(shape)} for a kernel of {n} axes", f"rank {n + 2}")
    pads = window_pads(attributes, shape[2:], kernel)
    strides, dilations = per_axis(attributes["strides"], n), per_axis(attributes["dilations"], n)
    rows = zip(shape[2:], kernel, strides, dilations, pads, strict=True)
    ceil = attributes["ceil_mode"]
    spatial = (same_count(mode, e, s, window_count(e, k, s, d, p, ceil)) for e, k, s, d, p in rows)
    return (*shape[:2], *spatial)


def _pool_type(inputs: Inputs, attributes: Attributes, constants: Constants) -> list[Type]:
    x = operand(inputs, 0)
    return [(x.dtype, _pool_shape(x.shape, attributes))]


def _max_pool_type(inputs: Inputs, attributes: Attributes, constants: Constants) -> list[Type]:
    y = _pool_type(inputs, attributes, constants)[0]
    return [y, ("int64", y[1])]


class _Windows:
    """The windows of a pool: of ``x`` itself, and of anything laid out like it."""

    def __init__(self, xp: Any, x: Any, attributes: Mapping[str, Any]) -> None:
        self.xp, self.kernel = xp, tuple(attributes["kernel_shape"])
        n = len(self.kernel)
        self.strides, self.dilations = per_axis(attributes["strides"], n), per_axis(attributes["dilations"], n)
        extents = tuple(x.shape[2:])
        pads = [(int(a or 0), int(b or 0)) for a, b in window_pads(attributes, extents, self.kernel)]
        shape = _pool_shape(tuple(x.shape), attributes)
        counts = [int(c or 0) for c in (shape or ())[2:]]
        self.pads, self.reach = pads, []
        for extent, (before, after), count, k, s, d in zip(
            extents, pads, counts, self.kernel, self.strides, self.dilations, strict=True
        ):
            needed = (count - 1) * s + (k - 1) * d + 1
            self.reach.append((before, max(after, needed - extent - before)))  # ceil_mode may reach past the padding
        self.axes = tuple(range(-n, 0))

    def of(self, x: Any, value: Any, pads: Any = None) -> Any:
        """Windows ``(..., *positions, *kernel)`` over the last axes of ``x``, padded with ``value``."""
        padded = pad_spatial(self.xp, x, self.reach if pads is None else pads, value)
        return self.xp.windows(padded, self.kernel, self.strides, self.dilations)


def _lowest(xp: Any, x: Any) -> Any:
    from ..dtypes import dtype

    row = dtype(xp.name_of(x))
    return -math.inf if row.floating else 0 if row.kind == "u" else -(2 ** (row.bits - 1))


@operator("MaxPool", "x", outputs="y indices?", infer=_max_pool_type, attributes={**_GEOMETRY, "storage_order": 0})
def max_pool(xp: Any, x: Any, *, storage_order: int, **attributes: Any) -> Any:
    """As ONNX MaxPool; a NaN in a window gives NaN. Indices point into the flattened x."""
    windows = _Windows(xp, x, attributes)
    n = len(windows.kernel)
    view = windows.of(x, _lowest(xp, x))
    flat = xp.ns.reshape(view, (*view.shape[: 2 + n], math.prod(windows.kernel)))
    if math.prod(flat.shape) == 0:
        return flat[..., 0], xp.ns.zeros(tuple(flat.shape[:-1]), dtype=xp.storage("int64"), device=xp.device)
    y = xp.ns.max(flat, axis=-1)
    best = xp.cast(xp.ns.argmax(flat, axis=-1), "int64")
    spatial = tuple(x.shape[2:])
    order = spatial if not storage_order else spatial[::-1]
    place = xp.ns.reshape(xp.arange(math.prod(spatial)), order)
    if storage_order:
        place = xp.ns.permute_dims(place, tuple(reversed(range(n))))
    lookup = windows.of(place, -1)
    lookup = xp.ns.reshape(lookup, (1, 1, *lookup.shape[:n], math.prod(windows.kernel)))
    lookup = xp.ns.broadcast_to(lookup, tuple(flat.shape))
    index = xp.take_along(lookup, best[..., None], -1)[..., 0]
    plane = xp.ns.reshape(xp.arange(x.shape[0] * x.shape[1]), (x.shape[0], x.shape[1], *[1] * n))
    return y, index + plane * math.prod(spatial)


@operator("AveragePool", "x", infer=_pool_type, attributes={**_GEOMETRY, "count_include_pad": 0})
def average_pool(xp: Any, x: Any, *, count_include_pad: int, **attributes: Any) -> Any:
    windows = _Windows(xp, x, attributes)
    total = xp.ns.sum(windows.of(x, 0.0), axis=windows.axes)
    ones = xp.full(tuple(x.shape[2:]), 1.0, x)
    if count_include_pad:
        ones = pad_spatial(xp, ones, windows.pads, 1.0)
        beyond = [(0, r[1] - p[1]) for r, p in zip(windows.reach, windows.pads, strict=True)]
        return total / xp.ns.sum(windows.of(ones, 0.0, beyond), axis=windows.axes)
    return total / xp.ns.sum(windows.of(ones, 0.0), axis=windows.axes)


@operator("LpPool", "x", infer=_pool_type, attributes={**_GEOMETRY, "p": 2})
def lp_pool(xp: Any, x: Any, *, p: int, **attributes: Any) -> Any:
    windows = _Windows(xp, x, attributes)
    return xp.ns.sum(windows.of(xp.ns.abs(x), 0.0) ** p, axis=windows.axes) ** (1.0 / p)


def _global_type(inputs: Inputs, attributes: Attributes, constants: Constants) -> list[Type]:
    x = operand(inputs, 0)
    return [(x.dtype, None if x.shape is None else (*x.shape[:2], *[1] * (len(x.shape) - 2)))]


@operator("GlobalAveragePool", "x", infer=_global_type)
def global_average_pool(xp: Any, x: Any) -> Any:
    return mean_of(xp, x, tuple(range(2, x.ndim)))


@operator("GlobalMaxPool", "x", infer=_global_type)
def global_max_pool(xp: Any, x: Any) -> Any:
    return xp.ns.max(x, axis=tuple(range(2, x.ndim)), keepdims=True)


@operator("GlobalLpPool", "x", infer=_global_type, attributes={"p": 2})
def global_lp_pool(xp: Any, x: Any, *, p: int) -> Any:
    return xp.ns.sum(xp.ns.abs(x) ** p, axis=tuple(range(2, x.ndim)), keepdims=True) ** (1.0 / p)


OPS = specs_in(globals())
