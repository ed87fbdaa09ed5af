"""Fusions as operators of torch: traceable, differentiable, known to autocast, and cheap to call."""

from __future__ import annotations

from .registration import Operators

__all__ = ["Operators"]
