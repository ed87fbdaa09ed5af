"""An ONNX model as a raw :class:`~fusionreg.core.ir.Graph`: one opset, functions inlined, every value typed.

Nothing is folded and nothing is removed: that is ``core.rewrite``'s work, and lifting is ``core.lift``'s.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir

from ...core.errors import FusionregError, GraphError, ModelError, UnknownNameError
from ...core.frozen import FrozenDict
from ...core.ir import Dim, Graph, GraphBuilder, Names, Value
from ...core.ops import Vocabulary, default_vocabulary, infer, normalise
from . import contrib, early, hints, read, subgraphs, symbolic
from .adapters import Call, adapt
from .scope import Scope, check_expansion, dtype_of, in_order, main_values, source_of

_KIND = onnx_ir.AttributeType

_MALFORMED = (ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError, ValueError)


def load(model: read.Source, *, ops: Vocabulary | None = None, folder: str | os.PathLike[str] | None = None) -> Graph:
    """Reads an ONNX model.

    Args:
        model: path of an ``.onnx`` file, its bytes, an ``onnx.ModelProto`` or an ``onnx_ir.Model``.
        ops: the vocabulary whose ``infer`` types the values; the default one unless given. Operators that it lacks
            stay in the graph as they are, with the types that the file states.
        folder: where weights in other files lie, for a model that does not come from a path.

    Returns: a raw graph. Initialisers that are graph inputs too are ``overridable``. Symbolic axes keep their
    ``dim_param``; extents that nothing is known about get fresh names. Every ``Node.source`` names the ONNX node, or
    the Python line where the exporter recorded one.

    Raises:
        ModelError: an unreadable, truncated or foreign file; an opset before 7; data outside the model's folder;
            a graph that contradicts itself or needs something that tensors cannot express.
    """
    proto, root, whom = read.read(model, folder)
    try:
        return Importer(proto, root, whom, default_vocabulary() if ops is None else ops).run()
    except _MALFORMED as e:  # a file may hold anything where a name, a number or a list is meant to be
        found = f"{type(e).__name__}: {' '.join(str(e).split())[:200]}"
        raise ModelError("cannot import model", whom, found, "a well-formed ONNX graph") from e


class Importer:
    """One load: names, types and constants of all graphs of the model together."""

    def __init__(self, proto: onnx.ModelProto, folder: Path | None, whom: str, ops: Vocabulary) -> None:
        self.folder, self.whom, self.ops = folder, whom, ops
        self.fixed = proto.ir_version < 4
        dense = read.densify(proto.graph, folder, whom)
        if dense is not proto.graph:
            copy = onnx.ModelProto()
            copy.CopyFrom(proto)
            copy.graph.CopyFrom(dense)
            proto = copy
        try:
            self.model = onnx_ir.from_proto(proto)
        except Exception as e:
            raise ModelError("cannot read model", whom, _root_cause(e), "a valid ONNX graph") from e
        check_expansion(self.model, whom)  # before ONNX's inference, which walks through every call
        self.inferred, self.written = hints.collect(proto)
        self.functions = self.model.functions
        self.types: dict[str, Value] = {}
        self.constants: dict[str, np.ndarray] = {}  # those that nobody can replace
        self.extents: dict[str, symbolic.Extents] = {}  # elements of the tensors that shapes are computed with
        self.names = Names()

    def run(self) -> Graph:
        graph = self.model.graph
        opsets = {"" if d == "ai.onnx" else d: v for d, v in self.model.opset_imports.items()}
        scope = Scope(GraphBuilder(graph.name or "model"), opsets)
        # names of the main graph win over those of sub-graphs and functions
        self.names.taken.update(v.name for v in main_values(graph) if v.name)
        try:
            self.interface(scope, graph)
            outputs = self.body(scope, graph)
            self.check_outputs(graph, outputs)
            declared = [str(v.name) for v in graph.outputs]
            return scope.builder.build(list(map(lambda wanted, n: self.renamed(scope, wanted, n), declared, outputs)))
        except GraphError as e:
            raise ModelError("cannot import model", self.whom, str(e).rstrip("."), "a consistent graph") from e

    def renamed(self, scope: Scope, wanted: str, name: str) -> str:
        """An output of the model under the name that it declares; a function may hand out its own input."""
        if name != wanted:
            value = self.types[name]
            scope.builder.node(
                "Identity", [name], [self.typed(wanted, value.dtype, value.shape)], name=f"{wanted}_identity"
            )
        return wanted

    def output_name(self, scope: Scope, value: onnx_ir.Value) -> str:
        """What a node's output is called in the graph; "" for one that has no name."""
        if not value.name:
            return ""
        if value in scope.wanted:
            return scope.wanted[value]
        main = scope.outer is None and not scope.prefix
        return value.name if main else self.names.fresh(scope.prefix + value.name)

    # names and types ---------------------------------------------------------------------------------------------

    def typed(self, name: str, dtype: str, shape: Iterable[Dim | None] | None) -> Value:
        """The value's type; its unknown extent ``i`` is called ``name.i``."""
        dims = None if shape is None else tuple(f"{name}.{i}" if d is None else d for i, d in enumerate(shape))
        self.types[name] = Value(name, dtype, dims)
        return self.types[name]

    def add_constant(self, builder: GraphBuilder, name: str, array: np.ndarray, overridable: bool = False) -> str:
        builder.constant(name, array, dtype_of(array), overridable)
        self.types[name] = Value(name, dtype_of(array), tuple(array.shape))
        if not overridable:
            self.constants[name] = array
            if (extents := symbolic.known(array)) is not None:
                self.extents[name] = extents
        return name

    # graphs ------------------------------------------------------------------------------------------------------

    def interface(self, scope: Scope, graph: onnx_ir.Graph, given: Sequence[Value | None] = ()) -> None:
        """Declares inputs and initialisers; ``given`` are types that a Loop or Scan knows of its body's inputs."""
        main = scope.outer is None
        for i, value in enumerate(graph.inputs):
            if main and self.fixed and value.name in graph.initializers:
                continue  # before IR 4 every initialiser had to be listed as an input: it says nothing about the caller
            name = scope.names[value] = str(value.name) if main else self.names.fresh(value.name or "input")
            dtype, shape = self.declared(value)
            if i < len(given) and given[i] is not None:
                dtype, shape = given[i].dtype, given[i].shape  # type: ignore[union-attr]
            if dtype == hints.UNKNOWN and main:
                raise ModelError(
                    "cannot import model", self.whom, f"input {name!r} is {value.type or 'untyped'}", "a tensor"
                )
            if main:  # a written 0 was once used for "unknown", and a named axis may be 0 as well
                shape = None if shape is None else tuple(None if d == 0 else d for d in shape)
            typed = self.typed(name, dtype, shape)
            scope.builder.input(name, typed.dtype, typed.shape)
        for value in graph.initializers.values():
            array = read.array(value.const_value, self.folder, self.whom)
            if value in scope.names:
                self.add_constant(scope.builder, scope.names[value], array, overridable=True)
            else:
                name = scope.names[value] = str(value.name) if main else self.names.fresh(value.name or "constant")
                self.add_constant(scope.builder, name, array)

    def declared(self, value: onnx_ir.Value) -> tuple[str, tuple[Dim | None, ...] | None]:
        """dtype and shape that the file states for a value."""
        dtype = hints.UNKNOWN if not isinstance(value.type, onnx_ir.TensorType) else hints.dtype_name(value.type.dtype)
        if value.shape is None:
            return dtype, None
        dims: list[Dim | None] = []
        for d in value.shape:
            extent = d if isinstance(d, int) or d is None else d.value
            unknown = extent is None or extent in hints.NAMELESS or (isinstance(extent, int) and extent < 0)
            dims.append(None if unknown else extent)
        return dtype, tuple(dims)

    def body(self, scope: Scope, graph: onnx_ir.Graph | onnx_ir.Function) -> list[str]:
        """Imports the nodes; names of the outputs."""
        for node in in_order(graph, self.whom):
            self.node(scope, node)
        return [self.resolve(scope, v, f"output {v.name!r}") for v in graph.outputs]

    def resolve(self, scope: Scope, value: onnx_ir.Value | None, whom: str) -> str:
        if value is None:
            return ""
        name = scope.find(value)
        if name is None:
            raise ModelError(
                "cannot import model", self.whom, f"{whom} reads {value.name!r}, which nothing writes",
                "an input, an initialiser or a node's output",
            )  # fmt: skip
        return name

    def check_outputs(self, graph: onnx_ir.Graph, names: list[str]) -> None:
        for value, name in zip(graph.outputs, names, strict=True):
            stated, found = self.written.get(value.name or ""), self.types[name].dtype
            if stated is not None and hints.UNKNOWN not in (found, stated.dtype) and found != stated.dtype:
                raise ModelError(
                    "cannot import model", self.whom, f"output {value.name!r} is declared {stated.dtype}",
                    f"{found}, which the graph computes",
                )  # fmt: skip

    # nodes -------------------------------------------------------------------------------------------------------

    def node(self, scope: Scope, node: onnx_ir.Node) -> None:
        domain = "" if node.domain == "ai.onnx" else node.domain
        whom = node.name or f"{node.op_type} → {', '.join(o.name or '' for o in node.outputs)}"
        inputs = [self.resolve(scope, v, f"node {whom!r}") for v in node.inputs]
        function = self.functions.get(node.op_identifier())
        if function is not None:
            self.inline(scope, node, function, inputs, whom)
            return
        attrs, graphs = self.attributes(scope, node, whom)
        if not domain and node.op_type == "Constant":
            self.constant(scope, node, attrs, whom)
            return
        if domain not in scope.opsets and not domain:
            raise ModelError("cannot import node", whom, "no opset of the default domain", "an opset_import")
        source = source_of(node)
        emit = self.emitter(scope, node.name or node.op_type, source)
        call = Call(
            op=f"{domain}::{node.op_type}" if domain else node.op_type,
            inputs=inputs, attrs=attrs, outputs=len(node.outputs), read=tuple(bool(o.name) for o in node.outputs),
            whom=whom, emit=lambda op, ins, at: emit(op, ins, at, 1)[0], several=emit,
            constant=lambda a, stem: self.add_constant(scope.builder, self.names.fresh(scope.prefix + stem), a),
            value=lambda n: self.types[n], known=self.constants.get,
        )  # fmt: skip
        if not domain:
            early.adapt(call, scope.opsets[""])
            adapt(call, scope.opsets[""])
        contrib.adapt(call)
        if call.op in self.ops:
            try:
                call.attrs = dict(normalise(self.ops[call.op], call.attrs))
            except UnknownNameError as e:
                raise call.error(f"{e.whom} {e.found}", "a type that this version has") from e
        if any(isinstance(a, np.ndarray) for a in call.attrs.values()):
            raise call.error("a tensor as an attribute", "an operator that this version knows")
        self.finish(scope, node, call, graphs, source)

    def finish(self, scope: Scope, node: onnx_ir.Node, call: Call, graphs: dict[str, Any], source: str) -> None:
        """Adds the adapted node under its own output names."""
        names = [self.output_name(scope, o) for o in node.outputs[: call.outputs]]
        raw = [self.names.fresh(n + "_raw") if n and call.after else n for n in names]
        stem = scope.prefix + (node.name or node.op_type)
        stated = [o.name if scope.hinted and o.name else "" for o in node.outputs[: call.outputs]]
        if graphs:
            types, built = subgraphs.build(self, scope, call, graphs, raw)
            self.add(scope, call, raw, types, stem, source, built)
        else:
            types = self.infer(call.op, call.inputs, call.attrs, raw, stated, call.whom)
            self.add(scope, call, raw, types, stem, source, {})
        if call.after is not None:
            op, further, attrs = call.after
            types = self.infer(op, [raw[0], *further], attrs, names[:1], stated[:1], call.whom)
            scope.builder.node(op, (raw[0], *further), types, name=f"{stem}_{op.lower()}", attrs=attrs, source=source)
        for value, name in zip(node.outputs, names, strict=False):
            if name:
                scope.names[value] = name
        for index, name in call.also.items():
            scope.names[node.outputs[index]] = name

    def add(
        self, scope: Scope, call: Call, outputs: Sequence[str], types: Sequence[Value], stem: str, source: str,
        graphs: Mapping[str, Graph],
    ) -> None:  # fmt: skip
        """One node with typed outputs; outputs left out stay ``""``."""
        node = scope.builder.node(
            call.op, call.inputs, [t for o, t in zip(outputs, types, strict=True) if o] or types[:1], name=stem,
            attrs=call.attrs, source=source, graphs=FrozenDict(graphs),
        )  # fmt: skip
        if "" in outputs:
            scope.builder._nodes[-1] = replace(node, outputs=tuple(outputs))

    def emitter(self, scope: Scope, stem: str, source: str) -> Any:
        def emit(op: str, inputs: Sequence[str], attrs: Mapping[str, Any], count: int) -> list[str]:
            names = [self.names.fresh(f"{scope.prefix}{stem}_{op.lower()}") for _ in range(count)]
            types = self.infer(op, list(inputs), attrs, names, [""] * count, stem)
            scope.builder.node(op, inputs, types, name=names[0] + "_node", attrs=attrs, source=source)
            return names

        return emit

    def infer(
        self, op: str, inputs: Sequence[str], attrs: Mapping[str, Any], names: Sequence[str], stated: Sequence[str],
        whom: str,
    ) -> list[Value]:  # fmt: skip
        """Types of a node's outputs: from the vocabulary; what it leaves open, from the hints."""
        values = [self.types[i] if i else None for i in inputs]
        found: list[Any] = []
        known_op = op in self.ops
        if known_op and all(v is None or v.dtype != hints.UNKNOWN for v in values):
            known = {i: self.constants[n] for i, n in enumerate(inputs) if n in self.constants}
            try:
                found = infer(self.ops[op], values, attrs, known, len(names), whom)
            except FusionregError as e:
                raise ModelError("cannot import node", whom, str(e).rstrip("."), "consistent inputs", op=op) from e
        extents = [self.extents.get(i) for i in inputs]
        target = symbolic.target(op, extents, values, attrs)
        if found and target is not None:
            found[0] = (found[0][0], target)
        result = []
        for i, (name, key) in enumerate(zip(names, stated, strict=True)):
            dtype, shape = found[i] if i < len(found) else (hints.UNKNOWN, None)
            result.append(self.merged(name or f"_{whom}", key, dtype, shape, not known_op))
        followed = symbolic.follow(op, extents, values, attrs)
        if followed is not None and names[0]:
            self.extents[names[0]] = followed
        return result

    def merged(self, name: str, key: str, dtype: str, shape: tuple[Dim | None, ...] | None, opaque: bool) -> Value:
        """Our own inference first; ONNX's where ours is open; what the file states for operators neither knows."""
        for hint in (self.inferred.get(key), self.written.get(key) if opaque else None):
            if hint is None:
                continue
            dtype = hint.dtype if dtype == hints.UNKNOWN else dtype
            if shape is None:
                shape = hint.shape
            elif hint.shape is not None and len(hint.shape) == len(shape):
                shape = tuple(h if d is None else d for d, h in zip(shape, hint.shape, strict=True))
        return self.typed(name, dtype, shape)

    def constant(self, scope: Scope, node: onnx_ir.Node, attrs: Mapping[str, Any], whom: str) -> None:
        if len(attrs) != 1:
            raise ModelError("cannot import node", whom, f"Constant with {sorted(attrs)}", "one value")
        ((kind, value),) = attrs.items()
        types = {"value_float": np.float32, "value_floats": np.float32, "value_int": np.int64, "value_ints": np.int64}
        array = value if isinstance(value, np.ndarray) else np.asarray(value, types.get(kind, object))
        out = node.outputs[0]
        name = self.output_name(scope, out) or self.names.fresh("constant")
        scope.names[out] = self.add_constant(scope.builder, name, array)

    def attributes(self, scope: Scope, node: onnx_ir.Node, whom: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """(plain values, sub-graphs) by name; references to a function's parameters resolved."""
        attrs: dict[str, Any] = {}
        graphs: dict[str, Any] = {}
        for name, attr in node.attributes.items():
            if attr.is_ref():
                actual = scope.arguments.get(attr.ref_attr_name or "")
                if actual is None:
                    continue  # neither passed nor defaulted: the attribute is left out
                attr = actual
            if attr.type == _KIND.GRAPH:
                graphs[name] = attr.value
            elif attr.type == _KIND.TENSOR:
                attrs[name] = read.array(attr.value, self.folder, self.whom)
            elif attr.type in (_KIND.INTS, _KIND.FLOATS, _KIND.STRINGS):
                attrs[name] = tuple(attr.value)
            elif attr.type in (_KIND.INT, _KIND.FLOAT, _KIND.STRING):
                attrs[name] = attr.value
            else:
                raise ModelError("cannot import node", whom, f"attribute {name!r} of kind {attr.type.name}", "a value")
        return attrs, graphs

    def inline(
        self, scope: Scope, node: onnx_ir.Node, function: onnx_ir.Function, inputs: list[str], whom: str
    ) -> None:
        """Imports a function's body in place of its call, at the opsets the function was written for."""
        arguments = {n: a for n, a in function.attributes.items() if a.value is not None}
        for name, attr in node.attributes.items():
            actual = scope.arguments.get(attr.ref_attr_name or "") if attr.is_ref() else attr
            if actual is not None:
                arguments[name] = actual
        opsets = {"" if d == "ai.onnx" else d: v for d, v in function.opset_imports.items()}
        wanted = {b: self.output_name(scope, o) for b, o in zip(function.outputs, node.outputs, strict=False) if o.name}
        padded = inputs + [""] * (len(function.inputs) - len(inputs))
        inner = Scope(
            scope.builder, opsets, scope, dict(zip(function.inputs, padded, strict=False)), arguments,
            f"{scope.prefix}{node.name or function.name}/", False, wanted,
        )  # fmt: skip
        outputs = self.body(inner, function)
        for value, name in zip(node.outputs, outputs, strict=False):
            if value.name:
                scope.names[value] = name


def _root_cause(error: BaseException) -> str:
    """What onnx_ir stumbled over, and in which object: the innermost two of its nested errors."""
    chain = [error]
    while chain[-1].__cause__ is not None:
        chain.append(chain[-1].__cause__)
    lines = [" ".join(str(e).split()) or type(e).__name__ for e in chain[-2:]]
    return ": ".join(line[:200].rstrip(".") for line in lines)
