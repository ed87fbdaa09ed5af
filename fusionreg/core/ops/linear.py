"""Matrix products. Floor 1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .define import operator, specs_in
from .inference import Attributes, Constants, Extent, Extents, Inputs, Type, broadcast, fail, operand


def _contract(k: Extent, other: Extent) -> None:
    if isinstance(k, int) and isinstance(other, int) and k != other:
        fail(f"inner extents {k} and {other}", "equal ones")


def _swapped(shape: Sequence[Extent], swap: int) -> tuple[Extent, ...]:
    if swap and len(shape) < 2:
        fail(f"a transposed operand of rank {len(shape)}", "rank 2 or more")
    return (*shape[:-2], shape[-1], shape[-2]) if swap else tuple(shape)


def product_shape(a: Extents, b: Extents, trans_a: int = 0, trans_b: int = 0) -> Extents:
    """The shape of NumPy's matmul after the given swaps."""
    if a is None or b is None:
        return None
    if not a or not b:
        fail("an operand of rank 0", "rank 1 or more")
    a, b = _swapped(a, trans_a), _swapped(b, trans_b)
    left = a if len(a) > 1 else (1, *a)
    right = b if len(b) > 1 else (*b, 1)
    _contract(left[-1], right[-2])
    lead = broadcast(left[:-2], right[:-2]) or ()
    return (*lead, *(left[-2:-1] if len(a) > 1 else ()), *(right[-1:] if len(b) > 1 else ()))


def _matmul_type(inputs: Inputs, attributes: Attributes, constants: Constants) -> list[Type]:
    a, b = operand(inputs, 0), operand(inputs, 1)
    shape = product_shape(a.shape, b.shape, attributes["transA"], attributes["transB"])
    return [(a.dtype, shape)]


def _turned(xp: Any, x: Any, swap: int) -> Any:
    return xp.ns.matrix_transpose(x) if swap else x


@operator("MatMul", "a b", infer=_matmul_type, attributes={"transA": 0, "transB": 0})
def matmul(xp: Any, a: Any, b: Any, *, transA: int, transB: int) -> Any:
    """As ONNX MatMul; with transA or transB the last two axes of that operand are swapped first."""
    return xp.matmul(_turned(xp, a, transA), _turned(xp, b, transB))


def _gemm_type(inputs: Inputs, attributes: Attributes, constants: Constants) -> list[Type]:
    a, b = operand(inputs, 0), operand(inputs, 1)
    for v in (a, b):
        if v.shape is not None and len(v.shape) != 2:
            fail(f"{v.name} of rank {len(v.shape)}", "rank 2")
    shape = product_shape(a.shape, b.shape, attributes["transA"], attributes["transB"])
    if shape is not None and len(inputs) > 2 and inputs[2] is not None:
        broadcast(shape, inputs[2].shape)
    return [(a.dtype, shape or (None, None))]


@operator("Gemm", "a b c?", infer=_gemm_type, attributes={"alpha": 1.0, "beta": 1.0, "transA": 0, "transB": 0})
def gemm(xp: Any, a: Any, b: Any, c: Any = None, *, alpha: float, beta: float, transA: int, transB: int) -> Any:
    y = xp.matmul(_turned(xp, a, transA), _turned(xp, b, transB))
    if alpha != 1.0:
        y = y * alpha if xp.floating(y) else xp.cast(y * alpha, xp.name_of(a))
    if c is None or beta == 0.0:
        return y
    return y + (c if beta == 1.0 else xp.cast(c * beta, xp.name_of(y)))


def _wide_int(inputs: Inputs, attributes: Attributes, constants: Constants) -> list[Type]:
    return [("int32", product_shape(operand(inputs, 0).shape, operand(inputs, 1).shape))]


@operator("MatMulInteger", "a b a_zero_point? b_zero_point?", infer=_wide_int)
def matmul_integer(xp: Any, a: Any, b: Any, za: Any = None, zb: Any = None) -> Any:
    a, b = xp.cast(a, "int32"), xp.cast(b, "int32")
    if za is not None:
        za = xp.cast(za, "int32")
        a = a - (za[..., None] if za.ndim == 1 and za.shape[0] > 1 else za)
    if zb is not None:
        b = b - xp.cast(zb, "int32")
    return xp.matmul(a, b)


def _einsum_terms(equation: str, ranks: Sequence[int]) -> tuple[list[list[str]], list[str]]:
    """The labels of every operand and of the result; each axis of an ellipsis is ``"...i"``, counted from the right."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if len(terms) != len(ranks):
        fail(f"{len(terms)} terms in {equation!r} for {len(ranks)} operands", "one each")

    def expand(term: str, extra: int) -> list[str]:
        head, dots, tail = term.partition("...")
        return [*head, *([f"...{i}" for i in range(extra, 0, -1)] if dots else []), *tail]

    labels, widest = [], 0
    for term, rank in zip(terms, ranks, strict=True):
        extra = rank - len(term.replace("...", ""))
        if extra < 0 or (extra and "..." not in term):
            fail(f"term {term!r} for an operand of rank {rank}", "as many labels as axes")
        widest = max(widest, extra)
        labels.append(expand(term, extra))
    if arrow:
        return labels, expand(right, widest)
    flat = [c for term in labels for c in term]
    free = sorted({c for c in flat if flat.count(c) == 1 and not c.startswith("...")})
    return labels, [f"...{i}" for i in range(widest, 0, -1)] + free


def _einsum_type(inputs: Inputs, attributes: Attributes, constants: Constants) -> list[Type]:
    shapes = [v.shape for v in inputs if v is not None]
    dtype = operand(inputs, 0).dtype
    if any(s is None for s in shapes):
        return [(dtype, None)]
    known = [s for s in shapes if s is not None]
    labels, result = _einsum_terms(attributes["equation"], [len(s) for s in known])
    extents: dict[str, Extent] = {}
    for term, shape in zip(labels, known, strict=True):
        for label, extent in zip(term, shape, strict=True):
            extents[label] = (broadcast((extents.get(label, 1),), (extent,)) or (None,))[0]
    return [(dtype, tuple(extents[label] for label in result))]


@operator("Einsum", "args*", infer=_einsum_type, attributes={"equation": "<required>"})
def einsum(xp: Any, *args: Any, equation: str) -> Any:
    return xp.einsum(equation.replace(" ", ""), *args)


def _det_type(inputs: Inputs, attributes: Attributes, constants: Constants) -> list[Type]:
    x = operand(inputs, 0)
    return [(x.dtype, None if x.shape is None else x.shape[:-2])]


@operator("Det", "x", infer=_det_type)
def det(xp: Any, x: Any) -> Any:
    return xp.ns.linalg.det(x)


OPS = specs_in(globals())
