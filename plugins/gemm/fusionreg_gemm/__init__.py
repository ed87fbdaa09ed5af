"""The family ``gemm``: x @ W with scale, bias and activation in the accumulator's registers, one cast at the end.

A module for each group of fusions, and one for its kernels: ``dense`` has weights of x's dtype, ``quantized`` weights
of 8 bits, ``gated`` has two weights, ``lora`` one of many low-rank ones for each row.
"""

from __future__ import annotations

from collections.abc import Sequence

from fusionreg.core.registry.library_calls import LibraryCall
from fusionreg.core.spec import FusionSpec, KernelSpec
from fusionreg.hookspecs import hookimpl

from . import cublaslt, cublaslt_kernels, dense, gated, lora, quantized


@hookimpl
def register_fusions() -> Sequence[FusionSpec]:
    return (*dense.FUSIONS, *gated.FUSIONS, *quantized.FUSIONS, *lora.FUSIONS)


@hookimpl
def register_kernels() -> Sequence[KernelSpec]:
    return cublaslt_kernels.KERNELS


@hookimpl
def register_library_calls() -> Sequence[LibraryCall]:
    return (cublaslt.CublasLtMatmul(),)
