"""Which values of a lifted graph its program can compute: what a fused call may take and give."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from fusionreg.core.ir import Graph
from fusionreg.core.matcher.match import Match

from ..operators.schema import NAMESPACE
from ..program import Call
from .glue import constant, glued, operands
from .lowering import BARRIERS, Lowered, visible
from .reading import Traced


class Reach:
    """Which values of the lifted graph a program can compute."""

    def __init__(self, traced: Traced, lowered: Lowered) -> None:
        self.graph: Graph = lowered.graph
        self.seeds = lowered.seeds
        self.values, self.place, self.foreign = traced.values, place(traced), traced.foreign
        self.visible = visible(lowered, traced.program)
        self.calls = traced.program.calls
        self.names, self.ends = lowered.names, frozenset(lowered.graph.outputs)
        #: Node that makes one of several results of a call → which call that is.
        self.several = {
            self.graph.producers[v].name: i
            for i, c in enumerate(self.calls)
            if len(c.outputs) > 1
            for o in c.outputs
            if (v := self.names.get(o, "")) in self.graph.producers
        }
        self.writers = {o: i for i, c in enumerate(self.calls) for o in c.outputs if o}

    def refusal(self, match: Match) -> str | None:
        """Why a fused call could not be put in the place of a match, None where it can."""
        for tensor, name in match.inputs.items():
            if not self._found(name):
                return f"its operand {tensor} is no value of the traced program"
        for tensor, name in match.outputs.items():
            if name not in self.visible and not self._leaves(name):
                return f"its result {tensor} is no value of the traced program"
        inside = frozenset(match.nodes)
        for call in dict.fromkeys(self.several[n] for n in match.nodes if n in self.several):
            if elsewhere := self._elsewhere(self.calls[call], inside):
                return f"{self._name(self.calls[call])} would run beside it: its result {elsewhere} is asked for too"
        return None

    def strides(self, match: Match) -> dict[str, tuple[int, ...]]:
        """Those of its operands that do not lie row by row, where they are numbers."""
        found = {}
        for tensor, name in match.inputs.items():
            value = self.values.get(self.visible.get(name, ""))
            if isinstance(value, torch.Tensor) and _numbers(value) and not value.is_contiguous():
                found[tensor] = value.stride()
        return found

    def _elsewhere(self, call: Call, inside: frozenset[str]) -> str:
        """A result of a call that others ask for and a match does not make."""
        for name in filter(None, call.outputs):
            value = self.names.get(name, "")
            writer = self.graph.producers.get(value)
            if writer is not None and writer.name in inside:
                continue
            if value in self.ends or any(n.name not in inside for n in self.graph.consumers.get(value, ())):
                return name
        return ""

    def covered(self, match: Match) -> tuple[str, ...]:
        """The calls of the program that a site takes the place of, in their order: targets without overloads."""
        return tuple(self._name(c) for c in self._calls(match) if c.target not in BARRIERS)

    def _name(self, call: Call) -> str:
        return str(self.foreign.get(call.target, call.target)).rpartition(".")[0]

    def kept(self, match: Match) -> tuple[str, ...]:
        """Those of the calls that run beside the site as well."""
        made = {o for n in match.kept for o in self.graph.node_by_name[n].outputs}
        return tuple(
            c.target.rpartition(".")[0] for c in self._calls(match) if any(self.names.get(o) in made for o in c.outputs)
        )

    def stands(self, match: Match) -> bool:
        """Whether a match is what one call of a fusion already does."""
        calls = self._calls(match)
        return len(calls) == 1 and getattr(self.foreign.get(calls[0].target), "namespace", "") == NAMESPACE

    def _calls(self, match: Match) -> list[Call]:
        stops = self._origins(match.inputs.values())
        pending = [seen for v in match.outputs.values() for seen in self._ends_of(v)]
        found: set[int] = set()
        while pending:
            name = pending.pop()
            at = self.writers.get(name)
            if name in stops or at is None or at in found:
                continue
            found.add(at)
            pending += self.calls[at].refs()
        return [self.calls[i] for i in sorted(found)]

    def _ends_of(self, name: str) -> list[str]:
        """The values of the program that a value of the graph is, or is moved into."""
        if name in self.visible:
            return [self.visible[name]]
        return [end for m in self._moved(name) for end in self._ends_of(m)]

    def _moved(self, name: str) -> list[str]:
        """What those that only move a value make of it."""
        readers = self.graph.consumers.get(name, ())
        return [n.outputs[0] for n in readers if glued(self.graph, n) and n.inputs[0] == name]

    def _origins(self, names: Iterable[str]) -> set[str]:
        """The values of the program that values of the graph are made of, by what may stand between."""
        found: set[str] = set()
        pending = list(names)
        while pending:
            name = pending.pop()
            if name in self.visible:
                found.add(self.visible[name])
            elif name in self.graph.producers:
                pending += operands(self.graph, self.graph.producers[name]) or ()
        return found

    def _found(self, name: str) -> bool:
        if name in self.seeds:
            return True
        if name in self.visible:
            value = self.values.get(self.visible[name])
            return not isinstance(value, torch.Tensor) or value.device == self.place
        if name in self.graph.constants:
            return constant(self.graph, name) is not None
        node = self.graph.producers.get(name)
        needs = operands(self.graph, node) if node is not None else None
        return needs is not None and all(map(self._found, needs))

    def _leaves(self, name: str) -> bool:
        """Whether everything that reads a value only moves it into a value of the program."""
        readers, moved = self.graph.consumers.get(name, ()), self._moved(name)
        return bool(readers) and len(moved) == len(readers) and all(m in self.visible or self._leaves(m) for m in moved)


def _numbers(value: torch.Tensor) -> bool:
    """Whether nothing about how a tensor lies is symbolic."""
    return all(type(n) is int for n in (*value.shape, *value.stride()))


def place(traced: Traced) -> torch.device:
    """Where the tensors of a program are."""
    return place_of(traced.values.get(s.name) for s in traced.program.inputs) or torch.device("cpu")


def place_of(values: Iterable[Any]) -> torch.device | None:
    """Where tensors are; None where there are none, or they are in several places. Those in CPU memory do not count
    beside others: numbers without axes go anywhere, and states of generators concern nobody."""
    found = {v.device for v in values if isinstance(v, torch.Tensor) and (v.dim() or v.device.type != "cpu")}
    other = {d for d in found if d.type != "cpu"} or found
    return other.pop() if len(other) == 1 else None
