"""Applies rewrite rules to a graph until none fits any more. Floor 3.

A rule is a pattern, a replacement in the same language, and conditions. Where the pattern fits, its interior values
are read by nothing else, and the replacement gives values of the same dtype and shape, the nodes are exchanged; the
outputs keep their names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ..errors import FusionregError
from ..frozen import FrozenDict
from ..ir import Graph, Names, Node, Value
from ..matcher.legality import mutated
from ..matcher.match import Bindings
from ..matcher.program import PatternIndex
from ..matcher.search import Search, View, scan
from ..ops import Vocabulary, infer, named
from ..pattern.graph import Operand, resolved
from ..pattern.instantiate import Input, Literal, Output, PatternGraph, parse_pattern
from ..rewrite import Replacement, replace_nodes
from .site import Condition, Derive, Site

#: Rounds after which rules that undo each other are our own fault.
_MAX_ROUNDS = 200


@dataclass(frozen=True)
class Rule:
    """One rewrite.

    Attributes:
        name: for people and tests.
        pattern: what is looked for; its outputs are the names that the replacement assigns last.
        replacement: what takes its place; ``y = x`` alone means that y is x.
        conditions: all must hold.
        derive: further names of the replacement, computed from the site; None refuses.
        shared: interior values may have other readers: only the last node is replaced, the others stay as long as
            somebody reads them. For interiors that only move data.
    """

    name: str
    pattern: str
    replacement: str
    conditions: tuple[Condition, ...] = ()
    derive: Derive | None = None
    shared: bool = False

    @cached_property
    def needs(self) -> frozenset[str]:
        """Operators that the pattern calls, all of which a graph must have."""
        return _called(self.pattern)

    @cached_property
    def makes(self) -> frozenset[str]:
        """Operators that the replacement calls."""
        return _called(self.replacement)


_CALL = re.compile(r"([A-Za-z][\w.]*)\(")


def _called(text: str) -> frozenset[str]:
    return frozenset(name.replace(".", "::") for name in _CALL.findall(text))


def relevant(rules: Iterable[Rule], present: Iterable[str]) -> tuple[Rule, ...]:
    """The rules that can ever fit in a graph with these operators, what other rules bring in included."""
    rules, have = tuple(rules), set(present)
    while True:
        fitting = tuple(r for r in rules if r.needs <= have)
        made = have.union(*(r.makes for r in fitting))
        if made == have:
            return fitting
        have = made


@dataclass(frozen=True)
class Compiled:
    """Rules with their texts parsed, and the index over all patterns."""

    rules: tuple[Rule, ...]
    replacements: tuple[PatternGraph | str, ...] = field(repr=False)
    index: PatternIndex = field(repr=False)
    ops: Vocabulary = field(repr=False)


def compile_rules(rules: Iterable[Rule], ops: Vocabulary) -> Compiled:
    """Parses all texts; :class:`PatternError` names the rule that is wrong."""
    rules = tuple(rules)
    patterns = [parse_pattern(r.pattern, ops, f"lift rule {r.name}", ("y",)) for r in rules]
    replacements: list[PatternGraph | str] = []
    for r in rules:
        plain = r.replacement.partition("=")
        if plain[2].strip().isidentifier():
            replacements.append(plain[2].strip())
        else:
            replacements.append(parse_pattern(r.replacement, ops, f"replacement of lift rule {r.name}", ("y",)))
    return Compiled(rules, tuple(replacements), PatternIndex(patterns, ops), ops)


def run(graph: Graph, compiled: Compiled, log: list[tuple[str, str]] | None = None) -> Graph:
    """The graph after all rules, to a fixed point. ``log`` gets (rule, node) for every application."""
    for _ in range(_MAX_ROUNDS):
        replacements = _round(graph, compiled, log)
        if not replacements:
            return graph
        graph = replace_nodes(graph, replacements)
    raise AssertionError(f"lift rules did not settle in {_MAX_ROUNDS} rounds: {(log or [])[-4:]}")


def _round(graph: Graph, compiled: Compiled, log: list[tuple[str, str]] | None) -> list[Replacement]:
    """Disjoint sites of one pass, larger ones first."""
    view = View(graph)
    candidates: list[tuple[int, int, int, Bindings]] = []
    for node, i, anchor in scan(view, compiled.index):
        shared = compiled.rules[i].shared and not view.legality.mutations
        for found in Search(view, compiled.index.programs[i], prune=not shared).at(node, anchor):
            if not shared and view.legality.check(found.nodes, found.inputs.values(), found.outputs.values()):
                continue
            candidates.append((-len(found.nodes), view.position[node.name], i, found))
    candidates.sort(key=lambda c: c[:3])
    taken: set[str] = set()
    replacements: list[Replacement] = []
    names = Names({*graph.values, *graph.node_by_name})
    for _, _, i, found in candidates:
        if taken.isdisjoint(n.name for n in found.nodes):
            made = _replacement(view, compiled, i, found, names)
            if made is not None:
                taken.update(n.name for n in found.nodes)
                replacements.append(made)
                if log is not None:
                    log.append((compiled.rules[i].name, found.root.name))
    return replacements


def _replacement(view: View, compiled: Compiled, i: int, found: Bindings, names: Names) -> Replacement | None:
    graph, rule, template = view.graph, compiled.rules[i], compiled.replacements[i]
    site = Site(graph, found, compiled.index.programs[i].pattern)
    if not all(condition(site) for condition in rule.conditions):
        return None
    derived = rule.derive(site) if rule.derive is not None else {}
    if derived is None:
        return None
    gone = (found.root,) if rule.shared else found.nodes
    old = graph.values[found.outputs["y"]]
    if isinstance(template, str):
        new = graph.values[found.inputs[template]]
        if _written(view, new.name, old.name):
            return None
        if new.dtype != old.dtype or not _same_shape(new, old) or old.name in graph.output_names:
            return None if found.root.op == "Identity" else _identity(found, gone, new, old)
        return Replacement(tuple(n.name for n in gone), renames=FrozenDict({old.name: new.name}))
    return Emitter(graph, compiled.ops, site, derived, names).build(template, gone, old)


def _written(view: View, *names: str) -> bool:
    """Whether anything writes in place to memory that one of the values may lie in: then a copy is not its original."""
    groups = {view.legality.alias(n) for n in names}
    return any(view.legality.alias(w) in groups for _, node in view.legality.mutations for w in mutated(node))


def _identity(found: Bindings, gone: Sequence[Node], new: Value, old: Value) -> Replacement | None:
    """An output of the graph keeps its name: it becomes an Identity, if it was anything else."""
    if new.dtype != old.dtype or not _same_shape(new, old):
        return None
    node = Node(found.root.name, "Identity", (new.name,), (old.name,), source=found.root.source)
    return Replacement(tuple(n.name for n in gone), (node,))


def _same_shape(new: Value, old: Value) -> bool:
    """Equal ranks and extents. Two names may differ: inference gives a fresh one to what it cannot tell; a name and a
    number may not: a constant that broadcasts a symbolic axis of extent 1 would look so."""
    if new.shape is None or old.shape is None:
        return new.shape == old.shape
    return len(new.shape) == len(old.shape) and all(
        a == b or (isinstance(a, str) and isinstance(b, str)) for a, b in zip(new.shape, old.shape, strict=True)
    )


class Emitter:
    """Writes a replacement's nodes for one site."""

    def __init__(self, graph: Graph, ops: Vocabulary, site: Site, derived: Mapping[str, Any], names: Names) -> None:
        self.graph, self.ops, self.site, self.names = graph, ops, site, names
        self.attributes = {**site.found.attributes, **{k: v for k, v in derived.items() if not hasattr(v, "dtype")}}
        self.arrays = {k: v for k, v in derived.items() if hasattr(v, "dtype")}
        self.values: dict[str, Value] = {}
        self.constants: dict[str, Any] = {}
        self.of_input: dict[str, str] = {}

    def build(self, template: PatternGraph, gone: Sequence[Node], old: Value) -> Replacement | None:
        root, nodes = self.site.found.root, []
        made: dict[tuple[int, int], str] = {}
        last = template.outputs["y"].step
        for step in template.steps:
            inputs = [self.operand(o, made, old.dtype) for o in step.operands]
            alternative = step.alternatives[0]
            attrs = {k: resolved(v, self.attributes) for k, v in alternative.attributes.items()}
            spec = self.ops[alternative.op]
            attrs = {k: v for k, v in attrs.items() if v != spec.attributes.get(k)}
            known = {n: self.array(name) for n, name in enumerate(inputs) if name and self.array(name) is not None}
            given = [self.type(name) if name else None for name in inputs]
            try:
                types = infer(spec, given, attrs, known, len(step.outputs), root.name)
            except FusionregError:
                return None
            stem = f"{root.name}_{alternative.op.rpartition('::')[2].lower()}"
            outs = [old.name] if step.index == last else [self.names.fresh(stem) for _ in step.outputs]
            typed = named(outs, types)
            if step.index == last:
                if typed[0].dtype != old.dtype or not _same_shape(typed[0], old):
                    return None
            else:
                self.values.update((v.name, v) for v in typed)
            made.update(((step.index, n), v.name) for n, v in enumerate(typed))
            name = root.name if step.index == last else self.names.fresh(f"{stem}_node")
            nodes.append(Node(name, alternative.op, tuple(inputs), tuple(outs), FrozenDict(attrs), source=root.source))
        return Replacement(
            tuple(n.name for n in gone), tuple(nodes), tuple(self.values.values()), FrozenDict(self.constants)
        )

    def type(self, name: str) -> Value:
        return self.values.get(name) or self.graph.values[name]

    def array(self, name: str) -> Any:
        if name in self.constants:
            return self.constants[name]
        return self.graph.constants[name] if self.graph.is_constant(name) else None

    def operand(self, operand: Operand, made: Mapping[tuple[int, int], str], dtype: str) -> str:
        if operand is None:
            return ""
        if isinstance(operand, Output):
            return made[operand.step, operand.index]
        if isinstance(operand, Input):
            if operand.name in self.arrays:
                if operand.name not in self.of_input:
                    self.of_input[operand.name] = self.constant(self.arrays[operand.name], operand.name)
                return self.of_input[operand.name]
            return self.site.found.inputs[operand.name]
        assert isinstance(operand, Literal)
        return self.constant(_literal(operand.value, dtype), "literal")

    def constant(self, array: Any, stem: str) -> str:
        import numpy as np

        array = np.asarray(array)  # arithmetic on arrays of no axes gives numbers, which no kernel takes
        name = self.names.fresh(f"{self.site.found.root.name}_{stem}")
        kind = array.dtype.name
        self.constants[name] = array
        self.values[name] = Value(name, kind, tuple(array.shape))
        return name


def _literal(value: Any, dtype: str) -> Any:
    """A tuple of integers is int64 (a shape, axes); any other number has the output's dtype."""
    import numpy as np

    from ..dtypes import dtype as row

    if isinstance(value, tuple) and all(isinstance(v, int) for v in value):
        return np.asarray(value, np.int64)
    return np.asarray(value).astype(row(dtype).numpy)
