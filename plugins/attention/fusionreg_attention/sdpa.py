"""Fusions of scaled dot-product attention, without scores in memory."""

from __future__ import annotations

from fusionreg.core.spec import FusionSpec, KernelSpec

FUSIONS: tuple[FusionSpec, ...] = ()

#: Kernels beside those that the fusions bring, such as calls of libraries.
KERNELS: tuple[KernelSpec, ...] = ()
