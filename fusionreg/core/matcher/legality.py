"""When a set of nodes may become one node. Floor 2; knows the graph alone, no pattern.

Each rule is a function of its own with its clause as text, so that a refusal says which rule held the match back:
no interior value is read outside, is a graph output, or is captured by a sub-graph; no input is computed inside;
the contraction makes no cycle; nothing that the match touches is written in place while it runs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from ..ir import Graph, Node

EXPOSED = "no interior value is read outside the match"
OUTPUT = "no interior value is a graph output"
CAPTURED = "no interior value is captured by a sub-graph"
INSIDE = "no input is computed inside the match"
CYCLE = "fusing makes no cycle"
MUTATION = "no mutation between the matched nodes"
INJECTIVE = "every pattern step is a node of its own"
SUBGRAPH = "no matched node has sub-graphs"

#: Operators whose output may share memory with their first input where a frontend keeps views as views.
VIEWS = frozenset(
    {"Cast", "CastLike", "Dropout", "Expand", "Flatten", "Gather", "Identity", "Reshape", "Slice", "Split", "Squeeze"}
    | {"Transpose", "Unsqueeze"}
)


@dataclass(frozen=True, slots=True)
class Violation:
    """One rule that a node set breaks.

    Attributes:
        clause: the rule, as one of this module's texts.
        node: the node where it shows.
        found, expected: the two halves of the message.
    """

    clause: str
    node: str
    found: str
    expected: str

    def __str__(self) -> str:
        return f"{self.clause}: {self.found} — {self.expected}"


class Legality:
    """The rules for one graph. What they need of the graph is indexed once, on first use."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._position = graph.position
        self._consumers = graph.consumers
        self._producers = graph.producers

    def check(
        self, nodes: Sequence[Node], inputs: Iterable[str], outputs: Collection[str], kept: Collection[str] = ()
    ) -> Violation | None:
        """The first rule that fusing ``nodes`` would break, None when it breaks none.

        ``nodes``: in topological order; ``inputs``: values they may read from outside (constants that the match
        absorbs need not be among them); ``outputs``: values that stay visible; ``kept``: names of nodes that stay
        beside the fused one, and serve all other readers.
        """
        inside = {n.name: n for n in nodes}
        if len(inside) != len(nodes):
            twice = next(n for i, n in enumerate(nodes) if n in nodes[:i])
            return Violation(INJECTIVE, twice.name, f"{twice.name} stands for two steps", "different nodes")
        made: dict[str, Node] = {}
        for n in nodes:
            if n.graphs:
                return Violation(SUBGRAPH, n.name, f"{n.op} has sub-graphs", "plain operators")
            for o in n.outputs:
                if o:
                    made[o] = n
        for name in inputs:
            if name in made:
                found = f"input {name} is written by {made[name].name}"
                return Violation(INSIDE, made[name].name, found, "a value from outside")
        for name, producer in made.items():
            if name not in outputs and producer.name not in kept and (bad := self.exposure(name, producer, inside)):
                return bad
        last = nodes[-1]
        early = [v for v in outputs if made.get(v, last) is not last]
        bad = self._cycle(nodes, inside, early) if early else None
        return bad or (self._mutation(nodes, inside, made) if self.mutations else None)

    def exposure(self, value: str, producer: Node, inside: Mapping[str, Node]) -> Violation | None:
        """Whether an interior value is visible from outside."""
        if value in self.graph.output_names:
            return Violation(
                OUTPUT, producer.name, f"{value} is an output of the graph", "a value that only the match reads"
            )
        for reader in self._consumers.get(value, ()):
            if reader.name in inside:
                continue
            if value in reader.captures and value not in reader.inputs:
                found = f"{value} is captured by a sub-graph of {reader.name}"
                return Violation(CAPTURED, producer.name, found, "a value that only the match reads")
            found = f"{value} is read by {reader.name} ({reader.op}) too"
            return Violation(EXPOSED, producer.name, found, "a value that only the match reads")
        return None

    def _cycle(self, nodes: Sequence[Node], inside: Mapping[str, Node], early: Sequence[str]) -> Violation | None:
        """A path that leaves the match and comes back lies between its first and last node: only those are walked.

        ``early``: outputs that nodes other than the last make; nothing else is read outside before the last node.
        """
        at = self._position
        last = at[nodes[-1].name]
        stack = [
            (r, v) for v in early for r in self._consumers.get(v, ()) if at[r.name] < last and r.name not in inside
        ]
        seen: set[str] = set()
        while stack:
            node, start = stack.pop()
            if node.name in seen or at[node.name] > last:
                continue
            seen.add(node.name)
            for out in node.outputs:
                for reader in self._consumers.get(out, ()) if out else ():
                    if reader.name in inside:
                        found = f"{start} reaches {reader.name} again through {node.name} ({node.op})"
                        return Violation(CYCLE, reader.name, found, "no path out of the match and back")
                    stack.append((reader, start))
        return None

    def _mutation(
        self, nodes: Sequence[Node], inside: Mapping[str, Node], made: Mapping[str, Node]
    ) -> Violation | None:
        for n in nodes:
            if mutated(n):
                return Violation(
                    MUTATION, n.name, f"{n.name} writes {', '.join(mutated(n))} in place", "pure operators"
                )
        touched = {self.alias(v) for n in nodes for v in n.reads} | {self.alias(v) for v in made}
        first = min(self._position[n.name] for n in nodes)
        last = max(self._position[n.name] for n in nodes)
        for at, node in self.mutations:
            if first < at < last and node.name not in inside:
                for name in mutated(node):
                    if self.alias(name) in touched:
                        where = f"between {nodes[0].name} and {nodes[-1].name}"
                        found = f"{node.name} ({node.op}) writes {name} in place {where}"
                        return Violation(MUTATION, node.name, found, "no write to what the match reads or makes")
        return None

    @cached_property
    def mutations(self) -> tuple[tuple[int, Node], ...]:
        """Every node that writes in place, with its position."""
        return tuple((i, n) for i, n in enumerate(self.graph.nodes) if mutated(n))

    def alias(self, value: str) -> str:
        """A name shared by all values that may lie in the same memory as ``value``."""
        return self._aliases.get(value, value)

    @cached_property
    def _aliases(self) -> Mapping[str, str]:
        return aliases(self.graph)


