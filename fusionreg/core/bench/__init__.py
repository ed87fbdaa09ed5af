"""Measuring speed: what is measured, floors, results and their page. Floor 7.

Nothing here times anything: a :class:`~.measure.Bench` does, and only a GPU has one. The simulator is never a source
of timings.
"""

from __future__ import annotations

from .floors import Ceilings, Traffic
from .measure import Bench, Check, Entrant, Outcome, measure
from .preparing import Preparation, prepare
from .results import Result, Results
from .statistics import Spread, spread
from .subject import Subject, current, subjects

__all__ = [
    "Bench",
    "Ceilings",
    "Check",
    "Entrant",
    "Outcome",
    "Preparation",
    "Result",
    "Results",
    "Spread",
    "Subject",
    "Traffic",
    "current",
    "measure",
    "prepare",
    "spread",
    "subjects",
]
