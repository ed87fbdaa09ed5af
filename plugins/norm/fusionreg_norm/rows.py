"""Fusions that normalise rows: LayerNorm and RMSNorm, what stands before them, and their gradients.

Everything about a row is computed from its inputs again in the backward pass: that costs no bytes, while saved
statistics cost 8 a row and a saved mask one bit an element.
"""

from __future__ import annotations

from collections.abc import Mapping

from fusionreg.core.frozen import EMPTY, FrozenDict
from fusionreg.core.spec import AttributeSpec, Backward, Case, FusionSpec, KernelSpec, Region, Tolerance

from .row_kernels import backward, forward
from .workloads import workloads

ROW = "T[... M N]"
AXES = {"M": "rows, leading axes folded in", "N": "elements of a row, normalised together"}
EPSILON = {"epsilon": AttributeSpec(type="float", default=1e-5, summary="added to the variance")}
DROPOUT = {
    "p": AttributeSpec(
        type="float", default=0.5, summary="probability of dropping an element; rounded to a multiple of 1/65536"
    )
}
GELU = {
    "approximate": AttributeSpec(
        type="str", default="none", choices=("none", "tanh"), static=True, summary="which GELU: erf or tanh"
    )
}

_SUMS = Tolerance(
    dtype="float32",
    ulp=2.0,
    inputs=2.0,
    reason="a row carries the rounding of mean, variance and root; the chain's sums, in another order, round elsewhere",
)
_WITH_GELU = _SUMS.model_copy(update={"inputs": 8.0, "reason": f"erfcf and expf are within 4 ulp; {_SUMS.reason}"})


#: Without a bias a row of GELU's tails alone, x < -5.5, gives as good as nothing.
_TAILS = Tolerance(
    dtype="bfloat16",
    ulp=0.0,
    absolute=2e-8,
    reason="GELU's tails are within 5e-11, which the root of the variance, at least that of epsilon, divides",
)


def _fusion(
    words: str,
    summary: str,
    pattern: str,
    inputs: Mapping[str, str],
    outputs: Mapping[str, str],
    attributes: Mapping[str, AttributeSpec],
    kernels: tuple[KernelSpec, ...],
    cases: tuple[Case, ...] = (),
    tags: tuple[str, ...] = (),
    regions: tuple[Region, ...] = (),
    gradients: Mapping[str, str] = EMPTY,
) -> FusionSpec:
    forward = not words.endswith("_backward")
    gradient = f"norm.{words.removesuffix('_unbiased')}_backward"  # without bias its dbias goes unread
    return FusionSpec(
        api=1,
        name=f"norm.{words}",
        summary=summary,
        pattern=pattern,
        inputs=inputs,
        outputs=outputs,
        dtypes={"T": ("float16", "bfloat16", "float32")},
        axes=AXES,
        attributes=attributes,
        backward=Backward(fusion=gradient, gradients=gradients) if forward else None,
        autocast="float32" if forward else "promote",
        constraints=("0 <= p and p <= 1",) if "p" in attributes else (),
        cases=cases,
        tolerances=(
            _WITH_GELU if "approximate" in attributes else _SUMS,
            *((_TAILS,) if words == "gelu_dropout_layernorm_unbiased" else ()),
        ),
        workloads=workloads(words),
        regions=regions,
        kernels=kernels,
        tags=("norm", *tags),
    )


_OFFSET = Case(
    name="far_from_zero",
    axes={"M": 5, "N": 64},
    values={"x": "offset", "scale": "ones", "bias": "zeros"},
    summary="E[x^2] - E[x]^2 cancels to nothing here",
)
_RMS_OFFSET = _OFFSET.model_copy(update={"values": {"x": "offset", "scale": "ones"}})

GELU_STEP = "g = Gelu(x, approximate=approximate)\nv = fusionreg.Dropout(g, rng, p=p)\n"
ADD_STEP = "d = fusionreg.Dropout(x, rng, p=p)\nv = Add(d, residual)\n"
RNG = {"rng": "int64[2]"}
TANH = "1 if approximate == 'tanh' else 0"

#: Whole words of seed and offset; every generator that is meant for floats gives small numbers.
_SEEDED = Case(name="seeded", axes={"M": 6, "N": 72}, attributes={"p": 0.4}, values={"rng": "seed"})
_UNALIGNED = Case(name="seeded_odd", axes={"M": 6, "N": 37}, attributes={"p": 0.4}, values={"rng": "seed"},
                  summary="a block of eight elements spans rows")  # fmt: skip
