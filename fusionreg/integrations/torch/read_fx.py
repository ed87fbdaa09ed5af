"""``torch.export.ExportedProgram`` → :class:`Program`. Reads the fx graph; changes and runs nothing."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.export.graph_signature import InputKind, OutputKind

from fusionreg.core.errors import ModelError
from fusionreg.core.frozen import FrozenDict
from fusionreg.core.ir import Dim

from . import schemas, source
from .program import (
    OVERLOAD,
    POSITIONS,
    Call,
    InputSpec,
    Meta,
    NumberMeta,
    OutputSpec,
    Program,
    Ref,
    TensorMeta,
    check_target,
)
from .structure import Structure

_KINDS = {
    InputKind.PARAMETER: "parameter",
    InputKind.BUFFER: "buffer",
    InputKind.CONSTANT_TENSOR: "constant",
    InputKind.USER_INPUT: "user",
}
_SYM = {torch.sym_not: "torch.sym_not", torch.sym_int: "torch.sym_int", torch.sym_float: "torch.sym_float"} | {
    torch.sym_ite: "torch.sym_ite", torch.sym_max: "torch.sym_max", torch.sym_min: "torch.sym_min",
}  # fmt: skip
#: Regions that only switch a mode of autograd or autocast around a sub-graph: argument index of the sub-graph.
REGIONS = {"wrap_with_set_grad_enabled": 1, "wrap_with_autocast": 4}


def read(ep: torch.export.ExportedProgram, name: str = "model") -> Program:
    """The program in neutral form; tensors of the module are shared, not copied.

    Raises:
        ModelError: it holds an operator outside aten, or an input that is no tensor and no number.
    """
    reader = GraphReader(name)
    signature = ep.graph_signature
    placeholders = [n for n in ep.graph.nodes if n.op == "placeholder"]
    inputs = [reader.input(node, spec) for node, spec in zip(placeholders, signature.input_specs, strict=True)]
    results = reader.graph(ep.graph, ep.graph_module)
    outputs = tuple(reader.output(value, spec) for value, spec in zip(results, signature.output_specs, strict=True))
    state: dict[str, Any] = {**ep.state_dict, **ep.constants}
    entry = ep.module_call_graph[0].signature if ep.module_call_graph else None
    return Program(
        name=name,
        inputs=tuple(inputs),
        outputs=outputs,
        calls=tuple(reader.calls),
        metas=FrozenDict(reader.metas),
        weights=state,
        call_structure=Structure(ep.call_spec.in_spec),
        result_structure=Structure(ep.call_spec.out_spec),
        argument_names=tuple(getattr(entry, "forward_arg_names", None) or ()),
        ranges=FrozenDict({str(k): _range(v) for k, v in ep.range_constraints.items()}),
    )


def _range(bounds: Any) -> tuple[int, int | None]:
    """Of a symbolic extent; torch writes infinity in several ways, all beyond any extent."""
    upper = bounds.upper
    return least(int(bounds.lower)), int(upper) if upper.is_Integer and int(upper) < 2**62 else None


def least(recorded: int) -> int:
    """A recorded minimum of 2 is export's assumption while tracing, not a limit of the program: 0 and 1 are allowed."""
    return recorded if recorded > 2 else 0


def enables_autocast(ep: torch.export.ExportedProgram) -> bool:
    """Whether a region of it runs under an enabled autocast, whose casts are not spelled out yet."""
    return any(
        n.op == "call_function" and getattr(n.target, "__name__", "") == "wrap_with_autocast" and bool(n.args[2])
        for module in ep.graph_module.modules()
        if isinstance(module, torch.fx.GraphModule)
        for n in module.graph.nodes
    )


