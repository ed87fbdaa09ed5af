"""onnxruntime's operators on quantised tensors, as what they mean: DequantizeLinear → operator → QuantizeLinear.

onnxruntime may compute them in integers and look-up tables; the results differ where a rounding is a near tie.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .adapters import Call


def _real(call: Call, first: int, axis: int = 1) -> str:
    """Inputs ``first`` to ``first + 2`` (values, scale, zero point) as floats."""
    given = [n for n in (call.input(first), call.input(first + 1), call.input(first + 2)) if n]
    return call.emit("DequantizeLinear", given, {"axis": axis})


def _quantised(call: Call, op: str, inputs: list[str], first: int, attrs: Mapping[str, Any]) -> None:
    """``call`` becomes ``op``, its result quantised by inputs ``first`` and ``first + 1``."""
    scale, zero = call.input(first), call.input(first + 1)
    call.op, call.inputs, call.attrs = op, inputs, dict(attrs)
    call.after = ("QuantizeLinear", (scale, zero) if zero else (scale,), {})


def _one(op: str, *kept: str) -> Callable[[Call], None]:
    """An operator of one operand; ``kept`` are its attributes."""

    def fix(call: Call) -> None:
        if call.attrs.get("channels_last", 0):
            raise call.error("channels_last = 1", "channels_last = 0")
        _quantised(call, op, [_real(call, 0)], 3, {k: call.attrs[k] for k in kept if k in call.attrs})

    return fix


def _two(op: str) -> Callable[[Call], None]:
    def fix(call: Call) -> None:
        _quantised(call, op, [_real(call, 0), _real(call, 3)], 6, {})

    return fix


def _concat(call: Call) -> None:
    """Scale and zero point of the result come first, then three inputs for every part."""
    parts = [_real(call, i) for i in range(2, len(call.inputs), 3)]
    _quantised(call, "Concat", parts, 0, {"axis": call.attrs["axis"]})


def _product(call: Call) -> None:
    """MatMulIntegerToFloat(a, b, scale, scale, zero, zero, bias): a float result, nothing quantised."""
    a, b, sa, sb, za, zb, bias = (call.input(i) for i in range(7))
    shape = call.value(b).shape
    columns = len(shape) - 1 if shape is not None else 1
    left = call.emit("DequantizeLinear", [n for n in (a, sa, za) if n], {})
    right = call.emit("DequantizeLinear", [n for n in (b, sb, zb) if n], {"axis": columns})
    call.op, call.inputs, call.attrs = "MatMul", [left, right], {}
    if bias:
        call.after = ("Add", (bias,), {})


def _gemm(call: Call) -> None:
    """QGemm(a …, b …, c, y scale, y zero): c is int32 in units of both scales; without a y scale y is float."""
    swaps = {k: int(call.attrs.get(k, 0)) for k in ("transA", "transB")}
    alpha = float(call.attrs.get("alpha", 1.0))
    inputs = [_real(call, 0), _real(call, 3, axis=0 if swaps["transB"] else 1)]
    if call.input(6):
        unit = call.emit("Mul", [call.input(1), call.input(4)], {})
        bias = call.emit("Cast", [call.input(6)], {"to": call.value(call.input(1)).dtype})
        inputs.append(call.emit("Mul", [bias, unit], {}))
    attrs = {**swaps, "alpha": alpha, "beta": alpha}
    if call.input(7):
        _quantised(call, "Gemm", inputs, 7, attrs)
    else:
        call.op, call.inputs, call.attrs = "Gemm", inputs, attrs


_POOL = ("auto_pad", "ceil_mode", "count_include_pad", "kernel_shape", "pads", "strides")

CONTRIB: Mapping[str, Callable[[Call], None]] = {
    "com.microsoft::MatMulIntegerToFloat": _product,
    "com.microsoft::QGemm": _gemm,
    "com.microsoft::QLinearAdd": _two("Add"),
    "com.microsoft::QLinearAveragePool": _one("AveragePool", *_POOL),
    "com.microsoft::QLinearConcat": _concat,
    "com.microsoft::QLinearGlobalAveragePool": _one("GlobalAveragePool"),
    "com.microsoft::QLinearLeakyRelu": _one("LeakyRelu", "alpha"),
    "com.microsoft::QLinearMul": _two("Mul"),
    "com.microsoft::QLinearSigmoid": _one("Sigmoid"),
    "com.microsoft::QLinearSoftmax": _one("Softmax", "axis"),
}
