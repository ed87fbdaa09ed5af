"""One ONNX operator as plain torch calls: the table that :mod:`.peers` writes graphs with."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F

from fusionreg.core.errors import MisfitError
from fusionreg.core.frozen import FrozenDict
from fusionreg.core.ir import Node, Value

from .schemas import torch_dtype


@dataclass(frozen=True)
class Site:
    """One operator to be written.

    Attributes:
        node: the operator.
        args: its operands (None for an omitted one): proxies of values, Python numbers for constants of one element.
        attributes: all of them.
        types: type of each operand, None for an omitted one.
        ints: operand index → its numbers, where it is an integer constant: shapes, axes.
        outputs: how many outputs are read.
    """

    node: Node
    args: tuple[Any, ...]
    attributes: Mapping[str, Any]
    types: tuple[Value | None, ...]
    ints: Mapping[int, tuple[int, ...]]
    outputs: int = 1

    def rank(self, index: int = 0) -> int:
        value = self.types[index]
        if value is None or value.shape is None:
            raise unwritten(self.node, "an operand of unknown rank")
        return len(value.shape)

    def extents(self, index: int = 0) -> tuple[int, ...]:
        value = self.types[index]
        if value is None or value.shape is None or not all(isinstance(d, int) for d in value.shape):
            raise unwritten(self.node, "an operand of unknown extents")
        return tuple(d for d in value.shape if isinstance(d, int))

    def numbers(self, index: int) -> tuple[int, ...]:
        """An operand that says which axes or what shape."""
        if index not in self.ints:
            raise unwritten(self.node, f"operand {index} is no constant")
        return self.ints[index]

    def given(self, index: int) -> bool:
        return index < len(self.args) and self.args[index] is not None


Writer = Callable[[Site], Any]

DROPOUT = "fusionreg::Dropout"


def unwritten(node: Node, why: str) -> MisfitError:
    """The error for an operator that has no plain torch form here."""
    return MisfitError(
        "no torch peer", f"for {node.op}", why, "an operator of the table in peer_operators.py", op=node.op
    )


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


def _swish(s: Site) -> Any:
    x, alpha = s.args[0], s.attributes["alpha"]
    return F.silu(x) if alpha == 1.0 else x * torch.sigmoid(alpha * x)


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
    if s.attributes["training_mode"]:
        raise unwritten(s.node, "training mode")
    x, scale, bias, mean, var = s.args
    return F.batch_norm(x, mean, var, scale, bias, False, 0.0, s.attributes["epsilon"])


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


def _cast(s: Site) -> Any:
    return s.args[0].to(torch_dtype(s.attributes["to"]))


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


def _attention(s: Site) -> Any:
    plain = {"softcap": 0.0, "left_window_size": -1, "right_window_size": -1}
    if s.outputs > 1 or s.rank() != 4 or any(s.given(i) for i in (4, 5, 6)):
        raise unwritten(s.node, "a cache, packed heads or further outputs")
    if any(s.attributes[k] != v for k, v in plain.items()):
        raise unwritten(s.node, "a softcap or a window")
    mask, causal = (s.args[3] if s.given(3) else None), bool(s.attributes["is_causal"])
    if mask is not None and causal:
        raise unwritten(s.node, "a mask beside is_causal")
    if causal and s.extents(0)[2] != s.extents(1)[2]:
        raise unwritten(s.node, "is_causal with queries and keys of different lengths")
    grouped = s.extents(0)[1] != s.extents(1)[1]
    return F.scaled_dot_product_attention(
        s.args[0],
        s.args[1],
        s.args[2],
        attn_mask=mask,
        is_causal=causal,
        scale=s.attributes["scale"],
        enable_gqa=grouped,
    )


def _softmax_grad(s: Site) -> Any:
    dy, y = s.args
    assert s.types[1] is not None
    return torch._softmax_backward_data(dy, y, s.attributes["axis"] % s.rank(), torch_dtype(s.types[1].dtype))


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
    dx = (r * (g - h * (g * h).mean(inner, keepdim=True))).to(_dtype(s, 1))
    return dx, (dy * h).sum(outer).to(_dtype(s, 2)) if outer else (dy * h).to(_dtype(s, 2))


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
    if s.attributes["alpha"] != 1.0:
        raise unwritten(s.node, "an alpha of its own")
    return torch.ops.aten.silu_backward(s.args[0], s.args[1])


def _dtype(s: Site, index: int) -> torch.dtype:
    value = s.types[index]
    assert value is not None
    return torch_dtype(value.dtype)


def _concat(s: Site) -> Any:
    return torch.cat(list(s.args), dim=s.attributes["axis"])


_UNARY: Mapping[str, Callable[..., Any]] = {
    "Abs": torch.abs, "Ceil": torch.ceil, "Cos": torch.cos, "Erf": torch.erf, "Exp": torch.exp, "Floor": torch.floor,
    "Identity": lambda x: x, "Log": torch.log, "Neg": torch.neg, "Not": torch.logical_not, "Reciprocal":
    torch.reciprocal, "Relu": torch.relu, "Round": torch.round, "Sigmoid": torch.sigmoid, "Sign": torch.sign,
    "Sin": torch.sin, "Softplus": F.softplus, "Softsign": F.softsign, "Sqrt": torch.sqrt, "Tan": torch.tan,
    "Tanh": torch.tanh, "Mish": F.mish, "HardSwish": F.hardswish, "fusionreg::Rsqrt": torch.rsqrt,
    "fusionreg::Exp2": torch.exp2, "fusionreg::Expm1": torch.expm1, "fusionreg::Log1p": torch.log1p,
    "fusionreg::Log2": torch.log2, "fusionreg::Trunc": torch.trunc,
}  # fmt: skip
_BINARY: Mapping[str, Callable[..., Any]] = {
    "Add": lambda a, b: a + b, "Sub": lambda a, b: a - b, "Mul": lambda a, b: a * b, "Div": lambda a, b: a / b,
    "Pow": lambda a, b: a**b, "Equal": lambda a, b: a == b, "Greater": lambda a, b: a > b,
    "GreaterOrEqual": lambda a, b: a >= b, "Less": lambda a, b: a < b, "LessOrEqual": lambda a, b: a <= b,
    "And": torch.logical_and, "Or": torch.logical_or, "Xor": torch.logical_xor, "PRelu": lambda x, a:
    torch.where(x < 0, a * x, x),
}  # fmt: skip

WRITERS: Mapping[str, Writer] = FrozenDict(
    {
        **{name: _plain(f) for name, f in {**_UNARY, **_BINARY}.items()},
        "Max": _extremum(torch.maximum, torch.clamp_min), "Min": _extremum(torch.minimum, torch.clamp_max),
        "Sum": _folded(lambda a, b: a + b),
        "MatMul": _matmul, "Gemm": _gemm, "Conv": _conv, "MaxPool": _max_pool, "Attention": _attention,
        "Gelu": _plain(F.gelu, approximate="approximate"), "Swish": _swish,
        "fusionreg::QuickGelu": _swish, "LeakyRelu": _plain(F.leaky_relu, negative_slope="alpha"),
        "Elu": _plain(F.elu, alpha="alpha"), "Celu": _plain(F.celu, alpha="alpha"),
        "SwiGLU": lambda s: _swish(s) * s.args[1],
        "LayerNormalization": _layer_norm, "RMSNormalization": _rms_norm, "GroupNormalization": _group_norm,
        "InstanceNormalization": lambda s: F.instance_norm(
            s.args[0], weight=s.args[1], bias=s.args[2], eps=s.attributes["epsilon"]),
        "BatchNormalization": _batch_norm, "Dropout": _dropout, "fusionreg::Dropout": _seeded_dropout,
        "Softmax": _plain(torch.softmax, dim="axis"),
        "LogSoftmax": _plain(torch.log_softmax, dim="axis"), "fusionreg::SoftmaxGrad": _softmax_grad,
        "fusionreg::LayerNormalizationGrad": _layer_norm_grad, "fusionreg::RMSNormalizationGrad": _rms_norm_grad,
        "fusionreg::GroupNormalizationGrad": _group_norm_grad,
        "fusionreg::GeluGrad": _gelu_grad, "fusionreg::SwishGrad": _swish_grad,
        "fusionreg::SigmoidGrad": lambda s: torch.ops.aten.sigmoid_backward(*s.args),
        "fusionreg::TanhGrad": lambda s: torch.ops.aten.tanh_backward(*s.args),
        "fusionreg::ReluGrad": lambda s: torch.ops.aten.threshold_backward(s.args[0], s.args[1], 0),
        "ReduceSum": _reduce(torch.sum), "ReduceMean": _reduce(torch.mean), "ReduceMax": _reduce(torch.amax),
        "ReduceMin": _reduce(torch.amin), "ReduceSumSquare": _reduce(torch.sum, of=torch.square),
        "Cast": _cast, "Clip": _clip, "Where": _where, "Reshape": _reshape, "Transpose": _transpose,
        "Squeeze": _squeeze, "Unsqueeze": _unsqueeze, "Concat": _concat,
        "Expand": _expand,
        "Flatten": lambda s: torch.flatten(s.args[0], s.attributes["axis"]),
    }
)  # fmt: skip
"""Operator → how a user writes it in torch."""
