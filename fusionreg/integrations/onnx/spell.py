"""How a graph's operators are written with stock ONNX operators of one opset.

Most are themselves. Our extension of MatMul becomes Transposes before it, operators newer than the written opset and
those of domain ``fusionreg`` become the expression that defines them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import numpy as np
import onnx
import onnx_ir

from ...core.dtypes import DTYPES, dtype
from ...core.errors import ModelError
from ...core.ir import FUSED, Graph, Node
from ...core.ops import DTYPE_ATTRIBUTES
from .hints import UNKNOWN


@dataclass
class Writer:
    """Collects the nodes that one graph or function is written as.

    Attributes:
        graph: what is written; types are read from it.
        opset: version of the default domain.
        call: writes a fused node.
        nodes: what has been written so far.
    """

    graph: Graph
    opset: int
    call: Callable[[Writer, Node], None] | None = None
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    _made: int = 0

    def fresh(self, stem: str) -> str:
        while True:
            self._made += 1
            name = f"{stem}__{self._made}"
            if name not in self.graph.values:
                return name

    def emit(self, op: str, inputs: Sequence[str], output: str = "", **attrs: Any) -> str:
        """One stock node; the name of its output, fresh unless given."""
        output = output or self.fresh(op.lower())
        self.nodes.append(onnx.helper.make_node(op, list(inputs), [output], **attrs))
        return output

    def constant(self, values: Any, kind: str) -> str:
        array = np.asarray(values).astype(dtype(kind).numpy)
        return self.emit("Constant", (), value=tensor_proto(array, kind, "value"))

    def node(self, node: Node) -> None:
        """The node as one or several stock nodes."""
        if node.op.startswith(FUSED):
            if self.call is None:
                raise ModelError("cannot save", node.name, "a fused node inside a function", "plain operators")
            self.call(self, node)
            return
        spell = SPELLINGS.get(node.op)
        done = spell(self, node) if spell is not None else False
        if not done:
            self.nodes.append(self.plain(node))

    def plain(self, node: Node) -> onnx.NodeProto:
        """The node as itself."""
        domain, _, op = node.op.rpartition("::")
        schema = _schema(op, domain, self.opset)
        if domain == "fusionreg" or (not domain and schema is None):
            raise ModelError(
                "cannot save", node.name, f"operator {node.op}", f"one that ONNX opset {self.opset} has", op=node.op
            )
        attrs = _onnx_attributes(node, schema)
        proto = onnx.helper.make_node(op, list(node.inputs), list(node.outputs), node.name, domain=domain)
        proto.attribute.extend(attrs)
        for name, graph in node.graphs.items():
            body = write_graph(graph, self.opset, self.call)
            proto.attribute.append(onnx.helper.make_attribute(name, body))
        return proto


def write_graph(graph: Graph, opset: int, call: Callable[[Writer, Node], None] | None = None) -> onnx.GraphProto:
    """A graph or sub-graph as a ``GraphProto``, constants as initialisers; ``call`` writes fused nodes."""
    writer = Writer(graph, opset, call)
    for node in graph.nodes:
        writer.node(node)
    return onnx.helper.make_graph(
        writer.nodes, graph.name, [value_info(graph, n) for n in graph.inputs],
        [value_info(graph, n) for n in graph.outputs],
        [tensor_proto(a, graph.values[n].dtype, n) for n, a in graph.constants.items()],
    )  # fmt: skip


def value_info(graph: Graph, name: str) -> onnx.ValueInfoProto:
    """A value's type; the value may be captured from the graph around, then it is untyped."""
    value = graph.values.get(name)
    if value is None or value.dtype == UNKNOWN:
        return onnx.ValueInfoProto(name=name)
    return onnx.helper.make_tensor_value_info(name, dtype(value.dtype).onnx, value.shape)


def tensor_proto(array: np.ndarray, kind: str, name: str) -> onnx.TensorProto:
    """An array as a named tensor; 8- and 16-bit floats keep their bits."""
    if kind == "string":
        texts: Any = [str(s) for s in array.reshape(-1)]
        return onnx.helper.make_tensor(name, onnx.TensorProto.STRING, array.shape, texts)
    if kind in DTYPES:
        proto = onnx.TensorProto(name=name, data_type=DTYPES[kind].onnx, dims=array.shape)
        little = array if array.dtype.byteorder in "<=|" else array.astype(array.dtype.newbyteorder("<"))
        proto.raw_data = np.ascontiguousarray(little).tobytes()
        return proto
    proto = onnx_ir.to_proto(onnx_ir.tensor(array, name=name))
    assert isinstance(proto, onnx.TensorProto)
    return proto


