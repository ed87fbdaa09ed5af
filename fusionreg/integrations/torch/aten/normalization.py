"""Normalisations. A missing scale is ones, a missing bias zeros; nothing of the module is rewritten."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from fusionreg.core.dtypes import DTYPES
from fusionreg.core.frozen import FrozenDict

from ..emitter import Emitter, Statistics, V
from ..program import TensorMeta


def wide(e: Emitter, x: V, *others: V | None) -> str:
    """The dtype to normalise in: that of the operands, the wider where they differ."""
    dtypes = {v.dtype for v in (x, *others) if v is not None}
    return x.dtype if len(dtypes) == 1 else max(dtypes, key=lambda d: DTYPES[d].bits)


def _extents(x: V, count: int, e: Emitter) -> list[int]:
    tail = x.shape[x.rank - count :]
    if not all(isinstance(d, int) for d in tail):
        raise e.refuse(f"normalised extents {list(tail)}", "extents known at export")
    return [int(d) for d in tail]


def layer_norm(
    e: Emitter,
    input: V,
    normalized_shape: Sequence[int],
    weight: V | None = None,
    bias: V | None = None,
    eps: float = 1e-5,
    **_: Any,
) -> Any:
    count = len(normalized_shape)
    dtype = wide(e, input, weight, bias)
    x = e.cast(input, dtype)
    scale = e.cast(weight, dtype) if weight is not None else e.const(1, dtype, _extents(input, count, e))
    shift = None if bias is None else e.cast(bias, dtype)
    stats = len(e.metas) == 3
    results = e.op("LayerNormalization", x, scale, shift, axis=-count, epsilon=float(eps), outputs=3 if stats else 1)
    if not stats:
        return e.cast(results, input.dtype)
    y, mean, inverse = results
    known = Statistics("layer", input, count, float(eps))
    kept = [None if m is None else e.cast(v, m.dtype) for v, m in zip((mean, inverse), e.metas[1:], strict=True)]  # type: ignore[union-attr]
    e.statistics.update((v, known) for v in kept if v is not None)
    return (e.cast(y, input.dtype), *kept)


def rms_norm(
    e: Emitter, input: V, normalized_shape: Sequence[int], weight: V | None = None, eps: float | None = None, **_: Any
) -> Any:
    count = len(normalized_shape)
    dtype = wide(e, input, weight)
    if eps is None:  # of the dtype that torch computes in
        eps = 2.0 ** -max(DTYPES[input.dtype].mantissa, DTYPES["float32"].mantissa)
    scale = e.cast(weight, dtype) if weight is not None else e.const(1, dtype, _extents(input, count, e))
    y = e.op("RMSNormalization", e.cast(input, dtype), scale, axis=-count, epsilon=float(eps))
    y = e.cast(y, e.out.dtype)
    if len(e.metas) != 2 or not isinstance(e.metas[1], TensorMeta):
        return y
    wide_x = e.cast(input, e.metas[1].dtype)
    axes = e.ints(range(-count, 0))
    mean = e.op("ReduceMean", e.op("Mul", wide_x, wide_x), axes, keepdims=1)
    inverse = e.op("fusionreg::Rsqrt", e.op("Add", mean, e.number(eps, wide_x.dtype)))
    e.statistics[inverse] = Statistics("rms", input, count, float(eps))
    return y, inverse


def group_norm(
    e: Emitter, input: V, num_groups: int, weight: V | None = None, bias: V | None = None, eps: float = 1e-5, **_: Any
) -> V:
    dtype = wide(e, input, weight, bias)
    channels = input.shape[1]
    if not isinstance(channels, int):
        raise e.refuse(f"{channels} channels", "a number known at export")
    x = e.cast(input, dtype)
    if input.rank == 2:  # ONNX asks for a spatial axis
        x = e.unsqueeze(x, 2)
    scale = e.cast(weight, dtype) if weight is not None else e.const(1, dtype, [channels])
    shift = e.cast(bias, dtype) if bias is not None else e.const(0, dtype, [channels])
    y = e.op("GroupNormalization", x, scale, shift, num_groups=num_groups, epsilon=float(eps))
    return e.cast(e.squeeze(y, 2) if input.rank == 2 else y, input.dtype)


def native_group_norm(e: Emitter, input: V, weight: V | None, bias: V | None, group: int, eps: float, **_: Any) -> Any:
    y = group_norm(e, input, group, weight, bias, eps)
    channels, *space = input.shape[1:]
    if not all(isinstance(m, TensorMeta) for m in e.metas) or not all(isinstance(d, int) for d in (channels, *space)):
        return y, None, None
    known = Statistics("group", input, group, float(eps))
    extent = math.prod(int(d) for d in (channels, *space)) // group
    x = e.cast(input, e.metas[1].dtype)  # type: ignore[union-attr]
    rows = e.reshape(x, [e.size(x, 0), group, extent], (x.shape[0], group, extent))
    mean = e.op("ReduceMean", rows, e.ints([-1]), keepdims=1)
    centred = e.op("Sub", rows, mean)
    variance = e.op("ReduceMean", e.op("Mul", centred, centred), e.ints([-1]), keepdims=0)
    inverse = e.op("fusionreg::Rsqrt", e.op("Add", variance, e.number(eps, x.dtype)))
    mean = e.squeeze(mean, -1)
    e.statistics.update({mean: known, inverse: known})
    return y, mean, inverse


def instance_norm(
    e: Emitter,
    input: V,
    weight: V | None,
    bias: V | None,
    running_mean: V | None,
    running_var: V | None,
    use_input_stats: bool,
    eps: float = 1e-5,
    **_: Any,
) -> V:
    if not use_input_stats:
        return batch_norm(e, input, weight, bias, running_mean, running_var, False, eps=eps)
    channels = input.shape[1]
    if not isinstance(channels, int):
        raise e.refuse(f"{channels} channels", "a number known at export")
    scale = weight if weight is not None else e.const(1, input.dtype, [channels])
    shift = bias if bias is not None else e.const(0, input.dtype, [channels])
    return e.op("InstanceNormalization", input, scale, shift, epsilon=float(eps))


def batch_norm(
    e: Emitter,
    input: V,
    weight: V | None,
    bias: V | None,
    running_mean: V | None,
    running_var: V | None,
    training: bool,
    momentum: float = 0.1,
    eps: float = 1e-5,
    **_: Any,
) -> V:
    """With running statistics in inference: BatchNormalization. Otherwise the batch's own, spelled out."""
    dtype = wide(e, input, weight, bias, running_mean, running_var)
    x = e.cast(input, dtype)
    channels = [_channels(e, x)]
    scale = e.cast(weight, dtype) if weight is not None else e.const(1, dtype, channels)
    shift = e.cast(bias, dtype) if bias is not None else e.const(0, dtype, channels)
    if not training and running_mean is not None and running_var is not None:
        mean, var = e.cast(running_mean, dtype), e.cast(running_var, dtype)
        return e.cast(e.op("BatchNormalization", x, scale, shift, mean, var, epsilon=float(eps)), input.dtype)
    return e.cast(normalise(e, x, scale, shift, eps)[0], input.dtype)


