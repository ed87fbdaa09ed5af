"""Products with weights of 8 bits, and of 8-bit operands: ``gemm.cast_scale``, ``gemm.dequantize``, ``gemm.scaled``.

Weights are int8 or e4m3, with one scale for each channel or one for all. A scale stands behind the product
(``cast_scale``), or the weight is dequantised in front of it (``dequantize``, as ONNX's QDQ form says it), in x's dtype
or, with ``_wide``, in float32; the kernels compute all in one way: the product of what is stored, summed in fp32, then
the scale, the bias, the activation, and one cast. ``scaled`` is the product of two e4m3 tensors, each with a scale,
which for x may be one for each row.
"""

from __future__ import annotations

from fusionreg.core.spec import AttributeSpec, Case, FusionSpec, Region

from .dense import ACTIVATIONS, TRANSPOSED
from .skinny_kernels import general, skinny
from .stream_kernels import stream
from .wgmma_kernels import wgmma
from .workloads import quantized, scaled

_WIDE, _NARROW = ("float16", "bfloat16"), ("int8", "float8_e4m3fn")
_PER_CHANNEL = "T[] | T[N]"
_AXES = {"M": "rows of x, leading axes folded in", "K": "summed over", "N": "output channels"}
_SHAPES = ("shape(w, -1) == (K if transB else N)", "shape(w, -2) == (N if transB else K)")
#: Bias and activation, each of which may be missing.
_ENDING = f"b = optional(Add)(s, bias)\ny = optional({ACTIVATIONS})(b)"

_EXTREMES = Case(
    name="extremes",
    axes={"M": 3, "K": 520, "N": 24},
    attributes={"activation": "none"},
    values={"w": "bytes", "x": "integers"},
    summary="weights of every byte",
)
_LONG = Case(
    name="long_sum",
    axes={"M": 1, "K": 4096, "N": 16},
    attributes={"activation": "none"},
    values={"w": "96", "x": "48", "scale": "1e-3"},
    summary="the sum before the scale is no fp16 number",
)


def _weight_only(words: str, summary: str, steps: str, **fields: object) -> FusionSpec:
    constants = {"SCALE_FORM": "form(scale)", "BIAS_FORM": "form(bias)"}
    constants["PRESCALED"] = "1" if words == "dequantize" else "0"
    spec = FusionSpec(
        api=1,
        name=f"gemm.{words}",
        summary=summary,
        pattern=f"{steps}\n{_ENDING}",
        inputs={"x": "T[... M K]", "w": "W[K N] | W[N K]", "scale": _PER_CHANNEL, "bias": _PER_CHANNEL},
        outputs={"y": "T[... M N]"},
        dtypes={"T": _WIDE, "W": _NARROW},
        axes=_AXES,
        attributes={"transB": TRANSPOSED},
        autocast="lower",
        constraints=_SHAPES,
        cases=(_EXTREMES, _LONG),
        kernels=tuple(make(constants, weight="W") for make in (skinny, stream, general)),
        workloads=quantized(words),
        tags=("S15", "inference", "gemm", "quantization"),
    )
    return spec.model_copy(update=fields)


#: As a site has it: counted from the end.
_AXIS = AttributeSpec(
    type="int", default=-1, choices=(-1, -2), summary="axis of w that its scale runs along, that of N: -2 with transB"
)

#: What follows a float32 sum that is scaled: bias and activation in float32, or in the result's dtype, or between.
_WIDE_ENDINGS = (
    f"b = optional(Add)(s, bias)\na = optional({ACTIVATIONS})(b)\ny = Cast(a, to=T)",
    f"b = optional(Add)(s, bias)\nc = Cast(b, to=T)\ny = optional({ACTIVATIONS})(c)",
    f"c = Cast(s, to=T)\nb = optional(Add)(c, bias)\ny = optional({ACTIVATIONS})(b)",
    f'b = Add(s, Cast(bias, to="float32"))\na = optional({ACTIVATIONS})(b)\ny = Cast(a, to=T)',
    f"b = optional(Add)(s, bias)\ny = optional({ACTIVATIONS})(b)",  # the result is float32
)
#: The result has x's dtype, or is float32; so is a bias.
_WIDE_RESULTS = (*_SHAPES, 'T in (X, "float32")', 'form(bias) == -1 or B in (T, "float32")')


