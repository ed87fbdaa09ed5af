"""Point-wise operators whose operands differ in dtype, as CUDA: Cast, CastLike and Pow. Floor 4."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from ..dtypes import DTYPES, dtype
from .ctypes import compute_type, literal, unsigned
from .values import float_literal

Lines = Iterator[str]


@dataclass(frozen=True)
class Written:
    """How an operator is written.

    Attributes:
        refuses: ``f(operand dtypes, result dtype, attributes)`` gives why it cannot be, or "".
        lines: ``f(local, operands, dtypes, numbers, result dtype, attributes, alias)`` gives the lines that define the
            variable ``local``. Operands are C++ names, "" where omitted; numbers their values where they are constant.
    """

    refuses: Callable[[Sequence[str], str, Mapping[str, Any]], str]
    lines: Callable[..., Lines]


@dataclass(frozen=True)
class Narrow:
    """A float below 32 bits, for rounding to it by the bits of a float.

    Attributes:
        drop: fraction bits of a float that it lacks.
        least: its least normal number.
        adder: a power of two whose floats are as far apart as its subnormal numbers; 0 where its exponents are float's.
        largest: its largest number.
        infinite: whether it has infinities.
        header: the macro of the CUDA header whose conversion is one instruction; "" where there is none such.
    """

    drop: int
    least: float
    adder: float
    largest: float
    infinite: bool
    header: str = ""


NARROW: Mapping[str, Narrow] = MappingProxyType(
    {
        "float16": Narrow(13, 2.0**-14, 2.0**-1, 65504.0, True, "__CUDA_FP16_H__"),
        "bfloat16": Narrow(16, 0.0, 0.0, float.fromhex("0x1.fep127"), True, "__CUDA_BF16_H__"),
        "float8_e4m3fn": Narrow(20, 2.0**-6, 2.0**14, 448.0, False),
        "float8_e5m2": Narrow(21, 2.0**-14, 2.0**7, 57344.0, True),
    }
)


def holds(to: str, source: str) -> bool:
    """Whether float dtype ``to`` holds every number of dtype ``source``."""
    a, b = DTYPES[to], DTYPES[source]
    if to == source or b.kind == "b" or (to == "float64" and b.bits < 64):
        return True
    if b.kind != "f":  # integers: all bits are significant, and a sign is none of them
        return b.bits - (b.kind == "i") <= a.mantissa + 1 and a.bits >= 16
    if a.bits == 32 or (b.bits == 8 and a.bits == 16):
        return b.bits < a.bits
    return False


def _cast_refuses(dtypes: Sequence[str], result: str, attributes: Mapping[str, Any]) -> str:
    if attributes["round_mode"] != "up":
        return f"round_mode={attributes['round_mode']!r}"
    return ""


def _cast(
    local: str, operands: Sequence[str], dtypes: Sequence[str], numbers: Sequence[Any], own: str,
    attributes: Mapping[str, Any], alias: Callable[[str], str],
) -> Lines:  # fmt: skip
    yield from convert(local, operands[0], dtypes[0], own, bool(attributes["saturate"]))


def convert(local: str, x: str, source: str, to: str, saturate: bool = True) -> Lines:
    """Lines that define ``local``, of the compute type of ``to``, as ``x`` of dtype ``source`` converted to ``to``."""
    a, b, kind = dtype(to), dtype(source), compute_type(to)
    saturates = to == "float8_e5m2" and saturate and b.kind == "f"  # its own infinity too
    if to == "bool":
        yield f"const bool {local} = {x} != 0;"
    elif a.kind != "f" and b.kind == "f":
        yield f"const {kind} {local} = {_whole(x, to, source)};"
    elif a.kind != "f" or to in ("float32", "float64") or (holds(to, source) and not saturates):
        yield f"const {kind} {local} = static_cast<{kind}>({x});"
    else:
        if source == "float64":
            yield from _to_odd(local, x)
        elif b.kind != "f" and b.bits >= 32 and to == "bfloat16":  # the others end where a float holds all integers
            yield from _sticky(local, x, source) if b.bits == 64 else [f"const double {local}_wide = {x};"]
            yield from _to_odd(local, f"{local}_wide")
        else:
            yield f"const float {local}_x = static_cast<float>({x});"
        yield from _rounded(local, f"{local}_x", to, saturate)


def _whole(x: str, to: str, source: str) -> str:
    """Truncated toward zero; beyond the integer's range its least or largest number, 0 for NaN."""
    row, double = dtype(to), source == "float64"
    bits = row.bits - (row.kind == "i")
    low, high = -(2**bits) if row.kind == "i" else 0, 2**bits - 1
    above, below = (float_literal(float(v), double=double) for v in (2**bits, low))
    least, most = literal(low, to), literal(high, to)
    kind = compute_type(to)
    inside = f"{x} >= {above} ? static_cast<{kind}>({most}) : {x} <= {below} ? static_cast<{kind}>({least})"
    return f"{x} != {x} ? static_cast<{kind}>(0) : {inside} : static_cast<{kind}>({x})"


