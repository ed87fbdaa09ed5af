"""Whether a fusion's pattern can have the types that its spec declares. Floor 3."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

from ..errors import ArgumentError, ExpressionError, GraphError, SpecError
from ..expressions import Expression
from ..frozen import EMPTY, FrozenDict
from ..ops import Vocabulary
from ..pattern.instantiate import PatternGraph, instantiate
from ..registry.entries import FusionEntry
from ..spec import AttributeSpec
from ..tensors import Form, Shape, expand, folded_axis

#: Extents for axes: all different, so that a swapped axis shows, and divisible by what conditions like to ask for.
EXTENTS = tuple(64 * p for p in (3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47))
LEADING = (2, 3)


@dataclass(frozen=True, slots=True)
class _Site:
    """One way to use a fusion: everything but dtypes."""

    choices: dict[str, str]
    attributes: dict[str, Any]
    absent: tuple[str, ...]
    forms: dict[str, Form]
    axes: dict[str, int]
    leading: tuple[int, ...]
    folds: str

    def shapes(self) -> dict[str, Shape]:
        return {n: expand(f, self.axes, self.leading) for n, f in self.forms.items()}

    @property
    def spelling(self) -> tuple[object, ...]:
        """What decides which operators there are, and their dtypes: everything but shapes."""
        return self.absent, tuple(self.choices.values()), tuple(self.attributes.values())

    def meets(self, entry: FusionEntry, constraints: Sequence[Expression], dtypes: Mapping[str, str] = EMPTY) -> bool:
        """Whether the constraints hold; one that cannot be evaluated does not."""
        if not constraints:
            return True
        folded = {**self.axes}
        if self.leading:
            folded[self.folds] *= prod(self.leading)
        shapes = {n: expand(f, folded) for n, f in self.forms.items()}
        numbers = {n: entry.inputs[n].forms.index(f) for n, f in self.forms.items()}
        env: dict[str, Any] = {
            **self.attributes, **self.choices, **dtypes, **folded,
            "present": lambda n: n in shapes, "rank": lambda n: len(shapes[n]), "form": lambda n: numbers.get(n, -1),
            "shape": lambda n, i: shapes[n][i],
        }  # fmt: skip
        try:
            return all(constraint(env) for constraint in constraints)
        except ExpressionError:
            return False


def check_reference(entry: FusionEntry, ops: Vocabulary) -> list[SpecError]:
    """Inferred dtypes and shapes against the declared ones; an error for each output and spelling that differs.

    Every spelling is instantiated for every combination of tensor forms, choices, attribute choices and presence of
    optional inputs that meets the constraints with some dtypes; and for every combination of all of these but forms
    with dtypes, as no dtype follows from a shape. Combinations that inference refuses are no error as long as each
    dtype has one that it accepts; nor are spellings that give other dtypes as long as each has one that gives it. An
    extent that inference leaves open is not compared.
    """
    errors: dict[str, SpecError] = {}
    others_given: dict[tuple[str, ...], SpecError] = {}
    given: set[tuple[str, ...]] = set()
    of_dtypes = [c for c in entry.constraints if c.names & entry.spec.dtypes.keys()]
    others = [c for c in entry.constraints if not c.names & entry.spec.dtypes.keys()]
    for i, pattern in enumerate(entry.patterns):
        at = f"pattern[{i}]" if len(entry.patterns) > 1 else "pattern"
        sites = [site for site in _sites(entry, pattern) if site.meets(entry, others)]
        tried: set[int] = set()
        for kinds in product(*entry.spec.dtypes.values()):
            dtypes = dict(zip(entry.spec.dtypes, kinds, strict=True))
            shown = ", ".join(f"{k} = {v}" for k, v in dtypes.items())
            worked: set[tuple[object, ...]] = set()
            refused = ""
            for number, site in enumerate(sites):
                if (number in tried and site.spelling in worked) or not site.meets(entry, of_dtypes, dtypes):
                    continue
                tried.add(number)
                try:
                    graph = instantiate(
                        pattern, entry.spec, dtypes=dtypes, shapes=site.shapes(), ops=ops, choices=site.choices,
                        attributes=site.attributes, absent=site.absent,
                    )  # fmt: skip
                except ArgumentError:
                    continue  # choices that contradict the absent inputs, shapes that only another form fits
                except GraphError as problem:
                    refused = refused or str(problem)
                    continue
                worked.add(site.spelling)
                for name, kind in entry.outputs.items():
                    value, declared = graph.values[name], dtypes.get(kind.dtype, kind.dtype)
                    fits = any(_agrees(value.shape, form, site) for form in kind.forms)
                    if value.dtype == declared and fits:
                        given |= {(at, name), (shown, name)}
                        continue
                    found = f"{at} gives {value} with {shown} and {site.axes}"
                    error = _error(entry, f"outputs.{name}", found, f"{declared}, {kind}")
                    if fits:
                        others_given.setdefault((at, name), error)
                        others_given.setdefault((shown, name), error)
                    else:
                        errors.setdefault(f"{at} {name}", error)
            if refused and not worked:
                errors.setdefault(
                    f"{at} {shown}", _error(entry, at, f"with {shown}: {refused}", "a pattern that infers")
                )
    for (of, name), error in others_given.items():
        if (of, name) not in given:
            errors.setdefault(f"{of} {name}", error)
    return list(dict.fromkeys(errors.values()))


def _sites(entry: FusionEntry, pattern: PatternGraph) -> Iterator[_Site]:
    attributes = {n: _examples(a) for n, a in entry.spec.attributes.items()}
    folds = folded_axis(entry.tensors)
    chosen = [dict(zip(attributes, values, strict=True)) for values in product(*attributes.values())]
    settings = [(c, _extents(entry, c)) for c in chosen]
    for absent in dict.fromkeys(((), tuple(sorted(pattern.optional)))):
        present = {n: t for n, t in entry.inputs.items() if n in pattern.inputs and n not in absent}
        for forms in product(*(t.forms for t in present.values())):
            named = dict(zip(present, forms, strict=True))
            batched = bool(folds) and all(f.leading or folds not in f.names for f in forms)
            for keys in product(*pattern.choices.values()):
                choices = dict(zip(pattern.choices, keys, strict=True))
                for values, axes in settings:
                    yield _Site(choices, values, absent, named, axes, LEADING if batched else (), folds)


def _examples(attribute: AttributeSpec) -> tuple[Any, ...]:
    if attribute.choices:
        return attribute.choices
    if attribute.type == "bool":
        return (False, True)
    return ({"int": 1, "float": 1.0, "str": ""}[attribute.type] if attribute.default is None else attribute.default,)


def _extents(entry: FusionEntry, attributes: Mapping[str, Any]) -> dict[str, int]:
    """Extents that meet every constraint of the form ``axis == expression``, where there are such."""
    axes: dict[str, int] = {a: EXTENTS[i % len(EXTENTS)] for i, a in enumerate(entry.axes)}
    if entry.derived:  # windows that are short beside what they slide over
        axes |= entry.spec.extents
    axes |= {n: v for n, v in attributes.items() if n in axes}
    for constraint in entry.constraints:
        tree = ast.parse(constraint.text, mode="eval").body
        if isinstance(tree, ast.Compare) and len(tree.ops) == 1 and isinstance(tree.ops[0], ast.Eq):
            for side, other in ((tree.left, tree.comparators[0]), (tree.comparators[0], tree.left)):
                if isinstance(side, ast.Name) and side.id in axes and side.id not in attributes:
                    try:
                        value = constraint.parse(ast.unparse(other))({**axes, **attributes})
                    except ExpressionError:
                        continue
                    if type(value) is int and value >= 0:
                        axes[side.id] = value
                        break
    return axes


def _agrees(found: Shape | None, form: Form, site: _Site) -> bool:
    if found is None:
        return True
    try:
        declared = expand(form, FrozenDict(site.axes), site.leading)
    except KeyError:
        return False
    return len(found) == len(declared) and all(
        f == d or isinstance(f, str) for f, d in zip(found, declared, strict=True)
    )


def _error(entry: FusionEntry, at: str, found: str, expected: str) -> SpecError:
    facts = {"plugin": entry.plugin, "fusion": entry.name, "kernel": "", "field": at}
    return SpecError("bad spec", f"{entry.name} of plugin {entry.plugin}, {at}", found, expected, **facts)
