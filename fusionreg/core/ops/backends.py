"""One face for NumPy, CuPy and torch arrays: what a ``meaning`` function gets as ``xp``. Floor 1.

``xp.ns`` is the array-API namespace (array-api-compat); the names of ``ops/tables.py`` stand beside it. A backend is
made from an array (:func:`backend_of`) by looking at the library that is already imported; nothing is imported for it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal

from ..dtypes import DTYPES, dtype
from ..errors import ArgumentError
from .tables import Table, cupy_table, numpy_table, torch_table

Floats = Literal["native", "wide", "exact"]


@dataclass(frozen=True, eq=False)
class Backend:
    """An array library on one device.

    Attributes:
        name: ``numpy``, ``cupy`` or ``torch``.
        ns: its array-API namespace.
        device: where new arrays go.
        table: what the array API lacks; its names are attributes of the backend too (``xp.erf``).
        floats: what a float dtype means inside an operator: ``native`` itself; ``wide`` float32 for floats below
            32 bits; ``exact`` float64 for all.
    """

    name: str
    ns: Any
    device: Any
    table: Table = field(repr=False)
    floats: Floats = "native"

    def __getattr__(self, name: str) -> Callable[..., Any]:
        try:
            return self.__dict__["table"][name]
        except KeyError:
            raise AttributeError(f"the {self.__dict__.get('name')} backend has no {name!r}") from None

    def with_floats(self, floats: Floats) -> Backend:
        return self if floats == self.floats else replace(self, floats=floats)

    def compute_name(self, name: str) -> str:
        """The dtype that an operator computes in where the model says ``name``."""
        row = DTYPES.get(name)
        if self.name == "torch" and name in _MISSING_IN_TORCH and self.floats != "native":
            return "int64"
        if row is None or row.kind != "f" or self.floats == "native":
            return name
        return "float64" if self.floats == "exact" else ("float32" if row.bits < 32 else name)

    def storage(self, name: str) -> Any:
        """The library's dtype object called ``name``."""
        return _torch_dtype(name) if self.name == "torch" else dtype(name).numpy

    def dtype(self, name: str) -> Any:
        """The library's dtype object for :meth:`compute_name`."""
        return self.storage(self.compute_name(name))

    def name_of(self, x: Any) -> str:
        """The dtype name of an array, e.g. ``"bfloat16"``."""
        return _name_of(x.dtype)

    def kind(self, x: Any) -> str:
        """``f``, ``i``, ``u``, ``b`` or ``c``."""
        return dtype(self.name_of(x)).kind

    def floating(self, x: Any) -> bool:
        return self.kind(x) == "f"

    def cast(self, x: Any, name: str) -> Any:
        """``x`` in dtype ``name`` as is: one rounding to nearest even; float to int truncates as C does."""
        source = self.name_of(x)
        if source == name:
            return x
        if source == "float64" and name in _THROUGH_FLOAT32[self.name == "torch"]:
            x = self._to_odd(x)
        if self.name == "torch":
            return x.to(_torch_dtype(name))
        return x.astype(dtype(name).numpy)

    def _to_odd(self, x: Any) -> Any:
        """float64 as float32 rounded to odd: rounding that once more gives what rounding ``x`` directly would."""
        y = self.cast(x, "float32")
        back = self.cast(y, "float64")
        bits = y.view(self.storage("int32"))
        bits = bits - self.cast(self.ns.abs(back) > self.ns.abs(x), "int32")
        inexact = self.ns.logical_and(back != x, x == x)
        return (bits | self.cast(inexact, "int32")).view(self.storage("float32"))

    def widen(self, x: Any) -> Any:
        """``x`` in the dtype that operators compute in."""
        return self.cast(x, self.compute_name(self.name_of(x)))

    def asarray(self, value: Any, name: str | None = None) -> Any:
        """A NumPy array, number or nested list as an array of this library on its device, dtype ``name`` if given."""
        import numpy as np

        value = np.asarray(value)
        if name is not None:
            value = value.astype(dtype(name).numpy)
        if self.name == "numpy":
            return value
        if self.name == "cupy":
            with self.device:
                return sys.modules["cupy"].asarray(value)
        return _torch_array(value, self.device)

    def ordered(self, x: Any, axes: tuple[int, ...]) -> Any:
        """An array whose axes follow each other in memory in this order, the last one side by side; ``x`` itself where
        it lies so."""
        turned = self.ns.permute_dims(x, axes)
        dense = turned.contiguous() if self.name == "torch" else self.ns.ascontiguousarray(turned)
        return self.ns.permute_dims(dense, tuple(map(axes.index, range(len(axes)))))

    def to_numpy(self, x: Any) -> Any:
        """A host NumPy array (ml_dtypes for bfloat16 and float8) with the same values."""
        import numpy as np

        if isinstance(x, np.ndarray | np.generic):
            return np.asarray(x)
        return x.get() if self.name == "cupy" else _torch_to_numpy(x)

    def ints(self, x: Any) -> tuple[int, ...]:
        """The elements of a small integer array (host or device), flattened."""
        return tuple(int(v) for v in self.to_numpy(x).reshape(-1))

    def scalar(self, x: Any) -> Any:
        """The only element of an array, as a Python number."""
        return self.to_numpy(x).reshape(-1)[0].item()

    def full(self, shape: tuple[int, ...], value: Any, like: Any) -> Any:
        """An array of one value with the dtype of ``like``."""
        return self.ns.full(shape, value, dtype=like.dtype, device=self.device)

    def arange(self, n: int) -> Any:
        """``0 … n-1`` as int64."""
        return self.ns.arange(n, dtype=self.storage("int64"), device=self.device)

    def quiet(self) -> AbstractContextManager[Any]:
        """A context that warns of no overflow or NaN and records no gradients; halves accumulate in float32."""
        if self.name == "torch":
            return _quiet_torch(sys.modules["torch"], self.device)
        if self.name == "numpy":
            import numpy as np

            return np.errstate(all="ignore")
        return nullcontext()


