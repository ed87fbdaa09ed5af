"""Point-wise operators as CUDA text, for generated device functions. Floor 1."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from ..errors import SpecError
from ..spec import OpSpec
from .vocabulary import complete

_NAME = re.compile(r"(?<![\w.:])[A-Za-z_]\w*(?!\w|::|\()")


def cuda_expression(spec: OpSpec, operands: Mapping[str, str], attributes: Mapping[str, Any]) -> str:
    """``spec.cuda`` with operands and attributes put in, each operand in parentheses.

    ``operands``: C++ text per input name; an optional input that is left out is omitted. Variadic inputs are
    ``a`` and ``b``.

    Raises:
        SpecError: the operator has no CUDA text, or it uses a name that is neither.
    """
    if not spec.cuda:
        raise SpecError("no CUDA text", spec.name, "an operator without an expression", "a point-wise one")
    values = complete(spec, attributes)
    optional = {n.rstrip("?*") for n in spec.inputs if n.endswith("?")}

    def put(match: re.Match[str]) -> str:
        name = match.group()
        if name in operands:
            return f"({operands[name]})"
        if name.startswith("HAS_"):
            return "true" if name[4:] in operands else "false"
        if name in optional:
            return "0.0f"
        if name in values and not isinstance(values[name], str):
            return cuda_float(float(values[name]))
        for key, value in values.items():
            if isinstance(value, str) and name.startswith(f"{key}_"):
                return "true" if name == f"{key}_{value}" else "false"
        if name in ("true", "false"):
            return name
        raise SpecError("bad CUDA text", spec.name, f"unknown name {name!r}", "an input or attribute", field="cuda")

    return _NAME.sub(put, spec.cuda)


def cuda_float(value: float) -> str:
    """A float literal of exactly the float nearest ``value``."""
    if math.isnan(value):
        return "__int_as_float(0x7fffffff)"
    if math.isinf(value):
        return f"__int_as_float({'0x7f800000' if value > 0 else '0xff800000'})"
    text = f"{float(value).hex()}f"
    return f"({text})" if text.startswith("-") else text
