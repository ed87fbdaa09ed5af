"""An open fusion at one site: a fusion of its own, made from a program of point-wise operators. Floor 3."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..spec import FusionSpec, OpSpec, Region
from ..validate.fusion import check_fusion
from .entries import FusionEntry


def derive(base: FusionEntry, region: Region, ops: Mapping[str, OpSpec]) -> FusionEntry:
    """The fusion ``base.name + "." + region.name``, with the kernels of ``base``.

    Everything but where it came from is as for a fusion that a plugin registers: its reference is its program.

    Raises: :class:`SpecError`, the first of what is wrong with the region.
    """
    spec = FusionSpec(
        api=base.spec.api,
        name=f"{base.name}.{region.name}",
        version=base.spec.version,
        summary=region.summary or base.spec.summary,
        pattern=(region.pattern,),
        inputs=region.inputs,
        outputs=region.outputs,
        dtypes=region.dtypes,
        cases=region.cases,
        tolerances=region.tolerances,
        workloads=region.workloads,
        tags=(*base.spec.tags, *region.tags),
    )
    entry, errors = check_fusion(spec, ops, base.plugin, base.distribution, base.version)
    if entry is None:
        raise errors[0]
    kernels = tuple(replace(k, spec=k.spec.model_copy(update={"fusion": spec.name})) for k in base.kernels)
    return replace(entry, kernels=kernels, base=base.name)
