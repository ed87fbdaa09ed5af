"""scaled_dot_product_attention, spelled out: MatMul, scale, mask, Softmax, MatMul."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fusionreg.core.frozen import FrozenDict

from ..emitter import Emitter, V
from .linear import product


def attention(
    e: Emitter,
    query: V,
    key: V,
    value: V,
    attn_mask: V | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    **_: Any,
) -> V:
    """``softmax(scale · q kᵀ + mask) v`` over (… L E), (… S E), (… S V).

    A boolean mask (True: take part) selects by Where; a fully masked row gives zeros, as torch defines it.
    """
    if dropout_p:
        raise e.refuse("attention dropout", "inference", "Call module.eval() before exporting")
    if enable_gqa:
        key, value = (_repeat_heads(e, t, query) for t in (key, value))
    width = query.shape[-1]
    if scale is None:
        if not isinstance(width, int):
            raise e.refuse(f"a symbolic head width {width}", "a width known at export, or an explicit scale")
        scale = 1.0 / math.sqrt(width) if width else 1.0
    scores = product(e, query, key, trans_b=True)
    scores = e.op("Mul", scores, e.operand(scale, scores.dtype))
    mask = _causal_mask(e, query, key) if is_causal else attn_mask
    guard = mask is not None and not is_causal and _may_mask_all(mask)
    if mask is not None and mask.dtype == "bool":
        scores = e.op("Where", mask, scores, e.number(-math.inf, scores.dtype))
    elif mask is not None:
        scores = e.op("Add", scores, e.cast(mask, scores.dtype))
    weights = e.op("Softmax", scores, axis=-1)
    if guard:
        top = e.op("ReduceMax", scores, e.ints([-1]), keepdims=1)
        dead = e.op("Equal", top, e.number(-math.inf, top.dtype))
        weights = e.op("Where", dead, e.number(0, weights.dtype), weights)
    return product(e, weights, value)


def _may_mask_all(mask: V) -> bool:
    """Whether a row of the mask may exclude every key: False only for a known mask that keeps one in each."""
    if mask.array is None:
        return True
    open_ = mask.array if mask.dtype == "bool" else mask.array.astype(np.float32) > -math.inf
    return mask.rank < 2 or not bool(np.all(np.any(open_, axis=-1)))


def _causal_mask(e: Emitter, query: V, key: V) -> V:
    """Lower triangle from the top left corner, (L S) bool."""
    rows, columns = e.size(query, query.rank - 2), e.size(key, key.rank - 2)
    if isinstance(rows, int) and isinstance(columns, int):
        e.stored(rows, columns)
        return e.const(np.tril(np.ones((rows, columns), np.bool_)), "bool")
    ones = e.op("Expand", e.number(1, "int32"), e.ints([rows, columns]), shape=e.dims([rows, columns]))
    return e.cast(e.op("Trilu", ones, upper=0), "bool")


def _repeat_heads(e: Emitter, x: V, query: V) -> V:
    """Each key/value head repeated for its group of query heads (axis -3)."""
    heads, wanted = x.shape[-3], query.shape[-3]
    if not isinstance(heads, int) or not isinstance(wanted, int) or heads == 0 or wanted % heads:
        raise e.refuse(f"{wanted} query heads over {heads}", "a whole number of query heads for each key head")
    times = wanted // heads
    if times == 1:
        return x
    axis = x.rank - 3
    grouped = e.unsqueeze(x, axis + 1)
    extents = [1] * grouped.rank
    extents[axis + 1] = times
    shape = (*x.shape[: axis + 1], times, *x.shape[axis + 1 :])
    wide = e.op("Expand", grouped, e.ints(extents), shape=shape)
    target = [e.size(x, i) for i in range(axis)] + [wanted] + [e.size(x, i) for i in range(axis + 1, x.rank)]
    return e.reshape(wide, target, (*x.shape[:axis], wanted, *x.shape[axis + 1 :]))


def backend_attention(mask: str) -> Any:
    """The backend forms that decompositions produce: the first result alone has a meaning here."""

    def emit(
        e: Emitter,
        query: V,
        key: V,
        value: V,
        scale: Any = None,
        is_causal: bool = False,
        dropout_p: float = 0.0,
        **rest: Any,
    ) -> Any:
        y = attention(e, query, key, value, rest.get(mask), dropout_p, is_causal, scale)
        return (y, *[None] * (len(e.metas) - 1))

    return emit


def varlen_attention(
    e: Emitter,
    query: V,
    key: V,
    value: V,
    cu_seq_q: V,
    cu_seq_k: V | None,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: Any = None,
    seqused_k: V | None = None,
    block_table: V | None = None,
    **_: Any,
) -> Any:
    """``torch.nn.attention.varlen``: sequences one behind the other; the first result alone has a meaning here."""
    if cu_seq_k is None or seqused_k is not None or block_table is not None:
        raise e.refuse("varlen_attn with keys of a cache", "keys of all sequences one behind the other")
    left, right = window_size or (-1, -1)
    y = e.op(
        "fusionreg::VarlenAttention", query, key, value, cu_seq_q, cu_seq_k, is_causal=int(is_causal), scale=scale,
        left_window_size=left, right_window_size=-1 if is_causal else right,
    )  # fmt: skip
    return (y, *[None] * (len(e.metas) - 1))


def safe_softmax(e: Emitter, self: V, dim: int, dtype: Any = None, **_: Any) -> V:
    """Softmax that gives zeros where every element is -inf."""
    x = e.cast(self, e.out.dtype)
    axis = x.axis(dim)
    top = e.op("ReduceMax", x, e.ints([axis]), keepdims=1)
    dead = e.op("Equal", top, e.number(-math.inf, x.dtype))
    return e.op("Where", dead, e.number(0, x.dtype), e.op("Softmax", x, axis=-1 if axis == x.rank - 1 else axis))


TABLE: FrozenDict[str, Any] = FrozenDict(
    {
        "aten.scaled_dot_product_attention.default": attention,
        "aten._safe_softmax.default": safe_softmax,
        "torch_attn._varlen_attn.default": varlen_attention,
        "aten._scaled_dot_product_flash_attention_for_cpu.default": backend_attention("attn_mask"),
        "aten._scaled_dot_product_flash_attention.default": backend_attention(""),
        "aten._scaled_dot_product_efficient_attention.default": backend_attention("attn_bias"),
        "aten._scaled_dot_product_attention_math.default": backend_attention("attn_mask"),
        "aten._scaled_dot_product_cudnn_attention.default": backend_attention("attn_bias"),
    }
)
