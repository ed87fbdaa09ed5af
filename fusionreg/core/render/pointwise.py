"""Graphs of point-wise operators as CUDA device functions. Floor 4.

Floats are computed in float (float64 in double) and rounded nowhere but at a ``Cast`` or ``CastLike`` to a dtype that
cannot hold all of its operand's: the value is then rounded to nearest even and goes on in float. A product may join the
sum that takes it in one fused multiply-add, as the compiler's options let it. Integers wrap. NaN never disappears.

What an operator means is its :attr:`OpSpec.cuda`; operators whose operands differ in dtype stand in ``conversions``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ..dtypes import dtype
from ..errors import FusionregError, GraphError, RenderError
from ..ops import complete
from ..ops.cuda import SHARED, operand_names, serves_double, steps, text_for, words
from ..pattern.instantiate import instantiate
from ..problem import Problem
from ..spec import OpSpec
from .conversions import CONVERSIONS
from .ctypes import alias, compute_type, literal, unsigned
from .environment import shared_library
from .values import identifier

if TYPE_CHECKING:
    from ..ir import Graph, Node, Value
    from ..registry.entries import FusionEntry

#: What holds the functions of ``SHARED``; it may stand in a unit more than once.
_SHARED = "pointwise.cuh.j2"


def supported(node: Node, types: Mapping[str, Value], ops: Mapping[str, OpSpec]) -> str:
    """ "" when :func:`device_function` can generate this node, else the reason why not.

    ``types``: the values of its graph.
    """
    spec = ops.get(node.op)
    if spec is None:
        return f"unknown operator {node.op}"
    written = CONVERSIONS.get(node.op)
    if not spec.pointwise and written is None:
        return f"{node.op} is not point-wise"
    if len(node.outputs) != 1 or node.graphs or node.mutates:
        return f"{node.op} with {len(node.outputs)} outputs, sub-graphs or writes in place"
    dtypes = [types[name].dtype if name else "" for name in node.inputs]
    result = types[node.outputs[0]].dtype
    for name in filter(None, (*dtypes, result)):
        if name == "string" or dtype(name).kind == "c":
            return f"no arithmetic on {name}"
    try:
        attributes = complete(spec, node.attrs, node.name)
    except FusionregError as error:
        return str(error)
    if written is not None:
        return written.refuses(dtypes, result, attributes)
    return _refused(spec, [d for d in dtypes if d], result, attributes)


def _refused(spec: OpSpec, dtypes: list[str], result: str, attributes: Mapping[str, Any]) -> str:
    own = dtypes[-1]
    text = text_for(spec, dtype(own).kind)
    if not text:
        return f"{spec.name} has no CUDA text for {own}" if spec.cuda else f"{spec.name} has no CUDA text"
    if own == "float64" and not serves_double(text):
        return f"the CUDA text of {spec.name} serves no float64"
    chosen = dtypes[1:] if spec.moves and dtypes[0] == "bool" else dtypes
    types = {compute_type(d) for d in chosen}
    if len(types) > 1:
        return f"{spec.name} of {' and '.join(sorted(set(chosen)))}"
    if result != "bool" and compute_type(result) != compute_type(own):
        return f"{spec.name} of {own} gives {result}"
    for name, value in attributes.items():
        if isinstance(value, str) and value not in words(spec, name):
            return f"{spec.name} with {name}={value!r}"
        if not isinstance(value, str | int | float):
            return f"{spec.name} with {name}={value!r}"
    return ""


def pattern_graph(entry: FusionEntry, problem: Problem) -> Graph:
    """A fusion's pattern at a problem, extents as a kernel sees them; :class:`FusionregError` where it does not fit."""
    shapes = {name: t.shape for name, t in list(problem.tensors.items())[: problem.inputs] if t is not None}
    return instantiate(
        entry.patterns[0], entry.spec, dtypes=problem.dtypes, shapes=shapes, ops=entry.ops, choices=problem.choices,
        attributes=problem.attributes, absent=[name for name in entry.inputs if name not in shapes],
    )  # fmt: skip