_KEPT = Case(name="all_kept", attributes={"p": 0.0}, values={"x": "special"}, summary="p = 0 leaves x as it is")
_DROPPED = Case(name="all_dropped", attributes={"p": 1.0}, values={"x": "special"}, summary="p = 1 drops NaN as well")
_DROPOUT_CASES = (_SEEDED, _UNALIGNED, _KEPT, _DROPPED)
_LONG = Case(name="long_rows", axes={"M": 3, "N": 8456}, attributes={"p": 0.4}, values={"rng": "seed"},
             summary="many warps to a row, not all of them full")  # fmt: skip

#: Where rows are exactly what threads hold; what is seldom dropped tells a limit that is nearly 0 from 0.
_WHOLE = (
    Case(name="kept_far_from_zero", axes={"M": 5, "N": 64}, attributes={"p": 0.0}, values={"x": "offset"}),
    Case(name="whole_rows", axes={"M": 37, "N": 1024}, attributes={"p": 0.1}, values={"rng": "seed"}),
    Case(name="whole_special", axes={"M": 9, "N": 256}, attributes={"p": 0.1}, values={"x": "special", "rng": "seed"}),
    Case(name="seldom_dropped", axes={"M": 6, "N": 4096}, attributes={"p": 0.001}, values={"rng": "seed"}),
    Case(name="whole_long_rows", axes={"M": 3, "N": 12288}, attributes={"p": 0.498}, values={"rng": "seed"}),
)

_WIDE = Case(name="wide_rows", axes={"M": 2, "N": 4616}, summary="a row for several blocks, the last part shorter")

#: What the slots are proven on: a gate before, a modulation and a cast behind, with operands of every form.
_MODULATED = Region(
    name="modulated",
    summary="LayerNorm of gated rows, scaled and shifted again and cast to float32",
    pattern="g = Sigmoid(gate)\nx = Mul(a, g)\n...\nv0 = Mul(y, gain)\nv1 = Add(v0, shift)\n"
    'z = Cast(v1, to="float32")',
    slots=("x", "y"),
    inputs={"a": ROW, "gate": ROW, "scale": "T[N]", "bias": "T[N]", "gain": "T[N]", "shift": "T[... M 1]"},
    outputs={"z": "float32[... M N]"},
    dtypes={"T": ("bfloat16",)},  # where float16 overflows inside, float32 outside would have to be exact
)
_GATED = Region(
    name="gated",
    summary="RMSNorm, and its product with a gate",
    pattern="...\ng = Swish(gate)\nz = Mul(y, g)",
    slots=("y",),
    inputs={"x": ROW, "gate": ROW, "scale": "T[N]"},
    outputs={"y": ROW, "z": ROW},
    dtypes={"T": ("bfloat16",)},
)

_RESIDUAL = Region(
    name="residual",
    summary="LayerNorm of a sum of rows, and the sum",
    pattern="x = Add(a, residual)\n...",
    slots=("x",),
    inputs={"a": ROW, "residual": ROW, "scale": "T[N]", "bias": "T[N]"},
    outputs={"y": ROW, "x": ROW},
    dtypes={"T": ("bfloat16", "float32")},
    cases=(_WIDE,),
)

_ACCUMULATED = Region(
    name="accumulated",
    summary="gradients of LayerNorm, of a gated dy, dx added to another gradient",
    pattern="dy = Mul(a, gate)\n...\nz = Add(dx, other)",
    slots=("dy", "dx"),
    inputs={"a": ROW, "gate": "T[N]", "x": ROW, "scale": "T[N]", "other": ROW},
    outputs={"z": ROW, "dscale": "T[N]", "dbias": "T[N]"},
    dtypes={"T": ("bfloat16",)},
)
_SUMMED = Region(
    name="summed",
    summary="gradients of RMSNorm, dx and its sum with another gradient",
    pattern="...\nz = Add(dx, other)",
    slots=("dx",),
    inputs={"dy": ROW, "x": ROW, "scale": "T[N]", "other": ROW},
    outputs={"dx": ROW, "z": ROW, "dscale": "T[N]"},
    dtypes={"T": ("bfloat16",)},
)


def _masked(inputs: Mapping[str, str], outputs: Mapping[str, str]) -> Region:
    """The same behind a mask."""
    return _SUMMED.model_copy(
        update={
            "summary": "gradients, dx added to another gradient",
            "inputs": FrozenDict({**inputs, "other": ROW}),
            "outputs": FrozenDict({"z": ROW, **{n: t for n, t in outputs.items() if n != "dx"}}),
        }
    )


LAYERNORM = _fusion(
    "layernorm",
    "(x - mean) / sqrt(var + epsilon) * scale + bias over the last axis",
    "y = LayerNormalization(x, scale, bias, epsilon=epsilon)",
    {"x": ROW, "scale": "T[N]", "bias": "T[N]"},
    {"y": ROW},
    EPSILON,
    forward({"MEAN": "1"}, ("x", "scale", "bias", "y"), 2),
    (_OFFSET, _WIDE),
    regions=(_MODULATED, _RESIDUAL),
)

