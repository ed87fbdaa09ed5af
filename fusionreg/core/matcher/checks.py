"""What a fusion demands of a site beyond its pattern: dtypes, shapes, attributes, constraints, legality. Floor 2."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

from ..errors import ArgumentError, FusionregError
from ..expressions import Expression
from ..frozen import EMPTY, FrozenDict
from ..ir import Dim, Graph, Node, Shape, Value
from ..pattern.graph import Literal, PatternGraph
from ..spec import FusionSpec, OpSpec
from ..tensors import Bound, TensorType, bind
from .match import Bindings, Match
from .search import View

PRESENT = "every required input is there"
GATE = "an optional step and its input come together"
OUTPUTS = "every output is a value of its own"
DTYPE = "the dtype"
SHAPE = "the shape"
GROWTH = "extra leading extents 1 change no result"
ATTRIBUTE = "the attribute's type"
CONSTRAINT = "the constraint"

#: Predicates whose answer only a call knows.
_CALL_TIME = frozenset({"contiguous", "aligned", "stride", "has"})


class Fusion(Protocol):
    """What the matcher reads of a catalog's entry."""

    @property
    def spec(self) -> FusionSpec: ...
    @property
    def plugin(self) -> str: ...
    @property
    def patterns(self) -> Sequence[PatternGraph]: ...
    @property
    def inputs(self) -> Mapping[str, TensorType]: ...
    @property
    def outputs(self) -> Mapping[str, TensorType]: ...


class Refused(Exception):
    """A candidate breaks a rule of its fusion; ``args``: clause, node, found, expected."""


@dataclass(frozen=True, slots=True)
class _Types:
    """What the types of a site's tensors say, or ``refused``: (clause, found, expected)."""

    dtypes: FrozenDict[str, str] = EMPTY
    bound: Bound | None = None
    forms: FrozenDict[str, int] = EMPTY
    stripped: tuple[tuple[str, Shape], ...] = ()  # inputs with extra leading 1s, and their shapes without them
    refused: tuple[str, str, str] | None = None


