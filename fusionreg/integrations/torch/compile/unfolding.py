"""Calls of fusions in a program, as the operators that they stand for: a larger fusion may take them in."""

from __future__ import annotations

from collections.abc import Mapping

from fusionreg.core.errors import FusionregError
from fusionreg.core.ir import Graph
from fusionreg.core.registry.entries import FusionEntry

from ..convert import bind_results
from ..emitter import Emitter, V
from ..operators.chains import operators_of
from ..program import Call, Program, Ref


def unfold(e: Emitter, call: Call, program: Program, entry: FusionEntry) -> bool:
    """Emits the operators of a fused call and binds its results; False, and nothing of it, where that cannot be."""
    places = dict(enumerate(entry.inputs))
    given = {places[int(k)] if k.isdigit() else k: v for k, v in call.args.items()}
    tensors = {n: e.env[v.name] for n in entry.inputs if isinstance(v := given.pop(n, None), Ref)}
    made = len(e.nodes)
    e.call, e.metas = call, tuple(program.metas.get(o) for o in call.outputs)
    try:
        types, shapes = {n: v.dtype for n, v in tensors.items()}, {n: v.shape for n, v in tensors.items()}
        values = _emit(e, operators_of(entry, e.ops, types, shapes, given), tensors)
        bind_results(e, call, [values[o] for o in entry.outputs])
    except FusionregError:
        del e.nodes[made:]
        return False
    return True


def _emit(e: Emitter, graph: Graph, tensors: Mapping[str, V]) -> Mapping[str, V]:
    """The values of the graph, by name, in what is being emitted."""
    values = dict(tensors)
    for name, array in graph.constants.items():
        values[name] = e.const(array, graph.values[name].dtype)
    for node in graph.nodes:
        given = [values[i] if i else None for i in node.inputs]
        found = e.op(node.op, *given, outputs=len(node.outputs), **node.attrs)
        results = found if isinstance(found, tuple) else (found,)
        values.update((n, v) for n, v in zip(node.outputs, results, strict=True) if n)
    return values
