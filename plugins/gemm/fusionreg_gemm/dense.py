"""``gemm.scale``, ``gemm.bias``, ``gemm.scale_bias``, ``gemm.activation``: four contracts, the same kernels.

``gemm.matmul`` is the bare product, and ``gemm.batched`` many of them: they fuse nothing by themselves, but what stands
behind them does: alpha and beta with C, a residual, vectors along either axis, a cast to 8 bits.

The weight is ``[K N]``, or ``[N K]`` with ``transB``. Both forms fit a square weight, so a constraint ties the shape to
the attribute: a weight in the other layout is an error and never a silently transposed product.
"""

from __future__ import annotations

from collections.abc import Mapping

from fusionreg.core.frozen import EMPTY
from fusionreg.core.spec import AttributeSpec, Case, FusionSpec, Region, Tolerance

from .dense_kernels import batched, kernels
from .workloads import workloads

ACTIVATIONS = 'any_of(Relu, Gelu, Sigmoid, Tanh, Swish, "activation", gelu_tanh=Gelu(approximate="tanh"))'

TRANSPOSED = AttributeSpec(
    type="int", default=0, choices=(0, 1), static=True, summary="1 when the weight is stored [N K]"
)

_AXES = {"M": "rows of x, leading axes folded in", "K": "summed over", "N": "output channels"}
_SHAPES = ("shape(w, -1) == (K if transB else N)", "shape(w, -2) == (N if transB else K)")

#: Which form of `T[] | T[N]` scale took, and of `T[] | T[N] | T[M 1]` bias; -1 where the fusion has none.
_NO_SCALE, _NO_BIAS = {"SCALE_FORM": "-1"}, {"BIAS_FORM": "-1"}
_SCALE, _BIAS = {"SCALE_FORM": "form(scale)"}, {"BIAS_FORM": "form(bias)"}


def _fusion(
    words: str,
    summary: str,
    steps: str,
    operands: dict[str, str],
    constants: dict[str, str],
    cases: tuple[Case, ...] = (),
    regions: tuple[Region, ...] = (),
) -> FusionSpec:
    return FusionSpec(
        api=1,
        name=f"gemm.{words}",
        summary=summary,
        pattern=f"h = MatMul(x, w, transB=transB)\n{steps}",
        inputs={"x": "T[... M K]", "w": "T[K N] | T[N K]", **operands},
        outputs={"y": "T[... M N]"},
        dtypes={"T": ("float16", "bfloat16", "float32")},
        axes=_AXES,
        attributes={"transB": TRANSPOSED},
        autocast="lower",
        constraints=_SHAPES,
        cases=(*cases, *_CASES),
        workloads=workloads(operands),
        regions=regions,
        kernels=kernels(constants),
        tags=("S7", "inference", "gemm"),
    )


_CASES = (
    Case(
        name="partial_sums",
        axes={"M": 3, "K": 520, "N": 8},
        values={"x": "cancel", "w": "ones"},
        summary="the two halves of the sum are no bfloat16 numbers",
    ),
)

_SCALE_AFTER_OVERFLOW = Case(
    name="scale_after_overflow",
    axes={"M": 3, "K": 8, "N": 16},
    attributes={"activation": "none"},
    values={"x": "256", "w": "256", "scale": "1e-3"},
    summary="x @ w is no fp16 number, the scaled result is",
)
_BIAS_AFTER_OVERFLOW = Case(
    name="bias_after_overflow",
    axes={"M": 3, "K": 8, "N": 16},
    attributes={"activation": "none"},
    values={"x": "48", "w": "256", "bias": "-65504"},
    summary="x @ w is no fp16 number, the sum with the bias is",
)

SCALE = "T[] | T[N]"
BIAS = "T[] | T[N] | T[M 1]"

#: What the slot of y is proven on: a branch of a transformer, added to its input.
_RESIDUAL = Region(
    name="residual",
    summary="x @ W plus bias, activated, shifted by channel, added to a residual",
    pattern="...\ns = Add(y, position)\nz = Add(s, residual)",
    slots=("y",),
    inputs={"x": "T[... M K]", "w": "T[K N] | T[N K]", "bias": BIAS, "position": "T[N]", "residual": "T[... M N]"},
    outputs={"z": "T[... M N]"},
    dtypes={"T": ("float16", "bfloat16")},
)
#: Two outputs, one of them wider.
_WIDENED = Region(
    name="widened",
    summary="x @ W, scaled and activated, and the same in float32 with an offset",
    pattern='...\nv = Cast(y, to="float32")\nz = Add(v, offset)',
    slots=("y",),
    inputs={"x": "T[... M K]", "w": "T[K N] | T[N K]", "scale": SCALE, "offset": "float32[... M 1]"},
    outputs={"y": "T[... M N]", "z": "float32[... M N]"},
    dtypes={"T": ("bfloat16",)},
)

