"""``gemm.lora_routed``: y = base + scale · scales[id] · B[id] · (A[id] · x), with an adapter of its own for each token.

A token without an adapter has an id below 0; one whose id no adapter has counts as such, and nothing is read for it.
The adapters have R ranks; with ``ranks`` only the first ``ranks[e]`` of adapter e count, whatever stands behind them.
"""

from __future__ import annotations

from itertools import product

from fusionreg.core.spec import AttributeSpec, Case, FusionSpec, Tolerance, Workload

from .lora_kernels import KERNELS

_REFERENCE = """
h = fusionreg.RoutedMatMul(x, a, ids, trans=transA)
u = optional(fusionreg.RoutedLimit)(h, ranks, ids)
v = optional(fusionreg.LimitRank)(b, ranks, trans=transB)
d = fusionreg.RoutedMatMul(u, v, ids, trans=transB)
s = optional(Mul)(d, scale)
w = optional(fusionreg.RoutedScale)(s, scales, ids)
y = Add(base, w)
"""

#: As people write it: adapters gathered by ids brought into range (or not: those of tokens without one are not used),
#: the token as a row or as a column of batched products, a scale for each adapter or none, and the delta of tokens
#: without an adapter masked.
_IDS = ("Clip(ids, 0)", "Max(ids, 0)", "ids")
_ROW = """
h = MatMul(Unsqueeze(x, (1,)), Gather(a, {ids}), transB=transA)
d = MatMul(h, Gather(b, {ids}), transB=transB)
s = optional(Mul)(Squeeze(d, (1,)), scale)
"""
_COLUMN = """
h = MatMul(Gather(a, {ids}), Unsqueeze(x, (2,)))
d = MatMul(Gather(b, {ids}), h)
s = optional(Mul)(Squeeze(d, (2,)), scale)
"""
_SCALES = ("w = Mul(s, Unsqueeze(Gather(scales, {ids}), (1,)))", "")
_MASKS = (
    "y = Add(base, Where(Unsqueeze(GreaterOrEqual(ids, 0), (1,)), {delta}, 0))",
    "y = Add(base, Where(Unsqueeze(Less(ids, 0), (1,)), 0, {delta}))",
)


def _spelled(products: str, ids: str, scales: str, mask: str) -> str:
    steps = ["" if ids == "ids" else f"at = {ids}", products, scales, mask]
    names = {"ids": "ids" if ids == "ids" else "at", "delta": "w" if scales else "s"}
    return "\n".join(step.format(**names).strip() for step in steps if step)


_SPELLINGS = tuple(_spelled(*parts) for parts in product((_ROW, _COLUMN), _IDS, _SCALES, _MASKS))


def _transposed(what: str) -> AttributeSpec:
    return AttributeSpec(type="int", default=1, choices=(0, 1), static=True, summary=f"1 when {what}")


_CASES = (
    Case(
        name="mixed",
        axes={"M": 37, "N": 40, "K": 72, "E": 3, "R": 16},
        values={"ids": "integers", "ranks": "integers"},
        summary="ids from -4 to 4 of three adapters, of which some have no rank at all",
    ),
    Case(
        name="none",
        axes={"M": 5, "N": 40, "K": 72, "E": 3, "R": 16},
        values={"ids": "-1", "a": "nan", "b": "inf"},
        summary="no token has an adapter",
    ),
    Case(
        name="one_adapter",
        axes={"M": 50, "N": 264, "K": 136, "E": 4, "R": 8},
        values={"ids": "2", "ranks": "8"},
        summary="one adapter for all, more tokens than a tile holds",
    ),
    Case(
        name="beyond",
        axes={"M": 20, "N": 64, "K": 64, "E": 2, "R": 32},
        values={"ids": "9223372036854775807", "a": "nan"},
        absent=("ranks", "scale", "scales"),
        summary="ids far outside read nothing",
    ),
    Case(
        name="unused_nan",
        axes={"M": 20, "N": 64, "K": 64, "E": 40, "R": 16},
        values={"a": "special", "b": "special", "ids": "0", "ranks": "3"},
        summary="NaN in adapters and ranks that no token uses",
    ),
    Case(
        name="wide_sum",
        axes={"M": 3, "N": 16, "K": 520, "E": 2, "R": 8},
        values={"x": "256", "a": "256", "b": "1e-4", "ids": "1", "ranks": "8", "scale": "0.125", "scales": "1"},
        summary="A x is no fp16 number",
    ),
)


