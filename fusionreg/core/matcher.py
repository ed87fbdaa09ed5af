"""Where in a graph which fusion applies, and where one nearly does. Floor 2.

:func:`find` anchors every pattern at its root operator, searches backwards (``core/search.py``), and holds what it
finds against the fusion's tensor types, constraints and the legality rules. For one root the largest legal form of a
fusion is reported; smaller ones remain where an exposed value rules the larger out. Overlaps are left to the planner.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any, Protocol

from .errors import ArgumentError, FusionregError
from .expressions import Expression
from .frozen import FrozenDict
from .ir import Dim, Graph, Node, Shape, Value
from .legality import Legality, Violation
from .match import Bindings, FailedMatch, Match, Matches
from .match_program import PatternIndex
from .pattern_graph import Literal, PatternGraph
from .search import VAGUE, Search, View, match_pattern, scan
from .spec import FusionSpec, OpSpec
from .tensors import Bound, TensorType, bind

__all__ = [
    "Bindings",
    "FailedMatch",
    "Legality",
    "Match",
    "Matches",
    "PatternIndex",
    "View",
    "Violation",
    "find",
    "match_pattern",
    "scan",
]

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
    """What :func:`find` reads of a catalog's entry."""

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


class _Refused(Exception):
    """A candidate breaks a rule of its fusion; carries (clause, node, found, expected)."""


class Checker:
    """One fusion's rules beyond its pattern: dtypes, shapes, attributes, constraints."""

    def __init__(self, fusion: Fusion, ops: Mapping[str, OpSpec]) -> None:
        self.fusion, self.spec, self.ops = fusion, fusion.spec, ops
        self.types: dict[str, TensorType] = {**fusion.inputs, **fusion.outputs}
        self.constraints = tuple(
            Expression.parse(c, whom=f"{self.spec.name} constraints") for c in self.spec.constraints
        )

    def match(self, view: View, spelling: int, b: Bindings) -> Match:
        """The match that the bindings make; :class:`_Refused` when they break a rule."""
        pattern = self.fusion.patterns[spelling]
        self._presence(pattern, b)
        bad = view.legality.check(b.nodes, b.inputs.values(), b.outputs.values())
        if bad:
            raise _Refused(bad.clause, view.graph.node_by_name[bad.node], bad.found, bad.expected)
        attributes, wanted = self._attributes(b)
        values = {n: view.graph.values[v] for n, v in (*b.inputs.items(), *b.outputs.items())}
        dtypes = self._dtypes(b, values, wanted)
        bound = self._shapes(b, values)
        self._growth(view.graph, pattern, b, values, bound)
        guards = self._constraints(b, bound, {**attributes, **b.choices, **dtypes})
        return Match(
            self.spec.name,
            self.fusion.plugin,
            spelling,
            b.root.name,
            tuple(n.name for n in b.nodes),
            FrozenDict({n: b.inputs[n] for n in self.spec.inputs if n in b.inputs}),
            FrozenDict({n: b.outputs[n] for n in self.spec.outputs if n in b.outputs}),
            FrozenDict(dtypes),
            bound.axes,
            bound.leading,
            FrozenDict(attributes),
            b.choices,
            guards,
        )

    def _presence(self, pattern: PatternGraph, b: Bindings) -> None:
        for step in pattern.steps:
            given = [g for g in step.gates if g in b.inputs]
            if step.gates and len(given) != (len(step.gates) if step.index in b.steps else 0):
                raise _Refused(
                    GATE, b.root, f"only {', '.join(given) or 'the step'} is there", f"all of {', '.join(step.gates)}"
                )
        for name in pattern.inputs:
            if name not in b.inputs and name not in pattern.optional:
                raise _Refused(
                    PRESENT, b.root, f"{name} is missing", "a value: only an optional step's own input may be"
                )
        if len(set(b.outputs.values())) < len(b.outputs) or not b.outputs:
            raise _Refused(OUTPUTS, b.root, f"outputs {dict(b.outputs)}", "different values")

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
                raise _Refused(ATTRIBUTE, b.root, f"{name} = {value!r}", f"a value of type {declared.type}")
            if declared.choices and value not in declared.choices:
                raise _Refused(ATTRIBUTE, b.root, f"{name} = {value!r}", f"one of {declared.choices}")
            found[name] = value
        return found, dtypes

    def _dtypes(self, b: Bindings, values: Mapping[str, Value], wanted: Mapping[str, Any]) -> dict[str, str]:
        found: dict[str, str] = dict(wanted)
        for name, value in values.items():
            variable = self.types[name].dtype
            allowed = self.spec.dtypes.get(variable)
            if allowed is None:
                if value.dtype != variable:
                    raise _Refused(DTYPE, b.root, f"{name} is {value.dtype}", variable)
                continue
            known = found.setdefault(variable, value.dtype)
            if known != value.dtype:
                raise _Refused(DTYPE, b.root, f"{name} is {value.dtype}", f"{variable} = {known}, as before")
            if value.dtype not in allowed:
                raise _Refused(DTYPE, b.root, f"{name} is {value.dtype}", f"{variable} in {', '.join(allowed)}")
        return found

    def _shapes(self, b: Bindings, values: Mapping[str, Value]) -> Bound:
        shapes: dict[str, Shape] = {}
        for name, value in values.items():
            if value.shape is None:
                raise _Refused(SHAPE, b.root, f"{name} ({value.name}) has no known rank", str(self.types[name]))
            shapes[name] = value.shape
        try:
            return bind(self.types, shapes)
        except ArgumentError as e:
            tensor = str(e.facts.get("tensor", ""))
            raise _Refused(SHAPE, b.root, f"{tensor} {e.found}", e.expected) from None

    def _growth(
        self, graph: Graph, pattern: PatternGraph, b: Bindings, values: Mapping[str, Value], bound: Bound
    ) -> None:
        """Inputs may carry leading 1s, and literals any shape, only as long as no result comes out different for it."""
        plain: dict[str, Shape] = {}  # graph value → its shape without extra leading 1s
        for name in (*b.inputs, *b.outputs):
            form, shape = bound.forms[name], values[name].shape or ()
            if not form.leading and len(shape) > len(form.axes):
                if name in b.outputs:
                    raise _Refused(GROWTH, b.root, f"output {name} is {values[name]}", f"rank {len(form.axes)}")
                plain[values[name].name] = shape[len(shape) - len(form.axes) :]
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
            raise _Refused(GROWTH, node, f"without them {e}", "the same result") from None
        for out, (_, shape) in zip(node.outputs, inferred, strict=False):
            known = graph.values[out].shape if out else None
            if out and (
                shape is None or known is None or len(shape) != len(known) or not all(map(_agree, shape, known))
            ):
                raise _Refused(GROWTH, node, f"{graph.values[out]}", f"extents {shape} as without them")

    def _constraints(self, b: Bindings, bound: Bound, env: dict[str, Any]) -> tuple[str, ...]:
        if not self.constraints:
            return ()
        axes: dict[str, Dim] = dict(bound.axes)
        if bound.folds and bound.leading:
            rows = (*bound.leading, axes[bound.folds])
            known = all(isinstance(d, int) for d in rows)
            axes[bound.folds] = prod(rows) if known else " × ".join(map(str, rows))
        symbolic = {k for k, v in axes.items() if isinstance(v, str)}
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
                raise _Refused(CONSTRAINT, b.root, str(error), e.text) from None
            if not holds:
                raise _Refused(CONSTRAINT, b.root, e.pretty(env), "a true value")
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


