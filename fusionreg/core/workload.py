"""Problems whose speed matters, as specs declare them. Floor 1."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeInt

from .frozen import EMPTY, FrozenDict
from .records import Record, Scalar

#: What the goal of a workload may name: the milliseconds of each peer, of the fastest one that computes the same
#: (``best``), and the floor. ``product`` and ``epilogue`` are a library's bare matrix product, and the one with bias
#: and activation in its epilogue.
GOAL_NAMES = ("eager", "compile", "product", "epilogue", "cudnn", "flash", "liger", "quack", "best", "floor")
#: What integer inputs of a workload hold, by the word before a number: any below it; different ones below it, at least
#: along the last axis; rising ones along the last axis, evenly up to it.
WHOLE_NUMBERS = ("below", "distinct", "rising")


class Workload(Record):
    """One problem whose speed matters: what ``fusionreg bench`` measures."""

    name: str = Field(pattern=r"^[A-Za-z0-9][\w.+×x-]*$", max_length=60)
    """Unique among the fusion's workloads, e.g. ``8192x8192x8192-bf16``."""
    row: str = ""
    """What it belongs to, for grouping and for ``bench --only``."""
    mode: Literal["b", "g"] = "b"
    """``b``: single launches, L2 flushed before each; ``g``: replay of a CUDA graph, for small problems."""
    axes: FrozenDict[str, NonNegativeInt]
    """Extent of every axis."""
    batch: tuple[int, ...] = ()
    """Leading extents bound to ``...``."""
    dtypes: FrozenDict[str, str]
    """Dtype of every dtype variable."""
    attributes: FrozenDict[str, Scalar] = EMPTY
    """Attributes and choices by name."""
    forms: FrozenDict[str, str] = EMPTY
    """Input name → the form it takes, as its tensor text writes it, e.g. ``T[N]``; the first that fits where it is
    not named."""
    absent: tuple[str, ...] = ()
    """Optional inputs that are left out."""
    layouts: FrozenDict[str, Literal["contiguous", "channels_last"]] = EMPTY
    """Input name → how it lies in memory (default ``contiguous``)."""
    values: FrozenDict[str, str] = EMPTY
    """Integer input → ``below``, ``distinct`` or ``rising`` and an expression over axes, as in ``below E`` (default
    ``below 5``; for 8 bits, any): any numbers below it, different ones, or rising ones along the last axis."""
    products: FrozenDict[str, str] = EMPTY
    """Input → the product that it is, as in ``x @ w`` with another input and a weight ``[N K]`` beside them: a library
    makes it in front of every launch, and figures, bytes and operations are of both."""
    goal: str = ""
    """Milliseconds that it should take at most, an expression over those of the competitors (``eager``, ``compile``,
    ``cudnn``, …), of the ``best`` of them, and over the ``floor``; empty where there is none."""
    summary: str = ""
    """Where such a problem occurs."""