def _schema(op: str, domain: str, opset: int) -> Any:
    try:
        return None if domain else onnx.defs.get_schema(op, opset, domain)
    except onnx.defs.SchemaError:
        return None


def _onnx_attributes(node: Node, schema: Any) -> list[onnx.AttributeProto]:
    """Attribute values in ONNX's form: dtypes by number, kinds as the operator declares them."""
    found = []
    kinds = onnx.defs.OpSchema.AttrType
    for name, value in node.attrs.items():
        if node.op == "ConstantOfShape":
            if name == "value":
                kind = node.attrs.get("dtype", "float32")
                tensor = tensor_proto(np.asarray([value]).astype(dtype(kind).numpy), kind, "value")
                found.append(onnx.helper.make_attribute("value", tensor))
            continue
        if schema is not None and name not in schema.attributes:
            raise ModelError("cannot save", node.name, f"attribute {name!r} of {node.op}", "one that ONNX has")
        kind = schema.attributes[name].type if schema is not None else None
        if value is None:
            continue
        if name in DTYPE_ATTRIBUTES and isinstance(value, str):
            value = dtype(value).onnx if value else 0
        elif kind == kinds.FLOAT:
            value = float(value)
        elif kind == kinds.INT:
            value = int(value)
        elif kind in (kinds.INTS, kinds.FLOATS):
            value = [int(v) for v in value] if kind == kinds.INTS else [float(v) for v in value]
        code = None if kind is None else onnx.AttributeProto.AttributeType.Value(kind.name)
        found.append(onnx.helper.make_attribute(name, value, attr_type=code))
    return found


def _matmul(w: Writer, node: Node) -> bool:
    """transA and transB as Transposes of the last two axes."""
    inputs = list(node.inputs)
    for index, flag in enumerate(("transA", "transB")):
        if not node.attrs.get(flag, 0):
            continue
        shape = w.graph.values[inputs[index]].shape
        if shape is None:
            raise ModelError("cannot save", node.name, f"{flag} of an operand of unknown rank", "a known rank")
        last = len(shape) - 1
        inputs[index] = w.emit("Transpose", [inputs[index]], perm=[*range(last - 1), last, last - 1])
    w.emit("MatMul", inputs, node.outputs[0])
    return True


def _swish(w: Writer, node: Node) -> bool:
    x, alpha = node.inputs[0], node.attrs.get("alpha", 1.702 if node.op.endswith("QuickGelu") else 1.0)
    inner = x if alpha == 1.0 else w.emit("Mul", [x, w.constant(alpha, w.graph.values[x].dtype)])
    w.emit("Mul", [x, w.emit("Sigmoid", [inner])], node.outputs[0])
    return True


def _rms_normalization(w: Writer, node: Node) -> bool:
    if w.opset >= 23:
        return False
    x, scale = node.inputs[:2]
    value = w.graph.values[x]
    axis, stash = node.attrs.get("axis", -1), node.attrs.get("stash_type", "float32")
    if value.shape is None:
        raise ModelError("cannot save", node.name, "RMSNormalization of unknown rank", "a known rank")
    wide = w.emit("Cast", [x], to=dtype(stash).onnx) if stash != value.dtype else x
    axes = w.constant(list(range(axis % len(value.shape), len(value.shape))), "int64")
    mean = w.emit("ReduceMean", [w.emit("Mul", [wide, wide]), axes])
    root = w.emit("Sqrt", [w.emit("Add", [mean, w.constant(node.attrs.get("epsilon", 1e-5), stash)])])
    y = w.emit("Div", [wide, root])
    if stash != value.dtype:
        y = w.emit("Cast", [y], to=dtype(value.dtype).onnx)
    w.emit("Mul", [y, scale], node.outputs[0])
    return True


