"""ONNX models as :class:`~fusionreg.integrations.opening.Opened`: lifted graph, random inputs, reference, saver."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ...core.errors import ModelError
from ...core.ir import Graph
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


#: Extents that symbolic axes get. Of a model that slides windows over its input the large ones are tried first: images
#: that are halved several times are nothing at 2, whatever the original makes of that.
_SMALL, _LARGE = (2,), (64, 256, 512)
_SLIDING = frozenset({"AveragePool", "Conv", "ConvInteger", "LpPool", "MaxPool", "QLinearConv"})


class _Original:
    """The original model as a reference, and inputs that it takes."""

    def __init__(self, model: read.Source, name: str, graph: Graph) -> None:
        self.model, self.name, self.graph = model, name, graph
        self._reference: Reference | None = None  # made when first asked for: it holds all weights a second time
        self._last: tuple[Mapping[str, Any], Mapping[str, Any] | Missing] | None = None

    def _run(self, inputs: Mapping[str, Any]) -> Mapping[str, Any] | Missing:
        if self._reference is None:
            self._reference = Reference(self.model)
        return self._reference.run(inputs)

    def run(self, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Its outputs; :class:`ModelError` with the reason where there are none."""
        last = self._last
        if last is not None and inputs.keys() == last[0].keys() and all(inputs[k] is last[0][k] for k in inputs):
            found, self._last = last[1], None
        else:
            found = self._run(inputs)
        if isinstance(found, Missing):
            raise ModelError("no reference", self.name, found.reason, "a model that onnxruntime runs")
        return found

    def example(self, seed: int = 0) -> Mapping[str, Any]:
        """Random inputs: the first whose outputs are all there and finite, else the first that the original takes.

        Where it takes none, that is for the caller to find out. Symbolic axes get one extent, the batch apart: the
        first axis of an input, or the second where the first is a number, as in a recurrent state.
        """
        taken: tuple[Mapping[str, Any], Mapping[str, Any]] | None = None
        first = example_inputs(self.graph, seed)
        for sizes in self._sizes():
            inputs = example_inputs(self.graph, seed, sizes) if sizes else first
            found = self._run(inputs)
            if isinstance(found, Missing):
                continue
            sound = all(a.size and (a.dtype.kind != "f" or np.isfinite(a).all()) for a in found.values())
            if sound or taken is None:
                taken = (inputs, found)
            if sound:
                break
        self._last = taken
        return first if taken is None else taken[0]

    def _sizes(self) -> Iterator[dict[str, int]]:
        """Extents of the symbolic axes, in the order to try them; empty where there are none to choose."""
        shapes = [self.graph.values[name].shape or () for name in self.graph.inputs]
        batch = {shape[0] for shape in shapes if shape}
        second = {shape[1] for shape in shapes if len(shape) > 1 and isinstance(shape[0], int)}
        free = {d for shape in shapes for d in shape[1:] if isinstance(d, str) and d not in batch}
        if not free:
            yield {}
            return
        slides = any(node.op in _SLIDING for node in self.graph.nodes)
        for extent in (*_LARGE, *_SMALL) if slides else (*_SMALL, *_LARGE):
            yield dict.fromkeys(map(str, free), extent)
            if free & second:
                yield dict.fromkeys(map(str, free - second), extent)


def _open(model: read.Source, name: str, ops: Vocabulary) -> Opened:
    graph = load(model, ops=ops)
    original = _Original(model, name, graph)
    return Opened(name, lift(graph, ops), original.example, original.run, original=model, saver=_save)


def _save(fused: Any, path: Any) -> None:
    save(fused.graph, fused.original, path, fused.catalog)
