"""Derivatives of element-wise operators; the formulas are those of torch's own gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any

import torch

from fusionreg.core.frozen import FrozenDict

from .. import schemas
from .rule import Rule, rule

aten = torch.ops.aten


def tensor(value: Any, like: torch.Tensor) -> torch.Tensor:
    """A number as a tensor without axes, of the dtype of another."""
    if isinstance(value, torch.Tensor):
        return value
    return torch.full((), value, dtype=like.dtype, device=like.device)


def tensors(*values: Any) -> list[torch.Tensor]:
    """Numbers among tensors as tensors too."""
    like = next(v for v in values if isinstance(v, torch.Tensor))
    return [tensor(v, like) for v in values]


def _of_tensors(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(a: Any, b: Any) -> Any:
        return function(*tensors(a, b))

    return call


def _flat(function: Callable[..., Any]) -> Rule:
    """A function that is constant between its steps."""
    return rule(function)


def _power(a: Any, b: Any) -> Any:
    return aten.pow(a, b)


def _power_base(dy: Any, a: Any, b: Any) -> Any:
    if isinstance(b, int | float):
        return aten.zeros_like(dy) if b == 0 else dy * (b * aten.pow(a, b - 1))
    return aten.where(b == 0, 0.0, dy * (b * aten.pow(a, b - 1)))


def _power_exponent(dy: Any, a: Any, b: Any, y: Any) -> Any:
    a, b = tensors(a, b)
    at_zero = (a == 0) & (b >= 0)
    return dy * aten.where(at_zero, 0.0, y * aten.where(at_zero, 1.0, a).log())


def _folded(function: Callable[..., Any], beyond: Callable[[Any, Any], Any]) -> Rule:
    """Of many operands, two at a time; where both are as large each has half of the gradient."""

    def value(*args: Any) -> Any:
        return reduce(function, tensors(*args))

    def gradients(dy: Any, args: Any) -> tuple[Any, ...]:
        given = tensors(*args)
        partial = [given[0]]
        for x in given[1:]:
            partial.append(function(partial[-1], x))
        found: list[Any] = []
        for a, b in zip(partial[-2::-1], given[:0:-1], strict=True):
            shared = aten.where(a == b, dy / 2, dy)
            found.append(aten.where(beyond(b, a), 0.0, shared))
            dy = aten.where(beyond(a, b), 0.0, shared)
        return (dy, *found[::-1])

    return rule(value, args=gradients)


def _clip(x: Any, min: Any, max: Any) -> Any:
    return aten.clamp(x, min, max) if _numbers(min, max) else aten.clamp(x, *_bounds(x, min, max))


def _numbers(*values: Any) -> bool:
    return not any(isinstance(v, torch.Tensor) for v in values)


def _bounds(x: Any, *values: Any) -> list[Any]:
    return [None if v is None else tensor(v, x) for v in values]


def _clip_x(dy: Any, x: Any, min: Any, max: Any) -> Any:
    if min is not None:
        dy = aten.where(x >= min, dy, 0.0)
    return dy if max is None else aten.where(x <= max, dy, 0.0)


def _clip_min(dy: Any, x: Any, min: Any, max: Any) -> Any:
    dy = aten.where(x < min, dy, 0.0)
    return dy if max is None else aten.where(tensor(min, x) < max, dy, 0.0)


def _clip_max(dy: Any, x: Any, min: Any, max: Any) -> Any:
    beyond = x > max if min is None else (x > max) | (tensor(max, x) < min)
    return aten.where(beyond, dy, 0.0)


def _cast(x: Any, *, to: str) -> Any:
    return x.to(schemas.torch_dtype(to))


def _hypot(dy: Any, a: Any, y: Any) -> Any:
    return dy * (a / y)


def _isinf(x: Any, *, detect_negative: int, detect_positive: int) -> Any:
    y = aten.isinf(x)
    if not detect_negative:
        y = y & (x > 0)
    return y if detect_positive else y & (x < 0)


def _modulus(a: Any, b: Any, *, fmod: int) -> Any:
    return aten.fmod(a, b) if fmod else aten.remainder(*tensors(a, b))


def _modulus_b(dy: Any, a: Any, b: Any, *, fmod: int) -> Any:
    return -dy * aten.div(a, b, rounding_mode="trunc" if fmod else "floor")


_ARITHMETIC = {
    "Add": rule(lambda a, b: a + b, a=lambda dy: dy, b=lambda dy: dy),
    "Sub": rule(lambda a, b: a - b, a=lambda dy: dy, b=lambda dy: -dy),
    "Mul": rule(lambda a, b: a * b, a=lambda dy, b: dy * b, b=lambda dy, a: dy * a),
    "Div": rule(lambda a, b: a / b, a=lambda dy, b: dy / b, b=lambda dy, a, b: -dy * (a / b / b)),
    "Pow": rule(_power, a=_power_base, b=_power_exponent),
    "Mod": rule(_modulus, a=lambda dy: dy, b=_modulus_b),
    "Max": _folded(aten.maximum, lambda a, b: a < b),
    "Min": _folded(aten.minimum, lambda a, b: a > b),
    "Sum": rule(lambda *args: reduce(lambda a, b: a + b, args), args=lambda dy, args: (dy,) * len(args)),
    "Mean": rule(
        lambda *args: reduce(lambda a, b: a + b, args) / len(args),
        args=lambda dy, args: (dy / len(args),) * len(args),
    ),
    "Where": rule(
        lambda condition, x, y: aten.where(condition, x, y),
        x=lambda dy, condition: aten.where(condition, dy, 0.0),
        y=lambda dy, condition: aten.where(condition, 0.0, dy),
    ),
    "Clip": rule(_clip, x=_clip_x, min=_clip_min, max=_clip_max),
    "Cast": rule(_cast, x=lambda dy, *, dtype: dy.to(schemas.torch_dtype(dtype))),
    "fusionreg::Atan2": rule(
        _of_tensors(aten.atan2),
        a=lambda dy, a, b: dy * b / (a * a + b * b),
        b=lambda dy, a, b: -dy * a / (a * a + b * b),
    ),
    "fusionreg::Hypot": rule(_of_tensors(aten.hypot), a=_hypot, b=lambda dy, b, y: dy * (b / y)),
}

_FUNCTIONS = {
    "Neg": rule(aten.neg, x=lambda dy: -dy),
    "Abs": rule(aten.abs, x=lambda dy, x: dy * aten.sgn(x)),
    "Sqrt": rule(aten.sqrt, x=lambda dy, y: dy / (2 * y)),
    "Exp": rule(aten.exp, x=lambda dy, y: dy * y),
    "Log": rule(aten.log, x=lambda dy, x: dy / x),
    "Sin": rule(aten.sin, x=lambda dy, x: dy * x.cos()),
    "Cos": rule(aten.cos, x=lambda dy, x: dy * -x.sin()),
    "Tan": rule(aten.tan, x=lambda dy, y: dy * (1 + y * y)),
    "Asin": rule(aten.asin, x=lambda dy, x: dy * (1 - x * x).rsqrt()),
    "Acos": rule(aten.acos, x=lambda dy, x: -dy * (1 - x * x).rsqrt()),
    "Atan": rule(aten.atan, x=lambda dy, x: dy / (x * x + 1)),
    "Sinh": rule(aten.sinh, x=lambda dy, x: dy * x.cosh()),
    "Cosh": rule(aten.cosh, x=lambda dy, x: dy * x.sinh()),
    "Asinh": rule(aten.asinh, x=lambda dy, x: dy * (x * x + 1).rsqrt()),
    "Acosh": rule(aten.acosh, x=lambda dy, x: dy * (x * x - 1).rsqrt()),
    "Atanh": rule(aten.atanh, x=lambda dy, x: dy / (1 - x * x)),
    "Identity": rule(lambda x: x, x=lambda dy: dy),
    "Reciprocal": rule(aten.reciprocal, x=lambda dy, y: -dy * (y * y)),
    "Erf": rule(aten.erf, x=lambda dy, x: dy * (2 / math.sqrt(math.pi)) * (-x * x).exp()),
    "fusionreg::Log1p": rule(aten.log1p, x=lambda dy, x: dy / (x + 1)),
    "fusionreg::Expm1": rule(aten.expm1, x=lambda dy, y: dy * (y + 1)),
    "fusionreg::Log2": rule(aten.log2, x=lambda dy, x: dy / (x * math.log(2))),
    "fusionreg::Rsqrt": rule(aten.rsqrt, x=lambda dy, y: -0.5 * dy * (y * y * y)),
    "fusionreg::Exp2": rule(aten.exp2, x=lambda dy, y: dy * y * math.log(2)),
}

_STEPS = {
    "Floor": _flat(aten.floor),
    "Ceil": _flat(aten.ceil),
    "Round": _flat(aten.round),
    "Sign": _flat(aten.sgn),
    "fusionreg::Trunc": _flat(aten.trunc),
    "Equal": _flat(lambda a, b: a == b),
    "Greater": _flat(lambda a, b: a > b),
    "Less": _flat(lambda a, b: a < b),
    "GreaterOrEqual": _flat(lambda a, b: a >= b),
    "LessOrEqual": _flat(lambda a, b: a <= b),
    "And": _flat(_of_tensors(aten.logical_and)),
    "Or": _flat(_of_tensors(aten.logical_or)),
    "Xor": _flat(_of_tensors(aten.logical_xor)),
    "Not": _flat(aten.logical_not),
    "IsNaN": _flat(aten.isnan),
    "IsInf": _flat(_isinf),
}

POINTWISE: Mapping[str, Rule] = FrozenDict({**_ARITHMETIC, **_FUNCTIONS, **_STEPS})
