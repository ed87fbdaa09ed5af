"""Reductions over axes, softmax, running sums and arg-extrema. Floor 1."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from .define import operator, specs_in
from .inference import (
    Attributes,
    Constants,
    Extents,
    Inputs,
    Type,
    axes_of,
    axis_of,
    known_ints,
    length_of,
    operand,
    present,
    same,
)


def reduced(shape: Extents, axes: tuple[int, ...], keepdims: int) -> Extents:
    """``shape`` with the (non-negative) axes gone, or 1 where kept."""
    if shape is None:
        return None
    return tuple(1 if i in axes else d for i, d in enumerate(shape) if keepdims or i not in axes)


def _reduce_type(inputs: Inputs, attributes: Attributes, constants: Constants) -> list[Type]:
    x = operand(inputs, 0)
    if x.shape is None:
        return [(x.dtype, None)]
    rank, keep = len(x.shape), attributes["keepdims"]
    axes = known_ints(constants, 1)
    if axes is None and present(inputs, 1):
        count = length_of(operand(inputs, 1))
        if keep and count != 0:
            return [(x.dtype, (None,) * rank)]
        if count is None:
            return [(x.dtype, None)]
        if count:
            return [(x.dtype, (None,) * (rank - count))]
        axes = ()
    if not axes:
        axes = () if attributes["noop_with_empty_axes"] else tuple(range(rank))
    return [(x.dtype, reduced(x.shape, axes_of(axes, rank), keep))]


def _reduction(name: str) -> Callable[[Callable[..., Any]], Any]:
    """``f(xp, x, axes, keepdims)`` with non-negative axes, as an operator with ONNX-18's axes input."""

    def define(f: Callable[..., Any]) -> Any:
        def meaning(xp: Any, x: Any, axes: Any = None, *, keepdims: int, noop_with_empty_axes: int) -> Any:
            given = () if axes is None else xp.ints(axes)
            if not given and noop_with_empty_axes:
                return f(xp, x, (), True) if name not in _PLAIN else x
            over = axes_of(given, x.ndim) if given else tuple(range(x.ndim))
            if any(x.shape[a] == 0 for a in over) and name in _EMPTY:
                shape = reduced(tuple(x.shape), over, keepdims)
                return xp.full(shape, _empty(name, xp.name_of(x)), x)
            return f(xp, x, over, bool(keepdims))

        meaning.__doc__ = f.__doc__
        attributes = {"keepdims": 1, "noop_with_empty_axes": 0}
        return operator(name, "x axes?", infer=_reduce_type, attributes=attributes, host=("axes",))(meaning)

    return define


_PLAIN = frozenset({"ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd"})
_EMPTY = frozenset({"ReduceMax", "ReduceMin", "ReduceLogSumExp"})


def _empty(name: str, dtype: str) -> Any:
    """The neutral element: what an empty maximum, minimum or log-sum-exp is."""
    from ..dtypes import dtype as row

    low = name != "ReduceMin"
    kind, bits = row(dtype).kind, row(dtype).bits
    if kind == "f":
        return -math.inf if low else math.inf
    if kind == "b":
        return not low
    if kind == "u":
        return 0 if low else 2**bits - 1
    return -(2 ** (bits - 1)) if low else 2 ** (bits - 1) - 1


def sum_of(xp: Any, x: Any, axes: tuple[int, ...], keepdims: bool) -> Any:
    """The sum in x's own dtype; no axes means none."""
    return xp.ns.sum(x, axis=axes, keepdims=keepdims, dtype=x.dtype) if axes else x


def mean_of(xp: Any, x: Any, axes: tuple[int, ...], keepdims: bool = True) -> Any:
    """The mean over axes; integers are divided as ONNX's reference does, truncating."""
    if not axes:
        return x
    count = math.prod(x.shape[a] for a in axes)
    if xp.floating(x):
        if not count:  # NaN, as everywhere; NumPy's own mean would warn of it
            return sum_of(xp, x, axes, keepdims) + math.nan
        return xp.ns.mean(x, axis=axes, keepdims=keepdims)
    return xp.cast(xp.cast(sum_of(xp, x, axes, keepdims), "float64") / count, xp.name_of(x))


