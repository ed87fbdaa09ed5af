"""An input as ``fusionreg match net:build --input x=8x128:float32`` declares it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from fusionreg.core.dtypes import DTYPES, dtype
from fusionreg.core.errors import ArgumentError

FORM = "NAME=SHAPE:DTYPE, as in x=8x128:float32; a scalar is x=:float32"
_TEXT = re.compile(r"(?P<name>[^\W\d]\w*)=(?P<shape>(\d+(x\d+)*)?):(?P<dtype>\w+)")


@dataclass(frozen=True)
class Declared:
    """A tensor that a model is called with.

    Attributes:
        name: of the argument.
        shape: its extents.
        dtype: by name, as :mod:`fusionreg.core.dtypes` has them.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str

    @classmethod
    def parse(cls, text: str) -> Declared:
        """``x=8x128:float32``; :class:`ArgumentError` for anything else, :class:`UnknownNameError` for a dtype."""
        found = _TEXT.fullmatch(text.strip())
        if found is None:
            raise ArgumentError("cannot read", "an input", repr(text), FORM)
        name = found["dtype"]
        if dtype(name).name == "string":
            known = ", ".join(sorted(set(DTYPES) - {"string"}))
            raise ArgumentError("cannot read", f"the input {found['name']}", "dtype 'string'", f"one of {known}")
        return cls(found["name"], tuple(int(d) for d in found["shape"].split("x") if d), name)
