"""Where a rule that makes a layer of experts nearly fits, and why it does not. Floor 3.

Fusions of experts are written for canonical operators: where a layer was not lifted, no fusion comes near it, and what
has to be told is what the rule found.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ..ir import Graph, Node
from ..matcher.match import FailedMatch
from ..matcher.search import Search, View
from ..ops import Vocabulary
from . import expert_loops, experts
from .engine import Compiled, Rule, compile_rules
from .site import Site

CONDITION = "the rule's condition"
#: Steps that must fit before a rule is told of, and operators of it that a graph may lack.
_LEAST, _LACKING = 4, 2
_LAYERS = ("sorted_experts", "batched_experts")


def near_lifts(graph: Graph, ops: Vocabulary) -> list[FailedMatch]:
    """For each root and rule the deepest partial fit in a lifted graph, nearest first."""
    present = {n.op for n in graph.nodes}
    layers = [r for r in experts.RULES if r.name in _LAYERS]
    rules = [r for r in (*layers, *expert_loops.TURNS) if len(r.needs - present) <= _LACKING]
    if not rules:
        return []
    compiled, view = compile_rules(rules, ops), View(graph)
    best: dict[tuple[str, str], tuple[float, FailedMatch | None]] = {}
    for node in graph.nodes:
        for i, anchor in compiled.index.by_root.get(node.op, ()):
            failed = _failure(view, compiled, i, anchor, node)
            near = 1.0 if failed is None else failed.depth / len(compiled.index.programs[i].steps)
            key = rules[i].name, node.name
            if key not in best or near > best[key][0]:
                best[key] = near, failed
    for root, (depth, why) in expert_loops.unfinished(graph, ops).items():
        node = graph.node_by_name[root]
        told = _told(expert_loops.TURNS[0])
        failed = FailedMatch(told, root, depth, CONDITION, root, node.source, why, "a turn for each expert of a layer")
        best[expert_loops.TURNS[0].name, root] = 1.0, failed
    found = sorted(best.items(), key=lambda item: (-item[1][0], view.position[item[0][1]]))
    return [failed for _, (_, failed) in found if failed is not None and failed.depth >= _LEAST]


def _told(rule: Rule) -> str:
    return f"lifting: {rule.name}"


def _failure(view: View, compiled: Compiled, i: int, anchor: int, node: Node) -> FailedMatch | None:
    """The deepest failure at a node; None where the node ends a whole turn of a loop: what is missing are others."""
    program, rule = compiled.index.programs[i], compiled.rules[i]
    deepest = FailedMatch(_told(rule), node.name, 0, "", node.name, node.source, "", "")

    def fail(depth: int, clause: str, where: Node, found: str, expected: str) -> None:
        nonlocal deepest
        if depth > deepest.depth:
            deepest = replace(
                deepest,
                depth=depth,
                clause=clause,
                node=where.name,
                source=where.source,
                found=found,
                expected=expected,
            )

    for bound in Search(view, program, fail, prune=False).at(node, anchor):
        if rule in expert_loops.TURNS:
            return None
        depth = len(bound.nodes)
        broken = view.legality.check(bound.nodes, bound.inputs.values(), bound.outputs.values())
        if broken:
            fail(depth, broken.clause, view.graph.node_by_name[broken.node], broken.found, broken.expected)
            continue
        site = Site(view.graph, bound, program.pattern)
        checks: tuple[Callable[[Site], object], ...] = (*rule.conditions, *((rule.derive,) if rule.derive else ()))
        refused = next((check for check in checks if not check(site)), None)
        if refused is not None:
            expected = (refused.__doc__ or rule.name).strip().splitlines()[0]
            fail(depth, CONDITION, node, "shapes, constants or indices are others", expected)
    return deepest
