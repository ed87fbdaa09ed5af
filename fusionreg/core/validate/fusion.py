"""Everything that must hold of a FusionSpec before it is loaded. Floor 3."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from math import inf, isfinite
from typing import Any

from ..dtypes import DTYPES
from ..errors import SpecError, UnknownNameError
from ..frozen import EMPTY, FrozenDict
from ..pattern.instantiate import AttributeName, PatternGraph, parse_pattern
from ..registry.entries import FusionEntry
from ..spec import REQUIRED, FusionSpec, OpSpec
from ..tensors import TensorType, folded_axis
from .cases import check_case, check_workload
from .names import Problems, check_names
from .scopes import fusion_scope, never, of_type

#: Units of the last place that a tolerance may displace inputs by: more would forgive a wrong approximation.
MOST_DISPLACED = 16.0
#: Absolute error that a tolerance may allow: far below values of natural size.
MOST_ABSOLUTE = 1e-6
_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")


def check_fusion(
    spec: FusionSpec,
    ops: Mapping[str, OpSpec],
    plugin: str,
    distribution: str = "",
    version: str = "",
    inside: Mapping[str, tuple[str, ...]] = EMPTY,
) -> tuple[FusionEntry | None, list[SpecError]]:
    """The entry (without kernels), or None with everything that is wrong.

    ``inside``: dtype variables of the fusion that it is derived from: no tensor need have them, since interior values
    may, and conditions may compare them with whatever they can be there.
    """
    problems = Problems(plugin, spec.name)
    if spec.open:
        _check_open(problems, spec)
        entry = FusionEntry(spec, plugin, distribution, version, (), FrozenDict(), FrozenDict())
        return (None if problems.found else entry), problems.found
    for i, region in enumerate(spec.regions):
        if not region.slots:
            problems.add(f"regions[{i}]", "it has no slots", "what a region stands at, beside a pattern")
    inputs = _tensors(problems, "inputs", spec.inputs)
    outputs = _tensors(problems, "outputs", spec.outputs)
    patterns = _patterns(problems, spec, ops)
    if problems.found:
        return None, problems.found
    entry = FusionEntry(spec, plugin, distribution, version, patterns, inputs, outputs)
    _check_tensors(problems, entry, inside)
    _check_attributes(problems, entry, ops)
    _check_spellings(problems, entry)
    kinds = {
        "inputs": tuple(spec.inputs), "outputs": tuple(spec.outputs), "dtypes": tuple(spec.dtypes), "axes": entry.axes,
        "attributes": tuple(spec.attributes),
        "pattern": (*entry.choices, *(f"{c}_{k}" for c, keys in entry.choices.items() for k in keys)),
    }  # fmt: skip
    check_names(problems, kinds, shared=frozenset(_sized(spec)) & frozenset(entry.axes))
    for axis, extent in spec.extents.items():
        if axis not in entry.axes or extent < 1:
            problems.add("extents", f"{axis} = {extent}", f"a positive extent of {', '.join(entry.axes)}")
    for name, size in spec.sizes.items():
        if name not in inputs or not 0 < size < inf:
            problems.add("sizes", f"{name} = {size}", f"a positive number for one of {', '.join(inputs)}")
    for output, like in spec.layouts.items():
        if like not in inputs or _ranks(inputs[like]) != _ranks(outputs.get(output)):
            problems.add("layouts", f"{output} like {like}", "an output, and an input of its rank")
    for output, place in spec.aliases.items():
        if place not in inputs or spec.inputs[place] != spec.outputs.get(output):
            problems.add("aliases", f"{output} in {place}", "an output, and an input of its type")
    scope = fusion_scope(entry)
    scope = replace(scope, words={**scope.words, **inside})
    parsed = [problems.expression(f"constraints[{i}]", text, scope) for i, text in enumerate(spec.constraints)]
    constraints = tuple(c for c in parsed if c is not None)
    if not problems.found:
        wrong = never(spec.constraints, entry)
        if wrong:
            at = f"constraints[{spec.constraints.index(wrong)}]"
            problems.add(at, f"{wrong!r} holds for no problem", "a condition that can be met")
        for i, case in enumerate(spec.cases):
            check_case(problems, f"cases[{i}]", case, entry)
        if len({c.name for c in spec.cases}) < len(spec.cases):
            problems.add("cases", "two cases have one name", "unique names")
        for i, workload in enumerate(spec.workloads):
            check_workload(problems, f"workloads[{i}]", workload, entry)
        if len({w.name for w in spec.workloads}) < len(spec.workloads):
            problems.add("workloads", "two workloads have one name", "unique names")
        _check_tolerances(problems, entry)
    if problems.found:
        return None, problems.found
    used = dict.fromkeys(name for p in patterns for step in p.steps for name in step.ops) | {"Identity": None}
    done = FusionEntry(
        spec, plugin, distribution, version, patterns, inputs, outputs, constraints, (), spec.cases,
        ops=FrozenDict({name: ops[name] for name in used}),
    )  # fmt: skip
    return done, []


def _check_open(problems: Problems, spec: FusionSpec) -> None:
    """An open fusion has no tensors of its own; its regions, each validated as the fusion it makes, have."""
    for field in (
        "inputs", "outputs", "dtypes", "axes", "attributes", "constraints", "backward", "cases", "tolerances",
        "workloads",
    ):
        if getattr(spec, field):
            problems.add(field, "an open fusion has some", "none: each region states its own")
    names = [r.name for r in spec.regions]
    if not names:
        problems.add("regions", "it is empty", "at least one program to prove its kernels on")
    if len(set(names)) < len(names):
        problems.add("regions", "two regions have one name", "unique names")


# --- parts -----------------------------------------------------------------------------------------------------


def _tensors(problems: Problems, at: str, texts: Mapping[str, str]) -> FrozenDict[str, TensorType]:
    if not texts:
        problems.add(at, "it is empty", "at least one tensor")
    parsed = {n: problems.attempt(f"{at}.{n}", partial(TensorType.parse, t)) for n, t in texts.items()}
    return FrozenDict({n: t for n, t in parsed.items() if t is not None})


def _patterns(problems: Problems, spec: FusionSpec, ops: Mapping[str, OpSpec]) -> tuple[PatternGraph, ...]:
    if not spec.pattern:
        problems.add("pattern", "it is empty", "at least one spelling")
    found = []
    for i, text in enumerate(spec.pattern):
        at = f"pattern[{i}]" if len(spec.pattern) > 1 else "pattern"
        found.append(problems.attempt(at, partial(parse_pattern, text, ops, spec.name, tuple(spec.outputs))))
    return tuple(p for p in found if p is not None)


def _check_tensors(problems: Problems, entry: FusionEntry, inside: Collection[str]) -> None:
    spec = entry.spec
    for field, tensors in (("inputs", entry.inputs), ("outputs", entry.outputs)):
        for name, kind in tensors.items():
            if kind.dtype not in spec.dtypes and kind.dtype not in DTYPES:
                hint = UnknownNameError.among("dtype", kind.dtype, [*spec.dtypes, *DTYPES]).expected
                problems.add(f"{field}.{name}", f"dtype {kind.dtype!r} is not declared", hint)
    for name, choices in spec.dtypes.items():
        if name in DTYPES:
            problems.add(f"dtypes.{name}", "a variable with the name of a dtype", "another name")
        if not choices or len(set(choices)) < len(choices):
            problems.add(f"dtypes.{name}", f"{choices}", "at least one dtype, none twice")
        for choice in choices:
            if choice not in DTYPES or choice == "string":
                hint = UnknownNameError.among("dtype", choice, set(DTYPES) - {"string"}).expected
                problems.add(f"dtypes.{name}", f"unknown dtype {choice!r}", hint)
        if name not in inside and all(t.dtype != name for t in entry.tensors.values()):
            problems.add(f"dtypes.{name}", "no tensor has it", "every dtype variable used, or left out")
    problems.attempt("inputs", lambda: folded_axis(entry.tensors))
    told = {a for t in entry.inputs.values() for a in t.axes} | {*_sized(spec), *entry.derived}
    for name, kind in entry.outputs.items():
        open_axes = sorted(set(kind.axes) - told)
        if open_axes:
            problems.add(
                f"outputs.{name}",
                f"no input tells axis {', '.join(open_axes)}",
                "an axis of an input, an int attribute, or a constraint `axis == …`",
            )
        if kind.space != "device":
            problems.add(f"outputs.{name}", f"memory space {kind.space}", "device: only inputs may live elsewhere")
    for name in spec.axes:
        if name not in entry.axes:
            problems.add(f"axes.{name}", "no tensor has it", UnknownNameError.among("axis", name, entry.axes).expected)


def _sized(spec: FusionSpec) -> list[str]:
    """Attributes that may give an extent."""
    return [n for n, a in spec.attributes.items() if a.type == "int"]


def _ranks(type_: TensorType | None) -> list[tuple[int, bool]] | None:
    """Numbers of axes of a tensor's forms, and whether they fold others: tensors alike in these may have one shape."""
    return None if type_ is None else [(len(f.axes), f.leading) for f in type_.forms]


