"""Masks of scores in front of a softmax, domain ``fusionreg``: a masked score becomes a number. Floor 1."""

from __future__ import annotations

from typing import Any

from .define import operator, specs_in
from .inference import Attributes, Constants, Inputs, Type, broadcast, fail, operand


def _filled_type(inputs: Inputs, attributes: Attributes, constants: Constants) -> list[Type]:
    x, mask = operand(inputs, 0), operand(inputs, 1)
    if mask.dtype != "bool":
        fail(f"a mask of {mask.dtype}", "bool")
    if attributes["keep"] not in (0, 1):
        fail(f"keep = {attributes['keep']}", "0 or 1")
    return [(x.dtype, broadcast(x.shape, mask.shape))]


@operator("fusionreg::MaskedFill", "x mask", infer=_filled_type, attributes={"value": "<required>", "keep": 0})
def masked_fill(xp: Any, x: Any, mask: Any, *, value: float, keep: int) -> Any:
    """``value``, whatever x is there, where the bool ``mask`` is true, or with keep = 1 where it is false; else x."""
    fill = xp.ns.full_like(x, value)
    return xp.ns.where(mask, x, fill) if keep else xp.ns.where(mask, fill, x)


def _scores_type(inputs: Inputs, attributes: Attributes, constants: Constants) -> list[Type]:
    x = operand(inputs, 0)
    if x.shape is not None and len(x.shape) < 2:
        fail(f"rank {len(x.shape)}", "at least two axes, queries and keys")
    return [(x.dtype, x.shape)]


@operator("fusionreg::CausalMask", "x", infer=_scores_type, attributes={"value": "<required>", "diagonal": 0})
def causal_mask(xp: Any, x: Any, *, value: float, diagonal: int) -> Any:
    """x[…, q, k] where k ≤ q + diagonal, else ``value``, whatever x is there.

    The last two axes are queries and keys. diagonal = 0 aligns their first elements, keys − queries their last ones.
    """
    queries, keys = int(x.shape[-2]), int(x.shape[-1])
    q = xp.ns.reshape(xp.arange(queries), (queries, 1))
    visible = xp.ns.reshape(xp.arange(keys), (1, keys)) <= q + diagonal
    return xp.ns.where(visible, x, xp.ns.full_like(x, value))


@operator("fusionreg::CausalSoftmaxGrad", "dy y", infer=_scores_type, attributes={"diagonal": 0})
def causal_softmax_grad(xp: Any, dy: Any, y: Any, *, diagonal: int) -> Any:
    """Gradient of softmax(CausalMask(x)) over the last axis: y (dy - Σ dy y) where x is visible, else 0.

    y is the softmax, which is the same number for all hidden keys of a row. Where it is 0 for the first of them, hidden
    terms of the sum are left out, whatever dy is there.
    """
    queries, keys = int(y.shape[-2]), int(y.shape[-1])
    ns = xp.ns
    end = ns.reshape(xp.arange(queries), (queries, 1)) + (diagonal + 1)
    k = ns.reshape(xp.arange(keys), (1, keys))
    visible, zero = k < end, ns.zeros_like(y)
    start = ns.where(end < 0, ns.zeros_like(end), end)  # the first hidden key
    first = ns.where(k == start, y, zero)
    counted = ns.any((first != 0) & (k == start), axis=-1, keepdims=True)
    total = ns.sum(ns.where(visible | counted, dy * y, zero), axis=-1, keepdims=True)
    return ns.where(visible, y * (dy - total), zero)


OPS = specs_in(globals())
