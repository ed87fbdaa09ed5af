"""Derivatives of masks of scores: what a mask replaces has none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fusionreg.core.frozen import FrozenDict

from .rule import Rule, rule

aten = torch.ops.aten


def _hidden(mask: Any, keep: int) -> Any:
    return aten.logical_not(mask) if keep else mask


def _fill(x: Any, mask: Any, *, value: float, keep: int) -> Any:
    return aten.masked_fill(x, _hidden(mask, keep), value)


def _fill_x(dy: Any, mask: Any, *, keep: int) -> Any:
    return aten.masked_fill(dy, _hidden(mask, keep), 0.0)


def _causal(x: Any, *, value: float, diagonal: int) -> Any:
    later = aten.triu(aten.ones(list(x.shape[-2:]), dtype=torch.bool, device=x.device), diagonal + 1)
    return aten.masked_fill(x, later, value)


MASKING: Mapping[str, Rule] = FrozenDict(
    {
        "fusionreg::MaskedFill": rule(_fill, x=_fill_x),
        "fusionreg::CausalMask": rule(_causal, x=lambda dy, *, diagonal: aten.tril(dy, diagonal)),
    }
)
