"""Normalisations and gradients as plain torch calls: further rows of the table in :mod:`.peer_operators`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from fusionreg.core.frozen import FrozenDict

from .peer_site import Site, unwritten


def _layer_norm(s: Site) -> Any:
    if s.outputs > 1:
        raise unwritten(s.node, "mean and inverse deviation are outputs")
    axis = s.attributes["axis"] % s.rank()
    return F.layer_norm(s.args[0], s.extents()[axis:], s.args[1], s.args[2] if s.given(2) else None,
                        s.attributes["epsilon"])  # fmt: skip


def _rms_norm(s: Site) -> Any:
    axis = s.attributes["axis"] % s.rank()
    return F.rms_norm(s.args[0], s.extents()[axis:], s.args[1], s.attributes["epsilon"])


def _group_norm(s: Site) -> Any:
    return F.group_norm(s.args[0], s.attributes["num_groups"], s.args[1], s.args[2], s.attributes["epsilon"])


def _batch_norm(s: Site) -> Any:
    x, scale, bias, mean, var = s.args
    if not s.attributes["training_mode"]:
        return F.batch_norm(x, mean, var, scale, bias, False, 0.0, s.attributes["epsilon"])
    keep, own = s.attributes["momentum"], s.dtype(1)
    scale, bias, mean, var = (_float(v, own) for v in (scale, bias, mean, var))
    y, saved, inverse, new_mean, new_var = _unpacked(
        torch.ops.aten._native_batch_norm_legit_functional(
            x, scale, bias, mean, var, True, 1.0 - keep, s.attributes["epsilon"]
        ),
        5,
    )
    if not s.attributes["unbiased"]:  # torch's running variance is the sample's
        count = math.prod(d for i, d in enumerate(s.extents()) if i != 1)
        new_var = var * keep + (new_var - var * keep) * ((count - 1) / count)
    if own is not torch.float32:
        new_mean, new_var = new_mean.to(own), new_var.to(own)
    return y, new_mean, new_var, saved, inverse


def _float(vector: Any, dtype: torch.dtype) -> Any:
    """A vector of channels as torch's kernels take it beside tensors of any dtype."""
    return vector if dtype is torch.float32 else vector.float()


def _batch_apply(s: Site) -> Any:
    """Two operators, and two more on vectors: how a user would write it in float32."""
    x, scale, bias, mean, inverse = s.args
    column = (1, -1, *[1] * (s.rank() - 2))
    factor = inverse * scale
    return (x * factor.view(column) + (bias - mean * factor).view(column)).to(s.dtype())


def _unpacked(found: Any, count: int) -> tuple[Any, ...]:
    return tuple(found[i] for i in range(count))


def _softmax_grad(s: Site) -> Any:
    dy, y = s.args
    return torch._softmax_backward_data(dy, y, s.attributes["axis"] % s.rank(), s.dtype(1))


def _log_softmax_grad(s: Site) -> Any:
    dy, y = s.args
    return torch._log_softmax_backward_data(dy, y, s.attributes["axis"] % s.rank(), s.dtype(1))


def _layer_norm_grad(s: Site) -> Any:
    """What autograd calls, on statistics of its own where the site gives none."""
    dy, x, scale = s.args[:3]
    axis = s.attributes["axis"] % s.rank(1)
    shape = s.extents(1)[axis:]
    if s.given(3) and s.given(4):
        mean, inverse = s.args[3], s.args[4]
    else:
        _, mean, inverse = torch.native_layer_norm(x, shape, None, None, s.attributes["epsilon"])
    wanted = [True, s.outputs > 1, s.outputs > 2]
    found = torch.ops.aten.native_layer_norm_backward(dy, x, shape, mean, inverse, scale, scale, wanted)
    return tuple(found[i] for i in range(3))


