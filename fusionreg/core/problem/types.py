"""The value types of a problem. Floor 4."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

from ..dtypes import dtype
from ..errors import ExpressionError
from ..frozen import EMPTY, FrozenDict
from ..targets import target
from ..tensors import Form

#: The alignment counted at most, in bytes; what every allocator of this product gives.
MAX_ALIGNMENT = 256


@dataclass(frozen=True, slots=True)
class Tensor:
    """An array without its address.

    Attributes:
        dtype: by name.
        shape: extents.
        strides: in elements; of any sign, 0 for an expanded axis.
        alignment: the largest power of two up to 256 that divides the address, in bytes.
        foldable: False in a problem when its leading axes could not be seen as one axis with one stride.
        space: memory space, where that is not the one of the problem's place: ``pinned_host`` beside a GPU.
    """

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    alignment: int = MAX_ALIGNMENT
    foldable: bool = True
    space: str = "device"

    @classmethod
    def contiguous(cls, dtype: str, shape: Sequence[int], alignment: int = MAX_ALIGNMENT) -> Tensor:
        """A row-major tensor."""
        return cls(dtype, tuple(shape), row_major(shape), alignment)

    @property
    def size(self) -> int:
        """Elements."""
        count = 1
        for extent in self.shape:
            count *= extent
        return count

    @property
    def bytes(self) -> int:
        return self.size * dtype(self.dtype).bytes

    @property
    def is_contiguous(self) -> bool:
        """Row-major without gaps; strides of axes of extent 1 do not matter, nor do any of an empty tensor."""
        if not self.foldable:
            return False
        expected = 1
        for extent, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if extent == 0:
                return True
            if extent != 1 and stride != expected:
                expected = -1  # a mismatch; decided only if no axis is empty
            expected *= extent if expected > 0 else 1
        return expected > 0

    @property
    def is_dense(self) -> bool:
        """Whether its elements fill a stretch of memory, in whatever order of the axes."""
        expected = 1
        for stride, extent in sorted((s, n) for n, s in zip(self.shape, self.strides, strict=True) if n != 1):
            if extent == 0:
                return True
            if stride != expected:
                return False
            expected *= extent
        return True

    def folded(self, form: Form) -> Tensor:
        """The tensor as a kernel sees it: extra leading ones dropped, or the axes of ``...`` folded into one."""
        extra = len(self.shape) - len(form.axes)
        if not extra:
            return self
        if not form.leading:
            return replace(self, shape=self.shape[extra:], strides=self.strides[extra:])
        first = max(form.before - 1, 0)
        last = first + extra + 1
        extent, stride, foldable = _fold(self.shape[first:last], self.strides[first:last])
        return replace(
            self,
            shape=(*self.shape[:first], extent, *self.shape[last:]),
            strides=(*self.strides[:first], stride, *self.strides[last:]),
            foldable=foldable,
        )

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides in elements of a contiguous tensor, as torch counts them (an empty axis counts as one)."""
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


def in_order(like: Tensor, shape: Sequence[Any]) -> tuple[Any, ...]:
    """Strides in elements of a tensor without gaps whose axes lie in memory in the order of those of ``like``."""
    order = sorted(range(len(shape)), key=lambda i: (like.strides[i], like.shape[i] != 1, -i))
    steps = row_major([shape[i] for i in reversed(order)])
    return tuple(steps[len(shape) - 1 - order.index(i)] for i in range(len(shape)))


def _fold(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, int, bool]:
    """Several axes as one: (extent, stride, whether one stride visits them all)."""
    extent = 1
    for d in shape:
        extent *= d
    axes = [(d, s) for d, s in zip(shape, strides, strict=True) if d != 1]
    if extent == 0 or not axes:
        return extent, strides[-1], True
    foldable = all(outer[1] == inner[1] * inner[0] for outer, inner in pairwise(axes))
    return extent, axes[-1][1], foldable


