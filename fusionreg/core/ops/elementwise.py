"""Element-wise arithmetic, comparison, logic and bits. Floor 1.

Source of every definition: ONNX operator documentation, newest version. NaN is kept by Min, Max and Clip.
"""

from __future__ import annotations

import math
from functools import reduce
from typing import Any

from .define import operator, specs_in
from .inference import Attributes, Constants, Inputs, Type, boolean, broadcast, operand, same


def _unary(name: str, function: str, cuda: str = "", summary: str = "") -> Any:
    def meaning(xp: Any, x: Any) -> Any:
        return getattr(xp.ns, function)(x)

    meaning.__doc__ = summary
    return operator(name, "x", infer=same, pointwise=True, cuda=cuda)(meaning)


def _binary(name: str, function: str, cuda: str = "", commutative: bool = True, summary: str = "") -> Any:
    def meaning(xp: Any, a: Any, b: Any) -> Any:
        return getattr(xp.ns, function)(a, b)

    meaning.__doc__ = summary
    return operator(name, "a b", pointwise=True, commutative=commutative, cuda=cuda)(meaning)


def _compare(name: str, function: str, cuda: str, commutative: bool = False) -> Any:
    def meaning(xp: Any, a: Any, b: Any) -> Any:
        return getattr(xp.ns, function)(a, b)

    return operator(name, "a b", infer=boolean, pointwise=True, commutative=commutative, cuda=cuda)(meaning)


add = _binary("Add", "add", "a + b")
sub = _binary("Sub", "subtract", "a - b", commutative=False)
mul = _binary("Mul", "multiply", "a * b")

neg = _unary("Neg", "negative", "-x")
absolute = _unary("Abs", "abs", "fabsf(x)")
sqrt = _unary("Sqrt", "sqrt", "sqrtf(x)")
exp = _unary("Exp", "exp", "expf(x)")
log = _unary("Log", "log", "logf(x)")
floor = _unary("Floor", "floor", "floorf(x)")
ceil = _unary("Ceil", "ceil", "ceilf(x)")
round_even = _unary("Round", "round", "rintf(x)")
sin = _unary("Sin", "sin", "sinf(x)")
cos = _unary("Cos", "cos", "cosf(x)")
tan = _unary("Tan", "tan", "tanf(x)")
asin = _unary("Asin", "asin", "asinf(x)")
acos = _unary("Acos", "acos", "acosf(x)")
atan = _unary("Atan", "atan", "atanf(x)")
sinh = _unary("Sinh", "sinh", "sinhf(x)")
cosh = _unary("Cosh", "cosh", "coshf(x)")
asinh = _unary("Asinh", "asinh", "asinhf(x)")
acosh = _unary("Acosh", "acosh", "acoshf(x)")
atanh = _unary("Atanh", "atanh", "atanhf(x)")

equal = _compare("Equal", "equal", "a == b", commutative=True)
greater = _compare("Greater", "greater", "a > b")
less = _compare("Less", "less", "a < b")
greater_equal = _compare("GreaterOrEqual", "greater_equal", "a >= b")
less_equal = _compare("LessOrEqual", "less_equal", "a <= b")
logical_and = _compare("And", "logical_and", "(a != 0.0f) && (b != 0.0f)", commutative=True)
logical_or = _compare("Or", "logical_or", "(a != 0.0f) || (b != 0.0f)", commutative=True)
logical_xor = _compare("Xor", "logical_xor", "(a != 0.0f) != (b != 0.0f)", commutative=True)

bitwise_and = _binary("BitwiseAnd", "bitwise_and")
bitwise_or = _binary("BitwiseOr", "bitwise_or")
bitwise_xor = _binary("BitwiseXor", "bitwise_xor")
bitwise_not = _unary("BitwiseNot", "bitwise_invert")


@operator("Not", "x", infer=boolean, pointwise=True, cuda="x == 0.0f")
def logical_not(xp: Any, x: Any) -> Any:
    return xp.ns.logical_not(x)


@operator("Identity", "x", infer=same, pointwise=True, moves=True, cuda="x")
def identity(xp: Any, x: Any) -> Any:
    return x


@operator("Reciprocal", "x", infer=same, pointwise=True, cuda="1.0f / x")
def reciprocal(xp: Any, x: Any) -> Any:
    return 1.0 / x


