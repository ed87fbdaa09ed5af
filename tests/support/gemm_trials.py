"""Trials of the family gemm on extents and parameters of a test's own, for the simulator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from catalogs import shipped

from fusionreg.core.cache import Cache
from fusionreg.core.conformance import derive
from fusionreg.core.conformance.execute import Job, prepare
from fusionreg.core.conformance.simulated import SimExecutor
from fusionreg.core.frozen import FrozenDict

CATALOG = shipped("gemm")


def made(
    fusion: str,
    kernel: str,
    name: str,
    axes: dict[str, int],
    transposed: int,
    forms: Mapping[str, int] = FrozenDict(),
    **params: int,
) -> Job:
    """The trial of that name on other extents, with these forms of operands, and these parameters or not at all."""
    entry, executor = CATALOG[fusion], SimExecutor(Cache())
    trial = next(t for t in derive(entry, entry.kernel(kernel), executor.target, "all") if t.name == name)
    attributes = {"transB": transposed} | ({"axis": -1 - transposed} if "axis" in entry.spec.attributes else {})
    trial = replace(
        trial, axes=FrozenDict(axes), attributes=FrozenDict(attributes), forms=trial.forms | {**forms, "w": transposed},
        params=FrozenDict(params), exactly=bool(params),
    )  # fmt: skip
    found = prepare(entry, entry.kernel(kernel), trial, executor)
    assert isinstance(found, Job), found
    return found
