"""One conformance case made concrete: shapes, attributes, values and memory layout of one call. Floor 7."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ..frozen import EMPTY, FrozenDict
from ..problem import Tensor
from ..tensors import expand
from . import values

if TYPE_CHECKING:
    from ..registry.entries import FusionEntry

#: Layout name → what it does to a tensor; see :func:`arrange`.
LAYOUTS: Mapping[str, str] = FrozenDict(
    contiguous="row-major, aligned to 256 bytes",
    misaligned="row-major, one element past an aligned address",
    padded="rows eight elements further apart than they are long, NaN between them",
    padded_odd="rows one element further apart than they are long, NaN between them",
    transposed="the last two axes stored in the other order",
    channels_last="the second axis stored last",
    expanded="first axis of stride 0: one row seen many times",
)


@dataclass(frozen=True)
class Trial:
    """One call of one fusion.

    Attributes:
        name: unique among the trials of a kernel.
        dtypes: dtype variable → dtype.
        axes: axis → extent, unfolded.
        leading: extents that ``...`` stands for.
        attributes, choices: as a call passes them.
        absent: optional inputs left out.
        forms: input → index of its form, for inputs that have several.
        values: input → generator, ``normal`` where it is not named.
        layouts: input → layout, ``contiguous`` where it is not named.
        params: the kernel's tunable parameters; empty takes those that dispatch would.
        exactly: whether the kernel runs with ``params`` or not at all; otherwise, where they are not valid on the
            trial's shapes and layouts, it runs with the first ones that are.
        stem: the name without the parameters, for trials that differ in those alone: they get the same values.
    """

    name: str
    dtypes: FrozenDict[str, str]
    axes: FrozenDict[str, int]
    leading: tuple[int, ...] = ()
    attributes: FrozenDict[str, Any] = EMPTY
    choices: FrozenDict[str, str] = EMPTY
    absent: tuple[str, ...] = ()
    forms: FrozenDict[str, int] = EMPTY
    values: FrozenDict[str, str] = EMPTY
    layouts: FrozenDict[str, str] = EMPTY
    params: FrozenDict[str, Any] = EMPTY
    exactly: bool = False
    stem: str = ""

    @property
    def dtype(self) -> str:
        return ",".join(dict.fromkeys(self.dtypes.values()))

    @property
    def keywords(self) -> dict[str, Any]:
        """Attributes and choices as one call's keywords."""
        return {**self.attributes, **self.choices}

    def passed(self, entry: FusionEntry) -> dict[str, Any]:
        """All keywords of a call: also dtype variables that no input tells."""
        told = {t.dtype for name, t in entry.inputs.items() if name not in self.absent}
        return {**self.keywords, **{k: v for k, v in self.dtypes.items() if k not in told}}

    def with_(self, name: str, **changes: Any) -> Trial:
        """A copy under another name; mappings among ``changes`` are merged into what is there."""
        merged = {k: getattr(self, k) | v if isinstance(v, Mapping) else v for k, v in changes.items()}
        return replace(self, name=name, **merged)

    def shapes(self, entry: FusionEntry) -> dict[str, tuple[int, ...]]:
        """Shape of each present input, unfolded."""
        axes = entry.completed(self.axes, self.keywords) if entry.derived else self.axes
        return {
            name: tuple(int(d) for d in expand(type_.forms[self.forms.get(name, 0)], axes, self.leading))
            for name, type_ in entry.inputs.items()
            if name not in self.absent
        }

    def dtype_of(self, entry: FusionEntry, tensor: str) -> str:
        """The dtype of a tensor in this trial."""
        declared = entry.tensors[tensor].dtype
        return self.dtypes.get(declared, declared)

    def arrays(self, entry: FusionEntry, replica: int = 0) -> dict[str, np.ndarray]:
        """The inputs, laid out; other ``replica`` numbers give other random values."""
        found = {}
        for name, shape in self.shapes(entry).items():
            seed = (zlib.crc32(f"{entry.name}:{self.stem or self.name}:{name}".encode()), replica)
            kind, size = self.dtype_of(entry, name), entry.spec.sizes.get(name, 1.0)
            array = values.generate(self.values.get(name, "normal"), seed, shape, kind, size)
            found[name] = arrange(array, self.layouts.get(name, "contiguous"))
        return found

    def tensors(self, arrays: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
        """The arrays as a problem sees them."""
        return {name: describe(a) for name, a in arrays.items()}


def describe(array: np.ndarray) -> Tensor:
    """Dtype, shape, strides in elements, and the alignment of the address."""
    address = array.__array_interface__["data"][0]
    alignment = min(256, address & -address) if address else 256
    strides = tuple(s // array.itemsize for s in array.strides)
    return Tensor(array.dtype.name, array.shape, strides, alignment)


def arrange(array: np.ndarray, layout: str) -> np.ndarray:
    """A copy of ``array`` in a memory layout of :data:`LAYOUTS`; what lies between its elements is NaN (or all ones).

    A layout that needs more axes than there are leaves the array contiguous.
    """
    if layout == "expanded" and array.ndim >= 1 and array.shape[0] > 1:
        return np.broadcast_to(arrange(array[:1].copy(), "contiguous"), array.shape)
    if layout == "transposed" and array.ndim >= 2:
        return arrange(np.ascontiguousarray(array.swapaxes(-1, -2)), "contiguous").swapaxes(-1, -2)
    if layout == "channels_last" and array.ndim >= 3:
        return np.moveaxis(arrange(np.ascontiguousarray(np.moveaxis(array, 1, -1)), "contiguous"), -1, 1)
    gap = {"padded": 8, "padded_odd": 1}.get(layout, 0) if array.ndim >= 2 else 0
    shape = (*array.shape[:-1], array.shape[-1] + gap) if gap else array.shape
    base = buffer(int(np.prod(shape, dtype=np.int64)), array.dtype, int(layout == "misaligned")).reshape(shape)
    view = base[..., : array.shape[-1]] if gap else base
    view[...] = array
    return view


def buffer(size: int, kind: np.dtype, skip: int = 0) -> np.ndarray:
    """``size`` elements whose address lies ``skip`` elements past a multiple of 256 bytes; every byte 0xFF, NaN."""
    raw = np.full((size + skip) * kind.itemsize + 512, 0xFF, np.uint8)
    start = -raw.__array_interface__["data"][0] % 256 + skip * kind.itemsize
    return raw[start : start + size * kind.itemsize].view(kind)