@operator("Sign", "x", infer=same, pointwise=True, cuda="x > 0.0f ? 1.0f : (x < 0.0f ? -1.0f : (x != x ? x : 0.0f))")
def sign(xp: Any, x: Any) -> Any:
    """As ONNX Sign; NaN stays NaN."""
    return xp.ns.sign(x)


@operator("Div", "a b", pointwise=True, cuda="a / b")
def div(xp: Any, a: Any, b: Any) -> Any:
    """As ONNX Div: integers are truncated toward zero."""
    if xp.floating(a) or xp.kind(a) == "c":
        return a / b
    quotient = xp.ns.floor_divide(a, b)
    if xp.kind(a) == "u":
        return quotient
    inexact = xp.ns.logical_and(xp.ns.remainder(a, b) != 0, (a < 0) != (b < 0))
    return quotient + xp.cast(inexact, xp.name_of(quotient))


@operator("Mod", "a b", attributes={"fmod": 0}, pointwise=True)
def mod(xp: Any, a: Any, b: Any, *, fmod: int) -> Any:
    """As ONNX Mod: the sign of ``b``, with ``fmod=1`` that of ``a`` (C's fmod)."""
    return xp.fmod(a, b) if fmod else xp.ns.remainder(a, b)


def _pow_type(inputs: Inputs, attributes: Attributes, constants: Constants) -> list[Type]:
    a, b = operand(inputs, 0), operand(inputs, 1)
    return [(a.dtype, broadcast(a.shape, b.shape))]


@operator("Pow", "a b", infer=_pow_type, pointwise=True, cuda="powf(a, b)")
def power(xp: Any, a: Any, b: Any) -> Any:
    """As ONNX Pow: the result has the base's dtype, whatever the exponent's."""
    name = xp.name_of(a)
    if xp.floating(a) and xp.floating(b) and xp.name_of(b) != name:
        wide = "float64" if "float64" in (name, xp.name_of(b)) else name
        return xp.cast(xp.ns.pow(xp.cast(a, wide), xp.cast(b, wide)), name)
    if xp.floating(a):
        return xp.ns.pow(a, xp.cast(b, name))
    if xp.floating(b):
        return xp.cast(xp.ns.pow(xp.cast(a, "float64"), xp.cast(b, "float64")), name)
    return xp.cast(xp.ns.pow(a, xp.cast(b, name)), name)


@operator("Max", "args*", pointwise=True, commutative=True, cuda="a != a ? a : (b != b ? b : (a > b ? a : b))")
def maximum(xp: Any, *args: Any) -> Any:
    """As ONNX Max; NaN in any operand gives NaN."""
    return reduce(xp.ns.maximum, args)


@operator("Min", "args*", pointwise=True, commutative=True, cuda="a != a ? a : (b != b ? b : (a < b ? a : b))")
def minimum(xp: Any, *args: Any) -> Any:
    """As ONNX Min; NaN in any operand gives NaN."""
    return reduce(xp.ns.minimum, args)


@operator("Sum", "args*", pointwise=True, commutative=True, cuda="a + b")
def total(xp: Any, *args: Any) -> Any:
    return reduce(xp.ns.add, args)


@operator("Mean", "args*", pointwise=True, commutative=True)
def mean(xp: Any, *args: Any) -> Any:
    return reduce(xp.ns.add, args) / len(args)


@operator(
    "Clip",
    "x min? max?",
    infer=same,
    pointwise=True,
    cuda="(HAS_max && (HAS_min && x < min ? min : x) > max) ? max : (HAS_min && x < min ? min : x)",
)
def clip(xp: Any, x: Any, low: Any = None, high: Any = None) -> Any:
    """As ONNX Clip: min(max(x, min), max); NaN in x stays NaN, and max wins where min > max."""
    if low is not None:
        x = xp.ns.where(x < low, low, x)
    if high is not None:
        x = xp.ns.where(x > high, high, x)
    return x


def _where_type(inputs: Inputs, attributes: Attributes, constants: Constants) -> list[Type]:
    return [(operand(inputs, 1).dtype, broadcast(*[v.shape for v in inputs if v is not None]))]


@operator("Where", "condition x y", infer=_where_type, pointwise=True, moves=True, cuda="condition != 0.0f ? x : y")
def where(xp: Any, condition: Any, x: Any, y: Any) -> Any:
    return xp.ns.where(condition, x, y)


def _cast_type(inputs: Inputs, attributes: Attributes, constants: Constants) -> list[Type]:
    return [(attributes["to"], operand(inputs, 0).shape)]


