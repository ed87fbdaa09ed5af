"""Backtracking search for one pattern at one node. Floor 2.

Works backwards from the root over operands; what is left (other outputs of the pattern) is reached forwards from
values that are bound already. Every choice is undone by a trail, so that a failed branch costs what it tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ..frozen import EMPTY, FrozenDict
from ..ir import Graph, Node
from ..pattern.graph import NONE, Input, Literal, Operand, Output, PatternGraph, attribute_names
from ..spec import OpSpec
from .legality import CAPTURED, EXPOSED, OUTPUT, Legality
from .match import Bindings
from .program import PatternIndex, Program, Signatures, StepProgram, swapped
from .values import Constants, bind, equal, rank_of

OPERATOR = "the operator"
OPERANDS = "the number of operands"
ATTRIBUTE = "the attribute"
SAME_VALUE = "one name is one value"
LITERAL = "the constant"
CHOICE = "the choice"
PRODUCED = "the operand is computed"
BUDGET = "the search ends"

#: Clauses that say less than any other that fails at the same depth.
VAGUE = frozenset({OPERATOR, PRODUCED, SAME_VALUE})

#: Operators that are told shapes, in which a pattern may leave numbers open.
_OPEN = frozenset({"Reshape", "Split"})

#: Nodes that one search tries before it gives up: only large symmetric patterns over many alike values get there.
MAX_TRIALS = 5_000

Fail = Callable[[int, str, Node, str, str], None]
Goals = tuple[Operand, str, Node, int, Any] | None

#: State of a step that has no node.
SKIPPED, DROPPED = "skipped", "dropped"


class View:
    """A graph with the look-ups that matching needs; made once per graph, shared by all patterns."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.producers = graph.producers
        self.consumers = graph.consumers
        self.position = graph.position
        self.output_names = graph.output_names
        self.constants = Constants(graph)
        self.legality = Legality(graph)
        self.signatures = Signatures(graph)


