"""Array libraries by duck typing: NumPy, torch and CuPy, none of which is imported here. Floor 6.

Each adapter gives the hot path four cheap things (a hashable layout, a pointer, an allocation, the caller's stream)
and the slow path the rest: the :class:`Tensor`, the place, and what makes an array unfit for a kernel.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from math import prod
from typing import Any, NamedTuple, Protocol

from ..dtypes import DTYPES, dtype
from ..errors import ArgumentError
from ..problem import Tensor
from ..problem.types import row_major
from ..tensors import HOST, MANAGED
from .driver import driver

#: Low byte of an address → the alignment it has, in bytes, up to 256.
ALIGNMENT = tuple((a & -a) or 256 for a in range(256))


class Place(NamedTuple):
    """Where an array lives: ``("cpu", 0)`` or ``("cuda", device ordinal)``."""

    kind: str
    ordinal: int

    def __str__(self) -> str:
        return self.kind if self.kind == "cpu" else f"{self.kind}:{self.ordinal}"


class Library(Protocol):
    """What the runtime needs of an array library; one instance per library and process."""

    name: str
    #: array → everything of it that a prepared launch depends on, hashable and cheap
    layout: Callable[[Any], Any]
    #: array → its address
    pointer: Callable[[Any], int]

    def tensor(self, array: Any) -> Tensor:
        """The array without its address."""
        ...

    def place(self, array: Any) -> Place: ...

    def unfit(self, array: Any) -> str:
        """Why no kernel can take this array at all, as half a sentence; "" when one could."""
        return ""

    def space(self, array: Any) -> str:
        """Memory space: ``device`` (the library's own), ``pinned_host``, ``managed``."""
        return "device"

    def allocator(
        self, shape: tuple[int, ...], dtype_name: str, place: Place, strides: tuple[int, ...] | None = None
    ) -> Callable[[], Any]:
        """A function that makes a new uninitialised array there, from the library's own pool.

        ``strides``: in elements, of an array without gaps; None is row-major.
        """
        ...

    def stream(self) -> Callable[[int], int]:
        """Device index → address of the caller's current stream there."""
        ...

    def host(self, array: Any) -> Any:
        """A NumPy view of a CPU array, same memory, same strides."""
        ...

    def contiguous(self, array: Any) -> Any:
        """The array itself, or a contiguous copy."""
        ...

    def shares(self, a: Any, b: Any) -> bool:
        """Whether two arrays may have memory in common."""
        ...

    def grad_enabled(self) -> bool:
        """Whether a result computed now would have to carry a gradient if an input asks for one."""
        return False

    def wants_grad(self, array: Any) -> bool:
        return False

    def guard(self, arrays: Iterable[Any]) -> Callable[[], bool] | None:
        """Asks, of arrays of these layouts, whether a call must look at them closely; None where never."""
        return None


class _Numpy(Library):
    name = "numpy"

    def __init__(self) -> None:
        self.np = sys.modules["numpy"]

    @staticmethod
    def layout(a: Any) -> Any:
        interface = a.__array_interface__
        return a.dtype, a.shape, a.strides, ALIGNMENT[interface["data"][0] & 255], interface["data"][1]

    @staticmethod
    def pointer(a: Any) -> int:
        return a.__array_interface__["data"][0]

    def tensor(self, a: Any) -> Tensor:
        width = a.dtype.itemsize
        return Tensor(
            _numpy_name(a.dtype), a.shape, tuple(s // width for s in a.strides), ALIGNMENT[self.pointer(a) & 255]
        )

    def place(self, a: Any) -> Place:
        return Place("cpu", 0)

    def unfit(self, a: Any) -> str:
        if _numpy_name(a.dtype) not in DTYPES or a.dtype.hasobject:
            return f"its dtype {a.dtype} is none that kernels have"
        if not a.dtype.isnative:
            return f"its byte order is foreign ({a.dtype})"
        if any(s % a.dtype.itemsize for s in a.strides):
            return "its strides are no multiple of its element size"
        return ""

    def allocator(
        self, shape: tuple[int, ...], dtype_name: str, place: Place, strides: tuple[int, ...] | None = None
    ) -> Callable[[], Any]:
        np, type_ = self.np, dtype(dtype_name).numpy
        count = prod(shape) * type_.itemsize

        def empty() -> Any:  # aligned as a GPU's allocator aligns: a kernel may rely on it
            raw = np.empty(count + 256, np.uint8)
            start = -raw.__array_interface__["data"][0] % 256
            flat = raw[start : start + count].view(type_)
            return flat.reshape(shape) if strides is None else in_order(flat, shape, strides)

        return empty

    def host(self, a: Any) -> Any:
        return a

    def contiguous(self, a: Any) -> Any:
        return self.np.ascontiguousarray(a).reshape(a.shape)

    def shares(self, a: Any, b: Any) -> bool:
        return self.np.may_share_memory(a, b)


class _Cupy(Library):
    name = "cupy"

    def __init__(self) -> None:
        self.cupy = sys.modules["cupy"]

    @staticmethod
    def layout(a: Any) -> Any:
        return a.dtype, a.shape, a.strides, ALIGNMENT[a.data.ptr & 255], a.device.id

    @staticmethod
    def pointer(a: Any) -> int:
        return a.data.ptr

    def tensor(self, a: Any) -> Tensor:
        width = a.dtype.itemsize
        return Tensor(_numpy_name(a.dtype), a.shape, tuple(s // width for s in a.strides), ALIGNMENT[a.data.ptr & 255])

    def place(self, a: Any) -> Place:
        return Place("cuda", a.device.id)

    def space(self, a: Any) -> str:
        return MANAGED if driver().managed(a.data.ptr) else "device"

    def unfit(self, a: Any) -> str:
        if _numpy_name(a.dtype) not in DTYPES:
            return f"its dtype {a.dtype} is none that kernels have"
        return "its strides are no multiple of its element size" if any(s % a.dtype.itemsize for s in a.strides) else ""

    def allocator(
        self, shape: tuple[int, ...], dtype_name: str, place: Place, strides: tuple[int, ...] | None = None
    ) -> Callable[[], Any]:
        cupy, type_ = self.cupy, dtype(dtype_name).numpy

        def here() -> Any:
            if strides is None:
                return cupy.empty(shape, type_)
            return in_order(cupy.empty(prod(shape), type_), shape, strides)

        def empty() -> Any:
            if cupy.cuda.runtime.getDevice() == place.ordinal:
                return here()
            with cupy.cuda.Device(place.ordinal):
                return here()

        return empty

    def stream(self) -> Callable[[int], int]:
        current = self.cupy.cuda.get_current_stream
        return lambda index: current(index).ptr

    def contiguous(self, a: Any) -> Any:
        with a.device:
            return self.cupy.ascontiguousarray(a).reshape(a.shape)

    def shares(self, a: Any, b: Any) -> bool:
        return self.cupy.may_share_memory(a, b)


class _Torch(Library):
    name = "torch"

    def __init__(self) -> None:
        self.torch = torch = sys.modules["torch"]
        self.names = {t: str(t).removeprefix("torch.") for t in vars(torch).values() if isinstance(t, torch.dtype)}
        self.types = {name: t for t, name in self.names.items()}
        self.pointer = torch.Tensor.data_ptr
        self.layout = self._layout_beside_gpus if torch.cuda.is_available() else self._layout

    def grad_enabled(self) -> bool:
        return self.torch.is_grad_enabled()

    @staticmethod
    def _layout(a: Any) -> Any:
        # A lazy conjugate is complex: `guard` sees to those. The device's number is cheaper than the device. An
        # address of 0 keeps tensors without memory (traced ones, empty ones) apart from all others.
        address = a.data_ptr()
        aligned = address and ALIGNMENT[address & 255]
        return a.dtype, a.shape, a.stride(), aligned, a.get_device(), a.requires_grad, a.is_neg()

    @staticmethod
    def _layout_beside_gpus(a: Any) -> Any:
        """As above; of a tensor in host memory also whether a GPU can read it there."""
        address, device = a.data_ptr(), a.get_device()
        aligned = address and ALIGNMENT[address & 255]
        found = a.dtype, a.shape, a.stride(), aligned, device, a.requires_grad, a.is_neg()
        return found if device >= 0 else (*found, a.is_pinned())

    def tensor(self, a: Any) -> Tensor:
        return Tensor(self.names[a.dtype], tuple(a.shape), tuple(a.stride()), ALIGNMENT[a.data_ptr() & 255])

    def place(self, a: Any) -> Place:
        return Place(a.device.type, a.device.index or 0)

    def unfit(self, a: Any) -> str:
        if a.layout is not self.torch.strided:
            return f"its layout is {a.layout}"
        if self.names[a.dtype] not in DTYPES:
            return f"its dtype {a.dtype} is none that kernels have"
        if a.is_neg() or a.is_conj():
            return "it is a lazy conjugate or negative; call resolve_conj() or resolve_neg()"
        if a.device.type not in ("cpu", "cuda"):
            return f"it lives on {a.device}"
        if type(a).__torch_dispatch__ is not self.torch.Tensor.__torch_dispatch__:
            return f"it is a {type(a).__name__}, which stands for a tensor elsewhere"
        try:
            return "" if a.data_ptr() or not a.numel() else "it has no memory (it is being traced or transformed)"
        except RuntimeError as e:
            return f"it has no memory ({e})"

    def space(self, a: Any) -> str:
        if not self.torch.cuda.is_available():
            return "device"
        if driver().managed(a.data_ptr()):
            return MANAGED
        return HOST if a.device.type == "cpu" and a.is_pinned() else "device"

    def allocator(
        self, shape: tuple[int, ...], dtype_name: str, place: Place, strides: tuple[int, ...] | None = None
    ) -> Callable[[], Any]:
        torch, type_, on_gpu = self.torch, self.types[dtype_name], place.kind == "cuda"
        device, order = torch.device(*place) if on_gpu else torch.device("cpu"), strides or row_major(shape)
        # as Inductor's code allocates, at a third of the price; on a GPU on the current one
        at_once = getattr(torch._C._dynamo.guards, f"_empty_strided_{place.kind}", None)
        if at_once is not None and (not on_gpu or torch.cuda.device_count() == 1):
            return lambda: at_once(shape, order, type_)
        strided = torch.empty_strided
        return lambda: strided(shape, order, dtype=type_, device=device)

    def stream(self) -> Callable[[int], int]:
        return self.torch._C._cuda_getCurrentRawStream

    def host(self, a: Any) -> Any:
        import numpy as np

        row = dtype(self.names[a.dtype])
        if not a.numel():
            return np.empty(tuple(a.shape), row.numpy)
        return np.asarray(_Memory(a, row.bytes)).view(row.numpy)

    def contiguous(self, a: Any) -> Any:
        return a.contiguous()

    def shares(self, a: Any, b: Any) -> bool:
        return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()

    def wants_grad(self, a: Any) -> bool:
        return a.requires_grad

    def guard(self, arrays: Iterable[Any]) -> Callable[[], bool] | None:
        found = tuple(arrays)
        if any(a.dtype.is_complex for a in found):
            return _always
        return self.torch.is_grad_enabled if any(a.requires_grad for a in found) else None


class _Memory:
    """A CPU tensor's memory as NumPy finds it, its elements by their bits. A tensor's own ``numpy`` would do but for
    this: the storage could never be resized again, as sharding of parameters does."""

    def __init__(self, tensor: Any, width: int) -> None:
        strides = tuple([width * s for s in tensor.stride()])
        self.tensor, self.__array_interface__ = tensor, {
            "version": 3, "data": (tensor.data_ptr(), False), "typestr": f"|V{width}", "shape": tuple(tensor.shape),
            "strides": strides,
        }  # fmt: skip


def _always() -> bool:
    return True


def in_order(flat: Any, shape: Sequence[int], strides: Sequence[int]) -> Any:
    """A view of a flat array of NumPy or CuPy as an array without gaps of these strides, in elements."""
    order = sorted(range(len(shape)), key=lambda i: (-strides[i], -shape[i]))
    inverse = sorted(range(len(shape)), key=order.__getitem__)
    return flat.reshape([shape[i] for i in order]).transpose(inverse)


def _numpy_name(type_: Any) -> str:
    return str(type_.name) if type_.kind != "V" or type_.names is None else "structured"


@cache
def _instance(name: str) -> Library:
    kinds: dict[str, Callable[[], Library]] = {"numpy": _Numpy, "cupy": _Cupy, "torch": _Torch}
    return kinds[name]()


def _masked(type_: type) -> bool:
    masked = getattr(sys.modules.get("numpy.ma"), "MaskedArray", None)
    return masked is not None and issubclass(type_, masked)


def library_of(type_: type) -> Library | None:
    """The library whose arrays are of this type, None for a type that is no array; imports nothing.

    NumPy's masked arrays are none: a kernel would compute with what the mask hides.
    """
    if _masked(type_):
        return None
    for name, attribute in (("torch", "Tensor"), ("numpy", "ndarray"), ("cupy", "ndarray")):
        module = sys.modules.get(name)
        base = getattr(module, attribute, None) if module is not None else None
        if base is not None and issubclass(type_, base):
            return _instance(name)
    return None


def overlapping(tensors: list[tuple[str, int, Tensor]], outputs: set[str]) -> tuple[str, str] | None:
    """Two tensors (name, address, layout) of which one is an output and whose memory overlaps, or None."""
    spans = []
    for name, address, t in tensors:
        if t.size:
            width = dtype(t.dtype).bytes
            reach = [(n - 1) * s for n, s in zip(t.shape, t.strides, strict=True)]
            low = address + width * sum(r for r in reach if r < 0)
            spans.append((name, low, address + width * (1 + sum(r for r in reach if r > 0))))
    for i, (a, a_low, a_high) in enumerate(spans):
        for b, b_low, b_high in spans[i + 1 :]:
            if (a in outputs or b in outputs) and a_low < b_high and b_low < a_high:
                return a, b
    return None


def self_overlapping(t: Tensor) -> bool:
    """Whether two elements may share memory: then a tensor cannot be written."""
    axes = sorted((abs(s), n) for n, s in zip(t.shape, t.strides, strict=True) if n > 1)
    reach = 0
    for stride, extent in axes:
        if stride <= reach:
            return True
        reach += stride * (extent - 1)
    return False


def unknown_array(fusion: str, name: str, value: Any) -> ArgumentError:
    expected, step = "a NumPy, torch or CuPy array, or None for an absent input", ""
    if _masked(type(value)):
        expected, step = "an array without a mask: kernels know none", f"Pass {name}.filled(value)"
    return ArgumentError(
        "cannot call", fusion, f"{name} is a {type(value).__module__}.{type(value).__name__}", expected, step,
        fusion=fusion, tensor=name,
    )  # fmt: skip
