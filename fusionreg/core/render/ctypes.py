"""What a dtype is computed in, and numbers as literals of it. Floor 4."""

from __future__ import annotations

from typing import Any

from ..dtypes import dtype
from .values import float_literal, int_literal


def compute_type(name: str) -> str:
    """The C++ type that values of a dtype are computed in: float, double, or its own for integers and bool."""
    row = dtype(name)
    return row.cuda if row.kind != "f" else "double" if name == "float64" else "float"


def alias(name: str) -> str:
    """A word for that type: ``f32``, ``i8`` … ``u64``, ``b8``."""
    row = dtype(name)
    return f"f{max(row.bits, 32)}" if row.kind == "f" else f"{row.kind}{row.bits}"


def unsigned(name: str) -> str:
    """The dtype that integers of a dtype compute in, so that they wrap: small ones must not become signed ``int``."""
    return "uint64" if dtype(name).bits == 64 else "uint32"


def literal(value: Any, name: str) -> str:
    """``value``, which dtype ``name`` holds exactly (a float is rounded to it), in its compute type."""
    kind = dtype(name).kind
    if kind == "b":
        return "true" if value else "false"
    return float_literal(float(value), double=name == "float64") if kind == "f" else int_literal(int(value))
