"""Arithmetic, comparison and logic, with torch's type promotion spelled out as casts."""

from __future__ import annotations

import math
from typing import Any

import torch

from fusionreg.core.dtypes import DTYPES
from fusionreg.core.frozen import FrozenDict

from ..emitter import Emitter, Operand, V
from ..schemas import dtype_name, torch_dtype

_WIDE = ("float16", "bfloat16")


def common_dtype(*operands: Operand) -> str:
    """The dtype torch computes in: dimensioned tensors before 0-d ones before numbers, by category of type."""
    result: torch.dtype | None = None
    order = {"b": 0, "u": 1, "i": 1, "f": 2, "c": 3}
    tiers: list[list[torch.dtype]] = [[], [], []]
    for x in operands:
        if isinstance(x, V) and not x.number:
            tiers[0 if x.rank else 1].append(torch_dtype(x.dtype))
        elif isinstance(x, V):
            tiers[2].append(torch.float32 if x.floating else torch.int64)
        else:
            tiers[2].append(torch.bool if isinstance(x, bool) else torch.int64 if isinstance(x, int) else torch.float32)
    for tier in tiers:
        found: torch.dtype | None = None
        for d in tier:
            found = d if found is None else torch.promote_types(found, d)
        if found is None:
            continue
        if result is None or order[DTYPES[dtype_name(found)].kind] > order[DTYPES[dtype_name(result)].kind]:
            result = found
    return dtype_name(result or torch.float32)


def binary(op: str, logical: str = "") -> Any:
    """Emitter of a two-operand operator whose result dtype is the dtype it computes in."""

    def emit(e: Emitter, self: Operand, other: Operand, alpha: Any = 1, **_: Any) -> V:
        dtype = e.out.dtype
        if dtype == "bool" and logical:
            return e.op(logical, e.operand(self, "bool"), e.operand(other, "bool"))
        return combine(e, op, self, other, dtype, alpha)

    return emit


def combine(e: Emitter, op: str, a: Operand, b: Operand, dtype: str, alpha: Any = 1) -> V:
    """``op(a, alpha · b)`` in ``dtype``; a number too large or small for a 16-bit float is applied in float32."""
    numbers = [x for x in (a, b, alpha) if not isinstance(x, V)]
    wide = dtype in _WIDE and not all(e.fits(n, dtype) for n in numbers)
    inner = "float32" if wide else dtype
    right = e.operand(b, inner)
    if isinstance(alpha, V) or alpha != 1:
        right = e.op("Mul", right, e.operand(alpha, inner))
    return e.cast(e.op(op, e.operand(a, inner), right), dtype)


def reversed_binary(op: str) -> Any:
    """rsub: operands swapped."""

    def emit(e: Emitter, self: Operand, other: Operand, alpha: Any = 1, **_: Any) -> V:
        dtype = e.out.dtype
        right = e.operand(self, dtype)
        if alpha != 1:
            right = e.op("Mul", right, e.operand(alpha, dtype))
        return e.op(op, e.operand(other, dtype), right)

    return emit


def divide(e: Emitter, self: Operand, other: Operand, rounding_mode: str | None = None, **_: Any) -> V:
    dtype = e.out.dtype
    if rounding_mode is None:
        return combine(e, "Div", self, other, dtype)
    if DTYPES[dtype].floating:
        quotient = combine(e, "Div", self, other, dtype)
        return e.op("Floor", quotient) if rounding_mode == "floor" else truncate(e, quotient)
    a, b = e.operand(self, dtype), e.operand(other, dtype)
    if rounding_mode == "floor":  # integer Div truncates; a - (a mod b) is a multiple of b
        a = e.op("Sub", a, e.op("Mod", a, b))
    return e.op("Div", a, b)


def floor_divide(e: Emitter, self: Operand, other: Operand, **_: Any) -> V:
    return divide(e, self, other, "floor")


def truncate(e: Emitter, self: V, **_: Any) -> V:
    return e.op("fusionreg::Trunc", self) if self.floating else self


def remainder(e: Emitter, self: Operand, other: Operand, **_: Any) -> V:
    dtype = e.out.dtype
    a, b = e.operand(self, dtype), e.operand(other, dtype)
    if not DTYPES[dtype].floating:
        return e.op("Mod", a, b)
    return e.op("Sub", a, e.op("Mul", e.op("Floor", e.op("Div", a, b)), b))


def fmod(e: Emitter, self: Operand, other: Operand, **_: Any) -> V:
    dtype = e.out.dtype
    return e.op("Mod", e.operand(self, dtype), e.operand(other, dtype), fmod=1)


def power(e: Emitter, self: Operand, exponent: Operand, **_: Any) -> V:
    dtype = e.out.dtype
    base = e.operand(self, dtype)
    if exponent == 0.5 and not isinstance(exponent, V):
        return e.op("Sqrt", base)
    if exponent == 1 and not isinstance(exponent, V):
        return base
    return e.op("Pow", base, e.operand(exponent, dtype))


