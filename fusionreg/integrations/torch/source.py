"""Where a call stands in the model: one short text from the traces that export records."""

from __future__ import annotations

import re
from collections.abc import Mapping

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_LIBRARY = ("/site-packages/torch/", "torch/nn/", "torch/fx/", "torch/_", "torch/utils/", "<eval_with_key>")


def from_trace(trace: str | None, modules: str = "") -> str:
    """``file:line`` of the innermost frame outside torch, with the module path behind it: ``net.py:12 (layers.0.fc)``.

    ``trace`` is a Python traceback's text, ``modules`` the dotted path of the innermost module.
    """
    frames = _FRAME.findall(trace or "")
    own = [f for f in frames if not any(part in f[0] for part in _LIBRARY)] or frames
    place = f"{own[-1][0]}:{own[-1][1]}" if own else ""
    if place and modules:
        return f"{place} ({modules})"
    return place or modules


def from_modules(stack: Mapping[str, tuple[str, object]] | None) -> str:
    """Dotted path of the innermost module of an fx ``nn_module_stack``."""
    if not stack:
        return ""
    return str(list(stack.values())[-1][0])


def from_modules_text(text: str) -> str:
    """The same of its serialised form, ``key,path,type;key,path,type``."""
    entries = [part.split(",") for part in text.split(";") if part.count(",") >= 2]
    return entries[-1][1] if entries and not entries[-1][1].startswith("_empty") else ""
