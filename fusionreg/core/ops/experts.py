"""What routed experts need beside products of rows with one of many matrices, domain ``fusionreg``. Floor 1."""

from __future__ import annotations

from typing import Any

from .activations import sigmoid_of
from .define import operator, specs_in
from .inference import Attributes, Constants, Inputs, Type, fail, operand, same


def _route_type(inputs: Inputs, attributes: Attributes, constants: Constants) -> list[Type]:
    logits, k = operand(inputs, 0), attributes["top_k"]
    if logits.shape is None:
        return [("float32", None), ("int64", None)]
    experts = logits.shape[-1]
    if k < 1 or (isinstance(experts, int) and k > experts):
        fail(f"top_k = {k} of {experts} experts", "at least 1, and no more than there are")
    groups, kept, leaders = (attributes[name] for name in ("groups", "kept_groups", "leaders"))
    if isinstance(experts, int) and groups > 1:
        each = experts // groups
        if experts % groups or not 1 <= kept <= groups or not 1 <= leaders <= each or k > kept * each:
            fail(
                f"the best {leaders} of each of {groups} groups of {experts} experts, {k} of the best {kept} groups",
                "groups of as many experts each, and in the best ones at least as many as are chosen",
            )
    return [("float32", (*logits.shape[:-1], k)), ("int64", (*logits.shape[:-1], k))]


@operator(
    "fusionreg::Route",
    "logits bias?",
    outputs="weights ids",
    infer=_route_type,
    attributes={
        "top_k": 1, "scoring": "softmax", "renormalise": 0, "scale": 1.0, "groups": 1, "kept_groups": 1, "leaders": 1,
    },
)  # fmt: skip
def route(
    xp: Any, logits: Any, bias: Any = None, *, top_k: int, scoring: str, renormalise: int, scale: float,
    groups: int = 1, kept_groups: int = 1, leaders: int = 1,
) -> tuple[Any, Any]:  # fmt: skip
    """The top_k experts of each row, best first, of equal ones the lower index first, and what each one counts, in
    float32. Scores are a softmax or a sigmoid of the logits; with scoring softmax_after a softmax of the chosen logits
    alone. The largest logits are chosen (of several groups the largest scores), or with a bias the largest scores
    + bias (of softmax_after: logits + bias), NaN counting as infinity. Weights are the scores, which the bias does not
    change, divided by their sum where renormalise says so (of sigmoids + 1e-20, as DeepSeek-V3), times scale. With
    several groups, of as many consecutive experts each, those of the best kept_groups alone are chosen from: the groups
    with the largest sums of what their `leaders` best experts are ranked by, of equal ones the lower first."""
    if scoring == "sigmoid":
        scores = sigmoid_of(xp, logits)
    elif scoring == "softmax":
        scores = softmax_of(xp, logits)
    else:
        scores = logits
    ranked = (scores if groups > 1 else logits) if bias is None else scores + bias
    ranked = _without_nan(xp, ranked)
    order = xp.ns.argsort(ranked, axis=-1, descending=True, stable=True)
    if groups > 1:  # those of other groups behind all others
        kept = _kept(xp, ranked, groups, kept_groups, leaders)
        there = xp.cast(xp.take_along(kept, order, -1), "int64")
        order = xp.take_along(order, xp.ns.argsort(there, axis=-1, descending=True, stable=True), -1)
    ids = xp.cast(order[..., :top_k], "int64")
    weights = xp.take_along(scores, ids, -1)
    if scoring == "softmax_after":
        weights = softmax_of(xp, weights)
    elif renormalise:
        weights = weights / (xp.ns.sum(weights, axis=-1, keepdims=True) + (1e-20 if scoring == "sigmoid" else 0.0))
    return weights * scale, ids


def _without_nan(xp: Any, ranked: Any) -> Any:
    return xp.ns.where(ranked == ranked, ranked, xp.full(tuple(ranked.shape), float("inf"), ranked))


def _kept(xp: Any, ranked: Any, groups: int, kept: int, leaders: int) -> Any:
    """Of each expert whether its group is among the best."""
    shape = tuple(ranked.shape)
    members = xp.ns.reshape(ranked, (*shape[:-1], groups, shape[-1] // groups))
    best = -xp.ns.sort(-members, axis=-1)[..., :leaders]
    sums = _without_nan(xp, xp.ns.sum(best, axis=-1))
    first = xp.cast(xp.ns.argsort(sums, axis=-1, descending=True, stable=True)[..., :kept], "int64")
    hit = first[..., None] == xp.arange(groups)  # [... kept groups]
    among = xp.ns.sum(xp.cast(hit, "int64"), axis=-2) > 0
    return xp.ns.reshape(xp.ns.broadcast_to(among[..., None], members.shape), shape)


def softmax_of(xp: Any, x: Any) -> Any:
    e = xp.ns.exp(x - xp.ns.max(x, axis=-1, keepdims=True))
    return e / xp.ns.sum(e, axis=-1, keepdims=True)


def _routed_sum_type(inputs: Inputs, attributes: Attributes, constants: Constants) -> list[Type]:
    x = operand(inputs, 0)
    return [(x.dtype, None if x.shape is None else (*x.shape[:-2], x.shape[-1]))]


@operator("fusionreg::RoutedSum", "x weights", infer=_routed_sum_type)
def routed_sum(xp: Any, x: Any, weights: Any) -> Any:
    """The sum over k of x[m, k] · weights[m, k], whose weights may be wider than x: rounded once, to the dtype of x."""
    return xp.ns.sum(x * weights[..., None], axis=-2)


@operator(
    "fusionreg::SquaredRelu",
    "x",
    infer=same,
    pointwise=True,
    cuda="x < 0.0f ? 0.0f : x * x",
)
def squared_relu(xp: Any, x: Any) -> Any:
    """max(x, 0)²; NaN stays NaN."""
    return xp.ns.where(x < 0, xp.ns.zeros_like(x), x * x)


OPS = specs_in(globals())
