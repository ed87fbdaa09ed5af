"""The iteration space of a point-wise fusion: as few axes as its operands' strides allow. Floor 4.

An element of every output depends on one element of every operand alone, so axes have no meaning of their own: those
of extent 1 are dropped, and neighbours that every operand strides through alike become one. What is left is split into
the *structure*, which a kernel is compiled for, and numbers, which it is launched with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property, lru_cache
from math import prod

from ..dtypes import dtype
from ..errors import MisfitError
from .types import Problem, Tensor

#: Positions and offsets up to which 32-bit indices are enough; the last block of a launch may reach a little further.
NARROW = 2**31 - 2**20

#: Bytes that device memory moves at least.
SECTOR = 32

#: Most elements that one access moves, and its most bytes.
MOST_ELEMENTS, MOST_BYTES = 16, 16


class Step(IntEnum):
    """How an operand moves along an axis."""

    BROADCAST = 0
    CONTIGUOUS = 1
    GENERAL = 2


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor as the iteration sees it.

    Attributes:
        name, dtype: of the tensor.
        output: whether it is written.
        steps: one per axis of the iteration.
        whole: whether it is contiguous over the whole space, in the iteration's order.
    """

    name: str
    dtype: str
    output: bool
    steps: tuple[Step, ...]
    whole: bool

    @property
    def bytes(self) -> int:
        """Of one element."""
        return dtype(self.dtype).bytes

    @property
    def scalar(self) -> bool:
        """Whether all positions read the same element."""
        return not any(self.steps)


@dataclass(frozen=True, slots=True)
class Iteration:
    """The structure of an iteration: everything that code depends on, no extents and no strides.

    Attributes:
        operands: every present input, then every output, in the fusion's order.
        rank: number of axes, at least 1; the last is the one along which most bytes are contiguous.
        across: the axis that transposed operands are contiguous along, -1 where there are none.
        flat: whether vectors run through the whole space without regard to the ends of rows; otherwise every row is a
            whole number of vectors.
        long: of a flat one, whether rows are so long that no vector reaches beyond the next row.
        wide: whether indices take 64 bits.
    """

    operands: tuple[Operand, ...]
    rank: int
    across: int
    flat: bool
    long: bool
    wide: bool

    def moves(self, operand: Operand) -> str:
        """What a vector of positions takes of it: a ``run`` of neighbours, ``one`` element, or ``each`` by its own."""
        if operand.whole if self.flat else operand.steps[-1] is Step.CONTIGUOUS:
            return "run"
        return "one" if operand.scalar or (operand.steps[-1] is Step.BROADCAST and not self.flat) else "each"

    def transposed(self, operand: Operand) -> bool:
        """Whether the operand is contiguous along ``across`` and strides along the last axis."""
        return self.across >= 0 and _transposed(operand.steps, self.across)


@dataclass(frozen=True)
class Space:
    """An iteration with its numbers.

    Attributes:
        structure: what a kernel is compiled for.
        extents: of each axis.
        strides: of each operand along each axis, in elements.
        widest, tile_widest: as in :data:`~fusionreg.core.spec.ITERATION`.
    """

    structure: Iteration
    extents: tuple[int, ...]
    strides: tuple[tuple[int, ...], ...]
    widest: int
    tile_widest: int

    @cached_property
    def env(self) -> dict[str, int]:
        """The values of :data:`~fusionreg.core.spec.ITERATION`."""
        it, elements = self.structure, prod(self.extents)
        sizes = [
            o.bytes * prod(n for n, s in zip(self.extents, o.steps, strict=True) if s is not Step.BROADCAST)
            for o in it.operands
        ]
        return {
            "elements": elements,
            "columns": self.extents[-1],
            "depth": self.extents[it.across] if it.across >= 0 else 1,
            "element_bytes": max(o.bytes for o in it.operands if o.output or all(o.steps)),
            "widest": self.widest,
            "tile_widest": self.tile_widest,
            "staged_bytes": sum(o.bytes for o in it.operands if it.transposed(o)),
            "returned_bytes": sum(o.bytes for o in it.operands if o.output and it.transposed(o)),
            "turns": self.extents[0],
            "loose": int(any(not o.whole and o.steps[0] for o in it.operands)),
            "crossing": int(it.flat and it.rank > 1),
            "traffic": sum(sizes),
            "gathered_bytes": sum(o.bytes for o in it.operands if it.moves(o) == "each" and o.steps[-1]),
            "scattered": sum(
                elements * (min(abs(strides[-1]) * o.bytes, SECTOR) - o.bytes)
                for o, strides in zip(it.operands, self.strides, strict=True)
                if o.steps[-1] is Step.GENERAL
            ),
        }

    def value(self, what: str, axis: int) -> int:
        """A launch argument: ``elements``, or ``extent``, ``multiplier`` or ``shift`` of an axis."""
        if what == "elements":
            return prod(self.extents)
        if what == "extent":
            return self.extents[axis]
        return dict(zip(("multiplier", "shift"), reciprocal(self.extents[axis], self.structure.wide), strict=True))[
            what
        ]

    def stride(self, name: str, axis: int) -> int:
        """The stride of the operand of that name along an axis."""
        index = next(i for i, o in enumerate(self.structure.operands) if o.name == name)
        return self.strides[index][axis]


