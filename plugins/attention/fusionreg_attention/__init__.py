"""The family ``attention``: softmax over masked scores, and attention without scores in memory.

``softmax`` has fusions of scores that are in memory: scale, mask, causal, softmax, and their gradients; ``sdpa`` has
attention as one operator, for which ``decode`` has kernels for few queries.
"""

from __future__ import annotations

from collections.abc import Sequence

from fusionreg.core.spec import FusionSpec, KernelSpec
from fusionreg.hookspecs import hookimpl

from . import decode, sdpa, softmax


@hookimpl
def register_fusions() -> Sequence[FusionSpec]:
    return (*softmax.FUSIONS, *sdpa.FUSIONS)


@hookimpl
def register_kernels() -> Sequence[KernelSpec]:
    return (*sdpa.KERNELS, *decode.KERNELS)
