"""Calls of cuBLASLt as kernels: on which problems. Apart from the call, whose code is part of its evidence."""

from __future__ import annotations

from fusionreg.core.spec import KernelSpec

from .cublaslt import WORKSPACE, CublasLtMatmul

#: Seconds that an H200 took, and a twentieth: where both are as fast, our own kernels are taken; so they are for small
#: problems, as calls cost the host more than launches do.
_ESTIMATE = (
    "max(9e-6, 3e-6 + (4e-6 if 64 < M and M <= 128 else 0) + max(((M + N) * K + M * N) * (bits(T) // 8) / 4e12,"
    " 2 * M * N * K / (4.5e13 if bits(T) == 32 else 6.7e14)))"
)


def _kernel(fusion: str, *requires: str) -> KernelSpec:
    return KernelSpec(
        name="cublaslt",
        fusion=fusion,
        library=CublasLtMatmul.name,
        summary="NVIDIA's cuBLASLt, with what its epilogues know of the fusion",
        requires=(
            "K > 0",
            "stride(x, 1) == 1 and (M == 1 or stride(x, 0) >= K)",
            "stride(w, 1) == 1 and (shape(w, 0) == 1 or stride(w, 0) >= shape(w, 1))",
            *requires,
        ),
        strides=("x", "w"),
        workspace=str(WORKSPACE),
        estimate=_ESTIMATE,
    )


_GELU = 'activation == "gelu_tanh" and T == "float16"'
_PLAIN = 'activation in ("none", "Relu")'
_CHOICE = f"{_PLAIN} or {_GELU}"
_BIAS = "form(bias) == 1 and aligned(bias, 16)"  # a vector along N
_SCALE = 'T == "float32" and form(scale) == 0'

KERNELS = (
    _kernel("gemm.activation", f'activation == "Relu" or {_GELU}'),
    _kernel("gemm.bias", _CHOICE, _BIAS),
    _kernel("gemm.scale", _PLAIN, _SCALE),
    _kernel("gemm.scale_bias", _PLAIN, _SCALE, _BIAS),
)