class Search:
    """One search: ``for bindings in Search(view, program).at(node, anchor)``, the longest forms first."""

    def __init__(self, view: View, program: Program, fail: Fail | None = None, prune: bool = True) -> None:
        self.view, self.program, self.fail, self.prune = view, program, fail, prune
        self.state: list[Node | str | None] = [None] * len(program.steps)
        self.bound: dict[Any, str] = {}  # input name, or (step, output index) → graph value
        self.used: dict[str, int] = {}
        self.attributes: dict[str, Any] = {}
        self.choices: dict[str, str] = {}
        self.literals: dict[tuple[int, int], str] = {}
        self.trail: list[tuple[dict[Any, Any] | list[Any], Any]] = []
        self.root: Node | None = None
        self.visible = ""
        self.trials = 0

    def at(self, node: Node, anchor: int = 0) -> Iterator[Bindings]:
        """Every way in which the pattern fits with ``node`` as its anchor step."""
        step, skipped = self.program.anchors[anchor]
        self.root = node
        index = next((i for i, name in enumerate(step.outputs) if name), 0)
        if index >= len(node.outputs):
            return
        self.visible = node.outputs[index]
        for s in skipped:
            self.state[s.index] = SKIPPED
            if not self._set(self.bound, (s.index, 0), self.visible) or not self._choose(s, NONE):
                return
        yield from self._take(step, node, None)
        self._undo(0)

    # --- goals ---------------------------------------------------------------------------------------------------

    def _solve(self, goals: Goals) -> Iterator[Bindings]:
        while goals is not None:
            operand, value, reader, place, goals = goals
            if isinstance(operand, Output):
                yield from self._output(operand, value, reader, goals)
                return
            if isinstance(operand, Input):
                if operand.optional and not value:
                    continue
                known = self.bound.get(operand.name)
                if known is None:
                    self.bound[operand.name] = value
                    self.trail.append((self.bound, operand.name))
                elif known != value and not self.view.constants.same(known, value):
                    found = f"{operand.name} is {value} here"
                    self._failed(SAME_VALUE, reader, found, f"{known}, as where it was read first")
                    return
            elif isinstance(operand, Literal):
                if not self._literal(operand, value, reader, place):
                    return
            elif value:
                self._failed(OPERANDS, reader, f"operand {place} is {value}", "an operand that is left out")
                return
        if None in self.state:
            yield from self._forward()
        else:
            yield self._bindings()

    def _output(self, operand: Output, value: str, reader: Node, rest: Goals) -> Iterator[Bindings]:
        key = (operand.step, operand.index)
        known = self.bound.get(key)
        if known is not None:
            if known == value:
                yield from self._solve(rest)
            else:
                self._failed(SAME_VALUE, reader, f"it reads {value}", f"{known}, which other steps read")
            return
        step = self.program.steps[operand.step]
        if self.state[operand.step] is not None:
            return
        producer = self.view.producers.get(value)
        if producer is None or producer.op not in step.by_op:
            if step.optional:  # what comes after it says what is missing
                pass
            elif producer is None:
                self._failed(PRODUCED, reader, f"{value or 'nothing'} is made by no node", _names(step))
            else:
                self._failed(OPERATOR, producer, producer.op, f"expected {_names(step)}")
        elif operand.index >= len(producer.outputs) or producer.outputs[operand.index] != value:
            self._failed(OPERATOR, producer, f"{value} is another output of {producer.op}", f"output {operand.index}")
        elif not self._exposed(key, value, producer):
            yield from self._take(step, producer, rest)
        if step.optional:
            mark = len(self.trail)
            self._put(operand.step, SKIPPED)
            if self._choose(step, NONE) and self._set(self.bound, key, value):
                yield from self._solve((step.operands[0], value, reader, 0, rest))
            self._undo(mark)

    def _exposed(self, key: tuple[int, int], value: str, producer: Node) -> bool:
        """Whether the value, interior for sure, is visible outside: no need to search below it."""
        if not self.prune or not self.program.single or value == self.visible:
            return False
        if value in self.view.output_names:
            self._failed(OUTPUT, producer, f"{value} is an output of the graph", "a value that only the match reads")
            return True
        readers = self.view.consumers.get(value, ())
        if len(readers) <= self.program.readers.get(key, 0):
            return False
        if self.fail is not None:
            clause = CAPTURED if any(value in r.captures for r in readers) else EXPOSED
            others = ", ".join(f"{r.name} ({r.op})" for r in readers[:4])
            self._failed(clause, producer, f"{value} is read by {others}", "a value that only the match reads")
        return True

    # --- steps ---------------------------------------------------------------------------------------------------

    def _take(self, step: StepProgram, node: Node, rest: Goals) -> Iterator[Bindings]:
        """The step is this node: all alternatives, all operand orders."""
        self.trials += 1
        if self.trials > MAX_TRIALS:
            self._failed(BUDGET, node, f"{self.trials} trials", f"a pattern that fits or fails within {MAX_TRIALS}")
            return
        if node.name in self.used:
            self._failed(SAME_VALUE, node, f"{node.name} stands for another step already", "a node of its own")
            return
        inputs = node.inputs
        count = len(inputs)
        while count and not inputs[count - 1]:
            count -= 1
        if not step.least <= count <= len(step.operands):
            self._failed(OPERANDS, node, f"{count} of {node.op}", str(len(step.operands)))
            return
        for alternative, rules, swap in step.by_op[node.op]:
            bound, wrong = rules.check(self.view.graph, node)
            if bound is None:
                self._failed(ATTRIBUTE, node, f"{wrong[0]} = {wrong[1]!r} of {node.op}", f"{wrong[2]!r}")
                continue
            mark = len(self.trail)
            if self._bind_step(step, node, alternative.key, bound):
                inner = len(self.trail)
                operands, again = step.operands, swap and inputs[0] != inputs[1]
                while True:
                    goals = rest
                    for i in range(count - 1, -1, -1):
                        goals = (operands[i], inputs[i], node, i, goals)
                    yield from self._solve(goals)
                    self._undo(inner)
                    if not again:
                        break
                    operands, again = swapped(step.operands), False
            self._undo(mark)

    def _bind_step(self, step: StepProgram, node: Node, key: str, attributes: Mapping[str, Any]) -> bool:
        self._put(step.index, node)
        self._set(self.used, node.name, step.index)
        if not self._choose(step, key):
            return False
        for name, value in attributes.items():
            if name in self.attributes and not equal(self.attributes[name], value):
                found = f"{name} = {value!r}"
                self._failed(ATTRIBUTE, node, found, f"{self.attributes[name]!r}, as where it was bound first")
                return False
            self._set(self.attributes, name, value)
        return all(self._set(self.bound, (step.index, i), o) for i, o in enumerate(node.outputs) if o)

    def _choose(self, step: StepProgram, key: str) -> bool:
        if not step.choice:
            return True
        known = self.choices.get(step.choice)
        if known is None:
            return self._set(self.choices, step.choice, key)
        if known != key and self.root is not None:
            self._failed(CHOICE, self.root, f"{step.choice} is {key}", f"{known}, as where it was bound first")
        return known == key

    def _literal(self, literal: Literal, value: str, reader: Node, place: int) -> bool:
        graph = self.view.graph
        spec = self.program.ops[reader.op]
        if isinstance(literal.value, tuple) and (reader.op in _OPEN or [*attribute_names(literal.value)]):
            return self._numbers(literal, value, reader, place)
        rank = None
        if spec.inputs[min(place, len(spec.inputs) - 1)].rstrip("?*") in ("axes", "axis"):
            rank = rank_of(graph, reader.inputs[0])
            if rank is not None and reader.op == "Unsqueeze":
                rank += len(literal.value) if isinstance(literal.value, tuple) else 1
        if self.view.constants.is_literal(value, literal, rank):
            return self._set(self.literals, (self.used[reader.name], place), value)
        if self.fail is not None:
            array = graph.constants.get(value) if graph.is_constant(value) else None
            shown = value if array is None else f"{value} = {array.reshape(-1)[:4].tolist()} {array.dtype}{array.shape}"
            self._failed(LITERAL, reader, f"{shown or 'nothing'} as operand {place}", f"the constant {literal.value!r}")
        return False

    def _numbers(self, literal: Literal, value: str, reader: Node, place: int) -> bool:
        """A tuple that binds attributes, or the target of a Reshape: what it makes of its operand is compared."""
        graph, wanted, found = self.view.graph, literal.value, None
        assert isinstance(wanted, tuple)
        if graph.is_constant(value) and graph.constants[value].ndim == 1:
            found = tuple(graph.constants[value].tolist())
        if reader.op == "Reshape" and found is not None:
            before, found = graph.values[reader.inputs[0]].shape, graph.values[reader.outputs[0]].shape
            if before is not None and found is not None and len(found) == len(wanted):
                wanted = tuple(_meant(w, n, before, found) for n, w in enumerate(wanted))
        elif reader.op == "Split" and found is not None and len(found) == len(wanted):
            share = next((f for w, f in zip(wanted, found, strict=True) if w == -1), None)
            wanted = tuple(share if w == -1 else w for w in wanted)
        bound: dict[str, Any] = {}
        fits = found is not None and not bind(wanted, found, bound) and all(type(v) is int for v in bound.values())
        if fits and all(self._set(self.attributes, name, number) for name, number in bound.items()):
            return self._set(self.literals, (self.used[reader.name], place), value)
        shown = value if found is None else f"{value} = {found}"
        self._failed(LITERAL, reader, f"{shown or 'nothing'} as operand {place}", f"the constant {literal}")
        return False

    # --- what backward search did not reach ------------------------------------------------------------------------

    def _forward(self) -> Iterator[Bindings]:
        step = None
        for s in reversed(self.program.steps):
            if self.state[s.index] is None and self._unused(s):
                mark = len(self.trail)
                self._put(s.index, DROPPED)
                yield from self._forward()
                self._undo(mark)
                return
        waiting = [s for s in self.program.steps if self.state[s.index] is None]
        for constant in (False, True):  # what is computed has fewer readers
            for s in waiting:
                if step is None and (found := self._known_operand(s, constant)):
                    step, value = s, found
        if step is None:
            if None not in self.state:
                yield self._bindings()
            return
        for reader in self.view.consumers.get(value, ()):
            if reader.op in step.by_op and reader.name not in self.used:
                yield from self._take(step, reader, None)
        first = step.operands[0]
        if step.optional and (known := self._value(first)) is not None:
            mark = len(self.trail)
            self._put(step.index, SKIPPED)
            if self._choose(step, NONE) and self._set(self.bound, (step.index, 0), known):
                yield from self._forward()
            self._undo(mark)

    def _unused(self, step: StepProgram) -> bool:
        """Whether all readers of a step's values are left out, so that it is left out too."""
        if any(step.index == at for at, _ in self.program.outputs.values()):
            return False
        readers = [
            r for r in self.program.steps if any(isinstance(o, Output) and o.step == step.index for o in r.operands)
        ]
        return all(
            self.state[r.index] == DROPPED
            or (
                self.state[r.index] == SKIPPED and not (isinstance(f := r.operands[0], Output) and f.step == step.index)
            )
            for r in readers
        )

    def _known_operand(self, step: StepProgram, constant: bool) -> str | None:
        known = [v for o in step.operands if (v := self._value(o)) and self.view.graph.is_constant(v) == constant]
        return min(known, key=lambda v: len(self.view.consumers.get(v, ())), default=None)

    def _value(self, operand: Operand) -> str | None:
        if isinstance(operand, Input):
            return self.bound.get(operand.name)
        return self.bound.get((operand.step, operand.index)) if isinstance(operand, Output) else None

    def _bindings(self) -> Bindings:
        assert self.root is not None
        steps = {i: n for i, n in enumerate(self.state) if isinstance(n, Node)}
        nodes = list(steps.values())
        if len(nodes) > 1:
            place = self.view.position
            nodes.sort(key=lambda n: place[n.name])
        return Bindings(
            self.root,
            tuple(nodes),
            FrozenDict(steps),
            FrozenDict({i: self.bound[i] for i in self.program.pattern.inputs if i in self.bound}),
            FrozenDict({n: v for n, o in self.program.outputs.items() if (v := self.bound.get(o))}),
            FrozenDict(self.attributes) if self.attributes else EMPTY,
            FrozenDict(self.choices) if self.choices else EMPTY,
            FrozenDict(self.literals) if self.literals else EMPTY,
        )

    # --- trail ---------------------------------------------------------------------------------------------------

    def _set(self, where: dict[Any, Any], key: Any, value: Any) -> bool:
        if key in where:
            return bool(where[key] == value)
        where[key] = value
        self.trail.append((where, key))
        return True

    def _put(self, step: int, state: Node | str) -> None:
        self.state[step] = state
        self.trail.append((self.state, step))

    def _undo(self, mark: int) -> None:
        while len(self.trail) > mark:
            where, key = self.trail.pop()
            if isinstance(where, list):
                where[key] = None
            else:
                del where[key]

    def _failed(self, clause: str, node: Node, found: str, expected: str) -> None:
        if self.fail is not None:
            self.fail(len(self.used), clause, node, found, expected)