LAYERNORM_UNBIASED = _fusion(
    "layernorm_unbiased",
    "(x - mean) / sqrt(var + epsilon) * scale over the last axis",
    "y = LayerNormalization(x, scale, None, epsilon=epsilon)",
    {"x": ROW, "scale": "T[N]"},
    {"y": ROW},
    EPSILON,
    forward({"MEAN": "2"}, ("x", "scale", "y"), 2),
    (_RMS_OFFSET, _WIDE),
)

RMSNORM = _fusion(
    "rmsnorm",
    "x / sqrt(mean(x^2) + epsilon) * scale over the last axis",
    "y = RMSNormalization(x, scale, epsilon=epsilon)",
    {"x": ROW, "scale": "T[N]"},
    {"y": ROW},
    EPSILON,
    forward({}, ("x", "scale", "y"), 2),
    (_RMS_OFFSET, _WIDE),
    regions=(_GATED,),
)

RESIDUAL_RMSNORM = _fusion(
    "residual_rmsnorm",
    "RMSNorm of x + residual; also gives the sum",
    "h = Add(x, residual)\ny = RMSNormalization(h, scale, epsilon=epsilon)",
    {"x": ROW, "residual": ROW, "scale": "T[N]"},
    {"y": ROW, "h": ROW},
    EPSILON,
    forward({"RESIDUAL": "1", "H_OUT": "1"}, ("x", "residual", "scale", "y", "h"), 4),
    (_WIDE,),
    gradients={"residual": "dx"},
)

GELU_DROPOUT_LAYERNORM = _fusion(
    "gelu_dropout_layernorm",
    "LayerNorm of dropout(gelu(x)); the mask is a function of rng and stored nowhere",
    f"{GELU_STEP}y = LayerNormalization(v, scale, bias, epsilon=epsilon)",
    {"x": ROW, **RNG, "scale": "T[N]", "bias": "T[N]"},
    {"y": ROW},
    {**DROPOUT, **GELU, **EPSILON},
    forward({"MEAN": "1", "GELU": "1", "TANH": TANH, "DROPOUT": "1"}, ("x", "scale", "bias", "y"), 2),
    (*_DROPOUT_CASES, _LONG),
    ("S6", "training"),
)

DROPOUT_RESIDUAL_LAYERNORM = _fusion(
    "dropout_residual_layernorm",
    "LayerNorm of dropout(x) + residual; the mask is a function of rng and stored nowhere",
    f"{ADD_STEP}y = LayerNormalization(v, scale, bias, epsilon=epsilon)",
    {"x": ROW, **RNG, "residual": ROW, "scale": "T[N]", "bias": "T[N]"},
    {"y": ROW},
    {**DROPOUT, **EPSILON},
    forward({"MEAN": "1", "DROPOUT": "1", "RESIDUAL": "1"}, ("x", "residual", "scale", "bias", "y"), 3),
    (*_DROPOUT_CASES, _LONG),
    ("training",),
)

GELU_DROPOUT_LAYERNORM_UNBIASED = _fusion(
    "gelu_dropout_layernorm_unbiased",
    "LayerNorm without bias of dropout(gelu(x)); the mask is a function of rng and stored nowhere",
    f"{GELU_STEP}y = LayerNormalization(v, scale, None, epsilon=epsilon)",
    {"x": ROW, **RNG, "scale": "T[N]"},
    {"y": ROW},
    {**DROPOUT, **GELU, **EPSILON},
    forward({"MEAN": "2", "GELU": "1", "TANH": TANH, "DROPOUT": "1"}, ("x", "scale", "y"), 2),
    (*_DROPOUT_CASES, _LONG),
    ("training",),
)

DROPOUT_RESIDUAL_LAYERNORM_UNBIASED = _fusion(
    "dropout_residual_layernorm_unbiased",
    "LayerNorm without bias of dropout(x) + residual; the mask is a function of rng and stored nowhere",
    f"{ADD_STEP}y = LayerNormalization(v, scale, None, epsilon=epsilon)",
    {"x": ROW, **RNG, "residual": ROW, "scale": "T[N]"},
    {"y": ROW},
    {**DROPOUT, **EPSILON},
    forward({"MEAN": "2", "DROPOUT": "1", "RESIDUAL": "1"}, ("x", "residual", "scale", "y"), 3),
    (*_DROPOUT_CASES, _LONG),
    ("training",),
)

LAYERNORM_BACKWARD = _fusion(
    "layernorm_backward",
    "gradients of LayerNorm: dx, dscale, dbias",
    "dx, dscale, dbias = fusionreg.LayerNormalizationGrad(dy, x, scale, epsilon=epsilon)",
    {"dy": ROW, "x": ROW, "scale": "T[N]"},
    {"dx": ROW, "dscale": "T[N]", "dbias": "T[N]"},
    EPSILON,
    backward({"MEAN": "1"}, ("dy", "x", "scale", "dx"), 3),
    (_WIDE,),
    tags=("training", "backward"),
    regions=(_ACCUMULATED,),
)

