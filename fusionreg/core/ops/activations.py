"""Activations: ONNX's, and QuickGelu. All keep NaN. Floor 1."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from .define import operator, specs_in
from .inference import Attributes, Constants, Inputs, Type, operand, same


def sigmoid_of(xp: Any, x: Any) -> Any:
    """1 / (1 + exp(-x)) without overflow: exp is only taken of non-positive numbers."""
    e = xp.ns.exp(-xp.ns.abs(x))
    return xp.ns.where(x >= 0, 1.0 / (1.0 + e), e / (1.0 + e))


def softplus_of(xp: Any, x: Any) -> Any:
    """log(1 + exp(x)) without overflow."""
    return xp.ns.where(x > 0, x, xp.ns.zeros_like(x)) + xp.ns.log1p(xp.ns.exp(-xp.ns.abs(x)))


#: Steps that name ``s``, the sigmoid of ``z``: exp is only taken of non-positive numbers.
SIGMOID_OF_Z = "e = expf(-fabsf(z)); r = fr::inverse_of_1_to_2(1.0f + e); s = z < 0.0f ? e * r : r;"
_SOFTPLUS = "(x > 0.0f ? x : 0.0f) + log1pf(expf(-fabsf(x)))"


def _point(name: str, inputs: str = "x", cuda: str | Mapping[str, str] = "", **attributes: Any) -> Any:
    return operator(name, inputs, infer=same, attributes=attributes, pointwise=True, cuda=cuda)


@_point("Relu", cuda={"f": "x < 0.0f ? 0.0f : x", "i": "x < 0 ? 0 : x", "u": "x"})
def relu(xp: Any, x: Any) -> Any:
    """As ONNX Relu; NaN stays NaN."""
    return xp.ns.where(x < 0, xp.ns.zeros_like(x), x)


@_point("LeakyRelu", cuda="x < 0.0f ? alpha * x : x", alpha=0.01)
def leaky_relu(xp: Any, x: Any, *, alpha: float) -> Any:
    return xp.ns.where(x < 0, alpha * x, x)


def _prelu_type(inputs: Inputs, attributes: Attributes, constants: Constants) -> list[Type]:
    x = operand(inputs, 0)
    return [(x.dtype, x.shape)]


@operator(
    "PRelu",
    "x slope",
    infer=_prelu_type,
    pointwise=True,
    cuda={"f": "x < 0.0f ? slope * x : x", "i": "x < 0 ? U(slope) * U(x) : U(x)", "u": "x"},
)
def prelu(xp: Any, x: Any, slope: Any) -> Any:
    return xp.ns.where(x < 0, slope * x, x)


@_point("ThresholdedRelu", cuda="x > alpha || x != x ? x : 0.0f", alpha=1.0)
def thresholded_relu(xp: Any, x: Any, *, alpha: float) -> Any:
    """As ONNX ThresholdedRelu; NaN stays NaN."""
    return xp.ns.where(x <= alpha, xp.ns.zeros_like(x), x)


@_point("Elu", cuda="x < 0.0f ? alpha * expm1f(x) : x", alpha=1.0)
def elu(xp: Any, x: Any, *, alpha: float) -> Any:
    return xp.ns.where(x < 0, alpha * xp.ns.expm1(x), x)


_SELU_ALPHA, _SELU_GAMMA = 1.6732632, 1.050701  # as float32 holds them


@_point("Selu", cuda="gamma * (x > 0.0f ? x : alpha * expm1f(x))", alpha=_SELU_ALPHA, gamma=_SELU_GAMMA)
def selu(xp: Any, x: Any, *, alpha: float, gamma: float) -> Any:
    return gamma * xp.ns.where(x > 0, x, alpha * xp.ns.expm1(x))


@_point("Celu", cuda="x < 0.0f ? alpha * expm1f(fr::over_constant(x, alpha)) : x", alpha=1.0)
def celu(xp: Any, x: Any, *, alpha: float) -> Any:
    return xp.ns.where(x < 0, alpha * xp.ns.expm1(x / alpha), x)


def _unit(xp: Any, x: Any) -> Any:
    """Clamped to [0, 1]; NaN stays NaN."""
    return xp.ns.where(x < 0, xp.ns.zeros_like(x), xp.ns.where(x > 1, xp.ns.ones_like(x), x))


@_point(
    "HardSigmoid", cuda="v = alpha * x + beta; v < 0.0f ? 0.0f : v > 1.0f ? 1.0f : v", alpha=0.2, beta=0.5
)
def hard_sigmoid(xp: Any, x: Any, *, alpha: float, beta: float) -> Any:
    return _unit(xp, alpha * x + beta)


@_point("HardSwish", cuda="v = fr::over_constant(x + 3.0f, 6.0f); x * (v < 0.0f ? 0.0f : v > 1.0f ? 1.0f : v)")
def hard_swish(xp: Any, x: Any) -> Any:
    return x * _unit(xp, (x + 3.0) / 6.0)


@_point("Sigmoid", cuda=f"z = x; {SIGMOID_OF_Z} s")
def sigmoid(xp: Any, x: Any) -> Any:
    return sigmoid_of(xp, x)


@_point("Tanh", cuda="tanhf(x)")
def tanh(xp: Any, x: Any) -> Any:
    return xp.ns.tanh(x)


@_point("Softplus", cuda=_SOFTPLUS)
def softplus(xp: Any, x: Any) -> Any:
    return softplus_of(xp, x)


@_point("Softsign", cuda="x / (1.0f + fabsf(x))")
def softsign(xp: Any, x: Any) -> Any:
    return x / (1.0 + xp.ns.abs(x))


@_point("Erf", cuda="erff(x)")
def erf(xp: Any, x: Any) -> Any:
    return xp.erf(x)


@_point(
    "Gelu",
    cuda=f"""z = 1.5957691216057308f * (x + 0.044715f * x * x * x); {SIGMOID_OF_Z}
        approximate_tanh ? x * s : 0.5f * x * erfcf(-0.70710678118654752f * x)""",
    approximate="none",
)
def gelu(xp: Any, x: Any, *, approximate: str) -> Any:
    """As ONNX Gelu: x/2 (1 + erf(x/√2)); approximate="tanh": x/2 (1 + tanh(√(2/π) (x + 0.044715 x³))).

    Computed as x/2 erfc(-x/√2) and x sigmoid(2 …): the sums would cancel for negative x, in float64 too.
    """
    if approximate == "tanh":
        return x * sigmoid_of(xp, math.sqrt(8.0 / math.pi) * (x + 0.044715 * x * x * x))
    return 0.5 * x * xp.erfc(x * -math.sqrt(0.5))


@_point("Swish", cuda=f"z = alpha * x; {SIGMOID_OF_Z} x * s", alpha=1.0)
def swish(xp: Any, x: Any, *, alpha: float) -> Any:
    """As ONNX Swish (opset 24): x · sigmoid(alpha x). SiLU is alpha = 1."""
    return x * sigmoid_of(xp, alpha * x)


@_point("fusionreg::QuickGelu", cuda=f"z = alpha * x; {SIGMOID_OF_Z} x * s", alpha=1.702)
def quick_gelu(xp: Any, x: Any, *, alpha: float) -> Any:
    """x · sigmoid(alpha x), alpha = 1.702: the third public GELU, neither the erf nor the tanh form."""
    return x * sigmoid_of(xp, alpha * x)


@_point("Mish", cuda=f"x * tanhf({_SOFTPLUS})")
def mish(xp: Any, x: Any) -> Any:
    """As ONNX Mish: x · tanh(softplus(x))."""
    return x * xp.ns.tanh(softplus_of(xp, x))


@_point("Shrink", cuda="x < -lambd ? x + bias : x > lambd ? x - bias : x == x ? 0.0f : x", bias=0.0, lambd=0.5)
def shrink(xp: Any, x: Any, *, bias: float, lambd: float) -> Any:
    """As ONNX Shrink; NaN stays NaN."""
    inside = xp.ns.logical_and(x >= -lambd, x <= lambd)
    shrunk = xp.ns.where(x < 0, x + bias, x - bias)
    return xp.cast(xp.ns.where(inside, xp.ns.zeros_like(x), shrunk), xp.name_of(x))


OPS = specs_in(globals())
