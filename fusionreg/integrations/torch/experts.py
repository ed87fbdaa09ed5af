"""Feed-forward layers of routed experts whose experts lie on several ranks: tokens travel, weights stay.

Each rank routes its own tokens and sends every one once to each rank that has any of its experts (all-to-all), with its
choices and their weights. There ``moe.expert_ffn`` computes what the rank's own experts give to it; these sums come
back, one for each rank that a token went to, and are added up in fp32, in the order of ranks. Tokens may go in chunks,
of which one is computed while others are on their way; gradients go the same way in the opposite order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist

from fusionreg.core.errors import ArgumentError
from fusionreg.core.ops.backends import backend_of
from fusionreg.core.ops.experts import route

from .exchange import Combine, Journey, Order, Spread, Sum, Transfer, gather_sum

WHOM = "experts over several ranks"

Route = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""``(logits, bias, top_k=, scoring=, renormalise=, scale=)`` → weights and experts [M k], as ``moe.route``."""


def route_by_operators(logits: torch.Tensor, bias: torch.Tensor | None, **attributes: Any) -> Any:
    """What ``moe.route`` stands for."""
    return route.meaning(backend_of(logits), logits.float(), bias, **attributes)


def expert_parallel_ffn(
    x: torch.Tensor,
    logits: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    ffn: Callable[..., torch.Tensor],
    routing: Route = route_by_operators,
    sum_up: Sum = gather_sum,
    activation: str,
    top_k: int,
    scoring: str = "softmax",
    renormalise: int = 0,
    scale: float = 1.0,
    group: dist.ProcessGroup | None = None,
    chunks: int = 1,
) -> torch.Tensor:
    """``moe.routed_ffn`` of this rank's tokens, with experts of all ranks; every rank of ``group`` calls it.

    Where an input of any rank requires a gradient, every rank calls ``backward`` on what it got, in the same order.

    Args:
        x: [M D], the tokens of this rank: any number, 0 included.
        logits: [M E] of all experts; expert e is the e-th in the order of ranks.
        gate_up, down: [E' 2I D] and [E' D I], the experts of this rank: any number, 0 included.
        bias: float32 [E], as of ``moe.routed_ffn``, the same on every rank.
        ffn, routing, sum_up: ``ops.moe.expert_ffn``, ``ops.moe.route``, ``ops.moe.gather_sum``.
        activation, top_k, scoring, renormalise, scale: as of ``moe.routed_ffn``.
        group: the ranks; all of them by default.
        chunks: in how many parts tokens travel; the same on every rank.

    Returns: y [M D], in the dtype of x. The host waits once, for how many rows come from whom.
    Raises: :class:`ArgumentError` where the experts of all ranks are not as many as ``logits`` has.
    """
    if chunks < 1:
        raise ArgumentError("unusable chunks", f"of {WHOM}", str(chunks), "at least 1")
    weights, ids = routing(logits, bias, top_k=top_k, scoring=scoring, renormalise=renormalise, scale=scale)
    differentiable = torch.is_grad_enabled() and any(t.requires_grad for t in (x, logits, gate_up, down))
    plan = _Plan.agree(ids, chunks, logits.shape[1], gate_up.shape[0], differentiable, group)
    tie = torch.zeros((), device=x.device, requires_grad=plan.differentiable)
    choices = torch.cat([weights, ids.to(weights.dtype)], dim=1)  # numbers of experts are exact in fp32
    sizes = [sum(plan.sent(i)) for i in range(chunks)]
    rows, told = (Spread.apply(t, plan.order, sum_up).split(sizes) for t in (x, choices))
    going = [
        [Journey(part, tie, Transfer(plan.sent(i), plan.received(i), group)) for part in parts]
        for i, parts in enumerate(zip(told, rows, strict=True))
    ]
    coming = []
    for i, (their_choices, their_rows) in enumerate(going):
        shares, experts = their_choices.end().split(top_k, dim=1)
        own, arrived = experts.detach().long() - plan.first, their_rows.end()  # other ranks' are none of this one's
        if arrived.shape[0]:
            y = ffn(arrived, own, shares.contiguous(), gate_up, down, activation=activation)
        else:  # nothing, but of both, as gradients go back on every rank
            y = arrived + shares.sum(1, keepdim=True).to(arrived.dtype)
        coming.append(Journey(y, tie, Transfer(plan.received(i), plan.sent(i), group)))
    results = [journey.end() for journey in coming]
    return Combine.apply(results[0] if chunks == 1 else torch.cat(results), plan.order, sum_up)


