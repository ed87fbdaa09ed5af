"""A fusion with a program of point-wise operators: an open one at one site, or one with its slots filled. Floor 3."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from ..errors import SpecError
from ..frozen import FrozenDict
from ..pattern.graph import Input, Output, PatternGraph
from ..spec import BETWEEN, FusionSpec, KernelSpec, OpSpec, Region, Tolerance
from ..tensors import TensorType
from ..validate.fusion import check_fusion
from .entries import FusionEntry, Slot


def derive(base: FusionEntry, region: Region, ops: Mapping[str, OpSpec]) -> FusionEntry:
    """The fusion ``base.name + "." + region.name``, with those kernels of ``base`` that have its slots.

    Everything but where it came from is as for a fusion that a plugin registers: its reference is its program.

    Raises: :class:`SpecError`, the first of what is wrong with the region.
    """
    spec = FusionSpec(
        api=base.spec.api,
        name=f"{base.name}.{region.name}",
        version=base.spec.version,
        summary=region.summary or base.spec.summary,
        pattern=(_whole(base, region),),
        inputs=region.inputs,
        outputs=region.outputs,
        dtypes=region.dtypes,
        axes=base.spec.axes,
        attributes=base.spec.attributes,
        constraints=base.spec.constraints,
        extents=region.extents,
        autocast=base.spec.autocast,
        cases=region.cases,
        tolerances=region.tolerances or _tolerances(base, region),
        workloads=region.workloads,
        tags=(*base.spec.tags, *region.tags),
    )
    entry, errors = check_fusion(spec, ops, base.plugin, base.distribution, base.version, base.spec.dtypes)
    if entry is None:
        raise errors[0]
    kept = {n for n in region.slots if n in base.inputs and n in region.outputs}
    kernels = tuple(
        replace(k, spec=k.spec.model_copy(update={"fusion": spec.name, "pending": _pending(k.spec, region, kept)}))
        for k in base.kernels
        if set(region.slots) <= set(k.spec.regions) and kept <= set(k.spec.keeps)
    )
    made = replace(entry, kernels=kernels, base=base.name, slots=_slots(base, entry, region))
    return replace(made, spec=made.spec.model_copy(update={"layouts": FrozenDict(_layouts(base, made))}))


def _pending(kernel: KernelSpec, region: Region, kept: Collection[str]) -> str:
    slots = kernel.slots_pending if region.slots else ""
    return kernel.pending or slots or (kernel.keeps_pending if kept else "") or region.pending


def _layouts(base: FusionEntry, made: FusionEntry) -> dict[str, str]:
    """Those of the base, for what stands in the place of its tensors; of an open one, every output lies as the first
    input that has an element for each of its own, as the operators by themselves would have it."""
    found: dict[str, str] = {}
    if base.spec.open:
        for output, type_ in made.outputs.items():
            if first := next((n for n, given in made.inputs.items() if given.forms == type_.forms), ""):
                found[output] = first
    for output, like in base.spec.layouts.items():
        outputs = [n for n in made.in_place(output) if n in made.outputs]
        source = next((n for n in made.in_place(like) if n in made.inputs), "")
        found |= {n: source for n in outputs if source and _alike(made.inputs[source], made.outputs[n])}
    return found


def _alike(a: TensorType, b: TensorType) -> bool:
    """Whether tensors may have equal ranks, as far as their forms tell."""
    return [(len(f.axes), f.leading) for f in a.forms] == [(len(f.axes), f.leading) for f in b.forms]


def _tolerances(base: FusionEntry, region: Region) -> tuple[Tolerance, ...]:
    """Those of the base that are for a dtype that an output may have."""
    named = [TensorType.parse(text).dtype for text in region.outputs.values()]
    possible = {d for n in named for d in region.dtypes.get(n, (n,))}
    return tuple(t for t in base.spec.tolerances if t.dtype in possible)


def _whole(base: FusionEntry, region: Region) -> str:
    """The program with the fusion's pattern in it."""
    lines = region.pattern.splitlines()
    whom = f"region {region.name} of {base.name}"
    if base.spec.open != (BETWEEN not in lines) or base.spec.open == bool(region.slots):
        found = f"slots {list(region.slots)} and {lines.count(BETWEEN)} lines `{BETWEEN}`"
        expected = f"one line `{BETWEEN}` and slots beside a pattern, none of both without"
        raise SpecError("bad spec", whom, found, expected)
    return "\n".join(base.spec.pattern[0] if line.strip() == BETWEEN else line for line in lines)


def _slots(base: FusionEntry, entry: FusionEntry, region: Region) -> FrozenDict[str, Slot]:
    """Which steps of the whole stand at which slot."""
    pattern, whom = entry.patterns[0], f"region {region.name} of {base.name}"
    found = {}
    for name in region.slots:
        if name not in base.tensors:
            raise SpecError("bad spec", whom, f"slot {name!r}", f"one of {', '.join(base.tensors)}")
        made = next((s for s in pattern.steps if name in s.outputs), None)
        if made is None:
            raise SpecError("bad spec", whom, f"nothing computes {name!r}", "a step in front of the slot")
        at = Output(made.index, made.outputs.index(name))
        steps = _before(pattern, at) if name in base.inputs else _behind(pattern, at)
        if not steps:
            raise SpecError("bad spec", whom, f"nothing reads {name!r}", "a step behind the slot")
        reads = dict.fromkeys(o.name for i in steps for o in pattern.steps[i].operands if isinstance(o, Input))
        visible = {where: n for n, where in pattern.outputs.items()}
        made_here = [Output(i, k) for i in steps for k in range(len(pattern.steps[i].outputs))]
        made_here = [at] if name in base.inputs else [at, *made_here]
        writes = [visible[where] for where in made_here if where in visible]
        found[name] = Slot(name, base.tensors[name], name in base.inputs, at, tuple(steps), tuple(reads), tuple(writes))
    return FrozenDict(found)


def _before(pattern: PatternGraph, at: Output) -> list[int]:
    """Steps that a value is computed by, itself included."""
    found: set[int] = set()
    ready = [at.step]
    while ready:
        index = ready.pop()
        if index not in found:
            found.add(index)
            ready += [o.step for o in pattern.steps[index].reads]
    return sorted(found)


def _behind(pattern: PatternGraph, at: Output) -> list[int]:
    """Steps that a value goes into, and those that compute what it meets there."""
    values, found = {at}, set[int]()
    for step in pattern.steps:
        if values & set(step.reads):
            found.add(step.index)
            values |= {Output(step.index, i) for i in range(len(step.outputs))}
    before = set(_before(pattern, at))
    for index in sorted(found, reverse=True):
        for read in pattern.steps[index].reads:
            found |= set(_before(pattern, read)) - before
    return sorted(found)
