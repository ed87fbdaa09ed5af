"""Feed-forward layers of routed experts whose experts lie on several ranks: tokens travel, weights stay.

Each rank routes its own tokens, sends every one to the ranks that have its experts (all-to-all), computes what arrives
with its own experts by ``moe.routed_ffn``, and sends the results back, which are weighed and added where the token is,
in the order of its experts: on any number of ranks the same sum as on one. Tokens go in chunks, so that one is computed
while the next is on its way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from fusionreg.core.errors import ArgumentError
from fusionreg.core.ops.backends import backend_of
from fusionreg.core.ops.experts import route

WHOM = "experts over several ranks"


@dataclass
class _Exchange:
    """One chunk of tokens on its way to the experts and back.

    Attributes:
        order: which copy of a token each row sent is.
        sent, received: rows to and from each rank.
        rows, ids: what arrives, and which of this rank's experts each row wants.
        pending: transfers that were begun.
        results: what comes back, in the order sent.
    """

    order: torch.Tensor
    sent: list[int]
    received: list[int]
    rows: torch.Tensor
    ids: torch.Tensor
    pending: list[Any]
    results: torch.Tensor | None = None


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
    Raises: :class:`ArgumentError` where the experts of all ranks are not as many as ``logits`` has, and for inputs that
        require a gradient.
    """
    tensors = (x, logits, gate_up, down)
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        raise ArgumentError("cannot differentiate", WHOM, "an input requires a gradient", "inputs that require none")
    if chunks < 1:
        raise ArgumentError("unusable chunks", f"of {WHOM}", str(chunks), "at least 1")
    starts = _starts(gate_up, logits, group)
    weights, ids = route.meaning(
        backend_of(logits), logits.float(), bias, top_k=top_k, scoring=scoring, renormalise=renormalise, scale=scale
    )
    compute = _of_own(gate_up, down, ffn, activation)
    parts = list(zip(x.tensor_split(chunks), ids.tensor_split(chunks), strict=True))
    exchanges = _begin(parts, starts, group)
    for exchange in exchanges:
        _return(exchange, compute, group)
    made = [_arrived(exchange, top_k) for exchange in exchanges]
    return (torch.cat(made).float() * weights.unsqueeze(-1)).sum(1).to(x.dtype)


def _starts(gate_up: torch.Tensor, logits: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """[ranks + 1]: the first expert of each rank, and their number."""
    own = torch.tensor([gate_up.shape[0]], device=gate_up.device)
    every = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, own, group=group)
    starts = torch.cat([torch.zeros_like(own), *every]).cumsum(0)
    if int(starts[-1]) != logits.shape[-1]:
        raise ArgumentError(
            "experts are missing", f"of {WHOM}", f"{int(starts[-1])} on all ranks, logits of {logits.shape[-1]}",
            "a logit for each expert",
        )  # fmt: skip
    return starts


def _begin(
    parts: list[tuple[torch.Tensor, torch.Tensor]], starts: torch.Tensor, group: dist.ProcessGroup | None
) -> list[_Exchange]:
    """Sends the rows of all chunks; nothing is waited for but their numbers."""
    ranks = starts.numel() - 1
    owners = [torch.searchsorted(starts, ids.reshape(-1), right=True) - 1 for _, ids in parts]
    counts = torch.stack([torch.bincount(owner, minlength=ranks) for owner in owners])
    arriving = torch.empty_like(counts.T.contiguous())
    dist.all_to_all_single(arriving, counts.T.contiguous(), group=group)
    sent, received = counts.tolist(), arriving.T.tolist()
    exchanges = []
    for (x, ids), owner, out, back in zip(parts, owners, sent, received, strict=True):
        order = owner.argsort(stable=True)
        rows = x.new_empty((sum(back), x.shape[1]))
        wanted = ids.new_empty(sum(back))
        local = (ids.reshape(-1) - starts[owner])[order]
        pending = [
            dist.all_to_all_single(rows, x[order // ids.shape[1]], back, out, group=group, async_op=True),
            dist.all_to_all_single(wanted, local, back, out, group=group, async_op=True),
        ]
        exchanges.append(_Exchange(order, out, back, rows, wanted, pending))
    return exchanges


def _of_own(
    gate_up: torch.Tensor, down: torch.Tensor, ffn: Callable[..., torch.Tensor], activation: str
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """(rows, ids) → each row through its expert: one expert each, whose only weight is 1."""
    experts = torch.arange(gate_up.shape[0], device=gate_up.device)

    def compute(rows: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        if not rows.shape[0]:
            return rows
        chosen = (ids.unsqueeze(1) == experts).float()
        return ffn(rows, chosen, gate_up, down, activation=activation, top_k=1, scoring="softmax_after")

    return compute


def _return(exchange: _Exchange, compute: Callable[..., torch.Tensor], group: dist.ProcessGroup | None) -> None:
    """Computes what has arrived and sends the results back."""
    for transfer in exchange.pending:
        transfer.wait()
    made = compute(exchange.rows, exchange.ids).contiguous()
    exchange.results = made.new_empty((sum(exchange.sent), made.shape[1]))
    exchange.pending = [
        dist.all_to_all_single(
            exchange.results, made, exchange.sent, exchange.received, group=group, async_op=True
        )
    ]  # fmt: skip


def _arrived(exchange: _Exchange, top_k: int) -> torch.Tensor:
    """[M k D]: the results of a chunk, token by token."""
    for transfer in exchange.pending:
        transfer.wait()
    assert exchange.results is not None
    made = torch.empty_like(exchange.results)
    made[exchange.order] = exchange.results
    return made.reshape(-1, top_k, made.shape[-1])
