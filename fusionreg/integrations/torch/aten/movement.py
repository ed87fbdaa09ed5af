"""Pieces and wholes: joining, splitting, cutting, padding, and writing a piece back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fusionreg.core.frozen import FrozenDict

from ..emitter import Emitter, V


def cat(e: Emitter, tensors: Sequence[V], dim: int = 0, **_: Any) -> V:
    parts = [e.cast(x, e.out.dtype) for x in tensors if x.shape != (0,) or len(tensors) == 1]
    if not parts:
        return tensors[0]
    return parts[0] if len(parts) == 1 else e.op("Concat", *parts, axis=parts[0].axis(dim))


def stack(e: Emitter, tensors: Sequence[V], dim: int = 0, **_: Any) -> V:
    axis = dim % (tensors[0].rank + 1)
    return e.op("Concat", *(e.unsqueeze(e.cast(x, e.out.dtype), axis) for x in tensors), axis=axis)


def split(
    e: Emitter,
    self: V,
    split_size: Any = None,
    split_sizes: Sequence[Any] | None = None,
    chunks: int | None = None,
    dim: int = 0,
    **_: Any,
) -> tuple[V, ...]:
    """split, split_with_sizes, chunk: the pieces' extents are those that export recorded."""
    axis = self.axis(dim)
    sizes = [m.shape[axis] for m in e.metas]  # type: ignore[union-attr]
    if len(sizes) == 1:
        return (self,)
    given = list(split_sizes) if split_sizes is not None else [None] * len(sizes)
    wanted: list[Any] = [s if isinstance(s, int) else g for s, g in zip(sizes, given, strict=True)]
    if any(w is None for w in wanted):
        total, n = e.size(self, axis), len(sizes)
        part = split_size
        if part is None:
            up = e.op("Add", e.operand(total, "int64"), e.number((chunks or n) - 1, "int64"))
            part = e.op("Div", up, e.number(chunks or n, "int64"))
        whole = [part] * (n - 1)
        used = e.op("Mul", e.operand(part, "int64"), e.number(n - 1, "int64"))
        wanted = [*whole, e.op("Sub", e.operand(total, "int64"), used)]
    parts = e.op("Split", self, e.ints(wanted), axis=axis, outputs=len(sizes))
    return parts if isinstance(parts, tuple) else (parts,)


def unbind(e: Emitter, self: V, dim: int = 0, **_: Any) -> tuple[V, ...]:
    axis = self.axis(dim)
    return tuple(e.op("Gather", self, e.const(i, "int64"), axis=axis) for i in range(len(e.metas)))


def slice_(e: Emitter, self: V, dim: int = 0, start: Any = None, end: Any = None, step: int = 1, **_: Any) -> V:
    axis = self.axis(dim)
    extent = self.shape[axis]
    begin = 0 if start is None else start
    full = end is None or (isinstance(end, int) and (end >= 2**62 or (isinstance(extent, int) and end >= extent)))
    if begin == 0 and step == 1 and (full or (isinstance(end, V) and end.number == extent)):
        return self
    stop = 2**63 - 1 if end is None else end
    return e.op("Slice", self, e.ints([begin]), e.ints([stop]), e.ints([axis]), e.ints([step]), shape=e.out.shape)


def narrow(e: Emitter, self: V, dim: int, start: Any, length: Any, **_: Any) -> V:
    if isinstance(start, int) and isinstance(length, int):
        return slice_(e, self, dim, start, start + length)
    stop = e.op("Add", e.operand(start, "int64"), e.operand(length, "int64"))
    return slice_(e, self, dim, start, stop)


def select(e: Emitter, self: V, dim: int, index: Any, **_: Any) -> V:
    return e.op("Gather", self, e.operand(index, "int64"), axis=self.axis(dim))


def flip(e: Emitter, self: V, dims: Sequence[int], **_: Any) -> V:
    axes = [self.axis(d) for d in dims]
    n = len(axes)
    if not n:
        return self
    return e.op(
        "Slice", self, e.ints([-1] * n), e.ints([-(2**63) + 1] * n), e.ints(axes), e.ints([-1] * n), shape=self.shape
    )


def roll(e: Emitter, self: V, shifts: Any, dims: Any = (), **_: Any) -> V:
    by = [shifts] if isinstance(shifts, int) else list(shifts)
    axes = [dims] if isinstance(dims, int) else [self.axis(d) for d in dims]
    if not axes:
        raise e.refuse("roll over the flattened tensor", "dims given")
    y = self
    for axis, amount in zip(axes, by, strict=True):
        extent = y.shape[axis]
        if not isinstance(amount, int):
            raise e.refuse("a symbolic shift", "a number")
        cut = -amount % extent if isinstance(extent, int) and extent else -amount
        if cut == 0:
            continue
        tail = e.op("Slice", y, e.ints([cut]), e.ints([2**63 - 1]), e.ints([axis]))
        head = e.op("Slice", y, e.ints([0]), e.ints([cut]), e.ints([axis]))
        y = e.op("Concat", tail, head, axis=axis, shape=y.shape)
    return y


