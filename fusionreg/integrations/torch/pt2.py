"""``.pt2`` files read without executing anything of them.

``torch.export.load`` unpickles the archive's sample inputs and evaluates its symbolic expressions as Python; a
crafted file runs commands that way. This loader opens the zip itself: the graph is JSON, weights are raw bytes (or,
in older files, pickles read with ``weights_only=True``), sample inputs and compiled libraries are never opened.
"""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from collections.abc import Mapping
from typing import Any

import torch

from fusionreg.core.errors import ModelError

from . import pt2_graph
from .archive import Archive, check_nested
from .program import Program

_NEXT = "Save the model again with torch.export.save"


def read(path: str | os.PathLike[str], model: str = "") -> Program:
    """The program in a ``.pt2`` file.

    Args:
        path: the file.
        model: which of its models; may be left out where there is one (or one named ``model``).

    Raises:
        ModelError: no ``.pt2``, damaged, of another schema version, or holding what only a pickle could bring.
    """
    with Archive(path) as archive:
        if "serialized_exported_program.json" in archive:
            document = archive.json("serialized_exported_program.json")
            weights = {**_legacy(archive, "state_dict"), **_legacy(archive, "constants")}
            return pt2_graph.read(document, weights, archive.whom)
        if "archive_format" not in archive or archive.read("archive_format") != b"pt2":
            raise archive.error("no archive_format 'pt2' inside", "a file written by torch.export.save", _NEXT)
        name = _choose(archive, model)
        document = archive.json(f"models/{name}.json")
        weights = {
            **_payload(archive, "weights", f"{name}_weights_config.json", name),
            **_payload(archive, "constants", f"{name}_constants_config.json", name),
        }
        return pt2_graph.read(document, weights, archive.whom)


def _choose(archive: Archive, model: str) -> str:
    found = [
        n[len("models/") : -len(".json")] for n in archive.names if n.startswith("models/") and n.endswith(".json")
    ]
    if not found:
        raise archive.error(
            "it holds no exported program", "models/*.json", "Export with torch.export, not AOTInductor"
        )
    chosen = model or (found[0] if len(found) == 1 else "model")
    if chosen not in found:
        raise archive.error(f"models {found}", f"a model named {chosen!r}", "Name one of them", models=tuple(found))
    return chosen


def _payload(archive: Archive, folder: str, config: str, model: str) -> dict[str, torch.Tensor]:
    legacy = f"data/{folder}/{model}.pt"
    if legacy in archive:
        return _unpickle(archive, legacy)
    table = archive.json(f"data/{folder}/{config}")
    if not isinstance(table, Mapping) or not isinstance(table.get("config"), Mapping):
        raise archive.error(f"data/{folder}/{config} is malformed", "a table of weights", _NEXT)
    buffers: dict[str, bytearray] = {}
    tensors: dict[str, torch.Tensor] = {}
    for name, meta in table["config"].items():
        try:
            entry = f"data/{folder}/{meta['path_name']}"
            if meta["use_pickle"] and meta["tensor_meta"] is None:
                continue  # an opaque object: a graph that needs it is refused for lack of data
            if meta["use_pickle"]:
                value = _unpickle_one(archive, entry)
            else:
                if entry not in buffers:
                    buffers[entry] = archive.read(entry)
                value = _strided(buffers[entry], meta["tensor_meta"])
        except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RuntimeError) as e:
            if isinstance(e, ModelError):
                raise
            raise archive.error(f"weight {name!r}: {e}", "raw data that covers its shape", _NEXT, weight=name) from e
        tensors[name] = value
    return tensors


def _strided(buffer: bytearray, meta: Mapping[str, Any]) -> torch.Tensor:
    """A view of the raw bytes; tensors that share an entry share memory, as they did in the module."""
    dtype = pt2_graph.dtype_of(meta["dtype"])
    shape, strides = ([pt2_graph.extent(d) for d in meta[field]] for field in ("sizes", "strides"))
    offset = pt2_graph.extent(meta["storage_offset"])
    if not all(isinstance(d, int) and d >= 0 for d in (*shape, *strides, offset)):
        raise ValueError(f"shape {shape}, strides {strides}, offset {offset}")
    if 0 in shape:
        return torch.empty([int(d) for d in shape], dtype=dtype)
    last = int(offset) + sum((int(d) - 1) * int(s) for d, s in zip(shape, strides, strict=True))
    size = torch.empty(0, dtype=dtype).element_size()
    if (last + 1) * size > len(buffer):
        raise ValueError(f"{len(buffer)} bytes for shape {shape}, strides {strides}, offset {offset}")
    flat = torch.frombuffer(buffer, dtype=dtype, count=len(buffer) // size)
    return flat.as_strided([int(d) for d in shape], [int(s) for s in strides], int(offset))


def _legacy(archive: Archive, what: str) -> dict[str, torch.Tensor]:
    for suffix in ("pt", "json"):
        if f"serialized_{what}.{suffix}" in archive:
            return _unpickle(archive, f"serialized_{what}.{suffix}")
    return {}


def _unpickle(archive: Archive, entry: str) -> dict[str, torch.Tensor]:
    value = _unpickle_one(archive, entry)
    if not isinstance(value, Mapping):
        raise archive.error(f"{entry!r} holds a {type(value).__name__}", "a dict of tensors", _NEXT)
    return {str(k): v for k, v in value.items() if isinstance(v, torch.Tensor)}


def _unpickle_one(archive: Archive, entry: str) -> Any:
    data = archive.read(entry)
    if not data:
        return {}
    try:
        check_nested(data, archive.whom)
        value = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, zipfile.BadZipFile, RuntimeError, EOFError, ValueError, KeyError, TypeError) as e:
        if isinstance(e, ModelError):
            raise
        raise archive.error(
            f"{entry!r} is more than plain tensors ({type(e).__name__})", "tensors that load with weights_only", _NEXT
        ) from e
    return value.detach() if isinstance(value, torch.Tensor) else value
