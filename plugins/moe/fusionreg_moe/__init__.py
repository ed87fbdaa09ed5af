"""The family ``moe``: products with the matrices of experts, and feed-forward layers of routed experts."""

from __future__ import annotations

from collections.abc import Sequence

from fusionreg.core.spec import FusionSpec
from fusionreg.hookspecs import hookimpl

from . import routed


@hookimpl
def register_fusions() -> Sequence[FusionSpec]:
    return (*routed.FUSIONS,)
