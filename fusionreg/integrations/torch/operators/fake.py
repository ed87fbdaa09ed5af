"""What an operator gives, without running it: shapes, dtypes and strides as the runtime allocates them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from fusionreg.core.problem import Outline, Tensor, bind, outlines
from fusionreg.core.registry.entries import FusionEntry
from fusionreg.core.runtime.dispatch import SIMULATED

_NAMES = {t: str(t).removeprefix("torch.") for t in vars(torch).values() if isinstance(t, torch.dtype)}
_TYPES = {name: t for t, name in _NAMES.items()}


def fake(entry: FusionEntry) -> Callable[..., Any]:
    """The operator on tensors without memory.

    Extents may be symbolic: they are compared with each other where the shapes must agree, and with numbers that the
    spec names; nothing else is asked of them. Where all are numbers, everything is checked as in a call.
    """
    names = tuple(entry.inputs)
    here = {n for n, t in entry.inputs.items() if t.space == "device"}

    def run(*tensors: torch.Tensor | None, **attributes: Any) -> Any:
        given = {n: t for n, t in zip(names, tensors, strict=False) if t is not None}
        like = next((t for n, t in given.items() if n in here), next(iter(given.values())))
        found = [_empty(o, like) for o in _outlines(entry, given, attributes).values()]
        return found[0] if len(found) == 1 else tuple(found)

    return run


def _outlines(
    entry: FusionEntry, given: Mapping[str, torch.Tensor], attributes: Mapping[str, Any]
) -> Mapping[str, Outline]:
    tensors = {n: Tensor(_NAMES[t.dtype], tuple(t.shape), tuple(t.stride())) for n, t in given.items()}
    numbers = [n for t in tensors.values() for n in (*t.shape, *t.strides)]
    symbolic = {n for n, v in attributes.items() if isinstance(v, torch.SymInt | torch.SymFloat | torch.SymBool)}
    if not symbolic and all(type(n) is int for n in numbers):
        bind(entry, tensors, attributes, SIMULATED)  # raises as a call would
    plain = {n: _stand_in(entry, n) if n in symbolic else v for n, v in attributes.items()}
    return outlines(entry, tensors, plain)


def _stand_in(entry: FusionEntry, name: str) -> Any:
    """A value for an attribute whose own one is not known yet: no output's shape depends on a float."""
    spec = entry.spec.attributes[name]
    return 1.0 if spec.default is None else spec.default


def _empty(outline: Outline, like: torch.Tensor) -> torch.Tensor:
    if outline.strides is None:
        return torch.empty(outline.shape, dtype=_TYPES[outline.dtype], device=like.device)
    return torch.empty_strided(outline.shape, outline.strides, dtype=_TYPES[outline.dtype], device=like.device)
