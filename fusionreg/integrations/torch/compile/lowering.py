"""A program of aten calls → the lifted graph that fusions are looked for in, and which of its values is which.

Unlike an export, nothing is refused here: what has no form in the vocabulary stands in the graph as an operator that
nobody knows, so that all else can be matched around it.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from fusionreg.core.errors import ModelError
from fusionreg.core.frozen import FrozenDict
from fusionreg.core.ir import Graph
from fusionreg.core.lift import lift
from fusionreg.core.lift.widening import widen

from ..aten import SILENT
from ..convert import emit_call
from ..emitter import Emitter, N, V
from ..operators import Operators
from ..operators.schema import NAMESPACE
from ..program import Call, NumberMeta, Program, Ref, TensorMeta, refs
from .reading import Traced
from .unfolding import unfold

OPAQUE = "torch::Opaque"
#: Calls that change no value, and yet must stand between operators: gradients end there.
BARRIERS = frozenset({"aten.detach.default", "aten.detach_copy.default"})
_COPIES = frozenset({"aten.clone.default", "aten.contiguous.default"})
_DROPOUT = "aten.dropout.default"


@dataclass(frozen=True)
class Lowered:
    """The graph of a traced program.

    Attributes:
        graph: lifted.
        names: value of the program → value of the graph, where the graph still has it.
        seeds: inputs of the graph that stand for seed and offset of a dropout.
        opaque: targets that have no form in the vocabulary.
    """

    graph: Graph
    names: Mapping[str, str]
    seeds: frozenset[str]
    opaque: tuple[str, ...]


def lower(traced: Traced, operators: Operators, differentiated: bool, widening: bool) -> Lowered:
    """Emits every call and lifts the result; calls of ``operators`` as the operators that they stand for.

    Args:
        traced: the program.
        operators: of the registry.
        differentiated: gradients will be recorded, and end at ``detach``.
        widening: casts to float32 inside of a site are moved to its operands: what stood before them is not rounded.
    """
    return _Lowering(traced, operators, differentiated).run(widening)


class _Lowering:
    def __init__(self, traced: Traced, operators: Operators, differentiated: bool) -> None:
        self.traced, self.operators, self.differentiated = traced, operators, differentiated
        self.program: Program = traced.program
        self.ops = operators.registry.catalog.ops
        self.e = Emitter(self.program.name, self.ops)
        self.seeds: list[V] = []
        self.opaque: dict[str, None] = {}
        self.read: set[str] = set()

    def run(self, widening: bool) -> Lowered:
        e = self.e
        for spec in self.program.inputs:
            e.env[spec.name] = self._input(spec.name) if spec.kind == "user" else spec.value
        self.read = {name for call in self.program.calls for name in call.refs()}
        self.read.update(name for o in self.program.outputs for name in refs(o.value))
        for call in self.program.calls:
            if call.target not in SILENT:
                self._call(call)
        results = [e.env[name] for o in self.program.outputs for name in refs(o.value)]
        kept = list(dict.fromkeys(v for v in results if isinstance(v, V)))
        raw = e.build(kept)
        graph = lift(raw, self.ops, differentiated=self.differentiated)
        if widening:
            graph = widen(graph, self.ops)
        names = {n: v.name for n, v in e.env.items() if isinstance(v, V) and v.name in graph.values}
        seeds = frozenset(v.name for v in self.seeds)
        return Lowered(graph, names, seeds, tuple(self.opaque))

    def _input(self, name: str) -> V:
        meta = self.program.metas[name]
        if isinstance(meta, NumberMeta):
            kinds = {"int": "int64", "float": "float64", "bool": "bool"}
            value = V(kinds[meta.kind], (), name, number=str(meta.value))
        else:
            value = V(meta.dtype, meta.shape, name)
        self.e.inputs.append(value)
        return value

    def _call(self, call: Call) -> None:
        e = self.e
        p = call.args.get("p")
        if call.target == _DROPOUT and call.args.get("train") and isinstance(p, int | float) and 0 < p <= 1:
            self._dropout(call)
            return
        if self._fused(call):
            return
        if not ((call.target in BARRIERS and self.differentiated) or _moves(call)):
            made = len(e.nodes)
            try:
                emit_call(e, call, self.program, self.read)
                return
            except ModelError:
                del e.nodes[made:]
        self._unknown(call)

    def _fused(self, call: Call) -> bool:
        """A call of a fusion, as its operators; whether it is one, and could be taken apart."""
        function = self.traced.foreign.get(call.target)
        fusion = None if function is None else self.operators.fusion_of(function)
        return fusion is not None and unfold(self.e, call, self.program, self.operators.registry.catalog[fusion])

    def _dropout(self, call: Call) -> None:
        """Dropout as our own operator, its seed and offset a further input of the graph."""
        e, x = self.e, self.e.env[call.args["input"].name]
        e.call, e.metas = call, (self.program.metas[call.outputs[0]],)
        seed = V("int64", (2,), f"rng.{call.outputs[0]}")
        e.inputs.append(seed)
        self.seeds.append(seed)
        y = e.op("fusionreg::Dropout", x, seed, p=float(call.args["p"]))
        y.name = call.outputs[0]
        e.env[call.outputs[0]] = y

    def _unknown(self, call: Call) -> None:
        e = self.e
        known = self.traced.foreign.get(call.target)
        told = getattr(known, "namespace", "") != NAMESPACE and known is not operator.getitem and not _moves(call)
        if told:
            self.opaque[str(known or call.target)] = None
        given = [e.env.get(name) for name in dict.fromkeys(call.refs())]
        operands: list[V | None] = [v for v in given if isinstance(v, V)]
        results = []
        for name in call.outputs:
            meta = self.program.metas.get(name)
            if isinstance(meta, NumberMeta):
                kinds = {"int": "int64", "float": "float64", "bool": "bool"}
                results.append(V(kinds[meta.kind], (), name, number=str(meta.value)))
            elif isinstance(meta, TensorMeta):
                results.append(V(meta.dtype, meta.shape, name))
            else:
                results.append(V("float32", (), name))
            e.env[name] = results[-1]
        label = next(iter(call.outputs), "")
        node = N(OPAQUE, operands, results, FrozenDict({"target": call.target}), call.source, label)
        for r in results:
            r.node = node
        e.nodes.append(node)


def _moves(call: Call) -> bool:
    """Whether it moves a map to channels last: what reads it is planned, and called, as it lies then."""
    return call.target in _COPIES and call.args.get("memory_format") is torch.channels_last


def visible(lowered: Lowered, program: Program) -> Mapping[str, str]:
    """Value of the graph → the first value of the program that is it."""
    found: dict[str, str] = {}
    order = [s.name for s in program.inputs] + [o for c in program.calls for o in c.outputs if o]
    for name in order:
        if name in lowered.names:
            found.setdefault(lowered.names[name], name)
    return found


__all__ = ["OPAQUE", "Lowered", "Ref", "lower", "visible"]
