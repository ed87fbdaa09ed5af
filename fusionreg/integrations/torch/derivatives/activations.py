"""Derivatives of activations: torch's own backward operators where it has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fusionreg.core.frozen import FrozenDict

from .rule import Rule, rule

aten = torch.ops.aten



def _above(dy: Any, value: Any) -> Any:
    return aten.threshold_backward(dy, value, 0)


def _scaled_sigmoid(x: Any, *, alpha: float) -> Any:
    return aten.silu(x) if alpha == 1 else x * aten.sigmoid(alpha * x)


def _scaled_sigmoid_x(dy: Any, x: Any, *, alpha: float) -> Any:
    if alpha == 1 and not torch.is_grad_enabled():  # torch's own has no derivative
        return aten.silu_backward(dy, x)
    s = aten.sigmoid(alpha * x)
    return dy * s + aten.sigmoid_backward(dy * x, s) * alpha


def _mish_x(dy: Any, x: Any) -> Any:
    if not torch.is_grad_enabled():
        return aten.mish_backward(dy, x)
    t = aten.tanh(aten.softplus(x))
    return dy * (t + x * aten.sigmoid(x) * (1 - t * t))


def _hard_sigmoid(x: Any, *, alpha: float, beta: float) -> Any:
    return aten.hardsigmoid(x) if _of_torch(alpha, beta) else aten.clamp(alpha * x + beta, 0, 1)


def _hard_sigmoid_x(dy: Any, x: Any, *, alpha: float, beta: float) -> Any:
    if _of_torch(alpha, beta):
        return aten.hardsigmoid_backward(dy, x)
    v = alpha * x + beta
    return aten.where((v > 0) & (v < 1), dy * alpha, 0.0)


def _of_torch(alpha: float, beta: float) -> bool:
    return abs(6 * alpha - 1) < 1e-6 and beta == 0.5


def _shrink(x: Any, *, bias: float, lambd: float) -> Any:
    shrunk = aten.where(x < 0, x + bias, x - bias)
    return aten.where((x >= -lambd) & (x <= lambd), 0.0, shrunk)


def _softsign_x(dy: Any, x: Any) -> Any:
    wide = 1 + x.abs()
    return dy / wide - dy * x * aten.sgn(x) / (wide * wide)


ACTIVATIONS: Mapping[str, Rule] = FrozenDict(
    {
        "Relu": rule(aten.relu, x=(lambda dy, y: _above(dy, y), lambda dy, x: _above(dy, x))),
        "LeakyRelu": rule(
            lambda x, *, alpha: aten.leaky_relu(x, alpha),
            x=lambda dy, x, *, alpha: aten.leaky_relu_backward(dy, x, alpha, False),
        ),
        "PRelu": rule(
            lambda x, slope: aten.where(x > 0, x, slope * x),
            x=lambda dy, x, slope: aten.where(x > 0, dy, slope * dy),
            slope=lambda dy, x: aten.where(x > 0, 0.0, x * dy),
        ),
        "ThresholdedRelu": rule(
            lambda x, *, alpha: aten.threshold(x, alpha, 0),
            x=lambda dy, x, *, alpha: aten.threshold_backward(dy, x, alpha),
        ),
        "Elu": rule(
            lambda x, *, alpha: aten.elu(x, alpha),
            x=lambda dy, x, *, alpha: aten.elu_backward(dy, alpha, 1, 1, False, x),
        ),
        "Selu": rule(
            lambda x, *, alpha, gamma: aten.elu(x, alpha, gamma),
            x=lambda dy, x, *, alpha, gamma: aten.elu_backward(dy, alpha, gamma, 1, False, x),
        ),
        "Celu": rule(
            lambda x, *, alpha: aten.celu(x, alpha),
            x=lambda dy, x, *, alpha: aten.elu_backward(dy, alpha, 1, 1 / alpha, False, x),
        ),
        "HardSigmoid": rule(_hard_sigmoid, x=_hard_sigmoid_x),
        "HardSwish": rule(aten.hardswish, x=lambda dy, x: aten.hardswish_backward(dy, x)),
        "Sigmoid": rule(aten.sigmoid, x=lambda dy, y: aten.sigmoid_backward(dy, y)),
        "Tanh": rule(aten.tanh, x=lambda dy, y: aten.tanh_backward(dy, y)),
        "Softplus": rule(aten.softplus, x=lambda dy, x: aten.softplus_backward(dy, x, 1, 20)),
        "Softsign": rule(lambda x: x / (1 + x.abs()), x=_softsign_x),
        "Gelu": rule(
            lambda x, *, approximate: aten.gelu(x, approximate=approximate),
            x=lambda dy, x, *, approximate: aten.gelu_backward(dy, x, approximate=approximate),
        ),
        "Swish": rule(_scaled_sigmoid, x=_scaled_sigmoid_x),
        "fusionreg::QuickGelu": rule(_scaled_sigmoid, x=_scaled_sigmoid_x),
        "Mish": rule(aten.mish, x=_mish_x),
        "Shrink": rule(
            _shrink, x=lambda dy, x, *, lambd: aten.where((x >= -lambd) & (x <= lambd), 0.0, dy)
        ),
        "SwiGLU": rule(
            lambda a, b, *, alpha: _scaled_sigmoid(a, alpha=alpha) * b,
            a=lambda dy, a, b, *, alpha: _scaled_sigmoid_x(dy * b, a, alpha=alpha),
            b=lambda dy, a, *, alpha: dy * _scaled_sigmoid(a, alpha=alpha),
        ),
    }
)
