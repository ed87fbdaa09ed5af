"""Sites that are legal but for values in between that are read elsewhere: what makes those runs beside the fused call.

The fused call computes such a value for itself, and the nodes that give it to its other readers stay. That is legal
wherever running a node twice is; whether it pays, the planner says.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

from ..dtypes import DTYPES
from ..ir import Graph, Node
from ..pattern.instantiate import PatternGraph
from ..spec import OpSpec
from .checks import Checker, Fusion, Refused
from .match import Bindings, Match
from .program import PatternIndex
from .search import Search, View, scan

#: Ways to bind one pattern at one root that are looked at.
MOST = 64
#: Operators of which a second run gives something else.
RANDOM = frozenset({"fusionreg::Dropout", "Dropout"})


def shared(
    graph: Graph, fusions: Iterable[Fusion], ops: Mapping[str, OpSpec], legal: Iterable[Match], light: bool = False
) -> Iterator[Match]:
    """For each root and fusion the largest such site that is larger than what is legal there as it stands.

    Args:
        graph, fusions, ops: as for :func:`.find.find`.
        legal: what that found.
        light: only sites beside which nothing runs but what makes indices and masks, as all layers of a model read
            them: running that takes as good as nothing.
    """
    entries = sorted(fusions, key=lambda f: (f.spec.name, f.plugin))
    patterns = [(f, s) for f in entries for s in range(len(f.patterns))]
    if light:
        read = {n.op for n in graph.nodes if _light(graph, n) and len(graph.consumers.get(n.outputs[0], ())) > 1}
        patterns = [(f, s) for f, s in patterns if _calls(f.patterns[s], read)] if read else []
        if not patterns:
            return
    index = PatternIndex([f.patterns[s] for f, s in patterns], ops)
    view, checkers = View(graph), {id(f): Checker(f, ops) for f in entries}
    largest: dict[tuple[str, str, str], int] = {}
    for m in legal:
        key = (m.root, m.base or m.fusion, m.plugin)
        largest[key] = max(largest.get(key, 0), len(m.nodes))
    best: dict[tuple[int, str, str], Match] = {}
    for node, i, anchor in scan(view, index):
        fusion, spelling = patterns[i]
        for tried, b in enumerate(Search(view, index.programs[i], prune=False).at(node, anchor)):
            if tried == MOST:
                break
            kept = beside(view, b)
            if light and not all(_light(graph, graph.node_by_name[n]) for n in kept):
                continue
            if not kept or len(b.nodes) <= largest.get((node.name, fusion.spec.name, fusion.plugin), 0):
                continue
            try:
                found = checkers[id(fusion)].match(view, spelling, b, kept)
            except Refused:
                continue
            at = (view.position[node.name], fusion.spec.name, fusion.plugin)
            if at not in best or _order(found) > _order(best[at]):
                best[at] = found
    yield from (best[at] for at in sorted(best))


def _light(graph: Graph, n: Node) -> bool:
    """Whether a node makes indices, or truths."""
    row = DTYPES.get(graph.values[n.outputs[0]].dtype) if len(n.outputs) == 1 else None
    return row is not None and not row.floating


def _calls(pattern: PatternGraph, names: Collection[str]) -> bool:
    return any(a.op in names for s in pattern.steps for a in s.alternatives)


def _order(m: Match) -> tuple[int, int]:
    return len(m.nodes), -len(m.kept)


def beside(view: View, b: Bindings) -> tuple[str, ...]:
    """The nodes that have to run beside a fused call, for readers outside of it; nothing where there are none, or where
    one of them must not run twice, or gives the call's own result."""
    inside = {n.name: n for n in b.nodes}
    outputs = set(b.outputs.values())
    made = {o: n for n in b.nodes for o in n.outputs if o}
    pending = [v for v, n in made.items() if v not in outputs and view.legality.exposure(v, n, inside) is not None]
    kept: dict[str, None] = {}
    while pending:
        node = made.get(value := pending.pop())
        if node is None or value in outputs or node.name in kept:
            continue
        if node.op in RANDOM or len(node.outputs) != 1 or node.mutates:
            return ()
        kept[node.name] = None
        pending += filter(None, node.inputs)
    return tuple(n.name for n in b.nodes if n.name in kept)
