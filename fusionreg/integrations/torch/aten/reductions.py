"""Reductions, ordering and running sums."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fusionreg.core.frozen import FrozenDict

from ..emitter import Emitter, V


def axes_of(x: V, dim: Any) -> list[int]:
    """Axes counted from the front; all of them for None or an empty list."""
    given = [] if dim is None else [dim] if isinstance(dim, int) else list(dim)
    return sorted(x.axis(d) for d in given) if given else list(range(x.rank))


def reduced(e: Emitter, op: str, x: V, dim: Any, keepdim: bool) -> V:
    """A reduction over ``dim``; a 0-d tensor is its own reduction."""
    if x.rank == 0:
        return x
    axes = axes_of(x, dim)
    named = (
        [a - x.rank for a in axes] if len(axes) < x.rank and axes == list(range(x.rank - len(axes), x.rank)) else axes
    )
    return e.op(op, x, e.ints(named), keepdims=int(keepdim))


def reduce(op: str) -> Any:
    def emit(e: Emitter, self: V, dim: Any = None, keepdim: bool = False, **_: Any) -> V:
        return reduced(e, op, e.cast(self, e.out.dtype), dim, keepdim)

    return emit


def mean(e: Emitter, self: V, dim: Any = None, keepdim: bool = False, **_: Any) -> V:
    return reduced(e, "ReduceMean", e.cast(self, e.out.dtype), dim, keepdim)


def extreme_with_index(largest: bool) -> Any:
    """max.dim, min.dim: (values, indices of the first)."""

    def emit(e: Emitter, self: V, dim: int, keepdim: bool = False, **_: Any) -> tuple[V, V]:
        axis = self.axis(dim)
        x = e.unsqueeze(self, 0) if self.rank == 0 else self
        values = e.op(
            "ReduceMax" if largest else "ReduceMin", x, e.ints([axis]), keepdims=int(keepdim and self.rank > 0)
        )
        index = e.op("ArgMax" if largest else "ArgMin", x, axis=axis, keepdims=int(keepdim and self.rank > 0))
        return values, index

    return emit


def arg_extreme(op: str) -> Any:
    def emit(e: Emitter, self: V, dim: int | None = None, keepdim: bool = False, **_: Any) -> V:
        if dim is None:
            flat = e.reshape(self, [-1], ("n",) if _symbolic(self.shape) else (_count(self.shape),))
            index = e.op(op, flat, axis=0, keepdims=0)
            return e.reshape(index, [1] * self.rank, (1,) * self.rank) if keepdim else index
        x = e.unsqueeze(self, 0) if self.rank == 0 else self
        return e.op(op, x, axis=self.axis(dim), keepdims=int(keepdim and self.rank > 0))

    return emit


def _symbolic(shape: Sequence[Any]) -> bool:
    return any(not isinstance(d, int) for d in shape)


def _count(shape: Sequence[Any]) -> int:
    n = 1
    for d in shape:
        n *= int(d)
    return n


def any_all(op: str) -> Any:
    """any (a maximum of 0 and 1), all (a minimum)."""

    def emit(e: Emitter, self: V, dim: Any = None, keepdim: bool = False, **_: Any) -> V:
        x = e.cast(e.cast(self, "bool"), "int32")
        return e.cast(reduced(e, op, x, dim, keepdim), e.out.dtype)

    return emit


def moments(e: Emitter, self: V, dim: Any, correction: float, keepdim: bool) -> tuple[V, V]:
    """(variance, mean), two passes: the mean of squared deviations, corrected."""
    axes = axes_of(self, dim)
    centre = reduced(e, "ReduceMean", self, axes, True)
    deviation = e.op("Sub", self, centre)
    squared = e.op("Mul", deviation, deviation)
    average = centre if keepdim else reduced(e, "ReduceMean", self, axes, False)
    if correction == 0:
        return reduced(e, "ReduceMean", squared, axes, keepdim), average
    total = reduced(e, "ReduceSum", squared, axes, keepdim)
    return e.op("Div", total, e.operand(below(e, self, axes, correction), self.dtype)), average


def below(e: Emitter, x: V, axes: Sequence[int], correction: float) -> float | V:
    """How many elements lie along ``axes``, less ``correction``; never under zero."""
    sizes = [e.size(x, a) for a in axes]
    known = [s for s in sizes if isinstance(s, int)]
    if len(known) == len(sizes):
        return max(_count(known) - correction, 0.0)
    total = e.number(float(_count(known)), "float32")
    for s in sizes:
        total = total if isinstance(s, int) else e.op("Mul", total, e.cast(s, "float32"))
    return e.op("Max", e.op("Sub", total, e.number(correction, "float32")), e.number(0, "float32"))


def spread_of(root: bool, with_mean: bool) -> Any:
    """var, std, var_mean, std_mean in all overloads."""

    def emit(
        e: Emitter,
        self: V,
        dim: Any = None,
        unbiased: bool = True,
        correction: Any = None,
        keepdim: bool = False,
        **_: Any,
    ) -> Any:
        amount = correction if correction is not None else (1 if unbiased else 0)
        variance, average = moments(e, self, dim, amount, keepdim)
        y = e.op("Sqrt", variance) if root else variance
        return (y, average) if with_mean else y

    return emit


def norm(e: Emitter, self: V, ord: Any = 2, p: Any = None, dim: Any = None, keepdim: bool = False, **_: Any) -> V:
    order = p if p is not None else ord
    x = e.cast(self, e.out.dtype)
    match order:
        case 2:
            return reduced(e, "ReduceL2", x, dim, keepdim)
        case 1:
            return reduced(e, "ReduceL1", x, dim, keepdim)
        case _ if order == float("inf"):
            return reduced(e, "ReduceMax", e.op("Abs", x), dim, keepdim)
    raise e.refuse(f"a norm of order {order}", "1, 2 or infinity")


def cumsum(e: Emitter, self: V, dim: int, **_: Any) -> V:
    x = e.cast(self, e.out.dtype)
    return x if x.rank == 0 else e.op("CumSum", x, e.const(x.axis(dim), "int64"))


def diff(
    e: Emitter, self: V, n: int = 1, dim: int = -1, prepend: V | None = None, append: V | None = None, **_: Any
) -> V:
    """Differences of neighbours along ``dim``, ``n`` times; of booleans, whether they differ."""
    axis = self.axis(dim)
    parts = [e.cast(p, e.out.dtype) for p in (prepend, self, append) if p is not None]
    x = parts[0] if len(parts) == 1 else e.op("Concat", *parts, axis=axis)
    for _step in range(n):
        later = e.op("Slice", x, e.ints([1]), e.ints([2**63 - 1]), e.ints([axis]))
        earlier = e.op("Slice", x, e.ints([0]), e.ints([-1]), e.ints([axis]))
        x = e.op("Xor" if x.dtype == "bool" else "Sub", later, earlier)
    return x


def cumprod(e: Emitter, self: V, dim: int, **_: Any) -> V:
    x = e.cast(self, e.out.dtype)
    return x if x.rank == 0 else e.op("CumProd", x, e.const(x.axis(dim), "int64"))


def topk(
    e: Emitter, self: V, k: Any, dim: int = -1, largest: bool = True, sorted: bool = True, **_: Any
) -> tuple[V, V]:
    return e.op("TopK", self, e.ints([k]), axis=self.axis(dim), largest=int(largest), sorted=int(sorted), outputs=2)


def sort(e: Emitter, self: V, dim: int = -1, descending: bool = False, **_: Any) -> tuple[V, V]:
    axis = self.axis(dim)
    return e.op("TopK", self, e.ints([e.size(self, axis)]), axis=axis, largest=int(descending), sorted=1, outputs=2)


def argsort(e: Emitter, self: V, dim: int = -1, descending: bool = False, **_: Any) -> V:
    return sort(e, self, dim, descending)[1]


def histc(e: Emitter, self: V, bins: int = 100, min: Any = 0, max: Any = 0, **_: Any) -> V:
    """How many numbers there are in each of ``bins`` parts of [min, max], the last one with its end."""
    low, high = float(min), float(max)
    if low >= high:
        raise e.refuse("histc over the range of its own values", "min below max")
    x = e.cast(self if self.rank == 1 else e.reshape(self, [-1]), "float32")
    parts = e.number(bins / (high - low), "float32")
    place = e.op("Floor", e.op("Mul", e.op("Sub", x, e.number(low, "float32")), parts))
    last = e.op("Equal", x, e.number(high, "float32"))
    place = e.op("Where", last, e.number(bins - 1, "float32"), place)
    inside = e.op("LessOrEqual", x, e.number(high, "float32"))
    hits = e.op("Equal", e.unsqueeze(place, 1), e.const(list(range(bins)), "float32"))
    counted = e.cast(e.op("And", hits, e.unsqueeze(inside, 1)), "int64")
    return e.cast(e.op("ReduceSum", counted, e.ints([0]), keepdims=0), e.out.dtype)


def logsumexp(e: Emitter, self: V, dim: Any, keepdim: bool = False, **_: Any) -> V:
    return reduced(e, "ReduceLogSumExp", e.cast(self, e.out.dtype), dim, keepdim)


def _overloads(names: str, emit: Any) -> dict[str, Any]:
    return {f"aten.{name}": emit for name in names.split()}


TABLE: FrozenDict[str, Any] = FrozenDict(
    {
        **_overloads("mean.default mean.dim", mean),
        **_overloads("sum.default sum.dim_IntList", reduce("ReduceSum")),
        **_overloads("prod.default prod.dim_int", reduce("ReduceProd")),
        **_overloads("amax.default max.default", reduce("ReduceMax")),
        **_overloads("amin.default min.default", reduce("ReduceMin")),
        **_overloads("max.dim", extreme_with_index(True)),
        **_overloads("min.dim", extreme_with_index(False)),
        **_overloads("argmax.default", arg_extreme("ArgMax")),
        **_overloads("argmin.default", arg_extreme("ArgMin")),
        **_overloads("any.default any.dim any.dims", any_all("ReduceMax")),
        **_overloads("all.default all.dim all.dims", any_all("ReduceMin")),
        **_overloads("var.default var.dim var.correction", spread_of(False, False)),
        **_overloads("std.default std.dim std.correction", spread_of(True, False)),
        **_overloads("var_mean.default var_mean.dim var_mean.correction", spread_of(False, True)),
        **_overloads("std_mean.default std_mean.dim std_mean.correction", spread_of(True, True)),
        **_overloads("linalg_vector_norm.default norm.ScalarOpt_dim norm.Scalar norm.ScalarOpt_dtype", norm),
        **_overloads("cumsum.default", cumsum),
        **_overloads("cumprod.default", cumprod),
        **_overloads("diff.default", diff),
        **_overloads("topk.default", topk),
        **_overloads("sort.default sort.stable", sort),
        **_overloads("argsort.default argsort.stable", argsort),
        **_overloads("histc.default", histc),
        **_overloads("logsumexp.default", logsumexp),
    }
)
