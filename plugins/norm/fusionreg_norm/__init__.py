"""The family ``norm``: normalisations with what stands before and after them, in one read of their input."""

from __future__ import annotations

from collections.abc import Sequence

from fusionreg.core.spec import FusionSpec
from fusionreg.hookspecs import hookimpl

from .batch import FUSIONS as BATCH
from .groups import FUSIONS as GROUPS
from .groups_backward import FUSIONS as GROUPS_BACKWARD
from .rows import FUSIONS as ROWS


@hookimpl
def register_fusions() -> Sequence[FusionSpec]:
    return [*ROWS, *GROUPS, *GROUPS_BACKWARD, *BATCH]