_FLOAT8_MAX = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}


def _convert(xp: Any, x: Any, to: str) -> Any:
    """To the dtype operators compute in for ``to``; a 16-bit target is left wide, so that it is rounded only once."""
    if to == "bool":
        return x != 0
    name = xp.compute_name(to)
    if name != to and not (xp.floating(x) and xp.name_of(x) == "float32"):
        name = "float64"
    return xp.cast(x, name)


def without_overflow(xp: Any, x: Any, to: str, saturate: int) -> Any:
    """Values beyond a float8's range: the largest number when saturating, else NaN where it has no infinity."""
    high = _FLOAT8_MAX.get(to)
    if high is None or xp.floats == "exact":
        return x
    if saturate:
        return xp.ns.where(x > high, xp.full((), high, x), xp.ns.where(x < -high, xp.full((), -high, x), x))
    if to == "float8_e4m3fn":  # libraries differ here; 464 is where rounding passes the largest number
        return xp.ns.where(xp.ns.abs(x) > high + 16.0, xp.full((), math.nan, x), x)
    return x


@operator(
    "Cast", "x", infer=_cast_type, pointwise=True, attributes={"to": "<required>", "saturate": 1, "round_mode": "up"}
)
def cast(xp: Any, x: Any, *, to: str, saturate: int, round_mode: str) -> Any:
    """As ONNX Cast: to nearest even among floats; float to integer truncates toward zero, as C and NumPy do."""
    return _convert(xp, without_overflow(xp, x, to, saturate), to)


def _cast_like_type(inputs: Inputs, attributes: Attributes, constants: Constants) -> list[Type]:
    return [(operand(inputs, 1).dtype, operand(inputs, 0).shape)]


@operator(
    "CastLike", "x target", infer=_cast_like_type, attributes={"saturate": 1, "round_mode": "up"}, host=("target",)
)
def cast_like(xp: Any, x: Any, target: Any, *, saturate: int, round_mode: str) -> Any:
    to = xp.name_of(target)
    return _convert(xp, without_overflow(xp, x, to, saturate), to)


@operator("IsNaN", "x", infer=boolean, pointwise=True, cuda="x != x")
def isnan(xp: Any, x: Any) -> Any:
    return xp.ns.isnan(x)


@operator("IsInf", "x", infer=boolean, attributes={"detect_negative": 1, "detect_positive": 1}, pointwise=True)
def isinf(xp: Any, x: Any, *, detect_negative: int, detect_positive: int) -> Any:
    y = xp.ns.isinf(x)
    if not detect_negative:
        y = xp.ns.logical_and(y, x > 0)
    return y if detect_positive else xp.ns.logical_and(y, x < 0)


@operator("BitShift", "a b", attributes={"direction": "<required>"}, pointwise=True)
def bit_shift(xp: Any, a: Any, b: Any, *, direction: str) -> Any:
    shift = xp.ns.bitwise_left_shift if direction == "LEFT" else xp.ns.bitwise_right_shift
    return shift(a, b)


log1p = _unary("fusionreg::Log1p", "log1p", "log1pf(x)", "log(1 + x), exact for small x.")
expm1 = _unary("fusionreg::Expm1", "expm1", "expm1f(x)", "exp(x) - 1, exact for small x.")
trunc = _unary("fusionreg::Trunc", "trunc", "truncf(x)", "x rounded toward zero.")
log2 = _unary("fusionreg::Log2", "log2", "log2f(x)", "The logarithm to base 2.")
atan2 = _binary("fusionreg::Atan2", "atan2", "atan2f(a, b)", False, "The angle of the point (b, a), in (-π, π].")
hypot = _binary("fusionreg::Hypot", "hypot", "hypotf(a, b)", True, "√(a² + b²) without overflow.")


@operator("fusionreg::Rsqrt", "x", infer=same, pointwise=True, cuda="1.0f / sqrtf(x)")
def rsqrt(xp: Any, x: Any) -> Any:
    """1 / sqrt(x), with both steps rounded in the compute dtype."""
    return 1.0 / xp.ns.sqrt(x)


@operator("fusionreg::Exp2", "x", infer=same, pointwise=True, cuda="exp2f(x)")
def exp2(xp: Any, x: Any) -> Any:
    """2 to the power x."""
    return xp.ns.exp(x * math.log(2.0)) if not hasattr(xp.ns, "exp2") else xp.ns.exp2(x)


OPS = specs_in(globals())