RMSNORM_BACKWARD = _fusion(
    "rmsnorm_backward",
    "gradients of RMSNorm: dx, dscale",
    "dx, dscale = fusionreg.RMSNormalizationGrad(dy, x, scale, epsilon=epsilon)",
    {"dy": ROW, "x": ROW, "scale": "T[N]"},
    {"dx": ROW, "dscale": "T[N]"},
    EPSILON,
    backward({}, ("dy", "x", "scale", "dx"), 3),
    (_WIDE,),
    tags=("training", "backward"),
    regions=(_SUMMED,),
)

RESIDUAL_RMSNORM_BACKWARD = _fusion(
    "residual_rmsnorm_backward",
    "gradients of residual RMSNorm: dx, which is dresidual too, and dscale; h is the sum that the forward pass gave",
    "r, dscale = fusionreg.RMSNormalizationGrad(dy, h, scale, epsilon=epsilon)\ndx = Add(r, dh)",
    {"dy": ROW, "dh": ROW, "h": ROW, "scale": "T[N]"},
    {"dx": ROW, "dscale": "T[N]"},
    EPSILON,
    backward({"H_OUT": "1"}, ("dy", "dh", "h", "scale", "dx"), 4),
    tags=("training", "backward"),
)

GELU_DROPOUT_LAYERNORM_BACKWARD = _fusion(
    "gelu_dropout_layernorm_backward",
    "gradients of LayerNorm(dropout(gelu(x))): dx, dscale, dbias; the mask is made again from rng",
    f"{GELU_STEP}dv, dscale, dbias = fusionreg.LayerNormalizationGrad(dy, v, scale, epsilon=epsilon)\n"
    "dg = fusionreg.Dropout(dv, rng, p=p)\n"
    "dx = fusionreg.GeluGrad(dg, x, approximate=approximate)",
    {"dy": ROW, "x": ROW, **RNG, "scale": "T[N]"},
    {"dx": ROW, "dscale": "T[N]", "dbias": "T[N]"},
    {**DROPOUT, **GELU, **EPSILON},
    backward({"MEAN": "1", "GELU": "1", "TANH": TANH, "DROPOUT": "1"}, ("dy", "x", "scale", "dx"), 3),
    (*_DROPOUT_CASES, _LONG, *_WHOLE),
    ("S6", "training", "backward"),
    (_masked({"dy": ROW, "x": ROW, **RNG, "scale": "T[N]"}, {"dx": ROW, "dscale": "T[N]", "dbias": "T[N]"}),),
)

DROPOUT_RESIDUAL_LAYERNORM_BACKWARD = _fusion(
    "dropout_residual_layernorm_backward",
    "gradients of LayerNorm(dropout(x) + residual): dx, dresidual, dscale, dbias; the mask is made again from rng",
    f"{ADD_STEP}dresidual, dscale, dbias = fusionreg.LayerNormalizationGrad(dy, v, scale, epsilon=epsilon)\n"
    "dx = fusionreg.Dropout(dresidual, rng, p=p)",
    {"dy": ROW, "x": ROW, **RNG, "residual": ROW, "scale": "T[N]"},
    {"dx": ROW, "dresidual": ROW, "dscale": "T[N]", "dbias": "T[N]"},
    {**DROPOUT, **EPSILON},
    backward({"MEAN": "1", "DROPOUT": "1", "RESIDUAL": "1"}, ("dy", "x", "residual", "scale", "dx", "dresidual"), 5),
    _DROPOUT_CASES,
    ("training", "backward"),
    (
        _masked(
            {"dy": ROW, "x": ROW, **RNG, "residual": ROW, "scale": "T[N]"},
            {"dx": ROW, "dresidual": ROW, "dscale": "T[N]", "dbias": "T[N]"},
        ),
    ),
)

FUSIONS = (
    LAYERNORM,
    LAYERNORM_UNBIASED,
    LAYERNORM_BACKWARD,
    RMSNORM,
    RMSNORM_BACKWARD,
    RESIDUAL_RMSNORM,
    RESIDUAL_RMSNORM_BACKWARD,
    GELU_DROPOUT_LAYERNORM,
    GELU_DROPOUT_LAYERNORM_BACKWARD,
    GELU_DROPOUT_LAYERNORM_UNBIASED,
    DROPOUT_RESIDUAL_LAYERNORM,
    DROPOUT_RESIDUAL_LAYERNORM_UNBIASED,
    DROPOUT_RESIDUAL_LAYERNORM_BACKWARD,
)