def device_function(name: str, graph: Graph, ops: Mapping[str, OpSpec]) -> str:
    """C++ text of ``__device__ __forceinline__ void name(C0 in0, …, D0& out0, …)`` that computes ``graph``.

    Parameters follow ``graph.inputs`` and ``graph.outputs``, each of its dtype's compute type: ``float`` for floats up
    to 32 bits, ``double`` for float64, the dtype's own C++ type for integers and bool. The caller converts what it
    loads, and rounds what it stores, once. Every other name in the text is local to it.

    Args:
        name: a C++ identifier.
        graph: point-wise nodes, concrete dtypes; constants of equal elements, which become literals.
        ops: the vocabulary.

    Raises:
        GraphError: a node that :func:`supported` refuses, or a constant of several values; ``facts``: node.
        RenderError: ``name`` is no identifier.
    """
    return _Writer(graph, ops).function(identifier(name))


class _Writer:
    """The text of one function: lines, and the C++ name of every value so far."""

    def __init__(self, graph: Graph, ops: Mapping[str, OpSpec]) -> None:
        self.graph, self.ops = graph, ops
        self.names: dict[str, str] = {name: f"in{i}" for i, name in enumerate(graph.inputs)}
        self.constants: dict[str, Any] = {}
        self.lines: list[str] = []
        self.aliases: dict[str, str] = {}

    def function(self, name: str) -> str:
        graph = self.graph
        for node in graph.nodes:
            reason = supported(node, graph.values, self.ops)
            if reason:
                raise GraphError("no device function", graph.name, reason, "an operator that has CUDA text",
                    node=node.name, op=node.op, source=node.source)  # fmt: skip
        read = self._read()
        for i, node in enumerate(graph.nodes):
            if node.outputs[0] in read:
                self._node(node, f"v{i}")
        results = [f"out{i} = {self._operand(value)};" for i, value in enumerate(graph.outputs)]
        types = [compute_type(graph.values[v].dtype) for v in (*graph.inputs, *graph.outputs)]
        parameters = [f"{t} in{i}" for i, t in enumerate(types[: len(graph.inputs)])]
        parameters += [f"{t}& out{i}" for i, t in enumerate(types[len(graph.inputs) :])]
        using = [f"using {short} = {full};" for short, full in sorted(self.aliases.items())]
        body = "".join(f"  {line}\n" if not line.startswith("#") else f"{line}\n"
                       for line in (*using, *self.lines, *results))  # fmt: skip
        shared = (shared_library() / _SHARED).read_text("utf-8") if any(f in body for f in SHARED) else ""
        return f"{shared}__device__ __forceinline__ void {name}({', '.join(parameters)}) {{\n{body}}}\n"

    def _read(self) -> frozenset[str]:
        """The values that the outputs depend on."""
        read = set(self.graph.outputs)
        for node in reversed(self.graph.nodes):
            if node.outputs[0] in read:
                read.update(node.inputs)
        return frozenset(read)

    def _operand(self, value: str) -> str:
        """The C++ name of a value; a constant gets one when it is first read."""
        found = self.names.get(value)
        if found is None:
            number, own = self._number(value), self.graph.values[value].dtype
            found = self.names[value] = f"c{len(self.constants)}"
            self.constants[value] = number
            self.lines.append(f"const {compute_type(own)} {found} = {literal(number, own)};")
        return found

    def _number(self, value: str) -> Any:
        array = self.graph.constants[value].reshape(-1)
        if not array.size or array.tobytes() != array[:1].tobytes() * array.size:
            raise GraphError("no device function", self.graph.name, f"constant {value!r} of {array.size} elements",
                "one value; make it an input", value=value)  # fmt: skip
        return array[0].astype(dtype(self.graph.values[value].dtype).numpy).item()

    def _node(self, node: Node, local: str) -> None:
        value = node.outputs[0]
        own = self.graph.values[value].dtype
        operands = [self._operand(name) if name else "" for name in node.inputs]
        dtypes = [self.graph.values[name].dtype if name else "" for name in node.inputs]
        attributes = complete(self.ops[node.op], node.attrs, node.name)
        written = CONVERSIONS.get(node.op)
        if written is not None:
            numbers = [self.constants.get(name) for name in node.inputs]
            self.lines += written.lines(local, operands, dtypes, numbers, own, attributes, self._alias)
        else:
            self.lines += self._text(self.ops[node.op], local, operands, dtypes, own, attributes)
        self.names[value] = local

    def _alias(self, name: str) -> str:
        """A one-word name of a dtype's compute type, so that it can be called like a function."""
        short = alias(name)
        self.aliases[short] = compute_type(name)
        return short

    def _text(
        self, spec: OpSpec, local: str, operands: list[str], dtypes: list[str], own: str, attributes: Mapping[str, Any]
    ) -> Iterator[str]:
        last = [d for d in dtypes if d][-1]
        text, names = text_for(spec, dtype(last).kind), operand_names(spec)
        base = {"true": "true", "false": "false"}
        if spec.inputs[-1].endswith("*"):
            accumulated = operands[0]
            for i, operand in enumerate(operands[1:], 1):
                more = {"a": accumulated, "b": operand, "COUNT": str(len(operands)),
                        "LAST": "true" if i == len(operands) - 1 else "false"}  # fmt: skip
                accumulated = local if i == len(operands) - 1 else f"{local}_{i}"
                yield from self._steps(spec, text, accumulated, base | more, last, own, attributes)
            if len(operands) == 1:
                yield f"const {compute_type(own)} {local} = {accumulated};"
            return
        given = {n: o for n, o in zip(names, operands, strict=False) if o}
        yield from self._steps(spec, text, local, base | given, last, own, attributes)

    def _steps(
        self, spec: OpSpec, text: str, local: str, given: dict[str, str], last: str, own: str,
        attributes: Mapping[str, Any],
    ) -> Iterator[str]:  # fmt: skip
        known = dict(given)
        put = self._put(spec, known, last, attributes)
        for step in steps(text):
            expression = " ".join(step.written(put, last == "float64").split())
            if step.name:
                known[step.name] = f"{local}_{step.name}"
                yield f"const auto {known[step.name]} = {expression};"
            elif dtype(own).floating or own == "bool":
                yield f"const {compute_type(own)} {local} = {expression};"
            else:
                yield f"const {compute_type(own)} {local} = static_cast<{compute_type(own)}>({expression});"

    def _put(
        self, spec: OpSpec, known: Mapping[str, str], last: str, attributes: Mapping[str, Any]
    ) -> Callable[[str], str]:
        optional = {n[:-1] for n in spec.inputs if n.endswith("?")}

        def put(name: str) -> str:
            if name in known:
                return known[name]
            if name in ("T", "U"):
                return self._alias(last if name == "T" else unsigned(last))
            if name.startswith("HAS_"):
                return "true" if name[4:] in known else "false"
            if name.startswith("CONSTANT_"):
                return "true" if known.get(name[9:]) in {self.names[c] for c in self.constants} else "false"
            if name in optional:
                return f"{self._alias(last)}(0)"
            value = attributes.get(name)
            if isinstance(value, int | float):
                whole = isinstance(spec.attributes[name], int) and not isinstance(value, float)
                return literal(value, "int64" if whole else "float64" if last == "float64" else "float32")
            for key, word in attributes.items():
                if isinstance(word, str) and name.startswith(f"{key}_"):
                    return "true" if name == f"{key}_{word}" else "false"
            raise RenderError("cannot render", spec.name, f"unknown name {name!r} in its CUDA text", variable=name)

        return put
