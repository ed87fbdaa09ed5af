"""Options that several commands have: one of a few words, which the help lists, and the inputs of a live model."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from fusionreg.integrations import Declared

MODEL_HELP = (
    "a .onnx or .pt2 file, of which nothing is executed, or package.module:factory, which imports that module and "
    "calls factory: its code is run"
)
EXECUTOR_HELP = "Spread the work over gpus, gpus:N, gpus:NxM, processes:N or dask:ADDRESS (default: this process)."
INPUT_HELP = "Of package.module:factory, the type of an input, NAME=SHAPE:DTYPE, as in x=8x128:float32; once for each."


def declared(texts: Sequence[str] | None) -> tuple[Declared, ...]:
    """The values of ``--input``; another form is a usage error."""
    from fusionreg.core.errors import ArgumentError, UnknownNameError
    from fusionreg.integrations import Declared

    try:
        return tuple(map(Declared.parse, texts or ()))
    except (ArgumentError, UnknownNameError) as error:
        raise typer.BadParameter(str(error), param_hint="--input") from error


def assignments(option: str, text: str) -> dict[str, Any]:
    """``NAME=VALUE,…`` of an option: values are integers or floats where they read so, else texts. Another form is a
    usage error."""
    found: dict[str, Any] = {}
    for part in filter(None, text.split(",")):
        name, sign, value = part.partition("=")
        if not sign or not name.strip() or not value.strip():
            raise typer.BadParameter(f"{part!r} is not NAME=VALUE", param_hint=option)
        found[name.strip()] = _value(value.strip())
    return found


def _value(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


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
