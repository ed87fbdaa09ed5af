"""Found once, known wherever a graph repeats itself: models are stacks of equal layers. Floor 2.

What a pattern with one output does at a node follows from the node's *cone*: the nodes it reaches backwards as deep as
the pattern goes, their attributes, how they are wired, types, constants or not, and who else reads or sees each value.
Two nodes with equal cones have the same match but for the names. Whatever depends on more (the contents of a constant,
nodes after the root, in-place writes, sub-graphs) is searched each time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ..frozen import FrozenDict
from ..ir import Node
from ..pattern.graph import Literal, Output
from .checks import Checker
from .match import Match
from .program import PatternIndex, Program
from .search import View

#: Patterns deeper than this, and cones with more nodes, are searched each time.
DEEPEST, LARGEST = 8, 48
#: Where three of four nodes, of so many in a row, have a cone of their own, eight times as many are only searched.
TRIAL = 64

_PLAIN = (int, float, str, bool, type(None))


@dataclass(frozen=True, slots=True)
class _Shape:
    """A match by places in its cone; ``match`` is the one it was made from."""

    match: Match
    nodes: tuple[int, ...]
    inputs: tuple[tuple[str, int], ...]
    outputs: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Site:
    """A node with its cone, and what is known of equal ones: (pattern, anchor) → a match's shape, None for no match."""

    root: Node
    nodes: tuple[Node, ...]
    values: dict[str, int]
    known: dict[tuple[int, int], _Shape | None]


class Repeats:
    """The cones of one graph."""

    def __init__(self, view: View, index: PatternIndex) -> None:
        self.view = view
        self._deep = [_depth(p) if _follows(p) else 0 for p in index.programs]
        self._levels: dict[str, int] = {}
        for op, rows in index.by_root.items():
            self._levels[op] = max((self._deep[i] for i, _ in rows), default=0)
        self._off = bool(view.legality.mutations)
        self._ids: dict[Any, int] = {}
        self._node_ids: dict[str, int | None] = {}
        self._cones: dict[tuple[int, ...], dict[tuple[int, int], _Shape | None]] = {}
        self._asked = self._before = self._pause = 0
        self._last: tuple[Node | None, Site | None] = (None, None)

    def site(self, node: Node, pattern: int) -> Site | None:
        """The node with its cone; None where this pattern is searched each time."""
        if self._off or not self._deep[pattern]:
            return None
        if self._last[0] is not node:
            self._last = node, self._site(node)
        return self._last[1]

    def again(self, site: Site, pattern: int, anchor: int) -> Match | None:
        """The match that a known shape gives here."""
        shape = site.known[pattern, anchor]
        if shape is None:
            return None
        names, place = list(site.values), self.view.position
        nodes = sorted([site.nodes[i].name for i in shape.nodes], key=place.__getitem__)
        return replace(
            shape.match,
            root=site.root.name,
            nodes=tuple(nodes),
            inputs=FrozenDict([(n, names[i]) for n, i in shape.inputs]),
            outputs=FrozenDict([(n, names[i]) for n, i in shape.outputs]),
        )

    def learn(self, site: Site, pattern: int, anchor: int, found: Match | None) -> None:
        """Keeps what the search gave at ``site``."""
        if found is None:
            site.known[pattern, anchor] = None
            return
        at = {n.name: i for i, n in enumerate(site.nodes)}
        values = site.values
        inputs, outputs = found.inputs.items(), found.outputs.items()
        if all(n in at for n in found.nodes) and all(v in values for _, v in (*inputs, *outputs)):
            site.known[pattern, anchor] = _Shape(
                found,
                tuple(at[n] for n in found.nodes),
                tuple((n, values[v]) for n, v in inputs),
                tuple((n, values[v]) for n, v in outputs),
            )

    def _site(self, root: Node) -> Site | None:
        if self._pause:
            self._pause -= 1
            return None
        self._asked += 1
        if self._asked % TRIAL == 0:
            fresh, self._before = len(self._cones) - self._before, len(self._cones)
            self._pause = 8 * TRIAL if 4 * fresh > 3 * TRIAL else 0
        producers, levels = self.view.producers, self._levels[root.op]
        nodes, depth = [root], [0]
        values = {o: i for i, o in enumerate(root.outputs)}
        key: list[int] = []
        for i, node in enumerate(nodes):  # which grows
            own = self._id(node)
            if own is None:
                return None
            key.append(own)
            for name in node.inputs:
                at = values.get(name)
                if at is None:
                    producer = producers.get(name) if depth[i] + 1 < levels else None
                    if producer is None:
                        at = values[name] = len(values)
                        key.append(-1 - self._leaf(name))
                    else:
                        nodes.append(producer)
                        depth.append(depth[i] + 1)
                        for o in producer.outputs:
                            values.setdefault(o, len(values))
                        at = values[name]
                key.append(at)
            if len(nodes) > LARGEST:
                return None
        return Site(root, tuple(nodes), values, self._cones.setdefault(tuple(key), {}))

    def _id(self, node: Node) -> int | None:
        """What of a node does not depend on its neighbours, as a number; None for a node that no cone may have."""
        if node.name in self._node_ids:
            return self._node_ids[node.name]
        found: int | None = None
        if not node.graphs and all(map(_plain, node.attrs.values())) and len(set(node.outputs)) == len(node.outputs):
            values, readers, visible = self.view.graph.values, self.view.consumers, self.view.output_names
            made = tuple(
                [(v.dtype, v.shape, len(readers.get(o, ())), o in visible) for o in node.outputs for v in [values[o]]]
                if all(node.outputs)
                else [None]
            )
            attrs = repr(sorted(node.attrs.items())) if node.attrs else ""
            found = None if made == (None,) else self._number((node.op, attrs, len(node.inputs), made))
        self._node_ids[node.name] = found
        return found

    def _leaf(self, name: str) -> int:
        if not name:
            return self._number(None)
        value = self.view.graph.values[name]
        return self._number((value.dtype, value.shape, self.view.graph.is_constant(name)))

    def _number(self, key: Any) -> int:
        return self._ids.setdefault(key, len(self._ids))


def depended(checker: Checker, view: View) -> int:
    """Grows with every answer that depended on what a constant holds."""
    return checker.grown + view.constants.compared


def _plain(value: Any) -> bool:
    return isinstance(value, _PLAIN) or (isinstance(value, tuple) and all(map(_plain, value)))


def _follows(program: Program) -> bool:
    """Whether everything about a match of the pattern is in the cone of its root."""
    read = {o.step for s in program.steps for o in s.operands if isinstance(o, Output)}
    sinks = [s for s in program.steps if s.index not in read]
    literal = any(isinstance(o, Literal) for s in program.steps for o in s.operands)
    return program.single and len(sinks) == 1 and not literal and _depth(program) <= DEEPEST


def _depth(program: Program) -> int:
    """Steps on the longest way from the root to an operand."""
    deep: list[int] = []
    for s in program.steps:  # a step reads earlier ones
        deep.append(1 + max((deep[o.step] for o in s.operands if isinstance(o, Output)), default=0))
    return max(deep, default=0)
