"""The family ``gemm``: x @ W with scale, bias and activation in the accumulator's registers, one cast at the end."""

from __future__ import annotations

from collections.abc import Sequence

from fusionreg.core.spec import FusionSpec
from fusionreg.hookspecs import hookimpl

from .specs import FUSIONS


@hookimpl
def register_fusions() -> Sequence[FusionSpec]:
    return FUSIONS
