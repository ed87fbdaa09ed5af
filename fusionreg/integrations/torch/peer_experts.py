"""Routed experts as plain torch calls: operators of :mod:`fusionreg.core.ops.experts`, and products of many rows."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import torch

from fusionreg.core.frozen import FrozenDict

from .peer_site import Site, Writer

#: Elements of gathered matrices beyond which nobody would write a product so.
GATHERED = 1 << 28


def _route(s: Site) -> tuple[Any, Any]:
    logits, scoring, k = s.args[0].float(), s.attributes["scoring"], s.attributes["top_k"]
    scores = logits
    if scoring != "softmax_after":
        scores = torch.sigmoid(logits) if scoring == "sigmoid" else torch.softmax(logits, dim=-1)
    groups = s.attributes["groups"]
    ranked = scores + s.args[1] if s.given(1) else scores if groups > 1 else logits
    if groups > 1:
        members = ranked.view(-1, groups, ranked.shape[-1] // groups)
        sums = members.topk(s.attributes["leaders"], dim=-1).values.sum(dim=-1)
        best = torch.topk(sums, s.attributes["kept_groups"], dim=-1).indices
        kept = torch.zeros_like(sums, dtype=torch.bool).scatter(1, best, True)
        ranked = members.masked_fill(~kept[..., None], float("-inf")).view_as(ranked)
    ids = torch.topk(ranked, k, dim=-1).indices
    weights = torch.gather(scores, -1, ids)
    if scoring == "softmax_after":
        weights = torch.softmax(weights, dim=-1)
    elif s.attributes["renormalise"]:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + (1e-20 if scoring == "sigmoid" else 0.0))
    return weights if s.attributes["scale"] == 1.0 else weights * s.attributes["scale"], ids


def _routed_sum(s: Site) -> Any:
    x, weights = s.args
    return (x * weights.to(s.dtype())[..., None]).sum(dim=-2)


def _squared_relu(s: Site) -> Any:
    return torch.square(torch.relu(s.args[0]))


def _split(s: Site) -> tuple[Any, ...]:
    axis = s.attributes["axis"]
    if s.given(1):
        parts, count = torch.split(s.args[0], list(s.numbers(1)), dim=axis), len(s.numbers(1))
    else:
        count = s.attributes["num_outputs"]
        parts = torch.split(s.args[0], -(-s.extents()[axis] // count), dim=axis)
    return tuple(parts[i] for i in range(count))


def is_grouped(s: Site) -> bool:
    """Whether the rows' products are one of groups: on a GPU, of rows that so many matrices gathered would not fit."""
    return s.dtype(1) == torch.bfloat16 and prod(s.extents(2)) * prod(s.extents(1)[1:]) > GATHERED


