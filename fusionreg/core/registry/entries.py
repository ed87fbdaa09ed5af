"""What the registry holds: fusions and kernels ready for use, and a row for every plugin. Floor 3."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field as default
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

from ..errors import ExpressionError, UnknownNameError
from ..expressions import Expression, ExpressionSet
from ..frozen import EMPTY, FrozenDict
from ..pattern.graph import Output, PatternGraph
from ..spec import Case, FusionSpec, KernelSpec, OpSpec
from ..targets import TARGETS, Target, accepts
from ..tensors import TensorType
from .library_calls import LibraryCall


@dataclass(frozen=True)
class PluginRow:
    """A plugin that was imported and registered.

    Attributes:
        name: its entry point's name.
        distribution, version: of the distribution it came with; "" where it came from none.
        module: what the entry point names.
        root: the folder of its package, which its templates are read from; None for a plugin without one.
        prefixes: the first words of fusion names that it owns.
        fusions, kernels, ops: what it registered and validation accepted: names, ``fusion/kernel`` keys, operators.
        summary: first line of the module's docstring.
    """

    name: str
    distribution: str = ""
    version: str = ""
    module: str = ""
    root: Path | None = None
    prefixes: tuple[str, ...] = ()
    fusions: tuple[str, ...] = ()
    kernels: tuple[str, ...] = ()
    ops: tuple[str, ...] = ()
    summary: str = ""


@dataclass(frozen=True)
class PluginFailure:
    """Something of a plugin that is not in the registry, and why.

    Attributes:
        plugin: its entry point's name.
        distribution: the distribution it came with.
        stage: ``discover``, ``import``, ``register``, ``claim``, ``validate``, or the name of the hook that failed.
        reason: one line.
        fusion: the fusion or kernel key concerned; "" when the whole plugin, or its answer to a hook, is lost.
        field: the spec field concerned.
        error: the exception.
    """

    plugin: str
    distribution: str
    stage: str
    reason: str
    fusion: str = ""
    field: str = ""
    error: BaseException | None = default(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        of = f" ({self.distribution})" if self.distribution and self.distribution != self.plugin else ""
        what = f", {self.fusion}" if self.fusion else ""
        return f"plugin {self.plugin}{of}{what}: {self.stage}: {self.reason}"


@dataclass(frozen=True, eq=False)
class KernelEntry:
    """One kernel of a fusion; its expressions are parsed and every name in them is resolved.

    Attributes:
        spec: its spec, ``fusion`` filled in.
        plugin, distribution, version: who ships it.
        root: the folder that its template and what it includes are read from.
        template: the template's path; None of a kernel that calls a library.
        requires, valid: conditions on the problem, and on a combination of params.
        constants: template variables by name; in declared order each may read those before it.
        geometry: ``grid0`` … ``block0`` … ``cluster0`` … ``shared_memory``, ``workspace``.
        estimate: expected seconds, None when the general model is to tell.
        tensor_maps: by name: ``dims0`` …, ``strides0`` …, ``box0`` …, ``swizzle``.
        library: what the kernel calls, where it has no template.
    """

    spec: KernelSpec
    plugin: str
    distribution: str
    version: str
    root: Path
    template: Path | None
    requires: tuple[Expression, ...] = ()
    valid: tuple[Expression, ...] = ()
    constants: ExpressionSet = default(default_factory=lambda: ExpressionSet({}))
    geometry: ExpressionSet = default(default_factory=lambda: ExpressionSet({}))
    estimate: Expression | None = None
    tensor_maps: FrozenDict[str, ExpressionSet] = EMPTY
    library: LibraryCall | None = None

    @property
    def name(self) -> str:
        return self.spec.name

    @cached_property
    def settings(self) -> tuple[FrozenDict[str, Any], ...]:
        """Every combination of its params' values, defaults first, valid or not."""
        params = self.spec.params
        return tuple(FrozenDict(zip(params, values, strict=True)) for values in product(*params.values()))

    @property
    def fusion(self) -> str:
        return str(self.spec.fusion)

    @property
    def key(self) -> str:
        """``fusion/kernel``: unique in a registry."""
        return f"{self.spec.fusion}/{self.spec.name}"

    @property
    def unsimulated(self) -> str:
        """Why the simulator cannot execute it, as half a sentence; "" when it can."""
        why = self.spec.simulator or (f"it calls a library, {self.spec.library}" if self.spec.library else "")
        return f"the simulator cannot execute it: {why}" if why else ""

    @property
    def targets(self) -> tuple[Target, ...]:
        """Every known architecture that it may be built for."""
        return tuple(t for t in TARGETS.values() if any(accepts(d, t) for d in self.spec.targets))

    def __repr__(self) -> str:
        return f"<kernel {self.key} of {self.plugin}>"


