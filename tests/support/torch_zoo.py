"""Small modules in the styles that published models are written in: (name, module, example arguments).

Every one is built from a fixed seed, in inference mode, with distinct extents so that a swapped axis shows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Built = tuple[nn.Module, tuple[Any, ...]]
ZOO: dict[str, Callable[[], Built]] = {}


def zoo(build: Callable[[], Built]) -> Callable[[], Built]:
    """Adds a builder under its own name."""
    ZOO[build.__name__] = build
    return build


def build(name: str, dtype: torch.dtype = torch.float32) -> Built:
    """The module and its arguments, floats in ``dtype``."""
    torch.manual_seed(1234)
    module, args = ZOO[name]()
    return module.eval().to(dtype), tuple(_to(a, dtype) for a in args)


def _to(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, tuple | list):
        return type(value)(_to(v, dtype) for v in value)
    return {k: _to(v, dtype) for k, v in value.items()} if isinstance(value, dict) else value


def doubled(value: Any) -> Any:
    """A float tensor in float64; anything else as it is."""
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


class Fn(nn.Module):
    """A function with parameters by name."""

    def __init__(self, fn: Callable[..., Any], **params: Tensor) -> None:
        super().__init__()
        self.fn = fn
        for name, value in params.items():
            self.register_parameter(name, nn.Parameter(value))

    def forward(self, *args: Any) -> Any:
        return self.fn(*args, **dict(self.named_parameters()))


def weights(*shape: int) -> Tensor:
    return torch.randn(*shape) / math.sqrt(shape[-1])


# -- every spelling of a linear layer ------------------------------------------------------------------------


@zoo
def linear_module() -> Built:
    return nn.Linear(12, 20), (torch.randn(5, 12),)


@zoo
def linear_no_bias_3d() -> Built:
    return nn.Linear(12, 20, bias=False), (torch.randn(2, 5, 12),)


@zoo
def linear_functional() -> Built:
    return Fn(lambda x, w, b: F.linear(x, w, b), w=weights(20, 12), b=torch.randn(20)), (torch.randn(3, 5, 12),)


@zoo
def linear_mm_add() -> Built:
    return Fn(lambda x, w, b: torch.mm(x, w) + b, w=weights(12, 20), b=torch.randn(20)), (torch.randn(5, 12),)


@zoo
def linear_addmm() -> Built:
    return Fn(lambda x, w, b: torch.addmm(b, x, w, beta=0.5, alpha=2.0), w=weights(12, 20), b=torch.randn(20)), (
        torch.randn(5, 12),
    )


@zoo
def linear_transposed() -> Built:
    return Fn(lambda x, w, b: x @ w.t() + b, w=weights(20, 12), b=torch.randn(20)), (torch.randn(3, 5, 12),)


@zoo
def linear_operands_transposed() -> Built:
    def f(x: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        turned = x.transpose(-1, -2)
        return turned @ w, torch.matmul(turned, y), y.permute(0, 2, 1) @ x, x.permute(0, 1, 2) @ y

    return Fn(f, w=weights(5, 7)), (torch.randn(2, 5, 5), torch.randn(2, 5, 5))


@zoo
def linear_vectors() -> Built:
    def f(x: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        return torch.mv(w, v), v @ w.t(), torch.dot(v, v), F.linear(v, w), torch.outer(v, v), x @ v

    return Fn(f, w=weights(20, 12)), (torch.randn(2, 3, 12), torch.randn(12))


@zoo
def linear_einsum() -> Built:
    def f(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        a = torch.einsum("bsd,hde->bhse", x, w)
        b = torch.einsum("bhse,bhte->bhst", a, a)
        return a, b, torch.einsum("bsd,bsd->bs", x, x), torch.einsum("bij,bjk->ik", b[0], b[1])

    return Fn(f, w=weights(3, 12, 4)), (torch.randn(2, 5, 12),)


@zoo
def batched_products() -> Built:
    def f(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, ...]:
        return torch.bmm(a, b), torch.baddbmm(c, a, b, beta=0.5, alpha=3), torch.matmul(a.unsqueeze(1), b)

    return Fn(f), (torch.randn(2, 4, 6), torch.randn(2, 6, 3), torch.randn(2, 4, 3))


# -- operators one by one ------------------------------------------------------------------------------------


@zoo
def activations() -> Built:
    names = (
        "relu", "relu6", "gelu", "silu", "sigmoid", "tanh", "hardswish", "hardsigmoid", "hardtanh", "leaky_relu", "elu",
        "celu", "selu", "mish", "softplus", "softsign", "logsigmoid",
    )  # fmt: skip

    def f(x: Tensor, slope: Tensor) -> tuple[Tensor, ...]:
        extra = (F.glu(x), F.prelu(x, slope), F.softmax(x, 1), F.log_softmax(x, -1), F.threshold(x, 0.1, 5.0))
        return (*(getattr(F, n)(x) for n in names), *extra, F.elu(x, 0.5), F.softplus(x, beta=2))

    return Fn(f, slope=torch.rand(6)), (torch.randn(3, 6) * 3,)


@zoo
def arithmetic() -> Built:
    def f(x: Tensor, y: Tensor, n: Tensor) -> tuple[Tensor, ...]:
        p = x.abs() + 0.5
        return (
            torch.add(x, y, alpha=2), x - 1.5, 2 - x, x * y[0, 0], x / 3, 1 / p, x // 0.7, x % 0.7, n // 3, n % 3,
            n / 2, torch.div(x, y, rounding_mode="trunc"), torch.div(n, 2, rounding_mode="floor"),
            torch.fmod(x, 0.7), x**2, p**0.5, p**-0.5, 2**x, p.pow(y), p.rsqrt(), p.log(), p.log2(), p.log1p(),
            x.exp(), x.exp2(), x.expm1(), x.erf(), x.erfc(), x.sin(), x.cos(), x.tan(), x.neg(), x.sign(), x.floor(),
            x.ceil(), x.round(), x.trunc(), x.square(), x.clamp(-0.5, 0.5), x.clamp(min=0.1), x.clamp(y, y + 1),
            torch.maximum(x, y), torch.minimum(x, y), torch.lerp(x, y, 0.3), torch.addcmul(x, x, y, value=0.5),
            torch.addcdiv(x, x, p), x.reciprocal(), x.atan(), x.atan2(y),
        )  # fmt: skip

    return Fn(f), (torch.randn(3, 4), torch.randn(3, 4), torch.arange(-5, 7).view(3, 4))


@zoo
def logic() -> Built:
    def f(x: Tensor, y: Tensor, n: Tensor) -> tuple[Tensor, ...]:
        a, b = x > 0, y <= 0.5
        return (
            a & b, a | b, a ^ b, ~a, torch.logical_and(x, b), torch.logical_not(n), x == x.round(), x != y, x >= 0,
            n < 2, n & 6, n | 1, n ^ 3, ~n, n << 1, n >> 1, torch.where(a, x, y), torch.where(a, x, 0.25),
            torch.where(b, 1.0, y), x.masked_fill(a, -3.0), x.masked_fill(b, float("-inf")), torch.isnan(x / 0),
            torch.isinf(x / 0), a + b, a * b, a.any(), a.all(1), a.any(0, keepdim=True), a.to(x.dtype) * x, n + a,
            x.isnan().logical_or(b),
        )  # fmt: skip

    return Fn(f), (torch.randn(3, 4), torch.randn(3, 4), torch.arange(12).view(3, 4))


@zoo
def reductions() -> Built:
    def f(x: Tensor, n: Tensor) -> tuple[Tensor, ...]:
        return (
            x.mean(), x.mean(1), x.mean((0, 2), keepdim=True), x.sum(), x.sum(-1), n.sum(1), (x > 0).sum(0),
            x.amax(1), x.amin((1, 2)), x.max(), x.min(), *x.max(1), *x.min(2, keepdim=True), x.argmax(), x.argmax(1),
            x.argmin(-1, True), x.var(), x.var(1), x.var(-1, unbiased=False), x.std(2), *torch.var_mean(x, (1, 2)),
            x.norm(), x.norm(dim=1), x.norm(p=1, dim=-1), torch.linalg.vector_norm(x, dim=0), x.cumsum(1), x.prod(1),
            *x.topk(2, 1), x.logsumexp(1), F.normalize(x, dim=-1), *x.sort(1), x.argsort(-1, descending=True),
            x.mean(dtype=torch.float32), torch.std(x, dim=1, correction=0),
        )  # fmt: skip

    return Fn(f), (torch.randn(3, 4, 5), torch.arange(12, dtype=torch.int32).view(3, 4))


@zoo
def shapes() -> Built:
    def f(x: Tensor) -> tuple[Tensor, ...]:
        a, b = x.chunk(2, 1)
        c, d, e = x.split([1, 2, 1], dim=1)
        return (
            x.view(3, 20), x.reshape(-1), x.flatten(1), x.unflatten(1, (2, 2)), x.permute(2, 0, 1),
            x.transpose(0, 2), x[0].t(), x[0].T, x.mT, x.unsqueeze(-1), x[:1].squeeze(0), x[:1].squeeze(),
            x[:, :1].expand(3, 4, 5), x.repeat(1, 2, 1), x.tile(2), torch.cat([x, x * 2], -1),
            torch.stack([x, x], 1), a - b, c + d[:, :1] + e, x[:, 1], x[..., -1], x[:, ::2], x[1:, :-1, 1:3],
            x.narrow(1, 1, 2), x.flip(1), x.roll(1, 2), x.roll((1, -2), (0, 1)), x.movedim(0, -1),
            x.repeat_interleave(2, 1), *x.unbind(0), x.select(2, 3), x.contiguous().clone(), x[None, :, None],
            x.swapaxes(0, 1), torch.concat([x[..., 3:], -x[..., :3]], dim=-1), x.expand(2, -1, -1, -1),
        )  # fmt: skip

    return Fn(f), (torch.randn(3, 4, 5),)


@zoo
def indexing() -> Built:
    def f(x: Tensor, i: Tensor, j: Tensor, table: Tensor) -> tuple[Tensor, ...]:
        return (
            F.embedding(i, table), x[i], x[:, j], x[i[:3], j], x[:, i[:3], j], x[i[:3], :, j], x.index_select(1, j),
            x.gather(1, j.view(3, 1, 1)), torch.take_along_dim(x, j.view(3, 1, 1), 1), F.one_hot(i, 4),
            x.scatter(1, j.view(3, 1, 1), 9.0), x.scatter_add(1, j.view(3, 1, 1), x), x.index_add(1, j, x[:, :3]),
            torch.index_put(x, (i[:2],), x[:2]), x[:, -1], x.tril(), x.triu(1), x[0].tril(-1), (x > 0).tril(),
            torch.index_put(x, (i[:3], j), x[:, 0].sum(), accumulate=True), x.index_copy(1, j[:2], x[:, 2:]),
        )  # fmt: skip

    args = (torch.randn(3, 4, 5), torch.tensor([0, 2, 1, -1]) % 3, torch.tensor([3, 0, 2]))
    return Fn(f, table=torch.randn(3, 6)), args


@zoo
def data_dependent() -> Built:
    """Results whose extents depend on data."""

    def f(x: Tensor, m: Tensor, n: Tensor) -> tuple[Tensor, ...]:
        return (
            x[m], x[m[:, 0]], torch.nonzero(n), torch.masked_select(x, m), torch.argwhere(m), x[x > 0].sum(),
            *torch.where(m), x.isfinite(), torch.nan_to_num(x / 0), torch.nan_to_num(x / 0, 1.0, 2.0, 3.0),
            x.cumprod(1), torch.hypot(x, x),
        )  # fmt: skip

    return Fn(f), (torch.randn(3, 4), torch.rand(3, 4) > 0.5, torch.tensor([0, 1, 0, 2]))


@zoo
def creation() -> Built:
    def f(x: Tensor) -> tuple[Tensor, ...]:
        return (
            torch.arange(5), torch.arange(1, 7, 2).to(x.dtype) * x[0, 0], torch.arange(0, 1, 0.25),
            torch.zeros(2, 3), x.new_ones(2), torch.full((2, 2), 7), torch.full_like(x, 0.5), torch.zeros_like(x),
            torch.ones_like(x, dtype=torch.int32), torch.eye(3), torch.linspace(0, 1, 5),
            torch.tensor([1.0, 2.0]) + x[0, :2].float(), torch.tril(torch.ones(4, 4)), x.new_full((2,), 3.0),
            torch.ones(40, 40), x.new_zeros(x.shape),
        )  # fmt: skip

    return Fn(f), (torch.randn(3, 4),)


@zoo
def in_place() -> Built:
    def f(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        h = x @ y
        h.add_(1)
        v = h.view(-1)
        v[0] = 5
        row = h[1]
        row.mul_(2)
        w = h.t()
        w[2:, 0] += 1
        first, second = h.split([2, 1], dim=0)
        second.fill_(0.5)
        z = torch.zeros_like(h)
        z[:, 1:3] = first.sum()
        z.masked_fill_(h > 1, -1)
        z.unsqueeze(0).squeeze(0)[0].copy_(row)
        return h, v, row, w, z, torch.relu_(h + z), first

    return Fn(f), (torch.randn(3, 4), torch.randn(4, 4))


@zoo
def casts() -> Built:
    def f(x: Tensor, n: Tensor) -> tuple[Tensor, ...]:
        scores = (x @ x.t()).float().softmax(-1).to(x.dtype) @ x
        return (
            scores,
            F.softmax(x, -1, dtype=torch.float32),
            x.to(torch.int64),
            n.type_as(x) + x,
            x.double(),
            n.float() / 2,
            x.half(),
        )

    return Fn(f), (torch.randn(4, 6) * 2, torch.arange(6))


def names() -> Sequence[str]:
    """Of all modules."""
    return tuple(ZOO)
