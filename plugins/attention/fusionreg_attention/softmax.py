"""Fusions of softmax over scores in memory: what stands in front of it, and its gradients."""

from __future__ import annotations

from fusionreg.core.spec import FusionSpec

FUSIONS: tuple[FusionSpec, ...] = ()
