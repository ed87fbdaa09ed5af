"""Backward operators, as autograd calls them, in the gradients of the vocabulary.

Those of normalisations read statistics that the forward operator gave. Where that one stands in the same program and
normalised the same tensor, they need not be read: the gradient computes them of the tensor, as the vocabulary has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fusionreg.core.frozen import FrozenDict

from ..emitter import Emitter, V
from .normalization import wide


def of_input(op: str, **fixed: Any) -> Any:
    """dy and the forward operator's input."""

    def emit(e: Emitter, grad_output: V, self: V, **given: Any) -> V:
        return e.op(op, grad_output, self, **fixed, **{k: v for k, v in given.items() if k == "approximate"})

    return emit


def of_output(op: str) -> Any:
    """dy and the forward operator's result."""

    def emit(e: Emitter, grad_output: V, output: V, **_: Any) -> V:
        return e.op(op, grad_output, output)

    return emit


def softmax(op: str) -> Any:
    def emit(e: Emitter, grad_output: V, output: V, dim: int, input_dtype: Any, **_: Any) -> V:
        return e.cast(e.op(op, grad_output, output, axis=output.axis(dim)), e.out.dtype)

    return emit


def threshold(e: Emitter, grad_output: V, self: V, threshold: float, **_: Any) -> V:
    if threshold == 0:
        return e.op("fusionreg::ReluGrad", grad_output, self)
    low = e.op("LessOrEqual", self, e.number(threshold, self.dtype))
    return e.op("Where", low, e.number(0, grad_output.dtype), grad_output)


def leaky_relu(e: Emitter, grad_output: V, self: V, negative_slope: float, self_is_result: bool, **_: Any) -> V:
    if self_is_result and negative_slope < 0:
        raise e.refuse(f"negative_slope={negative_slope} of a result", "a slope that keeps the sign")
    return e.op("fusionreg::LeakyReluGrad", grad_output, self, alpha=float(negative_slope))


def hardtanh(e: Emitter, grad_output: V, self: V, min_val: float, max_val: float, **_: Any) -> V:
    low = e.op("LessOrEqual", self, e.number(min_val, self.dtype))
    high = e.op("GreaterOrEqual", self, e.number(max_val, self.dtype))
    return e.op("Where", e.op("Or", low, high), e.number(0, grad_output.dtype), grad_output)


def dropout(e: Emitter, grad_output: V, mask: V, scale: float, **_: Any) -> V:
    kept = e.op("Mul", grad_output, e.cast(mask, grad_output.dtype))
    return e.op("Mul", kept, e.number(scale, grad_output.dtype))


def layer_norm(
    e: Emitter,
    grad_out: V,
    input: V,
    normalized_shape: Sequence[int],
    mean: V,
    rstd: V,
    weight: V | None,
    bias: V | None,
    output_mask: Sequence[bool],
    **_: Any,
) -> Any:
    dtype, axis = wide(e, input, weight), -len(normalized_shape)
    dy, x = e.cast(grad_out, dtype), e.cast(input, dtype)
    scale = e.cast(weight, dtype) if weight is not None else e.const(1, dtype, _fixed(e, input.shape[axis:]))
    of = e.statistics.get(rstd)
    if of is not None and of == e.statistics.get(mean) and (of.kind, of.x, of.extent) == ("layer", input, -axis):
        op = e.op("fusionreg::LayerNormalizationGrad", dy, x, scale, axis=axis, epsilon=of.epsilon, outputs=3)
    else:
        saved = e.cast(mean, dtype), e.cast(rstd, dtype)
        op = e.op("fusionreg::LayerNormalizationGrad", dy, x, scale, *saved, axis=axis, outputs=3)
    return _results(e, op, output_mask)


def rms_norm(
    e: Emitter,
    grad_out: V,
    input: V,
    normalized_shape: Sequence[int],
    rstd: V,
    weight: V | None,
    output_mask: Sequence[bool],
    **_: Any,
) -> Any:
    of, axis = e.statistics.get(rstd), -len(normalized_shape)
    if of is None or (of.kind, of.x, of.extent) != ("rms", input, -axis):
        return NotImplemented
    dtype = wide(e, input, weight)
    scale = e.cast(weight, dtype) if weight is not None else e.const(1, dtype, _fixed(e, input.shape[axis:]))
    dy, x = e.cast(grad_out, dtype), e.cast(input, dtype)
    op = e.op("fusionreg::RMSNormalizationGrad", dy, x, scale, axis=axis, epsilon=of.epsilon, outputs=2)
    return _results(e, op, output_mask)


def group_norm(
    e: Emitter,
    grad_out: V,
    input: V,
    mean: V,
    rstd: V,
    weight: V | None,
    group: int,
    output_mask: Sequence[bool],
    **_: Any,
) -> Any:
    of = e.statistics.get(rstd)
    if of is None or of != e.statistics.get(mean) or (of.kind, of.x, of.extent) != ("group", input, group):
        return NotImplemented
    dtype = wide(e, input, weight)
    scale = e.cast(weight, dtype) if weight is not None else e.const(1, dtype, _fixed(e, input.shape[1:2]))
    dy, x = e.cast(grad_out, dtype), e.cast(input, dtype)
    op = e.op("fusionreg::GroupNormalizationGrad", dy, x, scale, num_groups=group, epsilon=of.epsilon, outputs=3)
    return _results(e, op, output_mask)


def _fixed(e: Emitter, extents: Sequence[Any]) -> list[int]:
    if not all(isinstance(d, int) for d in extents):
        raise e.refuse(f"normalised extents {list(extents)}", "extents known at export")
    return [int(d) for d in extents]


def _results(e: Emitter, found: Sequence[V], wanted: Sequence[bool]) -> Any:
    """Those that are asked for, in the dtypes that were recorded."""
    asked = zip(found, wanted, e.metas, strict=False)
    return tuple(e.cast(v, m.dtype) if w and m is not None else None for v, w, m in asked)  # type: ignore[union-attr]


TABLE: FrozenDict[str, Any] = FrozenDict(
    {
        "aten.gelu_backward.default": of_input("fusionreg::GeluGrad"),
        "aten.silu_backward.default": of_input("fusionreg::SwishGrad"),
        "aten.sigmoid_backward.default": of_output("fusionreg::SigmoidGrad"),
        "aten.tanh_backward.default": of_output("fusionreg::TanhGrad"),
        "aten.threshold_backward.default": threshold,
        "aten.leaky_relu_backward.default": leaky_relu,
        "aten.hardtanh_backward.default": hardtanh,
        "aten.native_dropout_backward.default": dropout,
        "aten._softmax_backward_data.default": softmax("fusionreg::SoftmaxGrad"),
        "aten._log_softmax_backward_data.default": softmax("fusionreg::LogSoftmaxGrad"),
        "aten.native_layer_norm_backward.default": layer_norm,
        "aten._fused_rms_norm_backward.default": rms_norm,
        "aten.native_group_norm_backward.default": group_norm,
    }
)
