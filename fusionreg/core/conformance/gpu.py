"""Conformance on a GPU: guarded buffers, a stream of its own, graph replay with other pointers. Floor 7."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np

from ..cache import Cache
from ..compiler import compile_source
from ..compiler.nvrtc import version as nvrtc_version
from ..errors import FusionregError, LaunchError, MissingDependencyError
from ..frozen import FrozenDict
from ..registry.library_calls import PreparedCall
from ..render import KernelSource
from ..runtime.driver import config, driver
from ..runtime.kernels import Loaded, device_target, load, prepare_call
from ..runtime.launch import argument_values
from ..runtime.libraries import in_order
from ..runtime.tensor_maps import MapEncoder
from .execute import Job, Outputs, difference, empty_outputs

if TYPE_CHECKING:
    from ..registry.entries import KernelEntry

#: Bytes on both sides of every buffer, all ones (NaN); a multiple of every alignment that a tensor may have.
GUARD = 4096

_CTYPES = {"long long": ctypes.c_longlong, "int": ctypes.c_int, "float": ctypes.c_float, "double": ctypes.c_double}


@dataclass
class _Buffer:
    """Device memory of one tensor between two guards.

    Attributes:
        raw: the whole allocation, as bytes.
        start: where the tensor's memory begins in it.
        held: what the tensor's memory held when it was uploaded.
    """

    raw: Any
    start: int
    held: np.ndarray

    @property
    def pointer(self) -> int:
        return self.raw.data.ptr + self.start

    def read(self) -> np.ndarray:
        return self.raw.get()[self.start : self.start + self.held.size]

    def torn(self) -> str:
        """Which guard was written, "" for none."""
        raw = self.raw.get()
        for side, part in (("before", raw[: self.start]), ("after", raw[self.start + self.held.size :])):
            wrong = np.flatnonzero(part != 0xFF)
            if wrong.size:
                at = self.start - int(wrong[-1]) if side == "before" else int(wrong[0])
                return f"{wrong.size} bytes {side} it, the nearest {at} bytes away"
        return ""


class GpuExecutor:
    """The current GPU. Every launch runs on a non-blocking stream of its own, on freshly poisoned buffers."""

    def __init__(self, cache: Cache | None = None) -> None:
        try:
            import cupy
        except ImportError as e:
            raise MissingDependencyError(
                "cannot use", "a GPU", str(e), "CuPy", "Install it with: pip install 'fusionreg[cuda13]'"
            ) from None
        self._cupy, self._driver, self._cache = cupy, driver(), cache
        if not self._driver.device_count():
            raise MissingDependencyError("cannot use", "a GPU", "the driver finds none", "a CUDA device")
        self._index = cupy.cuda.runtime.getDevice()
        self.device, self.target = self._driver.name(self._index), device_target(self._index)
        self.multiprocessors = self._driver.multiprocessors(self._index)
        self.facts: FrozenDict[str, str] = FrozenDict(
            gpu=self.device, driver=self._driver.version(), nvrtc=nvrtc_version()
        )
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self._codes: dict[str, Any] = {}
        self._loaded: dict[str, Loaded] = {}
        self._calls: dict[Any, PreparedCall] = {}
        self._lock = Lock()

    def refusal(self, kernel: KernelEntry) -> str:
        return kernel.library.missing() if kernel.library is not None else ""

    def compile(self, source: KernelSource, *, stressed: bool = False, alone: bool = False) -> Any:
        if source.library:
            return None
        found = self._codes.get(source.digest)
        if found is None:
            try:
                found = compile_source(source, self._cache)
            except FusionregError as e:
                found = e
            with self._lock:
                self._codes[source.digest] = found
        if isinstance(found, FusionregError):
            raise found
        return found

    def _load(self, code: Any, job: Job) -> Loaded | PreparedCall:
        if job.kernel.library is not None:
            key = (job.kernel.key, job.problem)
            if key not in self._calls:
                self._calls[key] = prepare_call(job.candidate, job.problem, self._index)
            return self._calls[key]
        loaded = self._loaded.get(job.source.digest)
        if loaded is None:
            loaded = self._loaded[job.source.digest] = Loaded(job.source, code, *load(code, self._index))
        loaded.allow(self._driver, job.candidate.launch.shared_memory)
        return loaded

    def launch(self, code: Any, job: Job, poison: float) -> Outputs:
        loaded = self._load(code, job)
        with _reported(job, self._cupy):
            inputs, outputs = self._upload(job, poison)
            self._start(loaded, job, inputs | outputs, self._stream.ptr)
            self._stream.synchronize()
            self._check(job, inputs, outputs)
            return self._download(job, outputs)

    def stress(self, code: Any, job: Job, expected: Outputs) -> str:
        loaded, cupy = self._load(code, job), self._cupy
        with _reported(job, cupy):
            inputs, outputs = self._upload(job, float("nan"))
            self._start(loaded, job, inputs | outputs, 0)
            cupy.cuda.runtime.deviceSynchronize()
            if differs := difference(expected, self._download(job, outputs)):
                return f"on the default stream, {differs}"
            inputs, outputs = self._upload(job, float("nan"))  # other pointers
            with self._stream:
                self._stream.begin_capture()
                self._start(loaded, job, inputs | outputs, self._stream.ptr)
                graph = self._stream.end_capture()
                for turn in ("first", "second"):
                    graph.launch(stream=self._stream)
                    self._stream.synchronize()
                    if differs := difference(expected, self._download(job, outputs)):
                        return f"in the {turn} replay of a CUDA graph, {differs}"
                    for buffer in outputs.values():
                        buffer.raw[buffer.start : buffer.start + buffer.held.size] = 0xFF
                    cupy.cuda.runtime.deviceSynchronize()
            self._check(job, inputs, outputs)
        return ""

    def lost(self) -> str:
        try:
            self._cupy.cuda.runtime.deviceSynchronize()
        except self._cupy.cuda.runtime.CUDARuntimeError as e:
            return str(e)
        return ""

    def _upload(self, job: Job, poison: float) -> tuple[dict[str, _Buffer], dict[str, _Buffer]]:
        inputs = {name: self._buffer(_span(a), _address(a) % 256) for name, a in job.arrays.items()}
        outputs = {name: self._buffer(_span(a), 0) for name, a in empty_outputs(job, poison).items()}
        if size := job.candidate.launch.workspace:
            outputs["workspace"] = self._buffer(np.full(size, 0xFF, np.uint8), 0)
        self._cupy.cuda.runtime.deviceSynchronize()
        return inputs, outputs

    def _buffer(self, held: np.ndarray, offset: int) -> _Buffer:
        raw = self._cupy.full(held.size + 2 * GUARD + 512, 0xFF, np.uint8)
        start = -raw.data.ptr % 256 + GUARD + offset
        if held.size:
            raw[start : start + held.size] = self._cupy.asarray(held)
        return _Buffer(raw, start, held)

    def _start(
        self, loaded: Loaded | PreparedCall, job: Job, buffers: dict[str, _Buffer], stream: int
    ) -> None:
        if not isinstance(loaded, Loaded):
            tensors = [buffers[a.name].pointer for a in job.source.arguments if a.kind != "workspace"]
            loaded(tensors, buffers["workspace"].pointer if "workspace" in buffers else 0, stream)
            return
        values = argument_values(job.problem, job.source.arguments)
        layouts = {m.name: m for m in job.candidate.maps}
        packed: list[Any] = []
        addresses: list[int] = []
        for a in job.source.arguments:
            if a.kind == "tensor_map":
                layout = layouts[a.name]
                encoder = MapEncoder(self._driver, layout, job.kernel.key)
                packed.append(encoder.encoded(buffers[layout.operand].pointer))
                addresses.append(packed[-1].address)
                continue
            packed.append(
                ctypes.c_uint64(buffers[a.name].pointer) if a.pointer else _CTYPES[a.ctype](values[a.parameter])
            )
            addresses.append(ctypes.addressof(packed[-1]))
        parameters = (ctypes.c_void_p * max(1, len(packed)))(*addresses)
        shape = job.candidate.launch
        ready = config(
            shape.grid, shape.block, shape.shared_memory, shape.cluster, shape.cooperative, shape.programmatic
        )
        ready.stream = stream
        code = self._driver.launch(ctypes.addressof(ready), loaded.function, ctypes.addressof(parameters), None)
        self._driver.check(code, job.kernel.key)

    def _check(self, job: Job, inputs: dict[str, _Buffer], outputs: dict[str, _Buffer]) -> None:
        for name, buffer in (inputs | outputs).items():
            if torn := buffer.torn():
                raise LaunchError(
                    "wrong access", f"by {job.kernel.key}", f"it wrote around {name}: {torn}", tensor=name
                )
        for name, buffer in inputs.items():
            if not np.array_equal(buffer.read(), buffer.held):
                raise LaunchError("wrong access", f"by {job.kernel.key}", f"it changed its input {name}", tensor=name)

    def _download(self, job: Job, outputs: dict[str, _Buffer]) -> Outputs:
        found: Outputs = {}
        for name in job.problem.output_names:
            tensor = job.problem.tensors[name]
            assert tensor is not None, "an output is always present"
            flat, shape = outputs[name].read().view(_kind(tensor.dtype)), job.problem.shapes[name]
            strides = job.problem.strides.get(name)
            found[name] = flat.reshape(shape) if strides is None else in_order(flat, shape, strides)
        return found


def _kind(name: str) -> np.dtype:
    from ..dtypes import dtype

    return dtype(name).numpy


def _address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def _span(array: np.ndarray) -> np.ndarray:
    """The memory from an array's first to its last element as bytes, gaps included; strides are not negative."""
    if not array.size:
        return np.empty(0, np.uint8)
    size = sum((n - 1) * s for n, s in zip(array.shape, array.strides, strict=True)) + array.itemsize
    return np.frombuffer((ctypes.c_uint8 * size).from_address(_address(array)), np.uint8).copy()


@contextmanager
def _reported(job: Job, cupy: Any) -> Iterator[None]:
    """An error of the driver or of CuPy in our form."""
    try:
        yield
    except (cupy.cuda.runtime.CUDARuntimeError, cupy.cuda.driver.CUDADriverError) as e:
        raise LaunchError("cannot run", job.kernel.key, str(e)) from None
