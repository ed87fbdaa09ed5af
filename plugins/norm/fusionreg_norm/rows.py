"""Fusions that normalise rows: LayerNorm and RMSNorm, what stands before them, and their gradients.

Everything about a row is computed from its inputs again in the backward pass: that costs no bytes, while saved
statistics cost 8 a row and a saved mask one bit an element.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fusionreg.core.spec import AttributeSpec, Case, FusionSpec, KernelSpec, Region, Tolerance

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

PENDING = "no GPU has run all its cases yet"

#: Rows that a block of about THREADS threads works on; each that is spread over several warps needs a barrier, and a
#: block has 15 beside its own.
GROUPS = "max(1, min(THREADS // LANES, 15 if LANES > 32 else 32))"

#: Longest row that a block keeps in registers.
LONGEST = 32768

_SUMS = Tolerance(
    dtype="float32",
    ulp=2.0,
    inputs=2.0,
    reason="a row carries the rounding of mean, variance and root; the chain's sums, in another order, round elsewhere",
)
_WITH_GELU = _SUMS.model_copy(update={"inputs": 8.0, "reason": f"erfcf and expf are within 4 ulp; {_SUMS.reason}"})

#: What a fusion does before it normalises; templates read all of these.
_PARTS = ("MEAN", "GELU", "TANH", "DROPOUT", "RESIDUAL", "H_OUT")


def _constants(parts: Mapping[str, str]) -> dict[str, str]:
    return {name: parts.get(name, "0") for name in _PARTS}


def _whole(tensors: tuple[str, ...]) -> str:
    """Whether 16-byte accesses reach every row of every tensor."""
    return f"VEC == 1 or VEC * bits(T) == 128 and N % VEC == 0 and {' and '.join(f'aligned({t}, 16)' for t in tensors)}"


def _forward(
    parts: Mapping[str, str], tensors: tuple[str, ...], rows: int, pending: str = ""
) -> tuple[KernelSpec, ...]:
    """``rows``: tensors of the row's size that move; ``pending``: why dispatch must not choose kernel ``rows`` yet."""
    seconds = f"{rows} * M * N * bits(T) / 8"
    held, streams = 2 if "MEAN" in parts else 1, 2 if "RESIDUAL" in parts else 1
    return (
        KernelSpec(
            name="stream",
            pending=PENDING,
            template="row_stream.cu.j2",
            regions=("y",),
            summary="blocks that stay, row after row, the next one under way while one is computed",
            requires=(
                f"N % 8 == 0 and {' and '.join(f'aligned({t}, 16)' for t in tensors)}",
                f"N <= {28672 // held}",
                f"M * N < {2**35}",
            ),
            params={
                "EXACT": (1, 0),
                "ITEMS": (4, 3, 2, 1),
                "LANES": (32, 64, 96, 128, 160, 192, 256, 320, 384, 512),
                "THREADS": (512, 256) if "RESIDUAL" in parts else (768, 384),
                "DEPTH": (0, 1),
            },
            valid=(
                "(N == LANES * ITEMS * 8) if EXACT else (N < LANES * ITEMS * 8)",
                "ITEMS == 4 or LANES == 32",
                "DEPTH == (1 if LANES > 256 else 0)",  # few rows at once: registers for those, not for what comes next
                "LANES == 32 or 3 * N > 2 * LANES * ITEMS * 8",
                "N > LANES * (ITEMS - 1) * 8",
            ),
            constants={**_constants(parts), "GROUPS": GROUPS},
            grid="min(M, multiprocessors)",
            block="LANES * GROUPS",
            shared_memory=f"LANES * ITEMS * {32 * held} + GROUPS * LANES // 2"
            f" + {streams} * DEPTH * LANES * GROUPS * ITEMS * bits(T)",
            estimate=f"4e-6 + {seconds} / {4.2e12 if held == 2 else 3.9e12}",
        ),
        KernelSpec(
            name="rows",
            pending=pending,
            template="row_forward.cu.j2",
            regions=("x", "y"),
            summary="the row in registers, read once; a warp or a block to a row",
            requires=(f"N <= {LONGEST}",),
            params={"VEC": (8, 4, 1), "LANES": (32, 128, 256, 512, 1024), "VALUES": (8, 16, 24, 32)},
            valid=(
                _whole(tensors),
                "N <= LANES * VALUES",
                "VALUES >= (8 if LANES == 32 else 16 if LANES == 128 else 24)",
            ),
            constants={**_constants(parts), "THREADS": "max(LANES, 128)"},
            grid="ceildiv(M * LANES, THREADS)",
            block="THREADS",
            estimate=f"3e-6 + {'1.4' if 'GELU' in parts else '1'} * {seconds} / (4e12 if VEC > 1 else 1.5e12)",
        ),
        KernelSpec(
            name="long",
            template="row_long.cu.j2",
            regions=("x", "y"),
            summary="a row of any length to a block, read three times",
            params={"VEC": (8, 4, 1), "THREADS": (256, 512)},
            valid=(_whole(tensors),),
            constants=_constants(parts),
            grid="M",
            block="THREADS",
            estimate=f"4e-6 + 2 * {seconds} / (4e12 if VEC > 1 else 1e12)",
        ),
    )


