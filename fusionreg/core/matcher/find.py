"""Where in a graph which fusion applies, and where one nearly does. Floor 2.

:func:`find` anchors every pattern at its root operator, searches backwards (``search.py``), and holds what it
finds against the fusion's tensor types, constraints and the legality rules (``checks.py``). For one root the
largest legal form of a fusion is reported; smaller ones remain where an exposed value rules the larger out. Overlaps
are left to the planner.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..errors import SpecError
from ..frozen import FrozenDict
from ..ir import Graph, Node
from ..spec import WHOLE, OpSpec, Region
from .checks import ATTRIBUTE, CONSTRAINT, DTYPE, GATE, GROWTH, OUTPUTS, PRESENT, SHAPE, Checker, Fusion, Refused
from .legality import Legality, Violation
from .match import Bindings, FailedMatch, Match, Matches
from .program import PatternIndex
from .regions import PROGRAM, Maker, capture
from .repeats import Repeats, depended
from .search import VAGUE, Search, View, match_pattern, scan
from .slots import around

__all__ = [
    "ATTRIBUTE",
    "CONSTRAINT",
    "DTYPE",
    "GATE",
    "GROWTH",
    "OUTPUTS",
    "PRESENT",
    "SHAPE",
    "Bindings",
    "FailedMatch",
    "Fusion",
    "Legality",
    "Match",
    "Matches",
    "PatternIndex",
    "View",
    "Violation",
    "captured",
    "find",
    "match_pattern",
    "scan",
]


#: Bindings of one pattern at one root that are held against the fusion's rules before the search gives up: symmetric
#: patterns bind the same nodes in many orders.
MAX_REFUSALS = 256


def find(
    graph: Graph,
    fusions: Iterable[Fusion],
    ops: Mapping[str, OpSpec],
    *,
    explain: bool = False,
    maker: Maker | None = None,
) -> Matches:
    """All sites of all fusions with a pattern in a graph, overlapping ones too, ordered by root, then fusion.

    Args:
        graph: with types; values of unknown rank match nothing.
        fusions: entries of a catalog.
        ops: the vocabulary their patterns were parsed with.
        explain: also report, for each root operator and fusion without a match there, the deepest partial match.
        maker: where it is given, a site that slots take point-wise operators around is there with them, too.
    """
    entries = sorted(fusions, key=lambda f: (f.spec.name, f.plugin))
    patterns = [(e, s) for e, f in enumerate(entries) for s in range(len(f.patterns))]
    checkers: dict[int, Checker] = {}
    index = PatternIndex([entries[e].patterns[s] for e, s in patterns], ops)
    view = View(graph)
    best: dict[tuple[int, int], Match] = {}
    near: dict[tuple[int, int], FailedMatch] = {}
    candidates = _everything(view, index) if explain else scan(view, index)
    repeats = Repeats(view, index)
    for node, i, anchor in candidates:
        entry, spelling = patterns[i]
        if entry not in checkers:
            checkers[entry] = Checker(entries[entry], ops)
        key = (view.position[node.name], entry)
        fail = _recorder(near, key, entries[entry].spec.name, node) if explain else None
        site = None if explain else repeats.site(node, i)
        if site is not None and (i, anchor) in site.known:
            found = repeats.again(site, i, anchor)
        else:
            before = depended(checkers[entry], view)
            found = _largest(view, index, i, anchor, node, checkers[entry], spelling, fail)
            if site is not None and depended(checkers[entry], view) == before:
                repeats.learn(site, i, anchor, found)
        if found is not None and (key not in best or len(found.nodes) > len(best[key].nodes)):
            best[key] = found
    failures = [near[k] for k in sorted(near) if k not in best]
    matches = []
    for key in sorted(best):
        matches.append(best[key])
        slots = slots_of(entries[key[1]])
        if maker is not None and slots:
            grown = around(view, ops, maker.refuses, entries[key[1]], best[key], slots, kept_of(entries[key[1]]))
            if grown is not None:
                made = _made(maker, entries[key[1]], grown[0], grown[1].nodes, view.graph)
                if isinstance(made, FailedMatch):
                    failures.append(made)
                else:
                    matches.append(replace(grown[1], fusion=made, base=best[key].fusion))
    return Matches(tuple(matches), tuple(failures))


def _made(maker: Maker, base: Any, region: Region, nodes: Sequence[str], graph: Graph) -> str | FailedMatch:
    """The name of the fusion that a region makes of ``base``, or why it makes none: the site then matches as it is."""
    try:
        return maker.derive(base, region).spec.name
    except SpecError as e:
        root = graph.node_by_name[nodes[-1]]
        expected = "a program that makes a fusion"
        return FailedMatch(base.spec.name, root.name, len(nodes), PROGRAM, root.name, root.source, str(e), expected)


def slots_of(fusion: Any) -> tuple[str, ...]:
    """Tensors of a fusion at which one of its kernels takes point-wise operators."""
    kernels = getattr(fusion, "kernels", ())
    return tuple(dict.fromkeys(name for k in kernels for name in k.spec.regions if name != WHOLE))


def kept_of(fusion: Any) -> frozenset[str]:
    """Inputs of a fusion whose value one of its kernels stores, too, where others read what operators in front give."""
    return frozenset(name for k in getattr(fusion, "kernels", ()) for name in k.spec.keeps)


def captured(
    graph: Graph,
    fusions: Iterable[Fusion],
    ops: Mapping[str, OpSpec],
    maker: Maker,
    taken: Collection[str] = (),
    near: list[FailedMatch] | None = None,
) -> Iterator[Match]:
    """The point-wise regions of a graph, as large as they can be, each as a match of the first open fusion by name.

    Args:
        taken: names of nodes that other matches hold.
        near: takes the regions that make no fusion.
    """
    base = min((f for f in fusions if f.spec.open), key=lambda f: f.spec.name, default=None)
    if base is None:
        return
    for found in capture(graph, ops, maker.refuses, taken):
        made = _made(maker, base, found.region, [n.name for n in found.nodes], graph)
        if isinstance(made, FailedMatch):
            if near is not None:
                near.append(made)
            continue
        yield Match(
            made,
            base.plugin,
            0,
            found.nodes[-1].name,
            tuple(n.name for n in found.nodes),
            found.inputs,
            found.outputs,
            axes=found.axes,
            forms=FrozenDict(dict.fromkeys(found.region.inputs, 0)),
            base=base.spec.name,
            captured=True,
        )


def _largest(
    view: View, index: PatternIndex, i: int, anchor: int, node: Node, checker: Checker, spelling: int, fail: Any
) -> Match | None:
    """The legal form with most nodes; of equal ones the first."""
    program = index.programs[i]
    most = len(program.steps) - len(program.anchors[anchor][1])
    best: Match | None = None
    refusals = 0
    for b in Search(view, program, fail).at(node, anchor):
        if best is not None and len(b.nodes) <= len(best.nodes):
            continue
        try:
            best = checker.match(view, spelling, b)
        except Refused as refused:
            if fail is not None:
                clause, where, found, expected = refused.args
                fail(len(b.nodes), clause, where, found, expected)
            refusals += 1
            if refusals == MAX_REFUSALS:
                break
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
