"""The few driver calls that a launch needs, through the driver's C interface. Floor 6.

CuPy loads cubins but cannot launch with attributes, and the Python objects of cuda.core and cuda.bindings cost more
than the launch. Here a launch is one C call on structures that were packed once.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import Any

from ..errors import LaunchError, MissingDependencyError

INVALID_CONTEXT, NOT_READY = 201, 600
_CAPABILITY_MAJOR, _CAPABILITY_MINOR, _MULTIPROCESSORS = 75, 76, 16
_MAX_DYNAMIC_SHARED = 8
_IS_MANAGED = 8  # of CUpointer_attribute
#: A kernel may use this much dynamic shared memory without asking.
SHARED_WITHOUT_ASKING = 49_152

_COOPERATIVE, _CLUSTER, _PROGRAMMATIC = 2, 4, 6  # CUlaunchAttributeID


class Attribute(ctypes.Structure):
    """``CUlaunchAttribute``: an id, padding, and a value of 64 bytes."""

    _fields_ = [("id", ctypes.c_uint), ("pad", ctypes.c_uint), ("value", ctypes.c_uint * 16)]


class Config(ctypes.Structure):
    """``CUlaunchConfig``."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(Attribute)),
        ("count", ctypes.c_uint),
    ]


def config(grid: Any, block: Any, shared: int, cluster: Any, cooperative: bool, programmatic: bool) -> Config:
    """A packed launch configuration; its stream is set at each launch."""
    wanted: list[Attribute] = []
    if cooperative:
        wanted.append(Attribute(_COOPERATIVE, 0, (ctypes.c_uint * 16)(1)))
    if cluster:
        wanted.append(Attribute(_CLUSTER, 0, (ctypes.c_uint * 16)(*cluster)))
    if programmatic:
        wanted.append(Attribute(_PROGRAMMATIC, 0, (ctypes.c_uint * 16)(1)))
    packed = Config((ctypes.c_uint * 3)(*grid), (ctypes.c_uint * 3)(*block), shared)
    if wanted:
        packed.attributes = (Attribute * len(wanted))(*wanted)
        packed.count = len(wanted)
    return packed


