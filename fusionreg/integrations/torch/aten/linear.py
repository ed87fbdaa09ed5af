"""Matrix products. Transposes of an operand's last two axes become flags of MatMul."""

from __future__ import annotations

from typing import Any

from fusionreg.core.frozen import FrozenDict

from ..emitter import Emitter, V
from .pointwise import combine


def product(e: Emitter, a: V, b: V, trans_b: bool = False) -> V:
    """``a @ b`` (``a @ bᵀ`` with ``trans_b``), transposed operands read through flags."""
    flags: dict[str, Any] = {}
    if a.rank >= 2 and b.rank >= 2:
        a, flip_a = untransposed(a)
        b, flip_b = untransposed(b)
        flags = {"transA": int(flip_a), "transB": int(flip_b ^ trans_b)}
    return e.op("MatMul", a, b, **flags)


def untransposed(x: V) -> tuple[V, bool]:
    """The operand of a Transpose that swaps the last two axes and no others, else ``x``."""
    node = x.node
    if node is None or node.op != "Transpose" or x.rank < 2:
        return x, False
    swap = (*range(x.rank - 2), x.rank - 1, x.rank - 2)
    source = node.inputs[0]
    if tuple(node.attrs.get("perm", ()) or reversed(range(x.rank))) == swap and source is not None:
        return source, True
    return x, False


def matmul(e: Emitter, self: V, other: V, **_: Any) -> V:
    return product(e, self, other)


def mm(e: Emitter, self: V, mat2: V, **_: Any) -> V:
    return product(e, self, mat2)


def mv(e: Emitter, self: V, vec: V, **_: Any) -> V:
    return e.op("MatMul", self, vec)


def dot(e: Emitter, self: V, tensor: V | None = None, other: V | None = None, **_: Any) -> V:
    right = tensor if tensor is not None else other
    return e.op("MatMul", self, right)


def outer(e: Emitter, self: V, vec2: V, **_: Any) -> V:
    return e.op("Mul", e.unsqueeze(self, 1), vec2)


def linear(e: Emitter, input: V, weight: V, bias: V | None = None, **_: Any) -> V:
    if weight.rank == 1:
        y = e.op("MatMul", input, weight)
    elif input.rank == 1:  # a 1-d operand is promoted and squeezed again, which the flags do not reach
        y = e.op("MatMul", input, e.transpose(weight, (1, 0)))
    else:
        y = product(e, input, weight, trans_b=True)
    return y if bias is None else e.op("Add", y, bias)


def scaled_mm(
    e: Emitter, self: V, mat2: V, scale_a: V, scale_b: V, bias: V | None = None, scale_result: V | None = None, **_: Any
) -> V:
    """``(self @ mat2) · scale_a · scale_b + bias``, in float32 until the end."""
    if scale_result is not None:
        raise e.refuse("scale_result", "a result that is not quantised again")
    mat2, flip = untransposed(mat2)
    y = e.op("MatMul", e.cast(self, "float32"), e.cast(mat2, "float32"), transA=0, transB=int(flip))
    for scale in (scale_a, scale_b):
        y = e.op("Mul", y, scale if scale.rank in (0, 2) else e.reshape(scale, [1, -1], (1, *scale.shape)))
    return e.cast(y if bias is None else e.op("Add", y, e.cast(bias, "float32")), e.out.dtype)


def weight_int8pack_mm(e: Emitter, self: V, mat2: V, scales: V, **_: Any) -> V:
    """``self @ mat2ᵀ``, weights of int8, times a scale for each channel."""
    return e.op("Mul", product(e, self, e.cast(mat2, self.dtype), trans_b=True), e.cast(scales, self.dtype))


def int_mm(e: Emitter, self: V, mat2: V, **_: Any) -> V:
    return e.op("MatMulInteger", self, mat2)


def add_product(matrices: tuple[str, str]) -> Any:
    """addmm, baddbmm, addmv: ``beta · self + alpha · (a @ b)``."""

    def emit(e: Emitter, self: V, beta: Any = 1, alpha: Any = 1, **operands: Any) -> V:
        a, b = (operands[name] for name in matrices)
        y = product(e, a, b) if b.rank > 1 else e.op("MatMul", a, b)
        if alpha != 1:
            y = combine(e, "Mul", y, alpha, y.dtype)
        if beta == 0:
            return y
        return e.op("Add", y, self if beta == 1 else combine(e, "Mul", self, beta, self.dtype))

    return emit


def addbmm(e: Emitter, self: V, batch1: V, batch2: V, **factors: Any) -> V:
    """``beta · self + alpha · Σ (batch1 @ batch2)``: one product along the batch and k."""
    n, m, k = batch1.shape
    columns = batch2.shape[2]
    depth = n * k if isinstance(n, int) and isinstance(k, int) else None
    if depth is None:
        raise e.refuse("addbmm of a batch whose extent is not known", "a known number of products and of k")
    rows = e.reshape(e.transpose(batch1, (1, 0, 2)), [-1, depth], (m, depth))
    weights = e.reshape(batch2, [depth, -1], (depth, columns))
    return add_product(("mat1", "mat2"))(e, self, mat1=rows, mat2=weights, **factors)


def product_in(e: Emitter, self: V, mat2: V, out_dtype: Any = None, **_: Any) -> V:
    """A product whose sums are not rounded to the dtype of its operands."""
    kind = e.out.dtype
    return product(e, e.cast(self, kind), e.cast(mat2, kind))


