"""Gradients of routed experts, domain ``fusionreg``. Floor 1."""

from __future__ import annotations

from math import prod
from typing import Any

from .activations import sigmoid_of
from .define import operator, specs_in
from .experts import softmax_of
from .inference import Attributes, Constants, Inputs, Type, operand, same


def _of_logits(inputs: Inputs, attributes: Attributes, constants: Constants) -> list[Type]:
    logits = operand(inputs, 1)
    return [(logits.dtype, logits.shape)]


@operator(
    "fusionreg::RouteGrad",
    "dweights logits ids",
    infer=_of_logits,
    attributes={"scoring": "softmax", "renormalise": 0, "scale": 1.0},
)
def route_grad(
    xp: Any, dweights: Any, logits: Any, ids: Any, *, scoring: str, renormalise: int, scale: float
) -> Any:
    """The gradient of fusionreg::Route's logits [M E] from that of its weights [M k], ids being the experts that it
    chose; the choice itself has none. With s the scores of the chosen, n = s / Σ s and c = scale · dweights: of
    softmax_after, and of softmax with renormalise, n (c - Σ c n), n being the softmax of the chosen logits alone; of
    softmax s (c - Σ c s) and of those that were not chosen -s Σ c s; of sigmoid s (1 - s) c, with renormalise
    s (1 - s) (c - Σ c n) / (Σ s + 1e-20). Others have 0."""
    chosen = xp.take_along(logits, ids, -1)
    c = dweights * scale
    among = xp.ns.zeros_like(logits)

    def total(x: Any) -> Any:
        return xp.ns.sum(x, axis=-1, keepdims=True)

    if scoring == "sigmoid":
        s = sigmoid_of(xp, chosen)
        if renormalise:
            divisor = total(s) + 1e-20
            c = (c - total(c * (s / divisor))) / divisor
        slopes = c * s * (1.0 - s)
    elif scoring == "softmax_after" or renormalise:
        n = softmax_of(xp, chosen)
        slopes = n * (c - total(c * n))
    else:
        scores = softmax_of(xp, logits)
        s = xp.take_along(scores, ids, -1)
        among = -scores * total(c * s)
        slopes = s * c
    hit = xp.cast(ids[..., None], "int64") == xp.arange(logits.shape[-1])  # [M k E]
    spread = xp.ns.where(hit, slopes[..., None], xp.ns.zeros_like(slopes)[..., None])
    return among + xp.ns.sum(spread, axis=-2)


def _of_matrices(inputs: Inputs, attributes: Attributes, constants: Constants) -> list[Type]:
    w = operand(inputs, 3)
    return [(w.dtype, w.shape)]


@operator("fusionreg::RoutedOuter", "a b ids w", infer=_of_matrices)
def routed_outer(xp: Any, a: Any, b: Any, ids: Any, w: Any) -> Any:
    """The gradient of matrices w [E N K] that rows were multiplied with: of expert e the sum of a[m]ᵀ b[m] over all
    rows with ids[m] = e, rows and ids being broadcast as those of fusionreg::RoutedMatMul; 0 of one without rows. Of w
    the shape alone counts."""
    rows = prod(ids.shape)
    a, b = (xp.ns.reshape(xp.ns.broadcast_to(v, (*ids.shape, v.shape[-1])), (rows, v.shape[-1])) for v in (a, b))
    flat = xp.ns.reshape(ids, (rows,))
    found = []
    for e in range(w.shape[0]):
        (own,) = xp.ns.nonzero(flat == e)
        left, right = (xp.ns.take(v, own, axis=0) for v in (a, b))
        found.append(xp.matmul(xp.ns.matrix_transpose(left), right))
    return xp.ns.stack(found) if found else xp.full(tuple(w.shape), 0.0, a)


@operator(
    "fusionreg::SquaredReluGrad",
    "dy x",
    infer=same,
    pointwise=True,
    cuda="dy * (x < 0.0f ? 0.0f : 2.0f * x)",
)
def squared_relu_grad(xp: Any, dy: Any, x: Any) -> Any:
    """dy · 2 max(x, 0); NaN stays NaN."""
    return dy * xp.ns.where(x < 0, xp.ns.zeros_like(x), 2.0 * x)


OPS = specs_in(globals())
