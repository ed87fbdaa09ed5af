"""Sites of differentiable fusions: small inputs, and the same in torch's own operators."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from fusionreg.core.ops import default_vocabulary, numpy_backend

#: A mask is a function of this and the shape.
SEED = torch.tensor([-7, 1 << 35])
P = 0.3


def kept(x: torch.Tensor, rng: torch.Tensor, p: float) -> torch.Tensor:
    """``x`` after dropout, by the definition of the operator in NumPy."""
    if p == 0:
        return x
    meaning = default_vocabulary()["fusionreg::Dropout"].meaning
    factors = meaning(numpy_backend(), np.ones(tuple(x.shape), np.float32), rng.cpu().numpy(), p=p)
    return x * torch.from_numpy(np.asarray(factors)).to(x)


@dataclass(frozen=True)
class Site:
    """One call of a fusion.

    Attributes:
        fusion: its name.
        shapes: input → shape; ``rng`` is :data:`SEED`.
        reference: the same, of inputs by name and attributes: a tensor, or a tuple.
        attributes: by keyword.
        last: whether tensors of four axes are channels last.
        fixed: inputs that need no gradient.
        constant: outputs that have none.
    """

    fusion: str
    shapes: dict[str, tuple[int, ...]]
    reference: Callable[..., Any]
    attributes: dict[str, Any] = field(default_factory=dict)
    last: bool = False
    fixed: tuple[str, ...] = ()
    constant: int = 0

    def tensors(self, grad: bool = False, device: str = "cpu") -> dict[str, torch.Tensor]:
        """Fresh inputs in the order of the spec; leaves, always the same."""
        generator = torch.Generator().manual_seed(0)
        made: dict[str, torch.Tensor] = {}
        for name, shape in self.shapes.items():
            if name == "rng":
                made[name] = SEED.to(device, copy=True)
                continue
            x = torch.randn(shape, generator=generator)
            x = (x.abs() + 0.5 if name in ("scale", "var") else x).to(device)
            if self.last and len(shape) == 4:
                x = x.to(memory_format=torch.channels_last)
            made[name] = x.requires_grad_(grad and name not in self.fixed)
        return made

    def expected(self, tensors: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        found = self.reference(**tensors, **self.attributes)
        return found if isinstance(found, tuple) else (found,)


def _layernorm(x, scale, bias, epsilon=1e-5):
    return F.layer_norm(x, x.shape[-1:], scale, bias, epsilon)


def _layernorm_unbiased(x, scale, epsilon=1e-5):
    return F.layer_norm(x, x.shape[-1:], scale, None, epsilon)


def _rmsnorm(x, scale, epsilon=1e-5):
    return F.rms_norm(x, x.shape[-1:], scale, epsilon)


def _residual_rmsnorm(x, residual, scale, epsilon=1e-5):
    return _rmsnorm(x + residual, scale, epsilon), x + residual


def _gelu_dropout_layernorm(x, rng, scale, bias, p=0.5, approximate="none", epsilon=1e-5):
    return _layernorm(kept(F.gelu(x, approximate=approximate), rng, p), scale, bias, epsilon)


def _dropout_residual_layernorm(x, rng, residual, scale, bias, p=0.5, epsilon=1e-5):
    return _layernorm(kept(x, rng, p) + residual, scale, bias, epsilon)


def _groupnorm_swish(x, scale, bias, groups, epsilon=1e-5):
    return F.silu(F.group_norm(x, groups, scale, bias, epsilon))


def _groupnorm_swish_dropout(x, rng, scale, bias, groups, p=0.5, epsilon=1e-5):
    return kept(_groupnorm_swish(x, scale, bias, groups, epsilon), rng, p)


def _swish_dropout(x, rng, p=0.5):
    return kept(F.silu(x), rng, p)


def _batchnorm(x, scale, bias, mean, var, momentum=0.9, unbiased=0, epsilon=1e-5):
    """What torch's does, and the statistics beside it."""
    axes = [0, *range(2, x.ndim)]
    batch, spread = x.mean(axes), x.var(axes, unbiased=False)
    count = x.numel() // x.shape[1]
    new = spread * (count / (count - 1) if unbiased else 1)
    y = F.batch_norm(x, None, None, scale, bias, True, 0.0, epsilon)
    running = tuple((o * momentum + n * (1 - momentum)).detach() for o, n in ((mean, batch), (var, new)))
    return y, *running, batch.detach(), (spread + epsilon).rsqrt().detach()


def _batchnorm_relu(**tensors):
    y, *statistics = _batchnorm(**tensors)
    return y.relu(), *statistics


def _batchnorm_add_relu(residual, **tensors):
    y, *statistics = _batchnorm(**tensors)
    return (y + residual).relu(), *statistics


_ROW, _N, _MAP, _C = (2, 3, 40), (40,), (2, 8, 3, 5), (8,)
_STATISTICS = {"scale": _C, "bias": _C, "mean": _C, "var": _C}
_RUNNING = ("mean", "var")

SITES = {
    "layernorm": Site("norm.layernorm", {"x": _ROW, "scale": _N, "bias": _N}, _layernorm, {"epsilon": 1e-3}),
    "layernorm_unbiased": Site("norm.layernorm_unbiased", {"x": _ROW, "scale": _N}, _layernorm_unbiased),
    "rmsnorm": Site("norm.rmsnorm", {"x": _ROW, "scale": _N}, _rmsnorm),
    "residual_rmsnorm": Site(
        "norm.residual_rmsnorm", {"x": _ROW, "residual": _ROW, "scale": _N}, _residual_rmsnorm
    ),
    "gelu_dropout_layernorm": Site(
        "norm.gelu_dropout_layernorm", {"x": _ROW, "rng": (2,), "scale": _N, "bias": _N}, _gelu_dropout_layernorm,
        {"p": P, "approximate": "tanh"},
    ),
    "dropout_residual_layernorm": Site(
        "norm.dropout_residual_layernorm",
        {"x": _ROW, "rng": (2,), "residual": _ROW, "scale": _N, "bias": _N}, _dropout_residual_layernorm, {"p": P},
    ),
    "swish_dropout": Site("norm.swish_dropout", {"x": _ROW, "rng": (2,)}, _swish_dropout, {"p": P}),
    "groupnorm_swish": Site(
        "norm.groupnorm_swish", {"x": _MAP, "scale": _C, "bias": _C}, _groupnorm_swish, {"groups": 4}
    ),
    "groupnorm_swish_dropout_last": Site(
        "norm.groupnorm_swish_dropout", {"x": _MAP, "rng": (2,), "scale": _C, "bias": _C}, _groupnorm_swish_dropout,
        {"groups": 2, "p": P}, last=True,
    ),
    "batchnorm_relu": Site(
        "norm.batchnorm_relu", {"x": _MAP, **_STATISTICS}, _batchnorm_relu, {"momentum": 0.8, "unbiased": 1},
        fixed=_RUNNING, constant=4,
    ),
    "batchnorm_add_relu_last": Site(
        "norm.batchnorm_add_relu", {"x": _MAP, **_STATISTICS, "residual": _MAP}, _batchnorm_add_relu, last=True,
        fixed=_RUNNING, constant=4,
    ),
}  # fmt: skip
