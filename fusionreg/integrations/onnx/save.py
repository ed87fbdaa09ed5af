"""Writes a fused graph as an ONNX file that any ONNX runtime can run.

Each ``fused::`` node becomes a call to a model-local function of domain ``fusionreg`` whose body is the sub-graph it
replaced, in stock operators: a runtime that knows nothing of fusions inlines it.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from ...core.errors import ModelError
from ...core.ir import FUSED, Graph, Node
from . import read
from .spell import Writer, canonical, tensor_proto, write_graph

#: Opset that is written; a newer one when the original model used it.
WRITTEN = 21

DOMAIN = "fusionreg"

#: Above this many bytes the weights go to a file of their own: protobuf ends at 2 GB.
EXTERNAL_ABOVE = 1_500_000_000

_ALIGN = 4096


def save(
    graph: Graph,
    original: read.Source | None,
    path: str | os.PathLike[str],
    catalog: Mapping[str, Any] | None = None,
    external_above: int = EXTERNAL_ABOVE,
) -> None:
    """Writes ``graph`` to ``path``; with large weights also to ``<path>.data``. Either both are complete or nothing is.

    Args:
        graph: a fused (or lifted, or raw) graph.
        original: the model it came from: its interface, metadata and further opset imports are kept.
        path: of the file.
        catalog: fusion name → entry, for the version and kernels that the file records.
        external_above: bytes of weights from which on they go to a file of their own.

    Raises:
        ModelError: an operator that has no spelling in stock ONNX operators, or a place that cannot be written.
    """
    source = None if original is None else read.read(original)[0]
    imports = {} if source is None else read.opset_imports(source.opset_import)
    opset = max(WRITTEN, imports.get("", 0))
    calls = _Calls(opset, catalog or {})
    constants, graph = graph.constants, graph.with_(constants=type(graph.constants)())
    body = write_graph(graph, opset, calls.write)
    _interface(body, source, graph)
    domains = {n.op.rpartition("::")[0] for n in _all_nodes(graph)} - {"", "fused"}
    opsets = [onnx.helper.make_opsetid("", opset)]
    opsets += [onnx.helper.make_opsetid(d, imports.get(d, 1)) for d in sorted(domains)]
    if calls.functions:
        opsets.append(onnx.helper.make_opsetid(DOMAIN, 1))
    model = onnx.helper.make_model(
        body, opset_imports=opsets, functions=list(calls.functions.values()), producer_name="fusionreg",
        ir_version=max(10, source.ir_version if source is not None else 0),
    )  # fmt: skip
    props = {} if source is None else {p.key: p.value for p in source.metadata_props}
    props |= {f"fusionreg.{name}": text for name, text in sorted(calls.records.items())}
    onnx.helper.set_model_props(model, props)
    if source is not None:
        model.doc_string, model.domain, model.model_version = source.doc_string, source.domain, source.model_version
    _write(model, constants, {n: v.dtype for n, v in graph.values.items()}, Path(path), external_above)


def _all_nodes(graph: Graph) -> Any:
    for node in graph.nodes:
        yield node
        for inner in node.graphs.values():
            yield from _all_nodes(inner)


def _interface(body: onnx.GraphProto, source: onnx.ModelProto | None, graph: Graph) -> None:
    """Inputs and outputs as the original declared them: names of axes, documentation, order."""
    if source is None:
        return
    for field_name, names in (("input", graph.inputs), ("output", graph.outputs)):
        declared = {i.name: i for i in getattr(source.graph, field_name)}
        written = getattr(body, field_name)
        kept = [declared[w.name] if _has_shape(declared.get(w.name)) else w for w in written]
        if [k.name for k in kept] == list(names):
            del written[:]
            written.extend(kept)
    body.name, body.doc_string = source.graph.name or body.name, source.graph.doc_string


def _has_shape(info: onnx.ValueInfoProto | None) -> bool:
    return info is not None and info.type.tensor_type.HasField("shape")


@dataclass
class _Calls:
    """The functions of the model under way: one for each distinct body."""

    opset: int
    catalog: Mapping[str, Any]
    functions: dict[str, onnx.FunctionProto] = field(default_factory=dict)
    records: dict[str, str] = field(default_factory=dict)

    def write(self, writer: Writer, node: Node) -> None:
        """The call that stands for a fused node."""
        fusion = node.op.removeprefix(FUSED)
        body, _ = canonical(node.graphs["body"])
        name = self.function(fusion, body)
        call = onnx.helper.make_node(
            name, [i for i in node.inputs if i], [o for o in node.outputs if o], node.name, domain=DOMAIN
        )
        if len(call.input) != len(body.inputs) or len(call.output) != len(body.outputs):
            raise ModelError("cannot save", node.name, "its body does not fit the call", "as many inputs and outputs")
        onnx.helper.set_model_props(call, self.properties(fusion, node))
        writer.nodes.append(call)

    def properties(self, fusion: str, node: Node | None = None) -> dict[str, str]:
        found = {"fusionreg.fusion": fusion}
        entry = self.catalog.get(fusion)
        if entry is not None:
            found["fusionreg.version"] = entry.spec.version
            found["fusionreg.kernels"] = ",".join(k.spec.name for k in entry.kernels)
        self.records[fusion] = json.dumps({k.removeprefix("fusionreg."): v for k, v in found.items()})
        if node is not None and node.attrs:
            found["fusionreg.attributes"] = ",".join(f"{k}={v}" for k, v in sorted(node.attrs.items()))
        return found

    def function(self, fusion: str, body: Graph) -> str:
        """Name of the function with this body, made on first use."""
        writer = Writer(body, self.opset)
        for name, array in body.constants.items():
            value = tensor_proto(array, body.values[name].dtype, "value")
            writer.nodes.append(onnx.helper.make_node("Constant", [], [name], value=value))
        for inner in body.nodes:
            writer.node(inner)
        proto = onnx.helper.make_function(
            DOMAIN, "body", list(body.inputs), list(body.outputs), writer.nodes,
            [onnx.helper.make_opsetid("", self.opset)],
        )  # fmt: skip
        digest = sha256(proto.SerializeToString(deterministic=True)).hexdigest()[:8]
        proto.name = name = f"{re.sub(r'[^A-Za-z0-9_]', '_', fusion)}_{digest}"
        onnx.helper.set_model_props(proto, self.properties(fusion))
        self.functions.setdefault(name, proto)
        return name


def _write(
    model: onnx.ModelProto, constants: Mapping[str, np.ndarray], dtypes: Mapping[str, str], path: Path, limit: int
) -> None:
    """Weights into the model, or beside it; files appear under their names only when complete."""
    outside = sum(a.nbytes for a in constants.values()) > limit
    data_path = path.with_name(path.name + ".data")
    made: list[tuple[str, Path]] = []
    try:
        for target in (path, data_path):
            if target.is_dir():
                raise IsADirectoryError(None, "a directory has that name")
        if outside:
            with _temporary(data_path) as data:
                made.append((data.name, data_path))
                for name, array in constants.items():
                    model.graph.initializer.append(_append(data, array, dtypes[name], name, data_path.name))
        else:
            model.graph.initializer.extend(tensor_proto(a, dtypes[n], n) for n, a in constants.items())
        with _temporary(path) as file:
            made.append((file.name, path))
            file.write(model.SerializeToString())
        for temporary, final in made:
            os.replace(temporary, final)
    except OSError as e:
        raise ModelError("cannot save", str(path), e.strerror or str(e), "a place that can be written") from e
    finally:
        for temporary, _ in made:
            Path(temporary).unlink(missing_ok=True)


def _temporary(path: Path) -> Any:
    """A new file beside ``path``; unlike those of ``tempfile`` with the permissions that any other new file gets."""
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}").open("xb")


def _append(data: Any, array: np.ndarray, kind: str, name: str, location: str) -> onnx.TensorProto:
    """One tensor into the data file; small ones stay in the model, so that shape inference can read them."""
    if array.nbytes < 1024 or kind == "string":
        return tensor_proto(array, kind, name)
    proto = tensor_proto(array, kind, name)
    raw = proto.raw_data
    proto.ClearField("raw_data")
    data.seek(-(-data.tell() // _ALIGN) * _ALIGN)
    proto.data_location = onnx.TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", data.tell()), ("length", len(raw))):
        proto.external_data.add(key=key, value=str(value))
    data.write(raw)
    return proto
