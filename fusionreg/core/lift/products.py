"""Matrix products: Gemm into its parts, Transposes into MatMul's flags. Floor 3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..dtypes import dtype
from .engine import Rule
from .site import Site, floats


def swaps_last(operand: str, flag: str) -> Any:
    """The flag toggled, where a Transpose swaps exactly the last two axes. An identity permutation toggles nothing."""

    def derive(site: Site) -> Mapping[str, Any] | None:
        rank, perm = site.rank(operand), site.attribute("perm")
        if rank is None or rank < 2:
            return None
        perm = tuple(range(rank))[::-1] if perm is None else tuple(p % rank for p in perm)
        if perm != (*range(rank - 2), rank - 1, rank - 2):
            return None
        return {flag: 1 - int(site.attribute(flag))}

    return derive


#: Transposes into MatMul; run before constants are folded, so that a weight stays as the model stores it.
TRANSPOSES: tuple[Rule, ...] = (
    Rule(
        "transpose_a",
        "y = MatMul(Transpose(a, perm=perm), b, transA=transA, transB=transB)",
        "y = MatMul(a, b, transA=transA, transB=transB)",
        (),
        swaps_last("a", "transA"),
        shared=True,
    ),
    Rule(
        "transpose_b",
        "y = MatMul(a, Transpose(b, perm=perm), transA=transA, transB=transB)",
        "y = MatMul(a, b, transA=transA, transB=transB)",
        (),
        swaps_last("b", "transB"),
        shared=True,
    ),
    Rule(
        "transpose_experts",
        "y = fusionreg.GroupedMatMul(x, Transpose(w, perm=perm), ends, trans=trans)",
        "y = fusionreg.GroupedMatMul(x, w, ends, trans=trans)",
        (),
        swaps_last("w", "trans"),
        shared=True,
    ),
)


def _factors(site: Site) -> Mapping[str, Any]:
    """alpha and beta as constants of the product's dtype."""
    import numpy as np

    kind = dtype(site.value("a").dtype).numpy
    return {
        f"{name}_": np.asarray(site.attribute(name)).astype(kind)
        for name in ("alpha", "beta")
        if name in site.found.attributes
    }


#: What a product may have behind it in a fused kernel, first of all.
_BEHIND = frozenset({"Add", "Sub", "Mul", "Div", "Relu", "Gelu", "Sigmoid", "Tanh", "Swish", "Cast"})


def _unturned(site: Site) -> Mapping[str, Any] | None:
    """The permutation that swaps the last two axes of a, where an operator element by element reads y alone."""
    rank, readers = site.rank("a"), site.graph.consumers.get(site.name("y"), ())
    if rank is None or rank < 2 or len(readers) != 1 or readers[0].op not in _BEHIND:
        return None
    return {"perm": (*range(rank - 2), rank - 1, rank - 2)}


#: Kernels read columns of x as well as rows, by its strides: a Transpose in front costs nothing there.
COLUMNS: tuple[Rule, ...] = (
    Rule(
        "columns_of_x",
        "y = MatMul(a, b, transA=1, transB=transB)",
        "y = MatMul(Transpose(a, perm=perm), b, transB=transB)",
        (),
        _unturned,
    ),
)

_FLAGS = "transA=transA, transB=transB"
_PRODUCT = f"MatMul(a, b, {_FLAGS})"

GEMM: tuple[Rule, ...] = (
    Rule("gemm", f"y = Gemm(a, b, beta=beta, {_FLAGS})", f"y = {_PRODUCT}", (floats("a", "b"),)),
    Rule("gemm", f"y = Gemm(a, b, c, beta=0.0, {_FLAGS})", f"y = {_PRODUCT}", (floats("a", "b"),)),
    Rule("gemm", f"y = Gemm(a, b, c, {_FLAGS})", f"y = Add({_PRODUCT}, c)", (floats("a", "b", "c"),)),
    Rule(
        "gemm",
        f"y = Gemm(a, b, alpha=alpha, beta=beta, {_FLAGS})",
        f"y = Mul({_PRODUCT}, alpha_)",
        (floats("a", "b"),),
        _factors,
    ),
    Rule(
        "gemm",
        f"y = Gemm(a, b, c, alpha=alpha, beta=0.0, {_FLAGS})",
        f"y = Mul({_PRODUCT}, alpha_)",
        (floats("a", "b"),),
        _factors,
    ),
    Rule(
        "gemm",
        f"y = Gemm(a, b, c, alpha=alpha, beta=beta, {_FLAGS})",
        f"y = Add(Mul({_PRODUCT}, alpha_), Mul(c, beta_))",
        (floats("a", "b", "c"),),
        _factors,
    ),
)
