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
    if (s.outputs > 1 and not statistics) or s.rank() != 4 or any(s.given(i) for i in (4, 5, 6)):
        raise unwritten(s.node, "a cache, packed heads or further outputs")
    _check(s)
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
    {"Attention": _attention, "fusionreg::AttentionGrad": _attention_grad}
)
