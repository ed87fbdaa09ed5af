"""Element-wise arithmetic, comparison, logic and bits. Floor 1.

Source of every definition: ONNX operator documentation, newest version. NaN is kept by Min, Max and Clip.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import reduce
from typing import Any

from ..dtypes import DTYPES
from .define import operator, specs_in
from .inference import Attributes, Constants, Inputs, Type, boolean, broadcast, operand, same

Cuda = str | Mapping[str, str]


def _unary(name: str, function: str, cuda: Cuda, summary: str = "") -> Any:
    def meaning(xp: Any, x: Any) -> Any:
        return getattr(xp.ns, function)(x)

    meaning.__doc__ = summary
    return operator(name, "x", infer=same, pointwise=True, cuda=cuda)(meaning)


def _binary(name: str, function: str, cuda: Cuda, commutative: bool = True, summary: str = "") -> Any:
    def meaning(xp: Any, a: Any, b: Any) -> Any:
        return getattr(xp.ns, function)(a, b)

    meaning.__doc__ = summary
    return operator(name, "a b", pointwise=True, commutative=commutative, cuda=cuda)(meaning)


def _compare(name: str, function: str, text: str, commutative: bool = False) -> Any:
    def meaning(xp: Any, a: Any, b: Any) -> Any:
        return getattr(xp.ns, function)(a, b)

    return operator(name, "a b", infer=boolean, pointwise=True, commutative=commutative, cuda={"fiub": text})(meaning)


add = _binary("Add", "add", {"f": "a + b", "iu": "U(a) + U(b)"})
sub = _binary("Sub", "subtract", {"f": "a - b", "iu": "U(a) - U(b)"}, commutative=False)
mul = _binary("Mul", "multiply", {"f": "a * b", "iu": "U(a) * U(b)"})

neg = _unary("Neg", "negative", {"f": "-x", "iu": "0 - U(x)"})
absolute = _unary("Abs", "abs", {"f": "fabsf(x)", "i": "x < 0 ? 0 - U(x) : U(x)", "u": "x"})
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
logical_and = _compare("And", "logical_and", "a && b", commutative=True)
logical_or = _compare("Or", "logical_or", "a || b", commutative=True)
logical_xor = _compare("Xor", "logical_xor", "!a != !b", commutative=True)

bitwise_and = _binary("BitwiseAnd", "bitwise_and", {"iub": "a & b"})
bitwise_or = _binary("BitwiseOr", "bitwise_or", {"iub": "a | b"})
bitwise_xor = _binary("BitwiseXor", "bitwise_xor", {"iub": "a ^ b"})
bitwise_not = _unary("BitwiseNot", "bitwise_invert", {"iu": "~x", "b": "!x"})


@operator("Not", "x", infer=boolean, pointwise=True, cuda={"fiub": "!x"})
def logical_not(xp: Any, x: Any) -> Any:
    return xp.ns.logical_not(x)


@operator("Identity", "x", infer=same, pointwise=True, moves=True, cuda={"fiub": "x"})
def identity(xp: Any, x: Any) -> Any:
    return x


@operator("Reciprocal", "x", infer=same, pointwise=True, cuda="1.0f / x")
def reciprocal(xp: Any, x: Any) -> Any:
    return 1.0 / x


@operator(
    "Sign",
    "x",
    infer=same,
    pointwise=True,
    cuda={
        "f": "x > 0.0f ? 1.0f : x < 0.0f ? -1.0f : x == x ? 0.0f : x",
        "i": "x > 0 ? 1 : x < 0 ? -1 : 0",
        "u": "x > 0 ? 1 : 0",
    },
)
def sign(xp: Any, x: Any) -> Any:
    """As ONNX Sign; NaN stays NaN."""
    return xp.ns.sign(x)


#: Integers that cannot be divided: the library's answers are 0 for b = 0, and wrapping for the least number by -1.
_QUOTIENT = {
    "f": "CONSTANT_b ? fr::over_constant(a, b) : a / b",
    "i": "b == 0 ? T(0) : b == -1 ? T(0 - U(a)) : T(a / b)",
    "u": "b == 0 ? T(0) : T(a / b)",
}
_MODULUS = {
    "f": """r = fmodf(a, b);
        fmod || r != r ? r : r == 0.0f ? copysignf(0.0f, b) : (r < 0.0f) != (b < 0.0f) ? r + b : r""",
    "i": "r = b == 0 || b == -1 ? T(0) : T(a % b); fmod || r == 0 || (r < 0) == (b < 0) ? r : r + b",
    "u": "b == 0 ? T(0) : T(a % b)",
}


@operator("Div", "a b", pointwise=True, cuda=_QUOTIENT)
def div(xp: Any, a: Any, b: Any) -> Any:
    """As ONNX Div: integers are truncated toward zero."""
    if xp.floating(a) or xp.kind(a) == "c":
        return a / b
    quotient = xp.ns.floor_divide(a, b)
    if xp.kind(a) == "u":
        return quotient
    inexact = xp.ns.logical_and(xp.ns.remainder(a, b) != 0, (a < 0) != (b < 0))
    return quotient + xp.cast(inexact, xp.name_of(quotient))


@operator("Mod", "a b", attributes={"fmod": 0}, pointwise=True, cuda=_MODULUS)
def mod(xp: Any, a: Any, b: Any, *, fmod: int) -> Any:
    """As ONNX Mod: the sign of ``b``, with ``fmod=1`` that of ``a`` (C's fmod)."""
    return xp.fmod(a, b) if fmod else xp.ns.remainder(a, b)


def _pow_type(inputs: Inputs, attributes: Attributes, constants: Constants) -> list[Type]:
    a, b = operand(inputs, 0), operand(inputs, 1)
    return [(a.dtype, broadcast(a.shape, b.shape))]


@operator("Pow", "a b", infer=_pow_type, pointwise=True)
def power(xp: Any, a: Any, b: Any) -> Any:
    """As ONNX Pow: the result has the base's dtype, whatever the exponent's."""
    name = xp.name_of(a)
    if xp.floating(a) and xp.floating(b) and xp.name_of(b) != name:
        wide = "float64" if "float64" in (name, xp.name_of(b)) else name
        return xp.cast(xp.ns.pow(xp.cast(a, wide), xp.cast(b, wide)), name)
    if xp.floating(a):
        return xp.ns.pow(a, xp.cast(b, name))
    if xp.floating(b):
        return whole(xp, xp.ns.pow(xp.cast(a, "float64"), xp.cast(b, "float64")), name, name)
    return xp.cast(xp.ns.pow(a, xp.cast(b, name)), name)


@operator(
    "Max",
    "args*",
    pointwise=True,
    commutative=True,
    cuda={"f": "a >= b || a != a ? a : b", "iu": "a > b ? a : b"},
)
def maximum(xp: Any, *args: Any) -> Any:
    """As ONNX Max; NaN in any operand gives NaN."""
    return reduce(xp.ns.maximum, args)


@operator(
    "Min",
    "args*",
    pointwise=True,
    commutative=True,
    cuda={"f": "a <= b || a != a ? a : b", "iu": "a < b ? a : b"},
)
def minimum(xp: Any, *args: Any) -> Any:
    """As ONNX Min; NaN in any operand gives NaN."""
    return reduce(xp.ns.minimum, args)


@operator("Sum", "args*", pointwise=True, commutative=True, cuda={"f": "a + b", "iu": "U(a) + U(b)"})
def total(xp: Any, *args: Any) -> Any:
    return reduce(xp.ns.add, args)


@operator(
    "Mean",
    "args*",
    pointwise=True,
    commutative=True,
    cuda="s = a + b; LAST ? fr::over_constant(s, T(COUNT)) : s",
)
def mean(xp: Any, *args: Any) -> Any:
    return reduce(xp.ns.add, args) / len(args)


@operator(
    "Clip",
    "x min? max?",
    infer=same,
    pointwise=True,
    cuda={"fiu": "raised = HAS_min && x < min ? min : x; HAS_max && raised > max ? max : raised"},
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


@operator("Where", "condition x y", infer=_where_type, pointwise=True, moves=True, cuda={"fiub": "condition ? x : y"})
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
    if xp.floating(x) and to in DTYPES and DTYPES[to].kind in "iu":
        return whole(xp, x, to, name)
    if name != to and not (xp.floating(x) and xp.name_of(x) == "float32"):
        name = "float64"
    return xp.cast(x, name)


def whole(xp: Any, x: Any, to: str, name: str) -> Any:
    """Floats as integers of range ``to`` in dtype ``name``: truncated; the nearest one beyond the range, 0 for NaN."""
    row, held = DTYPES[to], DTYPES[name]
    low = -(2 ** (row.bits - 1)) if row.kind == "i" else 0
    bits = row.bits - (row.kind == "i")
    above, below = x >= 2.0**bits, x <= low
    outside = xp.ns.logical_or(xp.ns.logical_or(above, below), x != x)
    y = xp.cast(xp.ns.where(outside, xp.full((), 0.0, x), x), name)
    most = 2 ** min(bits, held.bits - (held.kind == "i")) - 1
    return xp.ns.where(above, xp.full((), most, y), xp.ns.where(below, xp.full((), low, y), y))


def without_overflow(xp: Any, x: Any, to: str, saturate: int) -> Any:
    """Values beyond a float8's range: the largest number when saturating, else NaN where it has no infinity."""
    high = _FLOAT8_MAX.get(to)
    if high is None or (xp.floats == "exact" and not saturate):  # where nothing is rounded, nothing overflows
        return x
    x = x if xp.floating(x) else xp.cast(x, "float64")
    if saturate:
        return xp.ns.where(x > high, xp.full((), high, x), xp.ns.where(x < -high, xp.full((), -high, x), x))
    if to == "float8_e4m3fn":  # libraries differ here; 464 is where rounding passes the largest number
        return xp.ns.where(xp.ns.abs(x) > high + 16.0, xp.full((), math.nan, x), x)
    return x


@operator(
    "Cast", "x", infer=_cast_type, pointwise=True, attributes={"to": "<required>", "saturate": 1, "round_mode": "up"}
)
def cast(xp: Any, x: Any, *, to: str, saturate: int, round_mode: str) -> Any:
    """As ONNX Cast: to nearest even among floats; float to integer truncates toward zero.

    What ONNX leaves open, alike in every library: beyond an integer's range its nearest number, and 0 for NaN.
    """
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


@operator(
    "IsInf",
    "x",
    infer=boolean,
    attributes={"detect_negative": 1, "detect_positive": 1},
    pointwise=True,
    cuda="detect_positive && x == fr::infinity() || detect_negative && x == -fr::infinity()",
)
def isinf(xp: Any, x: Any, *, detect_negative: int, detect_positive: int) -> Any:
    y = xp.ns.isinf(x)
    if not detect_negative:
        y = xp.ns.logical_and(y, x > 0)
    return y if detect_positive else xp.ns.logical_and(y, x < 0)


#: All bits are shifted out where b is no position of a bit.
_SHIFT = {
    "i": """in = U(b) < 8 * sizeof(T);
        direction_LEFT ? (in ? T(U(a) << b) : T(0)) : direction_RIGHT && in ? T(a >> b) : a < 0 ? T(-1) : T(0)""",
    "u": "U(b) >= 8 * sizeof(T) ? T(0) : direction_LEFT ? T(U(a) << b) : direction_RIGHT ? T(a >> b) : T(0)",
}


@operator("BitShift", "a b", attributes={"direction": "<required>"}, pointwise=True, cuda=_SHIFT)
def bit_shift(xp: Any, a: Any, b: Any, *, direction: str) -> Any:
    shift = xp.ns.bitwise_left_shift if direction == "LEFT" else xp.ns.bitwise_right_shift
    return shift(a, b)


log1p = _unary("fusionreg::Log1p", "log1p", "log1pf(x)", "log(1 + x), exact for small x.")
expm1 = _unary("fusionreg::Expm1", "expm1", "expm1f(x)", "exp(x) - 1, exact for small x.")
trunc = _unary("fusionreg::Trunc", "trunc", "truncf(x)", "x rounded toward zero.")
log2 = _unary("fusionreg::Log2", "log2", "log2f(x)", "The logarithm to base 2.")
atan2 = _binary("fusionreg::Atan2", "atan2", "atan2f(a, b)", False, "The angle of the point (b, a), in (-π, π].")
hypot = _binary("fusionreg::Hypot", "hypot", "hypotf(a, b)", True, "√(a² + b²) without overflow.")


@operator("fusionreg::Rsqrt", "x", infer=same, pointwise=True, cuda="rsqrtf(x)")
def rsqrt(xp: Any, x: Any) -> Any:
    """1 / sqrt(x), with both steps rounded in the compute dtype."""
    return 1.0 / xp.ns.sqrt(x)


@operator("fusionreg::Exp2", "x", infer=same, pointwise=True, cuda="exp2f(x)")
def exp2(xp: Any, x: Any) -> Any:
    """2 to the power x."""
    return xp.ns.exp(x * math.log(2.0)) if not hasattr(xp.ns, "exp2") else xp.ns.exp2(x)


OPS = specs_in(globals())