def iteration(problem: Problem) -> Iteration:
    """The structure of the problem's iteration; raises as :func:`space`."""
    return space(problem).structure


@lru_cache(maxsize=1024)
def space(problem: Problem) -> Space:
    """The problem as one iteration; :class:`MisfitError` when its tensors do not share an iteration space."""
    tensors = {name: t for name, t in problem.tensors.items() if t is not None}
    outputs = problem.output_names
    shape = tensors[outputs[0]].shape
    strides = [_broadcast(problem, name, t, shape, name in outputs) for name, t in tensors.items()]
    sizes = [dtype(t.dtype).bytes for t in tensors.values()]
    written = [name in outputs for name in tensors]
    kept = [a for a, n in enumerate(shape) if n != 1]
    order = _order([shape[a] for a in kept], [[s[a] for a in kept] for s in strides], sizes, written)
    extents, columns = _collapse([shape[kept[i]] for i in order], [[s[kept[i]] for i in order] for s in strides])
    if not extents:  # one position: an axis of extent 1 that every tensor is contiguous along
        extents, columns = (1,), tuple((1,) for _ in strides)
    operands = tuple(
        Operand(name, t.dtype, w, _steps(own), _is_whole(extents, own))
        for (name, t), w, own in zip(tensors.items(), written, columns, strict=True)
    )
    alignments = [t.alignment for t in tensors.values()]
    across = _across(operands, extents)
    whole = [o.whole for o in operands]
    flat_widest = _widest([()] * len(operands), whole, sizes, alignments, ()) if any(whole) else 1
    inner = [o.steps[-1] is Step.CONTIGUOUS for o in operands]
    row_widest = _widest([s[:-1] for s in columns], inner, sizes, alignments, extents[-1:]) if any(inner) else 1
    enough = row_widest >= flat_widest or row_widest * max(sizes) >= MOST_BYTES // 2
    flat = len(extents) == 1 or not (enough or not all(o.whole for o in operands if o.output))
    staged = [across >= 0 and _transposed(o.steps, across) for o in operands]
    others = [
        tuple(x for a, x in enumerate(s) if a != (across if t else len(s) - 1))
        for s, t in zip(columns, staged, strict=True)
    ]
    moved = [i or t for i, t in zip(inner, staged, strict=True)]
    ends = (extents[-1], extents[across]) if across >= 0 else extents[-1:]
    tile_widest = _widest(others, moved, sizes, alignments, ends) if any(moved) else 1
    reach = max(
        sum(abs(x) * (n - 1) for n, x in zip(extents, own, strict=True)) if prod(extents) else 0 for own in columns
    )
    long = flat and len(extents) > 1 and extents[-1] >= MOST_ELEMENTS
    structure = Iteration(operands, len(extents), across, flat, long, max(reach, prod(extents)) >= NARROW)
    return Space(structure, extents, columns, flat_widest if flat else row_widest, tile_widest)


def reciprocal(divisor: int, wide: bool) -> tuple[int, int]:
    """(multiplier, shift) with ``n // divisor == (high(n * multiplier) + n) >> shift``, as signed integers.

    ``high`` is the upper half of the product; n below 2^31, or 2^63 if ``wide``. Granlund and Montgomery, "Division by
    Invariant Integers using Multiplication", 1994, figure 4.1.
    """
    bits = 64 if wide else 32
    shift = max(divisor - 1, 0).bit_length()
    multiplier = ((1 << bits) * ((1 << shift) - divisor)) // divisor + 1 if divisor else 1
    return multiplier - (1 << bits) if multiplier >= 1 << (bits - 1) else multiplier, shift