def pad(e: Emitter, self: V, pad: Sequence[Any], mode: str = "constant", value: Any = None, **_: Any) -> V:
    """torch counts pads from the last axis; negative ones crop."""
    modes = {"constant": "constant", "reflect": "reflect", "replicate": "edge", "circular": "wrap"}
    before, after = [0] * self.rank, [0] * self.rank
    for i in range(len(pad) // 2):
        before[self.rank - 1 - i], after[self.rank - 1 - i] = pad[2 * i], pad[2 * i + 1]
    y = self
    cuts = [(a, b) for a, b in zip(before, after, strict=True)]
    if any(isinstance(v, int) and v < 0 for ab in cuts for v in ab):
        starts = [max(0, -int(a)) for a, _ in cuts]
        ends = [-max(0, -int(b)) or 2**63 - 1 for _, b in cuts]
        y = e.op("Slice", y, e.ints(starts), e.ints(ends), e.ints(range(self.rank)))
        before, after = [max(0, int(a)) for a in before], [max(0, int(b)) for b in after]
    if all(isinstance(v, int) and v == 0 for v in (*before, *after)):
        return y
    fill = e.number(0 if value is None else value, self.dtype) if mode == "constant" else None
    return e.op("Pad", y, e.ints([*before, *after]), fill, mode=modes[mode], shape=e.out.shape)


def pad_mode(mode: str) -> Any:
    def emit(e: Emitter, self: V, padding: Sequence[Any], **_: Any) -> V:
        return pad(e, self, padding, mode)

    return emit


def pixel_shuffle(e: Emitter, self: V, upscale_factor: int, **_: Any) -> V:
    return e.op("DepthToSpace", self, blocksize=upscale_factor, mode="CRD", shape=e.out.shape)


def pixel_unshuffle(e: Emitter, self: V, downscale_factor: int, **_: Any) -> V:
    """(N C H·r W·r) → (N C·r² H W), channel order C, row, column."""
    r = downscale_factor
    n, c, h, w = self.shape
    split_h = h // r if isinstance(h, int) else f"{h}//{r}"
    split_w = w // r if isinstance(w, int) else f"{w}//{r}"
    rows, columns = (d if isinstance(d, int) else -1 for d in (split_h, split_w))
    sizes = [e.size(self, 0), e.size(self, 1), rows, r, columns, r]
    x = e.reshape(self, sizes, (n, c, split_h, r, split_w, r))
    x = e.transpose(x, (0, 1, 3, 5, 2, 4))
    return e.reshape(x, [d if isinstance(d, int) else -1 for d in e.out.shape], e.out.shape)


def slice_scatter(
    e: Emitter, self: V, src: V, dim: int = 0, start: Any = None, end: Any = None, step: int = 1, **_: Any
) -> V:
    """``self`` with ``self[start:end:step]`` along ``dim`` replaced."""
    axis = self.axis(dim)
    extent = e.size(self, axis)
    if isinstance(extent, int) and all(isinstance(v, int | None) for v in (start, end)):
        lo, hi, by = slice(start, end, step).indices(extent)
        if by == 1 and lo == 0 and hi == extent:
            return e.op(
                "Expand", e.cast(src, self.dtype), e.ints([e.size(self, i) for i in range(self.rank)]), shape=self.shape
            )
        index = e.ints(list(range(lo, hi, by)))
    else:
        rows = e.op("Range", e.number(0, "int64"), e.operand(extent, "int64"), e.number(1, "int64"))
        index = slice_(e, rows, 0, start, end, step) if _cuts(start, end, step) else rows
    first = e.transpose(self, [axis, *(i for i in range(self.rank) if i != axis)])
    moved = e.transpose(e.cast(src, self.dtype), [axis, *(i for i in range(src.rank) if i != axis)])
    done = e.op("ScatterND", first, e.unsqueeze(index, 1), moved, shape=first.shape)
    return e.transpose(done, [*range(1, axis + 1), 0, *range(axis + 1, self.rank)])


def _cuts(start: Any, end: Any, step: int) -> bool:
    return not (start in (None, 0) and end is None and step == 1)


def select_scatter(e: Emitter, self: V, src: V, dim: int, index: Any, **_: Any) -> V:
    axis = self.axis(dim)
    extent = self.shape[axis]
    at = index % extent if isinstance(index, int) and isinstance(extent, int) else index
    first = e.transpose(self, [axis, *(i for i in range(self.rank) if i != axis)])
    done = e.op(
        "ScatterND",
        first,
        e.reshape(e.operand(at, "int64"), [1, 1], (1, 1)),
        e.unsqueeze(e.cast(src, self.dtype), 0),
        shape=first.shape,
    )
    return e.transpose(done, [*range(1, axis + 1), 0, *range(axis + 1, self.rank)])


def _overloads(names: str, emit: Any) -> dict[str, Any]:
    return {f"aten.{name}": emit for name in names.split()}


TABLE: FrozenDict[str, Any] = FrozenDict(
    {
        **_overloads("cat.default concat.default concatenate.default", cat),
        **_overloads("stack.default", stack),
        **_overloads("split.Tensor split.sizes split_with_sizes.default chunk.default split_copy.Tensor", split),
        **_overloads("split_with_sizes_copy.default unsafe_chunk.default unsafe_split.Tensor", split),
        **_overloads("unbind.int unbind_copy.int", unbind),
        **_overloads("slice.Tensor slice_copy.Tensor", slice_),
        **_overloads("narrow.default", narrow),
        **_overloads("select.int select_copy.int", select),
        **_overloads("flip.default", flip),
        **_overloads("roll.default", roll),
        **_overloads("pad.default", pad),
        **_overloads("constant_pad_nd.default", pad),
        **_overloads("reflection_pad1d.default reflection_pad2d.default reflection_pad3d.default", pad_mode("reflect")),
        **_overloads(
            "replication_pad1d.default replication_pad2d.default replication_pad3d.default", pad_mode("replicate")
        ),
        **_overloads("pixel_shuffle.default", pixel_shuffle),
        **_overloads("pixel_unshuffle.default", pixel_unshuffle),
        **_overloads("slice_scatter.default", slice_scatter),
        **_overloads("select_scatter.default", select_scatter),
    }
)