def find(graph: Graph, fusions: Iterable[Fusion], ops: Mapping[str, OpSpec], *, explain: bool = False) -> Matches:
    """All sites of all fusions in a graph, overlapping ones too, ordered by root, then fusion.

    Args:
        graph: with types; values of unknown rank match nothing.
        fusions: entries of a catalog.
        ops: the vocabulary their patterns were parsed with.
        explain: also report, for each root operator and fusion without a match there, the deepest partial match.
    """
    entries = sorted(fusions, key=lambda f: (f.spec.name, f.plugin))
    patterns = [(e, s) for e, f in enumerate(entries) for s in range(len(f.patterns))]
    checkers: dict[int, Checker] = {}
    index = PatternIndex([entries[e].patterns[s] for e, s in patterns], ops)
    view = View(graph)
    best: dict[tuple[int, int], Match] = {}
    near: dict[tuple[int, int], FailedMatch] = {}
    candidates = _everything(view, index) if explain else scan(view, index)
    for node, i, anchor in candidates:
        entry, spelling = patterns[i]
        if entry not in checkers:
            checkers[entry] = Checker(entries[entry], ops)
        key = (view.position[node.name], entry)
        fail = _recorder(near, key, entries[entry].spec.name, node) if explain else None
        found = _largest(view, index, i, anchor, node, checkers[entry], spelling, fail)
        if found is not None and (key not in best or len(found.nodes) > len(best[key].nodes)):
            best[key] = found
    failures = tuple(near[k] for k in sorted(near) if k not in best)
    return Matches(tuple(best[k] for k in sorted(best)), failures)


def _largest(
    view: View, index: PatternIndex, i: int, anchor: int, node: Node, checker: Checker, spelling: int, fail: Any
) -> Match | None:
    """The legal form with most nodes; of equal ones the first."""
    program = index.programs[i]
    most = len(program.steps) - len(program.anchors[anchor][1])
    best: Match | None = None
    for b in Search(view, program, fail).at(node, anchor):
        if best is not None and len(b.nodes) <= len(best.nodes):
            continue
        try:
            best = checker.match(view, spelling, b)
        except _Refused as refused:
            if fail is not None:
                clause, where, found, expected = refused.args
                fail(len(b.nodes), clause, where, found, expected)
            continue
        if len(best.nodes) >= most:
            break
    return best


def _everything(view: View, index: PatternIndex) -> Iterable[tuple[Node, int, int]]:
    for node in view.graph.nodes:
        for i, anchor in index.by_root.get(node.op, ()):
            yield node, i, anchor


def _recorder(near: dict[tuple[int, int], FailedMatch], key: tuple[int, int], fusion: str, root: Node) -> Any:
    def fail(depth: int, clause: str, node: Node, found: str, expected: str) -> None:
        known = near.get(key)
        vague = known is not None and known.clause in VAGUE and clause not in VAGUE
        if known is None or depth > known.depth or (depth == known.depth and vague):
            near[key] = FailedMatch(fusion, root.name, depth, clause, node.name, node.source, found, expected)

    return fail