def unary(op: str, **attrs: Any) -> Any:
    """Emitter of a one-operand operator; integers become the result's float first."""

    def emit(e: Emitter, self: V, **_: Any) -> V:
        return e.op(op, e.cast(self, e.out.dtype), **attrs)

    return emit


def rounding(op: str) -> Any:
    def emit(e: Emitter, self: V, decimals: int = 0, **_: Any) -> V:
        if decimals:
            raise e.refuse(f"decimals={decimals}", "rounding to whole numbers")
        return e.op(op, self) if self.floating else self

    return emit


def log10(e: Emitter, self: V, **_: Any) -> V:
    return e.op("Div", e.op("Log", e.cast(self, e.out.dtype)), e.number(math.log(10.0), e.out.dtype))


def erfc(e: Emitter, self: V, **_: Any) -> V:
    x = e.cast(self, e.out.dtype)
    return e.op("Sub", e.number(1, x.dtype), e.op("Erf", x))


def square(e: Emitter, self: V, **_: Any) -> V:
    return e.op("Mul", self, self)


def compare(op: str, negate: bool = False) -> Any:
    def emit(e: Emitter, self: Operand, other: Operand, **_: Any) -> V:
        dtype = common_dtype(self, other)
        if dtype == "bool" and op != "Equal":
            dtype = "int32"
        result = e.op(op, e.operand(self, dtype), e.operand(other, dtype))
        return e.op("Not", result) if negate else result

    return emit


def logical(op: str) -> Any:
    def emit(e: Emitter, self: V, other: V | None = None, **_: Any) -> V:
        return e.op(op, *(e.cast(x, "bool") for x in (self, other) if x is not None))

    return emit


def bitwise(op: str, on_bool: str) -> Any:
    def emit(e: Emitter, self: Operand, other: Operand | None = None, **_: Any) -> V:
        dtype = e.out.dtype
        operands = [e.operand(x, dtype) for x in (self, other) if x is not None]
        return e.op(on_bool if dtype == "bool" else op, *operands)

    return emit


def shift(direction: str) -> Any:
    def emit(e: Emitter, self: Operand, other: Operand, **_: Any) -> V:
        dtype = e.out.dtype
        return e.op("BitShift", e.operand(self, dtype), e.operand(other, dtype), direction=direction)

    return emit


def is_finite(e: Emitter, self: V, **_: Any) -> V:
    if not self.floating:
        return e.op("Equal", self, self)
    return e.op("Not", e.op("Or", e.op("IsNaN", self), e.op("IsInf", self)))


def nan_to_num(
    e: Emitter, self: V, nan: float | None = None, posinf: float | None = None, neginf: float | None = None, **_: Any
) -> V:
    """NaN to ``nan`` (0), infinities to the largest finite numbers unless given."""
    if not self.floating:
        return self
    limit = torch.finfo(torch_dtype(self.dtype)).max
    x = e.op("Where", e.op("IsNaN", self), e.number(nan or 0.0, self.dtype), self)
    for sign, value in ((1, limit if posinf is None else posinf), (-1, -limit if neginf is None else neginf)):
        there = e.op("IsInf", self, detect_positive=int(sign > 0), detect_negative=int(sign < 0))
        x = e.op("Where", there, e.number(value, self.dtype), x)
    return x


def where(e: Emitter, condition: V, self: Operand, other: Operand, **_: Any) -> V:
    dtype = e.out.dtype
    return e.op("Where", e.cast(condition, "bool"), e.operand(self, dtype), e.operand(other, dtype))


def masked_fill(e: Emitter, self: V, mask: V, value: Operand, **_: Any) -> V:
    return e.op("Where", e.cast(mask, "bool"), e.operand(value, self.dtype), self)


def clamp(e: Emitter, self: V, min: Operand | None = None, max: Operand | None = None, **_: Any) -> V:
    dtype = e.out.dtype
    x = e.cast(self, dtype)
    scalars = all(not isinstance(b, V) or not b.rank for b in (min, max) if b is not None)
    if scalars:
        return e.op("Clip", x, *(None if b is None else e.operand(b, dtype) for b in (min, max)))
    x = x if min is None else e.op("Max", x, e.operand(min, dtype))
    return x if max is None else e.op("Min", x, e.operand(max, dtype))


def clamp_min(e: Emitter, self: V, min: Operand, **_: Any) -> V:
    return clamp(e, self, min)


def clamp_max(e: Emitter, self: V, max: Operand, **_: Any) -> V:
    return clamp(e, self, None, max)


def lerp(e: Emitter, self: V, end: V, weight: Operand, **_: Any) -> V:
    step = combine(e, "Mul", e.op("Sub", end, self), weight, e.out.dtype)
    return e.op("Add", self, step)


def addc(op: str) -> Any:
    def emit(e: Emitter, self: V, tensor1: V, tensor2: V, value: Any = 1, **_: Any) -> V:
        dtype = e.out.dtype
        term = e.op(op, e.cast(tensor1, dtype), e.cast(tensor2, dtype))
        return combine(e, "Add", self, term, dtype, value)

    return emit


def _overloads(names: str, emit: Any) -> dict[str, Any]:
    return {f"aten.{name}": emit for name in names.split()}