def _to_odd(local: str, x: str) -> Lines:
    """``local_x``: double ``x`` as float, an inexact one with its last bit set: rounding once more is then right."""
    yield f"const float {local}_near = static_cast<float>({x});"
    yield f"const double {local}_back = {local}_near;"
    yield f"const unsigned int {local}_less = fabs({local}_back) > fabs({x}) ? 1u : 0u;"
    yield (
        f"const float {local}_x = __uint_as_float((__float_as_uint({local}_near) - {local}_less)"
        f" | ({local}_back != {x} ? 1u : 0u));"
    )


def _sticky(local: str, x: str, source: str) -> Lines:
    """``local_wide``: a 64-bit integer as double, what its last place cannot hold being or-ed into it."""
    negative = f"{x} < 0" if dtype(source).kind == "i" else "false"
    yield f"const unsigned long long {local}_u = {x};"
    yield f"const unsigned long long {local}_m = {negative} ? 0 - {local}_u : {local}_u;"
    yield (
        f"const double {local}_d = {local}_m >> 53 ? static_cast<double>(({local}_m >> 11 |"
        f" (({local}_m & 2047) != 0 ? 1 : 0)) << 11) : static_cast<double>({local}_m);"
    )
    yield f"const double {local}_wide = {negative} ? -{local}_d : {local}_d;"


def _rounded(local: str, x: str, to: str, saturate: bool) -> Lines:
    """``local``: float ``x`` rounded to nearest even among the numbers of ``to``."""
    row = NARROW[to]
    cuda = dtype(to).cuda
    if row.header:
        yield f"#ifdef {row.header}"
        yield f"const float {local} = fr::to_float(fr::from_float<{cuda}>({x}));"
        yield "#else"
    half, mask = 2 ** (row.drop - 1) - 1, 2**32 - 2**row.drop
    yield f"const unsigned int {local}_bits = __float_as_uint({x}) & 0x7fffffffu;"
    yield (
        f"const float {local}_normal = __uint_as_float(({local}_bits + {half:#x}u + ({local}_bits >> {row.drop} & 1u))"
        f" & {mask:#x}u);"
    )
    size = f"{local}_normal"
    if row.adder:
        adder, size = float_literal(row.adder), f"{local}_size"
        yield (
            f"const float {size} = fabsf({x}) < {float_literal(row.least)} ? (fabsf({x}) + {adder}) - {adder}"
            f" : {local}_normal;"
        )
    largest = float_literal(row.largest)
    over = "fr::infinity()" if row.infinite else "__int_as_float(0x7fffffff)"
    if saturate and dtype(to).bits == 8:
        over = largest
    yield f"const float {local} = {x} != {x} ? {x} : copysignf({size} > {largest} ? {over} : {size}, {x});"
    if row.header:
        yield "#endif"


def _pow_refuses(dtypes: Sequence[str], result: str, attributes: Mapping[str, Any]) -> str:
    kinds = "".join(dtype(d).kind for d in dtypes)
    return "" if set(kinds) <= set("fiu") else f"Pow of {' and '.join(dtypes)}"


def _pow(
    local: str, operands: Sequence[str], dtypes: Sequence[str], numbers: Sequence[Any], own: str,
    attributes: Mapping[str, Any], alias: Callable[[str], str],
) -> Lines:  # fmt: skip
    (a, b), kinds, kind = operands, [dtype(d).kind for d in dtypes], compute_type(own)
    if kinds[0] == "f" and numbers[1] in (2, 3):  # a product is nearer to the power than powf
        yield f"const {kind} {local} = {' * '.join([a] * int(numbers[1]))};"
    elif kinds[0] == "f" and "float64" not in dtypes:
        yield f"const float {local} = powf({a}, static_cast<float>({b}));"
    elif kinds[0] == "f":
        yield f"const {kind} {local} = pow(static_cast<double>({a}), static_cast<double>({b}));"
    elif kinds[1] == "f":
        yield f"const double {local}_real = pow(static_cast<double>({a}), static_cast<double>({b}));"
        yield f"const {kind} {local} = {_whole(f'{local}_real', own, 'float64')};"
    else:
        yield from _whole_power(local, a, b, own, alias)


def _whole_power(local: str, a: str, b: str, own: str, alias: Callable[[str], str]) -> Lines:
    """By squaring, in unsigned numbers. A negative exponent gives 1 / a**-b truncated, and 0 for a = 0."""
    wide, kind, signed = alias(unsigned(own)), compute_type(own), dtype(own).kind == "i"
    yield f"const {kind} {local}_left = static_cast<{kind}>({b});"
    yield f"{wide} {local}_power = 1, {local}_square = {wide}({a});"
    yield (
        f"for ({wide} i = {local}_left > 0 ? {local}_left : 0; i; i >>= 1, {local}_square *= {local}_square)"
        f" if (i & 1) {local}_power *= {local}_square;"
    )
    power = f"static_cast<{kind}>({local}_power)"
    if signed:
        inverse = f"{a} == 1 || ({a} == -1 && {local}_left % 2 == 0) ? 1 : {a} == -1 ? -1 : 0"
        power = f"{local}_left >= 0 ? {power} : static_cast<{kind}>({inverse})"
    yield f"const {kind} {local} = {power};"


CONVERSIONS: Mapping[str, Written] = MappingProxyType(
    {
        "Cast": Written(_cast_refuses, _cast),
        "CastLike": Written(_cast_refuses, _cast),
        "Pow": Written(_pow_refuses, _pow),
    }
)
