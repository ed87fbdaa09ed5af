"""A traced program with its chosen fusions as calls: a new fx graph of the same inputs and outputs.

Values are made on demand, from the outputs back: what a fused call covers is not asked for any more and so is not
there. All other calls stay as they were traced.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fusionreg.core.errors import ModelError
from fusionreg.core.ir import Graph
from fusionreg.core.matcher.match import Match

from .. import schemas
from ..aten import SILENT
from ..operators import Operators
from ..program import Call, NumberMeta, Program, Ref, TensorMeta, refs
from .glue import constant, glued, make, operands
from .lowering import Lowered, visible
from .reach import place
from .reading import FOREIGN, Traced


def weave(
    traced: Traced, lowered: Lowered, chosen: Sequence[Match], operators: Operators, first_site: int
) -> torch.fx.Graph:
    """The graph of ``traced`` with the matches of ``chosen`` fused.

    Args:
        traced: what was traced.
        lowered: its graph, in which the matches were found.
        chosen: matches that :meth:`.reach.Reach.refusal` has nothing against.
        operators: where the calls come from.
        first_site: number of the first site with a dropout; each gets one of its own.
    """
    return _Weaver(traced, lowered, chosen, operators, first_site).run()


def dressed(made: torch.fx.GraphModule, like: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """``made``, with what compilers read off inputs, results and the module that it takes the place of."""
    given = {n.name: n.meta for n in like.graph.find_nodes(op="placeholder")}
    for node in made.graph.find_nodes(op="placeholder"):
        node.meta.update(given[node.name])
    (end,), (source,) = made.graph.find_nodes(op="output"), like.graph.find_nodes(op="output")
    end.meta.update(source.meta)
    made.meta.update(like.meta)
    return made


#: What reading makes of ``aten.batch_norm`` in training: it gives the running statistics that the other writes.
_BATCH_NORM = "aten._native_batch_norm_legit_functional.default"


@dataclass
class _Weaver:
    traced: Traced
    lowered: Lowered
    chosen: Sequence[Match]
    operators: Operators
    site: int
    out: torch.fx.Graph = field(default_factory=torch.fx.Graph)
    made: dict[str, Any] = field(default_factory=dict)  # value of the program → node
    woven: dict[str, Any] = field(default_factory=dict)  # value of the graph → node

    def __post_init__(self) -> None:
        self.program: Program = self.traced.program
        self.graph: Graph = self.lowered.graph
        self.visible: Mapping[str, str] = visible(self.lowered, self.program)
        self.calls = {o: c for c in self.program.calls for o in c.outputs if o}
        self.sites = {v: m for m in self.chosen for v in m.outputs.values()}

    def run(self) -> torch.fx.Graph:
        for spec in self.program.inputs:
            self.made[spec.name] = self._placeholder(spec.name)
        needed = self._needed()
        for call in self.program.calls:
            if call.target in SILENT:
                self._emit(call)
            else:
                for name in filter(None, call.outputs):
                    if name in needed:
                        self.value(name)
        results = [self._argument(o.value) for o in self.program.outputs if o.kind == "user"]
        kept: dict[Any, Any] = {}  # what is written back → the input that is it from then on
        for o in self.program.outputs:
            if o.kind == "input" and (new := self._argument(o.value)) is not self.made[o.target]:
                kept[new] = self.out.call_function(torch.ops.aten.copy_.default, (self.made[o.target], new))
        self.out.output(tuple(kept.get(r, r) if isinstance(r, torch.fx.Node) else r for r in results))
        return self.out

    def _placeholder(self, name: str) -> Any:
        if name in self.traced.constants:
            return self.out.get_attr(name)
        return self.out.placeholder(name)

    def _needed(self) -> set[str]:
        """Values of the program that will be asked for, so that they can be made in the order of the program."""
        needed: set[str] = set()
        pending = [n for o in self.program.outputs for n in refs(o.value)]
        pending += [n for c in self.program.calls if c.target in SILENT for n in c.refs()]
        while pending:
            name = pending.pop()
            if name in needed or name in self.made:
                continue
            needed.add(name)
            pending += self._sources(name)
        return needed

    def _sources(self, name: str) -> list[str]:
        """What of the program a value is made of."""
        inner = self.lowered.names.get(name)
        if inner is None or self._site_of(inner) is None:
            return list(self.calls[name].refs())
        found: list[str] = []
        stack = [inner]
        while stack:
            v = stack.pop()
            if v in self.sites:
                stack += self.sites[v].inputs.values()
            elif v in self.visible and self._site_of(v) is None:
                found.append(self.visible[v])
            elif v in self.graph.producers:
                stack += operands(self.graph, self.graph.producers[v]) or ()
        return found

    def _site_of(self, inner: str) -> Match | None:
        """The site whose result a value of the graph is, or is moved from."""
        while inner not in self.sites:
            node = self.graph.producers.get(inner)
            if node is None or not glued(self.graph, node):
                return None
            inner = node.inputs[0]
        return self.sites[inner]

    def value(self, name: str) -> Any:
        """The node of a value of the program."""
        if name not in self.made:
            inner = self.lowered.names.get(name)
            if inner is not None and self._site_of(inner) is not None:
                self.made[name] = self._inner(inner)
            else:
                self._emit(self.calls[name])
            made = self.made[name]
            if isinstance(made, torch.fx.Node) and name in self.traced.values:
                made.meta.setdefault("val", self.traced.values[name])
        return self.made[name]

    def _inner(self, name: str) -> Any:
        """The node of a value of the lifted graph."""
        if name in self.woven:
            return self.woven[name]
        if name in self.sites:
            self._fuse(self.sites[name])
            return self.woven[name]
        if name in self.visible and self._site_of(name) is None:
            made = self.value(self.visible[name])
            if not isinstance(self.program.metas.get(self.visible[name]), NumberMeta):
                return made
            dtype = schemas.torch_dtype(self.graph.values[name].dtype)
            keywords: dict[str, Any] = {"dtype": dtype, "device": place(self.traced)}
            made = self.out.call_function(torch.ops.aten.scalar_tensor.default, (made,), keywords)
        elif name in self.graph.constants:
            value, meta = constant(self.graph, name), self.graph.values[name]
            assert value is not None
            dtype = schemas.torch_dtype(meta.dtype)
            shape = list(meta.shape or ())
            made = self.out.call_function(
                torch.ops.aten.full.default, (shape, value), {"dtype": dtype, "device": place(self.traced)}
            )
        else:
            node = self.graph.producers[name]
            needs = operands(self.graph, node) or ()
            made = make(self.out, [self._inner(i) for i in needs], self.graph, node)
        self.woven[name] = made
        return made

    def _fuse(self, match: Match) -> None:
        entry = self.operators.registry.catalog[match.fusion]
        operands: list[Any] = []
        for tensor in entry.inputs:
            name = match.inputs.get(tensor, "")
            operands.append(None if not name or name in self.lowered.seeds else self._inner(name))
        like = next(o for o in operands if o is not None)
        for i, tensor in enumerate(entry.inputs):
            if match.inputs.get(tensor, "") in self.lowered.seeds:
                operands[i] = self.out.call_function(self.operators.rng, (like, self.site))
                self.site += 1
        keywords = match.keywords(entry.spec)
        function = self.operators.laid(match.fusion) if match.strides else self.operators[match.fusion]
        node = self.out.call_function(function, tuple(operands), keywords)
        several = len(entry.outputs) > 1
        for i, tensor in enumerate(entry.outputs):
            if tensor in match.outputs:
                made = self.out.call_function(operator.getitem, (node, i)) if several else node
                self.woven[match.outputs[tensor]] = made

    def _emit(self, call: Call) -> None:
        if call.target == _BATCH_NORM and call.args.get("training") and call.outputs[1:3] == ("", ""):
            self._batch_norm(call)
            return
        function, args, kwargs = self._function(call)
        node = self.out.call_function(function, args, kwargs)
        recorded = [self.program.metas.get(o) for o in call.outputs]
        listed = len(call.outputs) > 1 or _gives_list(function)
        for i, (name, meta) in enumerate(zip(call.outputs, recorded, strict=True)):
            if name and meta is not None:
                self.made[name] = self.out.call_function(operator.getitem, (node, i)) if listed else node

    def _batch_norm(self, call: Call) -> None:
        """In training, as the model had it: it writes the running statistics where autograd does not mind."""
        names = [a.name for a in torch.ops.aten.batch_norm.default._schema.arguments[:-1]]
        given = [self._argument(call.args.get(n)) for n in names]
        made = self.out.call_function(torch.ops.aten.batch_norm.default, (*given, torch.backends.cudnn.enabled))
        statistics = (given[names.index(n)] for n in ("running_mean", "running_var"))
        self.made.update(zip(filter(None, call.outputs), (made, *statistics), strict=True))

    def _function(self, call: Call) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        if call.target == "aten.view.default":  # a fused result may lie otherwise; where it does not, a view comes out
            viewed = self._argument(call.args["self"]), self._argument(call.args["size"])
            return torch.ops.aten.reshape.default, viewed, {}
        given = {k: self._argument(v) for k, v in call.args.items()}
        if call.target == "aten.copy.default":
            return torch.ops.aten.clone.default, (self._copied(call, given),), {}
        if call.target == "fusionreg.reshape_like.default":
            return torch.ops.aten.reshape_as.default, (given["self"], given["other"]), {}
        if call.target.startswith(FOREIGN):
            places = [k for k in given if k.isdigit()]
            args = tuple(given[k] for k in sorted(places, key=int))
            return self.traced.foreign[call.target], args, {k: v for k, v in given.items() if not k.isdigit()}
        if not call.target.startswith(("aten.", "prims.")):
            return _symbolic(call.target), tuple(given.values()), {}
        overload = schemas.overload(call.target)
        args_: list[Any] = []
        for a in overload._schema.arguments:
            if a.name not in given or a.kwarg_only:
                break
            args_.append(given.pop(a.name))
        return overload, tuple(args_), given

    def _copied(self, call: Call, given: dict[str, Any]) -> Any:
        """What ``aten.copy`` gives, by operators that have a derivative: the source as the target is."""
        target = self.program.metas[call.outputs[0]]
        assert isinstance(target, TensorMeta)
        cast = self.out.call_function(torch.ops.aten.to.dtype, (given["src"], schemas.torch_dtype(target.dtype)))
        return self.out.call_function(torch.ops.aten.expand_as.default, (cast, given["self"]))

    def _argument(self, value: Any) -> Any:
        if isinstance(value, Ref):
            return self.value(value.name)
        if isinstance(value, list | tuple):
            return [self._argument(v) for v in value]
        return value


def _gives_list(function: Any) -> bool:
    schema = getattr(function, "_schema", None)
    return schema is not None and len(schema.returns) == 1 and "List" in str(schema.returns[0].type)


def _symbolic(target: str) -> Any:
    module, _, name = target.rpartition(".")
    found = getattr({"_operator": operator, "math": math, "torch": torch}.get(module), name, None)
    if found is None:
        raise ModelError("cannot rewrite", target, "a function on numbers that is not known", "one of the table")
    return found


__all__ = ["dressed", "weave"]
