"""Calls of fusions in a program, as the operators that they stand for: a larger fusion may take them in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fusionreg.core.errors import FusionregError
from fusionreg.core.ir import Graph
from fusionreg.core.pattern.instantiate import instantiate
from fusionreg.core.registry.entries import FusionEntry

from ..convert import bind_results
from ..emitter import Emitter, V
from ..program import Call, Program, Ref


def unfold(e: Emitter, call: Call, program: Program, entry: FusionEntry) -> bool:
    """Emits the operators of a fused call and binds its results; False, and nothing of it, where that cannot be."""
    places = dict(enumerate(entry.inputs))
    given = {places[int(k)] if k.isdigit() else k: v for k, v in call.args.items()}
    tensors = {n: e.env[v.name] for n in entry.inputs if isinstance(v := given.pop(n, None), Ref)}
    made = len(e.nodes)
    e.call, e.metas = call, tuple(program.metas.get(o) for o in call.outputs)
    try:
        values = _emit(e, _graph(e, entry, tensors, given), tensors)
        bind_results(e, call, [values[o] for o in entry.outputs])
    except FusionregError:
        del e.nodes[made:]
        return False
    return True


def _graph(e: Emitter, entry: FusionEntry, tensors: Mapping[str, V], keywords: Mapping[str, Any]) -> Graph:
    spec, said = entry.spec, {k: v for k, v in keywords.items() if v is not None}
    dtypes = {k: v[0] for k, v in spec.dtypes.items() if len(v) == 1}
    dtypes |= {entry.inputs[n].dtype: v.dtype for n, v in tensors.items()}
    return instantiate(
        entry.patterns[0], spec, ops=e.ops,
        dtypes=dtypes | {k: v for k, v in said.items() if k in spec.dtypes},
        shapes={n: v.shape for n, v in tensors.items()},
        choices={k: v for k, v in said.items() if k in entry.choices},
        attributes={k: v for k, v in said.items() if k in spec.attributes},
        absent=[n for n in entry.inputs if n not in tensors],
    )  # fmt: skip


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
