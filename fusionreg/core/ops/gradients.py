"""Gradients, which ONNX lacks: domain ``fusionreg``. ``dy`` is the gradient of the result, in its shape. Floor 1."""

from __future__ import annotations

import math
from typing import Any

from .activations import SIGMOID_OF_Z, sigmoid_of
from .define import operator, specs_in
from .inference import Attributes, Constants, Inputs, Type, axis_of, operand, same
from .normalization import scale_to_unit, standardise
from .reductions import mean_of, sum_of

#: 1 - s, s being the sigmoid of z, without cancellation.
_COMPLEMENT = "(z < 0.0f ? r : e * r)"


def _point(name: str, inputs: str, cuda: str, **attributes: Any) -> Any:
    return operator(f"fusionreg::{name}", inputs, infer=same, attributes=attributes, pointwise=True, cuda=cuda)


@_point("ReluGrad", "dy x", cuda="x <= 0.0f ? 0.0f : dy")
def relu_grad(xp: Any, dy: Any, x: Any) -> Any:
    """0 where x ≤ 0, else dy; where x is NaN it is dy, as in PyTorch."""
    return xp.ns.where(x <= 0, xp.ns.zeros_like(dy), dy)


@_point("LeakyReluGrad", "dy x", cuda="x > 0.0f ? dy : alpha * dy", alpha=0.01)
def leaky_relu_grad(xp: Any, dy: Any, x: Any, *, alpha: float) -> Any:
    """dy where x > 0, else alpha · dy."""
    return xp.ns.where(x > 0, dy, alpha * dy)


@_point("SigmoidGrad", "dy y", cuda="dy * y * (1.0f - y)")
def sigmoid_grad(xp: Any, dy: Any, y: Any) -> Any:
    """dy · y (1 - y), y being the sigmoid itself."""
    return dy * y * (1.0 - y)


@_point("TanhGrad", "dy y", cuda="dy * (1.0f - y * y)")
def tanh_grad(xp: Any, dy: Any, y: Any) -> Any:
    """dy · (1 - y²), y being the tanh itself."""
    return dy * (1.0 - y * y)


@_point(
    "SwishGrad",
    "dy x",
    cuda=f"z = alpha * x; {SIGMOID_OF_Z} dy * (s + z * s * {_COMPLEMENT})",
    alpha=1.0,
)
def swish_grad(xp: Any, dy: Any, x: Any, *, alpha: float) -> Any:
    """dy · (s + alpha x s (1 - s)), s = sigmoid(alpha x); 1 - s is taken as sigmoid(-alpha x)."""
    s = sigmoid_of(xp, alpha * x)
    return dy * (s + alpha * x * s * sigmoid_of(xp, -alpha * x))


@_point(
    "GeluGrad",
    "dy x",
    # tanh is 2 s - 1, so that (1 + t)/2 = s and (1 - t²)/4 = s (1 - s), which do not cancel
    cuda=f"""z = 1.5957691216057308f * (x + 0.044715f * x * x * x); {SIGMOID_OF_Z}
        slope = s * {_COMPLEMENT}; inner = slope == 0.0f ? 0.0f : x;
        approximate_tanh
            ? dy * (s + inner * slope * 1.5957691216057308f * (1.0f + 0.134145f * inner * inner))
            : dy * (0.5f * erfcf(-0.70710678118654752f * x) + x * (expf(-0.5f * x * x) * 0.39894228040143268f))""",
    approximate="none",
)
def gelu_grad(xp: Any, dy: Any, x: Any, *, approximate: str) -> Any:
    """dy times the derivative of Gelu of the same ``approximate``.

    none: Φ(x) + x φ(x). tanh, with s = sigmoid(2 k (x + c x³)), k = √(2/π), c = 0.044715, which is (1 + tanh)/2:
    s + x s (1 - s) 2 k (1 + 3 c x²), the last term being 0 where s is 0 or 1. 1 - s and Φ are taken without cancelling.
    """
    if approximate != "tanh":
        density = xp.ns.exp(-0.5 * x * x) / math.sqrt(2.0 * math.pi)
        return dy * (0.5 * xp.erfc(x * -math.sqrt(0.5)) + x * density)
    k, c = math.sqrt(8.0 / math.pi), 0.044715
    z = k * (x + c * x * x * x)
    s = sigmoid_of(xp, z)
    slope = s * sigmoid_of(xp, -z)
    inner = xp.ns.where(slope == 0, xp.ns.zeros_like(x), x)
    return dy * (s + inner * slope * k * (1.0 + 3.0 * c * inner * inner))


@operator("fusionreg::SoftmaxGrad", "dy y", infer=same, attributes={"axis": -1})
def softmax_grad(xp: Any, dy: Any, y: Any, *, axis: int) -> Any:
    """y (dy - Σ dy y) along ``axis``, y being the softmax itself."""
    return y * (dy - xp.ns.sum(dy * y, axis=axis, keepdims=True))


@operator("fusionreg::LogSoftmaxGrad", "dy y", infer=same, attributes={"axis": -1})
def log_softmax_grad(xp: Any, dy: Any, y: Any, *, axis: int) -> Any:
    """dy - exp(y) Σ dy along ``axis``, y being the log-softmax itself."""
    return dy - xp.ns.exp(y) * xp.ns.sum(dy, axis=axis, keepdims=True)


