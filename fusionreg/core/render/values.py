"""Python values as CUDA C++ text: exact, locale-free, and never able to carry code into a unit. Floor 4.

Everything a template prints passes through :func:`c_text`. Strings of a problem (dtypes, choices, attributes) are let
in only when they are identifiers; text that the renderer itself made is marked :class:`Code`.
"""

from __future__ import annotations

import math
import re
import struct
from typing import Any

from ..dtypes import dtype
from ..errors import RenderError

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")  # ASCII only, on purpose: \w would admit other alphabets

#: What a generated name may not be: C++ keywords, CUDA's own names, and the words the prelude defines.
_RESERVED = """
    alignas alignof and and_eq asm auto bitand bitor bool break case catch char char8_t char16_t char32_t class
    compl concept const consteval constexpr constinit const_cast continue co_await co_return co_yield decltype
    default delete do double dynamic_cast else enum explicit export extern false float for friend goto if inline int
    long mutable namespace new noexcept not not_eq nullptr operator or or_eq private protected public register
    reinterpret_cast requires return short signed sizeof static static_assert static_cast struct switch template
    this thread_local throw true try typedef typeid typename union unsigned using virtual void volatile wchar_t
    while xor xor_eq threadIdx blockIdx blockDim gridDim warpSize fr workspace entry signature include
"""
RESERVED = frozenset(_RESERVED.split())


class Code(str):
    """Text that is C++ already: printed as it is."""

    __slots__ = ()


class TypeName(str):
    """A dtype: compares as its name (``T == "float16"``) and prints as its CUDA type."""

    __slots__ = ()

    @property
    def cuda(self) -> str:
        return dtype(self).cuda

    @property
    def bits(self) -> int:
        return dtype(self).bits

    @property
    def bytes(self) -> int:
        return dtype(self).bytes


def identifier(name: str, whom: str = "") -> str:
    """``name``, when it is an ASCII C++ identifier that nothing else owns; :class:`RenderError` otherwise."""
    if not isinstance(name, str) or not _IDENTIFIER.match(name) or name in RESERVED or "__" in name:
        raise RenderError(
            "cannot render",
            whom,
            f"name {name!r}",
            "a plain identifier that C++ and CUDA do not reserve",
            variable=str(name),
        )
    return str(name)


def float_literal(value: float, *, double: bool = False) -> str:
    """The C++ constant expression of exactly ``value``, rounded once to ``float`` unless ``double``."""
    if double:
        bits = struct.unpack("<Q", struct.pack("<d", value))[0]
        exact, kind, suffix, raw = value, "double", "", f"0x{bits:016x}ULL"
    else:
        try:
            packed = struct.pack("<f", value)
        except OverflowError:  # beyond float's range: IEEE rounding gives an infinity
            packed = struct.pack("<f", math.copysign(math.inf, value))
        exact, kind, suffix = struct.unpack("<f", packed)[0], "float", "f"
        raw = f"0x{struct.unpack('<I', packed)[0]:08x}U"
    if not math.isfinite(exact):  # no literal exists, and NVRTC lacks __builtin_inff; this one is constexpr everywhere
        return f"__builtin_bit_cast({kind}, {raw})"
    text = "-0.0" if math.copysign(1.0, exact) < 0 else "0.0"
    if exact:
        mantissa, exponent = float.hex(exact).split("p")
        text = f"{mantissa.rstrip('0').rstrip('.')}p{exponent}"
    return f"({text}{suffix})" if text.startswith("-") else text + suffix


def int_literal(value: int, whom: str = "") -> str:
    """The C++ literal of an integer, of type int, long long or unsigned long long, the first that holds it."""
    if -(2**31) < value < 2**31:
        return str(value)
    if -(2**63) < value < 2**63:
        return f"({value}LL)" if value < 0 else f"{value}LL"
    if value == -(2**63):
        return "(-9223372036854775807LL - 1)"
    if 0 < value < 2**64:
        return f"{value}ULL"
    raise RenderError("cannot render", whom, f"integer {value}", "one that fits 64 bits")


def c_text(value: Any, whom: str = "") -> str:
    """What ``{{ value }}`` prints. :class:`RenderError` for what has no C++ form: None, lists, undefined names."""
    if isinstance(value, Code):
        return str.__str__(value)
    if isinstance(value, TypeName):
        return value.cuda
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return int_literal(value, whom)
    if isinstance(value, float):
        return float_literal(value)
    if isinstance(value, str):
        return str(value)
    raise RenderError(
        "cannot render", whom, f"a value of type {type(value).__name__} is printed", "a number, a word or code"
    )


def guarded(name: str, value: Any, whom: str = "") -> Any:
    """A value of a problem as a template may see it; strings must be identifiers, so that no value carries code."""
    if value is None or isinstance(value, bool | int | float | Code | TypeName):
        return value
    if isinstance(value, str):
        if not _IDENTIFIER.match(value):
            raise RenderError(
                "cannot render", whom, f"{name} = {value!r}", "a word of letters, digits and underscores", variable=name
            )
        return value
    raise RenderError("cannot render", whom, f"{name} is a {type(value).__name__}", "a number or a word", variable=name)
