"""Operators that torch has one kernel for on a GPU, which computes in float32 and rounds once, as the vocabulary says
(but a convolution's bias, see there): for what of a model stays unfused. Nothing here imports torch. Floor 1.

A function takes torch, the operands, floats of one dtype, and the attributes; it gives None where torch's kernel means
something else.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from .convolution import per_axis, window_pads
from .tables import without_tf32


def run(op: str, operands: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    """What the operator gives; None where the vocabulary has to say it."""
    found = _NATIVE.get(op)
    given = [x for x in operands if x is not None]
    if found is None or not given or not all(x.dtype == given[0].dtype and x.is_floating_point() for x in given):
        return None
    return found(sys.modules["torch"], *operands, **attributes)


def _named(name: str) -> Callable[..., Any]:
    return lambda torch, *operands: getattr(torch, name)(*operands)


def _matmul(torch: Any, a: Any, b: Any, *, transA: int, transB: int) -> Any:
    return torch.matmul(a.mT if transA else a, b.mT if transB else b)


def _swish(torch: Any, x: Any, *, alpha: float) -> Any:
    return torch.nn.functional.silu(x) if alpha == 1.0 else None


def _padding(torch: Any, x: Any, kernel: Sequence[int], attributes: Mapping[str, Any]) -> tuple[Any, tuple[int, ...]]:
    """``x`` and what a kernel pads on both sides of each axis; padded with 0 already where the sides differ."""
    pads = [(int(a or 0), int(b or 0)) for a, b in window_pads(attributes, tuple(x.shape[2:]), kernel)]
    if all(a == b >= 0 for a, b in pads):
        return x, tuple(a for a, _ in pads)
    return torch.nn.functional.pad(x, [p for pair in reversed(pads) for p in pair]), (0,) * len(pads)


def _conv(torch: Any, x: Any, w: Any, bias: Any = None, **attributes: Any) -> Any:
    """The products are rounded before the bias is added, as in every model that torch runs."""
    n = x.ndim - 2
    if not 1 <= n <= 3 or not x.numel() or not w.numel():
        return None
    x, pads = _padding(torch, x, tuple(w.shape[2:]), attributes)
    strides, dilations = per_axis(attributes["strides"], n), per_axis(attributes["dilations"], n)
    convolved = (torch.nn.functional.conv1d, torch.nn.functional.conv2d, torch.nn.functional.conv3d)[n - 1]
    with without_tf32(torch, x):
        return convolved(x, w, bias, strides, pads, dilations, attributes["group"])


def _max_pool(torch: Any, x: Any, *, kernel_shape: Sequence[int], **attributes: Any) -> Any:
    kernel, n = tuple(kernel_shape), len(kernel_shape)
    if not 1 <= n <= 3 or not x.numel() or attributes["ceil_mode"]:
        return None
    pads = window_pads(attributes, tuple(x.shape[2:]), kernel)
    if any(a != b or not 0 <= 2 * int(a or 0) <= k for (a, b), k in zip(pads, kernel, strict=True)):
        return None
    strides, dilations = per_axis(attributes["strides"], n), per_axis(attributes["dilations"], n)
    pooled = (torch.nn.functional.max_pool1d, torch.nn.functional.max_pool2d, torch.nn.functional.max_pool3d)[n - 1]
    return pooled(x, kernel, strides, tuple(a for a, _ in pads), dilations)


def _global_average_pool(torch: Any, x: Any) -> Any:
    axes = tuple(range(2, x.ndim))
    return torch.mean(x, dim=axes, keepdim=True) if axes and x.numel() else None


_NATIVE: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {"Add": _named("add"), "Sub": _named("sub"), "Mul": _named("mul"), "Div": _named("div"), "Relu": _named("relu")}
    | {"Sigmoid": _named("sigmoid"), "Tanh": _named("tanh"), "Swish": _swish, "Conv": _conv, "MaxPool": _max_pool}
    | {"GlobalAveragePool": _global_average_pool, "MatMul": _matmul}
)