def _backward(
    parts: Mapping[str, str], tensors: tuple[str, ...], rows: int, pending: str = PENDING
) -> tuple[KernelSpec, ...]:
    """Sums over rows need a barrier over the grid: a cooperative launch of as many blocks as are resident at once.

    One block of 512 threads, at most 128 registers each, fits any multiprocessor, so there is one for each.
    """
    seconds = f"{rows} * M * N * bits(T) / 8"
    columns, streams = 2 if "MEAN" in parts else 1, 3 if "RESIDUAL" in parts else 2

    def kernel(name: str, summary: str, template: str, threads: str, at_once: str, **fields: Any) -> KernelSpec:
        blocks = f"max(1, min(ceildiv(M, {at_once}), multiprocessors))"
        return KernelSpec(
            name=name,
            pending=pending,
            summary=summary,
            template=template,
            constants={**_constants(parts), "THREADS": threads},
            grid=blocks,
            block="THREADS",
            cooperative=True,
            workspace=f"{blocks} * {at_once} * {columns} * max(N, 1) * 4",
            min_blocks=1,
            **fields,
        )

    speed = "/ (4e12 if VEC > 1 else 1e12)"
    return (
        KernelSpec(
            name="stream",
            pending=PENDING,
            template="row_backward_stream.cu.j2",
            summary="blocks that stay; x and dy read once, sums over rows in registers to the end",
            requires=(
                f"N % 8 == 0 and {' and '.join(f'aligned({t}, 16)' for t in tensors)}",
                "N <= 12288",
                f"M * N < {2**35}",
            ),
            params={
                "EXACT": (1, 0),
                "ITEMS": (4, 3, 2, 1),
                "LANES": (32, 64, 96, 128, 160, 192, 256, 384, 448, 512),
                "THREADS": (512, 384, 256),
            },
            valid=(
                "(N == LANES * ITEMS * 8) if EXACT else (N < LANES * ITEMS * 8)",
                "ITEMS == (3 if LANES > 256 else 4) or LANES == 32",
                "LANES == 32 or 3 * N > 2 * LANES * ITEMS * 8",
                "N > LANES * (ITEMS - 1) * 8",
            ),
            constants={**_constants(parts), "GROUPS": GROUPS, "DEPTH": "1"},
            grid="max(1, min(M, multiprocessors))",
            block="LANES * GROUPS",
            shared_memory=f"LANES * ITEMS * 32 * (1 + GROUPS * {columns}) + GROUPS * LANES // 2"
            f" + {streams} * LANES * GROUPS * ITEMS * bits(T)",
            cooperative=True,
            workspace=f"max(1, min(M, multiprocessors)) * {columns} * max(N, 1) * 4",
            min_blocks=1,
            estimate=f"5e-6 + {seconds} / 4.2e12",
        ),
        kernel(
            "rows",
            "x and dy in registers, read once; one, two or four rows of a block at once",
            "row_backward.cu.j2",
            "512",
            "(512 // LANES)",
            requires=(f"N <= {512 * 24}",),
            params={"VEC": (8, 4, 1), "LANES": (128, 256, 512), "VALUES": (8, 16, 24)},
            valid=(_whole(tensors), "N <= LANES * VALUES"),
            estimate=f"6e-6 + {seconds} {speed}",
        ),
        kernel(
            "long",
            "rows of any length, x read four times and dy twice",
            "row_backward_long.cu.j2",
            "256",
            "1",
            params={"VEC": (8, 4, 1)},
            valid=(_whole(tensors),),
            estimate=f"9e-6 + 2 * {seconds} {speed}",
        ),
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
) -> FusionSpec:
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
        constraints=("0 <= p and p <= 1",) if "p" in attributes else (),
        cases=cases,
        tolerances=(_WITH_GELU if "approximate" in attributes else _SUMS,),
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

LAYERNORM = _fusion(
    "layernorm",
    "(x - mean) / sqrt(var + epsilon) * scale + bias over the last axis",
    "y = LayerNormalization(x, scale, bias, epsilon=epsilon)",
    {"x": ROW, "scale": "T[N]", "bias": "T[N]"},
    {"y": ROW},
    EPSILON,
    _forward({"MEAN": "1"}, ("x", "scale", "bias", "y"), 2),
    (_OFFSET,),
    regions=(_MODULATED,),
)

RMSNORM = _fusion(
    "rmsnorm",
    "x / sqrt(mean(x^2) + epsilon) * scale over the last axis",
    "y = RMSNormalization(x, scale, epsilon=epsilon)",
    {"x": ROW, "scale": "T[N]"},
    {"y": ROW},
    EPSILON,
    _forward({}, ("x", "scale", "y"), 2),
    (_RMS_OFFSET,),
    regions=(_GATED,),
)

RESIDUAL_RMSNORM = _fusion(
    "residual_rmsnorm",
    "RMSNorm of x + residual; also gives the sum",
    "h = Add(x, residual)\ny = RMSNormalization(h, scale, epsilon=epsilon)",
    {"x": ROW, "residual": ROW, "scale": "T[N]"},
    {"y": ROW, "h": ROW},
    EPSILON,
    _forward({"RESIDUAL": "1", "H_OUT": "1"}, ("x", "residual", "scale", "y", "h"), 4),
)

