"""Normalisations. Variance is always two-pass: mean first, then the mean of squared deviations. Floor 1."""

from __future__ import annotations

from math import prod
from typing import Any

from .define import operator, specs_in
from .inference import Attributes, Constants, Inputs, Type, axis_of, fail, operand, same
from .reductions import mean_of

_LARGE = 1e15  # squares of deviations beyond this would near float32's largest number


def standardise(xp: Any, x: Any, axes: tuple[int, ...], epsilon: float) -> tuple[Any, Any, Any]:
    """``((x - mean) / sqrt(var + epsilon), mean, 1 / sqrt(var + epsilon))``, axes kept.

    Rows with huge deviations are scaled down before they are squared, so that the variance of ±1e30 in float32 does not
    overflow into a silent 0.
    """
    mean = mean_of(xp, x, axes)
    y, inverse = scale_to_unit(xp, x - mean, axes, epsilon)
    return y, mean, inverse


def scale_to_unit(xp: Any, d: Any, axes: tuple[int, ...], epsilon: float) -> tuple[Any, Any]:
    """``(d / sqrt(mean(d²) + epsilon), 1 / sqrt(mean(d²) + epsilon))``, axes kept."""
    if not axes or any(d.shape[a] == 0 for a in axes):
        inverse = 1.0 / xp.ns.sqrt(mean_of(xp, d * d, axes) + epsilon)
        return d * inverse, inverse
    top = xp.ns.max(xp.ns.abs(d), axis=axes, keepdims=True)
    huge = (top > _LARGE) & (top < float("inf"))  # an infinity spoils what its own formula spoils, and no more
    scale = xp.ns.where(huge, top, xp.ns.ones_like(top))
    d = d / scale
    inverse = 1.0 / xp.ns.sqrt(mean_of(xp, d * d, axes) + epsilon / scale / scale)
    return d * inverse, inverse / scale


def _stash(attributes: Attributes, dtype: str) -> str:
    return "float64" if dtype == "float64" else attributes["stash_type"]


def _layer_type(inputs: Inputs, attributes: Attributes, constants: Constants) -> list[Type]:
    x = operand(inputs, 0)
    stash = _stash(attributes, x.dtype)
    if x.shape is None:
        return [(x.dtype, None), (stash, None), (stash, None)]
    axis = axis_of(attributes["axis"], len(x.shape))
    rows = tuple(d if i < axis else 1 for i, d in enumerate(x.shape))
    return [(x.dtype, x.shape), (stash, rows), (stash, rows)]


@operator(
    "LayerNormalization",
    "x scale bias?",
    outputs="y mean? inv_std_dev?",
    infer=_layer_type,
    attributes={"axis": -1, "epsilon": 1e-5, "stash_type": "float32"},
)
def layer_normalization(
    xp: Any, x: Any, scale: Any, bias: Any = None, *, axis: int, epsilon: float, stash_type: str
) -> Any:
    """As ONNX LayerNormalization: over the axes from ``axis`` on; also gives mean and 1/sqrt(var + epsilon)."""
    axes = tuple(range(axis_of(axis, x.ndim), x.ndim))
    y, mean, inverse = standardise(xp, x, axes, epsilon)
    y = y * scale
    return (y if bias is None else y + bias), mean, inverse


def _rms_type(inputs: Inputs, attributes: Attributes, constants: Constants) -> list[Type]:
    x = operand(inputs, 0)
    if x.shape is not None:
        axis_of(attributes["axis"], len(x.shape))
    return [(operand(inputs, 1).dtype, x.shape)]


@operator(
    "RMSNormalization", "x scale", infer=_rms_type, attributes={"axis": -1, "epsilon": 1e-5, "stash_type": "float32"}
)
def rms_normalization(xp: Any, x: Any, scale: Any, *, axis: int, epsilon: float, stash_type: str) -> Any:
    """As ONNX RMSNormalization (opset 23): x / sqrt(mean(x²) + epsilon) · scale over the axes from ``axis`` on."""
    axes = tuple(range(axis_of(axis, x.ndim), x.ndim))
    return scale_to_unit(xp, x, axes, epsilon)[0] * scale


def _per_channel(xp: Any, v: Any, rank: int) -> Any:
    """A vector of length C laid along axis 1."""
    return xp.ns.reshape(v, (1, v.shape[0], *[1] * (rank - 2)))


@operator("InstanceNormalization", "x scale bias", infer=same, attributes={"epsilon": 1e-5})
def instance_normalization(xp: Any, x: Any, scale: Any, bias: Any, *, epsilon: float) -> Any:
    y = standardise(xp, x, tuple(range(2, x.ndim)), epsilon)[0]
    return y * _per_channel(xp, scale, x.ndim) + _per_channel(xp, bias, x.ndim)


def _group_type(inputs: Inputs, attributes: Attributes, constants: Constants) -> list[Type]:
    x, groups = operand(inputs, 0), attributes["num_groups"]
    if x.shape is not None and isinstance(x.shape[1], int) and x.shape[1] % groups:
        fail(f"{x.shape[1]} channels", f"a multiple of num_groups = {groups}")
    return [(x.dtype, x.shape)]


