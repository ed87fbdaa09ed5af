"""One ONNX operator as plain torch calls: the table that :mod:`.peers` writes graphs with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F

from fusionreg.core.frozen import FrozenDict

from .peer_attention import WRITERS as ATTENTION
from .peer_caches import WRITERS as CACHES
from .peer_experts import WRITERS as EXPERTS
from .peer_experts import grouped, is_grouped
from .peer_losses import WRITERS as LOSSES
from .peer_normalizations import WRITERS as NORMALIZATIONS
from .peer_site import Site, unwritten
from .schemas import torch_dtype

DROPOUT = "fusionreg::Dropout"
Writer = Callable[[Site], Any]


def _plain(function: Callable[..., Any], **attributes: str) -> Writer:
    """``function(*operands)``; keywords: torch's name → the attribute's."""
    return lambda s: function(*s.args, **{k: s.attributes[v] for k, v in attributes.items()})


def _folded(function: Callable[[Any, Any], Any]) -> Writer:
    return lambda s: reduce(function, s.args)


def _matmul(s: Site) -> Any:
    a, b = s.args
    a = a.transpose(-1, -2) if s.attributes["transA"] else a
    return torch.matmul(a, b.transpose(-1, -2) if s.attributes["transB"] else b)


def _gemm(s: Site) -> Any:
    y = _matmul(s if len(s.args) == 2 else Site(s.node, s.args[:2], s.attributes, s.types[:2], s.ints))
    y = y if s.attributes["alpha"] == 1.0 else y * s.attributes["alpha"]
    if not s.given(2):
        return y
    return y + (s.args[2] if s.attributes["beta"] == 1.0 else s.args[2] * s.attributes["beta"])


def _chosen(s: Site, things: int, ids: int) -> tuple[Any, Any]:
    """(whether each id names one of the operand's things, that thing, the first where it does not)."""
    at, count = s.args[ids], s.extents(things)[0]
    inside = (at >= 0) & (at < count)
    return inside[..., None], s.args[things][torch.where(inside, at, 0)]


def _routed_matmul(s: Site) -> Any:
    if is_grouped(s):
        return grouped(s)
    inside, w = _chosen(s, 1, 2)
    y = torch.matmul(s.args[0].unsqueeze(-2), w.mT if s.attributes["trans"] else w).squeeze(-2)
    return torch.where(inside, y, 0.0)


def _routed_scale(s: Site) -> Any:
    inside, scales = _chosen(s, 1, 2)
    return torch.where(inside, s.args[0] * scales[..., None], s.args[0])


def _routed_limit(s: Site) -> Any:
    inside, limits = _chosen(s, 1, 2)
    place = torch.arange(s.extents()[-1], device=s.args[0].device)
    return torch.where(inside & (place < limits[..., None]), s.args[0], 0.0)


def _limit_rank(s: Site) -> Any:
    place = torch.arange(s.extents()[2 if s.attributes["trans"] else 1], device=s.args[0].device)
    return torch.where((place if s.attributes["trans"] else place[:, None]) < s.args[1][:, None, None], s.args[0], 0.0)


def _swish(s: Site) -> Any:
    x, alpha = s.args[0], s.attributes["alpha"]
    return F.silu(x) if alpha == 1.0 else x * torch.sigmoid(alpha * x)


def _dropout(s: Site) -> Any:
    if s.given(2) and s.args[2] is not False:
        raise unwritten(s.node, "training mode: torch draws another random stream, so outputs cannot agree")
    return s.args[0]


def _seeded_dropout(s: Site) -> Any:
    """torch's own dropout: the same work on another random stream; see :func:`undropped`."""
    return F.dropout(s.args[0], s.attributes["p"], True)


def _reduce(function: Callable[..., Any], *, of: Callable[[Any], Any] = lambda x: x) -> Writer:
    def write(s: Site) -> Any:
        axes = s.numbers(1) if s.given(1) else ()
        if not axes:
            if s.attributes["noop_with_empty_axes"]:
                return of(s.args[0])
            axes = tuple(range(s.rank()))
        return function(of(s.args[0]), dim=tuple(axes), keepdim=bool(s.attributes["keepdims"]))

    return write


def _reshape(s: Site) -> Any:
    extents, wanted = s.extents(), s.numbers(1)
    if not s.attributes["allowzero"]:
        wanted = tuple(extents[i] if d == 0 else d for i, d in enumerate(wanted))
    return torch.reshape(s.args[0], wanted)


def _transpose(s: Site) -> Any:
    return torch.permute(s.args[0], tuple(s.attributes["perm"]) or tuple(reversed(range(s.rank()))))


def _squeeze(s: Site) -> Any:
    axes = s.numbers(1) if s.given(1) else tuple(i for i, d in enumerate(s.extents()) if d == 1)
    return torch.squeeze(s.args[0], axes)


def _unsqueeze(s: Site) -> Any:
    x, axes = s.args[0], s.numbers(1)
    for axis in sorted(a % (s.rank() + len(axes)) for a in axes):
        x = torch.unsqueeze(x, axis)
    return x


def _expand(s: Site) -> Any:
    return torch.broadcast_to(s.args[0], torch.broadcast_shapes(s.extents(), s.numbers(1)))


def _extremum(pair: Callable[[Any, Any], Any], clamp: Callable[[Any, float], Any]) -> Writer:
    """A running maximum or minimum; with a number torch's own spelling is a clamp."""

    def two(a: Any, b: Any) -> Any:
        a, b = (b, a) if isinstance(a, int | float) else (a, b)
        return clamp(a, b) if isinstance(b, int | float) else pair(a, b)

    return _folded(two)


def _clip(s: Site) -> Any:
    low, high = (s.args[i] if s.given(i) else None for i in (1, 2))
    return torch.clamp(s.args[0], low, high)


def _where(s: Site) -> Any:
    return torch.where(*s.args)


def _masked_fill(s: Site) -> Any:
    x, mask = s.args
    return x.masked_fill(torch.logical_not(mask) if s.attributes["keep"] else mask, s.attributes["value"])


def _later(s: Site) -> Any:
    """Where a key stands behind what its query sees."""
    ones = s.args[0].new_ones(s.extents()[-2:], dtype=torch.bool)
    return torch.triu(ones, s.attributes["diagonal"] + 1)


def _causal_mask(s: Site) -> Any:
    return s.args[0].masked_fill(_later(s), s.attributes["value"])


def _causal_softmax_grad(s: Site) -> Any:
    dy, y = s.args
    return torch._softmax_backward_data(dy, y, -1, s.dtype(1)).masked_fill(_later(s), 0)


def _cast(s: Site) -> Any:
    return s.args[0].to(torch_dtype(s.attributes["to"]))


def _dequantize(s: Site) -> Any:
    x, scale = s.args[:2]
    if s.attributes["output_dtype"]:
        raise unwritten(s.node, f"output_dtype={s.attributes['output_dtype']}")
    if s.given(2):
        raise unwritten(s.node, "a zero point")
    axis = s.attributes["axis"] % s.rank()
    if block := s.attributes["block_size"]:
        blocks = x.to(s.dtype(1)).unflatten(axis, (-1, block)) * scale.unsqueeze(axis + 1)
        return blocks.flatten(axis, axis + 1)
    behind = s.rank() - 1 - axis  # axes of x behind the one that the scale runs along
    if s.rank(1) and behind:
        scale = scale.reshape(-1, *[1] * behind)
    return x.to(s.dtype(1)) * scale


def _unpack_int4(s: Site) -> Any:
    (x,) = s.args
    return torch.stack((x % 16, x >> 4), -1).flatten(-2).to(torch.int8) - 8


def _window(s: Site, kernel: int) -> dict[str, Any]:
    """Stride, padding and dilation of a window over ``kernel`` spatial axes; torch pads both sides alike."""
    if s.attributes["auto_pad"] != "NOTSET":
        raise unwritten(s.node, f"auto_pad={s.attributes['auto_pad']}")
    pads = tuple(s.attributes["pads"]) or (0,) * (2 * kernel)
    if pads[:kernel] != pads[kernel:]:
        raise unwritten(s.node, f"pads {pads}: torch pads both sides alike")
    return {
        "stride": tuple(s.attributes["strides"]) or (1,) * kernel,
        "padding": pads[:kernel],
        "dilation": tuple(s.attributes["dilations"]) or (1,) * kernel,
    }


def _conv(s: Site) -> Any:
    n = s.rank() - 2
    function = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[n]
    bias = s.args[2] if s.given(2) else None
    return function(s.args[0], s.args[1], bias, **_window(s, n), groups=s.attributes["group"])


def _max_pool(s: Site) -> Any:
    n = s.rank() - 2
    if s.outputs > 1:
        raise unwritten(s.node, "indices are an output")
    function = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}[n]
    return function(s.args[0], tuple(s.attributes["kernel_shape"]), **_window(s, n),
                    ceil_mode=bool(s.attributes["ceil_mode"]))  # fmt: skip