def numpy_backend(floats: Floats = "native") -> Backend:
    """The backend of host NumPy arrays."""
    return _numpy_backend().with_floats(floats)


def backend_of(*arrays: Any) -> Backend:
    """The backend of the first CuPy or torch array among ``arrays``, of NumPy when there is none.

    Raises:
        ArgumentError: an array of another library, or of two libraries or devices.
    """
    found: Backend | None = None
    for x in arrays:
        library = type(x).__module__.partition(".")[0]
        if library in ("numpy", "ml_dtypes", "builtins"):
            continue
        if library not in ("torch", "cupy") and "torch" in sys.modules and isinstance(x, sys.modules["torch"].Tensor):
            library = "torch"  # a subclass such as a Parameter defined elsewhere
        if library not in ("torch", "cupy"):
            raise ArgumentError(
                "unknown array", type(x).__qualname__, f"of library {library!r}", "numpy, cupy or torch"
            )
        if found is not None and (found.name, found.device) != (library, x.device):
            raise ArgumentError(
                "mixed arrays", "", f"{library} on {x.device} beside {found.name} on {found.device}", "one device"
            )
        if found is None:
            found = _torch_backend(x.device) if library == "torch" else _cupy_backend(int(x.device.id))
    return found or _numpy_backend()


@contextmanager
def _quiet_torch(torch: Any, device: Any) -> Iterator[None]:
    with torch.no_grad():
        if device.type != "cuda":
            yield
            return
        flags = torch.backends.cuda.matmul
        names = ("allow_tf32", "allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")
        before = {name: getattr(flags, name) for name in names}
        try:
            for name in names:
                setattr(flags, name, False)
            yield
        finally:
            for name, value in before.items():
                setattr(flags, name, value)


@cache
def _numpy_backend() -> Backend:
    from array_api_compat import numpy as ns

    return Backend("numpy", ns, None, numpy_table())


@cache
def _torch_backend(device: Any) -> Backend:
    from importlib import import_module

    return Backend("torch", import_module("array_api_compat.torch"), device, torch_table())


@cache
def _cupy_backend(ordinal: int) -> Backend:
    from importlib import import_module

    device = sys.modules["cupy"].cuda.Device(ordinal)
    return Backend("cupy", import_module("array_api_compat.cupy"), device, cupy_table())


@cache
def _name_of(dt: Any) -> str:
    text = str(dt)
    if text.startswith("torch."):
        return text.removeprefix("torch.")
    return "string" if dt.kind in "OSU" else dt.name


def _torch_dtype(name: str) -> Any:
    return getattr(sys.modules["torch"], name)


#: Targets that a library reaches from float64 by way of float32, so rounding twice: [NumPy and CuPy, torch].
_THROUGH_FLOAT32 = (
    frozenset({"bfloat16", "float8_e4m3fn", "float8_e5m2"}),
    frozenset({"float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"}),
)
_MISSING_IN_TORCH = frozenset({"uint16", "uint32", "uint64"})  # it stores them, and computes next to nothing
_VIEWS = {"bfloat16": "int16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}


def _torch_array(value: Any, device: Any) -> Any:
    import numpy as np

    torch, name = sys.modules["torch"], value.dtype.name
    value = np.array(value)  # contiguous, writable, and not the model's own memory
    if name in _VIEWS:
        return torch.from_numpy(value.view(_VIEWS[name])).view(getattr(torch, name)).to(device)
    return torch.from_numpy(value).to(device)


def _torch_to_numpy(x: Any) -> Any:
    torch, x = sys.modules["torch"], x.detach().cpu()
    name = str(x.dtype).removeprefix("torch.")
    if name in _VIEWS:
        return x.contiguous().view(getattr(torch, _VIEWS[name])).numpy().view(dtype(name).numpy)
    return x.numpy()