def _workload(
    name: str, tokens: int, adapters: int, rank: int, n: int, k: int, mode: str, goal: str = "", base: bool = False
) -> Workload:
    """``base``: with the product that the adapters are added to."""
    return Workload(
        name=name,
        row="S14" if goal else "S14 more",
        mode="g" if mode == "g" else "b",
        axes={"M": tokens, "N": n, "K": k, "E": adapters, "R": rank},
        dtypes={"T": "bfloat16", "I": "int64"},
        absent=("ranks", "scales"),
        forms={"a": "T[E R K]", "b": "T[E N R]"},
        values={"ids": "distinct E" if tokens == adapters else "below E"},
        products={"base": "x @ weight"} if base else {},
        goal=goal,
        summary="decoding, one adapter each" if tokens == adapters else "tokens of a few adapters",
    )


_WORKLOADS = (
    # one launch; its bytes are those of 64 adapters: 17 MB
    _workload("64x4096x4096-r16", 64, 64, 16, 4096, 4096, "g", "0.008"),
    _workload("512x4096x4096-r16-32", 512, 32, 16, 4096, 4096, "b", "1.15 * product", base=True),
    _workload("1x4096x4096-r16", 1, 1, 16, 4096, 4096, "g"),
    _workload("16x14336x4096-r64", 16, 16, 64, 14336, 4096, "g"),
    _workload("256x4096x4096-r32", 256, 256, 32, 4096, 4096, "g"),
    _workload("4096x4096x4096-r16-8", 4096, 8, 16, 4096, 4096, "b"),
    _workload("4096x4096x14336-r128-4", 4096, 4, 128, 4096, 14336, "b"),
)

ROUTED = FusionSpec(
    api=1,
    name="gemm.lora_routed",
    summary="adds the low-rank adapter of each token: base + scale * scales[id] * B[id] (A[id] x); none where id is -1",
    pattern=(_REFERENCE.strip(), *_SPELLINGS),
    inputs={
        "base": "T[M N]",
        "x": "T[M K]",
        "a": "T[E K R] | T[E R K]",
        "b": "T[E R N] | T[E N R]",
        "ids": "I[M]",
        "ranks": "I[E]",
        "scale": "T[]",
        "scales": "T[E]",
    },
    outputs={"y": "T[M N]"},
    dtypes={"T": ("float16", "bfloat16", "float32"), "I": ("int64", "int32")},
    axes={
        "M": "tokens",
        "N": "output channels",
        "K": "input channels",
        "E": "adapters",
        "R": "ranks",
    },
    extents={"M": 37, "N": 48, "K": 64, "E": 3, "R": 16},
    attributes={
        "transA": _transposed("a is stored [E R K]"),
        "transB": _transposed("b is stored [E N R]"),
    },
    autocast="lower",
    constraints=(
        "shape(a, -1) == (K if transA else R)",
        "shape(a, -2) == (R if transA else K)",
        "shape(b, -1) == (R if transB else N)",
        "shape(b, -2) == (N if transB else R)",
    ),
    cases=_CASES,
    tolerances=(
        Tolerance(
            dtype="float32",
            ulp=1.0,
            inputs=1.0,
            reason="of an adapter with one rank, one sum decides a whole row, which the chain may hit by luck",
        ),
    ),
    workloads=_WORKLOADS,
    kernels=KERNELS,
    tags=("S14", "inference", "gemm", "lora"),
)
FUSIONS = (ROUTED,)