def _check_attributes(problems: Problems, entry: FusionEntry, ops: Mapping[str, OpSpec]) -> None:
    bound = frozenset().union(*(p.attributes for p in entry.patterns))
    for name in sorted(bound - set(entry.spec.attributes) - set(entry.spec.dtypes)):  # Cast(x, to=T)
        hint = UnknownNameError.among("attribute", name, entry.spec.attributes).expected
        problems.add("pattern", f"{name!r} is bound but not declared", f"attributes.{name}, or a literal ({hint})")
    for name, spec in entry.spec.attributes.items():
        at = f"attributes.{name}"
        if name not in bound and name not in entry.axes:
            problems.add(at, "no pattern binds it", "every attribute bound: Op(…, attribute=name)")
        if spec.type == "str" and not spec.static:
            problems.add(at, "a str that is not static", "static=True: text cannot be passed at launch")
        if spec.type == "str" and not (spec.choices and all(_WORD.match(str(c)) for c in spec.choices)):
            problems.add(
                at, f"a str with choices {spec.choices}", "the words it may be: letters, digits and underscores"
            )
        if len(set(spec.choices)) < len(spec.choices):
            problems.add(at, "a choice stands twice", "different choices")
        for value in (*spec.choices, *(() if spec.default is None else (spec.default,))):
            if not of_type(value, spec):
                problems.add(at, f"{value!r} is no {spec.type}", f"values of type {spec.type}, and no NaN")
        if spec.default is not None and spec.choices and spec.default not in spec.choices:
            problems.add(at, f"default {spec.default!r}", f"one of its choices {spec.choices}")
    for pattern in entry.patterns:
        for step in pattern.steps:
            for alternative in step.alternatives:
                _check_bound(problems, alternative.op, alternative.attributes, entry.spec, ops)


