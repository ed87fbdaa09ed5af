"""Rows of tensors on their way between the ranks of a process group, with gradients that take the way back.

What is begun is under way while other work goes on, forwards and backwards: autograd runs its nodes in the opposite
order, so that what arrives first in the forward pass is the last whose gradient is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist


class Transfer:
    """Rows to and from each rank: ``sent[r]`` go to rank r, ``received[r]`` come from it."""

    def __init__(self, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup | None) -> None:
        self.sent, self.received, self.group = list(sent), list(received), group
        self._work: Any = None
        self._arriving: torch.Tensor | None = None

    def reversed(self) -> Transfer:
        return Transfer(self.received, self.sent, self.group)

    def begin(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows that arrive, in the order of ranks: to be read after :meth:`end`."""
        arriving = rows.new_empty((sum(self.received), *rows.shape[1:]))
        self._work = dist.all_to_all_single(
            arriving, rows.contiguous(), self.received, self.sent, group=self.group, async_op=True
        )
        self._arriving = arriving
        return arriving

    def end(self) -> torch.Tensor:
        """The rows, when all of them are there: where they are on a GPU its stream waits, not the host."""
        assert self._arriving is not None, "it was begun"
        self._work.wait()
        arrived, self._work, self._arriving = self._arriving, None, None
        return arrived


class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, tie: torch.Tensor, there: Transfer, back: Transfer) -> torch.Tensor:
        ctx.back = back
        return there.begin(rows)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        return ctx.back.end(), None, None, None


class _End(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, there: Transfer, back: Transfer) -> torch.Tensor:
        ctx.back = back
        there.end()
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        ctx.back.begin(grads[0])
        return grads[0], None, None  # of the shape that autograd asks for; what `_Begin` gives arrives beside it


class Journey:
    """Rows that travel to other ranks, and their gradients back.

    >>> journey = Journey(rows, tie, Transfer(sent, received, group))
    >>> ...                                # other work
    >>> arrived = journey.end()

    Args:
        rows: [N ...], those for rank 0 first.
        tie: a scalar that requires a gradient on every rank where there is a backward pass on any, and on none else:
            every rank then has its part in it.
        there: how many rows go where.
    """

    def __init__(self, rows: torch.Tensor, tie: torch.Tensor, there: Transfer) -> None:
        self._there, self._back = there, there.reversed()
        self._rows: torch.Tensor = _Begin.apply(rows, tie, there, self._back)

    def end(self) -> torch.Tensor:
        """The rows that have arrived."""
        found: torch.Tensor = _End.apply(self._rows, self._there, self._back)
        return found


class Spread(torch.autograd.Function):
    """``(x [M D], places [M k])`` → rows [M k D] that has x[m] at each places[m, j], a permutation. The gradient of x
    is summed in fp32, in the order of j."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(places)
        rows = x.new_empty((places.numel(), x.shape[1]))
        for at in places.unbind(1):
            rows[at] = x
        return rows

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        (places,) = ctx.saved_tensors
        (rows,) = grads
        total = torch.zeros((places.shape[0], rows.shape[1]), dtype=wide(rows), device=rows.device)
        for at in places.unbind(1):
            total += rows[at]
        return total.to(rows.dtype), None


class Combine(torch.autograd.Function):
    """``(rows [N D], places [M k], weights [M k])`` → y[m] = Σ_j weights[m, j] · rows[places[m, j]], places being a
    permutation: summed in fp32, in the order of j, and rounded once."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, places: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows, places, weights)
        total = torch.zeros((places.shape[0], rows.shape[1]), dtype=wide(rows), device=rows.device)
        for at, weight in zip(places.unbind(1), weights.unbind(1), strict=True):
            total.addcmul_(rows[at].to(total.dtype), weight.to(total.dtype).unsqueeze(1))
        return total.to(rows.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        rows, places, weights = ctx.saved_tensors
        dy = grads[0].to(wide(rows))
        d_rows = torch.empty_like(rows)
        slopes = []
        for at, weight in zip(places.unbind(1), weights.unbind(1), strict=True):
            slopes.append((rows[at] * dy).sum(1))
            d_rows[at] = (dy * weight.to(dy.dtype).unsqueeze(1)).to(rows.dtype)
        return d_rows, None, torch.stack(slopes, 1).to(weights.dtype)


def wide(x: torch.Tensor) -> torch.dtype:
    """The dtype that sums of it are made in."""
    return torch.promote_types(x.dtype, torch.float32)
