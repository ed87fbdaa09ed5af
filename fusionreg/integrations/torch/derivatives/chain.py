"""The gradients of a graph of operators, and what of its values they read.

Nothing of the forward pass is needed but inputs and outputs of the graph: the values in between that the formulas read
are computed again. Which they are is known beforehand: it decides what is saved, and what a plan counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from fusionreg.core.ir import Graph, Node
from fusionreg.core.ops import Vocabulary, complete
from fusionreg.core.planner.executor import PRODUCTS
from fusionreg.core.planner.training import Backward

from . import RULES
from .passing import Part, Pass
from .rule import Formula


class Chain:
    """The gradients of some inputs of a graph.

    Args:
        graph: types are known; extents may be symbolic.
        wanted: inputs whose gradients somebody asks for.
        ops: the vocabulary.

    Attributes:
        refusal: why there are none, in words; "" where there are.
        outputs: outputs of the graph that carry gradients.
        saved: the inputs and outputs that are read, in that order.
        parts: the formulas, in the order of the backward pass.
        again: names of the nodes that are computed again.
        values: what they give to the formulas.
    """

    def __init__(self, graph: Graph, wanted: Iterable[str], ops: Vocabulary) -> None:
        self.graph, self.ops = graph, ops
        self.wanted = tuple(i for i in graph.inputs if i in set(wanted) and _floating(graph, i))
        self.refusal = ""
        self.attributes = {n.name: complete(ops[n.op], n.attrs) for n in graph.nodes if n.op in ops}
        active = self._active()
        self.outputs = tuple(o for o in graph.outputs if o in active)
        self.parts: list[Part] = []
        needed: dict[str, None] = {}
        reached = set(self.outputs)
        for node in reversed(graph.nodes):
            if not self.refusal and any(o in reached for o in node.outputs):
                for name in self._differentiate(node, active, reached):
                    needed.setdefault(name)
        at_hand = {*graph.inputs, *graph.outputs}
        again = self._closure(needed)
        read = {*needed, *(i for n in again for i in graph.node_by_name[n].inputs if i)}
        self.saved = tuple(v for v in (*graph.inputs, *dict.fromkeys(graph.outputs)) if v in read and v in at_hand)
        self.again = tuple(n.name for n in graph.nodes if n.name in again)
        self.values = tuple(v for v in needed if v in graph.producers and graph.producers[v].name in again)

    @property
    def backward(self) -> Backward:
        """The same for a planner."""
        return Backward("", self.saved, self.graph, self.again, self.values)

    # ---- what is read -----------------------------------------------------------------------------------------------

    def _active(self) -> set[str]:
        """Values that depend on a wanted input in a way that has a derivative."""
        active = set(self.wanted)
        for node in self.graph.nodes:
            if not any(i in active for i in node.inputs):
                continue
            rule = RULES.get(node.op)
            names = self.names(node)
            if rule is not None and not any(
                i in active and n in rule.gradients for n, i in zip(names, node.inputs, strict=True)
            ):
                continue
            for name, out in zip(self.results(node), node.outputs, strict=False):
                if out and _floating(self.graph, out) and (rule is None or name not in rule.constant):
                    active.add(out)
        return active

    def _differentiate(self, node: Node, active: set[str], reached: set[str]) -> list[str]:
        """Notes the formulas for the gradients that a node passes on; the values that they read."""
        names, outputs = self.names(node), self.results(node)
        passed = [k for k, i in enumerate(node.inputs) if i in active]
        if not passed:
            return []
        rule = RULES.get(node.op)
        if rule is None:
            self.refusal = f"no derivative of {node.op} is known"
            return []
        differentiated = {f"d{n}" for n, o in zip(outputs, node.outputs, strict=False) if o in reached}
        read: list[str] = []
        given: set[int] = set()
        for k in passed:
            name = names[k]
            if name not in rule.gradients:
                continue
            if (choice := id(rule.gradients[name])) in given:
                continue
            given.add(choice)
            formula = self._cheapest(node, rule.gradients[name])
            asked = {f"d{n}" for n in outputs} & set(formula.reads)
            if not differentiated <= asked or (node.op in ("MatMul", "Gemm") and self._vectors(node)):
                self.refusal = f"no derivative of {node.op} with these operands and outputs is known"
                return []
            if formula.gives == ("args",):
                mine = tuple(i in active for i in node.inputs)
            else:
                mine = tuple(self.value_of(node, n) in active for n in formula.gives)
            self.parts.append(Part(node, rule, formula, mine))
            read += self._reads(node, formula)
        reached.update(node.inputs[k] for k in passed)
        return read

    def _vectors(self, node: Node) -> bool:
        return any(len(self.graph.values[i].shape or ()) < 2 for i in node.inputs[:2])

    def _cheapest(self, node: Node, formulas: Sequence[Formula]) -> Formula:
        """The formula that needs least to be computed again; products count most."""

        def work(formula: Formula) -> tuple[int, int]:
            again = [self.graph.node_by_name[n] for n in self._closure(self._reads(node, formula))]
            return sum(n.op in PRODUCTS for n in again), len(again)

        return min(formulas, key=work)

    def _reads(self, node: Node, formula: Formula) -> list[str]:
        """The values of the graph that a formula reads."""
        names = {*self.names(node), *self.results(node)}
        found: list[str] = []
        for name in formula.reads:
            if name == "args" and self._variadic(node):
                found += filter(None, node.inputs)
            elif name in names and (value := self.value_of(node, name)):
                found.append(value)
        return found

    def _closure(self, names: Iterable[str]) -> set[str]:
        """The nodes that have to run for these values, inputs and outputs of the graph being at hand."""
        at_hand = {*self.graph.inputs, *self.graph.outputs}
        found: set[str] = set()
        pending = list(names)
        while pending:
            name = pending.pop()
            node = None if name in at_hand else self.graph.producers.get(name)
            if node is not None and node.name not in found:
                found.add(node.name)
                pending += filter(None, node.inputs)
        return found

    def _variadic(self, node: Node) -> bool:
        return self.ops[node.op].inputs[-1].endswith("*")

    def names(self, node: Node) -> tuple[str, ...]:
        """The operator's name for each operand of a node."""
        if node.op not in self.ops:
            return ("",) * len(node.inputs)
        declared = [n.rstrip("?*") for n in self.ops[node.op].inputs]
        return tuple(declared[min(k, len(declared) - 1)] for k in range(len(node.inputs)))

    def results(self, node: Node) -> tuple[str, ...]:
        """The operator's name for each result of a node."""
        if node.op not in self.ops:
            return ("",) * len(node.outputs)
        return tuple(n.rstrip("?*") for n in self.ops[node.op].outputs)

    def value_of(self, node: Node, name: str) -> str:
        """The value of the graph that an input or an output of a node's operator is; "" where it is left out."""
        for names, values in ((self.names(node), node.inputs), (self.results(node), node.outputs)):
            if name in names:
                at = names.index(name)
                return values[at] if at < len(values) else ""
        return ""

    # ---- computing --------------------------------------------------------------------------------------------------

    def run(
        self, saved: Mapping[str, torch.Tensor], slopes: Mapping[str, torch.Tensor], extents: Mapping[str, Any]
    ) -> dict[str, torch.Tensor]:
        """Input → gradient.

        Args:
            saved: the values of :attr:`saved`.
            slopes: output → the gradient of what is differentiated, at least one; those missing count as zero.
            extents: symbolic extent → number.
        """
        return Pass(self, saved, extents).run(slopes)

    def __repr__(self) -> str:
        again = ", ".join(self.again) or "nothing"
        return f"Chain({', '.join(self.wanted)}; reads {', '.join(self.saved)}; again {again})"


def _floating(graph: Graph, name: str) -> bool:
    return "float" in graph.values[name].dtype


__all__ = ["Chain"]