def _check_bound(problems: Problems, op: str, attributes: Mapping[str, Any], spec: FusionSpec, ops: Any) -> None:
    for name, value in attributes.items():
        default = ops[op].attributes[name]
        if default is None or default == REQUIRED:
            continue
        declared = spec.attributes.get(value.name) if isinstance(value, AttributeName) else None
        kind = declared.type if declared else type(value).__name__
        kinds = {type(default).__name__, *(("int",) if isinstance(default, float | bool) else ())}
        if (declared or not isinstance(value, AttributeName)) and kind not in kinds:
            problems.add(
                "pattern", f"{op} attribute {name!r} gets a {kind}", f"a {type(default).__name__}, like {default!r}"
            )


def _check_spellings(problems: Problems, entry: FusionEntry) -> None:
    first, spec = entry.patterns[0], entry.spec
    for i, pattern in enumerate(entry.patterns):
        at = f"pattern[{i}]" if len(entry.patterns) > 1 else "pattern"
        for name in pattern.inputs:
            if name not in spec.inputs:
                hint = UnknownNameError.among("input", name, spec.inputs).expected
                problems.add(at, f"{name!r} is read but neither assigned nor declared", f"an input ({hint})")
        for name in spec.inputs:
            if name not in pattern.inputs and (i == 0 or name not in first.optional):
                problems.add(f"inputs.{name}", f"{at} does not read it", "every input read")
        for name in sorted(pattern.optional - first.optional):
            problems.add(at, f"{name!r} may be absent here", "an input that the first spelling may leave out too")
        for name, keys in pattern.choices.items():
            if not set(keys) <= set(first.choices.get(name, ())):
                problems.add(
                    at,
                    f"choice {name!r} with keys {keys}",
                    f"keys of the first spelling: {first.choices.get(name, ())}",
                )
        for name in first.choices:
            if name not in pattern.choices:
                problems.add(at, f"choice {name!r} is not made", f'any_of(…, "{name}") in every spelling')
        for name in sorted(set(spec.attributes) - pattern.attributes - set(entry.axes)):
            if spec.attributes[name].default is None and name in frozenset().union(
                *(p.attributes for p in entry.patterns)
            ):
                problems.add(at, f"attribute {name!r} is not bound", "a default, or a binding in every spelling")
    texts = ["\n".join(map(str, p.steps)) for p in entry.patterns]
    if len(set(texts)) < len(texts):
        problems.add("pattern", "two spellings are the same", "different spellings")


def _check_tolerances(problems: Problems, entry: FusionEntry) -> None:
    spec = entry.spec
    possible = {d for t in entry.outputs.values() for d in spec.dtypes.get(t.dtype, (t.dtype,))}
    for i, tolerance in enumerate(spec.tolerances):
        at = f"tolerances[{i}]"
        if tolerance.dtype not in possible:
            problems.add(at, f"no output is {tolerance.dtype!r}", f"one of {', '.join(sorted(possible))}")
        if not isfinite(tolerance.ulp) or tolerance.ulp < 0 or tolerance.ulp == tolerance.absolute == 0:
            problems.add(at, f"ulp = {tolerance.ulp}", "a positive number")
        if not 0 <= tolerance.absolute <= MOST_ABSOLUTE:
            problems.add(at, f"absolute = {tolerance.absolute}", f"a number from 0 to {MOST_ABSOLUTE}")
        if not 0 <= tolerance.inputs <= MOST_DISPLACED:
            problems.add(at, f"inputs = {tolerance.inputs}", f"a number from 0 to {MOST_DISPLACED}")
        if not tolerance.reason.strip():
            problems.add(at, "no reason", "why the general rule cannot hold")
    if len({t.dtype for t in spec.tolerances}) < len(spec.tolerances):
        problems.add("tolerances", "a dtype stands twice", "one per dtype")