class Checker:
    """One fusion's rules. Answers about types are kept: models repeat their layers."""

    def __init__(self, fusion: Fusion, ops: Mapping[str, OpSpec]) -> None:
        self.fusion, self.spec, self.ops = fusion, fusion.spec, ops
        self.types: dict[str, TensorType] = {**fusion.inputs, **fusion.outputs}
        whom = f"{self.spec.name} constraints"
        self.constraints = tuple(Expression.parse(c, whom=whom) for c in self.spec.constraints)
        self.gated = tuple(tuple((s.index, s.gates) for s in p.steps if s.gates) for p in fusion.patterns)
        self.required = tuple(tuple(i for i in p.inputs if i not in p.optional) for p in fusion.patterns)
        self.in_order = tuple(p.inputs == tuple(i for i in self.spec.inputs if i in p.inputs) for p in fusion.patterns)
        self._memo: dict[Any, _Types] = {}
        self.grown = 0
        """How often extra leading extents were looked into, which constants may decide."""

    def match(self, view: View, spelling: int, b: Bindings, kept: tuple[str, ...] = ()) -> Match:
        """The match that the bindings make; :class:`Refused` when they break a rule.

        ``kept``: nodes that stay beside it.
        """
        self._presence(spelling, b)
        bad = view.legality.check(b.nodes, b.inputs.values(), b.outputs.values(), kept)
        if bad:
            raise Refused(bad.clause, view.graph.node_by_name[bad.node], bad.found, bad.expected)
        attributes, wanted = self._attributes(b)
        values = view.graph.values
        tensors = {n: values[v] for n, v in b.inputs.items()}
        tensors.update((n, values[v]) for n, v in b.outputs.items())
        key = (tuple((n, v.dtype, v.shape) for n, v in tensors.items()), tuple(wanted.items()))
        types = self._memo.get(key)
        if types is None:
            types = self._memo[key] = self._typed(tensors, wanted, b.outputs)
        if types.refused:
            clause, found, expected = types.refused
            raise Refused(clause, b.root, found, expected)
        assert types.bound is not None
        if types.stripped or b.literals:
            self._growth(view.graph, self.fusion.patterns[spelling], b, types.stripped)
        guards: tuple[str, ...] = ()
        if self.constraints:
            guards = self._constraints(b, types.bound, {**attributes, **b.choices, **types.dtypes})
        in_order = self.in_order[spelling]
        return Match(
            self.spec.name,
            self.fusion.plugin,
            spelling,
            b.root.name,
            tuple([n.name for n in b.nodes]),
            b.inputs if in_order else FrozenDict({n: b.inputs[n] for n in self.spec.inputs if n in b.inputs}),
            b.outputs if len(b.outputs) == 1 else self._outputs(b),
            types.dtypes,
            types.bound.axes,
            types.bound.leading,
            FrozenDict(attributes) if attributes else EMPTY,
            b.choices,
            guards,
            types.forms,
            kept=kept,
        )

    def _outputs(self, b: Bindings) -> FrozenDict[str, str]:
        return FrozenDict({n: b.outputs[n] for n in self.spec.outputs if n in b.outputs})

    def _presence(self, spelling: int, b: Bindings) -> None:
        for index, gates in self.gated[spelling]:
            given = [g for g in gates if g in b.inputs]
            if len(given) != (len(gates) if index in b.steps else 0):
                raise Refused(
                    GATE, b.root, f"only {', '.join(given) or 'the step'} is there", f"{', '.join(gates)} too"
                )
        for name in self.required[spelling]:
            if name not in b.inputs:
                raise Refused(PRESENT, b.root, f"{name} is missing", "a value for every input that is not optional")
        if not b.outputs or (len(b.outputs) > 1 and len(set(b.outputs.values())) < len(b.outputs)):
            raise Refused(OUTPUTS, b.root, f"outputs {dict(b.outputs)}", "different values")

    def _attributes(self, b: Bindings) -> tuple[dict[str, Any], dict[str, Any]]:
        """The fusion's attributes in their declared types, and the dtype variables among what the pattern bound."""
        found: dict[str, Any] = {}
        dtypes = {k: v for k, v in b.attributes.items() if k in self.spec.dtypes}
        for name, declared in self.spec.attributes.items():
            value = b.attributes.get(name, declared.default)
            if value is None:
                continue
            kind = type(value)
            if declared.type == "bool" and kind in (int, bool) and value in (0, 1):
                value = bool(value)
            elif declared.type == "float" and kind in (int, float):
                value = float(value)
            elif declared.type == "int" and kind in (int, bool):
                value = int(value)
            elif not (declared.type == "str" and kind is str):
                raise Refused(ATTRIBUTE, b.root, f"{name} = {value!r}", f"a value of type {declared.type}")
            if declared.choices and value not in declared.choices:
                raise Refused(ATTRIBUTE, b.root, f"{name} = {value!r}", f"one of {declared.choices}")
            found[name] = value
        return found, dtypes

    # --- types -----------------------------------------------------------------------------------------------------

    def _typed(self, tensors: Mapping[str, Value], wanted: Mapping[str, str], outputs: Mapping[str, str]) -> _Types:
        dtypes = dict(wanted)
        for name, value in tensors.items():
            variable = self.types[name].dtype
            if variable not in self.spec.dtypes:
                if value.dtype != variable:
                    return _Types(refused=(DTYPE, f"{name} is {value.dtype}", variable))
            elif dtypes.setdefault(variable, value.dtype) != value.dtype:
                expected = f"{variable} = {dtypes[variable]}, as before"
                return _Types(refused=(DTYPE, f"{name} is {value.dtype}", expected))
        for variable, found in dtypes.items():
            if found not in self.spec.dtypes[variable]:
                expected = f"one of {', '.join(self.spec.dtypes[variable])}"
                return _Types(refused=(DTYPE, f"{variable} is {found}", expected))
        shapes: dict[str, Shape] = {}
        for name, value in tensors.items():
            if value.shape is None:
                return _Types(refused=(SHAPE, f"{name} ({value.name}) has no known rank", str(self.types[name])))
            shapes[name] = value.shape
        try:
            bound = bind(self.types, shapes)
        except ArgumentError as e:
            return _Types(refused=(SHAPE, f"{e.facts.get('tensor', '')} {e.found}", e.expected))
        stripped = []
        for name, shape in shapes.items():
            form = bound.forms[name]
            if not form.leading and len(shape) > len(form.axes):
                if name in outputs:
                    return _Types(refused=(GROWTH, f"output {name} is {tensors[name]}", f"rank {len(form.axes)}"))
                stripped.append((name, shape[len(shape) - len(form.axes) :]))
        forms: FrozenDict[str, int] = FrozenDict({n: self.types[n].forms.index(f) for n, f in bound.forms.items()})
        return _Types(FrozenDict(dtypes), bound, forms, tuple(stripped))

    def _growth(self, graph: Graph, pattern: PatternGraph, b: Bindings, stripped: Sequence[tuple[str, Shape]]) -> None:
        """Inputs may carry leading 1s, and literals any shape, only as long as no result comes out different for it."""
        self.grown += 1
        plain = {b.inputs[name]: shape for name, shape in stripped}
        for index, node in b.steps.items():
            spec, literal = self.ops[node.op], {}
            if spec.pointwise and any(isinstance(o, Literal) for o in pattern.steps[index].operands):
                literal = {v: () for (s, _), v in b.literals.items() if s == index and graph.values[v].shape}
            if literal or (plain and any(i in plain for i in node.inputs)):
                self._same_result(graph, node, spec, {**plain, **literal})

    def _same_result(self, graph: Graph, node: Node, spec: OpSpec, plain: Mapping[str, Shape]) -> None:
        given = [graph.values[i] if i else None for i in node.inputs]
        given = [v and Value(v.name, v.dtype, plain.get(v.name, v.shape)) for v in given]
        constants = {
            i: graph.constants[n] for i, n in enumerate(node.inputs) if graph.is_constant(n) and n not in plain
        }
        try:
            inferred = spec.infer(given, FrozenDict({**spec.attributes, **node.attrs}), constants)
        except (FusionregError, ValueError, IndexError) as e:
            raise Refused(GROWTH, node, f"without them {e}", "the same result") from None
        for out, (_, shape) in zip(node.outputs, inferred, strict=False):
            known = graph.values[out].shape if out else None
            if out and (
                shape is None or known is None or len(shape) != len(known) or not all(map(_agree, shape, known))
            ):
                raise Refused(GROWTH, node, f"{graph.values[out]}", f"extents {shape} as without them")

    # --- constraints -----------------------------------------------------------------------------------------------

    def _constraints(self, b: Bindings, bound: Bound, env: dict[str, Any]) -> tuple[str, ...]:
        """Those that only a call can decide; :class:`Refused` when one is false already."""
        axes: dict[str, Dim] = dict(bound.axes)
        if bound.folds and bound.leading:
            rows = (*bound.leading, axes[bound.folds])
            known = all(isinstance(d, int) for d in rows)
            axes[bound.folds] = prod(rows) if known else " × ".join(map(str, rows))
        symbolic = {k for k, v in axes.items() if isinstance(v, str)}
        for axis, e in getattr(self.fusion, "derived", EMPTY).items():
            if axis not in axes and e.names & symbolic:
                symbolic.add(axis)
            elif axis not in axes:
                axes[axis] = e({**env, **axes})
        env = {**axes, **env, **self._predicates(bound, axes)}
        guards = []
        for e in self.constraints:
            named = {a for t in e.tensors if t in bound.forms for a in bound.forms[t].names}
            if e.names & symbolic or e.predicates & _CALL_TIME or ("shape" in e.predicates and named & symbolic):
                guards.append(e.text)
                continue
            try:
                holds = e(env)
            except FusionregError as error:
                raise Refused(CONSTRAINT, b.root, str(error), e.text) from None
            if not holds:
                raise Refused(CONSTRAINT, b.root, e.pretty(env), "a true value")
        return tuple(guards)

    def _predicates(self, bound: Bound, axes: Mapping[str, Dim]) -> dict[str, Any]:
        """As a call's environment has them: ranks and extents as a kernel sees them, leading axes folded."""
        forms = bound.forms
        return {
            "present": lambda t: t in forms,
            "rank": lambda t: len(forms[t].axes) if t in forms else -1,
            "shape": lambda t, i: axes.get(str(a := forms[t].axes[i]), a),
            "form": lambda t: self.types[t].forms.index(forms[t]) if t in forms else -1,
        }


def _agree(inferred: Dim | None, known: Dim) -> bool:
    """Whether two extents are the same; None is one that inference cannot name, which a symbolic one may be."""
    return inferred == known or (inferred is None and isinstance(known, str))
