"""Rows of tensors on their way between the ranks of a process group, with gradients that take the way back.

What is begun is under way while other work goes on, forwards and backwards: autograd runs its nodes in the opposite
order, so that what arrives first in the forward pass is the last whose gradient is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


Sum = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""``(rows [N D], places [M k], weights [M k])`` → y[m] = Σ_j weights[m, j] · rows[places[m, j]]: ``moe.gather_sum``."""


def gather_sum(rows: torch.Tensor, places: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """In fp32, in the order of j, and rounded once; a place below 0 is none."""
    total = torch.zeros((places.shape[0], rows.shape[1]), dtype=wide(rows), device=rows.device)
    for at, weight in zip(places.unbind(1), weights.unbind(1), strict=True):
        (there,) = torch.nonzero(at >= 0, as_tuple=True)
        total[there] += rows[at[there]].to(total.dtype) * weight[there].to(total.dtype).unsqueeze(1)
    return total.to(rows.dtype)


class Order:
    """Rows that are tokens, each of which may go to several ranks.

    Attributes:
        tokens: [N], of each row the token.
        places: [M ranks], of each token the row that goes to each rank; -1 of none.
        ones: [M ranks], what each of them counts.
    """

    def __init__(self, order: torch.Tensor, tokens: int, ranks: int) -> None:
        """``order``: of each row token · ranks + rank."""
        self.tokens = order // ranks
        places = torch.full((tokens * ranks,), -1, device=order.device)
        places.scatter_(0, order, torch.arange(order.numel(), device=order.device))
        self.places = places.view(tokens, ranks)
        self.ones = torch.ones((tokens, ranks), dtype=torch.float32, device=order.device)


class Spread(torch.autograd.Function):
    """``(x [M D], order, sum)`` → rows [N D], each its token's x."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, order: Order, sum_up: Sum) -> torch.Tensor:
        ctx.order, ctx.sum_up = order, sum_up
        return x.index_select(0, order.tokens)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        return ctx.sum_up(grads[0].contiguous(), ctx.order.places, ctx.order.ones), None, None


class Combine(torch.autograd.Function):
    """``(rows [N D], order, sum)`` → y [M D], the sum of the rows of each token, in the order of ranks."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, order: Order, sum_up: Sum) -> torch.Tensor:
        ctx.order = order
        return sum_up(rows, order.places, order.ones)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        return grads[0].index_select(0, ctx.order.tokens), None, None


def wide(x: torch.Tensor) -> torch.dtype:
    """The dtype that sums of it are made in."""
    return torch.promote_types(x.dtype, torch.float32)
