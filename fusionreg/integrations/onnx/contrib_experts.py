"""onnxruntime's layers of experts (``MoE``, ``QMoE``) as what they mean: a router, products, a weighted sum.

Taken are gated activations (SwiGLU without clamps, GEGLU, and SiLU with a third matrix) of experts without biases, and
symmetric weights of 4 or 8 bits. Everything else stays the operator that it is. CPU kernels of QMoE divide weights by
their sum whatever ``normalize_routing_weights`` says, those for GPUs do not: 0 stays as it is, too.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .adapters import Call

#: Inputs by position: tokens and logits come first.
_MOE = ("fc1", "fc1_bias", "fc2", "fc2_bias", "fc3", "fc3_bias")
_QMOE = (
    "fc1", "fc1_scales", "fc1_bias", "fc2", "fc2_scales", "fc2_bias", "fc3", "fc3_scales", "fc3_bias",
    *("fc1_zeros", "fc2_zeros", "fc3_zeros", "router_weights", "fc1_global", "fc2_global"),
    *("fc1_act", "fc2_act", "fc1_act_block", "fc2_act_block"),
)  # fmt: skip
#: Attributes that must stand there, where they are given.
_PLAIN = {
    "use_sparse_mixer": 0, "swiglu_limit_after_activation": 0, "activation_alpha": 1.0, "activation_beta": 0.0,
    "swiglu_limit": None, "quant_type": "int",
}  # fmt: skip
#: activation_type → the operator of gates.
_GATES: dict[str, tuple[str, dict[str, Any]]] = {
    "swiglu": ("Swish", {}), "silu": ("Swish", {}), "geglu": ("Gelu", {"approximate": "tanh"}),
}  # fmt: skip


def _moe(call: Call) -> None:
    given = dict(zip(_MOE, call.inputs[2:], strict=False))
    if not _plain(call, given, ("fc1", "fc2", "fc3")):
        return
    weights = {name: given[name] for name in ("fc1", "fc2", "fc3") if given.get(name)}
    if "fc3" not in weights and _in_turn(call):
        weights["fc1"] = _in_halves(call, weights["fc1"])
    _layer(call, weights)


def _qmoe(call: Call) -> None:
    given = dict(zip(_QMOE, call.inputs[2:], strict=False))
    weights = ("fc1", "fc2", "fc3") if given.get("fc3") else ("fc1", "fc2")
    bits = int(call.attrs.get("expert_weight_bits", 4))
    same = all(int(call.attrs.get(f"{name}_expert_weight_bits", bits)) == bits for name in weights)
    scales = tuple(f"{name}_scales" for name in weights)
    kinds = {call.value(given[name]).dtype for name in weights}
    if bits not in (4, 8) or not same or kinds != {"uint8"} or not all(given.get(name) for name in scales):
        return
    if not _plain(call, given, (*weights, *scales)) or not call.attrs.get("normalize_routing_weights", 0):
        return
    if call.attrs.get("weights_prepacked", 0) not in (0, -1):
        return
    block = int(call.attrs.get("block_size", 0))
    if "fc3" not in weights and _in_turn(call):
        for name in ("fc1", "fc1_scales"):
            given[name] = _in_halves(call, given[name])
    whole = {name: _wide(call, given[name], given[f"{name}_scales"], bits, block) for name in weights}
    _layer(call, whole, wide=True)


def _plain(call: Call, given: dict[str, str], known: tuple[str, ...]) -> bool:
    """Whether nothing is asked for that the layer does not have."""
    attributes = all(call.attrs.get(name, value) == value for name, value in _PLAIN.items())
    activation = str(call.attrs.get("activation_type", "relu"))
    third, fused = bool(given.get("fc3")), int(call.attrs.get("swiglu_fusion", 0))
    gated = activation in _GATES and (activation != "geglu" if third else activation != "silu" and fused in (1, 2))
    ranks = {call.value(name).shape is not None for name in call.inputs[:2] if name}
    return attributes and gated and ranks == {True} and all(not n or name in known for name, n in given.items())


def _wide(call: Call, weight: str, scale: str, bits: int, block: int) -> str:
    """Weights [E N K] in float32."""
    numbers = _numbers(call, weight, bits)
    scale = call.emit("Cast", [scale], {"to": "float32"})
    if not block:
        scale = call.emit("Unsqueeze", [scale, call.int64s([-1], "axis")], {})
        if bits == 8:
            return call.emit("Mul", [call.emit("Cast", [numbers], {"to": "float32"}), scale], {})
        shape = call.value(weight).shape
        block = 2 * shape[-1] if shape is not None and isinstance(shape[-1], int) else 0
    return call.emit("DequantizeLinear", [numbers, scale], {"axis": 2, "block_size": block})


def _numbers(call: Call, weight: str, bits: int) -> str:
    """As int8; of bytes those less 128."""
    if bits == 4:
        return call.emit("fusionreg::UnpackInt4", [weight], {})
    known = call.known(weight)
    if known is not None:
        return call.constant((known.astype(np.int16) - 128).astype(np.int8), "signed")
    shifted = call.emit("Sub", [call.emit("Cast", [weight], {"to": "int32"}), _int32(call, 128)], {})
    return call.emit("Cast", [shifted], {"to": "int8"})


def _int32(call: Call, value: int) -> str:
    return call.constant(np.asarray(value, np.int32), "number")


def _layer(call: Call, weights: dict[str, str], wide: bool = False) -> None:
    """``call`` becomes the weighted sum of the layer. ``wide``: weights are in float32, products as tokens are."""
    tokens, logits = call.inputs[:2]
    kind, shape = call.value(tokens).dtype, call.value(tokens).shape
    axis, one = call.int64s([-1], "axis"), call.int64s([1], "axis")
    x = tokens
    if shape is not None and len(shape) > 2:
        channels = call.emit("Slice", [call.emit("Shape", [tokens], {}), axis, call.int64s([1 << 31], "end")], {})
        x = call.emit("Reshape", [tokens, call.emit("Concat", [axis, channels], {"axis": 0})], {})
    renormalise = int(bool(call.attrs.get("normalize_routing_weights", 0)))
    if call.value(logits).dtype not in ("float32", "" if wide else kind):
        logits = call.emit("Cast", [logits], {"to": "float32"})
    route = {"top_k": int(call.attrs.get("k", 1)), "renormalise": renormalise}
    shares, ids = call.several("fusionreg::Route", [logits], route, 2)

    def product(x: str, w: str) -> str:
        if not wide:
            return call.emit("fusionreg::RoutedMatMul", [x, w, ids], {"trans": 1})
        x = call.emit("Cast", [x], {"to": "float32"})
        return call.emit("Cast", [call.emit("fusionreg::RoutedMatMul", [x, w, ids], {"trans": 1})], {"to": kind})

    up = weights["fc1"]
    if "fc3" in weights:  # two matrices
        up = call.emit("Concat", [up, weights["fc3"]], {"axis": 1})
    h = product(call.emit("Unsqueeze", [x, one], {}), up)
    gate, other = call.several("Split", [h], {"axis": -1, "num_outputs": 2}, 2)
    op, attrs = _GATES[str(call.attrs["activation_type"])]
    d = product(call.emit("Mul", [call.emit(op, [gate], attrs), other], {}), weights["fc2"])
    if x != tokens:
        call.after = ("Reshape", (call.emit("Shape", [tokens], {}),), {})
    call.op, call.inputs, call.attrs = "fusionreg::RoutedSum", [d, shares], {}


def _in_turn(call: Call) -> bool:
    """Whether rows of gate and up are there in turn."""
    return int(call.attrs["swiglu_fusion"]) == 1


def _in_halves(call: Call, weight: str) -> str:
    """Rows 0, 2, 4, … and then 1, 3, 5, …"""
    shape = call.value(weight).shape
    rows = shape[1] if shape is not None and isinstance(shape[1], int) else None
    if rows is None:
        raise call.error("matrices of an unknown number of rows", "a number")
    order = [*range(0, rows, 2), *range(1, rows, 2)]
    return call.emit("Gather", [weight, call.int64s(order, "rows")], {"axis": 1})


CONTRIB = {"com.microsoft::MoE": _moe, "com.microsoft::QMoE": _qmoe}
