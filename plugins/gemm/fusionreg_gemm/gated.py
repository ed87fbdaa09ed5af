"""``gemm.gated``: the first half of a gated feed-forward network (SwiGLU, GeGLU, ReGLU), two products in a kernel.

``gemm.gated_relu2`` is the same with the square of a ReLU.
"""

from __future__ import annotations

from fusionreg.core.spec import Case, FusionSpec, KernelSpec, Tolerance

from .dense import TRANSPOSED
from .wgmma_kernels import wgmma
from .workloads import gated

#: No operand of the epilogue is there.
_FORMS = {"SCALE_FORM": "-1", "BIAS_FORM": "-1"}

_PLAIN = KernelSpec(
    name="plain",
    template="gated_plain.cu.j2",
    summary="fp32 FMA over shared-memory tiles: any shape, alignment and row or column stride",
    strides=("x", "gate", "up"),
    params={"BM": (32,), "BN": (32,), "BK": (16,)},
    constants=_FORMS,
    grid="ceildiv(M, BM) * ceildiv(N, BN)",
    block="256",
    estimate="3e-6 + ceildiv(ceildiv(M, BM) * ceildiv(N, BN), 132) * BM * BN * K * 4 / 1e11",
)

GATED = FusionSpec(
    api=1,
    name="gemm.gated",
    summary="an activation of x @ gate, times x @ up",
    pattern="g = MatMul(x, gate, transB=transB)\nu = MatMul(x, up, transB=transB)\n"
    'a = any_of(Swish, Gelu, Relu, Sigmoid, "activation", gelu_tanh=Gelu(approximate="tanh"))(g)\n'
    "y = Mul(a, u)",
    inputs={"x": "T[... M K]", "gate": "T[K N] | T[N K]", "up": "T[K N] | T[N K]"},
    outputs={"y": "T[... M N]"},
    dtypes={"T": ("float16", "bfloat16", "float32")},
    axes={"M": "rows of x, leading axes folded in", "K": "summed over", "N": "output channels"},
    attributes={"transB": TRANSPOSED},
    autocast="lower",
    constraints=tuple(
        f"shape({w}, -1) == (K if transB else N) and shape({w}, -2) == (N if transB else K)" for w in ("gate", "up")
    ),
    cases=(
        Case(
            name="product_after_overflow",
            axes={"M": 3, "K": 8, "N": 16},
            values={"x": "256", "gate": "-1e-3", "up": "64"},
            summary="x @ up is no fp16 number, its product with the gate is",
        ),
    ),
    tolerances=(
        Tolerance(
            dtype="float16",
            ulp=1.0,
            inputs=1.0,
            reason="the gate is a sum of few huge terms where x saturates, and its error is multiplied by x @ up",
        ),
    ),
    workloads=gated(),
    kernels=(wgmma(_FORMS, weights=("gate", "up")), _PLAIN),
    tags=("S15", "inference", "gemm"),
)

_SQUARED = {**_FORMS, "activation": '"relu2"'}
SQUARED = GATED.model_copy(
    update={
        "name": "gemm.gated_relu2",
        "summary": "the square of a ReLU of x @ gate, times x @ up",
        "pattern": (
            "g = MatMul(x, gate, transB=transB)\nu = MatMul(x, up, transB=transB)\n"
            "y = Mul(fusionreg.SquaredRelu(g), u)",
        ),
        "workloads": (),
        "kernels": (
            wgmma(_SQUARED, weights=("gate", "up")),
            _PLAIN.model_copy(update={"constants": _SQUARED}),
        ),
    }
)
FUSIONS = (GATED, SQUARED)
