"""Derivatives of the vocabulary's operators by calls of torch, and of whole fusions by those."""

from __future__ import annotations

from collections.abc import Mapping

from fusionreg.core.frozen import FrozenDict

from .activations import ACTIVATIONS
from .masking import MASKING
from .normalization import NORMALIZATIONS
from .pointwise import POINTWISE
from .products import MOVING, PRODUCTS
from .rule import Formula, Rule

#: Operator → its derivative.
RULES: Mapping[str, Rule] = FrozenDict({**POINTWISE, **ACTIVATIONS, **PRODUCTS, **MOVING, **NORMALIZATIONS, **MASKING})

__all__ = ["RULES", "Formula", "Rule"]
