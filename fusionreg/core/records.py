"""What spec records have in common: names, texts, and the frozen base class. Floor 1."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

Name = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*(\.[a-z][a-z0-9_]*)+$", max_length=80)]
Identifier = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_]*$", max_length=60)]
Scalar = bool | int | float | str


def _tuple(value: Any) -> Any:
    items = value if isinstance(value, list | tuple) else (value,)
    return tuple(str(v) if type(v) is int else v for v in items)


Layout = Literal["contiguous", "misaligned", "padded", "padded_odd", "transposed", "channels_last", "expanded"]
"""A memory layout that conformance knows: see ``core/conformance/trial.py``."""

_TEXT = {"anyOf": [{"type": "string"}, {"type": "integer"}]}
Texts = Annotated[
    tuple[str, ...],
    BeforeValidator(_tuple),
    WithJsonSchema({"anyOf": [*_TEXT["anyOf"], {"type": "array", "items": _TEXT}]}),
]
"""One text or several; a whole number stands for its text."""


class Record(BaseModel):
    """What every spec record has in common: frozen, closed, documented field by field."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        validate_default=True,
        protected_namespaces=(),
        ser_json_inf_nan="constants",  # an infinite default must survive the round trip
    )
