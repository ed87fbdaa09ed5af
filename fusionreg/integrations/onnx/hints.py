"""What ONNX's own shape inference and the file say about values: a help where our vocabulary does not know.

Shapes written in the file may be stale (a model exported at batch 1 and made dynamic by hand afterwards), so
inference starts again from the graph inputs, and the written ones serve only where nothing else is known.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx

from ...core.dtypes import from_onnx
from ...core.errors import UnknownNameError
from ...core.ir import Dim

#: dtype name of a value whose element type cannot be told.
UNKNOWN = "unknown"

#: What some exporters write for "any extent", on every axis alike: no name, two of them are not one axis.
NAMELESS = frozenset(("", "?", "*", "-1", "None", "none", "null", "unk", "unknown", "Unknown", "dynamic", "dyn"))

_SMALL = 1024  # bytes of an initialiser that inference may look into (shapes, axes)


@dataclass(frozen=True, slots=True)
class Hint:
    """dtype name and extents; an extent of None, and a shape of None, are unknown."""

    dtype: str
    shape: tuple[Dim | None, ...] | None


def dtype_name(code: int) -> str:
    """Our name of an ONNX element type; those that we have no row for keep ONNX's, in lower case."""
    try:
        return from_onnx(code).name
    except UnknownNameError:
        known = code in onnx.TensorProto.DataType.values() and code != 0
        return onnx.TensorProto.DataType.Name(code).lower() if known else UNKNOWN


def of_type(proto: onnx.TypeProto) -> Hint | None:
    """The hint in a ``TypeProto``; None for sequences, optionals and maps."""
    if not proto.HasField("tensor_type"):
        return None
    tensor = proto.tensor_type
    if not tensor.HasField("shape"):
        return Hint(dtype_name(tensor.elem_type), None)
    dims: list[Dim | None] = []
    for d in tensor.shape.dim:
        if d.HasField("dim_value"):
            dims.append(int(d.dim_value) if d.dim_value >= 0 else None)
        else:
            dims.append(None if d.dim_param in NAMELESS else d.dim_param)
    return Hint(dtype_name(tensor.elem_type), tuple(dims))


def collect(proto: onnx.ModelProto) -> tuple[dict[str, Hint], dict[str, Hint]]:
    """(inferred from the inputs alone, written in the file), by value name, sub-graphs included."""
    written: dict[str, Hint] = {}
    _gather(proto.graph, written)
    try:
        light = onnx.ModelProto()
        light.CopyFrom(_without_weights(proto))
        inferred_proto = onnx.shape_inference.infer_shapes(light, check_type=False, strict_mode=False, data_prop=True)
    except Exception:  # a help only: an operator that ONNX cannot infer must not stop the load
        return {}, written
    inferred: dict[str, Hint] = {}
    _gather(inferred_proto.graph, inferred)
    return inferred, written


def _gather(graph: onnx.GraphProto, into: dict[str, Hint]) -> None:
    for info in (*graph.value_info, *graph.output):
        hint = of_type(info.type)
        if hint is not None and hint.dtype != UNKNOWN:
            into.setdefault(info.name, hint)
    for node in graph.node:
        for a in node.attribute:
            if a.HasField("g"):
                _gather(a.g, into)


def _without_weights(proto: onnx.ModelProto) -> onnx.ModelProto:
    """A model without large or replaceable weights (inputs stand for them) and without shapes that may be stale."""
    light = onnx.ModelProto(ir_version=proto.ir_version)
    light.opset_import.extend(proto.opset_import)
    light.functions.extend(proto.functions)
    graph = light.graph
    graph.name = proto.graph.name or "graph"
    graph.node.extend(proto.graph.node)
    weights = {t.name for t in proto.graph.initializer} if proto.ir_version < 4 else set()
    graph.input.extend(i for i in proto.graph.input if i.name not in weights)
    given = {i.name for i in graph.input}
    for tensor in proto.graph.initializer:
        if tensor.name in given:
            continue  # a caller may replace it: inference must not look into it
        inside = tensor.data_location != onnx.TensorProto.EXTERNAL
        if inside and len(tensor.raw_data) <= _SMALL and _count(tensor) <= 128:
            graph.initializer.append(tensor)
        else:
            graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims)))
    for out in proto.graph.output:
        bare = graph.output.add(name=out.name)
        if out.type.HasField("tensor_type"):
            bare.type.tensor_type.elem_type = out.type.tensor_type.elem_type
        else:
            bare.type.CopyFrom(out.type)
    return light


def _count(tensor: onnx.TensorProto) -> int:
    n = 1
    for d in tensor.dims:
        n *= d
    return n