def _channels(e: Emitter, x: V) -> int:
    extent = x.shape[1]
    if not isinstance(extent, int):
        raise e.refuse(f"{extent} channels", "a number known at export")
    return extent


def normalise(e: Emitter, x: V, scale: V, shift: V, eps: float) -> tuple[V, V, V]:
    """(normalised by the batch's statistics, mean (C), biased variance (C))."""
    axes = e.ints([a for a in range(x.rank) if a != 1])
    column = (scale.shape[0], *[1] * (x.rank - 2))
    mean = e.op("ReduceMean", x, axes, keepdims=1)
    centred = e.op("Sub", x, mean)
    var = e.op("ReduceMean", e.op("Mul", centred, centred), axes, keepdims=1)
    unit = e.op("Div", centred, e.op("Sqrt", e.op("Add", var, e.number(eps, x.dtype))))
    lifted = [e.reshape(v, [int(c) for c in column], column) for v in (scale, shift)]
    y = e.op("Add", e.op("Mul", unit, lifted[0]), lifted[1])
    return y, e.reshape(mean, [int(scale.shape[0])], scale.shape), e.reshape(var, [int(scale.shape[0])], scale.shape)


def native_batch_norm(
    e: Emitter,
    input: V,
    weight: V | None,
    bias: V | None,
    running_mean: V | None = None,
    running_var: V | None = None,
    training: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
    **_: Any,
) -> Any:
    y = batch_norm(e, input, weight, bias, running_mean, running_var, training, momentum, eps)
    return (y, *[None] * (len(e.metas) - 1))


