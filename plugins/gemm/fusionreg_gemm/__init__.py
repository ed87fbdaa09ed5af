"""The family ``gemm``: x @ W with scale, bias and activation in the accumulator's registers, one cast at the end.

A module for each group of fusions, and one for its kernels: ``dense`` has weights of x's dtype, ``quantized`` of 8 bits.
"""

from __future__ import annotations

from collections.abc import Sequence

from fusionreg.core.spec import FusionSpec
from fusionreg.hookspecs import hookimpl

from . import dense, quantized


@hookimpl
def register_fusions() -> Sequence[FusionSpec]:
    return (*dense.FUSIONS, *quantized.FUSIONS)