def trilinear(e: Emitter, i1: V, i2: V, i3: V, expand1: Any, expand2: Any, expand3: Any, sumdim: Any, **_: Any) -> V:
    """torch's bilinear layers: a product of three operands, each without some of the axes, summed along others."""
    rank = i1.rank + len(expand1)
    axes = "abcdefgh"[:rank]
    terms = ["".join(c for i, c in enumerate(axes) if i not in gone) for gone in (expand1, expand2, expand3)]
    result = "".join(c for i, c in enumerate(axes) if i not in sumdim)
    return e.op("Einsum", i1, i2, i3, equation=f"{','.join(terms)}->{result}")


def einsum(e: Emitter, equation: str, tensors: tuple[V, ...], **_: Any) -> V:
    """Two operands that share batch and contracted labels become a MatMul; others stay an Einsum."""
    text = equation.replace(" ", "")
    terms, _arrow, result = text.partition("->")
    parts = terms.split(",")
    plain = len(parts) == 2 and _arrow and "." not in text
    if not plain or any(len(set(p)) != len(p) for p in (*parts, result)):
        return e.op("Einsum", *tensors, equation=equation)
    left, right = parts
    batch = [c for c in left if c in right and c in result]
    inner = [c for c in left if c in right and c not in result]
    rows = [c for c in left if c not in right]
    columns = [c for c in right if c not in left]
    if not inner or any(c not in result for c in rows + columns):
        return e.op("Einsum", *tensors, equation=equation)
    extents = {c: d for t, p in zip(tensors, parts, strict=True) for c, d in zip(p, t.shape, strict=True)}
    if any(t.shape[p.index(c)] != extents[c] for t, p in zip(tensors, parts, strict=True) for c in p):
        return e.op("Einsum", *tensors, equation=equation)
    if sum(not isinstance(extents[c], int) for c in extents) and max(map(len, (rows, columns, inner))) > 1:
        return e.op("Einsum", *tensors, equation=equation)
    a = _grouped(e, tensors[0], left, batch, rows, inner, extents)
    b = _grouped(e, tensors[1], right, batch, inner, columns, extents)
    y = product(e, a, b)
    order = batch + rows + columns
    shape = tuple(extents[c] for c in order)
    if max(len(rows), len(columns)) > 1:
        y = e.reshape(y, [d if isinstance(d, int) else -1 for d in shape], shape)
    elif gone := [len(batch) + i for i, group in enumerate((rows, columns)) if not group]:
        y = e.op("Squeeze", y, e.ints(gone))
    return e.transpose(y, [order.index(c) for c in result])


def _grouped(e: Emitter, x: V, labels: str, batch: list[str], first: list[str], second: list[str], extents: dict) -> V:
    """``x`` as (batch…, prod(first), prod(second))."""
    order = batch + first + second
    y = e.transpose(x, [labels.index(c) for c in order])
    if max(len(first), len(second)) <= 1:  # a vector is a matrix of one row or column
        new = [len(batch) + i for i, group in enumerate((first, second)) if not group]
        return e.op("Unsqueeze", y, e.ints(new)) if new else y
    target, shape = [], []
    for group in [[c] for c in batch] + [first, second]:
        size: Any = 1
        for c in group:
            size = extents[c] if size == 1 else size * extents[c]
        shape.append(size)
        target.append(size if isinstance(size, int) else -1)
    return e.reshape(y, target, tuple(shape))


def grouped_mm(
    e: Emitter, self: V, mat2: V, offs: V | None = None, bias: V | None = None, out_dtype: Any = None, **_: Any
) -> V:
    """Rows in groups that end at ``offs``, each times its group's matrix. Rows behind the last one are torch's own
    affair; here they are zeros."""
    if offs is None or bias is not None or self.rank != 2 or mat2.rank != 3 or e.out.dtype != self.dtype:
        raise e.refuse("_grouped_mm of other operands", "rows, a matrix for each group and offs, in one dtype")
    return e.op("fusionreg::GroupedMatMul", self, mat2, offs, shape=e.out.shape)


TABLE: FrozenDict[str, Any] = FrozenDict(
    {
        "aten.matmul.default": matmul,
        "aten.mm.default": mm,
        "aten.bmm.default": mm,
        "aten.mv.default": mv,
        "aten.dot.default": dot,
        "aten.inner.default": lambda e, self, other, **_: (
            matmul(e, self, e.transpose(other, range(other.rank)))
            if other.rank < 2
            else product(e, self, other, trans_b=True)
        ),
        "aten.outer.default": outer,
        "aten.linear.default": linear,
        "aten._scaled_mm.default": scaled_mm,
        "aten._weight_int8pack_mm.default": weight_int8pack_mm,
        "aten._int_mm.default": int_mm,
        "aten._grouped_mm.default": grouped_mm,
        "aten.addmm.default": add_product(("mat1", "mat2")),
        "aten.baddbmm.default": add_product(("batch1", "batch2")),
        "aten.addmv.default": add_product(("mat", "vec")),
        "aten.addbmm.default": addbmm,
        "aten.mm.dtype": product_in,
        "aten.bmm.dtype": product_in,
        "aten._trilinear.default": trilinear,
        "aten.einsum.default": einsum,
    }
)
