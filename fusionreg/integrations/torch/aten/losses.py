"""Losses of classes by number, as ONNX has them. Smoothed labels and labels that are probabilities stay as torch
decomposes them."""

from __future__ import annotations

from typing import Any

import numpy as np

from fusionreg.core.dtypes import dtype
from fusionreg.core.frozen import FrozenDict

from ..emitter import Emitter, V

#: ``at::Reduction``
_REDUCTIONS = ("none", "mean", "sum")


def _loss(e: Emitter, self: V, target: V, weight: V | None, reduction: int, ignore_index: int) -> V:
    """Of one row alone too, whose target is a number."""
    alone = len(self.shape) == 1
    first = e.const(np.array([0]), "int64")
    if alone:
        self, target = e.op("Unsqueeze", self, first), e.op("Unsqueeze", target, first)
    how = _REDUCTIONS[reduction]
    loss = e.op("NegativeLogLikelihoodLoss", self, target, weight, ignore_index=ignore_index, reduction=how)
    return e.op("Squeeze", loss, first) if alone and how == "none" else loss


def cross_entropy(
    e: Emitter, self: V, target: V, weight: V | None = None, reduction: int = 1, ignore_index: int = -100,
    label_smoothing: float = 0.0, **_: Any,
) -> Any:  # fmt: skip
    if label_smoothing or dtype(target.dtype).floating:
        return NotImplemented
    logs = e.op("LogSoftmax", self, axis=min(len(self.shape) - 1, 1))
    return _loss(e, logs, target, weight, reduction, ignore_index)


def nll_loss(
    e: Emitter, self: V, target: V, weight: V | None = None, reduction: int = 1, ignore_index: int = -100, **_: Any
) -> V:
    return _loss(e, self, target, weight, reduction, ignore_index)


def nll_loss_forward(
    e: Emitter, self: V, target: V, weight: V | None, reduction: int, ignore_index: int, **_: Any
) -> tuple[V, V]:
    """The loss, and what a mean divides by: the weights of targets that are not ignored."""
    loss = _loss(e, self, target, weight, reduction, ignore_index)
    if _REDUCTIONS[reduction] == "none":
        return loss, e.number(0, self.dtype)
    kept = e.op("Not", e.op("Equal", target, e.number(ignore_index, target.dtype)))
    factor = e.cast(kept, self.dtype)
    if weight is not None:
        index = e.op("Where", kept, target, e.number(0, target.dtype))
        factor = e.op("Mul", factor, e.op("Gather", weight, index))
    return loss, e.op("ReduceSum", factor, keepdims=0)


TABLE: FrozenDict[str, Any] = FrozenDict(
    {
        "aten.cross_entropy_loss.default": cross_entropy,
        **dict.fromkeys(("aten.nll_loss_nd.default", "aten.nll_loss.default", "aten.nll_loss2d.default"), nll_loss),
        **dict.fromkeys(("aten.nll_loss_forward.default", "aten.nll_loss2d_forward.default"), nll_loss_forward),
    }
)
