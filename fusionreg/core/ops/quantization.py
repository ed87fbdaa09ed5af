"""Linear quantisation. Per tensor, per axis, or in blocks along an axis. Floor 1."""

from __future__ import annotations

from typing import Any

from ..dtypes import dtype
from .convolution import GEOMETRY, conv_shape, correlate
from .define import operator, specs_in
from .elementwise import without_overflow
from .inference import Attributes, Constants, Inputs, Type, operand, times
from .linear import product_shape


def _laid(xp: Any, v: Any, x: Any, axis: int, block_size: int) -> Any:
    """Scales or zero points laid so that they broadcast over ``x``."""
    if v.ndim == 0 or (v.ndim == 1 and v.shape[0] == 1):
        return xp.ns.reshape(v, ())
    axis = axis % x.ndim
    if block_size:
        return xp.ns.take(v, xp.arange(x.shape[axis]) // block_size, axis=axis)
    shape = [1] * x.ndim
    shape[axis] = v.shape[0]
    return xp.ns.reshape(v, tuple(shape))


def _quantize_type(inputs: Inputs, attributes: Attributes, constants: Constants) -> list[Type]:
    x, zero = operand(inputs, 0), inputs[2] if len(inputs) > 2 else None
    return [(attributes["output_dtype"] or (zero.dtype if zero is not None else "uint8"), x.shape)]


def saturate(xp: Any, y: Any, name: str) -> Any:
    """Rounded floats ``y`` clamped to the range of integer dtype ``name``, and cast."""
    row = dtype(name)
    low, high = (0, 2**row.bits - 1) if row.kind == "u" else (-(2 ** (row.bits - 1)), 2 ** (row.bits - 1) - 1)
    y = xp.ns.where(y < low, xp.full((), float(low), y), xp.ns.where(y > high, xp.full((), float(high), y), y))
    return xp.cast(y, name)


@operator(
    "QuantizeLinear",
    "x scale zero_point?",
    infer=_quantize_type,
    attributes={"axis": 1, "block_size": 0, "output_dtype": "", "precision": 0, "saturate": 1},
    host=("zero_point",),
)
def quantize_linear(
    xp: Any,
    x: Any,
    scale: Any,
    zero_point: Any = None,
    *,
    axis: int,
    block_size: int,
    output_dtype: str,
    precision: int,
    **rest: int,
) -> Any:
    """As ONNX QuantizeLinear: round half to even, then add the zero point and saturate."""
    name = output_dtype or ("uint8" if zero_point is None else xp.name_of(zero_point))
    y = x / xp.cast(_laid(xp, scale, x, axis, block_size), xp.name_of(x))
    zero: Any = 0.0
    if zero_point is not None:
        zero = xp.cast(xp.asarray(xp.to_numpy(zero_point).astype("float32")), xp.name_of(y))
        zero = _laid(xp, zero, x, axis, block_size)
    if dtype(name).floating:
        return without_overflow(xp, y + zero, name, rest["saturate"])
    return saturate(xp, xp.ns.round(y) + zero, name)


def _dequantize_type(inputs: Inputs, attributes: Attributes, constants: Constants) -> list[Type]:
    return [(attributes["output_dtype"] or operand(inputs, 1).dtype, operand(inputs, 0).shape)]


@operator(
    "DequantizeLinear",
    "x scale zero_point?",
    infer=_dequantize_type,
    attributes={"axis": 1, "block_size": 0, "output_dtype": ""},
)
def dequantize_linear(
    xp: Any, x: Any, scale: Any, zero_point: Any = None, *, axis: int, block_size: int, output_dtype: str
) -> Any:
    """As ONNX DequantizeLinear: (x - zero_point) · scale, the difference taken exactly."""
    y = x
    if zero_point is not None:
        wide = xp.name_of(x) if xp.floating(x) else "int64"
        y = xp.cast(x, wide) - xp.cast(_laid(xp, zero_point, x, axis, block_size), wide)
    y = xp.cast(y, xp.name_of(scale)) * _laid(xp, scale, x, axis, block_size)
    return xp.cast(y, xp.compute_name(output_dtype)) if output_dtype else y


def _unpacked_type(inputs: Inputs, attributes: Attributes, constants: Constants) -> list[Type]:
    x = operand(inputs, 0)
    if x.shape is None:
        return [("int8", None)]
    return [("int8", (*x.shape[:-1], times(x.shape[-1], 2)))]


@operator("fusionreg::UnpackInt4", "x", infer=_unpacked_type)
def unpack_int4(xp: Any, x: Any) -> Any:
    """The two numbers of each byte, -8 to 7, as int8: the lower half first; a half is 8 more than its number."""
    wide = xp.cast(x, "int32")
    halves = xp.ns.stack((wide % 16, wide // 16), axis=-1)
    return xp.cast(xp.ns.reshape(halves, (*x.shape[:-1], 2 * x.shape[-1])) - 8, "int8")


def _dynamic_type(inputs: Inputs, attributes: Attributes, constants: Constants) -> list[Type]:
    return [("uint8", operand(inputs, 0).shape), ("float32", ()), ("uint8", ())]


@operator("DynamicQuantizeLinear", "x", outputs="y y_scale y_zero_point", infer=_dynamic_type)
def dynamic_quantize_linear(xp: Any, x: Any) -> Any:
    """As ONNX DynamicQuantizeLinear: uint8 with scale and zero point taken from the range of x and 0."""
    zero = xp.full((), 0.0, x)
    low, high = xp.ns.minimum(xp.ns.min(x), zero), xp.ns.maximum(xp.ns.max(x), zero)
    scale = (high - low) / 255.0
    safe = xp.ns.where(scale == 0, xp.full((), 1.0, x), scale)
    point = saturate(xp, xp.ns.round(0.0 - low / safe), "uint8")
    y = saturate(xp, xp.ns.round(x / safe) + xp.cast(point, xp.name_of(x)), "uint8")
    return y, scale, point


def _quantized_product_type(inputs: Inputs, attributes: Attributes, constants: Constants) -> list[Type]:
    a, b = operand(inputs, 0), operand(inputs, 3)
    return [(operand(inputs, 7).dtype, product_shape(a.shape, b.shape))]


@operator(
    "QLinearMatMul",
    "a a_scale a_zero_point b b_scale b_zero_point y_scale y_zero_point",
    infer=_quantized_product_type,
    host=("y_zero_point",),
)
def q_linear_matmul(xp: Any, a: Any, sa: Any, za: Any, b: Any, sb: Any, zb: Any, sy: Any, zy: Any) -> Any:
    """As ONNX QLinearMatMul: the integer product, rescaled in float and quantised once."""

    def centred(x: Any, zero: Any) -> Any:
        zero = xp.cast(zero, "int64")
        return xp.cast(x, "int64") - (zero[..., None] if zero.ndim == 1 and zero.shape[0] > 1 and x is a else zero)

    exact = xp.cast(xp.matmul(centred(a, za), centred(b, zb)), "float64")
    left = sa[..., None] if sa.ndim == 1 and sa.shape[0] > 1 else sa
    scale = xp.cast(left, "float64") * xp.cast(sb, "float64") / xp.cast(sy, "float64")
    zero = xp.asarray(xp.to_numpy(zy).astype("float64"))
    return saturate(xp, xp.ns.round(exact * scale) + zero, xp.name_of(zy))


def _quantized_conv_type(inputs: Inputs, attributes: Attributes, constants: Constants) -> list[Type]:
    return [(operand(inputs, 7).dtype, conv_shape([inputs[0], inputs[3]], attributes))]


@operator(
    "QLinearConv",
    "x x_scale x_zero_point w w_scale w_zero_point y_scale y_zero_point bias?",
    infer=_quantized_conv_type,
    attributes=GEOMETRY,
    host=("y_zero_point",),
)
def q_linear_conv(
    xp: Any,
    x: Any,
    sx: Any,
    zx: Any,
    w: Any,
    sw: Any,
    zw: Any,
    sy: Any,
    zy: Any,
    bias: Any = None,
    **attributes: Any,
) -> Any:
    """As ONNX QLinearConv: the integer convolution with its bias, rescaled in float and quantised once."""

    def per_filter(v: Any, rank: int) -> Any:
        return xp.ns.reshape(v, (-1, *[1] * rank)) if v.ndim == 1 and v.shape[0] > 1 else xp.ns.reshape(v, ())

    n = x.ndim - 2
    left = xp.cast(x, "int64") - xp.cast(xp.ns.reshape(zx, ()), "int64")
    right = xp.cast(w, "int64") - xp.cast(per_filter(zw, n + 1), "int64")
    exact = correlate(xp, left, right, attributes)
    if bias is not None:
        exact = exact + xp.cast(per_filter(bias, n), "int64")
    scale = xp.cast(xp.ns.reshape(sx, ()), "float64") * xp.cast(per_filter(sw, n), "float64")
    scale = scale / xp.cast(xp.ns.reshape(sy, ()), "float64")
    zero = xp.asarray(xp.to_numpy(zy).astype("float64").reshape(()))
    return saturate(xp, xp.ns.round(xp.cast(exact, "float64") * scale) + zero, xp.name_of(zy))


OPS = specs_in(globals())
