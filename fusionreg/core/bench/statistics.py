"""Medians with their spread. Floor 7."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import ArgumentError
from ..spec import Record


class Spread(Record):
    """Milliseconds of one launch, over many."""

    median: float
    """Half of them took at most this."""
    min: float
    """The fastest."""
    p20: float
    """A fifth took at most this."""
    p80: float
    """Four fifths took at most this."""
    n: int
    """How many."""


def spread(samples: Sequence[float]) -> Spread:
    """Quantiles of ``samples``, linear between neighbours; :class:`ArgumentError` for none, or one that is no time."""
    values = sorted(samples)
    if not values or not 0 <= values[0] <= values[-1] < float("inf") or any(v != v for v in values):
        raise ArgumentError("no statistics", f"of {len(values)} samples", str(values[:3]), "one or more durations")
    return Spread(
        median=quantile(values, 0.5), min=values[0], p20=quantile(values, 0.2), p80=quantile(values, 0.8), n=len(values)
    )


def quantile(values: Sequence[float], share: float) -> float:
    """The quantile ``share`` of sorted ``values``."""
    at = share * (len(values) - 1)
    low = int(at)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (at - low)