def grouped(s: Site) -> Any:
    """RoutedMatMul of rows sorted by matrix."""
    x, w, ids = s.args[0], s.args[1], s.args[2]
    extents = s.extents(2)
    flat = ids.reshape(-1)
    order = torch.argsort(flat, stable=True)
    ends = torch.searchsorted(flat[order], torch.arange(s.extents(1)[0], device=flat.device), right=True)
    repeats = prod(extents) // max(prod(s.extents(0)[:-1]), 1)
    rows = x.reshape(-1, s.extents(0)[-1])[order // repeats if repeats > 1 else order]
    y = torch._grouped_mm(rows, w.mT if s.attributes["trans"] else w, offs=ends.to(torch.int32))
    return y[torch.argsort(order)].reshape(*extents, -1)


def _rows(s: Site, index: int) -> tuple[Any, Any]:
    """(whether each index is a row of the first operand, that row's number, 0 where it is none)."""
    at, count = s.args[index], s.extents(0)[0]
    inside = (at >= 0) & (at < count)
    return inside[:, None], torch.where(inside, at, 0)


def _from_end(s: Site) -> Any:
    return torch.where(s.args[0] < 0, s.args[0] + s.extents(1)[0], s.args[0])


def _select_rows(s: Site) -> Any:
    inside, at = _rows(s, 1)
    return torch.where(inside, s.args[0][at], 0.0)


def _grouped_matmul(s: Site) -> Any:
    """With torch's own where gathered matrices would not fit; it leaves rows of no group as they are."""
    x, w, ends = s.args
    if s.dtype(1) == torch.bfloat16 and s.extents(0)[0] * prod(s.extents(1)[1:]) > GATHERED:
        return torch._grouped_mm(x, w.mT if s.attributes["trans"] else w, offs=ends.to(torch.int32))
    ends = torch.cummax(ends, 0).values
    ids = torch.searchsorted(ends, torch.arange(s.extents(0)[0], device=ends.device), right=True)
    inside = ids < s.extents(1)[0]
    chosen = w[torch.where(inside, ids, 0)]
    y = torch.matmul(x.unsqueeze(-2), chosen.mT if s.attributes["trans"] else chosen).squeeze(-2)
    return torch.where(inside[:, None], y, 0.0)


def _add_rows(s: Site) -> Any:
    inside, at = _rows(s, 1)
    return s.args[0].index_add(0, at, torch.where(inside, s.args[2], 0.0))


def _route_grad(s: Site) -> Any:
    slope, logits, ids = s.args
    slope = slope * s.attributes["scale"]
    chosen = torch.gather(logits.float(), -1, ids)
    if s.attributes["scoring"] == "sigmoid":
        scores = torch.sigmoid(chosen)
        if s.attributes["renormalise"]:
            total = scores.sum(dim=-1, keepdim=True) + 1e-20
            slope = (slope - (slope * scores / total).sum(dim=-1, keepdim=True)) / total
        found = slope * scores * (1.0 - scores)
    elif s.attributes["scoring"] == "softmax_after" or s.attributes["renormalise"]:
        scores = torch.softmax(chosen, dim=-1)
        found = scores * (slope - (slope * scores).sum(dim=-1, keepdim=True))
    else:
        scores = torch.softmax(logits.float(), dim=-1)
        weights = torch.gather(scores, -1, ids)
        among = -scores * (slope * weights).sum(dim=-1, keepdim=True)
        return torch.scatter_add(among, -1, ids, weights * slope).to(s.dtype(1))
    return torch.scatter(torch.zeros_like(logits), -1, ids, found.to(s.dtype(1)))


def _routed_outer(s: Site) -> Any:
    """With torch's own where indicators of all rows and matrices would be many."""
    a, b, ids = s.args[0], s.args[1], s.args[2]
    count, flat = s.extents(3)[0], ids.reshape(-1).long()
    a, b = (v.expand(*s.extents(2), v.shape[-1]).reshape(-1, v.shape[-1]) for v in (a, b))
    if s.dtype(3) == torch.bfloat16 and prod(s.extents(2)) * prod(s.extents(3)[1:]) > GATHERED:
        order = torch.argsort(flat, stable=True)
        ends = torch.searchsorted(flat[order], torch.arange(count, device=flat.device), right=True)
        return torch._grouped_mm(a[order].mT, b[order], offs=ends.to(torch.int32))
    own = torch.nn.functional.one_hot(flat, count).to(s.dtype(3))
    return torch.einsum("re,rn,rk->enk", own, a, b)


def _squared_relu_grad(s: Site) -> Any:
    return s.args[0] * (2.0 * torch.relu(s.args[1]))


WRITERS: Mapping[str, Writer] = FrozenDict(
    {
        "fusionreg::FromEnd": _from_end, "fusionreg::SelectRows": _select_rows,
        "fusionreg::GroupedMatMul": _grouped_matmul, "fusionreg::AddRows": _add_rows,
        "fusionreg::Route": _route, "fusionreg::RoutedSum": _routed_sum, "fusionreg::SquaredRelu": _squared_relu,
        "fusionreg::RouteGrad": _route_grad, "fusionreg::RoutedOuter": _routed_outer,
        "fusionreg::SquaredReluGrad": _squared_relu_grad, "Split": _split,
    }
)  # fmt: skip
"""Operator → how a user writes it in torch."""
