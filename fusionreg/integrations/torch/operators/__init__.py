"""Fusions as operators of torch: traceable, differentiable, known to autocast, and cheap to call."""

from __future__ import annotations

from .namespace import Ops
from .registration import Operators

__all__ = ["Operators", "Ops"]