class Driver:
    """The driver library of this machine. Its functions answer with a code; :meth:`check` makes an error of it."""

    def __init__(self, library: Any) -> None:
        self.library = library
        for name, arguments in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, ctypes.c_int
        #: ``launch(config, function, parameters, None) -> code``: the hot path calls it as it is
        self.launch = library.cuLaunchKernelEx
        self._contexts: dict[int, int] = {}

    def check(self, code: int, whom: str, what: str = "cannot launch", next_step: str = "") -> None:
        """:class:`LaunchError` naming the driver's error unless ``code`` is success."""
        if code:
            name, text = self._describe(code)
            raise LaunchError(
                what, whom, f"the driver says {name} ({code}): {text}", "", next_step, code=code, name=name
            )

    def _describe(self, code: int) -> tuple[str, str]:
        out = ctypes.c_char_p()
        texts = []
        for function in (self.library.cuGetErrorName, self.library.cuGetErrorString):
            texts.append(
                out.value.decode() if function(code, ctypes.byref(out)) == 0 and out.value else "unknown error"
            )
        return texts[0], texts[1]

    def device_count(self) -> int:
        """Devices; 0 where the driver finds none."""
        count = ctypes.c_int()
        if self.library.cuInit(0) or self.library.cuDeviceGetCount(ctypes.byref(count)):
            return 0
        return count.value

    def attribute(self, device: int, attribute: int) -> int:
        value = ctypes.c_int()
        code = self.library.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
        self.check(code, f"on device {device}", "cannot ask about a device")
        return value.value

    def capability(self, device: int) -> tuple[int, int]:
        """Compute capability."""
        return self.attribute(device, _CAPABILITY_MAJOR), self.attribute(device, _CAPABILITY_MINOR)

    def multiprocessors(self, device: int) -> int:
        return self.attribute(device, _MULTIPROCESSORS)

    def name(self, device: int) -> str:
        text = ctypes.create_string_buffer(200)
        return text.value.decode() if not self.library.cuDeviceGetName(text, 200, device) else f"device {device}"

    def version(self) -> str:
        """The newest CUDA version that this driver supports, e.g. ``"13.0"``."""
        value = ctypes.c_int()
        return "unknown" if self.library.cuDriverGetVersion(ctypes.byref(value)) else _dotted(value.value)

    def context(self, device: int) -> int:
        """The device's primary context, which torch and CuPy use too."""
        if device not in self._contexts:
            out = ctypes.c_void_p()
            self.check(self.library.cuInit(0), f"on device {device}", "cannot start CUDA")
            self.check(
                self.library.cuDevicePrimaryCtxRetain(ctypes.byref(out), device), f"on device {device}", "cannot use"
            )
            self._contexts[device] = out.value or 0
        return self._contexts[device]

    def current(self) -> int:
        """The context current in this thread, 0 for none."""
        out = ctypes.c_void_p()
        return 0 if self.library.cuCtxGetCurrent(ctypes.byref(out)) else out.value or 0

    def push(self, device: int) -> None:
        """Makes the device's context current in this thread until :meth:`pop`."""
        self.check(self.library.cuCtxPushCurrent_v2(self.context(device)), f"on device {device}", "cannot use")

    def pop(self) -> None:
        self.library.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))

    def managed(self, address: int) -> bool:
        """Whether it is in managed memory; an address that CUDA does not know is not."""
        found = ctypes.c_uint()
        return self.library.cuPointerGetAttribute(ctypes.byref(found), _IS_MANAGED, address) == 0 and found.value == 1

    def capturing(self, stream: int) -> bool:
        """Whether the stream is recording into a graph."""
        status = ctypes.c_int()
        return self.library.cuStreamIsCapturing(stream, ctypes.byref(status)) == 0 and status.value == 1

    def allow_shared(self, function: int, size: int, whom: str) -> None:
        """Lets a kernel use ``size`` bytes of dynamic shared memory."""
        code = self.library.cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED, size)
        self.check(code, whom, f"cannot give {size} bytes of shared memory to")

    def resident(self, function: int, threads: int, shared: int, device: int) -> int:
        """Blocks of a kernel that the device holds at once; ``shared``: bytes of dynamic shared memory."""
        blocks = ctypes.c_int()
        ask = self.library.cuOccupancyMaxActiveBlocksPerMultiprocessor
        self.check(ask(ctypes.byref(blocks), function, threads, shared), f"on device {device}", "cannot place blocks")
        return blocks.value * self.multiprocessors(device)


_POINTER, _INT = ctypes.c_void_p, ctypes.c_int
_SIGNATURES: dict[str, list[Any]] = {
    "cuInit": [ctypes.c_uint],
    "cuDeviceGetCount": [_POINTER],
    "cuDeviceGetAttribute": [_POINTER, _INT, _INT],
    "cuDeviceGetName": [ctypes.c_char_p, _INT, _INT],
    "cuDriverGetVersion": [_POINTER],
    "cuDevicePrimaryCtxRetain": [_POINTER, _INT],
    "cuCtxGetCurrent": [_POINTER],
    "cuCtxPushCurrent_v2": [_POINTER],
    "cuCtxPopCurrent_v2": [_POINTER],
    "cuStreamIsCapturing": [_POINTER, _POINTER],
    "cuFuncSetAttribute": [_POINTER, _INT, _INT],
    "cuOccupancyMaxActiveBlocksPerMultiprocessor": [_POINTER, _POINTER, _INT, ctypes.c_size_t],
    "cuPointerGetAttribute": [_POINTER, _INT, ctypes.c_uint64],
    "cuGetErrorName": [_INT, _POINTER],
    "cuGetErrorString": [_INT, _POINTER],
    "cuLaunchKernelEx": [_POINTER, _POINTER, _POINTER, _POINTER],
    "cuTensorMapEncodeTiled": [
        _POINTER, _INT, ctypes.c_uint, _POINTER, _POINTER, _POINTER, _POINTER, _POINTER, _INT, _INT, _INT, _INT,
    ],
}


def _dotted(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


@cache
def driver() -> Driver:
    """The driver; :class:`MissingDependencyError` on a machine without one."""
    name = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    try:
        return Driver(ctypes.CDLL(name))
    except (OSError, AttributeError) as e:
        raise MissingDependencyError(
            "cannot use",
            "a GPU",
            f"{name}: {e}",
            "an NVIDIA driver for CUDA 12 or later",
            "NumPy arrays run in the simulator",
        ) from None
