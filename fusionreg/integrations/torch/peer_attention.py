"""Attention and its gradients as plain torch calls: part of the table of :mod:`.peer_operators`.

What torch has no public function for, the log-sum-exp of scores and gradients from it, is written out, scores and all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from fusionreg.core.frozen import FrozenDict

from .peer_site import Site, unwritten

#: Attributes that torch's function knows nothing of, at what it does.
PLAIN = {"softcap": 0.0, "left_window_size": -1, "right_window_size": -1}


def _check(s: Site) -> None:
    if any(s.attributes[k] != v for k, v in PLAIN.items()):
        raise unwritten(s.node, "a softcap or a window")


def _shared(s: Site, x: Any, queries: int, keys: int) -> Any:
    """Heads of k or v, each for its group of q's; ``queries``, ``keys``: operands that have them."""
    group = s.extents(queries)[1] // max(s.extents(keys)[1], 1)
    return x.repeat_interleave(group, 1) if group > 1 else x


def _scores(s: Site, first: int, mask: int) -> Any:
    """In float32; ``first``: the operand that is q, k being the next one; ``mask``: the one that is the mask."""
    q, k = s.args[first].float(), _shared(s, s.args[first + 1].float(), first, first + 1)
    scores = q @ k.mT * _scale(s, first)
    if s.given(mask):
        masked = s.dtype(mask) == torch.bool
        scores = scores.masked_fill(~s.args[mask], -math.inf) if masked else scores + s.args[mask].float()
    if not s.attributes["is_causal"]:
        return scores
    shape = (s.extents(first)[2], s.extents(first + 1)[2])
    return scores.masked_fill(torch.triu(q.new_ones(shape, dtype=torch.bool), 1), -math.inf)


def _scale(s: Site, first: int) -> float:
    given = s.attributes["scale"]
    return float(s.extents(first)[3]) ** -0.5 if given is None else given


def _attention(s: Site) -> Any:
    statistics = len(s.node.outputs) > 4  # those in between have names, which nobody reads
    if (s.outputs > 1 and not statistics) or s.rank() != 4 or s.given(4) or s.given(5):
        raise unwritten(s.node, "a cache, packed heads or further outputs")
    _check(s)
    if s.given(6):
        return _of_lengths(s)
    mask, causal = (s.args[3] if s.given(3) else None), bool(s.attributes["is_causal"])
    if mask is not None and causal:  # torch takes one of them
        later = torch.triu(s.args[0].new_ones((s.extents(0)[2], s.extents(1)[2]), dtype=torch.bool), 1)
        mask = mask & ~later if s.dtype(3) == torch.bool else mask.masked_fill(later, -torch.inf)
        causal = False
    if causal and s.extents(0)[2] != s.extents(1)[2]:
        raise unwritten(s.node, "is_causal with queries and keys of different lengths")
    y = F.scaled_dot_product_attention(
        s.args[0],
        s.args[1],
        s.args[2],
        attn_mask=mask,
        is_causal=causal,
        scale=s.attributes["scale"],
        enable_gqa=s.extents(0)[1] != s.extents(1)[1],
    )
    return (y, s.args[1], s.args[2], None, _scores(s, 0, 3).logsumexp(-1)) if statistics else y


def _of_lengths(s: Site) -> Any:
    """Of sequences with so many keys, the last query being at the last of them; none gives 0."""
    if s.given(3) or s.outputs > 1:
        raise unwritten(s.node, "lengths beside a mask, or further outputs")
    q, k, v = s.args[:3]
    queries, keys = (torch.arange(s.extents(i)[2], device=q.device) for i in (0, 1))
    lengths = s.args[6].long().clamp(0, s.extents(1)[2])[:, None, None, None]
    seen = keys < lengths
    if s.attributes["is_causal"]:
        seen = torch.logical_and(seen, keys - queries[:, None] <= lengths - s.extents(0)[2])
    return _seen(s, q, k, v, seen)


def _varlen(s: Site) -> Any:
    """Of sequences one behind the other: what is of another one is masked."""
    _check(s)
    q, k, v = (x.transpose(0, 1)[None] for x in s.args[:3])
    if s.extents(3)[0] < 2:  # no sequence
        if s.outputs > 1:
            raise unwritten(s.node, "the log-sum-exp of no sequence")
        return torch.zeros_like(s.args[0])[:, :, :1].expand(-1, -1, s.extents(2)[2])
    seen = _of_sequences(s, 0, 3, s.args[4].long().clamp(0, s.extents(1)[0]))
    y = _seen(s, q, k, v, seen)[0].transpose(0, 1)
    if s.outputs == 1:
        return y
    group = s.extents(0)[1] // max(s.extents(1)[1], 1)
    scores = (q[0].float() @ k[0].float().repeat_interleave(group, 0).mT) * _varlen_scale(s, 0)
    return y, scores.masked_fill(~seen, -math.inf).logsumexp(-1)


