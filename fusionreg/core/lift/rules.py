"""All rules, in the three sets that :func:`fusionreg.core.lift.lift` runs. Floor 3."""

from __future__ import annotations

from . import (
    activations,
    attention,
    expert_weights,
    experts,
    masking,
    normalizations,
    products,
    quantization,
    ranges,
    tidying,
    windows,
)
from .engine import Rule

#: Run before constants are folded: a weight keeps the layout that the model stores it in.
EARLY: tuple[Rule, ...] = (
    *products.TRANSPOSES,
    *(r for r in tidying.RULES if r.name in ("identity", "transpose_identity", "transpose_twice", "cast_to_itself")),
    *products.GEMM,
    *expert_weights.UNPACKING,
)

RULES: tuple[Rule, ...] = (
    *activations.RULES,
    *normalizations.RULES,
    *attention.RULES,
    *quantization.RULES,
    *ranges.RULES,
    *experts.RULES,
    *expert_weights.RULES,
    *products.TRANSPOSES,
    *products.GEMM,
    *windows.RULES,
    *tidying.RULES,
)
"""Every rule that makes a larger operator of smaller ones."""

TRAINED: tuple[Rule, ...] = tuple(attention.trained(r) for r in RULES)
"""The same where gradients are recorded."""

LATE: tuple[Rule, ...] = (*masking.RULES, *normalizations.HEADS, *products.COLUMNS, *tidying.LATE)
"""Run once none of those fits any more: what these make of a mask, or of a product, no larger operator can take in."""
