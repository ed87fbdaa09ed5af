"""Options that several commands have: one of a few words, which the help lists, and the inputs of a live model."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from fusionreg.integrations import Declared

MODEL_HELP = (
    "a .onnx or .pt2 file, of which nothing is executed, or package.module:factory, which imports that module and "
    "calls factory: its code is run"
)
INPUT_HELP = "Of package.module:factory: type of an input, NAME=SHAPE:DTYPE, as in x=8x128:float32; once for each."


def declared(texts: Sequence[str] | None) -> tuple[Declared, ...]:
    """The values of ``--input``; another form is a usage error."""
    from fusionreg.core.errors import ArgumentError, UnknownNameError
    from fusionreg.integrations import Declared

    try:
        return tuple(map(Declared.parse, texts or ()))
    except (ArgumentError, UnknownNameError) as error:
        raise typer.BadParameter(str(error), param_hint="--input") from error


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


class Executor(StrEnum):
    LIBRARY = "library"
    EAGER = "eager"
    INDUCTOR = "inductor"
    MAX_AUTOTUNE = "inductor-max-autotune"
    ONNXRUNTIME = "onnxruntime"
