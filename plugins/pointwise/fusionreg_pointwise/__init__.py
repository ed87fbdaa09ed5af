"""The family ``pointwise``: any program of point-wise operators as one kernel."""

from __future__ import annotations

from collections.abc import Sequence

from fusionreg.core.spec import FusionSpec
from fusionreg.hookspecs import hookimpl

from .regions import REGION


@hookimpl
def register_fusions() -> Sequence[FusionSpec]:
    return (REGION,)