@operator(
    "GroupNormalization",
    "x scale bias",
    infer=_group_type,
    attributes={"num_groups": "<required>", "epsilon": 1e-5, "stash_type": "float32"},
)
def group_normalization(
    xp: Any, x: Any, scale: Any, bias: Any, *, num_groups: int, epsilon: float, stash_type: str
) -> Any:
    """As ONNX GroupNormalization of opset 21: scale and bias are per channel (length C)."""
    groups = xp.ns.reshape(x, (x.shape[0], num_groups, x.shape[1] // num_groups, *x.shape[2:]))
    y = standardise(xp, groups, tuple(range(2, groups.ndim)), epsilon)[0]
    y = xp.ns.reshape(y, tuple(x.shape))
    return y * _per_channel(xp, scale, x.ndim) + _per_channel(xp, bias, x.ndim)


def _batch_type(inputs: Inputs, attributes: Attributes, constants: Constants) -> list[Type]:
    x, mean, var = operand(inputs, 0), operand(inputs, 3), operand(inputs, 4)
    y: list[Type] = [(x.dtype, x.shape)]
    if not attributes["training_mode"]:
        return y
    saved = ("float64" if x.dtype == "float64" else "float32", mean.shape)
    return [*y, (mean.dtype, mean.shape), (var.dtype, var.shape), saved, saved]


@operator(
    "BatchNormalization",
    "x scale bias mean var",
    outputs="y running_mean? running_var? saved_mean? saved_inv_std_dev?",
    infer=_batch_type,
    attributes={"epsilon": 1e-5, "momentum": 0.9, "training_mode": 0, "unbiased": 0},
)
def batch_normalization(
    xp: Any,
    x: Any,
    scale: Any,
    bias: Any,
    mean: Any,
    var: Any,
    *,
    epsilon: float,
    momentum: float,
    training_mode: int,
    unbiased: int,
) -> Any:
    """As ONNX BatchNormalization; training_mode=1: over the batch (population variance), with running statistics.

    Beyond ONNX, in training: unbiased=1 takes the sample variance into the running one, as torch does (NaN of a single
    element); and the batch's own mean and 1/sqrt(var + epsilon) are outputs too.
    """
    rank = max(x.ndim, 2)
    if not training_mode:
        inverse = _per_channel(xp, 1.0 / xp.ns.sqrt(var + epsilon), rank)
        y = (x - _per_channel(xp, mean, rank)) * inverse
        return y * _per_channel(xp, scale, rank) + _per_channel(xp, bias, rank)
    axes = (0, *range(2, x.ndim))
    y, batch_mean, inverse = standardise(xp, x, axes, epsilon)
    batch_var = xp.ns.reshape(mean_of(xp, (x - batch_mean) ** 2, axes), (-1,))
    batch_mean = xp.ns.reshape(batch_mean, (-1,))
    new_var = batch_var
    if unbiased:
        count = prod(d for i, d in enumerate(x.shape) if i != 1)
        new_var = batch_var * (count / (count - 1) if count > 1 else float("nan"))
    y = y * _per_channel(xp, scale, rank) + _per_channel(xp, bias, rank)
    return (
        y, mean * momentum + batch_mean * (1 - momentum), var * momentum + new_var * (1 - momentum),
        batch_mean, xp.ns.reshape(inverse, (-1,)),
    )  # fmt: skip


@operator("fusionreg::BatchNormalizationApply", "x scale bias mean inv_std_dev", infer=same)
def batch_normalization_apply(xp: Any, x: Any, scale: Any, bias: Any, mean: Any, inv_std_dev: Any) -> Any:
    """(x - mean) · inv_std_dev · scale + bias, each of length C along axis 1: BatchNormalization from its saved
    statistics."""
    scale, bias, mean, inverse = (_per_channel(xp, v, max(x.ndim, 2)) for v in (scale, bias, mean, inv_std_dev))
    return (x - mean) * inverse * scale + bias


@operator("LpNormalization", "x", infer=same, attributes={"axis": -1, "p": 2})
def lp_normalization(xp: Any, x: Any, *, axis: int, p: int) -> Any:
    """As ONNX LpNormalization: x over its p-norm along ``axis``; 0 where the norm is 0."""
    power = xp.ns.abs(x) if p == 1 else x * x
    norm = xp.ns.sum(power, axis=axis, keepdims=True)
    norm = norm if p == 1 else xp.ns.sqrt(norm)
    return xp.ns.where(norm == 0, xp.ns.zeros_like(x), x / norm)


@operator("MeanVarianceNormalization", "x", infer=same, attributes={"axes": (0, 2, 3)})
def mean_variance_normalization(xp: Any, x: Any, *, axes: tuple[int, ...]) -> Any:
    """As ONNX MeanVarianceNormalization: (x - mean) / (std + 1e-9)."""
    over = tuple(a % x.ndim for a in axes)
    d = x - mean_of(xp, x, over)
    return d / (xp.ns.sqrt(mean_of(xp, d * d, over)) + 1e-9)


@operator("LRN", "x", infer=same, attributes={"size": "<required>", "alpha": 1e-4, "beta": 0.75, "bias": 1.0})
def lrn(xp: Any, x: Any, *, size: int, alpha: float, beta: float, bias: float) -> Any:
    low, high = (size - 1) // 2, size - 1 - (size - 1) // 2
    squares = xp.ns.moveaxis(x * x, 1, -1)
    ends = [xp.full((*squares.shape[:-1], n), 0.0, x) for n in (low, high)]
    padded = xp.ns.concat([ends[0], squares, ends[1]], axis=-1)
    total = xp.ns.moveaxis(xp.ns.sum(xp.windows(padded, (size,), (1,), (1,)), axis=-1), -1, 1)
    return x / (bias + (alpha / size) * total) ** beta


OPS = specs_in(globals())
