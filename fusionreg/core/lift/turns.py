"""Turns of unrolled loops, each of which adds to what the one before it gives. Floor 3."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ..ir import Node
from ..matcher.match import Bindings
from ..matcher.search import Search, View, scan
from .engine import Compiled
from .site import Site

#: Turns that follow each other, the last one first, with the numbers of their rules.
Chain = list[tuple[int, Site]]


def chains(view: View, compiled: Compiled, usual: Callable[[Site], bool] = lambda turn: True) -> Iterator[Chain]:
    """Those of a graph; ``usual``: whether a turn counts. A rule calls what a turn adds to ``base``, and its result
    ``y``."""
    turns: dict[str, tuple[int, Site]] = {}  # by the value that a turn gives
    for node, i, anchor in scan(view, compiled.index):
        for found in Search(view, compiled.index.programs[i], prune=False).at(node, anchor):
            site = Site(view.graph, found, compiled.index.programs[i].pattern)
            if usual(site):
                turns.setdefault(found.outputs["y"], (i, site))
    followed = {site.found.inputs["base"] for _, site in turns.values()}
    for value in [y for y in turns if y not in followed]:
        chain = []
        while value in turns:
            chain.append(turns[value])
            value = turns[value][1].found.inputs["base"]
        yield chain


def nodes_of(chain: Chain) -> list[Node]:
    return list({n.name: n for _, site in chain for n in site.found.nodes}.values())


def closed(view: View, turns: list[Bindings], result: str) -> bool:
    """Whether nobody else reads what the turns compute, not even the masks of their rows."""
    nodes = {n.name for t in turns for n in t.nodes}
    inner = {v for t in turns for n in t.nodes for v in n.outputs if v and v != result}
    return not inner & view.output_names and all(c.name in nodes for v in inner for c in view.consumers.get(v, ()))