@dataclass(frozen=True)
class _Plan:
    """What every rank knows of all of them.

    Attributes:
        rank: this one.
        first: the first of its experts.
        rows: [ranks][chunks][ranks], how many tokens go from whom to whom; on the host.
        order: this rank's rows, by chunk and then by the rank that they go to, each the next token of it.
        differentiable: whether any rank wants gradients.
    """

    rank: int
    first: int
    rows: list[list[list[int]]]
    order: Order
    differentiable: bool

    @classmethod
    def agree(
        cls, ids: torch.Tensor, chunks: int, count: int, own: int, differentiable: bool,
        group: dist.ProcessGroup | None,
    ) -> _Plan:  # fmt: skip
        """Asks all ranks, and waits for their answer.

        Args:
            ids: [M k], the experts of each token.
            count: logits of a token.
            own: experts of this rank.
            differentiable: whether this rank wants gradients.
            group: the ranks.
        """
        tokens, ranks, device = ids.shape[0], dist.get_world_size(group), ids.device
        ends = _gathered(torch.tensor([own], device=device), group).cumsum(0)
        goes = torch.zeros((tokens, ranks + 1), dtype=torch.bool, device=device)  # also to none, where experts lack
        goes.scatter_(1, torch.bucketize(ids, ends, right=True), True)
        # to whom each chunk's tokens go; behind all of them those that go nowhere
        places = _chunk_of(tokens, chunks, device) * ranks + torch.arange(ranks, device=device)
        keys = torch.where(goes[:, :ranks], places, chunks * ranks).reshape(-1)
        narrow = torch.int16 if chunks * ranks < 2**15 else torch.int64  # sorted in fewer steps
        keys, order = keys.to(narrow).sort(stable=True)
        until = torch.searchsorted(keys, torch.arange(chunks * ranks, device=device, dtype=narrow), right=True)
        told = torch.cat([torch.tensor([own, differentiable], device=device), until])
        table = _gathered(told, group).view(ranks, -1).cpu()
        experts = [0, *accumulate(table[:, 0].tolist())]
        if experts[-1] != count:
            raise ArgumentError(
                "experts are missing", f"of {WHOM}", f"{experts[-1]} on all ranks, logits of {count}",
                "a logit for each expert",
            )  # fmt: skip
        rows = torch.diff(table[:, 2:], prepend=table.new_zeros((ranks, 1))).view(ranks, chunks, ranks).tolist()
        rank = dist.get_rank(group)
        sent = sum(map(sum, rows[rank]))
        return cls(rank, experts[rank], rows, Order(order[:sent], tokens, ranks), bool(table[:, 1].any()))

    def sent(self, chunk: int) -> list[int]:
        """Rows of this rank's tokens that go to each rank."""
        return self.rows[self.rank][chunk]

    def received(self, chunk: int) -> list[int]:
        """Rows of each rank's tokens that come to this one."""
        return [of[chunk][self.rank] for of in self.rows]


def _gathered(told: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """What every rank tells, one after another."""
    answers = told.new_empty(dist.get_world_size(group) * told.numel())
    dist.all_gather_into_tensor(answers, told, group=group)
    return answers


def _chunk_of(tokens: int, chunks: int, device: torch.device) -> torch.Tensor:
    """[M 1]: the chunk that each token goes in."""
    return (torch.arange(tokens, device=device) * chunks // max(tokens, 1)).unsqueeze(1)