def _hard_sigmoid(s: Site) -> Any:
    return torch.clamp(s.attributes["alpha"] * s.args[0] + s.attributes["beta"], 0.0, 1.0)


def _is_inf(s: Site) -> Any:
    below, above = s.attributes["detect_negative"], s.attributes["detect_positive"]
    if below and above:
        return torch.isinf(s.args[0])
    if not below and not above:
        return torch.zeros_like(s.args[0], dtype=torch.bool)
    return torch.isposinf(s.args[0]) if above else torch.isneginf(s.args[0])


def _selu(s: Site) -> Any:
    x, alpha, gamma = s.args[0], s.attributes["alpha"], s.attributes["gamma"]
    if abs(alpha - 1.6732632) < 1e-6 and abs(gamma - 1.050701) < 1e-6:
        return F.selu(x)
    return gamma * torch.where(x < 0, alpha * torch.expm1(x), x)


def _shrink(s: Site) -> Any:
    x, bias, edge = s.args[0], s.attributes["bias"], s.attributes["lambd"]
    if not s.integers() and bias == 0.0:
        return F.hardshrink(x, edge)
    if not s.integers() and bias == edge:
        return F.softshrink(x, edge)
    inside = torch.logical_and(x >= -edge, x <= edge)
    return torch.where(inside, 0, torch.where(x < 0, x + bias, x - bias)).to(s.dtype())


