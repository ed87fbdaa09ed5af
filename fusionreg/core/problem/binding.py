"""From a call's tensors and keywords to a :class:`Problem`, or to a :class:`MisfitError` that says what is wrong."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from numbers import Number
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import targets
from .. import tensors as tensor_texts
from ..errors import ArgumentError, ExpressionError, MisfitError, UnknownNameError
from ..frozen import FrozenDict
from ..spec import AttributeSpec
from ..tensors import Form, TensorType
from .types import Problem, Tensor, in_order

if TYPE_CHECKING:
    from ..registry.catalog import FusionEntry

NONE = "none"


def bind(
    entry: FusionEntry,
    tensors: Mapping[str, Tensor | None],
    attributes: Mapping[str, Any],
    target: str,
    multiprocessors: int | None = None,
) -> Problem:
    """The problem of one call.

    Args:
        entry: the fusion.
        tensors: input name → tensor as the caller has it; absent ones are missing or None. Outputs may be given too
            (their layout, when the caller brings them); the others are fully aligned, and contiguous or, by the
            spec's ``layouts``, in the order of an input.
        attributes: attributes and choices by name; what has a default may be left out.
        target: architecture by name.
        multiprocessors: of the device that it is for; None is the usual part of ``target``.

    Raises: :class:`MisfitError` with ``facts`` fusion and, where it applies, tensor or attribute.
    """
    seen = _look(entry, tensors, attributes)
    given, bound = seen.given, seen.bound
    axes: dict[str, int] = {k: int(v) for k, v in bound.axes.items()}
    leading = tuple(int(d) for d in bound.leading)
    all_tensors: dict[str, Tensor | None] = {
        name: given[name].folded(bound.forms[name]) if name in given else None for name in entry.inputs
    }
    forms = {name: entry.inputs[name].forms.index(form) for name, form in bound.forms.items()}
    shapes: dict[str, tuple[int, ...]] = {}
    strides: dict[str, tuple[int, ...]] = {}
    for name, type_ in entry.outputs.items():
        form, expected = seen.output(entry, name)
        forms[name], shapes[name] = type_.forms.index(form), expected.shape
        output = _brought(entry, name, given.get(name), expected) or expected.laid_out()
        if not output.is_contiguous:
            strides[name] = output.strides
        all_tensors[name] = output.folded(form)
    if bound.folds:
        axes[bound.folds] *= prod(leading)
    problem = Problem(
        fusion=entry.spec.name, dtypes=FrozenDict(seen.dtypes), axes=FrozenDict(axes), leading=leading,
        attributes=FrozenDict(seen.values), choices=FrozenDict(seen.choices), tensors=FrozenDict(all_tensors),
        forms=FrozenDict(forms), shapes=FrozenDict(shapes), inputs=len(entry.inputs), target=target,
        multiprocessors=targets.target(target).multiprocessors if multiprocessors is None else multiprocessors,
        strides=FrozenDict(strides), slots=FrozenDict({n: (*s.inputs, *s.outputs) for n, s in entry.slots.items()}),
        whole=FrozenDict({n: entry.in_place(n) for n in entry.slots}), loose=entry.loose,
    )  # fmt: skip
    _check_constraints(entry, problem)
    return problem


class Outline(NamedTuple):
    """An output as a call allocates it; ``strides``: None where it is row-major."""

    dtype: str
    shape: tuple[Any, ...]
    strides: tuple[Any, ...] | None

    def laid_out(self) -> Tensor:
        made = Tensor.contiguous(self.dtype, self.shape)
        return made if self.strides is None else replace(made, strides=self.strides)


def outlines(
    entry: FusionEntry, tensors: Mapping[str, Tensor | None], attributes: Mapping[str, Any]
) -> dict[str, Outline]:
    """The outputs of a call, by name, as :func:`bind` has them; the constraints are not looked at.

    Extents and strides may be any numbers that can be multiplied and compared: what a tracer has instead of numbers is
    asked no more than is needed to see that the shapes fit.
    """
    seen = _look(entry, tensors, attributes)
    return {name: seen.output(entry, name)[1] for name in entry.outputs}


@dataclass(frozen=True, slots=True)
class _Seen:
    """A call whose tensors and keywords fit the fusion; extents are as they came."""

    given: Mapping[str, Tensor]
    values: Mapping[str, Any]
    choices: Mapping[str, str]
    dtypes: Mapping[str, str]
    bound: tensor_texts.Bound

    def output(self, entry: FusionEntry, name: str) -> tuple[Form, Outline]:
        """The form that an output takes, and what is allocated for it."""
        axes: dict[str, Any] = {k: v for k, v in self.values.items() if type(v) is int}
        axes |= self.bound.axes
        leading, type_ = self.bound.leading, entry.outputs[name]
        form = _output_form(entry, name, type_, axes, self.bound.folds, leading)
        shape = tensor_texts.expand(form, axes, leading)
        like = self.given.get(entry.spec.layouts.get(name, ""))
        kept = like is not None and len(like.shape) == len(shape) and like.is_dense and not like.is_contiguous
        dtype = self.dtypes.get(type_.dtype, type_.dtype)
        if like is None or not kept:
            return form, Outline(dtype, shape, None)
        return form, Outline(dtype, shape, like.strides if like.shape == shape else in_order(like, shape))


def _look(entry: FusionEntry, tensors: Mapping[str, Tensor | None], attributes: Mapping[str, Any]) -> _Seen:
    given = {name: t for name, t in tensors.items() if t is not None}
    _check_names(entry, given, attributes)
    values, choices = _keywords(entry, given, attributes)
    dtypes = _dtypes(entry, given, attributes)
    try:
        bound = tensor_texts.bind(entry.inputs, {name: t.shape for name, t in given.items() if name in entry.inputs})
    except ArgumentError as e:
        name = str(e.facts["tensor"])
        raise _wrong(entry, f"{name} has shape {e.found}", e.expected, tensor=name, shape=e.facts["shape"]) from None
    if entry.derived:
        bound = replace(bound, axes=FrozenDict(entry.completed(bound.axes, {**values, **choices})))
    axes = bound.axes
    clash = next((k for k, v in values.items() if k in axes and type(v) is int and v != axes[k]), None)
    if clash:
        raise _wrong(entry, f"{clash} = {axes[clash]} by the inputs' shapes", f"{clash} = {values[clash]} as passed")
    return _Seen(given, values, choices, dtypes, bound)


def _wrong(entry: FusionEntry, found: str, expected: str = "", next_step: str = "", **facts: object) -> MisfitError:
    return MisfitError(
        "cannot call", entry.spec.name, found, expected, next_step, **{"fusion": entry.spec.name, **facts}
    )


def _check_names(entry: FusionEntry, given: Mapping[str, Tensor], keywords: Mapping[str, Any]) -> None:
    named = {*entry.spec.attributes, *entry.patterns[0].choices, *entry.spec.dtypes}
    for name in keywords:
        if name in entry.inputs and name not in named:
            raise _wrong(
                entry, f"{name} is passed by keyword", f"arrays by position: {', '.join(entry.inputs)}", tensor=name
            )
    for name in given:
        if name not in entry.inputs and name not in entry.outputs:
            known = UnknownNameError.among("tensor", name, [*entry.inputs, *entry.outputs])
            raise _wrong(entry, f"unknown tensor {name!r}", known.expected, tensor=name)
    optional = entry.patterns[0].optional
    for name in entry.inputs:
        if name not in given and name not in optional:
            raise _wrong(entry, f"{name} is missing", f"an array ({entry.inputs[name]})", tensor=name)


def _dtypes(entry: FusionEntry, given: Mapping[str, Tensor], keywords: Mapping[str, Any]) -> dict[str, str]:
    """Dtype variables by the tensors; those that no tensor tells may be passed by name, or have one possible value."""
    dtypes: dict[str, str] = {}
    source: dict[str, str] = {}
    types = {**entry.inputs, **entry.outputs}
    for name in [n for n in types if n in given]:
        variable, found = types[name].dtype, given[name].dtype
        if variable not in entry.spec.dtypes:
            if found != variable:
                raise _wrong(entry, f"{name} is {found}", variable, tensor=name)
        elif dtypes.setdefault(variable, found) != found:
            first = source[variable]
            raise _wrong(entry, f"{name} is {found}", f"{dtypes[variable]}, as {first} is ({variable})", tensor=name)
        elif found not in entry.spec.dtypes[variable]:
            raise _wrong(entry, f"{name} is {found}", " or ".join(entry.spec.dtypes[variable]), tensor=name)
        source.setdefault(variable, name)
    for variable, allowed in entry.spec.dtypes.items():
        if variable in dtypes:
            continue
        chosen = keywords.get(variable, allowed[0] if len(allowed) == 1 else None)
        if chosen is None and any(types[n].dtype == variable for n in entry.outputs):
            raise _wrong(
                entry, f"dtype {variable} is open", f"{variable}= one of {', '.join(allowed)}", attribute=variable
            )
        if chosen is not None and chosen not in allowed:
            raise _wrong(entry, f"{variable} = {chosen!r}", " or ".join(allowed), attribute=variable)
        if chosen is not None:
            dtypes[variable] = chosen
    return dtypes


def _keywords(
    entry: FusionEntry, given: Mapping[str, Tensor], keywords: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, str]]:
    pattern = entry.patterns[0]
    known = {*entry.spec.attributes, *pattern.choices, *entry.spec.dtypes}
    for name in keywords:
        if name not in known:
            close = UnknownNameError.among("attribute", name, known)
            hint = close.expected if known else "it has none"
            raise _wrong(entry, f"unknown attribute {name!r}", hint, attribute=name)
    values = {name: _value(entry, name, spec, keywords.get(name)) for name, spec in entry.spec.attributes.items()}
    choices: dict[str, str] = {}
    gates = {s.choice: s.gates for s in pattern.steps if s.choice and s.gates}
    for name, keys in pattern.choices.items():
        absent = any(g not in given for g in gates.get(name, ()))
        # an optional step is left out unless asked for; one that a tensor switches on has the tensor's word
        default = NONE if NONE in keys and (absent or name not in gates) else (keys[0] if len(keys) == 1 else None)
        value = keywords.get(name, default)
        if value is None and name in gates and len(keys) == 2 and NONE in keys:
            value = keys[0]
        if value not in keys:
            found = f"{name} is missing" if value is None else f"{name} = {value!r}"
            close = UnknownNameError.among("choice", str(value), keys)
            offer = f" ({close.expected})" if value is not None and close.facts["close"] else ""
            raise _wrong(entry, found, f"one of {', '.join(keys)}{offer}", attribute=name)
        if name in gates and (value == NONE) != absent:
            tensor = gates[name][0]
            state = "is absent" if absent else "is given"
            raise _wrong(
                entry, f"{name} = {value!r} but {tensor} {state}", "both or neither", attribute=name, tensor=tensor
            )
        choices[name] = str(value)
    return values, choices


def _value(entry: FusionEntry, name: str, spec: AttributeSpec, value: Any) -> Any:
    """An attribute's value in its declared type; numbers of NumPy and torch count as what they are."""
    if value is None:
        if spec.default is None:
            raise _wrong(entry, f"attribute {name} is missing", f"a value of type {spec.type}", attribute=name)
        value = spec.default
    converted = _convert(spec.type, value)
    if converted is None:
        raise _wrong(entry, f"{name} = {value!r}", f"a value of type {spec.type}", attribute=name)
    if spec.choices and converted not in spec.choices:
        raise _wrong(entry, f"{name} = {value!r}", f"one of {', '.join(map(str, spec.choices))}", attribute=name)
    if spec.type == "int" and not -(2**63) <= converted < 2**63:
        raise _wrong(entry, f"{name} = {value!r}", "a number that fits 64 bits", attribute=name)
    return converted


