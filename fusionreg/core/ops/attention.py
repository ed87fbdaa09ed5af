"""Attention, rotary embedding and the gated activation of transformers. Floor 1."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from .activations import SIGMOID_OF_Z, sigmoid_of
from .define import operator, specs_in
from .inference import Attributes, Constants, Extent, Extents, Inputs, Type, fail, operand, plus, present, same, times

ATTENTION: Mapping[str, Any] = {
    "is_causal": 0,
    "kv_num_heads": None,
    "left_window_size": -1,
    "q_num_heads": None,
    "qk_matmul_output_mode": 0,
    "right_window_size": -1,
    "scale": None,
    "softcap": 0.0,
    "softmax_precision": "",
}
#: Those that say which keys a query sees, and what becomes of its scores.
POSITIONS = ("is_causal", "left_window_size", "right_window_size", "scale", "softcap")


def _split_heads(shape: Extents, heads: int | None) -> tuple[Extent, ...]:
    """``[B heads S D]`` of a 3-d or 4-d operand; unknown where it cannot be told."""
    if shape is None:
        return (None,) * 4
    if len(shape) == 4:
        return shape
    if len(shape) != 3 or heads is None:
        fail(f"an operand of rank {len(shape)} with {heads} heads", "rank 4, or rank 3 and the number of heads")
    width = shape[2]
    return (shape[0], heads, shape[1], width // heads if isinstance(width, int) else None)


def _attention_type(inputs: Inputs, attributes: Attributes, constants: Constants) -> list[Type]:
    q, k, v = (operand(inputs, i) for i in range(3))
    qs = _split_heads(q.shape, attributes["q_num_heads"])
    ks, vs = (_split_heads(x.shape, attributes["kv_num_heads"]) for x in (k, v))
    length = ks[2]
    if present(inputs, 4):
        past = operand(inputs, 4).shape
        length = plus(length, past[2]) if past is not None else None
    y: Extents = (qs[0], qs[1], qs[2], vs[3])
    if q.shape is not None and len(q.shape) == 3:
        y = (qs[0], qs[2], times(vs[3], attributes["q_num_heads"]))
    return [
        (q.dtype, y if q.shape is not None else None),
        (k.dtype, (ks[0], ks[1], length, ks[3])),
        (v.dtype, (vs[0], vs[1], length, vs[3])),
        (q.dtype, (qs[0], qs[1], qs[2], length)),
        ("float64" if q.dtype == "float64" else "float32", qs[:3]),
    ]


def _heads(xp: Any, x: Any, heads: int | None) -> Any:
    """``[B S heads·D]`` as ``[B heads S D]``."""
    if x.ndim == 4:
        return x
    b, s, width = x.shape
    return xp.ns.permute_dims(xp.ns.reshape(x, (b, s, heads, width // (heads or 1))), (0, 2, 1, 3))


def _bias(xp: Any, q: Any, length: int, mask: Any, offset: Any, seqlen: Any, causal: int, left: int, right: int) -> Any:
    """What is added to the scores, broadcastable to ``[B H Q K]``: the mask, and -inf where a rule forbids a key."""
    low, zero = xp.full((), -math.inf, q), xp.full((), 0.0, q)
    rows, columns = xp.arange(q.shape[2])[:, None], xp.arange(length)[None, :]
    bias = xp.full((q.shape[2], length), 0.0, q)
    if mask is not None:
        mask = xp.ns.where(mask, zero, low) if xp.kind(mask) == "b" else mask
        if mask.shape[-1] < length:
            mask = xp.ns.concat([mask, xp.full((*mask.shape[:-1], length - mask.shape[-1]), -math.inf, q)], axis=-1)
        bias = bias + mask
    ahead = columns - rows - offset  # how far a key lies after the query's own position
    allowed = ahead == ahead
    if causal:
        allowed = xp.ns.logical_and(allowed, ahead <= 0)
    if left >= 0:
        allowed = xp.ns.logical_and(allowed, ahead >= -left)
    if right >= 0:
        allowed = xp.ns.logical_and(allowed, ahead <= right)
    bias = bias + xp.ns.where(allowed, zero, low)
    if seqlen is not None:
        real = columns[None, None, :, :] < xp.ns.reshape(seqlen, (-1, 1, 1, 1))
        bias = bias + xp.ns.where(real, zero, low)
    return bias


@operator(
    "Attention",
    "q k v attn_mask? past_key? past_value? nonpad_kv_seqlen?",
    outputs="y present_key? present_value? qk_matmul_output? log_sum_exp?",
    infer=_attention_type,
    attributes=ATTENTION,
)
def attention(
    xp: Any,
    q: Any,
    k: Any,
    v: Any,
    attn_mask: Any = None,
    past_key: Any = None,
    past_value: Any = None,
    nonpad_kv_seqlen: Any = None,
    *,
    is_causal: int,
    kv_num_heads: int | None,
    left_window_size: int,
    q_num_heads: int | None,
    qk_matmul_output_mode: int,
    right_window_size: int,
    scale: float | None,
    softcap: float,
    softmax_precision: str,
) -> Any:
    """As ONNX Attention (opset 25): softmax(scale · q kᵀ + bias) v, heads grouped; a row without any key gives 0.

    Of a sequence with ``nonpad_kv_seqlen`` keys the last query is at the last of them, and further keys are not read.

    Beyond ONNX, ``log_sum_exp`` [B H Q] of the scores, in float32: all that gradients need to have the weights again.
    -inf of a row without any key, as its y is 0: what is not finite in keys that are forbidden is not seen.
    """
    flat = q.ndim == 3
    q, k, v = _heads(xp, q, q_num_heads), _heads(xp, k, kv_num_heads), _heads(xp, v, kv_num_heads)
    offset: Any = 0
    if past_key is not None:
        offset = past_key.shape[2]
        k, v = xp.ns.concat([past_key, k], axis=2), xp.ns.concat([past_value, v], axis=2)
    kept_k, kept_v = k, v
    seqlen = None
    if nonpad_kv_seqlen is not None:
        seqlen = xp.ns.clip(xp.cast(nonpad_kv_seqlen, "int64"), 0, k.shape[2])
        offset = xp.ns.reshape(seqlen, (-1, 1, 1, 1)) - q.shape[2]
        real = xp.arange(k.shape[2])[None, None, :, None] < xp.ns.reshape(seqlen, (-1, 1, 1, 1))
        k, v = (xp.ns.where(real, x, xp.full((), 0.0, x)) for x in (k, v))
    bias = _bias(xp, q, k.shape[2], attn_mask, offset, seqlen, is_causal, left_window_size, right_window_size)
    k, v = _repeated(xp, q, k, v)
    root = math.sqrt(_scale(q, scale))
    raw = xp.matmul(q * root, xp.ns.matrix_transpose(k) * root)
    capped = xp.ns.tanh(raw / softcap) * softcap if softcap else raw
    scores = capped + bias
    chance = _softmax(xp, scores, bias)
    y = xp.matmul(chance, v)
    if flat:
        y = xp.ns.permute_dims(y, (0, 2, 1, 3))
        y = xp.ns.reshape(y, (y.shape[0], y.shape[1], y.shape[2] * y.shape[3]))
    return y, kept_k, kept_v, (raw, capped, scores, chance)[qk_matmul_output_mode], _log_sum_exp(xp, scores, bias)


def _repeated(xp: Any, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
    """k and v with a head for each of q."""
    group = q.shape[1] // k.shape[1]
    return (xp.ns.repeat(k, group, axis=1), xp.ns.repeat(v, group, axis=1)) if group > 1 else (k, v)


def _scale(q: Any, scale: float | None) -> float:
    return 1.0 / math.sqrt(q.shape[3]) if scale is None else scale


def _log_sum_exp(xp: Any, scores: Any, bias: Any) -> Any:
    """Of the last axis; -inf where all of it is, where the bias forbids every key, or there is none."""
    if scores.shape[-1] == 0:
        return xp.full(tuple(scores.shape[:-1]), -math.inf, scores)
    top = xp.ns.max(scores, axis=-1)
    base = xp.ns.where(top == -math.inf, xp.ns.zeros_like(top), top)
    total = xp.ns.sum(xp.ns.exp(scores - base[..., None]), axis=-1)
    nothing = xp.ns.logical_or(total == 0, xp.ns.max(bias, axis=-1) == -math.inf)
    found = xp.ns.log(xp.ns.where(nothing, xp.ns.ones_like(total), total)) + base
    return xp.ns.where(nothing, xp.full((), -math.inf, found), found)


def _softmax(xp: Any, scores: Any, bias: Any) -> Any:
    """Softmax of the last axis, 0 in rows whose every key the bias forbids."""
    if scores.shape[-1] == 0:
        return scores
    forbidden = xp.ns.max(bias, axis=-1, keepdims=True) == -math.inf
    safe = xp.ns.where(forbidden, xp.full((), 0.0, scores), scores)
    e = xp.ns.exp(safe - xp.ns.max(safe, axis=-1, keepdims=True))
    p = e / xp.ns.sum(e, axis=-1, keepdims=True)
    return xp.ns.where(forbidden, xp.full((), 0.0, p), p)


def _attention_grad_type(inputs: Inputs, attributes: Attributes, constants: Constants) -> list[Type]:
    mask = [operand(inputs, 6)] if present(inputs, 6) else []
    return [(x.dtype, x.shape) for x in (*(operand(inputs, i) for i in (1, 2, 3)), *mask)]


@operator(
    "fusionreg::AttentionGrad",
    "dy q k v y log_sum_exp attn_mask?",
    outputs="dq dk? dv? dmask?",
    infer=_attention_grad_type,
    attributes={n: a for n, a in ATTENTION.items() if n in POSITIONS},
)
def attention_grad(
    xp: Any,
    dy: Any,
    q: Any,
    k: Any,
    v: Any,
    y: Any,
    log_sum_exp: Any,
    attn_mask: Any = None,
    *,
    is_causal: int,
    left_window_size: int,
    right_window_size: int,
    scale: float | None,
    softcap: float,
) -> Any:
    """The gradients of Attention over four axes, from its results ``y`` and ``log_sum_exp``.

    The weights are p = exp(min(score - log_sum_exp, 0)), 0 for keys that are forbidden (by their position, or by a
    mask of -inf or False), and the gradient of scores is
    r = p · (dy vᵀ - Σ dy y), times that of the cap: dq = scale · r k, dk = scale · rᵀ q and dv = pᵀ dy, the last two
    summed over the heads that share k and v. That of a mask which is added is r without the slope of the cap, summed
    over the axes along which the mask is broadcast.
    """
    windows = is_causal, left_window_size, right_window_size
    return gradients_of(xp, dy, q, k, v, y, log_sum_exp, attn_mask, 0, windows, scale, softcap)


def gradients_of(
    xp: Any, dy: Any, q: Any, k: Any, v: Any, y: Any, log_sum_exp: Any, attn_mask: Any, offset: int,
    windows: tuple[int, int, int], scale: float | None, softcap: float,
) -> Any:  # fmt: skip
    """``offset``: the key at which the first query is."""
    shared, factor = k.shape[1], _scale(q, scale)
    keys, values = _repeated(xp, q, k, v)
    positions = _bias(xp, q, k.shape[2], None, offset, None, *windows)
    bias = _bias(xp, q, k.shape[2], attn_mask, offset, None, *windows)
    hidden = xp.ns.logical_or(positions == -math.inf, bias == -math.inf)
    raw = xp.matmul(q, xp.ns.matrix_transpose(keys)) * factor
    bent = xp.ns.tanh(raw / softcap) if softcap else None
    scores = (raw if bent is None else bent * softcap) + bias
    zero = xp.full((), 0.0, scores)
    behind = scores - log_sum_exp[..., None]
    p = xp.ns.where(hidden, zero, xp.ns.exp(xp.ns.where(behind > 0, zero, behind)))
    slope = xp.matmul(dy, xp.ns.matrix_transpose(values)) - xp.ns.sum(dy * y, axis=-1, keepdims=True)
    straight = xp.ns.where(hidden, zero, p * slope)
    r = straight if bent is None else xp.ns.where(hidden, zero, straight * (1.0 - bent * bent))

    def summed(x: Any) -> Any:
        b, h, *rest = x.shape
        return xp.ns.sum(xp.ns.reshape(x, (b, shared, h // (shared or 1), *rest)), axis=2) if h > shared else x

    dq = xp.matmul(r, keys) * factor
    dk = summed(xp.matmul(xp.ns.matrix_transpose(r), q)) * factor
    gradients = dq, dk, summed(xp.matmul(xp.ns.matrix_transpose(p), dy))
    if attn_mask is None or xp.kind(attn_mask) == "b":
        return gradients
    return *gradients, _reduced(xp, straight, attn_mask)


def _reduced(xp: Any, x: Any, like: Any) -> Any:
    """x summed over the axes along which ``like`` is broadcast to it."""
    missing = x.ndim - like.ndim
    broadcast = tuple(i for i in range(x.ndim) if i < missing or (like.shape[i - missing] == 1 and x.shape[i] != 1))
    return xp.ns.reshape(xp.ns.sum(x, axis=broadcast, keepdims=True), like.shape) if broadcast else x


@operator(
    "RotaryEmbedding",
    "x cos_cache sin_cache position_ids?",
    infer=same,
    attributes={"interleaved": 0, "num_heads": 0, "rotary_embedding_dim": 0},
)
def rotary_embedding(
    xp: Any,
    x: Any,
    cos_cache: Any,
    sin_cache: Any,
    position_ids: Any = None,
    *,
    interleaved: int,
    num_heads: int,
    rotary_embedding_dim: int,
) -> Any:
    """As ONNX RotaryEmbedding (opset 23), ``x[B H S D]`` or ``x[B S H·D]``; caches by position, or ``[B S D/2]``."""
    shape = tuple(x.shape)
    h = _heads(xp, x, num_heads)
    width = rotary_embedding_dim or h.shape[3]

    def laid(cache: Any) -> Any:
        if position_ids is not None:
            rows = xp.ns.take(cache, xp.ns.reshape(xp.cast(position_ids, "int64"), (-1,)), axis=0)
            cache = xp.ns.reshape(rows, (*position_ids.shape, cache.shape[-1]))
        return xp.ns.expand_dims(cache, axis=1)

    cos, sin = laid(cos_cache), laid(sin_cache)
    turned, rest = h[..., :width], h[..., width:]
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
    else:
        a, b = turned[..., : width // 2], turned[..., width // 2 :]
    real, imaginary = cos * a - sin * b, sin * a + cos * b
    if interleaved:
        turned = xp.ns.reshape(xp.ns.stack([real, imaginary], axis=-1), tuple(turned.shape))
    else:
        turned = xp.ns.concat([real, imaginary], axis=-1)
    y = xp.ns.concat([turned, rest], axis=-1)
    return y if len(shape) == 4 else xp.ns.reshape(xp.ns.permute_dims(y, (0, 2, 1, 3)), shape)


@operator(
    "SwiGLU",
    "a b",
    infer=same,
    attributes={"alpha": 1.0},
    pointwise=True,
    cuda=f"z = alpha * a; {SIGMOID_OF_Z} a * s * b",
)
def swiglu(xp: Any, a: Any, b: Any, *, alpha: float) -> Any:
    """As ONNX SwiGLU (opset 28): a · sigmoid(alpha a) · b."""
    return a * sigmoid_of(xp, alpha * a) * b


OPS = specs_in(globals())