def _concat(s: Site) -> Any:
    return torch.cat(list(s.args), dim=s.attributes["axis"])


_UNARY: Mapping[str, Callable[..., Any]] = {
    "Abs": torch.abs, "Ceil": torch.ceil, "Cos": torch.cos, "Erf": torch.erf, "Exp": torch.exp, "Floor": torch.floor,
    "Identity": lambda x: x, "Log": torch.log, "Neg": torch.neg, "Not": torch.logical_not, "Reciprocal":
    torch.reciprocal, "Relu": torch.relu, "Round": torch.round, "Sigmoid": torch.sigmoid, "Sign": torch.sign,
    "Sin": torch.sin, "Softplus": F.softplus, "Softsign": F.softsign, "Sqrt": torch.sqrt, "Tan": torch.tan,
    "Tanh": torch.tanh, "Mish": F.mish, "HardSwish": F.hardswish, "fusionreg::Rsqrt": torch.rsqrt,
    "fusionreg::Exp2": torch.exp2, "fusionreg::Expm1": torch.expm1, "fusionreg::Log1p": torch.log1p,
    "fusionreg::Log2": torch.log2, "fusionreg::Trunc": torch.trunc, "Acos": torch.acos, "Acosh": torch.acosh,
    "Asin": torch.asin, "Asinh": torch.asinh, "Atan": torch.atan, "Atanh": torch.atanh, "Cosh": torch.cosh,
    "Sinh": torch.sinh, "BitwiseNot": torch.bitwise_not, "IsNaN": torch.isnan,
}  # fmt: skip
_BINARY: Mapping[str, Callable[..., Any]] = {
    "Add": lambda a, b: a + b, "Sub": lambda a, b: a - b, "Mul": lambda a, b: a * b,
    "Equal": lambda a, b: a == b, "Greater": lambda a, b: a > b,
    "GreaterOrEqual": lambda a, b: a >= b, "Less": lambda a, b: a < b, "LessOrEqual": lambda a, b: a <= b,
    "And": torch.logical_and, "Or": torch.logical_or, "Xor": torch.logical_xor, "PRelu": lambda x, a:
    torch.where(x < 0, a * x, x), "BitwiseAnd": torch.bitwise_and, "BitwiseOr": torch.bitwise_or,
    "BitwiseXor": torch.bitwise_xor, "fusionreg::Atan2": torch.atan2, "fusionreg::Hypot": torch.hypot,
}  # fmt: skip

