"""A GPU made of nothing: a driver library that records, and NumPy arrays that claim to live on a device."""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass, field
from typing import Any

from fusionreg.core.runtime import dispatch, kernels, libraries
from fusionreg.core.runtime.driver import Config, Driver
from fusionreg.core.runtime.libraries import Place


@dataclass
class Launched:
    """One launch as the driver would read it from memory."""

    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared: int
    stream: int
    attributes: dict[int, tuple[int, ...]]
    function: int
    parameters: list[int]

    def value(self, index: int, kind: Any = ctypes.c_longlong) -> Any:
        return kind.from_address(self.parameters[index]).value


@dataclass
class Encoded:
    """The arguments of one ``cuTensorMapEncodeTiled``; the map itself is its number and its address."""

    type: int
    address: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    steps: tuple[int, ...]
    interleave: int
    swizzle: int
    promotion: int
    fill: int


class _Function:
    """Stands where a ctypes function would; arguments arrive as addresses or references."""

    def __init__(self, answer):
        self.answer = answer
        self.argtypes: Any = None
        self.restype: Any = None

    def __call__(self, *arguments):
        return self.answer(*arguments)


def _store(kind, reference, value):
    ctypes.cast(reference, ctypes.POINTER(kind))[0] = value
    return 0


@dataclass
class FakeLibrary:
    """``libcuda`` of a machine with ``devices`` GPUs of compute capability ``capability``."""

    devices: int = 1
    capability: tuple[int, int] = (9, 0)
    fail: list[int] = field(default_factory=list)  # codes that the next launches answer with
    launches: list[Launched] = field(default_factory=list)
    contexts: list[int] = field(
        default_factory=lambda: [1000]
    )  # the stack of this thread; context of device i is 1000 + i
    shared: dict[int, int] = field(default_factory=dict)
    capturing: bool = False
    managed: set[int] = field(default_factory=set)  # addresses of managed memory
    known: set[int] = field(default_factory=set)  # of other memory that CUDA has
    resident: int = 8  # blocks of any kernel that a multiprocessor holds
    parameters: int = 0
    encoded: list[Encoded] = field(default_factory=list)
    fail_encoding: list[int] = field(default_factory=list)  # codes that the next encodings answer with

    def __post_init__(self):
        for name in [n for n in dir(self) if n.startswith("_cu")]:
            setattr(self, name[1:], _Function(getattr(self, name)))

    def _cuInit(self, flags):
        return 0

    def _cuDeviceGetCount(self, out):
        return _store(ctypes.c_int, out, self.devices)

    def _cuDeviceGetAttribute(self, out, attribute, device):
        return _store(ctypes.c_int, out, {75: self.capability[0], 76: self.capability[1], 16: 132}[attribute])

    def _cuDeviceGetName(self, text, size, device):
        text.value = b"Fake GPU"
        return 0

    def _cuDriverGetVersion(self, out):
        return _store(ctypes.c_int, out, 13000)

    def _cuDevicePrimaryCtxRetain(self, out, device):
        return _store(ctypes.c_void_p, out, 1000 + device)

    def _cuCtxGetCurrent(self, out):
        return _store(ctypes.c_void_p, out, self.contexts[-1] if self.contexts else None)

    def _cuCtxPushCurrent_v2(self, context):
        self.contexts.append(context)
        return 0

    def _cuCtxPopCurrent_v2(self, out):
        self.contexts.pop()
        return 0

    def _cuStreamIsCapturing(self, stream, out):
        return _store(ctypes.c_int, out, int(self.capturing))

    def _cuPointerGetAttribute(self, out, attribute, address):
        assert attribute == 8  # is managed
        return _store(ctypes.c_uint, out, address in self.managed) if address in self.managed | self.known else 1

    def _cuFuncSetAttribute(self, function, attribute, value):
        assert attribute == 8
        self.shared[function] = value
        return 0

    def _cuOccupancyMaxActiveBlocksPerMultiprocessor(self, out, function, threads, shared):
        assert self.contexts and threads > 0
        return _store(ctypes.c_int, out, self.resident)

    def _cuGetErrorName(self, code, out):
        return _store(ctypes.c_char_p, out, b"CUDA_ERROR_FAKE")

    def _cuGetErrorString(self, code, out):
        return _store(ctypes.c_char_p, out, b"a fake failure")

    def _cuLaunchKernelEx(self, config, function, parameters, extra):
        if self.fail:
            return self.fail.pop(0)
        if not self.contexts:
            return 201
        packed = Config.from_address(config)
        attributes = {packed.attributes[i].id: tuple(packed.attributes[i].value) for i in range(packed.count)}
        slots = (ctypes.c_void_p * self.parameters).from_address(parameters)
        self.launches.append(
            Launched(
                tuple(packed.grid), tuple(packed.block), packed.shared, packed.stream or 0, attributes, function,
                [int(s or 0) for s in slots],
            )
        )  # fmt: skip
        return 0


    def _cuTensorMapEncodeTiled(
        self, block, type_, rank, address, dims, strides, box, steps, interleave, swizzle, promotion, fill
    ):
        if self.fail_encoding:
            return self.fail_encoding.pop(0)
        if not self.contexts:
            return 201
        assert block % 64 == 0 and address % 16 == 0
        wide, narrow = ctypes.c_uint64, ctypes.c_uint32
        read = ((wide, dims, rank), (wide, strides, rank - 1), (narrow, box, rank), (narrow, steps, rank))
        arrays = (tuple((kind * count).from_address(at)) for kind, at, count in read)
        self.encoded.append(Encoded(type_, address, *arrays, interleave, swizzle, promotion, fill))
        ctypes.memmove(block, struct.pack("<16Q", len(self.encoded), address, *range(14)), 128)
        return 0


def install(monkeypatch, library: FakeLibrary, device_of=lambda a: 0, stream=lambda index: 77 + index) -> list[Any]:
    """Makes the runtime believe in the fake; returns the kernels it loads."""
    fake, loaded = Driver(library), []

    def load(code, device):
        library.parameters = max(library.parameters, 64)
        loaded.append((code, device))
        return object(), 5000 + len(loaded)

    for module in (dispatch, kernels, libraries):
        monkeypatch.setattr(module, "driver", lambda: fake)
    monkeypatch.setattr(kernels, "load", load)
    monkeypatch.setattr(libraries._Numpy, "place", lambda self, a: Place("cuda", device_of(a)))
    monkeypatch.setattr(libraries._Numpy, "stream", lambda self: stream)
    kernels.device_target.cache_clear()
    monkeypatch.setattr(dispatch, "device_target", lambda device: kernels.device_target.__wrapped__(device))
    return loaded