def _convert(kind: str, value: Any) -> Any:
    is_bool = isinstance(value, bool) or type(value).__name__ in ("bool_", "bool")
    if kind == "bool":
        return bool(value) if is_bool else None
    if kind == "str":
        return str(value) if isinstance(value, str) else None
    if is_bool or not isinstance(value, Number):  # an array of one number is none: reading it would stall a stream
        return None
    try:
        number: Any = value
        return operator.index(number) if kind == "int" else float(number)
    except (TypeError, ValueError, OverflowError):
        return None


def _output_form(
    entry: FusionEntry, name: str, type_: TensorType, axes: Mapping[str, Any], folds: str, leading: tuple[Any, ...]
) -> Form:
    """The first form of an output whose axes are all known."""
    for form in type_.forms:
        narrow = not form.leading and folds in form.names and prod(leading) != 1
        if all(a in axes for a in form.names) and not narrow:
            return form
    missing = [a for a in type_.axes if a not in axes]
    raise _wrong(
        entry, f"the shape of {name} is open: {', '.join(missing) or type_}", "inputs that tell every axis", tensor=name
    )


def _brought(entry: FusionEntry, name: str, given: Tensor | None, expected: Outline) -> Tensor | None:
    """The caller's own output, None where there is none."""
    if given is not None and (given.dtype != expected.dtype or given.shape != expected.shape):
        raise _wrong(entry, f"{name} is {given}", str(Tensor.contiguous(*expected[:2])), tensor=name)
    return given


def _check_constraints(entry: FusionEntry, problem: Problem) -> None:
    env = problem.env()
    for constraint in entry.constraints:
        try:
            holds = constraint(env)
        except ExpressionError as e:
            raise _wrong(
                entry, str(e), "a problem on which every constraint has a value", constraint=constraint.text
            ) from None
        if not holds:
            raise _wrong(entry, f"constraint {constraint.pretty(env)} does not hold", constraint=constraint.text)
