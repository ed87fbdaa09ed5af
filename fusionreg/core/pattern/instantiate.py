"""The pattern language: what a fusion replaces, as text, as a :class:`PatternGraph`, and as a concrete graph. Floor 2.

Pattern text is a straight-line program::

    h = MatMul(x, w, transB=transB)        # a bare name as attribute value binds a declared attribute of the fusion
    s = optional(Mul)(h, scale)            # may be missing: then s is h, and `scale` is absent
    b = optional(Add)(s, bias)
    y = optional(any_of(Relu, Tanh, gelu_tanh=Gelu(approximate="tanh")), "activation")(b)

- An operator is called by its name in the vocabulary, ``domain.Name`` outside ONNX's own domain; calls may be nested.
- A name stands for one value throughout. One that is read but never assigned is an input. ``a, _ = Op(x)`` names
  several outputs; ``_`` is one that must have no reader. ``None`` leaves an optional operand out.
- ``Conv(x, w, optional(bias))`` is an operand that the operator can do without; then ``bias`` is absent.
- A number as operand is a constant that must equal it, after rounding to the tensor's dtype; a tuple is a 1-D constant.
- A literal attribute value must be equal; an attribute that is not named must have the operator's default.
  ``Cast(x, to=T)`` casts to what the dtype variable ``T`` is. ``strides=(rows, columns)`` binds an attribute of two
  numbers; one that a site leaves empty leaves the fusion's attributes at their defaults.
- ``any_of(A, B, key=C(attribute=value))`` is one of several operators, keyed ones last; ``optional(A)`` one that may
  be missing. The string, the last positional argument of either, names the *choice* variable (otherwise the assigned
  name does): its value is the alternative's key, or ``"none"``. An optional step with an input of its own needs no
  choice: it is there when the input is.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import ArgumentError, UnknownNameError
from ..frozen import EMPTY, FrozenDict
from ..ir import Graph, GraphBuilder, Shape, Value
from ..ops import infer, named
from ..spec import FusionSpec, OpSpec
from ..tensors import TensorType, bind
from .graph import NONE, Alternative, AttributeName, Input, Literal, Operand, Output, PatternGraph, Step, resolved
from .parse import PatternParser

if TYPE_CHECKING:
    import numpy

__all__ = [
    "NONE",
    "Alternative",
    "AttributeName",
    "Input",
    "Literal",
    "Operand",
    "Output",
    "PatternGraph",
    "Step",
    "instantiate",
    "parse_pattern",
    "resolve_attributes",
    "resolve_choices",
]

#: Operator inputs of these names hold indices: a literal there is int64, like one for an input in ``OpSpec.host``.
INDEX_INPUTS = frozenset({"indices", "axis"})


def parse_pattern(
    text: str, ops: Mapping[str, OpSpec], whom: str = "", outputs: Sequence[str] | None = None
) -> PatternGraph:
    """The parsed pattern; :class:`PatternError` (``facts``: line, column) when the text is wrong.

    ``outputs``: the fusion's output names, each of which must be assigned; None takes all values that no step reads.
    """
    return PatternParser(text, ops, whom).parse(outputs)


def resolve_choices(
    pattern: PatternGraph, given: Mapping[str, str], absent: Collection[str] = ()
) -> FrozenDict[str, str]:
    """Every choice with its key.

    One that is not given is ``"none"`` where the step may be missing and no input of its own is there, and its only
    key where it has one. :class:`ArgumentError` for an unknown choice or key, for one that is missing, and for one that
    contradicts ``absent``.
    """
    for name in given:
        if name not in pattern.choices:
            hint = UnknownNameError.among("choice", name, pattern.choices)
            raise ArgumentError("unknown choice", repr(name), "", hint.expected, name=name)
    found = {}
    for name, keys in pattern.choices.items():
        gates = tuple(dict.fromkeys(g for s in pattern.steps if s.choice == name for g in s.gates))
        skipped = any(g in absent for g in gates)
        real = [k for k in keys if k != NONE]
        default = NONE if NONE in keys and (skipped or not gates) else (real[0] if len(real) == 1 else None)
        key = given.get(name, default)
        if key not in keys:
            wrong = "missing choice" if key is None else "wrong choice"
            raise ArgumentError(
                wrong, f"for {name}", "" if key is None else repr(key), f"one of {', '.join(keys)}", name=name
            )
        if gates and (key == NONE) != skipped:
            state = f"{key!r} with {', '.join(gates)} {'absent' if skipped else 'present'}"
            raise ArgumentError("wrong choice", f"for {name}", state, "both or neither", name=name)
        found[name] = key
    return FrozenDict(found)


def resolve_attributes(spec: FusionSpec, given: Mapping[str, Any]) -> FrozenDict[str, Any]:
    """Every attribute of the fusion with its value: as given, else its default, of the declared type.

    :class:`ArgumentError` for an unknown or missing attribute, a wrong type, or a value that is not allowed.
    """
    for name in given:
        if name not in spec.attributes:
            hint = UnknownNameError.among("attribute", name, spec.attributes)
            raise ArgumentError("unknown attribute", f"{name!r} of {spec.name}", "", hint.expected, name=name)
    found: dict[str, Any] = {}
    for name, declared in spec.attributes.items():
        value = given.get(name, declared.default)
        whom = f"{name} of {spec.name}"
        if value is None:
            raise ArgumentError("missing attribute", whom, "", f"a value of type {declared.type}", name=name)
        if declared.type == "float" and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if declared.type == "int" and isinstance(value, bool):
            value = int(value)
        if declared.type == "bool" and value in (0, 1):
            value = bool(value)
        if type(value).__name__ != declared.type:
            raise ArgumentError("wrong attribute", whom, repr(value), f"a value of type {declared.type}", name=name)
        if declared.choices and value not in declared.choices:
            raise ArgumentError("wrong attribute", whom, repr(value), f"one of {declared.choices}", name=name)
        found[name] = value
    return FrozenDict(found)


def instantiate(
    pattern: PatternGraph,
    spec: FusionSpec,
    *,
    dtypes: Mapping[str, str],
    shapes: Mapping[str, Shape],
    ops: Mapping[str, OpSpec],
    choices: Mapping[str, str] = EMPTY,
    attributes: Mapping[str, Any] = EMPTY,
    absent: Collection[str] = (),
) -> Graph:
    """The concrete graph that the pattern stands for at one site: the reference of the fusion.

    Args:
        dtypes: dtype of each dtype variable.
        shapes: shape of each present input, unfolded; extents may be symbolic names.
        choices, attributes: as a call passes them; missing ones take their defaults.
        absent: optional inputs that are left out; the steps that they gate are not in the graph.

    Returns:
        A graph whose inputs are the present inputs in the spec's order, and whose outputs have the spec's output names.

    Raises:
        ArgumentError: the shapes, choices, attributes or absent inputs do not fit the fusion.
        GraphError: shape or type inference refuses them.
    """
    for name in absent:
        if name not in pattern.optional:
            expected = f"one of {', '.join(sorted(pattern.optional)) or 'no inputs'}"
            raise ArgumentError("missing input", f"{name!r} of {spec.name}", "it is not optional", expected, name=name)
    names = [n for n in spec.inputs if n not in absent and n in pattern.inputs]
    present = {n: TensorType.parse(spec.inputs[n], spec.name) for n in names}
    for name in present:
        if name not in shapes:
            whom = f"{name!r} of {spec.name}"
            raise ArgumentError("missing input", whom, "it has no shape", "one for each input", name=name)
    bind(present, {n: tuple(shapes[n]) for n in present})
    keys = resolve_choices(pattern, choices, absent)
    values = resolve_attributes(spec, attributes)
    named: dict[str, Any] = {**dtypes, **values}  # Cast(x, to=T) binds a dtype variable as it binds an attribute
    return _Instance(pattern, spec, ops, keys, named, frozenset(absent)).build(present, dtypes, shapes)


class _Instance:
    """Builds one concrete graph."""

    def __init__(self, pattern, spec, ops, choices, attributes, absent) -> None:
        self.pattern, self.spec, self.ops = pattern, spec, ops
        self.choices, self.attributes, self.absent = choices, attributes, absent
        self.builder = GraphBuilder(spec.name, taken=(*spec.inputs, *spec.outputs))
        self.types: dict[str, Value] = {}
        self.names: dict[Output, str] = {}
        self.literals: dict[str, numpy.ndarray] = {}

    def type_of(self, operand: Operand) -> Value:
        if isinstance(operand, Output):
            return self.types[self.names[operand]]
        assert isinstance(operand, Input), operand
        return self.types[operand.name]

    def skipped(self, step: Step) -> bool:
        if not step.optional:
            return False
        gone = [g for g in step.gates if g in self.absent]
        if gone and len(gone) < len(step.gates):
            rest = sorted(set(step.gates) - set(gone))
            whom = f"{gone[0]!r} of {self.spec.name}"
            raise ArgumentError("missing input", whom, f"{', '.join(rest)} is there", "all or none of them")
        return bool(gone) or (bool(step.choice) and self.choices[step.choice] == NONE)

    def build(self, present: Mapping[str, TensorType], dtypes: Mapping[str, str], shapes: Mapping[str, Shape]) -> Graph:
        for name, kind in present.items():
            self.types[name] = Value(name, dtypes.get(kind.dtype, kind.dtype), tuple(shapes[name]))
            self.builder.input(name, self.types[name].dtype, self.types[name].shape)
        live = [s for s in self.pattern.steps if not self.skipped(s)]
        skipped = {s.index: s.operands[0] for s in self.pattern.steps if s not in live}

        def resolve(operand: Operand) -> Operand:
            if isinstance(operand, Input) and operand.optional and operand.name in self.absent:
                return None
            while isinstance(operand, Output) and operand.step in skipped:
                operand = skipped[operand.step]
            return operand

        wanted: dict[Output, str] = {}  # a value that is an output of the fusion carries that output's name
        for name, where in self.pattern.outputs.items():
            source = resolve(where)
            if isinstance(source, Output):
                wanted.setdefault(source, name)
        for step in reversed(self.pattern.steps):  # what a step that is left out was to give goes by its name
            source = resolve(Output(step.index, 0))
            if step.index in skipped and step.outputs[0] and isinstance(source, Output):
                wanted.setdefault(source, step.outputs[0])
        for step in live:
            self.step(step, tuple(resolve(o) for o in step.operands), wanted)
        for name, where in self.pattern.outputs.items():
            source = resolve(where)
            if isinstance(source, Output) and self.names[source] == name:
                continue
            origin = self.type_of(source)  # an input, or a value that already has another output's name
            self.builder.node("Identity", (origin.name,), (Value(name, origin.dtype, origin.shape),))
        return self.builder.build(self.spec.outputs)

    def step(self, step: Step, operands: tuple[Operand, ...], wanted: Mapping[Output, str]) -> None:
        key = self.choices.get(step.choice, step.alternatives[0].key)
        chosen = next(a for a in step.alternatives if a.key == key)
        op = self.ops[chosen.op]
        attrs = {k: resolved(v, self.attributes) for k, v in chosen.attributes.items()}
        inputs: list[Value | None] = []
        constants: dict[int, numpy.ndarray] = {}
        for i, operand in enumerate(operands):
            if operand is None:
                inputs.append(None)
            elif isinstance(operand, Literal):
                constant = self.literal(step, op, i, operand, operands, attrs)
                constants[i] = self.literals[constant.name]
                inputs.append(constant)
            else:
                inputs.append(self.type_of(operand))
        while inputs and inputs[-1] is None and isinstance(step.operands[len(inputs) - 1], Input):
            inputs.pop()  # an optional operand that is absent
        whom = f"{op.name} in {self.spec.name}"
        inferred = infer(op, inputs, attrs, constants, len(step.outputs), whom)
        names = []
        for i, stem in enumerate(step.outputs):
            where = Output(step.index, i)
            self.names[where] = wanted.get(where) or self.builder.fresh(stem or f"v{step.index}")
            names.append(self.names[where])
        outputs = named(names, inferred)
        self.types.update({v.name: v for v in outputs})
        source = f"{self.spec.name}:{step.line}"
        self.builder.node(chosen.op, ["" if v is None else v.name for v in inputs], outputs, attrs=attrs, source=source)

    def literal(
        self, step: Step, op: OpSpec, index: int, literal: Literal, operands: Sequence[Operand], attrs: dict[str, Any]
    ) -> Value:
        """A constant of the graph: int64 in an index position, otherwise of the dtype of the step's tensors."""
        import numpy as np

        from ..dtypes import dtype

        declared = op.inputs[min(index, len(op.inputs) - 1)].rstrip("?*")
        others = [self.type_of(o).dtype for o in operands if isinstance(o, Input | Output)]
        kind = next((d for d in others if d != "bool"), others[0] if others else "float32")
        if isinstance(literal.value, bool):
            kind = "bool"
        elif declared in op.host or declared in INDEX_INPUTS:
            kind = "int64"
        numbers = resolved(literal.value, self.attributes)
        if op.name == "Split" and -1 in numbers:
            extent = (self.type_of(operands[0]).shape or ())[attrs["axis"]]
            rest = extent - sum(n for n in numbers if n != -1) if isinstance(extent, int) else 0
            numbers = tuple(rest // numbers.count(-1) if n == -1 else n for n in numbers)
        if op.name == "Reshape" and numbers.count(-1) > 1:  # one of them tells itself; the others are as they were
            first, extents = numbers.index(-1), self.type_of(operands[0]).shape or ()
            last = dict(zip(reversed(range(len(numbers))), reversed(extents), strict=False))
            numbers = tuple(last.get(i, n) if n == -1 and i != first else n for i, n in enumerate(numbers))
        array = np.asarray(numbers).astype(dtype(kind).numpy)
        name = self.builder.constant(self.builder.fresh(f"c{step.index}"), array, kind)
        self.literals[name] = array
        self.types[name] = Value(name, kind, array.shape)
        return self.types[name]
