"""PyTorch models as :class:`~fusionreg.integrations.opening.Opened`: lifted graph, inputs, reference, callable."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from fusionreg.core.errors import FusionregError, ModelError
from fusionreg.core.frozen import FrozenDict
from fusionreg.core.ir import Graph
from fusionreg.core.lift import lift
from fusionreg.core.ops import Vocabulary
from fusionreg.core.problem import Tensor

from ..opening import Opened
from . import arrays, reference
from .convert import Imported
from .frontend import export, import_exported, import_pt2
from .module import ExportedCallable
from .program import Program, TensorMeta

#: The original on the leaves of a call: leaves it returns, buffers by name, arguments by input name.
Original = Callable[[Sequence[Any]], reference.Outcome]


def open_path(path: str | os.PathLike[str], *, ops: Vocabulary) -> Opened:
    """The model in a ``.pt2`` file. Executes nothing of it; the reference runs its operators in torch one by one."""
    imported = import_pt2(path, ops=ops)
    return _open(Path(path).stem, imported, None, partial(reference.execute, imported.program), Path(path), ops)


def open_object(
    model: Any, example: Sequence[Any] = (), *, ops: Vocabulary, dynamic_shapes: Any = None, drawn: bool = False
) -> Opened:
    """An exported program, or a module with example inputs (``dynamic_shapes`` as ``torch.export.export`` takes them);
    the reference is the original itself.

    ``drawn``: the example inputs say shapes and dtypes alone; all values are random.
    """
    if isinstance(model, torch.export.ExportedProgram):
        imported = import_exported(model, ops=ops)
        sample = model.example_inputs
        leaves = pytree.tree_leaves(sample) if sample is not None else None
        return _open("exported program", imported, leaves, partial(reference.execute, imported.program), model, ops)
    if not isinstance(model, torch.nn.Module):
        raise ModelError("cannot read model", type(model).__name__, "no module", "an ExportedProgram or an nn.Module")
    args, kwargs = _arguments(example)
    if not args and not kwargs:
        raise ModelError(
            "cannot read model", type(model).__name__, "no example inputs", "the arguments of one call",
            "Pass them behind the module, or export it with torch.export.export",
        )  # fmt: skip
    name = type(model).__name__
    imported = import_exported(export(model, args, kwargs, dynamic_shapes), name=name, ops=ops)
    leaves = None if drawn else pytree.tree_leaves((args, kwargs))
    return _open(name, imported, leaves, partial(_run_module, model, imported), model, ops)


def _arguments(example: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """``((args), {kwargs})`` as it is; anything else are positional arguments."""
    if len(example) == 2 and isinstance(example[0], tuple) and isinstance(example[1], dict):
        return example[0], example[1]
    return tuple(example), {}


def _run_module(module: torch.nn.Module, imported: Imported, leaves: Sequence[Any]) -> reference.Outcome:
    """The eager module on the leaves of a call; a copy of it where the program writes anything."""
    program = imported.program
    runner = copy.deepcopy(module) if imported.writes else module
    weight = next((t for t in (*module.parameters(), *module.buffers())), None)
    device = weight.device if weight is not None else torch.device("cpu")
    moved = [v.detach().to(device).clone() if isinstance(v, torch.Tensor) else v for v in leaves]
    args, kwargs = program.call_structure.unflatten(moved)
    with torch.no_grad():
        result = runner(*args, **kwargs)
    names = [spec.name for spec in program.user_inputs]
    return reference.Outcome(
        tuple(pytree.tree_leaves(result)), dict(runner.named_buffers()), dict(zip(names, moved, strict=True))
    )


def _open(
    name: str, imported: Imported, leaves: Sequence[Any] | None, original: Original, artefact: Any, ops: Vocabulary
) -> Opened:
    graph = imported.graph

    def example(seed: int) -> Mapping[str, Any]:
        values: Sequence[Any]
        if leaves is None:
            values = reference.example_inputs(imported.program, seed)
        else:
            values = reference.redrawn(imported.program, leaves, seed) if seed else leaves
        return {k: arrays.to_numpy(v) for k, v in imported.inputs(values).items()}

    def run(inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        try:
            outcome = original(_leaves(imported, inputs))
        except FusionregError:
            raise
        except Exception as e:  # the module's own code
            said = f"{type(e).__name__}: {(str(e).strip().splitlines() or [''])[0]}"
            raise ModelError("no reference", name, said, "a model that runs on these inputs") from e
        found: dict[str, Any] = {}
        for result, leaf in zip(imported.results, outcome.leaves, strict=True):
            if result.index >= 0:
                found[graph.outputs[result.index]] = leaf
        for write in imported.writes:
            written = outcome.buffers if write.kind == "buffer" else outcome.inputs
            found[graph.outputs[write.index]] = written[write.target]
        return {k: arrays.to_numpy(torch.as_tensor(v)) for k, v in found.items()}

    def wrap(model: Any) -> ExportedCallable:
        return ExportedCallable(imported, lambda given: model(*(given[n] for n in graph.inputs)), model)

    lifted = lift(graph, ops)
    return Opened(name, lifted, example, run, wrap=wrap, original=artefact, strides=_strides(imported.program, lifted))


def _strides(program: Program, graph: Graph) -> FrozenDict[str, tuple[int, ...]]:
    """How values lay when the program was recorded, where that was not row by row: what computes the rest keeps it; and
    how its weights lie."""
    found = {}
    for name, meta in program.metas.items():
        value = graph.values.get(name)
        if value is None or not isinstance(meta, TensorMeta) or meta.strides is None or value.shape != meta.shape:
            continue
        shape = tuple(d for d in meta.shape if isinstance(d, int))
        strides = tuple(s for s in meta.strides if isinstance(s, int))
        known = len(shape) == len(strides) == len(meta.shape)
        if known and strides != Tensor.contiguous(meta.dtype, shape).strides:
            found[name] = strides
    for name, array in graph.constants.items():
        if not array.flags.c_contiguous and array.size:  # the device has it in the order that it is in here
            found[name] = tuple(s // array.itemsize for s in np.empty_like(array).strides)
    return FrozenDict(found)


def _leaves(imported: Imported, inputs: Mapping[str, Any]) -> list[Any]:
    """The leaves of a call from arrays by graph input name."""
    leaves: list[Any] = []
    for spec in imported.program.user_inputs:
        if spec.kind == "literal":
            leaves.append(spec.value)
            continue
        array = inputs[spec.name]
        tensor = array if isinstance(array, torch.Tensor) else arrays.from_numpy(array)
        leaves.append(tensor.item() if spec.name in imported.numbers else tensor)
    return leaves
