"""A pattern prepared for searching, and the index that finds candidates by the shape of a node's surroundings. Floor 2.

Matching is linear in nodes because most (node, pattern) pairs are never looked at: a node's *signature* is its operator
with the operators of its producers, two levels deep. Graphs repeat themselves, so there are few signatures; each is
held against the patterns once, and a node looks up the patterns that could fit at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..ir import Graph, Node
from ..pattern.graph import Alternative, Input, Literal, Operand, Output, PatternGraph, Step
from ..spec import OpSpec
from .values import AttributeRules

#: Signature entries for what no node makes.
FREE, CONSTANT = -1, -2


class StepProgram:
    """One step with what the search asks of it at hand."""

    __slots__ = ("by_op", "choice", "gates", "index", "least", "operands", "optional", "outputs", "step")

    def __init__(self, step: Step, ops: Mapping[str, OpSpec], literal_rank: Any = None) -> None:
        self.step = step
        self.index = step.index
        operands = list(step.operands)
        while operands and operands[-1] is None:
            operands.pop()
        self.operands: tuple[Operand, ...] = tuple(operands)
        while operands and isinstance(operands[-1], Input) and operands[-1].optional:
            operands.pop()
        self.least = len(operands)
        """Operands that a node has at least: those at the end that it can do without are not counted."""
        self.outputs = step.outputs
        self.optional = step.optional
        self.choice = step.choice
        self.gates = step.gates
        self.by_op: dict[str, list[tuple[Alternative, AttributeRules, bool]]] = {}
        for a in step.alternatives:
            spec = ops[a.op]
            swap = spec.commutative and len(self.operands) >= 2 and self.operands[0] != self.operands[1]
            self.by_op.setdefault(a.op, []).append((a, AttributeRules(spec, a.attributes), swap))


class Program:
    """A pattern prepared for searching.

    Attributes:
        pattern: the pattern.
        steps: its steps.
        anchors: where a match can be rooted: (step, steps skipped to get there), the longest form first.
        outputs: output name → (step, output).
        readers: (step, output) → at most so many nodes may read the value when it is interior.
        single: whether the pattern has one output.
    """

    def __init__(self, pattern: PatternGraph, ops: Mapping[str, OpSpec]) -> None:
        self.pattern = pattern
        self.ops = ops
        self.steps = tuple(StepProgram(s, ops) for s in pattern.steps)
        self.outputs = {n: (o.step, o.index) for n, o in pattern.outputs.items()}
        self.single = len(pattern.outputs) == 1
        self.readers = self._count_readers()
        self.anchors = self._anchors()

    def _anchors(self) -> tuple[tuple[StepProgram, tuple[StepProgram, ...]], ...]:
        read = {r.step for s in self.pattern.steps for r in s.reads}
        sinks = [s for s in self.steps if s.index not in read]
        sink = next((s for s in sinks if not s.optional), sinks[0])
        found: list[tuple[StepProgram, tuple[StepProgram, ...]]] = []
        skipped: tuple[StepProgram, ...] = ()
        while True:
            found.append((sink, skipped))
            first = sink.operands[0] if sink.operands else None
            if not sink.optional or not isinstance(first, Output):
                return tuple(found)
            skipped = (*skipped, sink)
            sink = self.steps[first.step]

    def _count_readers(self) -> dict[tuple[int, int], int]:
        found: dict[tuple[int, int], int] = {}
        for s in reversed(self.steps):
            own = found.get((s.index, 0), 0) if s.optional else 0
            for o in set(s.operands):
                if isinstance(o, Output):
                    extra = own if s.optional and o == s.operands[0] else 0
                    found[o.step, o.index] = found.get((o.step, o.index), 0) + 1 + extra
        return found


class Signatures:
    """Signatures of a graph's nodes, interned: level 0 is the operator, level k has the producers' level k - 1."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.table: list[tuple[str, tuple[int, ...]]] = []
        self._ids: dict[tuple[str, tuple[int, ...]], int] = {}
        self._memo: tuple[dict[str, int], ...] = ({}, {}, {})

    def of(self, node: Node, level: int) -> int:
        """The id of a node's signature; :attr:`table` has (operator, ids of the producers) for it."""
        memo = self._memo[level]
        found = memo.get(node.name)
        if found is None:
            below: tuple[int, ...] = ()
            if level:
                producers, constant = self.graph.producers, self.graph.is_constant
                ids = []
                for i in node.inputs:
                    producer = producers.get(i)
                    if producer is not None:
                        ids.append(self.of(producer, level - 1))
                    else:
                        ids.append(CONSTANT if constant(i) else FREE)
                below = tuple(ids)
            key = (node.op, below) if level else (node.op, (FREE,))
            found = self._ids.get(key, -3)
            if found == -3:
                found = self._ids[key] = len(self.table)
                self.table.append(key)
            memo[node.name] = found
        return found


class PatternIndex:
    """Patterns by what they may be rooted at.

    Args:
        patterns: any number of patterns; a candidate is named by its place in this sequence.
        ops: the vocabulary they were parsed with.
    """

    def __init__(self, patterns: Sequence[PatternGraph], ops: Mapping[str, OpSpec]) -> None:
        self.programs = tuple(Program(p, ops) for p in patterns)
        self.by_root: dict[str, list[tuple[int, int]]] = {}
        for i, program in enumerate(self.programs):
            for a, (step, _) in enumerate(program.anchors):
                for op in step.by_op:
                    self.by_root.setdefault(op, []).append((i, a))

    def candidates(self, signatures: Signatures, node: Node, memo: dict[tuple[int, int], Any]) -> list[tuple[int, int]]:
        """(pattern, anchor) pairs that the node's surroundings do not rule out. ``memo``: one dict per graph."""
        found: list[tuple[int, int]] | None = self.by_root.get(node.op)
        if not found:
            return []
        for level in (1, 2):
            key = (level, signatures.of(node, level))
            known = memo.get(key)
            if known is None:
                known = memo[key] = [
                    (i, a)
                    for i, a in found
                    if _fits(self.programs[i], self.programs[i].anchors[a][0], key[1], signatures.table, level)
                ]
            found = known
            if not found:
                return found
        return found


def _fits(
    program: Program, step: StepProgram, signature: int, table: list[tuple[str, tuple[int, ...]]], level: int
) -> bool:
    """Whether a step may be a node of this signature, as far as operators tell."""
    op, below = table[signature]
    rows = step.by_op.get(op)
    if rows is None:
        return False
    if not level:
        return True
    if len(below) < step.least:
        return False
    if _operands_fit(program, step.operands, below, table, level):
        return True
    return rows[0][2] and _operands_fit(program, swapped(step.operands), below, table, level)


def swapped(operands: tuple[Operand, ...]) -> tuple[Operand, ...]:
    """The operands of a commutative operator, the first two exchanged."""
    return (operands[1], operands[0], *operands[2:])


def _operands_fit(program: Program, operands: tuple[Operand, ...], below: Any, table: Any, level: int) -> bool:
    return all(_operand_fits(program, o, b, table, level - 1) for o, b in zip(operands, below, strict=False))


def _operand_fits(program: Program, operand: Operand, signature: int, table: Any, level: int) -> bool:
    while True:
        if isinstance(operand, Literal):
            return signature == CONSTANT
        if operand is None or isinstance(operand, Input):
            return True
        step = program.steps[operand.step]
        if signature >= 0 and _fits(program, step, signature, table, level):
            return True
        if not step.optional:
            return False
        operand = step.operands[0]
