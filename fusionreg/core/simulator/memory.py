"""The memory a kernel runs on: the caller's own, or guarded copies of it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ..errors import SimulatorError
from . import abi


@dataclass(frozen=True, slots=True)
class Pointer:
    """One pointer argument.

    Attributes:
        name: the tensor's name.
        array: what the caller passed.
        writable: the parameter points to non-const.
        initialised: its content counts as written before the launch.
        complete: every element must be written by the launch.
    """

    name: str
    array: np.ndarray
    writable: bool
    initialised: bool
    complete: bool

    @property
    def span(self) -> tuple[int, int]:
        """Addresses of its first byte and of the one past its last."""
        a = self.array
        if a.size == 0:
            return a.ctypes.data, a.ctypes.data
        extents = [(n - 1) * s for n, s in zip(a.shape, a.strides, strict=True)]
        low = a.ctypes.data + sum(e for e in extents if e < 0)
        return low, low + sum(abs(e) for e in extents) + a.itemsize


@dataclass(slots=True)
class Region:
    """Memory of one tensor, or of several that overlap."""

    names: str
    low: int
    high: int
    members: list[Pointer]
    base: int = 0
    mapping: int = 0
    mapped: int = 0
    mask: np.ndarray | None = None
    before: np.ndarray = field(default_factory=lambda: np.empty(0, np.uint8))

    @property
    def bytes(self) -> int:
        return self.high - self.low

    @property
    def writable(self) -> bool:
        return any(p.writable for p in self.members)

    @property
    def initialised(self) -> bool:
        return any(p.initialised or not p.writable for p in self.members)

    @property
    def complete(self) -> bool:
        return any(p.complete for p in self.members)

    def view(self) -> np.ndarray:
        """The bytes of the copy."""
        return (
            np.ctypeslib.as_array((ctypes.c_uint8 * self.bytes).from_address(self.base))
            if self.bytes
            else np.empty(0, np.uint8)
        )

    def original(self) -> np.ndarray:
        return (
            np.ctypeslib.as_array((ctypes.c_uint8 * self.bytes).from_address(self.low))
            if self.bytes
            else np.empty(0, np.uint8)
        )


def regions(pointers: Sequence[Pointer | None]) -> list[Region]:
    """The pointers grouped into regions: those whose memory overlaps share one, so that aliasing stays what it is."""
    found: list[Region] = []
    distinct = {id(p): p for p in pointers if p is not None}
    for p in sorted(distinct.values(), key=lambda p: p.span):
        low, high = p.span
        last = found[-1] if found else None
        if last is not None and low < last.high and high > low:
            last.high = max(last.high, high)
            last.members.append(p)
            last.names = "/".join(dict.fromkeys(m.name for m in last.members))
        else:
            found.append(Region(p.name, low, high, [p]))
    for r in found:
        r.mask = _mask(r)
    return found


def _mask(region: Region) -> np.ndarray | None:
    """One byte per byte: 1 where some tensor has an element. None when there are no gaps."""
    if all(p.array.flags.c_contiguous or p.array.flags.f_contiguous for p in region.members):
        return None
    mask = np.zeros(region.bytes, np.uint8)
    for p in region.members:
        a = p.array
        if a.size:
            shape, strides = (*a.shape, a.itemsize), (*a.strides, 1)
            offset = a.ctypes.data - region.low
            np.lib.stride_tricks.as_strided(mask[offset:], shape, strides)[...] = 1
    return None if mask.all() else mask


class Guarded:
    """Copies of regions between inaccessible pages. A context manager: leaving it frees them."""

    def __init__(self, library: ctypes.CDLL, found: Sequence[Region]) -> None:
        self.library, self.regions = library, list(found)

    def __enter__(self) -> Guarded:
        for r in self.regions:
            mapping, mapped = abi.vp(), ctypes.c_uint64()
            base = self.library.frsim_guarded(r.bytes, r.low % 16, ctypes.byref(mapping), ctypes.byref(mapped))
            if not base:
                raise SimulatorError(
                    "cannot simulate",
                    r.names,
                    f"no memory for a copy of {r.bytes} bytes",
                    "more memory",
                    detector="memory",
                )
            r.base, r.mapping, r.mapped = base, mapping.value or 0, mapped.value
            r.before = r.original().copy()
        return self

    def __exit__(self, *_: object) -> None:
        for r in self.regions:
            if r.mapping:
                self.library.frsim_release(r.mapping, r.mapped)
                r.mapping = r.base = 0

    def reset(self) -> None:
        """Inputs as the caller has them; outputs are NaN bytes, those beside their elements excepted."""
        for r in self.regions:
            view = r.view()
            view[...] = r.before
            if r.writable and not r.initialised:
                view[...] = 0xFF if r.mask is None else np.where(r.mask, 0xFF, r.before).astype(np.uint8)

    def address(self, pointer: Pointer) -> int:
        for r in self.regions:
            if any(m is pointer for m in r.members):
                return r.base + pointer.array.ctypes.data - r.low
        raise AssertionError(pointer.name)

    def check(self, whom: str) -> None:
        """:class:`SimulatorError` when a guard zone, an input, or memory between a tensor's elements has changed."""
        for r in self.regions:
            at = self.library.frsim_canary(r.base, r.bytes)
            if at:
                raise broken(whom, r.names, at, "a store outside of its buffer")
            if not r.writable or r.mask is not None:
                same = r.view() == r.before
                if r.writable and r.mask is not None:
                    same |= r.mask.astype(bool)
                if not same.all():
                    raise broken(whom, r.names, int(np.argmin(same)), "a store to memory that the kernel may not write")

    def results(self) -> list[np.ndarray]:
        return [r.view().copy() for r in self.regions if r.writable]

    def copy_back(self) -> None:
        for r in self.regions:
            if r.writable:
                r.original()[...] = r.view()


def broken(whom: str, tensor: str, offset: int, what: str) -> SimulatorError:
    return SimulatorError(
        "wrong access", f"in {whom}", f"{what}: tensor {tensor}, byte offset {offset}", "accesses inside the tensor",
        "A launch with Checks.full() tells the thread and the line", detector="guard", tensor=tensor, offset=offset,
    )  # fmt: skip