def _attention(w: Writer, node: Node) -> bool:
    """softmax(scale · q kᵀ + mask) v over four axes, as lifting finds it."""
    q, k, v, mask, *_, lengths = (*node.inputs, *[""] * 4)[:7]
    if w.opset >= (24 if lengths else 23):
        return False
    value, attrs = w.graph.values[q], dict(node.attrs)
    scale, wide = attrs.pop("scale", None), attrs.pop("softmax_precision", "")
    causal, right = attrs.pop("is_causal", 0), attrs.pop("right_window_size", -1)
    if any(a not in (None, 0, 0.0, -1) for a in attrs.values()) or any(node.inputs[4:6]) or len(node.outputs) > 1:
        raise ModelError(
            "cannot save", node.name, f"Attention with {attrs}", f"plain Attention before opset 23, not {w.opset}"
        )
    if value.shape is None or len(value.shape) != 4 or not (scale or isinstance(value.shape[3], int)):
        raise ModelError("cannot save", node.name, f"Attention over {value}", "four axes of which the last is known")
    scale = scale or float(value.shape[3]) ** -0.5
    k, v = (_shared_heads(w, node, x, value.shape[1]) for x in (k, v))
    s = w.emit("MatMul", [q, w.emit("Transpose", [k], perm=[0, 1, 3, 2])])
    s = w.emit("Mul", [s, w.constant(scale, value.dtype)])
    if mask and w.graph.values[mask].dtype == "bool":
        s = w.emit("Where", [mask, s, w.constant(-np.inf, value.dtype)])
    elif mask:
        s = w.emit("Add", [s, mask])
    if causal or right >= 0:
        rows, keys = value.shape[2], (w.graph.values[node.inputs[1]].shape or (None,) * 4)[2]
        if not isinstance(rows, int) or not isinstance(keys, int):
            raise ModelError("cannot save", node.name, f"Attention by positions over {value}", "known lengths")
        seen = w.constant(np.tri(rows, keys, 0 if causal else right, dtype=bool), "bool")
        s = w.emit("Where", [seen, s, w.constant(-np.inf, value.dtype)])
    if lengths:
        keys = (w.graph.values[node.inputs[1]].shape or (None,) * 4)[2]
        if causal or right >= 0 or not isinstance(keys, int):
            raise ModelError("cannot save", node.name, "Attention by positions and lengths", "lengths of known keys")
        whole = w.emit("Cast", [lengths], to=dtype("int64").onnx)
        ends = w.emit("Reshape", [whole, w.constant([-1, 1, 1, 1], "int64")])
        real = w.emit("Less", [w.constant(np.arange(keys), "int64"), ends])
        s = w.emit("Where", [real, s, w.constant(-np.inf, value.dtype)])
    if wide and wide != value.dtype:
        s = w.emit("Softmax", [w.emit("Cast", [s], to=dtype(wide).onnx)], axis=-1)
        p = w.emit("Cast", [s], to=dtype(value.dtype).onnx)
    else:
        p = w.emit("Softmax", [s], axis=-1)
    w.emit("MatMul", [p, v], node.outputs[0])
    return True