class GraphReader:
    """Reads fx graphs of aten calls into one list of calls.

    Attributes:
        name: of the program, for errors.
        calls: read so far.
        metas: by value name.
        values: what the trace recorded of each: fake tensors, symbolic numbers.
        taken: names that are given away.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.calls: list[Call] = []
        self.metas: dict[str, Meta] = {}
        self.values: dict[str, Any] = {}
        self.taken: set[str] = set()

    def note(self, name: str, value: Any) -> None:
        """Remembers what the trace recorded of a value."""
        self.values[name] = value
        self.metas[name] = meta_of(value)

    def fresh(self, name: str) -> str:
        i, unique = 1, name
        while unique in self.taken:
            i, unique = i + 1, f"{name}__{i}"
        self.taken.add(unique)
        return unique

    def input(self, node: torch.fx.Node, spec: Any) -> InputSpec:
        value = node.meta.get("val")
        self.taken.add(node.name)
        if spec.kind == InputKind.USER_INPUT and not isinstance(value, torch.Tensor | torch.SymInt):
            return InputSpec(node.name, "literal", value=getattr(spec.arg, "value", value))
        if spec.kind not in _KINDS:
            raise ModelError(
                "unsupported input of", self.name, f"{node.name}: {spec.kind.name}", "a tensor or a number"
            )
        self.note(node.name, value)
        return InputSpec(node.name, _KINDS[spec.kind], spec.target or "")  # type: ignore[arg-type]

    def output(self, value: Any, spec: Any) -> OutputSpec:
        if spec.kind == OutputKind.BUFFER_MUTATION:
            return OutputSpec("buffer", value, spec.target)
        if spec.kind.name == "USER_INPUT_MUTATION":
            return OutputSpec("input", value, spec.target)
        if spec.kind in (OutputKind.USER_OUTPUT, OutputKind.LOSS_OUTPUT):
            return OutputSpec("user", value)
        raise ModelError(
            "unsupported output of", self.name, spec.kind.name, "results and written buffers", "Export it for inference"
        )

    def graph(self, graph: torch.fx.Graph, owner: torch.nn.Module, bound: Sequence[Any] | None = None) -> list[Any]:
        """Appends the calls of a graph and returns its results. ``bound``: values of the placeholders of a region."""
        env: dict[torch.fx.Node, Any] = {}
        feed = iter(bound or ())
        for node in graph.nodes:
            if node.op == "placeholder":
                env[node] = next(feed) if bound is not None else self._placeholder(node)
            elif node.op == "get_attr":
                env[node] = _attribute(owner, str(node.target))
            elif node.op == "output":
                results = self.argument(node.args[0], env)
                return list(results) if isinstance(results, tuple) else [results]
            elif node.target is operator.getitem and isinstance(env.get(node.args[0]), tuple):
                env[node] = env[node.args[0]][node.args[1]]
            else:
                env[node] = self.call(node, env)
        return []

    def _placeholder(self, node: torch.fx.Node) -> Any:
        value = node.meta.get("val")
        return Ref(node.name) if isinstance(value, torch.Tensor | torch.SymInt) else value

    def call(self, node: torch.fx.Node, env: dict[torch.fx.Node, Any]) -> Any:
        """Appends one call (or a region's calls) and returns what the node stands for."""
        where = source.from_trace(node.meta.get("stack_trace"), source.from_modules(node.meta.get("nn_module_stack")))
        args = [self.argument(a, env) for a in node.args]
        kwargs = {k: self.argument(v, env) for k, v in node.kwargs.items()}
        name = getattr(node.target, "__name__", str(node.target))
        if isinstance(node.target, torch._ops.HigherOrderOperator) and name in REGIONS:
            at = REGIONS[name]
            region = args[at]
            return tuple(self.graph(region.graph, region, args[at + 1 :]))
        target = self._target(node, where)
        if OVERLOAD.match(target):
            bound = schemas.bind(target, args, kwargs)
        else:
            bound = dict(zip(POSITIONS, (*args, *kwargs.values()), strict=False))
        names, several = self.results(node)
        self.calls.append(Call(target, FrozenDict(bound), names, where))
        return tuple(Ref(n) for n in names) if several else (Ref(names[0]) if names else None)

    def results(self, node: torch.fx.Node) -> tuple[tuple[str, ...], bool]:
        """Fresh names for what a node gives, and whether it gives a list of values."""
        recorded: Any = node.meta.get("val")
        several = isinstance(recorded, list | tuple)
        values = list(recorded) if several else [] if recorded is None else [recorded]
        names = tuple(self.fresh(f"{node.name}_{i}" if several else node.name) for i in range(len(values)))
        for name, value in zip(names, values, strict=True):
            self.note(name, value)
        return names, several

    def _target(self, node: torch.fx.Node, where: str) -> str:
        target = node.target
        if isinstance(target, torch._ops.OpOverload):
            text = str(target)
        elif callable(target) and target in _SYM:
            text = _SYM[target]
        else:
            module = getattr(target, "__module__", "") or ""
            text = f"{module}.{getattr(target, '__name__', target)}"
            if text == "torch._sym_sqrt":
                text = "torch.sym_sqrt"
        return check_target(text, f"{self.name} at {where}" if where else self.name)

    def argument(self, value: Any, env: dict[torch.fx.Node, Any]) -> Any:
        if isinstance(value, torch.fx.Node):
            return env[value]
        if isinstance(value, list | tuple):
            return tuple(self.argument(v, env) for v in value)
        return value


def meta_of(value: Any) -> Meta:
    """What export recorded of a value; None and plain numbers count as fixed numbers."""
    if isinstance(value, torch.Tensor):
        strides = tuple(map(dim_of, value.stride())) if value.layout == torch.strided else None
        return TensorMeta(schemas.dtype_name(value.dtype), tuple(map(dim_of, value.shape)), strides)
    if isinstance(value, torch.SymInt | int) and not isinstance(value, bool):
        return NumberMeta("int", dim_of(value))
    if isinstance(value, torch.SymFloat | float):
        return NumberMeta("float", value if isinstance(value, float) else str(value))
    return NumberMeta("bool", value if isinstance(value, bool) else str(value))


def dim_of(value: Any) -> Dim:
    """An extent as an int, or the text of its symbolic expression."""
    if isinstance(value, int):
        return value
    node = getattr(value, "node", None)
    fixed = node.maybe_as_int() if node is not None else None
    return int(fixed) if fixed is not None else str(value)


def _attribute(owner: torch.nn.Module, path: str) -> Any:
    found: Any = owner
    for part in path.split("."):
        found = getattr(found, part)
    return found