WRITERS: Mapping[str, Writer] = FrozenDict(
    {
        **{name: _plain(f) for name, f in {**_UNARY, **_BINARY}.items()},
        **NORMALIZATIONS,
        **EXPERTS,
        **ATTENTION,
        **CACHES,
        **LOSSES,
        "Max": _extremum(torch.maximum, torch.clamp_min), "Min": _extremum(torch.minimum, torch.clamp_max),
        "Sum": _folded(lambda a, b: a + b),
        "MatMul": _matmul, "Gemm": _gemm, "Conv": _conv, "MaxPool": _max_pool,
        "Gelu": _plain(F.gelu, approximate="approximate"), "Swish": _swish,
        "fusionreg::QuickGelu": _swish, "LeakyRelu": _plain(F.leaky_relu, negative_slope="alpha"),
        "Elu": _plain(F.elu, alpha="alpha"), "Celu": _plain(F.celu, alpha="alpha"),
        "fusionreg::RoutedMatMul": _routed_matmul, "fusionreg::RoutedScale": _routed_scale,
        "fusionreg::RoutedLimit": _routed_limit, "fusionreg::LimitRank": _limit_rank,
        "SwiGLU": lambda s: _swish(s) * s.args[1],
        "Dropout": _dropout, "fusionreg::Dropout": _seeded_dropout, "Softmax": _plain(torch.softmax, dim="axis"),
        "LogSoftmax": _plain(torch.log_softmax, dim="axis"), "fusionreg::MaskedFill": _masked_fill,
        "fusionreg::CausalMask": _causal_mask, "fusionreg::CausalSoftmaxGrad": _causal_softmax_grad,
        "Div": lambda s: s.args[0] / s.args[1] if not s.integers() else torch.div(*s.args, rounding_mode="trunc"),
        "Pow": lambda s: (s.args[0] ** s.args[1]).to(s.dtype()) if s.integers() else s.args[0] ** s.args[1],
        "Mean": lambda s: reduce(lambda a, b: a + b, s.args) / len(s.args),
        "Mod": lambda s: (torch.fmod if s.attributes["fmod"] else torch.remainder)(*s.args),
        "BitShift": lambda s: s.args[0] << s.args[1] if s.attributes["direction"] == "LEFT" else s.args[0] >> s.args[1],
        "HardSigmoid": _hard_sigmoid, "IsInf": _is_inf, "Selu": _selu, "Shrink": _shrink,
        "ThresholdedRelu": lambda s: F.threshold(s.args[0], s.attributes["alpha"], 0.0),
        "CastLike": lambda s: s.args[0].to(s.dtype(1)),
        "ReduceSum": _reduce(torch.sum), "ReduceMean": _reduce(torch.mean), "ReduceMax": _reduce(torch.amax),
        "ReduceMin": _reduce(torch.amin), "ReduceSumSquare": _reduce(torch.sum, of=torch.square),
        "Cast": _cast, "DequantizeLinear": _dequantize, "fusionreg::UnpackInt4": _unpack_int4,
        "Clip": _clip, "Where": _where, "Reshape": _reshape, "Transpose": _transpose,
        "Squeeze": _squeeze, "Unsqueeze": _unsqueeze, "Concat": _concat,
        "Expand": _expand,
        "Flatten": lambda s: torch.flatten(s.args[0], s.attributes["axis"]),
    }
)  # fmt: skip
"""Operator → how a user writes it in torch."""