def _broadcast(problem: Problem, name: str, tensor: Tensor, shape: tuple[int, ...], output: bool) -> tuple[int, ...]:
    """Strides along the axes of ``shape``, 0 where the tensor is repeated."""
    missing = len(shape) - len(tensor.shape)
    fits = missing >= 0 and all(d in (1, n) for d, n in zip(tensor.shape, shape[missing:], strict=True))
    if not fits or (output and tensor.shape != shape):
        expected = f"the shape {shape} of the first output" if output else f"one that broadcasts to {shape}"
        raise MisfitError("cannot iterate", problem.fusion, f"{name} has shape {tensor.shape}", expected, tensor=name)
    own = (0 if d == 1 else s for d, s in zip(tensor.shape, tensor.strides, strict=True))
    return (*(0,) * missing, *own)


def _order(
    extents: Sequence[int], strides: Sequence[Sequence[int]], sizes: Sequence[int], written: Sequence[bool]
) -> list[int]:
    """Axes from slow to fast. The last is the one along which most bytes are contiguous; the others follow the strides
    of the largest tensor that is contiguous there, an output where one is."""
    axes = range(len(extents))

    def size(i: int) -> int:
        return sizes[i] * prod(n for n, s in zip(extents, strides[i], strict=True) if s)

    first = written.index(True)
    weight = [sum(size(i) for i in range(len(strides)) if strides[i][a] == 1) for a in axes]
    fastest = {a: abs(strides[first][a]) for a in axes}
    last = max(axes, key=lambda a: (weight[a], -fastest[a]), default=-1)
    leaders = [i for i in range(len(strides)) if last >= 0 and strides[i][last] == 1 and all(strides[i])]
    leader = max(leaders, key=lambda i: (size(i), written[i]), default=first)
    return sorted(axes, key=lambda a: (a == last, -abs(strides[leader][a]), a))


def _collapse(
    extents: Sequence[int], strides: Sequence[Sequence[int]]
) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """Neighbouring axes united wherever every tensor strides through both alike."""
    kept: list[int] = []
    steps: list[list[int]] = [[] for _ in strides]
    for axis, extent in enumerate(extents):
        if kept and all(own[-1] == s[axis] * extent for own, s in zip(steps, strides, strict=True)):
            kept[-1] *= extent
            for own, s in zip(steps, strides, strict=True):
                own[-1] = s[axis]
            continue
        kept.append(extent)
        for own, s in zip(steps, strides, strict=True):
            own.append(s[axis])
    return tuple(kept), tuple(map(tuple, steps))


def _steps(strides: Sequence[int]) -> tuple[Step, ...]:
    return tuple(Step(s) if s in (0, 1) else Step.GENERAL for s in strides)


def _is_whole(extents: Sequence[int], strides: Sequence[int]) -> bool:
    step = 1
    for n, s in zip(reversed(extents), reversed(strides), strict=True):
        if s != step:
            return False
        step *= n
    return True


def _across(operands: Sequence[Operand], extents: Sequence[int]) -> int:
    """The axis that the most bytes of transposed operands are contiguous along; -1 where there are none."""

    def weight(axis: int) -> int:
        moved = [o for o in operands if _transposed(o.steps, axis)]
        return sum(o.bytes * prod(n for n, s in zip(extents, o.steps, strict=True) if s) for o in moved)

    best = max(range(len(extents) - 1), key=weight, default=-1)
    return best if best >= 0 and weight(best) else -1


def _transposed(steps: Sequence[Step], across: int) -> bool:
    return steps[across] is Step.CONTIGUOUS and steps[-1] is Step.GENERAL


def _widest(
    strides: Sequence[Sequence[int]],
    moved: Sequence[bool],
    sizes: Sequence[int],
    alignments: Sequence[int],
    extents: Sequence[int],
) -> int:
    """Most consecutive elements at which the ``moved`` operands can be accessed: a power of two that divides the
    extents, and whose bytes divide their addresses and other strides."""
    count = MOST_ELEMENTS
    while count > 1:
        need = [min(count * size, MOST_BYTES) for size in sizes]
        fits = all(n % count == 0 for n in extents) and all(
            alignment % bytes == 0 and all(x * size % bytes == 0 for x in own)
            for own, m, size, alignment, bytes in zip(strides, moved, sizes, alignments, need, strict=True)
            if m
        )
        if fits:
            break
        count //= 2
    return count
