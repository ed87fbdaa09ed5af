"""Derivatives of matrix products and of operators that move or reduce elements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fusionreg.core.frozen import FrozenDict

from .rule import Rule, rule

aten = torch.ops.aten


def _t(x: Any) -> Any:
    return x.transpose(-2, -1)


def _matmul(a: Any, b: Any, *, transA: int, transB: int) -> Any:
    return aten.matmul(_t(a) if transA else a, _t(b) if transB else b)


def _product(a: Any, b: Any, axes: int) -> Any:
    """``a @ b`` with ``axes`` axes: where ``b`` is a matrix and the result is one, leading axes are summed over."""
    if axes == 2 and a.dim() > 2 and b.dim() > 2:  # (…, K, M) @ (…, M, N), summed: one product of matrices
        return aten.matmul(_t(_t(a).reshape(-1, a.shape[-2])), b.reshape(-1, b.shape[-1]))
    return aten.matmul(a, b)


def _matmul_a(dy: Any, b: Any, *, transA: int, transB: int, shape: Sequence[Any]) -> Any:
    b = b if transB else _t(b)
    return _product(_t(b), _t(dy), len(shape)) if transA else _product(dy, b, len(shape))


def _matmul_b(dy: Any, a: Any, *, transA: int, transB: int, shape: Sequence[Any]) -> Any:
    a = a if transA else _t(a)
    return _product(_t(dy), _t(a), len(shape)) if transB else _product(a, dy, len(shape))


def _gemm(a: Any, b: Any, c: Any, *, alpha: float, beta: float, transA: int, transB: int) -> Any:
    y = _matmul(a, b, transA=transA, transB=transB) * alpha
    return y if c is None else y + c * beta


def _permuted(dy: Any, *, perm: Sequence[int]) -> Any:
    order = list(perm) or list(range(dy.dim()))[::-1]
    return dy.permute([order.index(i) for i in range(len(order))])


def _reshaped(dy: Any, *, shape: Sequence[Any]) -> Any:
    return dy.reshape(list(shape))


def _moved(x: Any, *_: Any, result: Sequence[Any]) -> Any:
    return x.reshape(list(result))


def _axes(axes: Any, rank: int, noop: int) -> list[int]:
    if axes is None or not len(axes):
        return [] if noop else list(range(rank))
    return [int(a) % rank for a in axes]


def _sum(x: Any, axes: Any, *, keepdims: int, noop_with_empty_axes: int) -> Any:
    over = _axes(axes, x.dim(), noop_with_empty_axes)
    return x.sum(over, keepdim=bool(keepdims)) if over else x


def _mean(x: Any, axes: Any, *, keepdims: int, noop_with_empty_axes: int) -> Any:
    over = _axes(axes, x.dim(), noop_with_empty_axes)
    return x.mean(over, keepdim=bool(keepdims)) if over else x


def _sum_x(
    dy: Any, axes: Any, *, keepdims: int, noop_with_empty_axes: int, shape: Sequence[Any]
) -> Any:
    over = _axes(axes, len(shape), noop_with_empty_axes)
    if not keepdims:
        for axis in sorted(over):
            dy = dy.unsqueeze(axis)
    return dy.expand(list(shape))


def _mean_x(
    dy: Any, axes: Any, *, keepdims: int, noop_with_empty_axes: int, shape: Sequence[Any]
) -> Any:
    count = 1
    for axis in _axes(axes, len(shape), noop_with_empty_axes):
        count = count * shape[axis]
    noop = noop_with_empty_axes
    return _sum_x(dy, axes, keepdims=keepdims, noop_with_empty_axes=noop, shape=shape) / count


PRODUCTS: Mapping[str, Rule] = FrozenDict(
    {
        "MatMul": rule(_matmul, a=_matmul_a, b=_matmul_b),
        "Gemm": rule(
            _gemm,
            a=lambda dy, b, *, alpha, transA, transB, shape: (
                _matmul_a(dy, b, transA=transA, transB=transB, shape=shape) * alpha
            ),
            b=lambda dy, a, *, alpha, transA, transB, shape: (
                _matmul_b(dy, a, transA=transA, transB=transB, shape=shape) * alpha
            ),
            c=lambda dy, *, beta: dy * beta,
        ),
    }
)

MOVING: Mapping[str, Rule] = FrozenDict(
    {
        "Reshape": rule(_moved, x=_reshaped),
        "Flatten": rule(_moved, x=_reshaped),
        "Squeeze": rule(_moved, x=_reshaped),
        "Unsqueeze": rule(_moved, x=_reshaped),
        "Transpose": rule(lambda x, *, perm: x.permute(list(perm) or list(range(x.dim()))[::-1]), x=_permuted),
        "Expand": rule(lambda x, _, *, result: x.expand(list(result)), x=lambda dy: dy),
        "ReduceSum": rule(_sum, x=_sum_x),
        "ReduceMean": rule(_mean, x=_mean_x),
    }
)
