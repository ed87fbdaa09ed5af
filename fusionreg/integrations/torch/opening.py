"""PyTorch models as :class:`~fusionreg.integrations.opening.Opened`: lifted graph, inputs, reference, callable."""

from __future__ import annotations

import copy
import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from fusionreg.core.errors import FusionregError, ModelError
from fusionreg.core.lift import lift
from fusionreg.core.ops import Vocabulary

from ..opening import Opened
from . import arrays, reference
from .convert import Imported
from .frontend import export, import_exported, import_pt2
from .module import ExportedCallable

#: The original on the leaves of a call: leaves it returns, buffers by name, arguments by input name.
Original = Callable[[Sequence[Any]], reference.Outcome]


def open_path(path: str | os.PathLike[str], *, ops: Vocabulary) -> Opened:
    """The model in a ``.pt2`` file. Executes nothing of it; the reference runs its operators in torch one by one."""
    imported = import_pt2(path, ops=ops)
    return _open(Path(path).stem, imported, None, partial(reference.execute, imported.program), Path(path), ops)


def open_object(
    model: Any, example: Sequence[Any] = (), *, ops: Vocabulary, dynamic_shapes: Any = None
) -> Opened:
    """An exported program, or a module with example inputs (``dynamic_shapes`` as ``torch.export.export`` takes them);
    the reference is the original itself."""
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
    leaves = pytree.tree_leaves((args, kwargs))
    return _open(name, imported, leaves, partial(_run_module, model, imported), model, ops)


def open_target(target: str, *, ops: Vocabulary) -> Opened:
    """``package.module:callable``; see :func:`resolve`."""
    model, example = resolve(target)
    return open_object(model, example, ops=ops)


def resolve(target: str) -> tuple[Any, tuple[Any, ...]]:
    """Imports ``package.module``, calls ``callable()`` and gives its (module, example arguments).

    **This runs code**: that of the module, of everything it imports and of the callable. The current folder is
    importable meanwhile. The callable returns a module and its arguments (a tuple, or one tensor), those and keyword
    arguments as a dict, or an exported program.

    Raises:
        ModelError: no such module or callable, it fails, or it returns something else.
    """
    path, _, attribute = target.partition(":")
    if not all(part.isidentifier() for part in (*path.split("."), *attribute.split("."))):
        raise ModelError("cannot read model", target, "no import path", "package.module:callable")
    try:
        with _current_folder():
            found: Any = importlib.import_module(path)
            for part in attribute.split("."):
                found = getattr(found, part)
            made = found()
    except FusionregError:
        raise
    except Exception as e:  # foreign code may raise anything
        found = f"{type(e).__name__}: {e}"
        raise ModelError("cannot read model", target, found, "a callable that builds a model") from e
    if isinstance(made, torch.export.ExportedProgram):
        return made, ()
    if isinstance(made, tuple) and len(made) in (2, 3) and isinstance(made[0], torch.nn.Module):
        args = tuple(made[1]) if isinstance(made[1], tuple | list) else (made[1],)
        return made[0], (args, dict(made[2])) if len(made) == 3 else args
    raise ModelError("cannot read model", target, f"it returned a {type(made).__name__}", "(module, example arguments)")


@contextmanager
def _current_folder() -> Iterator[None]:
    folder = os.getcwd()
    added = folder not in sys.path and "" not in sys.path
    if added:
        sys.path.insert(0, folder)
    try:
        yield
    finally:
        if added and folder in sys.path:
            sys.path.remove(folder)


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
        values = reference.example_inputs(imported.program, seed) if leaves is None else leaves
        return {k: arrays.to_numpy(v) for k, v in imported.inputs(values).items()}

    def run(inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        outcome = original(_leaves(imported, inputs))
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

    return Opened(name, lift(graph, ops), example, run, wrap=wrap, original=artefact)


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