def batch_norm_inference(
    e: Emitter,
    input: V,
    weight: V | None,
    bias: V | None,
    running_mean: V,
    running_var: V,
    momentum: float,
    eps: float,
    **_: Any,
) -> Any:
    y = batch_norm(e, input, weight, bias, running_mean, running_var, False, momentum, eps)
    return (y, *[None] * (len(e.metas) - 1))


def batch_norm_functional(
    e: Emitter,
    input: V,
    weight: V | None,
    bias: V | None,
    running_mean: V,
    running_var: V,
    training: bool,
    momentum: float,
    eps: float,
    **_: Any,
) -> Any:
    """Training form that also gives the new running statistics (unbiased variance), as the fifth and sixth…
    results: (y, save_mean, save_rstd, running_mean, running_var)."""
    if not training:
        y = batch_norm(e, input, weight, bias, running_mean, running_var, False, momentum, eps)
        return y, None, None, running_mean, running_var
    dtype, channels = running_mean.dtype, [_channels(e, input)]
    scale = weight if weight is not None else e.const(1, dtype, channels)
    shift = bias if bias is not None else e.const(0, dtype, channels)
    y, mean, var, saved_mean, saved_inverse = e.op(
        "BatchNormalization", input, scale, shift, running_mean, running_var,
        epsilon=float(eps), momentum=1.0 - float(momentum), training_mode=1, unbiased=1, outputs=5,
    )  # fmt: skip
    saved = zip((saved_mean, saved_inverse), e.metas[1:3], strict=True)
    return (y, *(None if m is None else e.cast(v, m.dtype) for v, m in saved), mean, var)  # type: ignore[union-attr]


def native_batch_norm_backward(
    e: Emitter,
    grad_out: V,
    input: V,
    weight: V | None,
    running_mean: V | None,
    running_var: V | None,
    save_mean: V | None,
    save_invstd: V | None,
    train: bool,
    eps: float,
    output_mask: Sequence[bool],
    **_: Any,
) -> Any:
    """In training, from the saved statistics."""
    if not train or save_mean is None or save_invstd is None:
        raise e.refuse("the backward pass of stored statistics", "that of training, with saved statistics")
    scale = weight if weight is not None else e.const(1, save_mean.dtype, [_channels(e, input)])
    found = e.op("fusionreg::BatchNormalizationGrad", grad_out, input, scale, save_mean, save_invstd, outputs=3)
    return tuple(v if wanted else None for v, wanted in zip(found, output_mask, strict=True))


TABLE: FrozenDict[str, Any] = FrozenDict(
    {
        "aten.layer_norm.default": layer_norm,
        "aten.native_layer_norm.default": layer_norm,
        "aten.rms_norm.default": rms_norm,
        "aten._fused_rms_norm.default": rms_norm,
        "aten.group_norm.default": group_norm,
        "aten.native_group_norm.default": native_group_norm,
        "aten.instance_norm.default": instance_norm,
        "aten.batch_norm.default": batch_norm,
        "aten.native_batch_norm.default": native_batch_norm,
        "aten._native_batch_norm_legit.default": native_batch_norm,
        "aten._native_batch_norm_legit.no_stats": native_batch_norm,
        "aten._native_batch_norm_legit_no_training.default": batch_norm_inference,
        "aten.cudnn_batch_norm.default": native_batch_norm,
        "aten._native_batch_norm_legit_functional.default": batch_norm_functional,
        "aten.native_batch_norm_backward.default": native_batch_norm_backward,
    }
)
