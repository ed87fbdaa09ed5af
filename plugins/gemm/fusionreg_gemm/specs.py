"""``gemm.scale``, ``gemm.bias``, ``gemm.scale_bias``, ``gemm.activation``: four contracts, the same two kernels.

The weight is ``[K N]``, or ``[N K]`` with ``transB``. Both forms fit a square weight, so a constraint ties the shape to
the attribute: a weight in the other layout is an error and never a silently transposed product.
"""

from __future__ import annotations

from fusionreg.core.spec import AttributeSpec, FusionSpec, KernelSpec

ACTIVATIONS = 'any_of(Relu, Gelu, Sigmoid, Tanh, Swish, "activation", gelu_tanh=Gelu(approximate="tanh"))'

#: Which form of `T[] | T[N]` scale took, and of `T[] | T[N] | T[M 1]` bias; -1 where the fusion has none.
_NO_SCALE, _NO_BIAS = {"SCALE_FORM": "-1"}, {"BIAS_FORM": "-1"}
_SCALE, _BIAS = {"SCALE_FORM": "form(scale)"}, {"BIAS_FORM": "form(bias)"}

#: Bytes of all pipeline stages of the tensor-core kernel.
_STAGES = "STAGES * (BM + BN) * BK * 2"

#: Seconds: waves of tiles over the 132 multiprocessors of an H200, each at a rate measured there, after a launch.
_ESTIMATE = "3e-6 + ceildiv(ceildiv(M, BM) * ceildiv(N, BN), 132) * BM * BN * K * 2 / {rate}"


def _plain(constants: dict[str, str]) -> KernelSpec:
    return KernelSpec(
        name="plain",
        template="plain.cu.j2",
        summary="fp32 FMA over shared-memory tiles: any shape, alignment and row or column stride",
        strides=("x", "w"),
        params={"BM": (64, 128), "BN": (64, 128), "BK": (16,)},
        constants=constants,
        grid="ceildiv(M, BM) * ceildiv(N, BN)",
        block="256",
        estimate=_ESTIMATE.format(rate="2e11"),
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
        params={
            "BM": (128, 64),
            "BN": (128, 64, 256),
            "BK": (32, 64),
            "STAGES": (4, 3),
            "WARPS_M": (2,),
            "WARPS_N": (4, 2),
        },
        valid=(
            "BM // WARPS_M in (32, 64) and BN // WARPS_N in (32, 64)",
            f"{_STAGES} <= 99 * 1024",
        ),
        constants=constants,
        grid="ceildiv(M, BM) * ceildiv(N, BN)",
        block="32 * WARPS_M * WARPS_N",
        shared_memory=f"max({_STAGES}, BM // WARPS_M * (BN + 8) * 4)",
        estimate=_ESTIMATE.format(rate="3e12"),
    )


def _kernels(constants: dict[str, str]) -> tuple[KernelSpec, ...]:
    return (_tensor_core(constants), _plain(constants))


def _fusion(words: str, summary: str, steps: str, operands: dict[str, str], constants: dict[str, str]) -> FusionSpec:
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
        constraints=("shape(w, -1) == (K if transB else N)", "shape(w, -2) == (N if transB else K)"),
        kernels=_kernels(constants),
        tags=("S7", "inference", "gemm"),
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
    ),
    _fusion(
        "bias",
        "x @ W plus bias, then an optional activation",
        f"b = Add(h, bias)\ny = optional({ACTIVATIONS})(b)",
        {"bias": BIAS},
        _NO_SCALE | _BIAS,
    ),
    _fusion(
        "scale_bias",
        "x @ W times scale plus bias, then an optional activation",
        f"s = Mul(h, scale)\nb = Add(s, bias)\ny = optional({ACTIVATIONS})(b)",
        {"scale": SCALE, "bias": BIAS},
        _SCALE | _BIAS,
    ),
    _fusion(
        "activation",
        "an activation of x @ W",
        f"y = {ACTIVATIONS}(h)",
        {},
        _NO_SCALE | _NO_BIAS,
    ),
)
