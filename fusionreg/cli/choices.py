"""Options that take one of a few words; any other word is a usage error, and the help lists them."""

from __future__ import annotations

from enum import StrEnum


class Device(StrEnum):
    AUTO = "auto"
    SIM = "sim"
    CUDA = "cuda"


class Cases(StrEnum):
    QUICK = "quick"
    ALL = "all"


class Policy(StrEnum):
    OFF = "off"
    CONSERVATIVE = "conservative"
    BALANCED = "balanced"
    AGGRESSIVE = "aggressive"