def _wide_scale(words: str, summary: str, patterns: tuple[str, ...], **fields: object) -> FusionSpec:
    """Scales are float32 beside x of 16 bits: their bits are the kernel's, not those that x's dtype would leave."""
    constants = {"SCALE_FORM": "form(scale)", "BIAS_FORM": "form(bias)", "SCALED": "2"}
    constants["PRESCALED"] = "1" if words == "dequantize_wide" else "0"
    spec = FusionSpec(
        api=1,
        name=f"gemm.{words}",
        summary=summary,
        pattern=patterns,
        inputs={
            "x": "X[... M K]",
            "w": "W[K N] | W[N K]",
            "scale": "float32[] | float32[N]",
            "bias": "B[] | B[N]",
        },
        outputs={"y": "T[... M N]"},
        dtypes={"X": _WIDE, "W": _NARROW, "T": (*_WIDE, "float32"), "B": (*_WIDE, "float32")},
        axes=_AXES,
        attributes={"transB": TRANSPOSED},
        constraints=_WIDE_RESULTS,
        cases=tuple(case.model_copy(update={"absent": ("bias",)}) for case in (_EXTREMES, _LONG)),
        kernels=(skinny(constants, weight="W", x="X"), general(constants, weight="W", x="X")),
        tags=("S15", "inference", "gemm", "quantization"),
    )
    return spec.model_copy(update=fields)


_CAST = 'h = MatMul(x, Cast(w, to=X), transB=transB)\ns = Mul(Cast(h, to="float32"), scale)\n'
_DEQUANTIZED = 's = MatMul(Cast(x, to="float32"), DequantizeLinear(w, scale, axis=axis), transB=transB)\n'
#: The weight is rounded to x's dtype, and the sum.
_ROUNDED = "s = MatMul(x, Cast(DequantizeLinear(w, scale, axis=axis), to=X), transB=transB)\n"

#: As torch._scaled_mm has it, in float32 until the end; ONNX's QDQ form dequantises both operands in front of it.
_PRODUCT = 'h = MatMul(Cast(x, to="float32"), Cast(w, to="float32"), transB=transB)\n'
_SCALES = f"{_PRODUCT}r = Mul(h, scale_x)\ns = Mul(r, scale_w)\n"
_QDQ = "s = MatMul(DequantizeLinear(x, scale_x), DequantizeLinear(w, scale_w))\n"
_FORMS = {
    "SCALE_FORM": "-1", "SCALED": "1", "X_SCALE_FORM": "form(scale_x)", "W_SCALE_FORM": "form(scale_w)",
}  # fmt: skip


#: What the slot of y is proven on: the next product of e4m3 tensors takes the result.
_REQUANTIZED = Region(
    name="requantized",
    summary="e4m3 x @ e4m3 W times a scale of each, activated, and cast to e4m3 again",
    pattern='...\nq = Mul(y, gain)\nz = Cast(q, to="float8_e4m3fn")',
    slots=("y",),
    inputs={
        "x": "float8_e4m3fn[... M K]",
        "w": "float8_e4m3fn[K N] | float8_e4m3fn[N K]",
        "scale_x": "float32[] | float32[M 1]",
        "scale_w": "float32[] | float32[N]",
        "gain": "T[]",
    },
    outputs={"z": "float8_e4m3fn[... M N]"},
    dtypes={"T": ("bfloat16",)},
)