@_reduction("ReduceSum")
def reduce_sum(xp: Any, x: Any, axes: tuple[int, ...], keepdims: bool) -> Any:
    return sum_of(xp, x, axes, keepdims)


@_reduction("ReduceMean")
def reduce_mean(xp: Any, x: Any, axes: tuple[int, ...], keepdims: bool) -> Any:
    return mean_of(xp, x, axes, keepdims)


@_reduction("ReduceProd")
def reduce_prod(xp: Any, x: Any, axes: tuple[int, ...], keepdims: bool) -> Any:
    return xp.ns.prod(x, axis=axes, keepdims=keepdims, dtype=x.dtype) if axes else x


def _extremum(xp: Any, x: Any, axes: tuple[int, ...], keepdims: bool, largest: bool) -> Any:
    if not axes:
        return x
    if xp.kind(x) == "b":
        return (xp.ns.any if largest else xp.ns.all)(x, axis=axes, keepdims=keepdims)
    return (xp.ns.max if largest else xp.ns.min)(x, axis=axes, keepdims=keepdims)


@_reduction("ReduceMax")
def reduce_max(xp: Any, x: Any, axes: tuple[int, ...], keepdims: bool) -> Any:
    """As ONNX ReduceMax; a NaN gives NaN, an empty set the smallest value."""
    return _extremum(xp, x, axes, keepdims, largest=True)


@_reduction("ReduceMin")
def reduce_min(xp: Any, x: Any, axes: tuple[int, ...], keepdims: bool) -> Any:
    """As ONNX ReduceMin; a NaN gives NaN, an empty set the largest value."""
    return _extremum(xp, x, axes, keepdims, largest=False)


@_reduction("ReduceL1")
def reduce_l1(xp: Any, x: Any, axes: tuple[int, ...], keepdims: bool) -> Any:
    return sum_of(xp, xp.ns.abs(x), axes, keepdims)


@_reduction("ReduceSumSquare")
def reduce_sum_square(xp: Any, x: Any, axes: tuple[int, ...], keepdims: bool) -> Any:
    return sum_of(xp, x * x, axes, keepdims)


def _through_float(xp: Any, x: Any, f: Callable[[Any], Any]) -> Any:
    """``f`` in floating point: integers go through float64 and back."""
    return f(x) if xp.floating(x) else xp.cast(f(xp.cast(x, "float64")), xp.name_of(x))


@_reduction("ReduceL2")
def reduce_l2(xp: Any, x: Any, axes: tuple[int, ...], keepdims: bool) -> Any:
    return _through_float(xp, x, lambda v: xp.ns.sqrt(sum_of(xp, v * v, axes, keepdims)))


@_reduction("ReduceLogSum")
def reduce_log_sum(xp: Any, x: Any, axes: tuple[int, ...], keepdims: bool) -> Any:
    return _through_float(xp, x, lambda v: xp.ns.log(sum_of(xp, v, axes, keepdims)))


@_reduction("ReduceLogSumExp")
def reduce_log_sum_exp(xp: Any, x: Any, axes: tuple[int, ...], keepdims: bool) -> Any:
    """log Σ exp(x), with the maximum taken out first so that it cannot overflow."""
    return _through_float(xp, x, lambda v: _log_sum_exp(xp, v, axes, keepdims))


def _log_sum_exp(xp: Any, x: Any, axes: tuple[int, ...], keepdims: bool) -> Any:
    if not axes:
        return x
    top = xp.ns.max(x, axis=axes, keepdims=True)
    shift = xp.ns.where(xp.ns.isfinite(top), top, xp.ns.zeros_like(top))
    y = xp.ns.log(sum_of(xp, xp.ns.exp(x - shift), axes, True)) + shift
    return y if keepdims else xp.ns.squeeze(y, axis=axes)