TABLE: FrozenDict[str, Any] = FrozenDict(
    {
        **_overloads("add.Tensor add.Scalar", binary("Add", "Or")),
        **_overloads("sub.Tensor sub.Scalar", binary("Sub")),
        **_overloads("mul.Tensor mul.Scalar", binary("Mul", "And")),
        **_overloads("rsub.Tensor rsub.Scalar", reversed_binary("Sub")),
        **_overloads("div.Tensor div.Scalar div.Tensor_mode div.Scalar_mode true_divide.Tensor", divide),
        **_overloads("floor_divide.default floor_divide.Scalar", floor_divide),
        **_overloads("remainder.Tensor remainder.Scalar", remainder),
        **_overloads("fmod.Tensor fmod.Scalar", fmod),
        **_overloads("pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar", power),
        **_overloads("atan2.default arctan2.default", binary("fusionreg::Atan2")),
        **_overloads("maximum.default max.other", binary("Max", "Or")),
        **_overloads("minimum.default min.other", binary("Min", "And")),
        **{
            f"aten.{name}.default": unary(op)
            for name, op in {
                "neg": "Neg",
                "abs": "Abs",
                "sqrt": "Sqrt",
                "exp": "Exp",
                "log": "Log",
                "sin": "Sin",
                "cos": "Cos",
                "tan": "Tan",
                "asin": "Asin",
                "acos": "Acos",
                "atan": "Atan",
                "sinh": "Sinh",
                "cosh": "Cosh",
                "asinh": "Asinh",
                "acosh": "Acosh",
                "atanh": "Atanh",
                "erf": "Erf",
                "reciprocal": "Reciprocal",
                "sign": "Sign",
                "sgn": "Sign",
                "rsqrt": "fusionreg::Rsqrt",
                "log1p": "fusionreg::Log1p",
                "expm1": "fusionreg::Expm1",
                "exp2": "fusionreg::Exp2",
                "log2": "fusionreg::Log2",
            }.items()
        },
        **_overloads("floor.default", rounding("Floor")),
        **_overloads("ceil.default", rounding("Ceil")),
        **_overloads("round.default round.decimals", rounding("Round")),
        **_overloads("trunc.default fix.default", truncate),
        **_overloads("log10.default", log10),
        **_overloads("erfc.default", erfc),
        **_overloads("square.default", square),
        **_overloads("eq.Tensor eq.Scalar", compare("Equal")),
        **_overloads("ne.Tensor ne.Scalar not_equal.Tensor not_equal.Scalar", compare("Equal", negate=True)),
        **_overloads("lt.Tensor lt.Scalar less.Tensor less.Scalar", compare("Less")),
        **_overloads("le.Tensor le.Scalar less_equal.Tensor less_equal.Scalar", compare("LessOrEqual")),
        **_overloads("gt.Tensor gt.Scalar greater.Tensor greater.Scalar", compare("Greater")),
        **_overloads("ge.Tensor ge.Scalar greater_equal.Tensor greater_equal.Scalar", compare("GreaterOrEqual")),
        **_overloads("logical_and.default", logical("And")),
        **_overloads("logical_or.default", logical("Or")),
        **_overloads("logical_xor.default", logical("Xor")),
        **_overloads("logical_not.default", logical("Not")),
        **_overloads(
            "bitwise_and.Tensor bitwise_and.Scalar __and__.Tensor __and__.Scalar", bitwise("BitwiseAnd", "And")
        ),
        **_overloads("bitwise_or.Tensor bitwise_or.Scalar __or__.Tensor __or__.Scalar", bitwise("BitwiseOr", "Or")),
        **_overloads(
            "bitwise_xor.Tensor bitwise_xor.Scalar __xor__.Tensor __xor__.Scalar", bitwise("BitwiseXor", "Xor")
        ),
        **_overloads("bitwise_not.default", bitwise("BitwiseNot", "Not")),
        **_overloads("__lshift__.Scalar bitwise_left_shift.Tensor_Scalar", shift("LEFT")),
        **_overloads("__rshift__.Scalar bitwise_right_shift.Tensor_Scalar", shift("RIGHT")),
        **_overloads("isfinite.default", is_finite),
        **_overloads("nan_to_num.default", nan_to_num),
        **_overloads("hypot.default", binary("fusionreg::Hypot")),
        **_overloads("isnan.default", lambda e, self, **_: e.op("IsNaN", self)),
        **_overloads("isinf.default", lambda e, self, **_: e.op("IsInf", self)),
        **_overloads("where.self where.ScalarSelf where.ScalarOther where.Scalar", where),
        **_overloads("masked_fill.Scalar masked_fill.Tensor", masked_fill),
        **_overloads("clamp.default clamp.Tensor clip.default clip.Tensor", clamp),
        **_overloads("clamp_min.default clamp_min.Tensor", clamp_min),
        **_overloads("clamp_max.default clamp_max.Tensor", clamp_max),
        **_overloads("lerp.Scalar lerp.Tensor", lerp),
        **_overloads("addcmul.default", addc("Mul")),
        **_overloads("addcdiv.default", addc("Div")),
    }
)