def _scaled(
    words: str,
    summary: str,
    endings: tuple[str, ...],
    dtypes: dict[str, tuple[str, ...]],
    regions: tuple[Region, ...] = (),
) -> FusionSpec:
    """``endings``: what comes behind the scales, each spelling; the first is the reference. ``B`` among ``dtypes``: of
    a bias."""
    bias = {"bias": "B[] | B[N]"} if "B" in dtypes else {}
    constants = _FORMS | {"BIAS_FORM": "form(bias)" if bias else "-1"}
    return FusionSpec(
        api=1,
        name=f"gemm.{words}",
        summary=summary,
        pattern=tuple(f"{front}{ending}" for front in (_SCALES, _QDQ) for ending in endings),
        inputs={
            "x": "float8_e4m3fn[... M K]",
            "w": "float8_e4m3fn[K N] | float8_e4m3fn[N K]",
            "scale_x": "float32[] | float32[M 1]",
            "scale_w": "float32[] | float32[N]",
            **bias,
        },
        outputs={"y": "T[... M N]"},
        dtypes=dtypes,
        axes=_AXES,
        attributes={"transB": TRANSPOSED},
        constraints=_SHAPES,
        cases=(
            Case(
                name="long_sum",
                axes={"M": 1, "K": 4096, "N": 16},
                attributes={"activation": "none"},
                values={"x": "448", "w": "448", "scale_x": "1e-3", "scale_w": "1e-3"},
                summary="the sum before the scales is no fp16 number",
            ),
        ),
        kernels=(
            *([wgmma(constants, narrow=True)] if dtypes["T"] == _WIDE else []),  # its sums have 14 bits
            *(make(constants, weight="float8_e4m3fn", x="float8_e4m3fn") for make in (skinny, general)),
        ),
        workloads=scaled(words),
        regions=regions,
        tags=("S15", "inference", "gemm", "quantization"),
    )


_ACTIVATED = f"y = optional({ACTIVATIONS})"

FUSIONS: tuple[FusionSpec, ...] = (
    _weight_only(
        "cast_scale",
        "x @ W times a per-tensor or per-channel scale, W of 8 bits, then an optional bias and activation",
        "h = MatMul(x, Cast(w, to=T), transB=transB)\ns = Mul(h, scale)",
    ),
    _weight_only(
        "dequantize",
        "x @ dequantised W, per tensor or per channel, then an optional bias and activation",
        "s = MatMul(x, DequantizeLinear(w, scale, axis=axis), transB=transB)",
        attributes={"transB": TRANSPOSED, "axis": _AXIS},
        constraints=(*_SHAPES, "form(scale) == 0 or axis == -1 - transB"),
    ),
    _wide_scale(
        "cast_scale_wide",
        "gemm.cast_scale with scales in float32 beside x of 16 bits, the result in 16 bits or in float32",
        tuple(_CAST + ending for ending in _WIDE_ENDINGS),
    ),
    _wide_scale(
        "dequantize_wide",
        "gemm.dequantize with scales in float32 beside x of 16 bits, the result in 16 bits or in float32",
        (*(_DEQUANTIZED + ending for ending in _WIDE_ENDINGS), _ROUNDED + _ENDING),
        attributes={"transB": TRANSPOSED, "axis": _AXIS},
        constraints=(*_WIDE_RESULTS, "form(scale) == 0 or axis == -1 - transB"),
    ),
    _scaled(
        "scaled",
        "e4m3 x @ e4m3 W times a scale of each, per tensor, row or channel, then an optional activation",
        (f"c = Cast(s, to=T)\n{_ACTIVATED}(c)",),
        {"T": _WIDE},
        (_REQUANTIZED,),
    ),
    _scaled(
        "scaled_bias",
        "e4m3 x @ e4m3 W times a scale of each, per tensor, row or channel, plus bias, then an optional activation",
        (
            f'b = Add(s, Cast(bias, to="float32"))\nc = Cast(b, to=T)\n{_ACTIVATED}(c)',
            f"b = Add(s, bias)\nc = Cast(b, to=T)\n{_ACTIVATED}(c)",
            f"c = Cast(s, to=T)\nb = Add(c, bias)\n{_ACTIVATED}(b)",
        ),
        {"T": _WIDE, "B": (*_WIDE, "float32")},
    ),
    _scaled("scaled_float32", "gemm.scaled in float32", (f"{_ACTIVATED}(s)",), {"T": ("float32",)}),
    _scaled(
        "scaled_bias_float32",
        "gemm.scaled_bias in float32",
        (f"b = Add(s, bias)\n{_ACTIVATED}(b)",),
        {"T": ("float32",), "B": ("float32",)},
    ),
)
