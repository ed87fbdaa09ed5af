"""Feed-forward layers of routed experts whose experts lie on several ranks: tokens travel, weights stay.

Each rank routes its own tokens, sends every one to the ranks that have its experts (all-to-all), computes what arrives
with its own experts by ``moe.routed_ffn``, and sends the results back, which are weighed and added where the token is,
in the order of its experts: on any number of ranks the same sum as on one. Tokens may go in chunks, of which one is
computed while others are on their way; gradients go the same way in the opposite order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
        ffn, routing, sum_up: ``ops.moe.routed_ffn``, ``ops.moe.route``, ``ops.moe.gather_sum``.
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
    # rows in the order of chunks, and of experts within one
    keys = ids if chunks == 1 else ids + _chunk_of(x.shape[0], chunks, ids.device) * logits.shape[1]
    narrow = torch.int16 if chunks * logits.shape[1] < 2**15 else torch.int64  # sorted in fewer steps
    sorted_keys, order = keys.reshape(-1).to(narrow).sort(stable=True)
    plan = _Plan.agree(sorted_keys, chunks, logits.shape[1], gate_up.shape[0], differentiable, group)
    tie = torch.zeros((), device=x.device, requires_grad=plan.differentiable)
    compute, ordered = _of_own(gate_up, down, ffn, activation), Order(order, top_k)
    rows = Spread.apply(x, ordered, sum_up).split([sum(plan.sent(i)) for i in range(chunks)])
    going = [Journey(part, tie, Transfer(plan.sent(i), plan.received(i), group)) for i, part in enumerate(rows)]
    coming = [
        Journey(compute(journey.end(), plan.ids(i)), tie, Transfer(plan.received(i), plan.sent(i), group))
        for i, journey in enumerate(going)
    ]
    results = [journey.end() for journey in coming]
    return Combine.apply(results[0] if chunks == 1 else torch.cat(results), weights, ordered, sum_up)


def _chunk_of(tokens: int, chunks: int, device: torch.device) -> torch.Tensor:
    """[M 1]: the chunk that each token goes in."""
    return (torch.arange(tokens, device=device) * chunks // max(tokens, 1)).unsqueeze(1)


@dataclass(frozen=True)
class _Plan:
    """What every rank knows of all of them.

    Attributes:
        rank: this one.
        experts: the first expert of each rank, and their number.
        rows: [ranks][chunks][E], how many rows for each expert come from each rank; on the host.
        on_device: the same where the tokens are.
        differentiable: whether any rank wants gradients.
    """

    rank: int
    experts: Sequence[int]
    rows: torch.Tensor
    on_device: torch.Tensor
    differentiable: bool

    @classmethod
    def agree(
        cls, keys: torch.Tensor, chunks: int, count: int, own: int, differentiable: bool,
        group: dist.ProcessGroup | None,
    ) -> _Plan:  # fmt: skip
        """Asks all ranks, and waits for their answer.

        Args:
            keys: chunk · count + expert of each row, in order.
            count: logits of a token.
            own: experts of this rank.
            differentiable: whether this rank wants gradients.
            group: the ranks.
        """
        device, ranks = keys.device, dist.get_world_size(group)
        every = torch.arange(chunks * count, device=device, dtype=keys.dtype)
        told = torch.cat([
            torch.tensor([own, differentiable], device=device), torch.searchsorted(keys, every, right=True),
        ])  # fmt: skip
        answers = told.new_empty(ranks * told.numel())
        dist.all_gather_into_tensor(answers, told, group=group)
        on_device = answers.view(ranks, -1)
        table = on_device.cpu()
        experts = [0, *accumulate(table[:, 0].tolist())]
        if experts[-1] != count:
            raise ArgumentError(
                "experts are missing", f"of {WHOM}", f"{experts[-1]} on all ranks, logits of {count}",
                "a logit for each expert",
            )  # fmt: skip
        on_host, on_device = (
            torch.diff(t[:, 2:], prepend=t.new_zeros((ranks, 1))).view(ranks, chunks, count) for t in (table, on_device)
        )
        return cls(dist.get_rank(group), experts, on_host, on_device, bool(table[:, 1].any()))

    def sent(self, chunk: int) -> list[int]:
        """Rows of this rank's tokens for the experts of each rank."""
        own = self.rows[self.rank, chunk]
        return [int(own[a:b].sum()) for a, b in zip(self.experts, self.experts[1:], strict=False)]

    def received(self, chunk: int) -> list[int]:
        """Rows of each rank's tokens for the experts of this one."""
        return [int(n) for n in self._mine(self.rows, chunk).sum(1)]

    def ids(self, chunk: int) -> torch.Tensor:
        """Which of this rank's experts each row wants that is received."""
        mine = self._mine(self.on_device, chunk)
        experts = torch.arange(mine.shape[1], device=mine.device).repeat(mine.shape[0])
        return experts.repeat_interleave(mine.reshape(-1), output_size=sum(self.received(chunk)))

    def _mine(self, rows: torch.Tensor, chunk: int) -> torch.Tensor:
        return rows[:, chunk, self.experts[self.rank] : self.experts[self.rank + 1]]


def _of_own(
    gate_up: torch.Tensor, down: torch.Tensor, ffn: Callable[..., torch.Tensor], activation: str
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """(rows, ids) → each row through its expert: one expert each, whose only weight is 1."""
    experts = torch.arange(gate_up.shape[0], device=gate_up.device)

    def compute(rows: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        if not rows.shape[0]:
            return rows
        chosen = (ids.unsqueeze(1) == experts).to(rows.dtype)
        return ffn(rows, chosen, gate_up, down, activation=activation, top_k=1, scoring="softmax_after")

    return compute
