"""All rules, in the two sets that :func:`fusionreg.core.lift.lift` runs. Floor 3."""

from __future__ import annotations

from . import activations, attention, normalizations, products, quantization, tidying
from .engine import Rule

#: Run before constants are folded: a weight keeps the layout that the model stores it in.
EARLY: tuple[Rule, ...] = (
    *products.TRANSPOSES,
    *(r for r in tidying.RULES if r.name in ("identity", "transpose_identity", "transpose_twice", "cast_to_itself")),
    *products.GEMM,
)

RULES: tuple[Rule, ...] = (
    *activations.RULES,
    *normalizations.RULES,
    *attention.RULES,
    *quantization.RULES,
    *products.TRANSPOSES,
    *products.GEMM,
    *tidying.RULES,
)
"""Every rule."""
