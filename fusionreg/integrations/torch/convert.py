"""A neutral program → the graph, and how a caller's tensors meet its inputs and outputs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from fusionreg.core.errors import FusionregError, GraphError
from fusionreg.core.ir import Graph
from fusionreg.core.ops import Vocabulary, default_vocabulary

from . import arrays, schemas
from .aten import SILENT, TABLE
from .decompose import decompose
from .emitter import Emitter, V
from .functionalize import functionalize
from .program import SYMBOLIC, Call, InputSpec, NumberMeta, Program, Ref, TensorMeta, refs


@dataclass(frozen=True)
class Result:
    """One leaf of what a call returns: output ``index`` of the graph (as a number where ``number``), or ``value``."""

    index: int = -1
    value: Any = None
    number: bool = False


@dataclass(frozen=True)
class Write:
    """A buffer (by module name) or an argument (by input name) whose new content is output ``index`` of the graph."""

    kind: Literal["buffer", "input"]
    target: str
    index: int


@dataclass(frozen=True, eq=False)
class Imported:
    """A converted program.

    Attributes:
        graph: raw graph; inputs are the user's tensors and numbers, then the written buffers.
        program: what it was made from, writes and all.
        states: graph input name of each written buffer → its name in the module.
        results: the leaves of what a call returns, in order.
        writes: what a call changes beside returning.
    """

    graph: Graph
    program: Program
    states: dict[str, str]
    results: tuple[Result, ...]
    writes: tuple[Write, ...]

    @property
    def numbers(self) -> frozenset[str]:
        """Graph inputs that the caller passes as numbers."""
        metas = self.program.metas
        return frozenset(s.name for s in self.program.user_inputs if isinstance(metas.get(s.name), NumberMeta))

    def inputs(self, leaves: Sequence[Any]) -> dict[str, torch.Tensor]:
        """Tensors by graph input name for the leaves of a call, the written buffers as the module has them."""
        kinds = {"int": torch.int64, "float": torch.float64, "bool": torch.bool}
        given: dict[str, torch.Tensor] = {}
        for spec, leaf in zip(self.program.user_inputs, leaves, strict=True):
            meta = self.program.metas.get(spec.name)
            if spec.kind == "user":
                given[spec.name] = torch.tensor(leaf, dtype=kinds[meta.kind]) if isinstance(meta, NumberMeta) else leaf
        states = {name: self.program.weights[target].detach().clone() for name, target in self.states.items()}
        return {**given, **states}


def convert(program: Program, ops: Vocabulary | None = None) -> Imported:
    """The graph of a program.

    Raises:
        ModelError: an operator, argument or write that has no form here; names the operator and its line.
    """
    pure = functionalize(program)
    e = Emitter(program.name, ops or default_vocabulary())
    live, calls = _live(pure)
    written = {o.target for o in pure.outputs if o.kind == "buffer"}
    states: dict[str, str] = {}
    for spec in pure.inputs:
        _input(e, pure, spec, written, live, states)
    for call in calls:
        emit_call(e, call, pure, live)
    values: list[V] = []

    def output(value: Any) -> int:
        values.append(value)
        return len(values) - 1

    results: list[Result] = []
    writes: list[Write] = []
    for made in pure.outputs:
        value = e.env[made.value.name] if isinstance(made.value, Ref) else made.value
        if made.kind == "user":
            meta = pure.metas.get(made.value.name) if isinstance(made.value, Ref) else None
            known = not isinstance(value, V)
            results.append(Result(value=value) if known else Result(output(value), number=isinstance(meta, NumberMeta)))
        else:
            writes.append(Write(made.kind, made.target, output(value)))
    return Imported(e.build(values), program, states, tuple(results), tuple(writes))


def _live(program: Program) -> tuple[set[str], list[Call]]:
    """Names that the outputs need, and the calls that make them."""
    needed = {name for o in program.outputs for name in refs(o.value)}
    kept: list[Call] = []
    for call in reversed(program.calls):
        if call.target not in SILENT and any(o in needed for o in call.outputs if o):
            kept.append(call)
            needed.update(call.refs())
    kept.reverse()
    return needed, kept


def _input(
    e: Emitter, program: Program, spec: InputSpec, written: set[str], live: set[str], states: dict[str, str]
) -> None:
    if spec.kind == "literal":
        e.env[spec.name] = spec.value
        return
    meta = program.metas[spec.name]
    if spec.kind == "user":
        if isinstance(meta, NumberMeta):
            kinds = {"int": "int64", "float": "float64", "bool": "bool"}
            value = V(kinds[meta.kind], (), spec.name, number=str(meta.value))
        else:
            value = V(meta.dtype, meta.shape, spec.name)
        e.inputs.append(value)
        e.env[spec.name] = value
        return
    assert isinstance(meta, TensorMeta)
    if spec.target in written:
        states[spec.name] = spec.target
        e.env[spec.name] = V(meta.dtype, meta.shape, spec.name)
        e.inputs.append(e.env[spec.name])
    elif spec.name in live:
        tensor = program.weights[spec.target]
        key = arrays.memory_key(tensor, spec.target)
        array = arrays.to_numpy(tensor, writable=False)
        e.env[spec.name] = e.weight(spec.target, array, meta.dtype, key)


def emit_call(e: Emitter, call: Call, program: Program, read: Collection[str] | None = None) -> None:
    """Emits one call and binds its results; unknown operators are decomposed first.

    ``read``: the names that somebody reads, where that is known: for further results that nobody does, there need not
    be a form.
    """
    emit = TABLE.get(call.target)
    if emit is None:
        _spell_out(e, call, program)
        return
    e.call = call
    e.metas = tuple(program.metas.get(o) for o in call.outputs)
    given = {k: _argument(v, e) for k, v in call.args.items()}
    if call.target not in SYMBOLIC and not call.target.startswith("fusionreg."):
        given = {**schemas.defaults(call.target), **given}
    try:
        made = emit(e, **given)
    except GraphError as error:
        raise e.refuse(error.found, error.expected) from error
    except (AttributeError, LookupError, TypeError, ValueError, ArithmeticError, MemoryError) as error:
        if isinstance(error, FusionregError):
            raise
        raise e.refuse(
            f"arguments that do not fit ({type(error).__name__}: {error})", "a call as torch accepts it"
        ) from error
    if made is NotImplemented:
        _spell_out(e, call, program)
        return
    bind_results(e, call, made if isinstance(made, tuple | list) else (made,), read)


def bind_results(e: Emitter, call: Call, made: Sequence[Any], read: Collection[str] | None = None) -> None:
    """Gives the values that a call became its names; ``read`` as for :func:`emit_call`."""
    for i, (name, value, meta) in enumerate(zip(call.outputs, made, e.metas, strict=False)):
        if name and (value is not None or i == 0 or read is None or name in read):
            e.env[name] = _bound(e, name, value, meta)


def _spell_out(e: Emitter, call: Call, program: Program) -> None:
    for inner in decompose(call, program, e):
        emit_call(e, inner.call, inner.program)


def _bound(e: Emitter, name: str, value: Any, meta: Any) -> Any:
    """The value under aten's name, its recorded type checked and kept."""
    if isinstance(meta, NumberMeta):
        if isinstance(meta.value, int | float) and not isinstance(meta.value, bool):
            return meta.value
        if isinstance(value, V):
            value.number = value.number or str(meta.value)
            value.name = value.name or name
        return value
    if not isinstance(value, V):
        raise e.refuse(f"result {name} is not available", "a result that ONNX's operator gives")
    if meta is not None:
        if value.dtype != meta.dtype or value.rank != len(meta.shape):
            raise e.refuse(f"{name} came out as {value}", f"{meta.dtype}{list(meta.shape)}, which export recorded")
        if value.node is not None and not value.name:
            value.shape, value.name = meta.shape, name
    return value


def _argument(value: Any, e: Emitter) -> Any:
    if isinstance(value, Ref):
        return e.env[value.name]
    if isinstance(value, list | tuple):
        return tuple(_argument(item, e) for item in value)
    return value
