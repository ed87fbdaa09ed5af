"""``gemm.lora_linear``: y = x @ weight + bias + scale · scales[id] · B[id] · (A[id] · x), product and adapters at once.

Adapters and ids are those of ``gemm.lora_routed``, which adds them to a product that somebody else has made.
"""

from __future__ import annotations

from fusionreg.core.spec import Case, FusionSpec, KernelSpec, TensorMap, Tolerance, Workload

from .dense import TRANSPOSED
from .lora import ROUTED

_BASE = "base = optional(Add)(MatMul(x, weight, transB=transW), bias)"

#: Bytes of a stage: 64 of k, of 128 rows of x and 128 columns of w, and two barriers; of what is beside them: A x, and
#: the order of rows.
_STAGE, _BESIDE = "(256 * 128 + 16)", "(BM * R * 4 + 6144)"

_WGMMA = KernelSpec(
    name="wgmma",
    template="lora_linear.cu.j2",
    summary="wgmma fed by TMA; beside it, two warpgroups multiply rows of x with their adapters",
    targets="sm_90a",
    requires=(
        'T == "bfloat16" and R in (16, 32)',
        "transW == 1 and transA == 1 and transB == 1",
        "stride(weight, 1) == 1 and stride(x, 1) == 1 and stride(x, 0) % 8 == 0",
        "K % 8 == 0 and N % 8 == 0",
        "aligned(x, 16) and aligned(a, 16) and aligned(b, 16) and aligned(y, 16)",
        "M >= 1 and K >= 1 and 2 * ceildiv(M, 256) * ceildiv(N, 128) <= multiprocessors",
    ),
    strides=("x", "weight"),
    specialize=("R",),
    params={"CLUSTER": (2, 1)},
    constants={
        "BM": "128", "BN": "128", "PARTS": "8",
        "STAGES": f"min(8, (232448 - {_BESIDE}) // {_STAGE})",
    },
    tensor_maps=(
        TensorMap(
            name="x_map", operand="x", dims=("K", "M"), strides=("stride(x, 0)",), box=("64", "min(BM, M)"),
            swizzle="128", l2_promotion=256,
        ),
        TensorMap(
            name="w_map", operand="weight", dims=("K", "N"), strides=("stride(weight, 0)",),
            box=("64", "BN // CLUSTER"), swizzle="128", l2_promotion=256,
        ),
        TensorMap(name="y_map", operand="y", dims=("N", "M"), strides=("N",), box=("64", "16"), swizzle="128"),
    ),
    grid="CLUSTER * ceildiv(M, BM * CLUSTER) * ceildiv(N, BN)",
    block="640",
    cluster="CLUSTER",
    cooperative=True,
    programmatic=True,
    min_blocks=1,
    shared_memory=f"STAGES * {_STAGE} + BM * R * 4",
    workspace="PARTS * M * R * 4",
    estimate="1.4e-5 + ceildiv(K, 64) * 3.4e-7",
    pending="its proof on a GPU",
)  # fmt: skip

_PLAIN = KernelSpec(
    name="plain",
    template="lora_linear_plain.cu.j2",
    summary="a block for each token: any rank, shape, alignment and strides",
    strides=("x", "weight", "a", "b"),
    constants={"THREADS": "256"},
    grid="M",
    block="THREADS",
    shared_memory="4 * R",
    estimate="4e-6 + ceildiv(M, 8 * multiprocessors) * (1e-6 + (R * (K + N) + 2 * N * K) * 9e-10)",
    pending="its proof on a GPU",
)

LINEAR = FusionSpec(
    api=1,
    name="gemm.lora_linear",
    summary="x @ w plus bias plus the low-rank adapter of each token: scale * scales[id] * B[id] (A[id] x)",
    pattern=tuple(f"{_BASE}\n{program}" for program in ROUTED.pattern),
    inputs={"x": ROUTED.inputs["x"], "weight": "T[K N] | T[N K]", "bias": "T[N]"}
    | {name: text for name, text in ROUTED.inputs.items() if name not in ("base", "x")},
    outputs=ROUTED.outputs,
    dtypes=ROUTED.dtypes,
    axes=ROUTED.axes,
    extents=ROUTED.extents,
    attributes={
        **ROUTED.attributes,
        "transW": TRANSPOSED.model_copy(update={"summary": "1 when weight is stored [N K]"}),
    },
    autocast="lower",
    constraints=(
        *ROUTED.constraints,
        "shape(weight, -1) == (K if transW else N) and shape(weight, -2) == (N if transW else K)",
    ),
    cases=(
        *(case for case in ROUTED.cases if case.name != "wide_sum"),
        Case(
            name="many_rows",
            axes={"M": 300, "N": 136, "K": 200, "E": 5, "R": 16},
            values={"ids": "integers", "ranks": "integers"},
            summary="more rows and columns than a tile has, some of them twice",
        ),
        Case(
            name="many_adapters",
            axes={"M": 130, "N": 40, "K": 72, "E": 400, "R": 16},
            values={"ids": "rising", "ranks": "integers"},
            summary="nearly as many adapters as rows",
        ),
    ),
    tolerances=(
        *ROUTED.tolerances,
        Tolerance(
            dtype="float16",
            ulp=1.0,
            inputs=1.0,
            reason="the chain may hit the difference of a large product and a large delta by luck",
        ),
    ),
    workloads=(
        Workload(
            name="512x4096x4096-r16-32",
            row="S14",
            mode="b",
            axes={"M": 512, "N": 4096, "K": 4096, "E": 32, "R": 16},
            dtypes={"T": "bfloat16", "I": "int64"},
            absent=("bias", "ranks", "scales"),
            attributes={"transW": 1},
            forms={"weight": "T[N K]", "a": "T[E R K]", "b": "T[E N R]"},
            values={"ids": "below E"},
            goal="1.15 * product",
            summary="tokens of a few adapters",
        ),
    ),
    kernels=(_WGMMA, _PLAIN),
    tags=("S14", "inference", "gemm", "lora"),
)
FUSIONS = (LINEAR,)