def _meant(wanted: Any, place: int, before: Sequence[Any], after: Sequence[Any]) -> Any:
    """What a Reshape's target says of an extent: 0 is the operand's, -1 any."""
    if wanted == 0:
        return before[place] if place < len(before) else None
    return after[place] if wanted == -1 else wanted


def _names(step: StepProgram) -> str:
    return " or ".join(dict.fromkeys(step.by_op))


def match_pattern(
    graph: Graph | View, pattern: PatternGraph | Program, node: Node, ops: Mapping[str, OpSpec], *, legal: bool = False
) -> Iterator[Bindings]:
    """Every way in which a bare pattern fits at a node, longest first, types aside.

    ``legal``: only those whose nodes may become one node; without it, interior values may have other readers.
    """
    view = graph if isinstance(graph, View) else View(graph)
    program = pattern if isinstance(pattern, Program) else Program(pattern, ops)
    for anchor, (step, _) in enumerate(program.anchors):
        if node.op in step.by_op:
            for found in Search(view, program, prune=legal).at(node, anchor):
                if not legal or not view.legality.check(found.nodes, found.inputs.values(), found.outputs.values()):
                    yield found


def scan(view: View, index: PatternIndex) -> Iterator[tuple[Node, int, int]]:
    """(node, pattern, anchor) for every candidate of an index in a graph, in node order."""
    memo: dict[tuple[int, int], Any] = {}
    for node in view.graph.nodes:
        if node.op in index.by_root:
            for i, anchor in index.candidates(view.signatures, node, memo):
                yield node, i, anchor