_WITH_EPILOGUE = (
    _fusion(
        "scale",
        "x @ W times a per-tensor or per-channel scale, then an optional activation",
        f"s = Mul(h, scale)\ny = optional({ACTIVATIONS})(s)",
        {"scale": SCALE},
        _SCALE | _NO_BIAS,
        (_SCALE_AFTER_OVERFLOW,),
        (_WIDENED,),
    ),
    _fusion(
        "bias",
        "x @ W plus bias, then an optional activation",
        f"b = Add(h, bias)\ny = optional({ACTIVATIONS})(b)",
        {"bias": BIAS},
        _NO_SCALE | _BIAS,
        (_BIAS_AFTER_OVERFLOW,),
        (_RESIDUAL,),
    ),
    _fusion(
        "scale_bias",
        "x @ W times scale plus bias, then an optional activation",
        f"s = Mul(h, scale)\nb = Add(s, bias)\ny = optional({ACTIVATIONS})(b)",
        {"scale": SCALE, "bias": BIAS},
        _SCALE | _BIAS,
        (_BIAS_AFTER_OVERFLOW.model_copy(update={"values": _BIAS_AFTER_OVERFLOW.values | {"scale": "1"}}),),
    ),
    _fusion(
        "activation",
        "an activation of x @ W",
        f"y = {ACTIVATIONS}(h)",
        {},
        _NO_SCALE | _NO_BIAS,
    ),
)


#: Nothing but the product; what the epilogue of the kernels would ask for otherwise.
_BARE = {**_NO_SCALE, **_NO_BIAS, "activation": '"none"'}
_PRODUCT = "y = MatMul(x, w, transB=transB)"


def _behind(
    name: str,
    summary: str,
    program: str,
    x: str,
    w: str,
    operands: dict[str, str],
    z: str,
    *dtypes: str,
    extents: Mapping[str, int] = EMPTY,
) -> Region:
    return Region(
        name=name,
        summary=summary,
        pattern=f"...\n{program}",
        slots=("y",),
        inputs={"x": x, "w": w, **operands},
        outputs={"z": z},
        dtypes={"T": dtypes},
        extents=extents,
    )


def _regions(lead: str, extents: Mapping[str, int] = EMPTY) -> tuple[Region, ...]:
    """What the slot of y is proven on, behind a product of matrices, or of ``lead`` of them; ``extents``: in cases."""
    x, w, y = f"[... {lead}M K]", f"[{'... ' + lead if lead else ''}K N]", f"[... {lead}M N]"
    wt = w.replace("K N", "N K")
    return (
        _behind(
            "residual", "x @ W plus a residual", "z = Add(y, residual)", f"T{x}", f"T{w} | T{wt}",
            {"residual": f"T{y}"}, f"T{y}", "float16", "bfloat16", extents=extents,
        ),
        _behind(
            "combined", "alpha * x @ W + beta * C, in a product's dtype",
            "p = Mul(y, alpha)\nq = Mul(c, beta)\nz = Add(p, q)", f"T{x}", f"T{w} | T{wt}",
            {"alpha": "T[]", "c": f"T{y}", "beta": "T[]"}, f"T{y}", "bfloat16", "float32", extents=extents,
        ),
        _behind(
            "narrowed", "x @ W times a scale for each channel, cast to e4m3",
            's = Mul(y, gain)\nz = Cast(s, to="float8_e4m3fn")', f"T{x}", f"T{w} | T{wt}",
            {"gain": "T[N]"}, f"float8_e4m3fn{y}", "bfloat16", extents=extents,
        ),
    )  # fmt: skip


MATMUL = FusionSpec(
    api=1,
    name="gemm.matmul",
    summary="x @ W, for what stands behind it",
    pattern=_PRODUCT,
    inputs={"x": "T[... M K]", "w": "T[K N] | T[N K]"},
    outputs={"y": "T[... M N]"},
    dtypes={"T": ("float16", "bfloat16", "float32")},
    axes=_AXES,
    attributes={"transB": TRANSPOSED},
    autocast="lower",
    constraints=_SHAPES,
    cases=_CASES,
    regions=_regions(""),
    kernels=kernels(_BARE),
    tags=("S7", "inference", "gemm"),
)
_FEW = {"B": 3, "M": 24, "K": 40, "N": 48}
BATCHED = FusionSpec(
    api=1,
    name="gemm.batched",
    summary="x @ W of each of many pairs, for what stands behind them",
    pattern=_PRODUCT,
    inputs={"x": "T[... B M K]", "w": "T[... B K N] | T[... B N K]"},
    outputs={"y": "T[... B M N]"},
    dtypes={"T": ("float16", "bfloat16", "float32")},
    axes={"B": "products, leading axes folded in", "M": "rows of x", "K": "summed over", "N": "output channels"},
    extents=_FEW,
    attributes={"transB": TRANSPOSED},
    autocast="lower",
    constraints=_SHAPES,
    tolerances=(
        Tolerance(
            dtype="float32",
            ulp=2.0,
            reason="sums of subnormal numbers, whose rounding the chain may hit by luck in a whole row of equal ones",
        ),
    ),
    regions=_regions("B ", _FEW),
    kernels=batched(_BARE),
    tags=("inference", "gemm"),
)
FUSIONS = (*_WITH_EPILOGUE, MATMUL, BATCHED)
