"""Around experts that are computed elsewhere: ``moe.route`` chooses them, ``moe.gather_sum`` adds up what they give."""

from __future__ import annotations

from fusionreg.core.spec import Backward, Case, FusionSpec, KernelSpec, Tolerance

from .routed import ATTRIBUTES, AXES, ROUTING

_AXES = {"M": AXES["M"], "E": AXES["E"], "K": "experts of a token"}
_CHOICE = ("K == top_k", "top_k >= 1 and top_k <= 32 and top_k <= E")
_LOGITS = {"logits": "L[M E]", "bias": "float32[E]"}

_CASES = (
    Case(name="ties", axes={"M": 9, "E": 40, "K": 6}, values={"logits": "zeros"}, attributes={"top_k": 6}),
    Case(name="many", axes={"M": 3, "E": 600, "K": 8}, attributes={"top_k": 8}, summary="more than a warp holds"),
    Case(
        name="after",
        axes={"M": 11, "E": 33, "K": 4},
        attributes={"top_k": 4, "scoring": "softmax_after"},
        absent=("bias",),
        summary="a softmax of the chosen ones",
    ),
    Case(
        name="deepseek",
        axes={"M": 9, "E": 256, "K": 8},
        attributes={"top_k": 8, "scoring": "sigmoid", "renormalise": 1, "scale": 2.5},
        summary="sigmoids, chosen with a bias that they are weighed without",
    ),
    Case(
        name="renormalised",
        axes={"M": 17, "E": 8, "K": 2},
        attributes={"renormalise": 1},
        absent=("bias",),
        summary="as Mixtral",
    ),
)


def _kernel(*, gradient: bool) -> KernelSpec:
    return KernelSpec(
        name="warp",
        template="route.cu.j2",
        summary="a warp for each token",
        requires=("E <= 2147483647 - 32",),
        strides=("logits",),
        constants={"THREADS": "128", "GRADIENT": str(int(gradient))},
        grid="max(1, ceildiv(M, 4))",
        block="THREADS",
        estimate="3e-6 + ceildiv(M, 64 * multiprocessors) * (1e-6 + 2e-8 * top_k + E * 1e-9) + M * E * 4 / 2e12",
    )


def _fusion(words: str, summary: str, pattern: str, **fields: object) -> FusionSpec:
    return FusionSpec(
        api=1,
        name=f"moe.{words}",
        summary=summary,
        pattern=pattern,
        dtypes={"L": ("float32", "float16", "bfloat16")},
        axes=_AXES,
        extents={"M": 8, "E": 12, "K": 2},
        attributes=ATTRIBUTES,
        constraints=_CHOICE,
        cases=_CASES,
        **fields,
    )


ROUTE = _fusion(
    "route",
    "the top-k experts of each token, and what each one counts",
    ROUTING,
    inputs=_LOGITS,
    outputs={"weights": "float32[M K]", "ids": "int64[M K]"},
    backward=Backward(fusion="moe.route_backward"),
    kernels=(_kernel(gradient=False),),
    tags=("S19", "inference", "moe"),
)
ROUTE_BACKWARD = _fusion(
    "route_backward",
    "the gradient of router logits from that of the weights of the top-k experts",
    f"{ROUTING.replace('weights, ids', '_, ids')}\ndlogits = fusionreg.RouteGrad("
    "dweights, logits, ids, scoring=scoring, renormalise=renormalise, scale=scale)",
    inputs={"dweights": "float32[M K]", **_LOGITS},
    outputs={"dlogits": "L[M E]"},
    kernels=(_kernel(gradient=True),),
    tolerances=tuple(
        Tolerance(dtype=dtype, ulp=2.0, inputs=2.0, reason="what is left of sums that cancel")
        for dtype in ("float32", "float16", "bfloat16")
    ),
    tags=("S19", "training", "moe"),
)


def _sum(name: str, vector: str, summary: str, requires: tuple[str, ...] = ()) -> KernelSpec:
    return KernelSpec(
        name=name,
        template="gather_sum.cu.j2",
        summary=summary,
        requires=("M <= 2147483647 and D <= 2147483647", *requires),
        constants={"THREADS": "256", "VEC": vector},
        grid=f"max(1, ceildiv(M * (D // ({vector})), 256))",
        block="THREADS",
        estimate=f"3e-6 + M * D * (K + 1) * bits(T) / 8 / {'3.5e12' if requires else '6e11'}",
    )


GATHER_SUM = FusionSpec(
    api=1,
    name="moe.gather_sum",
    summary="rows of x by index, weighed and added up: what several experts give to each token",
    pattern="h = fusionreg.SelectRows(x, index)\ny = fusionreg.RoutedSum(h, weights)",
    inputs={"x": "T[R D]", "index": "I[M K]", "weights": "float32[M K]"},
    outputs={"y": "T[M D]"},
    dtypes={"T": ("float16", "bfloat16", "float32"), "I": ("int64", "int32")},
    axes={"R": "rows of x", "D": "channels", "M": "rows of the result", "K": "rows of x for each"},
    extents={"R": 20, "D": 40, "M": 9, "K": 3},
    cases=(
        Case(name="integers", axes={"R": 3, "M": 40, "K": 8}, values={"index": "integers"}, summary="some are no rows"),
        Case(
            name="beyond",
            axes={"R": 5, "M": 9, "K": 2},
            values={"index": "9223372036854775807"},
            summary="indices far outside read nothing",
        ),
    ),
    kernels=(
        _sum(
            "vector",
            "128 // bits(T)",
            "16 bytes of a row at a time",
            ("D % (128 // bits(T)) == 0", "aligned(x, 16) and aligned(y, 16)"),
        ),
        _sum("plain", "1", "any shape and alignment"),
    ),
    tags=("S19", "inference", "moe"),
)
FUSIONS = (ROUTE, ROUTE_BACKWARD, GATHER_SUM)