def mutated(node: Node) -> tuple[str, ...]:
    """Names of this graph that the node writes in place, its sub-graphs' writes included."""
    if not node.graphs or not any(mutated(n) for g in node.graphs.values() for n in g.nodes):
        return node.mutates
    return tuple(dict.fromkeys((*node.mutates, *filter(None, node.inputs), *sorted(node.captures))))


def aliases(graph: Graph) -> Mapping[str, str]:
    """Value → one name for all values that may share its memory: views, and in-place results with what they wrote."""
    parent: dict[str, str] = {}

    def root(name: str) -> str:
        while parent.get(name, name) != name:
            parent[name] = parent.get(parent[name], parent[name])
            name = parent[name]
        return name

    for n in graph.nodes:
        sources = list(mutated(n))
        if n.op in VIEWS:
            sources += n.inputs[:1]
        elif "::" in n.op or n.graphs:  # an operator that we do not know may hand out views of anything it reads
            sources += n.reads
        for source in filter(None, sources):
            for out in filter(None, n.outputs):
                parent[root(out)] = root(source)
    return {name: root(name) for name in parent}


def hazards(graph: Graph) -> Iterator[tuple[str, str]]:
    """Pairs (earlier, later) of nodes whose order in-place writes fix beyond the data flow."""
    if not any(mutated(n) for n in graph.nodes):
        return
    group = aliases(graph)
    touched: dict[str, list[str]] = {}
    writer: dict[str, str] = {}
    for n in graph.nodes:
        written = {group.get(v, v) for v in mutated(n)}
        for name in {group.get(v, v) for v in (*n.reads, *n.outputs) if v}:
            if name in writer:
                yield writer[name], n.name
            touched.setdefault(name, []).append(n.name)
        for name in written:
            yield from ((earlier, n.name) for earlier in touched[name] if earlier != n.name)
            writer[name], touched[name] = n.name, [n.name]
