"""Reads an ONNX model without running anything of it and without leaving its folder.

Everything that is wrong with a file is a :class:`~fusionreg.core.errors.ModelError` that names the file.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from ...core.errors import MissingDependencyError, ModelError

try:
    import onnx
    import onnx_ir
except ImportError as missing:  # pragma: no cover - exercised by an environment without the extra
    raise MissingDependencyError(
        "cannot read ONNX models", "", f"{missing.name} is not installed", "the extra onnx",
        "Install it with: pip install 'fusionreg[onnx]'",
    ) from missing  # fmt: skip

#: Oldest opset of the default domain that is understood, and the newest whose operators were compared with ours.
OLDEST, NEWEST = 7, onnx.defs.onnx_opset_version()

#: What :func:`read` accepts.
Source = str | os.PathLike[str] | bytes | onnx.ModelProto | onnx_ir.Model


def read(model: Source, folder: str | os.PathLike[str] | None = None) -> tuple[onnx.ModelProto, Path | None, str]:
    """The model as a protobuf whose weights in other files are still references; its folder; and a name for messages.

    Args:
        model: a path, the bytes of a file, a ``ModelProto`` or an ``onnx_ir.Model``.
        folder: where weights in other files lie; the file's own folder unless given.

    Raises:
        ModelError: the file is missing, empty, truncated or no ONNX model, or its opset is not understood.
    """
    whom = "<memory>"
    if isinstance(model, onnx_ir.Model):
        proto = onnx_ir.to_proto(model)
    elif isinstance(model, onnx.ModelProto):
        proto = model
    elif isinstance(model, bytes):
        proto = _parse(model, whom)
    else:
        path = Path(model)
        whom = str(path)
        try:
            data = path.read_bytes()
        except OSError as e:
            raise ModelError("cannot read model", whom, e.strerror or str(e), "a readable .onnx file", path=whom) from e
        proto = _parse(data, whom)
        folder = path.absolute().parent if folder is None else folder
    _check(proto, whom)
    return proto, None if folder is None else Path(folder).absolute(), whom


def _parse(data: bytes, whom: str) -> onnx.ModelProto:
    if not data:
        raise ModelError("cannot read model", whom, "the file is empty", "an ONNX model", path=whom)
    try:
        return onnx.ModelProto.FromString(data)
    except Exception as e:  # protobuf's DecodeError is not public under one name
        raise ModelError(
            "cannot read model", whom, f"{len(data)} bytes that are no ONNX protobuf ({e})",
            "a complete .onnx file", "Was the download cut off, or is it a Git LFS pointer", path=whom,
        ) from e  # fmt: skip


def _check(proto: onnx.ModelProto, whom: str) -> None:
    """Random bytes can parse as an empty message, and a cut file as half a graph: ask for what every model has."""
    if not proto.ir_version or not proto.HasField("graph") or not proto.graph.output:
        raise ModelError("cannot read model", whom, "no graph with outputs", "a complete ONNX model", path=whom)
    version = opset_imports(proto.opset_import).get("", 0)
    if version == 0 and any(n.domain in ("", "ai.onnx") for n in proto.graph.node):
        raise ModelError("cannot read model", whom, "it imports no opset", "an opset_import of ai.onnx", path=whom)
    if version and not OLDEST <= version <= NEWEST:
        raise ModelError(
            "cannot read model", whom, f"it uses opset {version}", f"opset {OLDEST} to {NEWEST}",
            "Convert it with onnx.version_converter.convert_version", opset=version, path=whom,
        )  # fmt: skip


def opset_imports(imports: Any) -> dict[str, int]:
    """Domain → version; the default domain is ``""``."""
    return {"" if o.domain == "ai.onnx" else o.domain: int(o.version) for o in imports}


def densify(graph: onnx.GraphProto, folder: Path | None, whom: str) -> onnx.GraphProto:
    """The graph with sparse initialisers and sparse constants made dense, sub-graphs included.

    The given graph is left alone: a copy comes back where something had to change.
    """
    if not _has_sparse(graph):
        return graph
    copy = onnx.GraphProto()
    copy.CopyFrom(graph)
    _densify(copy, folder, whom)
    return copy


def _has_sparse(graph: onnx.GraphProto) -> bool:
    return bool(graph.sparse_initializer) or any(
        a.HasField("sparse_tensor") or (a.HasField("g") and _has_sparse(a.g)) for n in graph.node for a in n.attribute
    )


def _densify(graph: onnx.GraphProto, folder: Path | None, whom: str) -> None:
    for sparse in graph.sparse_initializer:
        graph.initializer.append(_dense(sparse, folder, whom))
    graph.ClearField("sparse_initializer")
    for node in graph.node:
        for a in node.attribute:
            if a.HasField("sparse_tensor"):
                dense = _dense(a.sparse_tensor, folder, whom)
                a.Clear()
                a.CopyFrom(onnx.helper.make_attribute("value", dense))
            elif a.HasField("g"):
                _densify(a.g, folder, whom)


def _dense(sparse: onnx.SparseTensorProto, folder: Path | None, whom: str) -> onnx.TensorProto:
    values = array(onnx_ir.from_proto(sparse.values), folder, whom)
    indices = array(onnx_ir.from_proto(sparse.indices), folder, whom)
    dense = np.zeros(tuple(sparse.dims), values.dtype)
    try:
        if indices.ndim == 1:
            dense.reshape(-1)[indices] = values
        else:
            dense[tuple(indices.T)] = values
    except (IndexError, ValueError) as e:
        raise ModelError(
            "cannot read model", whom, f"sparse tensor {sparse.values.name!r}: {e}", "indices inside its shape"
        ) from e
    proto = onnx_ir.to_proto(onnx_ir.tensor(dense, name=sparse.values.name))
    assert isinstance(proto, onnx.TensorProto)
    return proto


def array(tensor: Any, folder: Path | None, whom: str) -> np.ndarray:
    """The values of an ``onnx_ir`` tensor; those in another file are memory-mapped, and only inside ``folder``.

    Raises:
        ModelError: the data stand outside the folder (absolute path, ``..``, symlink), are missing or too short.
    """
    name = tensor.name or "constant"
    if isinstance(tensor, onnx_ir.ExternalTensor):
        tensor = _external(tensor, folder, whom, name)
    try:
        values = tensor.numpy()
        if isinstance(tensor, onnx_ir.StringTensor):
            values = np.array([s.decode("utf-8") for s in values.reshape(-1)], object).reshape(values.shape)
    except Exception as e:  # whatever onnx_ir or NumPy say of malformed data
        raise ModelError(
            "cannot read model", whom, f"tensor {name!r}: {e}", "data that fill its shape", tensor=name
        ) from e
    if values.shape != tuple(int(d) for d in tensor.shape):
        raise ModelError("cannot read model", whom, f"tensor {name!r} has shape {values.shape}", f"{tensor.shape}")
    return values


def _external(tensor: Any, folder: Path | None, whom: str, name: str) -> Any:
    def refuse(found: str, expected: str, next_step: str = "") -> ModelError:
        return ModelError(
            "cannot read model", whom, f"data of tensor {name!r}: {found}", expected, next_step, tensor=name
        )

    where = os.fspath(tensor.location)
    if folder is None:
        raise refuse(f"in file {where!r}", "a model read from a path, or folder=", "Pass the model's folder")
    if not where or os.path.isabs(where) or "\0" in where or ":" in where.split("/")[0]:
        raise refuse(f"location {where!r}", "a path relative to the model's folder")
    path, root = (folder / where).resolve(), folder.resolve()
    if not path.is_relative_to(root):
        raise refuse(
            f"location {where!r} leads out of the model's folder", "a file inside it", "Copy the data file there"
        )
    if not path.is_file():
        raise refuse(f"file {where!r} is missing", "a file beside the model")
    size, offset, nbytes = path.stat().st_size, tensor.offset or 0, int(tensor.nbytes)
    if offset < 0 or offset + nbytes > size:
        raise refuse(f"file {where!r} has {size} bytes", f"at least {offset + nbytes}")
    if tensor.length is not None and tensor.length not in (0, nbytes):
        raise refuse(f"length {tensor.length}", f"{nbytes} bytes for its shape and type")
    return onnx_ir.ExternalTensor(
        where, tensor.offset, tensor.length, tensor.dtype, shape=tensor.shape, name=name, base_dir=folder
    )
