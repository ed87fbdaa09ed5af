"""The family ``conv``: convolution, batch normalization, activation and pooling in one kernel."""

from __future__ import annotations

from collections.abc import Sequence

from fusionreg.core.spec import FusionSpec, KernelSpec
from fusionreg.hookspecs import hookimpl

from . import hopper, stem
from .fusions import FUSIONS


@hookimpl
def register_fusions() -> Sequence[FusionSpec]:
    return FUSIONS


@hookimpl
def register_kernels() -> Sequence[KernelSpec]:
    return (*hopper.kernels(), *stem.kernels())