def softmax_of(xp: Any, x: Any, axis: int) -> Any:
    """exp(x - max) / Σ exp(x - max); a NaN, a +inf or only -inf make the whole row NaN."""
    if x.shape[axis] == 0:
        return x
    e = xp.ns.exp(x - xp.ns.max(x, axis=axis, keepdims=True))
    return e / xp.ns.sum(e, axis=axis, keepdims=True)


def _axis_type(inputs: Inputs, attributes: Attributes, constants: Constants) -> list[Type]:
    x = operand(inputs, 0)
    if x.shape is not None and x.shape:
        axis_of(attributes["axis"], len(x.shape))
    return [(x.dtype, x.shape)]


@operator("Softmax", "x", infer=_axis_type, attributes={"axis": -1})
def softmax(xp: Any, x: Any, *, axis: int) -> Any:
    """As ONNX Softmax (opset 13: over one axis), with the maximum taken out first."""
    return softmax_of(xp, x, axis)


@operator("LogSoftmax", "x", infer=_axis_type, attributes={"axis": -1})
def log_softmax(xp: Any, x: Any, *, axis: int) -> Any:
    if x.shape[axis] == 0:
        return x
    x = x - xp.ns.max(x, axis=axis, keepdims=True)
    return x - xp.ns.log(xp.ns.sum(xp.ns.exp(x), axis=axis, keepdims=True))


@operator("Hardmax", "x", infer=_axis_type, attributes={"axis": -1})
def hardmax(xp: Any, x: Any, *, axis: int) -> Any:
    top = xp.ns.expand_dims(xp.ns.argmax(x, axis=axis), axis=axis)
    shape = [1] * x.ndim
    shape[axis] = x.shape[axis]
    return xp.cast(xp.ns.reshape(xp.arange(x.shape[axis]), tuple(shape)) == top, xp.name_of(x))


def _arg_type(inputs: Inputs, attributes: Attributes, constants: Constants) -> list[Type]:
    x = operand(inputs, 0)
    if x.shape is None:
        return [("int64", None)]
    axis = axis_of(attributes["axis"], len(x.shape))
    return [("int64", reduced(x.shape, (axis,), attributes["keepdims"]))]


def _arg(name: str, function: str) -> Any:
    def meaning(xp: Any, x: Any, *, axis: int, keepdims: int, select_last_index: int) -> Any:
        flipped = xp.ns.flip(x, axis=axis) if select_last_index else x
        index = getattr(xp.ns, function)(flipped, axis=axis, keepdims=bool(keepdims))
        index = xp.cast(index, "int64")
        return x.shape[axis] - 1 - index if select_last_index else index

    attributes = {"axis": 0, "keepdims": 1, "select_last_index": 0}
    return operator(name, "x", infer=_arg_type, attributes=attributes)(meaning)


arg_max = _arg("ArgMax", "argmax")
arg_min = _arg("ArgMin", "argmin")


def _cumulative(name: str, function: str) -> Any:
    def meaning(xp: Any, x: Any, axis: Any, *, exclusive: int, reverse: int) -> Any:
        over = axis_of(xp.ints(axis)[0], x.ndim)
        if reverse:
            x = xp.ns.flip(x, axis=over)
        y = getattr(xp.ns, function)(x, axis=over, dtype=x.dtype)
        if exclusive and y.shape[over]:
            cut = (slice(None),) * over
            first = y[(*cut, slice(0, 1))]
            first = xp.ns.zeros_like(first) if name == "CumSum" else xp.ns.ones_like(first)
            y = xp.ns.concat([first, y[(*cut, slice(0, y.shape[over] - 1))]], axis=over)
        return xp.ns.flip(y, axis=over) if reverse else y

    attributes = {"exclusive": 0, "reverse": 0}
    return operator(name, "x axis", infer=same, attributes=attributes, host=("axis",))(meaning)


cum_sum = _cumulative("CumSum", "cumulative_sum")
cum_prod = _cumulative("CumProd", "cumulative_prod")


OPS = specs_in(globals())
