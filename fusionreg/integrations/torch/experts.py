"""Feed-forward layers of routed experts whose experts lie on several ranks: tokens travel, weights stay.

Each rank routes its own tokens, sends every one to the ranks that have its experts (all-to-all), computes what arrives
with its own experts by ``moe.routed_ffn``, and sends the results back, which are weighed and added where the token is,
in the order of its experts: on any number of ranks the same sum as on one. Tokens go in chunks, so that one is computed
while others are on their way; gradients go the same way in the opposite order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.distributed as dist

from fusionreg.core.errors import ArgumentError
from fusionreg.core.ops.backends import backend_of
from fusionreg.core.ops.experts import route

from .exchange import Combine, Journey, Spread, Transfer

WHOM = "experts over several ranks"


def expert_parallel_ffn(
    x: torch.Tensor,
    logits: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    ffn: Callable[..., torch.Tensor],
    activation: str,
    top_k: int,
    scoring: str = "softmax",
    renormalise: int = 0,
    scale: float = 1.0,
    group: dist.ProcessGroup | None = None,
    chunks: int = 2,
) -> torch.Tensor:
    """``moe.routed_ffn`` of this rank's tokens, with experts of all ranks; every rank of ``group`` calls it.

    Where an input of any rank requires a gradient, every rank calls ``backward`` on what it got, in the same order.

    Args:
        x: [M D], the tokens of this rank: any number, 0 included.
        logits: [M E] of all experts; expert e is the e-th in the order of ranks.
        gate_up, down: [E' 2I D] and [E' D I], the experts of this rank: any number, 0 included.
        bias: float32 [E], as of ``moe.routed_ffn``, the same on every rank.
        ffn: ``ops.moe.routed_ffn``.
        activation, top_k, scoring, renormalise, scale: as of ``moe.routed_ffn``.
        group: the ranks; all of them by default.
        chunks: in how many parts tokens travel; the same on every rank.

    Returns: y [M D], in the dtype of x. The host waits once, for how many rows come from whom.
    Raises: :class:`ArgumentError` where the experts of all ranks are not as many as ``logits`` has.
    """
    if chunks < 1:
        raise ArgumentError("unusable chunks", f"of {WHOM}", str(chunks), "at least 1")
    weights, ids = route.meaning(
        backend_of(logits), logits.float(), bias, top_k=top_k, scoring=scoring, renormalise=renormalise, scale=scale
    )
    differentiable = torch.is_grad_enabled() and any(t.requires_grad for t in (x, logits, gate_up, down))
    parts = ids.tensor_split(chunks)
    plan = _Plan.agree(parts, logits.shape[1], gate_up.shape[0], differentiable, group)
    tie = torch.zeros((), device=x.device, requires_grad=plan.differentiable)
    compute = _of_own(gate_up, down, ffn, activation)
    places = [_places(part) for part in parts]
    going = [
        Journey(Spread.apply(rows, at), tie, Transfer(plan.sent(i), plan.received(i), group))
        for i, (rows, at) in enumerate(zip(x.tensor_split(chunks), places, strict=True))
    ]
    coming = [
        Journey(compute(journey.end(), plan.ids(i)), tie, Transfer(plan.received(i), plan.sent(i), group))
        for i, journey in enumerate(going)
    ]
    return torch.cat([
        Combine.apply(journey.end(), at, weight)
        for journey, at, weight in zip(coming, places, weights.tensor_split(chunks), strict=True)
    ])  # fmt: skip


def _places(ids: torch.Tensor) -> torch.Tensor:
    """[M k]: which row each choice of each token is, in the order of experts, and of tokens within one."""
    order = ids.reshape(-1).argsort(stable=True)
    places = torch.empty_like(order)
    places[order] = torch.arange(order.numel(), device=order.device)
    return places.reshape(ids.shape)


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
        cls, parts: Sequence[torch.Tensor], count: int, own: int, differentiable: bool, group: dist.ProcessGroup | None
    ) -> _Plan:
        """Asks all ranks, and waits for their answer. ``count``: logits of a token; ``own``: experts of this rank."""
        device, ranks = parts[0].device, dist.get_world_size(group)
        rows = [torch.zeros(count, dtype=torch.int64, device=device) for _ in parts]
        for total, part in zip(rows, parts, strict=True):
            total.scatter_add_(0, part.reshape(-1), torch.ones_like(part).reshape(-1))
        told = torch.cat([torch.tensor([own, differentiable], device=device), *rows])
        answers = [torch.empty_like(told) for _ in range(ranks)]
        dist.all_gather(answers, told, group=group)
        on_device = torch.stack(answers)
        table = on_device.cpu()
        experts = [0, *accumulate(table[:, 0].tolist())]
        if experts[-1] != count:
            raise ArgumentError(
                "experts are missing", f"of {WHOM}", f"{experts[-1]} on all ranks, logits of {count}",
                "a logit for each expert",
            )  # fmt: skip
        on_host, on_device = (t[:, 2:].reshape(ranks, len(parts), count) for t in (table, on_device))
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
