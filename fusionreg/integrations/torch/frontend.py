"""The ways in: an exported program, a module with example inputs, a ``.pt2`` file."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from fusionreg.core.errors import FusionregError, ModelError
from fusionreg.core.ir import Graph
from fusionreg.core.ops import Vocabulary

from . import pt2, read_fx
from .convert import Imported, convert
from .program import Program, Ref, TensorMeta

#: Where a configuration of transformers says how experts run.
_FORM = "_experts_implementation"


def import_exported(
    ep: torch.export.ExportedProgram, *, name: str = "model", ops: Vocabulary | None = None
) -> Imported:
    """The graph of an exported program and how a call meets it. The program and its module stay as they are.

    Operators are taken as the model wrote them (linear, layer_norm, gelu …); only what has no form here goes through
    torch's decompositions.

    Raises:
        ModelError: an operator that cannot be expressed; names it and its line in the model.
    """
    if read_fx.enables_autocast(ep):  # its casts are spelled out by tracing through the region
        ep = ep.run_decompositions({})
    try:
        return convert(read_fx.read(ep, name), ops)
    except FusionregError as first:
        try:
            plain = convert(read_fx.read(ep.run_decompositions(), name), ops)
        except Exception:  # torch's own, of any kind: the first refusal is the one that names the model's line
            raise first from None
        if _result_types(plain) != _result_types(read_fx.read(ep, name)):  # torch 2.11 turns an LSTM's state around
            raise first
        return plain


def _result_types(of: Imported | Program) -> list[Any]:
    """dtype and shape of each result, as export recorded them."""
    program = of.program if isinstance(of, Imported) else of
    metas = [program.metas.get(o.value.name) for o in program.outputs if o.kind == "user" and isinstance(o.value, Ref)]
    return [(m.dtype, m.shape) if isinstance(m, TensorMeta) else None for m in metas]


def from_exported(ep: torch.export.ExportedProgram, *, name: str = "model", ops: Vocabulary | None = None) -> Graph:
    """The raw graph of an exported program; see :func:`import_exported`."""
    return import_exported(ep, name=name, ops=ops).graph


def export(
    module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None, dynamic_shapes: Any = None
) -> torch.export.ExportedProgram:
    """``torch.export.export``, its failure as a :class:`ModelError`.

    Under an ambient autocast the casts that it makes are spelled out in the program: its dtypes are those of the eager
    module there, wherever it runs later.
    """
    try:
        with torch.no_grad(), grouped_experts(module):
            ep = torch.export.export(module, tuple(args), dict(kwargs or {}), dynamic_shapes=dynamic_shapes)
            ambient = any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda"))
            return ep.run_decompositions({}) if ambient else ep
    except Exception as e:  # torch raises its own, and whatever the module's code raises
        first = (str(e).strip().splitlines() or [""])[0]
        raise ModelError(
            "cannot export", type(module).__name__, f"{type(e).__name__}: {first}", "a module that torch.export accepts"
        ) from e


@contextmanager
def grouped_experts(module: torch.nn.Module) -> Iterator[None]:
    """Experts of transformers that loop, with as many turns as the data tells, run as one grouped product: the form
    of that layer which can be exported. Their configurations are put back."""
    made = [part for part in module.modules() if hasattr(part, "is_concatenated") and hasattr(part, "is_transposed")]
    configs = {id(c): c for part in made if hasattr(c := getattr(part, "config", None), _FORM)}
    looping = [c for c in configs.values() if getattr(c, _FORM) in (None, "eager")]
    before = [getattr(c, _FORM) for c in looping]
    try:
        for c in looping:
            setattr(c, _FORM, "grouped_mm")
        yield
    finally:
        for c, form in zip(looping, before, strict=True):
            setattr(c, _FORM, form)


def from_module(
    module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None, dynamic_shapes: Any = None
) -> Graph:
    """The raw graph of a module, traced with example inputs by ``torch.export`` (which runs the module's code).

    ``dynamic_shapes``: as ``torch.export.export`` takes it; other axes are fixed to the examples' extents.
    """
    return from_exported(export(module, args, kwargs, dynamic_shapes), name=type(module).__name__)


def import_pt2(path: str | os.PathLike[str], *, model: str = "", ops: Vocabulary | None = None) -> Imported:
    """The graph of a ``.pt2`` file and how a call meets it. Executes nothing of the file; see :mod:`.pt2`.

    Raises:
        ModelError: see :func:`.pt2.read`; an operator that cannot be expressed.
    """
    program = pt2.read(path, model)
    return convert(program.with_(name=os.path.splitext(os.path.basename(path))[0] or "model"), ops)


def load_pt2(path: str | os.PathLike[str], *, model: str = "", ops: Vocabulary | None = None) -> Graph:
    """The raw graph of a ``.pt2`` file; see :func:`import_pt2`."""
    return import_pt2(path, model=model, ops=ops).graph
