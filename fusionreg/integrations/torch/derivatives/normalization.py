"""Derivatives of softmax and of normalisations: statistics are computed again, and torch's backward operators run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch

from fusionreg.core.frozen import FrozenDict

from .rule import Rule, rule

aten = torch.ops.aten


def _softmax(x: Any, *, axis: int) -> Any:
    return aten._softmax(x, axis, False)


def _softmax_x(dy: Any, y: Any, *, axis: int) -> Any:
    return aten._softmax_backward_data(dy, y, axis, y.dtype)


def _log_softmax_x(dy: Any, y: Any, *, axis: int) -> Any:
    return aten._log_softmax_backward_data(dy, y, axis, y.dtype)


def _tail(shape: Sequence[Any], axis: int) -> list[Any]:
    return list(shape[axis % len(shape) :])


def _affine(scale: Any, tail: Sequence[Any]) -> Any:
    """A scale or bias that is smaller than the axes it is for, as torch wants it."""
    return None if scale is None else scale.expand(list(tail))


def _layer(x: Any, scale: Any, bias: Any = None, *, axis: int, epsilon: float, shape: Sequence[Any]) -> Any:
    tail = _tail(shape, axis)
    return aten.native_layer_norm(x, tail, _affine(scale, tail), _affine(bias, tail), epsilon)


def _layer_gradients(
    dy: Any, x: Any, scale: Any, *, axis: int, epsilon: float, shape: Sequence[Any], wanted: tuple[bool, ...]
) -> Any:
    tail = _tail(shape, axis)
    weight = _affine(scale, tail)
    _, mean, inverse = aten.native_layer_norm(x, tail, weight, None, epsilon)
    bias = aten.zeros_like(weight) if wanted[2] else None
    return aten.native_layer_norm_backward(dy.contiguous(), x, tail, mean, inverse, weight, bias, list(wanted))


def _rms(x: Any, scale: Any, *, axis: int, epsilon: float, shape: Sequence[Any]) -> Any:
    tail = _tail(shape, axis)
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    inverse = (wide.square().mean(_last(tail), keepdim=True) + epsilon).rsqrt()
    return (wide * inverse * scale).to(x.dtype)


def _last(tail: Sequence[Any]) -> list[int]:
    return list(range(-len(tail), 0))


def _rms_gradients(
    dy: Any, x: Any, scale: Any, *, axis: int, epsilon: float, shape: Sequence[Any], wanted: tuple[bool, ...]
) -> Any:
    """With r = 1/√(mean(x²) + epsilon), h = x r and g = dy · scale: dx = r (g - h mean(g h)), dscale = Σ dy h."""
    over = _last(_tail(shape, axis))
    low = x.dtype in (torch.float16, torch.bfloat16)
    wide, slope, factor = (v.float() if low else v for v in (x, dy, scale))
    inverse = (wide.square().mean(over, keepdim=True) + epsilon).rsqrt()
    h = wide * inverse
    dx = dscale = None
    if wanted[0]:
        g = slope * factor
        dx = (inverse * (g - h * (g * h).mean(over, keepdim=True))).to(x.dtype)
    if wanted[1]:
        dscale = (slope * h).sum(list(range(len(shape) - len(over)))).to(scale.dtype)
    return dx, dscale


def _sizes(shape: Sequence[Any]) -> tuple[Any, Any, Any]:
    return shape[0], shape[1], prod(shape[2:])


def _group(x: Any, scale: Any, bias: Any, *, num_groups: int, epsilon: float, shape: Sequence[Any]) -> Any:
    return aten.native_group_norm(x, scale, bias, *_sizes(shape), num_groups, epsilon)[0]


def _group_gradients(
    dy: Any, x: Any, scale: Any, *, num_groups: int, epsilon: float, shape: Sequence[Any], wanted: tuple[bool, ...]
) -> Any:
    if torch.is_grad_enabled():  # torch's own backward has no derivative
        return _group_formula(dy, x, scale, num_groups, epsilon, shape)
    sizes = _sizes(shape)
    x = x.contiguous()
    _, mean, inverse = aten.native_group_norm(x, scale, None, *sizes, num_groups, epsilon)
    return aten.native_group_norm_backward(
        dy.contiguous(), x, mean, inverse, scale, *sizes, num_groups, list(wanted)
    )


def _group_formula(dy: Any, x: Any, scale: Any, groups: int, epsilon: float, shape: Sequence[Any]) -> Any:
    """With h the normalised x and g = dy · scale: dx = r (g - mean(g) - h mean(g h)) over each group."""
    column = [1, shape[1], *[1] * (len(shape) - 2)]
    split = [shape[0], groups, -1]
    wide = x.reshape(split)
    centred = wide - wide.mean(-1, keepdim=True)
    inverse = (centred.square().mean(-1, keepdim=True) + epsilon).rsqrt()
    h, g = centred * inverse, (dy * scale.reshape(column)).reshape(split)
    dx = inverse * (g - g.mean(-1, keepdim=True) - h * (g * h).mean(-1, keepdim=True))
    outer = [0, *range(2, len(shape))]
    return dx.reshape(list(shape)), (dy * h.reshape(list(shape))).sum(outer), dy.sum(outer)


def _batch(
    x: Any, scale: Any, bias: Any, mean: Any, var: Any,
    *, epsilon: float, momentum: float, training_mode: int, unbiased: int,
) -> Any:  # fmt: skip
    if not training_mode:
        return (aten.native_batch_norm(x, scale, bias, mean, var, False, 0.0, epsilon)[0],)
    y, batch, inverse = aten.native_batch_norm(x, scale, bias, None, None, True, 0.0, epsilon)
    count = x.numel() // x.shape[1]
    spread = (1 / inverse.square() - epsilon) * (count / (count - 1) if unbiased else 1)
    running = (old * momentum + new * (1 - momentum) for old, new in ((mean, batch), (var, spread)))
    return y, *running, batch, inverse


def _batch_gradients(
    dy: Any, x: Any, scale: Any, mean: Any, var: Any,
    *, epsilon: float, training_mode: int, wanted: tuple[bool, ...],
) -> Any:  # fmt: skip
    saved: tuple[Any, Any] = (None, None)
    running: tuple[Any, Any] = (None, None)
    if training_mode:
        saved = aten.native_batch_norm(x, scale, None, None, None, True, 0.0, epsilon)[1:]
    else:
        running = (mean, var)
    return aten.native_batch_norm_backward(
        dy, x, scale, *running, *saved, bool(training_mode), epsilon, list(wanted)
    )


NORMALIZATIONS: Mapping[str, Rule] = FrozenDict(
    {
        "Softmax": rule(_softmax, x=_softmax_x),
        "LogSoftmax": rule(lambda x, *, axis: aten._log_softmax(x, axis, False), x=_log_softmax_x),
        "LayerNormalization": rule(_layer, x_scale_bias=_layer_gradients),
        "RMSNormalization": rule(_rms, x_scale=_rms_gradients),
        "GroupNormalization": rule(_group, x_scale_bias=_group_gradients),
        "BatchNormalization": rule(
            _batch,
            ("running_mean", "running_var", "saved_mean", "saved_inv_std_dev"),
            x_scale_bias=_batch_gradients,
        ),
    }
)