def _varlen_scale(s: Site, queries: int) -> float:
    given = s.attributes["scale"]
    return float(s.extents(queries)[2]) ** -0.5 if given is None else given


def _of_sequences(s: Site, queries: int, starts_at: int, from_key: Any) -> Any:
    """[Q K]: the keys of each query's own sequence; ``queries``: the operand that is q, k being the next one;
    ``starts_at``: where sequences begin among queries; ``from_key``: where among keys."""
    count, known, many = s.extents(queries)[0], s.extents(queries + 1)[0], s.extents(starts_at)[0]
    starts = s.args[starts_at].long().clamp(0, count).cummax(0).values
    query, key = (torch.arange(n, device=starts.device) for n in (count, known))
    which = (starts[1:, None] <= query).sum(0)
    of_any = torch.logical_and(which < many - 1, query >= starts[0])
    which = which.clamp(max=many - 2)
    first = from_key[which]
    last = torch.maximum(first, from_key[which + 1])[:, None]
    seen = torch.logical_and(of_any[:, None], torch.logical_and(key >= first[:, None], key < last))
    if s.attributes["is_causal"]:
        seen = torch.logical_and(seen, key - last <= (query - starts[which + 1])[:, None])
    return seen


def _varlen_grad(s: Site) -> Any:
    _check(s)
    if s.extents(6)[0] < 2:  # no sequence
        return tuple(torch.zeros_like(s.args[i]) for i in (1, 2, 3))
    dy, q, k, v, y = (x.float().transpose(0, 1) for x in s.args[:5])
    shared, group = s.extents(2)[1], s.extents(1)[1] // max(s.extents(2)[1], 1)
    k, v = (x.repeat_interleave(group, 0) for x in (k, v))
    # Keys of one sequence are no other's.
    seen = _of_sequences(s, 1, 6, s.args[7].long().clamp(0, s.extents(2)[0]).cummax(0).values)
    scale = _varlen_scale(s, 1)
    p = torch.exp(torch.clamp((q @ k.mT) * scale - s.args[5].unsqueeze(-1), max=0.0)).masked_fill(~seen, 0.0)
    r = p * (dy @ v.mT - (dy * y).sum(-1, keepdim=True))

    def summed(x: Any) -> Any:
        return x.unflatten(0, (shared, group)).sum(1)

    found = ((r @ k) * scale, summed(r.mT @ q) * scale, summed(p.mT @ dy))
    return tuple(x.transpose(0, 1).to(s.dtype(i)) for i, x in enumerate(found, 1))


def _seen(s: Site, q: Any, k: Any, v: Any, seen: Any) -> Any:
    """[B H Q E]: attention to keys that are seen, 0 of a query that sees none."""
    scale, shared = s.attributes["scale"], s.extents(0)[1] != s.extents(1)[1]
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=shared)
    return torch.where(seen.any(-1, keepdim=True), y, 0.0)


def _attention_grad(s: Site) -> Any:
    _check(s)
    dy, q, y = (s.args[i].float() for i in (0, 1, 4))
    k, v = (_shared(s, s.args[i].float(), 1, i) for i in (2, 3))
    p = torch.exp(torch.clamp(_scores(s, 1, 6) - s.args[5].unsqueeze(-1), max=0.0))
    r = p * (dy @ v.mT - (dy * y).sum(-1, keepdim=True))
    shared, group = s.extents(2)[1], s.extents(1)[1] // max(s.extents(2)[1], 1)

    def summed(x: Any) -> Any:
        return x.unflatten(1, (shared, group)).sum(2) if group > 1 else x

    scale = _scale(s, 1)
    found = ((r @ k) * scale, summed(r.mT @ q) * scale, summed(p.mT @ dy))
    if s.outputs == 4:  # of what is added to scores
        return *(x.to(s.dtype(i)) for i, x in enumerate(found, 1)), r.sum_to_size(s.extents(6)).to(s.dtype(6))
    return tuple(x.to(s.dtype(i)) for i, x in enumerate(found, 1))


WRITERS: Mapping[str, Callable[[Site], Any]] = FrozenDict(
    {
        "Attention": _attention,
        "fusionreg::AttentionGrad": _attention_grad,
        "fusionreg::VarlenAttention": _varlen,
        "fusionreg::VarlenAttentionGrad": _varlen_grad,
    }
)
