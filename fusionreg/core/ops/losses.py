"""Classification losses; classes lie along axis 1. Floor 1."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from .define import operator, specs_in
from .inference import Attributes, Constants, Extents, Inputs, Type, operand

_LOSS: Mapping[str, Any] = {"ignore_index": None, "reduction": "mean"}


def _loss_shape(inputs: Inputs, attributes: Attributes) -> Extents:
    return operand(inputs, 1).shape if attributes["reduction"] == "none" else ()


def _nll_type(inputs: Inputs, attributes: Attributes, constants: Constants) -> list[Type]:
    return [(operand(inputs, 0).dtype, _loss_shape(inputs, attributes))]


def _kept(xp: Any, target: Any, ignore_index: int | None, classes: int) -> tuple[Any, Any, Any]:
    """Which targets are not ignored, which are a class, and the class, 0 where there is none."""
    target = xp.cast(target, "int64")
    keep = target == target if ignore_index is None else target != ignore_index
    inside = (target >= 0) & (target < classes)
    return keep, inside, xp.ns.where(keep & inside, target, xp.ns.zeros_like(target))


def _nll(xp: Any, logs: Any, target: Any, weight: Any, ignore_index: int | None, reduction: str) -> Any:
    keep, inside, index = _kept(xp, target, ignore_index, logs.shape[1])
    picked = xp.take_along(logs, xp.ns.expand_dims(index, axis=1), 1)
    picked = xp.ns.where(inside, xp.ns.reshape(picked, tuple(target.shape)), xp.full((), math.nan, logs))
    factor = xp.cast(keep, xp.name_of(logs))
    if weight is not None:
        chosen = xp.ns.take(weight, xp.ns.reshape(index, (-1,)), axis=0)
        factor = factor * xp.ns.reshape(chosen, tuple(target.shape))
    loss = xp.ns.where(keep, -picked * factor, xp.ns.zeros_like(picked))
    if reduction == "none":
        return loss
    total = xp.ns.sum(loss)
    return total if reduction == "sum" else total / xp.ns.sum(factor)


def _scores(inputs: Inputs) -> Type:
    x = operand(inputs, 1)
    return x.dtype, x.shape


@operator("NegativeLogLikelihoodLoss", "x target weight?", infer=_nll_type, attributes=_LOSS)
def negative_log_likelihood_loss(
    xp: Any, x: Any, target: Any, weight: Any = None, *, ignore_index: int | None, reduction: str
) -> Any:
    """As ONNX NegativeLogLikelihoodLoss; ``ignore_index`` None ignores nothing. A target that is no class gives NaN."""
    return _nll(xp, x, target, weight, ignore_index, reduction)


def _cross_entropy_type(inputs: Inputs, attributes: Attributes, constants: Constants) -> list[Type]:
    scores = operand(inputs, 0)
    return [(scores.dtype, _loss_shape(inputs, attributes)), (scores.dtype, scores.shape)]


@operator(
    "SoftmaxCrossEntropyLoss",
    "scores labels weights?",
    outputs="y log_prob?",
    infer=_cross_entropy_type,
    attributes=_LOSS,
)
def softmax_cross_entropy_loss(
    xp: Any, scores: Any, labels: Any, weights: Any = None, *, ignore_index: int | None, reduction: str
) -> Any:
    """As ONNX SoftmaxCrossEntropyLoss; ``ignore_index`` None ignores nothing."""
    shifted = scores - xp.ns.max(scores, axis=1, keepdims=True)
    logs = shifted - xp.ns.log(xp.ns.sum(xp.ns.exp(shifted), axis=1, keepdims=True))
    return _nll(xp, logs, labels, weights, ignore_index, reduction), logs


@operator(
    "fusionreg::SoftmaxCrossEntropyGrad",
    "dy scores labels",
    infer=lambda inputs, *_: [_scores(inputs)],
    attributes=_LOSS,
)
def softmax_cross_entropy_grad(
    xp: Any, dy: Any, scores: Any, labels: Any, *, ignore_index: int | None, reduction: str
) -> Any:
    """Gradient of SoftmaxCrossEntropyLoss without weights: (softmax(scores) - 1 at the label) dy, 0 for ignored ones;
    over the number of the others, where the loss is their mean.
    """
    keep, inside, index = _kept(xp, labels, ignore_index, scores.shape[1])
    e = xp.ns.exp(scores - xp.ns.max(scores, axis=1, keepdims=True))
    classes = xp.ns.reshape(xp.arange(scores.shape[1]), (1, -1, *[1] * (scores.ndim - 2)))
    hit = xp.cast(xp.ns.expand_dims(index, axis=1) == classes, xp.name_of(scores))
    dx = e / xp.ns.sum(e, axis=1, keepdims=True) - hit
    if reduction == "mean":
        dy = dy / xp.ns.sum(xp.cast(keep, xp.name_of(scores)))
    dx = dx * (xp.ns.expand_dims(dy, axis=1) if reduction == "none" else dy)
    dx = xp.ns.where(xp.ns.expand_dims(inside, axis=1), dx, xp.full((), math.nan, dx))
    return xp.ns.where(xp.ns.expand_dims(keep, axis=1), dx, xp.full((), 0.0, dx))


OPS = specs_in(globals())