def _rms_norm_grad(s: Site) -> Any:
    """Written out in float32, as a user without a kernel for it would."""
    dy, x, scale = (a.float() for a in s.args[:3])
    axis = s.attributes["axis"] % s.rank(1)
    inner, outer = tuple(range(axis, s.rank(1))), tuple(range(axis))
    r = torch.rsqrt(x.square().mean(inner, keepdim=True) + s.attributes["epsilon"])
    h, g = x * r, dy * scale
    dx = (r * (g - h * (g * h).mean(inner, keepdim=True))).to(s.dtype(1))
    return dx, (dy * h).sum(outer).to(s.dtype(2)) if outer else (dy * h).to(s.dtype(2))


def _group_norm_grad(s: Site) -> Any:
    """What autograd calls, on statistics of its own."""
    dy, x, scale = s.args
    n, c, *space = s.extents(1)
    groups, area = s.attributes["num_groups"], math.prod(space)
    _, mean, inverse = torch.native_group_norm(x, None, None, n, c, area, groups, s.attributes["epsilon"])
    wanted = [True, s.outputs > 1, s.outputs > 2]
    found = torch.ops.aten.native_group_norm_backward(dy, x, mean, inverse, scale, n, c, area, groups, wanted)
    return tuple(found[i] for i in range(3))


def _gelu_grad(s: Site) -> Any:
    return torch.ops.aten.gelu_backward(s.args[0], s.args[1], approximate=s.attributes["approximate"])


def _swish_grad(s: Site) -> Any:
    dy, x, alpha = *s.args, s.attributes["alpha"]
    if alpha == 1.0:
        return torch.ops.aten.silu_backward(dy, x)
    half = torch.sigmoid(alpha * x)
    return dy * (half + alpha * x * half * (1.0 - half))


def _batch_norm_grad(s: Site) -> Any:
    """What autograd calls."""
    dy, x, scale, mean, inverse = s.args
    wanted = [True, s.outputs > 1, s.outputs > 2]
    scale, own = _float(scale, s.dtype(2)), s.dtype(2)
    found = torch.ops.aten.native_batch_norm_backward(dy, x, scale, None, None, mean, inverse, True, 0.0, wanted)
    dx, dscale, dbias = _unpacked(found, 3)
    return (dx, dscale, dbias) if own is torch.float32 else (dx, dscale.to(own), dbias.to(own))


WRITERS: Mapping[str, Callable[[Site], Any]] = FrozenDict(
    {
        "LayerNormalization": _layer_norm, "RMSNormalization": _rms_norm, "GroupNormalization": _group_norm,
        "InstanceNormalization": lambda s: F.instance_norm(
            s.args[0], weight=s.args[1], bias=s.args[2], eps=s.attributes["epsilon"]),
        "BatchNormalization": _batch_norm, "fusionreg::BatchNormalizationApply": _batch_apply,
        "fusionreg::BatchNormalizationGrad": _batch_norm_grad, "fusionreg::SoftmaxGrad": _softmax_grad,
        "fusionreg::LogSoftmaxGrad": _log_softmax_grad, "fusionreg::LayerNormalizationGrad": _layer_norm_grad,
        "fusionreg::RMSNormalizationGrad": _rms_norm_grad, "fusionreg::GroupNormalizationGrad": _group_norm_grad,
        "fusionreg::GeluGrad": _gelu_grad, "fusionreg::SwishGrad": _swish_grad,
        "fusionreg::SigmoidGrad": lambda s: torch.ops.aten.sigmoid_backward(*s.args),
        "fusionreg::TanhGrad": lambda s: torch.ops.aten.tanh_backward(*s.args),
        "fusionreg::ReluGrad": lambda s: torch.ops.aten.threshold_backward(s.args[0], s.args[1], 0),
        "fusionreg::LeakyReluGrad": lambda s: torch.ops.aten.leaky_relu_backward(
            s.args[0], s.args[1], s.attributes["alpha"], False),
    }
)  # fmt: skip
"""Operator → how a user writes it in torch."""
