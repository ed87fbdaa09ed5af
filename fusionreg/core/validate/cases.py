"""Everything that must hold of a fusion's conformance cases and workloads. Floor 3."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from ..errors import SpecError, UnknownNameError
from ..intervals import conditions
from ..registry.entries import FusionEntry
from ..spec import Case
from ..tensors import TensorType, folded_axis
from ..workload import GOAL_NAMES, WHOLE_NUMBERS, Workload
from .names import Problems, Scope
from .scopes import environments, of_type


def check_case(problems: Problems, at: str, case: Case, entry: FusionEntry) -> None:
    """Notes what in a conformance case does not fit the fusion."""
    known = {"values": tuple(entry.spec.inputs), "layouts": tuple(entry.spec.inputs)}
    _check_problem(problems, at, case, known, entry)


def check_workload(problems: Problems, at: str, workload: Workload, entry: FusionEntry) -> None:
    """Notes what in a workload does not fit the fusion, and what it leaves open: one problem is one shape and dtype."""
    spec = entry.spec
    known = {"dtypes": tuple(spec.dtypes), **dict.fromkeys(("forms", "layouts", "values"), tuple(spec.inputs))}
    _check_problem(problems, at, workload, known, entry)
    for field, names in (("axes", entry.axes), ("dtypes", tuple(spec.dtypes))):
        told = {*getattr(workload, field), *spec.attributes, *entry.derived}
        missing = [n for n in names if n not in told]
        if missing:
            problems.add(f"{at}.{field}", f"nothing for {', '.join(missing)}", "one for each")
    for name, word in workload.dtypes.items():
        if name in spec.dtypes and word not in spec.dtypes[name]:
            problems.add(f"{at}.dtypes", f"{name} = {word!r}", f"one of {', '.join(spec.dtypes[name])}")
    for name, text in workload.forms.items():
        if name in entry.inputs and form_index(entry.inputs[name], text) is None:
            problems.add(f"{at}.forms", f"{name} is {text!r}", f"one form of {entry.inputs[name]}")
    for name, text in workload.values.items():
        word, _, number = text.partition(" ")
        if word not in WHOLE_NUMBERS:
            problems.add(f"{at}.values", f"{name} is {text!r}", f"a number behind one of {', '.join(WHOLE_NUMBERS)}")
        else:
            problems.expression(f"{at}.values", number, Scope(frozenset(workload.axes), predicates=frozenset()))
    if workload.goal:
        problems.expression(f"{at}.goal", workload.goal, Scope(frozenset(GOAL_NAMES), predicates=frozenset()))
    for name, text in workload.products.items():
        x, at_sign, w = (part.strip() for part in text.partition("@"))
        if name not in entry.inputs or x not in entry.inputs or not (at_sign and w.isidentifier()) or w in entry.inputs:
            problems.add(f"{at}.products", f"{name} = {text!r}", "an input = another input @ the name of a weight")


def form_index(kind: TensorType, text: str) -> int | None:
    """Which form of a tensor a text such as ``T[N]`` names; None when it names none."""
    try:
        wanted = TensorType.parse(text)
    except SpecError:
        return None
    if wanted.dtype != kind.dtype or len(wanted.forms) > 1 or wanted.forms[0] not in kind.forms:
        return None
    return kind.forms.index(wanted.forms[0])


def _check_problem(
    problems: Problems, at: str, case: Case | Workload, further: Mapping[str, tuple[str, ...]], entry: FusionEntry
) -> None:
    """What cases and workloads have in common: axes, attributes and choices, absent inputs, leading extents."""
    spec = entry.spec
    known = {"axes": entry.axes, "attributes": (*spec.attributes, *entry.choices), **further}
    for field, names in known.items():
        for name in getattr(case, field):
            if name not in names:
                hint = UnknownNameError.among(field, name, names).expected
                problems.add(f"{at}.{field}", f"unknown {name!r}", hint)
    for name in case.absent:
        if name not in entry.optional:
            expected = ", ".join(sorted(entry.optional)) or "none is"
            problems.add(f"{at}.absent", f"{name!r} is not optional", f"one of the optional inputs: {expected}")
    for axis in [a for a, extent in case.axes.items() if extent < 0]:
        problems.add(f"{at}.axes", f"{axis} = {case.axes[axis]}", "an extent of 0 or more")
    for name, value in case.attributes.items():
        keys = entry.choices.get(name)
        attribute = spec.attributes.get(name)
        if keys is not None and value not in keys:
            problems.add(f"{at}.attributes", f"{name} = {value!r}", f"one of {', '.join(keys)}")
        if attribute and not (of_type(value, attribute) and (not attribute.choices or value in attribute.choices)):
            allowed = f"one of {attribute.choices}" if attribute.choices else f"a value of type {attribute.type}"
            problems.add(f"{at}.attributes", f"{name} = {value!r}", allowed)
    if case.batch and not any(t.leading for t in entry.tensors.values()):
        problems.add(f"{at}.batch", f"{case.batch}", "no batch: no tensor has `...`")
    if min(case.batch, default=0) < 0:
        problems.add(f"{at}.batch", f"{case.batch}", "extents of 0 or more")
    if not problems.found:
        fixed: dict[str, Any] = {**case.axes, **case.attributes}
        folds = folded_axis(entry.tensors)
        if folds in fixed:  # conditions see the axis with the leading extents folded in
            fixed[folds] *= prod(case.batch)
        constraints = conditions(spec.constraints)
        wrong = ""
        for env in environments(entry, constraints.names):
            found = constraints.impossible({**env, **fixed})
            if found is None:
                return
            wrong = wrong or found
        if wrong:
            problems.add(at, f"the constraint {wrong!r} does not hold", "what the fusion accepts")
