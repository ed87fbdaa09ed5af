"""A model's fused sites against the operators they replaced, on what the model really computes; and coverage locks."""

from __future__ import annotations

from .records import Drift, SiteCheck, Verification
from .whole import verify, verify_opened

__all__ = ["Drift", "SiteCheck", "Verification", "verify", "verify_opened"]
