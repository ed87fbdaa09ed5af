"""Classification losses; classes lie along axis 1. Floor 1."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .define import operator, specs_in
from .inference import Attributes, Constants, Extents, Inputs, Type, operand

_LOSS: Mapping[str, Any] = {"ignore_index": None, "reduction": "mean"}


def _loss_shape(inputs: Inputs, attributes: Attributes) -> Extents:
    return operand(inputs, 1).shape if attributes["reduction"] == "none" else ()


def _nll_type(inputs: Inputs, attributes: Attributes, constants: Constants) -> list[Type]:
    return [(operand(inputs, 0).dtype, _loss_shape(inputs, attributes))]


def _nll(xp: Any, logs: Any, target: Any, weight: Any, ignore_index: int | None, reduction: str) -> Any:
    target = xp.cast(target, "int64")
    keep = target == target if ignore_index is None else target != ignore_index
    index = xp.ns.where(keep, target, xp.ns.zeros_like(target))
    picked = xp.take_along(logs, xp.ns.expand_dims(index, axis=1), 1)
    picked = xp.ns.reshape(picked, tuple(target.shape))
    factor = xp.cast(keep, xp.name_of(logs))
    if weight is not None:
        chosen = xp.ns.take(weight, xp.ns.reshape(index, (-1,)), axis=0)
        factor = factor * xp.ns.reshape(chosen, tuple(target.shape))
    loss = xp.ns.where(keep, -picked * factor, xp.ns.zeros_like(picked))
    if reduction == "none":
        return loss
    total = xp.ns.sum(loss)
    return total if reduction == "sum" else total / xp.ns.sum(factor)


@operator("NegativeLogLikelihoodLoss", "x target weight?", infer=_nll_type, attributes=_LOSS)
def negative_log_likelihood_loss(
    xp: Any, x: Any, target: Any, weight: Any = None, *, ignore_index: int | None, reduction: str
) -> Any:
    """As ONNX NegativeLogLikelihoodLoss; ``ignore_index`` None ignores nothing."""
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


OPS = specs_in(globals())
