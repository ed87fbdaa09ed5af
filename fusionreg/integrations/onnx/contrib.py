"""onnxruntime's own operators (domain ``com.microsoft``) as ONNX's: what its optimiser writes into published models.

One table, :data:`CONTRIB`: operator → function. What ONNX cannot express is a ``ModelError`` that names it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ...core.dtypes import dtype
from . import contrib_experts, contrib_quantized
from .adapters import Call

_FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"})


def adapt(call: Call) -> None:
    """Brings ``call`` to operators of the default domain; those that are not in the table stay as they are."""
    fix = CONTRIB.get(call.op)
    if fix is not None:
        fix(call)


def _named(call: Call, op: str, inputs: list[str], **attrs: Any) -> None:
    call.op, call.inputs, call.attrs = op, inputs, attrs


def _refuse(call: Call, allowed: Mapping[str, Any]) -> None:
    """``ModelError`` for an attribute that stands at another value than the one that ONNX can express."""
    for name, value in allowed.items():
        found = call.attrs.pop(name, value)
        if found != value:
            raise call.error(f"{name} = {found}", f"{name} = {value}")


def _number(call: Call, value: float, like: str, stem: str) -> str:
    """A constant of rank 0 with the dtype of ``like``."""
    kind = call.value(like).dtype
    if kind not in _FLOATS:
        raise call.error(f"operands of {kind}", "floats")
    return call.constant(np.asarray(value, np.float32).astype(dtype(kind).numpy), stem)


def _sum(call: Call, *names: str) -> str:
    """The sum of the names that are given."""
    present = [n for n in names if n]
    total = present[0]
    for name in present[1:]:
        total = call.emit("Add", [total, name], {})
    return total


# activations and products ------------------------------------------------------------------------------------------


def _gelu(approximate: str) -> Callable[[Call], None]:
    """Gelu(x), with bias BiasGelu and FastGelu."""

    def fix(call: Call) -> None:
        attrs = {"approximate": approximate} if approximate else {}
        _named(call, "Gelu", [_sum(call, call.input(0), call.input(1))], **attrs)

    return fix


def _quick_gelu(call: Call) -> None:
    _named(call, "fusionreg::QuickGelu", [call.input(0)], alpha=float(call.attrs.get("alpha", 1.702)))


def _fused_matmul(call: Call) -> None:
    _refuse(call, {"transBatchA": 0, "transBatchB": 0})
    alpha = float(call.attrs.pop("alpha", 1.0))
    swaps = {}
    for index, name in enumerate(("transA", "transB")):
        shape = call.value(call.input(index)).shape
        if call.attrs.get(name, 0) and (shape is None or len(shape) > 1):  # of a vector nothing is swapped
            swaps[name] = 1
    _named(call, "MatMul", call.inputs[:2], **swaps)
    if alpha != 1.0:
        call.after = ("Mul", (_number(call, alpha, call.input(0), "alpha"),), {})


def _activated(op: str) -> Callable[[Call], None]:
    """FusedConv and FusedGemm: the operator, then an activation."""

    def fix(call: Call) -> None:
        word = call.attrs.pop("activation", "")
        word = word.decode() if isinstance(word, bytes) else word
        given = {
            k: float(call.attrs.pop(k)) for k in [*call.attrs] if k.startswith("activation_") and k[11:] != "params"
        }
        numbers = [float(v) for v in call.attrs.pop("activation_params", ())]
        call.op = op
        if op == "Conv" and call.input(3):
            raise call.error("FusedConv with a summand", "FusedConv of x, w and bias")
        parameters = {"LeakyRelu": ("alpha",), "HardSigmoid": ("alpha", "beta")}.get(word, ())
        attrs = {p: given.get(f"activation_{p}", numbers[i] if i < len(numbers) else None)
                 for i, p in enumerate(parameters)}  # fmt: skip
        if word == "Clip":
            low, high = numbers[0], numbers[1]
            call.after = ("Clip", tuple(_number(call, v, call.input(0), "bound") for v in (low, high)), {})
        elif word in ("Relu", "Tanh", "Sigmoid", "LeakyRelu", "HardSigmoid"):
            call.after = (word, (), {k: v for k, v in attrs.items() if v is not None})
        elif word:
            raise call.error(f"activation {word!r}", "Relu, Tanh, Sigmoid, LeakyRelu, HardSigmoid or Clip")

    return fix


# normalisations ----------------------------------------------------------------------------------------------------


def _skip_normalization(op: str) -> Callable[[Call], None]:
    """(x, skip, scale, [beta,] bias) → the normalised sum; output 3 is the sum itself."""

    def fix(call: Call) -> None:
        shift = op == "LayerNormalization"
        total = _sum(call, call.input(0), call.input(1), call.input(4 if shift else 3))
        if op == "RMSNormalization" and any(call.read[1:3]):
            raise call.error("statistics of SkipSimplifiedLayerNormalization", "outputs 0 and 3 alone")
        if len(call.read) > 3:
            call.also[3] = total
        call.outputs = min(call.outputs, 3 if shift else 1)
        inputs = [total, call.input(2)] + ([call.input(3)] if shift and call.input(3) else [])
        _named(call, op, inputs, epsilon=float(call.attrs.get("epsilon", 1e-12)))

    return fix


def _embed(call: Call) -> None:
    """Word, position and segment embeddings, summed and normalised; output 1 counts the mask, output 2 is the sum."""
    ids, segments, words, positions, kinds, scale, bias, mask, places = (call.input(i) for i in range(9))
    parts = [call.emit("Gather", [words, ids], {"axis": 0})]
    if not places:
        length = call.emit("Shape", [ids], {"start": 1, "end": 2})
        length = call.emit("Squeeze", [length, call.int64s([0], "axes")], {})
        ends = [call.constant(np.asarray(v, np.int64), "n") for v in (0, 1)]
        places = call.emit("Range", [ends[0], length, ends[1]], {})
    parts.append(call.emit("Gather", [positions, places], {"axis": 0}))
    if kinds and segments:
        parts.append(call.emit("Gather", [kinds, segments], {"axis": 0}))
    total = _sum(call, *parts)
    if len(call.read) > 1 and call.read[1]:
        if not mask:
            raise call.error("the mask's count without a mask", "a mask")
        call.also[1] = call.emit("ReduceSum", [mask, call.int64s([1], "axes")], {"keepdims": 0})
    if len(call.read) > 2:
        call.also[2] = total
    call.outputs = 1
    _named(call, "LayerNormalization", [total, scale, bias], epsilon=float(call.attrs.get("epsilon", 1e-12)))


# attention ---------------------------------------------------------------------------------------------------------


def _key_mask(call: Call, mask: str, like: str, keys: str, low: float) -> str:
    """What is added to the scores: ``low`` where a mask ``[B T]`` or ``[B S T]`` is 0, or from key ``mask[B]`` on."""
    shape = call.value(mask).shape
    rank = None if shape is None else len(shape)
    if rank == 1:
        first = (call.value(like).shape or (None,))[0]
        if isinstance(shape[0], int) and isinstance(first, int) and shape[0] != first:  # type: ignore[index]
            raise call.error(f"a mask of {shape[0]} lengths for {first} sequences", "one length each")  # type: ignore[index]
        length = call.emit(
            "Squeeze", [call.emit("Shape", [keys], {"start": 1, "end": 2}), call.int64s([0], "axes")], {}
        )
        kind = np.dtype(call.value(mask).dtype)
        count = call.emit("Cast", [length], {"to": kind.name})
        ends = [call.constant(np.asarray(v, kind), "n") for v in (0, 1)]
        places = call.emit("Range", [ends[0], count, ends[1]], {})
        seen = call.emit("Less", [places, call.emit("Unsqueeze", [mask, call.int64s([1], "axes")], {})], {})
    elif rank in (2, 3):
        seen = call.emit("Cast", [mask], {"to": "bool"})
    else:
        raise call.error(f"a mask of rank {rank}", "a mask of rank 1, 2 or 3")
    axes = call.int64s([1, 2] if rank in (1, 2) else [1], "axes")
    zero, lowest = _number(call, 0.0, like, "zero"), _number(call, low, like, "filter")
    return call.emit("Where", [call.emit("Unsqueeze", [seen, axes], {}), zero, lowest], {})


def _attend(call: Call, operands: Sequence[str], mask: str, bias: str) -> None:
    """``call`` becomes Attention of the three, each ``[B S heads·D]``."""
    (q, k, v), heads = operands, int(call.attrs["num_heads"])
    attrs: dict[str, Any] = {"q_num_heads": heads, "kv_num_heads": heads}
    low = float(call.attrs.get("mask_filter_value", -10000.0))
    added = _sum(call, *[n for n in (mask and _key_mask(call, mask, q, k, low), bias) if n]) if mask or bias else ""
    if call.attrs.get("unidirectional", 0):
        attrs["is_causal"] = 1
    if call.attrs.get("scale", 0.0):
        attrs["scale"] = float(call.attrs["scale"])
    if any(call.read[1:]):
        raise call.error("keys and values as outputs", "the first output alone")
    call.outputs = 1
    _named(call, "Attention", [q, k, v, *([added] if added else [])], **attrs)


def _attention(call: Call) -> None:
    """(x, weights, bias, mask, past, attention bias): one product for queries, keys and values."""
    _refuse(call, {"do_rotary": 0, "past_present_share_buffer": 0})
    if call.input(4):
        raise call.error("Attention with a past", "Attention without one")
    x, weights = call.input(0), call.input(1)
    shape = call.value(weights).shape
    width = shape[1] if shape is not None and len(shape) == 2 else None
    sizes = [int(n) for n in call.attrs.get("qkv_hidden_sizes", ())]
    if not sizes:
        if not isinstance(width, int) or width % 3:
            raise call.error(f"weights of {width} columns", "a known multiple of three")
        sizes = [width // 3] * 3
    whole = _sum(call, call.emit("MatMul", [x, weights], {}), call.input(2))
    parts = _cut(call, whole, sizes, 2)
    _attend(call, parts, call.input(3), call.input(5))


def _cut(call: Call, name: str, sizes: list[int], axis: int) -> list[str]:
    ends = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    return [
        call.emit("Slice", [name, *(call.int64s([n], "n") for n in (ends[i], ends[i + 1], axis))], {})
        for i in range(len(sizes))
    ]


def _multi_head(call: Call) -> None:
    """(q, k, v, bias, key mask, attention bias): the operands are projected already."""
    given = [call.input(i) for i in range(3)]
    shapes = [call.value(n).shape if n else None for n in given]
    if not all(given) or any(s is None or len(s) != 3 for s in shapes) or call.input(6) or call.input(7):
        raise call.error("packed or remembered operands", "queries, keys and values of rank 3")
    if call.input(3):
        widths = [s[2] for s in shapes if s is not None]
        if not all(isinstance(w, int) for w in widths):
            raise call.error(f"operands of widths {widths}", "known widths")
        parts = _cut(call, call.input(3), [int(w) for w in widths], 0)
        given = [call.emit("Add", [n, b], {}) for n, b in zip(given, parts, strict=True)]
    _attend(call, given, call.input(4), call.input(5))


def _rotary(call: Call) -> None:
    _refuse(call, {"is_packed_batching": 0, "scale": 1.0})
    shape = call.value(call.input(1)).shape
    if shape is None or len(shape) != 2:
        raise call.error("positions that are one offset", "one position for every element")
    x, places, cos, sin = (call.input(i) for i in range(4))
    _named(call, "RotaryEmbedding", [x, cos, sin, places], **call.attrs)


def _simplified(call: Call) -> None:
    """RMSNormalization; onnxruntime writes it into ONNX's own domain."""
    if any(call.read[1:]):
        raise call.error("statistics of SimplifiedLayerNormalization", "its first output alone")
    call.outputs = 1
    attrs = {k: v for k, v in call.attrs.items() if k in ("axis", "epsilon")}
    _named(call, "RMSNormalization", call.inputs[:2], **attrs)


CONTRIB: Mapping[str, Callable[[Call], None]] = {
    **contrib_experts.CONTRIB,
    **contrib_quantized.CONTRIB,
    "com.microsoft::Attention": _attention,
    "com.microsoft::BiasGelu": _gelu(""),
    "com.microsoft::EmbedLayerNormalization": _embed,
    "com.microsoft::FastGelu": _gelu("tanh"),
    "com.microsoft::FusedConv": _activated("Conv"),
    "com.microsoft::FusedGemm": _activated("Gemm"),
    "com.microsoft::FusedMatMul": _fused_matmul,
    "com.microsoft::Gelu": _gelu(""),
    "com.microsoft::MultiHeadAttention": _multi_head,
    "com.microsoft::QuickGelu": _quick_gelu,
    "com.microsoft::RotaryEmbedding": _rotary,
    "com.microsoft::SimplifiedLayerNormalization": _simplified,
    "SimplifiedLayerNormalization": _simplified,
    "com.microsoft::SkipLayerNormalization": _skip_normalization("LayerNormalization"),
    "com.microsoft::SkipSimplifiedLayerNormalization": _skip_normalization("RMSNormalization"),
}
