"""The family ``moe``: products with the matrices of experts, and feed-forward layers of routed experts.

A module for each group of fusions, and one for its kernels: ``gemv`` multiplies each row with a matrix of its own,
``grouped`` rows that lie in groups.
"""

from __future__ import annotations

from collections.abc import Sequence

from fusionreg.core.spec import FusionSpec
from fusionreg.hookspecs import hookimpl

from . import gemv, gemv_narrow, given, grouped, limited, routed, routed_backward, routed_quantized, routing


@hookimpl
def register_fusions() -> Sequence[FusionSpec]:
    modules = (gemv, gemv_narrow, grouped, routed, routed_backward, routed_quantized, routing, given, limited)
    return tuple(fusion for module in modules for fusion in module.FUSIONS)