@dataclass(frozen=True)
class Problem:
    """One fusion on concrete tensors for one target; hashable, without addresses.

    Attributes:
        fusion: its name.
        dtypes: dtype variable → dtype name.
        axes: axis → extent as a kernel sees it, leading axes folded in.
        leading: the extents that ``...`` stands for.
        attributes: every attribute of the fusion.
        choices: every choice of the pattern.
        tensors: every input and output in declared order, as a kernel sees it; None for an absent input.
        forms: present tensor → index of the form it took, in the order of its text.
        shapes: output → its shape as the caller sees it.
        strides: output that is not row-major → its strides as the caller sees them.
        inputs: how many of ``tensors`` are inputs (they come first).
        target: architecture by name.
        multiprocessors: of the device that it is for, or of the target's usual part.
        slots: tensor of the pattern inside → the tensors that stand in its place: what is said of it holds of them all.
        whole: the same → those of them that have all of its axes: where it may be strided, they lie alike.
        loose: operands at slots that have several of the axes there, but not all: they may be strided as they like.
    """

    fusion: str
    dtypes: FrozenDict[str, str]
    axes: FrozenDict[str, int]
    leading: tuple[int, ...]
    attributes: FrozenDict[str, Any]
    choices: FrozenDict[str, str]
    tensors: FrozenDict[str, Tensor | None]
    forms: FrozenDict[str, int]
    shapes: FrozenDict[str, tuple[int, ...]]
    inputs: int
    target: str
    multiprocessors: int
    strides: FrozenDict[str, tuple[int, ...]] = EMPTY
    slots: FrozenDict[str, tuple[str, ...]] = EMPTY
    whole: FrozenDict[str, tuple[str, ...]] = EMPTY
    loose: tuple[str, ...] = ()

    def in_place(self, name: str) -> dict[str, Tensor]:
        """The present tensors that stand in a tensor's place with all of its axes; itself where no operators do."""
        found = {n: self.tensors.get(n) for n in self.whole.get(name, (name,))}
        return {n: t for n, t in found.items() if t is not None}

    def env(self) -> Mapping[str, Any]:
        """What expressions read: axes, attributes, choices, dtype variables, `multiprocessors` and the predicates."""
        return self._env

    @cached_property
    def _env(self) -> dict[str, Any]:
        names = {**self.axes, **self.attributes, **self.choices, **self.dtypes}
        return {**names, "multiprocessors": self.multiprocessors, **self._predicates()}

    def _predicates(self) -> dict[str, Callable[..., Any]]:
        tensors, forms, features = self.tensors, self.forms, target(self.target).features

        def every(name: str, loose: bool = True) -> Iterator[Tensor]:
            names = (n for n in self.slots.get(name, (name,)) if loose or n not in self.loose)
            return (t for n in names if (t := tensors[n]) is not None)

        def axis(name: str, i: int, what: str) -> int:
            tensor = next(iter(self.in_place(name).values()), None)
            if tensor is None or not -len(tensor.shape) <= i < len(tensor.shape):
                found = "it is absent" if tensor is None else f"it has {len(tensor.shape)} axes"
                raise ExpressionError(
                    "cannot evaluate", f"{what}({name}, {i})", found, "a present tensor and one of its axes"
                )
            if what == "stride" and not tensor.foldable:
                raise ExpressionError(
                    "cannot evaluate", f"stride({name}, {i})", "its leading axes have no common stride"
                )
            return getattr(tensor, f"{what}s" if what == "stride" else what)[i]

        return {
            # of an absent tensor every statement about its layout holds, so `requires` need not ask twice
            "contiguous": lambda name: all(t.is_contiguous for t in every(name, loose=False)),
            "aligned": lambda name, n: all(t.alignment % n == 0 for t in every(name)),
            "rank": lambda name: -1 if (t := tensors[name]) is None else len(t.shape),
            "form": lambda name: forms.get(name, -1),
            "present": lambda name: tensors[name] is not None,
            "stride": lambda name, i: axis(name, i, "stride"),
            "shape": lambda name, i: axis(name, i, "shape"),
            "has": lambda feature: feature in features,
        }

    @property
    def output_names(self) -> tuple[str, ...]:
        return tuple(self.tensors)[self.inputs :]

    @property
    def empty(self) -> bool:
        """Whether no output has an element: then there is nothing to launch."""
        return all((t := self.tensors[name]) is None or t.size == 0 for name in self.output_names)

    @property
    def bytes(self) -> int:
        """Bytes of all present tensors together: what must move at least."""
        return sum(t.bytes for t in self.tensors.values() if t is not None)

    def with_target(self, name: str) -> Problem:
        """The same on the usual part of another architecture."""
        return replace(self, target=name, multiprocessors=target(name).multiprocessors)

    def __str__(self) -> str:
        shown = ", ".join(f"{n}: {t}" for n, t in self.tensors.items() if t is not None)
        extra = {**self.attributes, **self.choices}
        words = "".join(f", {k}={v}" for k, v in extra.items())
        return f"{self.fusion}({shown}{words}) on {self.target}"

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k != "_env"}  # closures do not pickle
