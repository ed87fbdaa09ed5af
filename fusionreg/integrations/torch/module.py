"""A converted program as a callable: the arguments and results of the module it came from, tensors in and out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fusionreg.core.errors import ArgumentError

from . import arrays, schemas, symbols
from .convert import Imported
from .program import Meta, NumberMeta, TensorMeta

#: Runs a graph: arrays by input name → arrays by output name. On the CPU it is given NumPy views of the tensors'
#: memory, on a GPU the tensors themselves.
Execute = Callable[[Mapping[str, Any]], Mapping[str, Any]]


class ExportedCallable:
    """Called like the module that was exported; computes through ``execute``.

    Buffers that the program writes live here, as copies: the module they came from is never touched. Arguments that
    the program writes in place are written. It has no backward: an argument that requires grad is refused while
    gradients are recorded, rather than silently detached. Ambient autocast has no effect on it: dtypes are those of
    the export.

    Args:
        imported: the converted program.
        execute: runs the graph, fused or not.
        model: the fused model behind ``execute``, for a look at its plan and sites.
    """

    def __init__(self, imported: Imported, execute: Execute, model: Any = None) -> None:
        self.imported = imported
        self.model = model
        self._execute = execute
        weights = imported.program.weights
        self._states = {name: weights[target].detach().clone() for name, target in imported.states.items()}

    @property
    def sites(self) -> tuple[Any, ...]:
        """Where fusions were applied, with what happened there at the last call."""
        return tuple(self.model.sites) if self.model is not None else ()

    @property
    def buffers(self) -> dict[str, torch.Tensor]:
        """The buffers that calls have written, by their name in the module."""
        return {self.imported.states[name]: value for name, value in self._states.items()}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the module returns for these arguments.

        Raises:
            ArgumentError: arguments nested, typed, shaped or placed otherwise than the program takes them.
        """
        program = self.imported.program
        leaves = program.call_structure.flatten_call(args, kwargs, program.argument_names, program.name)
        given = self.bind(leaves)
        device = _device(given.values(), program.name)
        self._states = {name: value.to(device) for name, value in self._states.items()}
        inputs = {**given, **self._states}
        on_cpu = device.type == "cpu"
        outputs = self._execute({k: _to_array(v, on_cpu) for k, v in inputs.items()})
        graph = self.imported.graph
        ready: dict[str, Any] = {}
        for name in graph.outputs:
            if name not in ready:
                ready[name] = inputs[name] if name in inputs else _to_tensor(outputs[name])
        values = [ready[name] for name in graph.outputs]
        results = [_leaf(values[r.index], r.number) if r.index >= 0 else r.value for r in self.imported.results]
        self._write(values, given)
        return program.result_structure.unflatten(results)

    def bind(self, leaves: Sequence[Any]) -> dict[str, Any]:
        """Tensors (and 0-d tensors for numbers) by graph input name; numbers fixed at export are checked."""
        program = self.imported.program
        specs = program.user_inputs
        if len(leaves) != len(specs):
            raise ArgumentError("bad call of", program.name, f"{len(leaves)} arguments", f"{len(specs)}")
        bound: dict[str, Any] = {}
        extents: dict[str, int] = {}
        for spec, leaf in zip(specs, leaves, strict=True):
            whom = f"{program.name}, argument {spec.name or spec.value!r}"
            if spec.kind == "literal":
                if not _same(leaf, spec.value):
                    raise ArgumentError("bad call of", whom, repr(leaf), f"{spec.value!r}, fixed at export")
                continue
            bound[spec.name] = _tensor(leaf, program.metas[spec.name], whom)
            self._agree(program.metas[spec.name], bound[spec.name], extents, whom)
        return bound

    def _agree(self, meta: Meta, tensor: torch.Tensor, extents: dict[str, int], whom: str) -> None:
        """Symbolic axes have one extent throughout a call, and one in their range."""
        if not isinstance(meta, TensorMeta):
            return
        for axis, (name, extent) in enumerate(zip(meta.shape, tensor.shape, strict=True)):
            if isinstance(name, int):
                continue
            wanted = extents.setdefault(name, extent) if name.isidentifier() else symbols.extent(name, extents)
            low, high = self.imported.program.ranges.get(name, (0, None))
            if wanted is not None and wanted != extent:
                expected = f"{name} = {wanted}"
            elif extent < low or (high is not None and extent > high):
                expected = f"{name} in {low} … {'' if high is None else high}"
            else:
                continue
            raise ArgumentError("wrong shape in a call of", whom, f"axis {axis} is {extent}", expected, axis=axis)

    def _write(self, values: Sequence[Any], given: Mapping[str, Any]) -> None:
        names = {target: name for name, target in self.imported.states.items()}
        fresh: dict[str, torch.Tensor] = {}
        for write in self.imported.writes:
            if write.kind == "buffer":
                fresh[names[write.target]] = values[write.index]
            elif values[write.index] is not given[write.target]:
                given[write.target].copy_(values[write.index])
        self._states.update(fresh)


def _same(found: Any, fixed: Any) -> bool:
    if isinstance(found, torch.Tensor) or type(found) is not type(fixed):
        return False
    return bool(found == fixed) or (found != found and fixed != fixed)


def _tensor(leaf: Any, meta: Any, whom: str) -> torch.Tensor:
    if isinstance(meta, NumberMeta):
        if isinstance(leaf, torch.Tensor) or not isinstance(leaf, int | float):
            raise ArgumentError("bad call of", whom, type(leaf).__name__, f"a number ({meta.kind})")
        return torch.tensor(leaf, dtype={"int": torch.int64, "float": torch.float64, "bool": torch.bool}[meta.kind])
    assert isinstance(meta, TensorMeta)
    if not isinstance(leaf, torch.Tensor):
        raise ArgumentError("bad call of", whom, type(leaf).__name__, f"a {meta.dtype} tensor")
    found = schemas.dtype_name(leaf.dtype)
    if found != meta.dtype:
        raise ArgumentError(
            "wrong dtype in a call of", whom, found, meta.dtype, "Cast the tensor, or export again", dtype=found
        )
    fits = len(leaf.shape) == len(meta.shape) and all(
        not isinstance(d, int) or d == s for d, s in zip(meta.shape, leaf.shape, strict=True)
    )
    if not fits:
        raise ArgumentError(
            "wrong shape in a call of", whom, str(list(leaf.shape)), str(list(meta.shape)),
            "Export with dynamic_shapes for other extents", shape=tuple(leaf.shape),
        )  # fmt: skip
    if leaf.requires_grad and torch.is_grad_enabled():
        raise ArgumentError(
            "no backward in", whom, "a tensor that requires grad", "inference", "Call it under torch.no_grad()"
        )
    return leaf


def _device(tensors: Any, whom: str) -> torch.device:
    devices = {t.device for t in tensors if t.dim() or t.device.type != "cpu"}
    if len(devices) > 1:
        raise ArgumentError("mixed devices in a call of", whom, ", ".join(sorted(map(str, devices))), "one device")
    return devices.pop() if devices else torch.device("cpu")


def _to_array(tensor: torch.Tensor, on_cpu: bool) -> Any:
    return arrays.to_numpy(tensor) if on_cpu else tensor


def _to_tensor(array: Any) -> torch.Tensor:
    return array if isinstance(array, torch.Tensor) else arrays.from_numpy(array)


def _leaf(value: torch.Tensor, number: bool) -> Any:
    return value.item() if number else value
