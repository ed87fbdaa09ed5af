"""ONNX models as :class:`~fusionreg.integrations.opening.Opened`: lifted graph, random inputs, reference, saver."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ...core.errors import ModelError
from ...core.lift import lift
from ...core.ops import Vocabulary
from ..opening import Opened
from . import read
from .load import load
from .reference import Missing, Reference, example_inputs
from .save import save


def open_path(path: str | os.PathLike[str], *, ops: Vocabulary) -> Opened:
    """The model in an ``.onnx`` file; :class:`ModelError` when it cannot be read."""
    return _open(Path(path), Path(path).stem, ops)


def open_object(model: Any, *, ops: Vocabulary) -> Opened:
    """An ``onnx.ModelProto`` or ``onnx_ir.Model``; :class:`ModelError` for anything else."""
    if not isinstance(model, read.onnx.ModelProto | read.onnx_ir.Model):
        raise ModelError(
            "cannot read model", type(model).__name__, f"an object of {type(model).__module__}",
            "an onnx.ModelProto or an onnx_ir.Model",
        )  # fmt: skip
    return _open(model, model.graph.name or "model", ops)


def _open(model: read.Source, name: str, ops: Vocabulary) -> Opened:
    graph = load(model, ops=ops)
    sessions: list[Reference] = []  # made when first asked for: it holds all weights a second time

    def run(inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        if not sessions:
            sessions.append(Reference(model))
        found = sessions[0].run(inputs)
        if isinstance(found, Missing):
            raise ModelError("no reference", name, found.reason, "a model that onnxruntime runs")
        return found

    return Opened(name, lift(graph, ops), partial(example_inputs, graph), run, original=model, saver=_save)


def _save(fused: Any, path: Any) -> None:
    save(fused.graph, fused.original, path, fused.catalog.fusions)
