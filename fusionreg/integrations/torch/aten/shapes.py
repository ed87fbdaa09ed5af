"""Views and layout: what only moves elements, and what moves nothing at all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fusionreg.core.frozen import FrozenDict

from ..emitter import Emitter, V


def identity(e: Emitter, self: V, **_: Any) -> V:
    """Contiguity, copies and aliases have no meaning in a graph of values."""
    return self


def view(e: Emitter, self: V, size: Sequence[Any] | None = None, shape: Sequence[Any] | None = None, **_: Any) -> V:
    target = list(size if size is not None else shape or ())
    return e.reshape(self, [_dim(e, t, d) for t, d in zip(target, e.out.shape, strict=True)], e.out.shape)


def _dim(e: Emitter, wanted: Any, extent: Any) -> Any:
    """-1 resolved where export knows the extent."""
    return extent if isinstance(extent, int) else wanted


def reshape_like(e: Emitter, self: V, other: V, **_: Any) -> V:
    """``self`` in the shape of ``other``: what undoing a view needs."""
    return e.reshape(self, [e.size(other, i) for i in range(other.rank)], other.shape)


def flatten(e: Emitter, self: V, start_dim: int = 0, end_dim: int = -1, **_: Any) -> V:
    if self.rank == 0:
        return e.reshape(self, [1], (1,))
    first, last = self.axis(start_dim), self.axis(end_dim)
    sizes = [
        e.size(self, i) if i < first else d if isinstance(d, int) else -1
        for i, d in enumerate(e.out.shape[: first + 1])
    ]
    tail = [e.size(self, i) for i in range(last + 1, self.rank)]
    return e.reshape(self, [*sizes, *tail], e.out.shape)


def unflatten(e: Emitter, self: V, dim: int, sizes: Sequence[Any], **_: Any) -> V:
    axis = self.axis(dim)
    target = (
        [e.size(self, i) for i in range(axis)] + list(sizes) + [e.size(self, i) for i in range(axis + 1, self.rank)]
    )
    return e.reshape(self, [_dim(e, t, d) for t, d in zip(target, e.out.shape, strict=True)], e.out.shape)


def permute(e: Emitter, self: V, dims: Sequence[int], **_: Any) -> V:
    return e.transpose(self, [self.axis(d) for d in dims])


def transpose(e: Emitter, self: V, dim0: int, dim1: int, **_: Any) -> V:
    perm = list(range(self.rank))
    if perm:
        a, b = self.axis(dim0), self.axis(dim1)
        perm[a], perm[b] = perm[b], perm[a]
    return e.transpose(self, perm)


def t(e: Emitter, self: V, **_: Any) -> V:
    return e.transpose(self, list(reversed(range(self.rank))))


def mT(e: Emitter, self: V, **_: Any) -> V:
    return transpose(e, self, -1, -2)


def movedim(e: Emitter, self: V, source: Any, destination: Any, **_: Any) -> V:
    froms = [self.axis(d) for d in ([source] if isinstance(source, int) else source)]
    tos = [self.axis(d) for d in ([destination] if isinstance(destination, int) else destination)]
    rest = iter(i for i in range(self.rank) if i not in froms)
    placed = dict(zip(tos, froms, strict=True))
    return e.transpose(self, [placed[i] if i in placed else next(rest) for i in range(self.rank)])


def unsqueeze(e: Emitter, self: V, dim: int, **_: Any) -> V:
    return e.unsqueeze(self, dim % (self.rank + 1))


def squeeze(e: Emitter, self: V, dim: Any = None, **_: Any) -> V:
    given = range(self.rank) if dim is None else [dim] if isinstance(dim, int) else dim
    axes = sorted({self.axis(d) for d in given if self.rank and self.shape[self.axis(d)] == 1})
    return e.squeeze(self, *axes)


def expand(e: Emitter, self: V, size: Sequence[Any], **_: Any) -> V:
    shape = e.out.shape
    if self.shape == shape:
        return self
    lead = len(shape) - self.rank
    wanted: list[Any] = []
    for i, (item, extent) in enumerate(zip(size, shape, strict=True)):
        kept = i >= lead and self.shape[i - lead] == extent
        wanted.append(1 if kept and extent != 0 else extent if isinstance(extent, int) else item)
    return e.op("Expand", self, e.ints(wanted), shape=shape)


def expand_as(e: Emitter, self: V, other: V, **_: Any) -> V:
    return expand(e, self, [e.size(other, i) for i in range(other.rank)])


def repeat(e: Emitter, self: V, repeats: Sequence[Any] = (), dims: Sequence[Any] = (), **_: Any) -> V:
    times = list(repeats or dims)
    x = e.unsqueeze(self, *range(len(times) - self.rank)) if len(times) > self.rank else self
    times = [1] * (x.rank - len(times)) + times
    return (
        x
        if all(n == 1 for n in times if isinstance(n, int)) and not _symbolic(times)
        else e.op("Tile", x, e.ints(times), shape=e.out.shape)
    )


def repeat_interleave(e: Emitter, self: V, repeats: Any, dim: int | None = None, **_: Any) -> V:
    """Each element ``repeats`` times along ``dim``: an inner axis, expanded and merged."""
    if isinstance(repeats, V) and not repeats.number:
        raise e.refuse("repeats given by a tensor", "a number of repeats")
    x = e.reshape(self, [-1], e.out.shape) if dim is None and self.rank != 1 else self
    axis = 0 if dim is None else x.axis(dim)
    inner = e.unsqueeze(x, axis + 1)
    times = [1] * inner.rank
    times[axis + 1] = repeats
    wide = e.op("Expand", inner, e.ints(times))
    sizes = [e.size(x, i) if i != axis else -1 for i in range(x.rank)]
    return e.reshape(wide, [_dim(e, t, d) for t, d in zip(sizes, e.out.shape, strict=True)], e.out.shape)


def _symbolic(values: Sequence[Any]) -> bool:
    return any(isinstance(v, V) for v in values)


def cast(e: Emitter, self: V, **_: Any) -> V:
    """to, type_as, _to_copy: dtype is the recorded one; devices and layouts are not part of the graph."""
    return e.cast(self, e.out.dtype)


def copy(e: Emitter, self: V, src: V, **_: Any) -> V:
    """``src`` in the dtype and shape of ``self``."""
    x = e.cast(src, self.dtype)
    if x.shape == self.shape:
        return x
    return e.op("Expand", x, e.ints([e.size(self, i) for i in range(self.rank)]), shape=self.shape)


def _overloads(names: str, emit: Any) -> dict[str, Any]:
    return {f"aten.{name}": emit for name in names.split()}


TABLE: FrozenDict[str, Any] = FrozenDict(
    {
        **_overloads(
            "alias.default clone.default contiguous.default detach.default lift_fresh_copy.default lift_fresh.default "
            "lift.default positive.default resolve_conj.default resolve_neg.default "
            "detach_copy.default alias_copy.default",
            identity,
        ),
        **_overloads(
            "view.default reshape.default _unsafe_view.default view_copy.default _reshape_alias.default", view
        ),
        **_overloads("reshape_as.default view_as.default", lambda e, self, other, **_: reshape_like(e, self, other)),
        **_overloads("flatten.using_ints", flatten),
        **_overloads("unflatten.int", unflatten),
        **_overloads("permute.default permute_copy.default", permute),
        **_overloads("transpose.int transpose_copy.int swapdims.default", transpose),
        "aten.swapaxes.default": lambda e, self, axis0, axis1, **_: transpose(e, self, axis0, axis1),
        **_overloads("t.default numpy_T.default t_copy.default", t),
        **_overloads("mT.default adjoint.default", mT),
        **_overloads("movedim.int movedim.intlist moveaxis.int moveaxis.intlist", movedim),
        **_overloads("unsqueeze.default unsqueeze_copy.default", unsqueeze),
        **_overloads("squeeze.default squeeze.dim squeeze.dims squeeze_copy.dim squeeze_copy.dims", squeeze),
        **_overloads("expand.default expand_copy.default broadcast_to.default", expand),
        **_overloads("expand_as.default", expand_as),
        **_overloads("repeat.default tile.default", repeat),
        **_overloads("repeat_interleave.self_int repeat_interleave.self_Tensor", repeat_interleave),
        **_overloads("to.dtype to.device to.dtype_layout to.other _to_copy.default type_as.default", cast),
        **_overloads("to.prim_Device _autocast_to_full_precision.default _autocast_to_reduced_precision.default", cast),
        **_overloads("copy.default", copy),
        "fusionreg.reshape_like.default": reshape_like,
        "prims.convert_element_type.default": lambda e, a, **_: e.cast(a, e.out.dtype),
    }
)
