"""``gemm.scale``, ``gemm.bias``, ``gemm.scale_bias``, ``gemm.activation``: four contracts, the same two kernels.

The weight is ``[K N]``, or ``[N K]`` with ``transB``. Both forms fit a square weight, so a constraint ties the shape to
the attribute: a weight in the other layout is an error and never a silently transposed product.
"""

from __future__ import annotations

from fusionreg.core.spec import AttributeSpec, Case, FusionSpec, KernelSpec

from .workloads import workloads

ACTIVATIONS = 'any_of(Relu, Gelu, Sigmoid, Tanh, Swish, "activation", gelu_tanh=Gelu(approximate="tanh"))'

#: Which form of `T[] | T[N]` scale took, and of `T[] | T[N] | T[M 1]` bias; -1 where the fusion has none.
_NO_SCALE, _NO_BIAS = {"SCALE_FORM": "-1"}, {"BIAS_FORM": "-1"}
_SCALE, _BIAS = {"SCALE_FORM": "form(scale)"}, {"BIAS_FORM": "form(bias)"}

#: Tiles of the problem, and FLOPs of one.
_TILES, _WORK = "ceildiv(M, BM) * ceildiv(N, BN)", "BM * BN * K * 2"


def _estimate(alone: str, full: str) -> str:
    """Seconds: a launch, then waves of tiles over the 132 multiprocessors of an H200. One tile alone runs at ``alone``
    FLOP/s, a multiprocessor full of them at ``full``; both were measured there (bf16, fp32 for the plain kernel)."""
    return f"3e-6 + max({_WORK} / ({alone}), ceildiv({_TILES}, 132) * {_WORK} / ({full}))"


def _by_tile(*rates: str) -> str:
    """One rate for each tile area: 64 x 64, 64 x 128 and 128 x 64, 128 x 128, 128 x 256."""
    small, narrow, square, wide = rates
    return f"{small} if BM * BN == 4096 else {narrow} if BM * BN == 8192 else {square} if BM * BN == 16384 else {wide}"


def _plain(constants: dict[str, str]) -> KernelSpec:
    return KernelSpec(
        name="plain",
        template="plain.cu.j2",
        summary="fp32 FMA over shared-memory tiles: any shape, alignment and row or column stride",
        strides=("x", "w"),
        params={"BM": (64,), "BN": (64,), "BK": (16,)},
        constants=constants,
        grid=_TILES,
        block="256",
        estimate=_estimate("1.5e11", "2.1e11"),
    )


def _tensor_core(constants: dict[str, str]) -> KernelSpec:
    return KernelSpec(
        name="tensor_core",
        template="tensor_core.cu.j2",
        summary="mma.sync m16n8k16 fed by cp.async; rows of x and w are whole 16-byte chunks",
        requires=(
            'T in ("float16", "bfloat16")',
            "K % 8 == 0",
            "transB == 1 or N % 8 == 0",
            "aligned(x, 16) and stride(x, 1) == 1 and stride(x, 0) % 8 == 0",
            "aligned(w, 16) and stride(w, 1) == 1 and stride(w, 0) % 8 == 0",
        ),
        strides=("x", "w"),
        params={"BM": (128, 64), "BN": (128, 64, 256), "BK": (32, 64)},
        valid=("BK == (32 if BM == 128 else 64)", "BM == 128 or BN <= 128"),
        constants={
            "STAGES": "4 if BM == 128 else 3",
            "WARPS_M": "2",
            "WARPS_N": "2 if BN == 64 else 4",
            **constants,
        },
        grid=_TILES,
        block="32 * WARPS_M * WARPS_N",
        shared_memory="max(STAGES * (BM + BN) * BK * 2, BM // WARPS_M * (BN + 8) * 4)",
        estimate=_estimate(
            _by_tile("1.1e12", "1.6e12", "2.3e12", "2.8e12"), _by_tile("1.8e12", "2.1e12", "2.4e12", "2.9e12")
        ),
    )


def _kernels(constants: dict[str, str]) -> tuple[KernelSpec, ...]:
    return (_tensor_core(constants), _plain(constants))


def _fusion(
    words: str,
    summary: str,
    steps: str,
    operands: dict[str, str],
    constants: dict[str, str],
    cases: tuple[Case, ...] = (),
) -> FusionSpec:
    return FusionSpec(
        api=1,
        name=f"gemm.{words}",
        summary=summary,
        pattern=f"h = MatMul(x, w, transB=transB)\n{steps}",
        inputs={"x": "T[... M K]", "w": "T[K N] | T[N K]", **operands},
        outputs={"y": "T[... M N]"},
        dtypes={"T": ("float16", "bfloat16", "float32")},
        axes={"M": "rows of x, leading axes folded in", "K": "summed over", "N": "output channels"},
        attributes={
            "transB": AttributeSpec(
                type="int", default=0, choices=(0, 1), static=True, summary="1 when the weight is stored [N K]"
            )
        },
        autocast="lower",
        constraints=("shape(w, -1) == (K if transB else N)", "shape(w, -2) == (N if transB else K)"),
        cases=(*cases, *_CASES),
        workloads=workloads(operands),
        kernels=_kernels(constants),
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

FUSIONS = (
    _fusion(
        "scale",
        "x @ W times a per-tensor or per-channel scale, then an optional activation",
        f"s = Mul(h, scale)\ny = optional({ACTIVATIONS})(s)",
        {"scale": SCALE},
        _SCALE | _NO_BIAS,
        (_SCALE_AFTER_OVERFLOW,),
    ),
    _fusion(
        "bias",
        "x @ W plus bias, then an optional activation",
        f"b = Add(h, bias)\ny = optional({ACTIVATIONS})(b)",
        {"bias": BIAS},
        _NO_SCALE | _BIAS,
        (_BIAS_AFTER_OVERFLOW,),
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