@dataclass(frozen=True)
class Slot:
    """Point-wise operators at one tensor of a fusion.

    Attributes:
        name: the tensor: an input that they compute, or an output that they read.
        type: its type in the fusion that has the slot.
        before: whether the operators compute it; else they read it.
        at: where that value is in the pattern.
        steps: the operators, as indices of the pattern's steps.
        inputs: tensors that they read beside it; of an input's slot, instead of it.
        outputs: the tensors that are written: the value itself where it is an output, too, and of an output's slot what
            the operators compute.
    """

    name: str
    type: TensorType
    before: bool
    at: Output
    steps: tuple[int, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class FusionEntry:
    """One fusion, ready to match, plan and call.

    Attributes:
        spec: its spec.
        plugin, distribution, version: who ships it.
        patterns: one parsed pattern per spelling; the first is the reference.
        inputs, outputs: tensor types by name, in declared order.
        constraints: conditions that make the fusion legal.
        kernels: of all plugins, ordered by (plugin, name).
        cases: the spec's own conformance cases, then those of other plugins, ordered by plugin.
        base: the fusion that it was derived from, "" for one that a plugin registered.
        slots: of a derived one, where point-wise operators stand around the pattern of its base.
        members: the fusions that its spec's own regions make: what its point-wise code is proven and measured on.
        ops: the operators that a graph of its patterns may have.
    """

    spec: FusionSpec
    plugin: str
    distribution: str
    version: str
    patterns: tuple[PatternGraph, ...]
    inputs: FrozenDict[str, TensorType]
    outputs: FrozenDict[str, TensorType]
    constraints: tuple[Expression, ...] = ()
    kernels: tuple[KernelEntry, ...] = ()
    cases: tuple[Case, ...] = ()
    base: str = ""
    slots: FrozenDict[str, Slot] = EMPTY
    members: tuple[FusionEntry, ...] = ()
    ops: FrozenDict[str, OpSpec] = EMPTY

    @property
    def name(self) -> str:
        return self.spec.name

    @cached_property
    def tensors(self) -> FrozenDict[str, TensorType]:
        """Inputs, then outputs."""
        return self.inputs | self.outputs

    def in_place(self, name: str) -> tuple[str, ...]:
        """The tensors that stand at a slot and have all of its axes; the tensor of that name where it is none."""
        if name not in self.slots:
            return (name,)
        found, tensors = self.slots[name], self.tensors
        axes = found.type.forms[0].names
        return tuple(n for n in (*found.inputs, *found.outputs) if all(f.names == axes for f in tensors[n].forms))

    @property
    def loose(self) -> tuple[str, ...]:
        """Operands at slots that have several of the axes there, but not all: they may be strided as they like."""
        at = ((n, len(s.type.forms[0].names)) for s in self.slots.values() for n in s.inputs)
        return tuple(dict.fromkeys(n for n, axes in at if 1 < len(self.inputs[n].forms[0].names) < axes))

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """Axis names in order of first appearance."""
        return tuple(dict.fromkeys(a for t in self.tensors.values() for a in t.axes))

    @cached_property
    def derived(self) -> FrozenDict[str, Expression]:
        """Axes that others and attributes tell, by constraints of the form ``axis == expression``: inputs need not."""
        found: dict[str, Expression] = {}
        for text in self.spec.constraints:
            axis, equals, rest = text.partition("==")
            axis = axis.strip()
            if equals and axis in self.axes and axis not in self.spec.attributes and axis not in found:
                try:
                    found[axis] = Expression.parse(rest, whom=f"{self.name} {axis}")
                except ExpressionError:
                    continue  # a comparison that goes on, or a constraint that validation refuses
        return FrozenDict({a: e for a, e in found.items() if not e.predicates})

    def completed(self, axes: Mapping[str, Any], names: Mapping[str, Any] = EMPTY) -> dict[str, Any]:
        """``axes`` with those that are derived from them. ``names``: attributes and choices; attributes that are left
        out have their defaults. A derived axis stays open where one that it depends on is."""
        known = {n: a.default for n, a in self.spec.attributes.items()} if self.derived else {}
        known |= {**names, **axes}
        found = dict(axes)
        for axis, expression in self.derived.items():
            if axis not in found and expression.names <= known.keys():
                found[axis] = known[axis] = expression(known)
        return found

    @property
    def choices(self) -> FrozenDict[str, tuple[str, ...]]:
        """Choice variables and their keys."""
        return self.patterns[0].choices if self.patterns else FrozenDict()

    @property
    def optional(self) -> frozenset[str]:
        """Inputs that may be absent."""
        return self.patterns[0].optional if self.patterns else frozenset()

    def kernel(self, name: str) -> KernelEntry:
        """The kernel of this name; :class:`UnknownNameError` when there is none."""
        for kernel in self.kernels:
            if name in (kernel.name, kernel.key):
                return kernel
        raise UnknownNameError.among(f"kernel of {self.name}", name, [k.name for k in self.kernels])

    def __repr__(self) -> str:
        return f"<fusion {self.name} of {self.plugin}: {', '.join(k.name for k in self.kernels) or 'no kernels'}>"


def row_of(row: PluginRow | PluginFailure) -> Mapping[str, Any]:
    """A row as ``fusionreg plugins --json`` prints it."""
    if isinstance(row, PluginRow):
        facts = {"status": "loaded", "fusions": list(row.fusions), "kernels": list(row.kernels), "ops": list(row.ops)}
        return {"name": row.name, "distribution": row.distribution, "version": row.version, **facts, "reason": ""}
    where = " ".join(filter(None, (row.stage, row.fusion, row.field)))
    facts = {"status": "failed", "fusions": [], "kernels": [], "ops": []}
    return {
        "name": row.plugin,
        "distribution": row.distribution,
        "version": "",
        **facts,
        "reason": f"{where}: {row.reason}",
    }