def _norm_grad_type(inputs: Inputs, attributes: Attributes, constants: Constants) -> list[Type]:
    x, scale = operand(inputs, 1), operand(inputs, 2)
    return [(x.dtype, x.shape), (scale.dtype, scale.shape), (scale.dtype, scale.shape)]


@operator(
    "fusionreg::LayerNormalizationGrad",
    "dy x scale mean? inv_std_dev?",
    outputs="dx dscale? dbias?",
    infer=_norm_grad_type,
    attributes={"axis": -1, "epsilon": 1e-5},
)
def layer_normalization_grad(
    xp: Any, dy: Any, x: Any, scale: Any, mean: Any = None, inv_std_dev: Any = None, *, axis: int, epsilon: float
) -> Any:
    """With h = (x - mean) · inv_std_dev and g = dy · scale: dx = inv_std_dev (g - mean(g) - h mean(g h)).

    dscale = Σ dy h and dbias = Σ dy over the axes before ``axis``; scale has the shape of the axes from ``axis`` on.
    Statistics that are left out are those of x with ``epsilon``.
    """
    axis = axis_of(axis, x.ndim)
    inner, outer = tuple(range(axis, x.ndim)), tuple(range(axis))
    g = dy * scale
    if mean is None or inv_std_dev is None:
        h, _, inv_std_dev = standardise(xp, x, inner, epsilon)
    else:
        h = (x - mean) * inv_std_dev
    dx = inv_std_dev * (g - mean_of(xp, g, inner) - h * mean_of(xp, g * h, inner))
    return dx, sum_of(xp, dy * h, outer, False), sum_of(xp, dy, outer, False)


def _rms_grad_type(inputs: Inputs, attributes: Attributes, constants: Constants) -> list[Type]:
    return _norm_grad_type(inputs, attributes, constants)[:2]


@operator(
    "fusionreg::RMSNormalizationGrad",
    "dy x scale",
    outputs="dx dscale?",
    infer=_rms_grad_type,
    attributes={"axis": -1, "epsilon": 1e-5},
)
def rms_normalization_grad(xp: Any, dy: Any, x: Any, scale: Any, *, axis: int, epsilon: float) -> Any:
    """With r = 1/√(mean(x²) + epsilon), h = x r and g = dy · scale: dx = r (g - h mean(g h)), dscale = Σ dy h."""
    axis = axis_of(axis, x.ndim)
    inner, outer = tuple(range(axis, x.ndim)), tuple(range(axis))
    h, r = scale_to_unit(xp, x, inner, epsilon)
    g = dy * scale
    return r * (g - h * mean_of(xp, g * h, inner)), sum_of(xp, dy * h, outer, False)


@operator(
    "fusionreg::BatchNormalizationGrad",
    "dy x scale mean inv_std_dev",
    outputs="dx dscale? dbias?",
    infer=_norm_grad_type,
)
def batch_normalization_grad(xp: Any, dy: Any, x: Any, scale: Any, mean: Any, inv_std_dev: Any) -> Any:
    """Of BatchNormalization in training, from its saved statistics, all of length C along axis 1.

    With h = (x - mean) · inv_std_dev, and means and sums over all axes but 1:
    dx = scale inv_std_dev (dy - mean(dy) - h mean(dy h)), dscale = Σ dy h, dbias = Σ dy.
    """
    axes, column = (0, *range(2, x.ndim)), (1, scale.shape[0], *[1] * (x.ndim - 2))
    scale, mean, inverse = (xp.ns.reshape(v, column) for v in (scale, mean, inv_std_dev))
    h = (x - mean) * inverse
    dx = scale * inverse * (dy - mean_of(xp, dy, axes) - h * mean_of(xp, dy * h, axes))
    return dx, sum_of(xp, dy * h, axes, False), sum_of(xp, dy, axes, False)


@operator(
    "fusionreg::GroupNormalizationGrad",
    "dy x scale",
    outputs="dx dscale? dbias?",
    infer=_norm_grad_type,
    attributes={"num_groups": "<required>", "epsilon": 1e-5},
)
def group_normalization_grad(xp: Any, dy: Any, x: Any, scale: Any, *, num_groups: int, epsilon: float) -> Any:
    """The gradients of GroupNormalization: x and dy are [N, C, …], scale is per channel (length C).

    With h and r the normalised x and 1/√(var + epsilon) of each of a sample's groups of C / num_groups channels, and
    g = dy · scale: dx = r (g - mean(g) - h mean(g h)) over the group; dscale = Σ dy h and dbias = Σ dy of each channel.
    """
    n, c, *space = x.shape
    grouped = (n, num_groups, c // num_groups, *space)
    inner, outer = tuple(range(2, len(grouped))), (0, *range(2, x.ndim))
    h, _, r = standardise(xp, xp.ns.reshape(x, grouped), inner, epsilon)
    g = xp.ns.reshape(dy * xp.ns.reshape(scale, (1, c, *[1] * len(space))), grouped)
    dx = r * (g - mean_of(xp, g, inner) - h * mean_of(xp, g * h, inner))
    dscale = sum_of(xp, dy * xp.ns.reshape(h, tuple(x.shape)), outer, False)
    return xp.ns.reshape(dx, tuple(x.shape)), dscale, sum_of(xp, dy, outer, False)


OPS = specs_in(globals())