GELU_DROPOUT_LAYERNORM = _fusion(
    "gelu_dropout_layernorm",
    "LayerNorm of dropout(gelu(x)); the mask is a function of rng and stored nowhere",
    f"{GELU_STEP}y = LayerNormalization(v, scale, bias, epsilon=epsilon)",
    {"x": ROW, **RNG, "scale": "T[N]", "bias": "T[N]"},
    {"y": ROW},
    {**DROPOUT, **GELU, **EPSILON},
    _forward({"MEAN": "1", "GELU": "1", "TANH": TANH, "DROPOUT": "1"}, ("x", "scale", "bias", "y"), 2, PENDING),
    _DROPOUT_CASES,
    ("S6", "training"),
)

DROPOUT_RESIDUAL_LAYERNORM = _fusion(
    "dropout_residual_layernorm",
    "LayerNorm of dropout(x) + residual; the mask is a function of rng and stored nowhere",
    f"{ADD_STEP}y = LayerNormalization(v, scale, bias, epsilon=epsilon)",
    {"x": ROW, **RNG, "residual": ROW, "scale": "T[N]", "bias": "T[N]"},
    {"y": ROW},
    {**DROPOUT, **EPSILON},
    _forward({"MEAN": "1", "DROPOUT": "1", "RESIDUAL": "1"}, ("x", "residual", "scale", "bias", "y"), 3),
    _DROPOUT_CASES,
    ("training",),
)

LAYERNORM_BACKWARD = _fusion(
    "layernorm_backward",
    "gradients of LayerNorm: dx, dscale, dbias",
    "dx, dscale, dbias = fusionreg.LayerNormalizationGrad(dy, x, scale, epsilon=epsilon)",
    {"dy": ROW, "x": ROW, "scale": "T[N]"},
    {"dx": ROW, "dscale": "T[N]", "dbias": "T[N]"},
    EPSILON,
    _backward({"MEAN": "1"}, ("dy", "x", "scale", "dx"), 3),
    tags=("training", "backward"),
)

RMSNORM_BACKWARD = _fusion(
    "rmsnorm_backward",
    "gradients of RMSNorm: dx, dscale",
    "dx, dscale = fusionreg.RMSNormalizationGrad(dy, x, scale, epsilon=epsilon)",
    {"dy": ROW, "x": ROW, "scale": "T[N]"},
    {"dx": ROW, "dscale": "T[N]"},
    EPSILON,
    _backward({}, ("dy", "x", "scale", "dx"), 3),
    tags=("training", "backward"),
)

RESIDUAL_RMSNORM_BACKWARD = _fusion(
    "residual_rmsnorm_backward",
    "gradients of residual RMSNorm: dx, which is dresidual too, and dscale; h is the sum that the forward pass gave",
    "r, dscale = fusionreg.RMSNormalizationGrad(dy, h, scale, epsilon=epsilon)\ndx = Add(r, dh)",
    {"dy": ROW, "dh": ROW, "h": ROW, "scale": "T[N]"},
    {"dx": ROW, "dscale": "T[N]"},
    EPSILON,
    _backward({"H_OUT": "1"}, ("dy", "dh", "h", "scale", "dx"), 4),
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
    _backward({"MEAN": "1", "GELU": "1", "TANH": TANH, "DROPOUT": "1"}, ("dy", "x", "scale", "dx"), 3),
    _DROPOUT_CASES,
    ("S6", "training", "backward"),
)

DROPOUT_RESIDUAL_LAYERNORM_BACKWARD = _fusion(
    "dropout_residual_layernorm_backward",
    "gradients of LayerNorm(dropout(x) + residual): dx, dresidual, dscale, dbias; the mask is made again from rng",
    f"{ADD_STEP}dresidual, dscale, dbias = fusionreg.LayerNormalizationGrad(dy, v, scale, epsilon=epsilon)\n"
    "dx = fusionreg.Dropout(dresidual, rng, p=p)",
    {"dy": ROW, "x": ROW, **RNG, "residual": ROW, "scale": "T[N]"},
    {"dx": ROW, "dresidual": ROW, "dscale": "T[N]", "dbias": "T[N]"},
    {**DROPOUT, **EPSILON},
    _backward({"MEAN": "1", "DROPOUT": "1", "RESIDUAL": "1"}, ("dy", "x", "residual", "scale", "dx", "dresidual"), 5),
    _DROPOUT_CASES,
    ("training", "backward"),
)

FUSIONS = (
    LAYERNORM,
    LAYERNORM_BACKWARD,
    RMSNORM,
    RMSNORM_BACKWARD,
    RESIDUAL_RMSNORM,
    RESIDUAL_RMSNORM_BACKWARD,
    GELU_DROPOUT_LAYERNORM,
    GELU_DROPOUT_LAYERNORM_BACKWARD,
    DROPOUT_RESIDUAL_LAYERNORM,
    DROPOUT_RESIDUAL_LAYERNORM_BACKWARD,
)
