"""Reading and writing by index."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fusionreg.core.frozen import FrozenDict

from ..emitter import Emitter, V


def embedding(e: Emitter, weight: V, indices: V, **_: Any) -> V:
    return e.op("Gather", weight, indices, axis=0)


def index_select(e: Emitter, self: V, dim: int, index: V, **_: Any) -> V:
    if index.rank == 0:
        index = e.unsqueeze(index, 0)
    return e.op("Gather", self, index, axis=self.axis(dim))


def gather(e: Emitter, self: V, dim: int, index: V, **_: Any) -> V:
    return e.op("GatherElements", self, index, axis=self.axis(dim))


def take_along_dim(e: Emitter, self: V, indices: V, dim: int | None = None, **_: Any) -> V:
    if dim is None:
        raise e.refuse("take_along_dim over the flattened tensor", "dim given")
    axis, shape = self.axis(dim), e.out.shape
    if indices.shape != shape:
        donors = [indices if indices.shape[i] == d else self for i, d in enumerate(shape)]
        indices = e.op("Expand", indices, e.ints([e.size(t, i) for i, t in enumerate(donors)]), shape=shape)
    wanted = (*shape[:axis], self.shape[axis], *shape[axis + 1 :])
    if self.shape != wanted:
        sizes = [e.size(self if i == axis else indices, i) for i in range(self.rank)]
        self = e.op("Expand", self, e.ints(sizes), shape=wanted)
    return gather(e, self, dim, indices)


def index(e: Emitter, self: V, indices: Sequence[V | None], **_: Any) -> V:
    """Advanced indexing: one integer tensor is a Gather, several broadcast together are a GatherND, and so is a mask of
    the leading axes, whose true positions are the indices (their number is known at run time alone)."""
    used = [(i, x) for i, x in enumerate(indices) if x is not None]
    if len(used) == 1 and used[0][0] == 0 and used[0][1].dtype == "bool":
        return e.op("GatherND", self, positions(e, used[0][1]), shape=e.out.shape)
    if any(x.dtype in ("bool", "uint8") for _, x in used):
        raise e.refuse("a mask beside other indices or behind the first axis", "integer indices, or one mask")
    if len(used) == 1:
        axis, x = used[0]
        return e.op("Gather", self, x, axis=axis, shape=e.out.shape)
    axes = [a for a, _ in used]
    together = _coordinates(e, self, used)
    rest = [a for a in range(self.rank) if a not in axes]
    found = e.op("GatherND", e.transpose(self, axes + rest), together)
    adjacent = axes == list(range(axes[0], axes[0] + len(axes)))
    if not adjacent or axes[0] == 0:
        return found
    depth = found.rank - len(rest)  # torch puts the result where the adjacent indices stood
    lead = [depth + i for i in range(axes[0])]
    return e.transpose(found, [*lead, *range(depth), *range(depth + axes[0], found.rank)])


def positions(e: Emitter, mask: V) -> V:
    """(n rank): where ``mask`` is true."""
    return e.op("Transpose", e.op("NonZero", e.cast(mask, "bool")), perm=(1, 0))


def nonzero(e: Emitter, self: V, **_: Any) -> V:
    return positions(e, e.unsqueeze(self, 0) if self.rank == 0 else self)


def where_true(e: Emitter, condition: V, **_: Any) -> tuple[V, ...]:
    """One index tensor per axis."""
    found = e.op("NonZero", e.cast(condition, "bool"))
    return tuple(e.op("Gather", found, e.const(i, "int64"), axis=0) for i in range(condition.rank))


def masked_select(e: Emitter, self: V, mask: V, **_: Any) -> V:
    if self.shape != mask.shape:
        raise e.refuse(f"a mask {list(mask.shape)} over {list(self.shape)}", "equal shapes")
    return e.op("GatherND", self, positions(e, mask), shape=e.out.shape)


def _coordinates(e: Emitter, x: V, used: Sequence[tuple[int, V]]) -> V:
    """Index tensors broadcast together, negatives wrapped, stacked on a new last axis."""
    wrapped = []
    for axis, i in used:
        i = e.cast(i, "int64")
        below = e.op("Less", i, e.number(0, "int64"))
        wrapped.append(e.op("Where", below, e.op("Add", i, e.operand(e.size(x, axis), "int64")), i))
    total = wrapped[0]
    for w in wrapped[1:]:
        total = e.op("Add", total, w)
    zero = e.op("Sub", total, total)
    return e.op("Concat", *(e.unsqueeze(e.op("Add", w, zero), zero.rank) for w in wrapped), axis=zero.rank)


def index_put(e: Emitter, self: V, indices: Sequence[V | None], values: V, accumulate: bool = False, **_: Any) -> V:
    """One number under a boolean mask of the leading axes is a Where; rows under one, and integer indices of the
    leading axes, are a ScatterND."""
    used = [(i, x) for i, x in enumerate(indices) if x is not None]
    if len(used) == 1 and used[0][1].dtype == "bool" and used[0][0] == 0 and values.rank == 0 and not accumulate:
        mask = used[0][1]
        mask = e.unsqueeze(mask, *range(mask.rank, self.rank)) if mask.rank < self.rank else mask
        return e.op("Where", mask, e.cast(values, self.dtype), self)
    if len(used) == 1 and used[0][1].dtype == "bool" and used[0][0] == 0:
        mask = used[0][1]
        rest, where = self.shape[mask.rank :], positions(e, mask)
        if values.rank != 1 + len(rest) or values.shape[1:] != rest or values.shape[0] == 1:
            sizes = [e.size(where, 0), *(e.size(self, i) for i in range(mask.rank, self.rank))]
            values = e.op("Expand", values, e.ints(sizes), shape=(where.shape[0], *rest))
        settings: dict[str, Any] = {"reduction": "add"} if accumulate else {}
        return e.op("ScatterND", self, where, e.cast(values, self.dtype), shape=self.shape, **settings)
    if any(x.dtype == "bool" for _, x in used) or [a for a, _ in used] != list(range(len(used))):
        raise e.refuse("index_put with a mask beside others or a gap", "one mask, or integer indices, of leading axes")
    where = _coordinates(e, self, used)
    shape = (*where.shape[:-1], *self.shape[len(used) :])
    sizes = [e.size(where, i) for i in range(where.rank - 1)] + [e.size(self, i) for i in range(len(used), self.rank)]
    updates = e.cast(values, self.dtype)
    if updates.shape != shape:
        updates = e.op("Expand", updates, e.ints(sizes), shape=shape)
    settings = {"reduction": "add"} if accumulate else {}
    return e.op("ScatterND", self, where, updates, shape=self.shape, **settings)


def scatter(
    e: Emitter,
    self: V,
    dim: int,
    index: V,
    src: V | None = None,
    value: Any = None,
    reduce: str | None = None,
    **_: Any,
) -> V:
    """Elements written at ``index`` along ``dim``; ``src`` may be larger than ``index``."""
    names = {None: "none", "add": "add", "multiply": "mul", "sum": "add", "prod": "mul", "amax": "max", "amin": "min"}
    if src is None:
        sizes = e.ints([e.size(index, i) for i in range(index.rank)])
        src = e.op("Expand", e.operand(value, self.dtype), sizes, shape=index.shape)
    elif src.shape != index.shape:
        ends = e.ints([e.size(index, i) for i in range(index.rank)])
        src = e.op("Slice", src, e.ints([0] * index.rank), ends, e.ints(range(index.rank)), shape=index.shape)
    kind = names[reduce]
    extra: dict[str, Any] = {} if kind == "none" else {"reduction": kind}
    return e.op("ScatterElements", self, index, e.cast(src, self.dtype), axis=self.axis(dim), **extra)


def scatter_add(e: Emitter, self: V, dim: int, index: V, src: V, **_: Any) -> V:
    return scatter(e, self, dim, index, src, reduce="add")


def scatter_reduce(
    e: Emitter, self: V, dim: int, index: V, src: V, reduce: str, include_self: bool = True, **_: Any
) -> V:
    if not include_self or reduce == "mean":
        raise e.refuse(
            f"scatter_reduce {reduce}, include_self={include_self}", "sum, prod, amax or amin including self"
        )
    return scatter(e, self, dim, index, src, reduce=reduce)


def index_add(e: Emitter, self: V, dim: int, index: V, source: V, alpha: Any = 1, **_: Any) -> V:
    """Slices of ``source`` added to the slices of ``self`` that ``index`` names."""
    axis = self.axis(dim)
    src = e.cast(source, self.dtype)
    if alpha != 1:
        src = e.op("Mul", src, e.operand(alpha, self.dtype))
    return _slices(e, self, axis, index, src, {"reduction": "add"})


def index_copy(e: Emitter, self: V, dim: int, index: V, source: V, **_: Any) -> V:
    return _slices(e, self, self.axis(dim), index, e.cast(source, self.dtype), {})


def _slices(e: Emitter, x: V, axis: int, index: V, src: V, settings: dict[str, Any]) -> V:
    order = [axis, *(i for i in range(x.rank) if i != axis)]
    first = e.transpose(x, order)
    done = e.op(
        "ScatterND",
        first,
        e.unsqueeze(e.cast(index, "int64"), 1),
        e.transpose(src, order),
        **settings,
        shape=first.shape,
    )
    return e.transpose(done, [*range(1, axis + 1), 0, *range(axis + 1, x.rank)])


def one_hot(e: Emitter, self: V, num_classes: int = -1, **_: Any) -> V:
    if num_classes < 0:
        raise e.refuse("one_hot without num_classes", "num_classes given; its size depends on data otherwise")
    e.stored(num_classes)
    classes = e.const(list(range(num_classes)), "int64")
    return e.cast(e.op("Equal", e.unsqueeze(self, self.rank), classes), "int64")


def tri(upper: int) -> Any:
    def emit(e: Emitter, self: V, diagonal: Any = 0, **_: Any) -> V:
        x = e.cast(self, "int32") if self.dtype == "bool" else self
        k = e.operand(diagonal, "int64") if diagonal != 0 else None
        return e.cast(e.op("Trilu", x, k, upper=upper), self.dtype)

    return emit


TABLE: FrozenDict[str, Any] = FrozenDict(
    {
        "aten.embedding.default": embedding,
        "aten.index_select.default": index_select,
        "aten.gather.default": gather,
        "aten.take_along_dim.default": take_along_dim,
        "aten.index.Tensor": index,
        "aten.nonzero.default": nonzero,
        "aten.argwhere.default": nonzero,
        "aten.where.default": where_true,
        "aten.nonzero_numpy.default": lambda e, self, **_: where_true(e, self),
        "aten.masked_select.default": masked_select,
        "aten._unsafe_index.Tensor": index,
        "aten.index_put.default": index_put,
        "aten._unsafe_index_put.default": index_put,
        "aten.scatter.src": scatter,
        "aten.scatter.value": scatter,
        "aten.scatter.reduce": scatter,
        "aten.scatter.value_reduce": scatter,
        "aten.scatter_add.default": scatter_add,
        "aten.scatter_reduce.two": scatter_reduce,
        "aten.index_add.default": index_add,
        "aten.index_copy.default": index_copy,
        "aten.one_hot.default": one_hot,
        "aten.tril.default": tri(0),
        "aten.triu.default": tri(1),
    }
)
