"""A traced graph of aten calls → a :class:`Program` without writes, and what was recorded behind its names."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from fusionreg.core.errors import ModelError
from fusionreg.core.frozen import EMPTY, FrozenDict

from .. import schemas, source
from ..functionalize import functionalize
from ..program import Call, InputSpec, NumberMeta, OutputSpec, Program, Ref, refs
from ..read_fx import GraphReader
from ..structure import Structure
from . import random

#: How targets of calls to operators of other libraries begin in a program; a number follows.
FOREIGN = "foreign."


@dataclass(frozen=True)
class Traced:
    """A traced graph, read.

    Attributes:
        program: its calls, none of which writes; what it writes to its inputs is among the outputs.
        values: by name of the program: the fake tensor or number that was recorded. Names that came about by removing
            writes are missing.
        constants: input name → tensor, of tensors that the traced code made or held.
        foreign: target → function, of operators of other libraries; their arguments are named by position.
    """

    program: Program
    values: Mapping[str, Any]
    constants: Mapping[str, torch.Tensor]
    foreign: Mapping[str, Callable[..., Any]]

    @property
    def arguments(self) -> tuple[InputSpec, ...]:
        """The inputs that a caller gives, in order."""
        return tuple(s for s in self.program.inputs if s.name not in self.constants)


def read(module: torch.fx.GraphModule, name: str) -> Traced:
    """Reads the graph of ``module``, which stays as it is.

    Raises:
        ModelError: a write that has no inverse here, or one to memory that is seen elsewhere; an operator of another
            library that writes or gives views.
    """
    module = _copied(module)
    random.describe(module.graph)
    reader = _Reader(name)
    constants = _inputs_for_constants(module)
    inputs = []
    for node in module.graph.find_nodes(op="placeholder"):
        value = constants.get(node.name, node.meta.get("val"))
        literal = value is None or isinstance(value, int | float | str)
        inputs.append(InputSpec(node.name, "literal", value=value) if literal else InputSpec(node.name, "user"))
        reader.taken.add(node.name)
        if not literal:
            reader.note(node.name, value)
    results = reader.graph(module.graph, module)
    program = Program(
        name=name, inputs=tuple(inputs), outputs=tuple(OutputSpec("user", r) for r in results),
        calls=tuple(reader.calls), metas=FrozenDict(reader.metas), weights=EMPTY,
        call_structure=Structure(None), result_structure=Structure(None),
    )  # fmt: skip
    pure = functionalize(program)
    _check_sharing(pure, reader.values)
    return Traced(pure, reader.values, constants, reader.foreign)


_VALUES = (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool, int, float, type(None))


class _Reader(GraphReader):
    """Takes operators of other libraries as they are."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.foreign: dict[str, Callable[..., Any]] = {}

    def _placeholder(self, node: torch.fx.Node) -> Any:
        return Ref(node.name) if node.name in self.values else node.meta.get("val")

    def note(self, name: str, value: Any) -> None:
        """Lists within lists and generators have no form of their own: what reads them is an operator of others."""
        if isinstance(value, _VALUES):
            super().note(name, value)
        else:
            self.values[name], self.metas[name] = value, NumberMeta("bool", name)

    def call(self, node: torch.fx.Node, env: dict[torch.fx.Node, Any]) -> Any:
        target: Any = node.target
        higher = isinstance(target, torch._ops.HigherOrderOperator) or target is operator.getitem
        if not higher and (not isinstance(target, torch._ops.OpOverload) or schemas.known(target)):
            return super().call(node, env)
        where = source.from_trace(node.meta.get("stack_trace"), "")
        arguments = {str(i): self.argument(a, env) for i, a in enumerate(node.args)}
        arguments |= {k: self.argument(v, env) for k, v in node.kwargs.items()}
        if any(isinstance(a, torch.nn.Module) for a in arguments.values()) or (not higher and _impure(target._schema)):
            raise ModelError("cannot rewrite", self.name, f"{target} at {where}", "operators that only compute")
        key = f"{FOREIGN}{len(self.foreign)}"
        self.foreign[key] = target
        names, several = self.results(node)
        self.calls.append(Call(key, FrozenDict(arguments), names, where))
        return tuple(Ref(n) for n in names) if several else (Ref(names[0]) if names else None)


def _impure(schema: Any) -> bool:
    """Whether an operator writes, or gives views."""
    return bool(schema.is_mutable) or any(r.alias_info is not None for r in schema.returns)


def _copied(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    graph = torch.fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    return torch.fx.GraphModule(module, graph)


def _inputs_for_constants(module: torch.fx.GraphModule) -> dict[str, torch.Tensor]:
    """Makes the tensors that the graph holds its inputs; returns them by the names of those."""
    found: dict[str, torch.Tensor] = {}
    first = next(iter(module.graph.nodes))
    for node in module.graph.find_nodes(op="get_attr"):
        value = module
        for part in str(node.target).split("."):
            value = getattr(value, part)
        if isinstance(value, torch.Tensor):
            if isinstance(value, FakeTensor) or torch._C._functorch.is_functorch_wrapped_tensor(value):
                raise ModelError("cannot rewrite", "a graph", "a value that the trace did not see come about", "none")
            with module.graph.inserting_before(first):
                held = module.graph.placeholder(node.name)
            found[held.name] = value
            node.replace_all_uses_with(held)
            module.graph.erase_node(node)
    return found


def _check_sharing(program: Program, values: Mapping[str, Any]) -> None:
    """What is written back to an input at the end must be seen through nothing that left before, but for the input
    itself: where a write's result is returned, that is the input."""
    written = {o.target for o in program.outputs if o.kind == "input"}
    if not written:
        return
    stores = {s.name: _storage(values.get(s.name)) for s in program.inputs}
    shared = [n for n in written for m, s in stores.items() if m != n and s is not None and s == stores[n]]
    tainted = written | {name for o in program.outputs if o.kind == "input" for name in refs(o.value)}
    for call in program.calls:
        slot = schemas.aliased(call.target) if call.target.startswith("aten.") else ""
        base = call.args.get(slot) if slot else None
        if isinstance(base, Ref) and base.name in tainted:
            tainted.update(filter(None, call.outputs))
    itself = {n for n, target in returned(program).items() if stores[target] in {_storage(values.get(n))} - {None}}
    leaving = [n for o in program.outputs if o.kind == "user" for n in refs(o.value) if n in tainted - itself]
    if shared or leaving:
        name = (shared or sorted(written))[0]
        raise ModelError(
            "cannot rewrite", program.name, f"a write to {name}, whose memory is seen elsewhere", "no such write"
        )


def returned(program: Program) -> dict[str, str]:
    """What is written back as a whole → the input that it is written to."""
    return {o.value.name: o.target for o in program.outputs if o.kind == "input" and isinstance(o.value, Ref)}


def _storage(value: Any) -> int | None:
    try:
        return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None
    except (NotImplementedError, RuntimeError):
        return None
