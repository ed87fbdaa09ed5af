"""The original model, run by onnxruntime with every optimisation off: what a fused model is compared with.

Also random inputs for a model that comes without any.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from ...core.dtypes import dtype
from ...core.errors import FusionregError, MissingDependencyError
from ...core.ir import Graph, Value
from . import read
from .ranges import integer_ranges

#: onnxruntime takes a serialised model up to protobuf's limit; larger ones must come from a path.
_LIMIT = 2**31 - 1


@dataclass(frozen=True)
class Missing:
    """There is no reference; ``reason`` says why. A caller reports SKIPPED, never PASSED."""

    reason: str

    def __bool__(self) -> bool:
        return False


class Reference:
    """One model in an onnxruntime session; :attr:`missing` says why there is none.

    Args:
        model: as :func:`~fusionreg.integrations.onnx.load.load` takes it.
        folder: where weights in other files lie, for a model that does not come from a path.
    """

    def __init__(self, model: read.Source, folder: str | os.PathLike[str] | None = None) -> None:
        self.session: Any = None
        self.missing: Missing | None = None
        try:
            self.session = _session(model, folder)
        except (MissingDependencyError, _Refused) as e:
            self.missing = Missing(str(e))

    def run(self, inputs: Mapping[str, Any]) -> dict[str, np.ndarray] | Missing:
        """Outputs by name (bfloat16 and float8 as ml_dtypes arrays), or why onnxruntime gave none."""
        if self.missing is not None:
            return self.missing
        try:
            return _run(self.session, inputs)
        except Exception as e:  # onnxruntime raises classes of its own module for each status code
            return Missing(f"onnxruntime failed: {_first_line(e)}")


def run(
    model: read.Source, inputs: Mapping[str, Any], folder: str | os.PathLike[str] | None = None
) -> dict[str, np.ndarray] | Missing:
    """One run of the original model: outputs by name, or a :class:`Missing` with the reason."""
    return Reference(model, folder).run(inputs)


class _Refused(Exception):
    """onnxruntime would not take the model."""


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _session(model: read.Source, folder: str | os.PathLike[str] | None) -> Any:
    try:
        import onnxruntime as ort
    except ImportError as e:
        raise MissingDependencyError(
            "no reference", "", "onnxruntime is not installed", "the extra onnx", "Run: pip install 'fusionreg[onnx]'"
        ) from e
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    options.intra_op_num_threads = max(1, min(4, os.cpu_count() or 1))
    proto, root, _ = read.read(model, folder)
    try:
        if isinstance(model, str | os.PathLike) and not _has_zero_extents(proto):
            # by path, so that weights in other files are found beside it
            return ort.InferenceSession(os.fspath(Path(model)), options, providers=["CPUExecutionProvider"])
        copy = onnx.ModelProto()
        copy.CopyFrom(proto)
        _free_zero_extents(copy)
        if root is not None:
            onnx.external_data_helper.load_external_data_for_model(copy, str(root))
        if copy.ByteSize() > _LIMIT:
            raise _Refused("onnxruntime takes no model over 2 GB from memory")
        return ort.InferenceSession(copy.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except _Refused:
        raise
    except Exception as e:
        raise _Refused(f"onnxruntime cannot load it: {_first_line(e)}") from e


def _has_zero_extents(proto: onnx.ModelProto) -> bool:
    return any(
        d.HasField("dim_value") and d.dim_value == 0 for i in proto.graph.input for d in i.type.tensor_type.shape.dim
    )


def _free_zero_extents(proto: onnx.ModelProto) -> None:
    """An extent of 0 written for "unknown" would make onnxruntime refuse every other extent."""
    for i in proto.graph.input:
        for d in i.type.tensor_type.shape.dim:
            if d.HasField("dim_value") and d.dim_value == 0:
                d.Clear()


def _run(session: Any, inputs: Mapping[str, Any]) -> dict[str, np.ndarray]:
    names = [o.name for o in session.get_outputs()]
    wanted = {i.name for i in (*session.get_inputs(), *session.get_overridable_initializers())}
    feed = {k: _to_ort(v) for k, v in inputs.items() if k in wanted}
    outputs = session.run_with_ort_values(names, feed)
    return {name: _from_ort(value) for name, value in zip(names, outputs, strict=True)}


def _to_ort(array: Any) -> Any:
    import onnxruntime as ort

    array = np.asarray(array)
    for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
        if array.dtype == dtype(name).numpy:
            raw = np.ascontiguousarray(array).view(np.uint16 if array.itemsize == 2 else np.uint8)
            return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(raw, dtype(name).onnx)
    return ort.OrtValue.ortvalue_from_numpy(np.asarray(array, order="C"))


def _from_ort(value: Any) -> np.ndarray:
    kind = value.element_type() if value.is_tensor() else 0
    name = onnx.TensorProto.DataType.Name(kind).lower().replace("float8e4m3fn", "float8_e4m3fn") if kind else ""
    name = name.replace("float8e5m2", "float8_e5m2") if name != "float8e5m2fnuz" else name
    if name in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
        import ctypes

        target = dtype(name).numpy
        shape = tuple(value.shape())
        count = int(np.prod(shape, dtype=np.int64))
        raw = ctypes.string_at(value.data_ptr(), count * target.itemsize) if count else b""
        return np.frombuffer(raw, target).reshape(shape)
    return np.array(value.numpy(), copy=True)


def example_inputs(graph: Graph, seed: int = 0, sizes: Mapping[str, int] | None = None) -> dict[str, np.ndarray]:
    """Random inputs that a model can be run on, by name; overridable initialisers keep their values.

    Args:
        graph: the model.
        seed: of the generator; the same seed gives the same arrays.
        sizes: extents of symbolic axes by name; an axis that is not named gets 2.

    Floats are normal with deviation 1; bools are fair coins; integers that are used as indices lie inside what they
    index, other integers in [0, 8).
    :class:`FusionregError` for an input whose rank or type is unknown.
    """
    rng = np.random.default_rng(seed)
    ranges = integer_ranges(graph)
    chosen = dict(sizes or {})
    return {
        name: _random(graph.values[name], rng, ranges.get(name, (0, 8)), chosen)
        for name in graph.inputs
        if name not in graph.overridable
    }


def _random(value: Value, rng: np.random.Generator, bounds: tuple[int, int], sizes: dict[str, int]) -> np.ndarray:
    if value.shape is None:
        raise FusionregError("no example input", value.name, "its rank is unknown", "a shape", "Pass inputs yourself")
    shape = tuple(d if isinstance(d, int) else sizes.setdefault(d, 2) for d in value.shape)
    kind = dtype(value.dtype)
    if kind.name == "string":
        return np.full(shape, "a", object)
    if kind.kind == "b":
        return rng.integers(0, 2, shape).astype(bool)
    if kind.kind in "iu":
        low, high = bounds
        return rng.integers(low, max(low + 1, high), shape).astype(kind.numpy)
    if kind.kind == "c":
        return (rng.standard_normal(shape) + 1j * rng.standard_normal(shape)).astype(kind.numpy)
    return rng.standard_normal(shape).astype(kind.numpy)