def _shared_heads(w: Writer, node: Node, x: str, heads: Any) -> str:
    """k or v with a head for each of q."""
    value = w.graph.values[x]
    shape = value.shape or ()
    if len(shape) == 4 and shape[1] == heads:
        return x
    if len(shape) != 4 or not all(isinstance(d, int) for d in (heads, shape[1], shape[3])):
        raise ModelError("cannot save", node.name, f"heads that {value} shares", "known numbers of heads")
    several = w.emit("Unsqueeze", [x, w.constant([2], "int64")])
    several = w.emit("Expand", [several, w.constant([1, 1, heads // shape[1], 1, 1], "int64")])
    return w.emit("Reshape", [several, w.constant([0, heads, -1, shape[3]], "int64")])


def _rsqrt(w: Writer, node: Node) -> bool:
    w.emit("Reciprocal", [w.emit("Sqrt", [node.inputs[0]])], node.outputs[0])
    return True


def _batch_normalization(w: Writer, node: Node) -> bool:
    """What training gives beyond ONNX, from the batch's own statistics: those that a momentum of 0 leaves."""
    if not node.attrs.get("unbiased", 0) and not any(node.outputs[3:]):
        return False
    x, _, _, mean, var = node.inputs
    y, new_mean, new_var, saved_mean, saved_inverse = (*node.outputs, *[""] * 5)[:5]
    kind, shape = w.graph.values[var].dtype, w.graph.values[x].shape
    epsilon, momentum = node.attrs.get("epsilon", 1e-5), node.attrs.get("momentum", 0.9)
    batch_mean, batch_var = w.fresh("batch_mean"), w.fresh("batch_var")

    def normalise(outputs: Sequence[str], keep: float) -> None:
        attrs = {"epsilon": epsilon, "momentum": keep, "training_mode": 1}
        w.nodes.append(onnx.helper.make_node("BatchNormalization", list(node.inputs), list(outputs), **attrs))

    normalise((y or w.fresh("y"), batch_mean, batch_var), 0.0)
    counts = [d for i, d in enumerate(shape or ("?",)) if i != 1]
    if not all(isinstance(d, int) for d in counts):
        raise ModelError("cannot save", node.name, f"BatchNormalization over {shape}", "known extents")
    count = prod(d for d in counts if isinstance(d, int))
    spread = 1.0 if not node.attrs.get("unbiased", 0) else count / (count - 1) if count > 1 else np.nan
    for new, old, batch, factor in ((new_mean, mean, batch_mean, 1.0), (new_var, var, batch_var, spread)):
        if new:
            kept = w.emit("Mul", [old, w.constant(momentum, kind)])
            w.emit("Add", [kept, w.emit("Mul", [batch, w.constant((1.0 - momentum) * factor, kind)])], new)
    if saved_mean:
        w.emit("Cast", [batch_mean], saved_mean, to=dtype(w.graph.values[saved_mean].dtype).onnx)
    if saved_inverse:
        wide = w.graph.values[saved_inverse].dtype
        spread_wide = w.emit("Cast", [batch_var], to=dtype(wide).onnx)
        root = w.emit("Sqrt", [w.emit("Add", [spread_wide, w.constant(epsilon, wide)])])
        w.emit("Reciprocal", [root], saved_inverse)
    return True


def _where(w: Writer, node: Node, visible: str) -> bool:
    """The first operand where ``visible``, the node's value elsewhere."""
    x = node.inputs[0]
    w.emit("Where", [visible, x, w.constant(node.attrs["value"], w.graph.values[x].dtype)], node.outputs[0])
    return True


def _masked_fill(w: Writer, node: Node) -> bool:
    mask = node.inputs[1]
    return _where(w, node, mask if node.attrs.get("keep", 0) else w.emit("Not", [mask]))


def _causal_mask(w: Writer, node: Node) -> bool:
    extents = w.emit("Shape", [node.inputs[0]], start=-2)
    ones = w.emit("ConstantOfShape", [extents], value=tensor_proto(np.ones(1, np.int64), "int64", "value"))
    diagonal = w.constant(node.attrs.get("diagonal", 0), "int64")
    return _where(w, node, w.emit("Cast", [w.emit("Trilu", [ones, diagonal], upper=0)], to=dtype("bool").onnx))


SPELLINGS: Mapping[str, Callable[[Writer, Node], bool]] = {
    "MatMul": _matmul,
    "Swish": _swish,
    "fusionreg::QuickGelu": _swish,
    "RMSNormalization": _rms_normalization,
    "Attention": _attention,
    "fusionreg::Rsqrt": _rsqrt,
    "fusionreg::MaskedFill": _masked_fill,
    "fusionreg::CausalMask": _causal_mask,
    "BatchNormalization": _batch_normalization,
}
"""Operator → how it is spelled; False when it can be written as itself."""


def canonical(body: Graph) -> tuple[Graph, tuple[str, ...]]:
    """The body with its values renamed by position, so that equal bodies are equal texts; and its old output names."""
    names: dict[str, str] = {}

    def rename(name: str) -> str:
        return names.setdefault(name, f"v{len(names)}") if name else ""

    for name in (*body.inputs, *body.constants):
        rename(name)
    nodes = tuple(
        replace(n, name=f"n{i}", inputs=tuple(map(rename, n.inputs)), outputs=tuple(map(rename, n.outputs)), source="")
        for i, n in enumerate(body.nodes)
    )
    values = type(body.values)({rename(k): replace(v, name=rename(k)) for k, v in body.values.items()})
    constants = type(body.constants)({rename(k): v for k, v in body.constants.items()})
    graph = Graph("body", tuple(map(rename, body.inputs)), tuple(map(rename, body.outputs)), nodes, values, constants)
    return graph, body.outputs
