"""Graph → graph: cut a sub-graph out, put fused calls in, swap nodes, drop what is dead. Floor 2.

Every function returns a new graph and leaves its argument as it was. All of them are linear in the graph, however many
sites change at once.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any, Protocol

from .dtypes import dtype
from .errors import FusionregError, GraphError
from .evaluate.evaluator import evaluate
from .frozen import EMPTY, FrozenDict
from .ir import FUSED, Graph, Node, Value
from .matcher.legality import aliases, hazards, mutated
from .ops import Vocabulary, complete, numpy_backend

if TYPE_CHECKING:
    from .matcher.find import Match


def extract(
    graph: Graph,
    nodes: Iterable[str],
    name: str,
    inputs: Sequence[str] | None = None,
    outputs: Sequence[str] | None = None,
) -> Graph:
    """The nodes as a graph of their own, types included.

    Args:
        graph: where they stand.
        nodes: names of the nodes, in any order.
        name: of the new graph.
        inputs: values it takes, in order; left out: every value read but not written inside and not constant, in
            order of first use. Constants that are not among them go along as constants.
        outputs: values it gives back; left out: those that are read outside or are graph outputs.

    :class:`GraphError` when a value is neither an input, nor made inside, nor a constant.
    """
    chosen = sorted((graph.node_by_name[n] for n in nodes), key=lambda n: graph.position[n.name])
    inside = {n.name for n in chosen}
    made = {o for n in chosen for o in n.outputs if o}
    read = dict.fromkeys(i for n in chosen for i in (*n.inputs, *sorted(n.captures)) if i and i not in made)
    if inputs is None:
        inputs = tuple(r for r in read if not graph.is_constant(r))
    if outputs is None:
        outputs = tuple(
            o
            for n in chosen
            for o in n.outputs
            if o and (o in graph.output_names or any(c.name not in inside for c in graph.consumers.get(o, ())))
        )
    values = {v: graph.values[v] for v in (*inputs, *read, *outputs)}
    values |= {o: graph.values[o] for n in chosen for o in n.outputs if o}
    constants = {}
    for r in read:
        if r not in inputs:
            if not graph.is_constant(r):
                raise GraphError(
                    "cannot cut", name, f"{r!r} is read but is no input of the cut", "every input named", value=r
                )
            constants[r] = graph.constants[r]
    return Graph(name, tuple(inputs), tuple(outputs), tuple(chosen), FrozenDict(values), FrozenDict(constants)).check()


class Fusions(Protocol):
    """Fusion name → entry with ``spec``: a catalog, or a mapping."""

    def __getitem__(self, name: str, /) -> Any: ...


def apply(graph: Graph, matches: Iterable[Match], catalog: Fusions) -> Graph:
    """The graph with every match as one ``fused::`` node.

    Each takes the fusion's inputs in the spec's order (``""`` where absent), has the match's keywords as attributes,
    and the sub-graph it replaced as ``graphs["body"]``: as many inputs as the node has present ones, in that order.
    Values keep their names, so all else stays as it was; constants that only bodies read are dropped here.

    ``catalog``: fusion name → entry with ``spec``. :class:`GraphError` when two matches share a node or depend on each
    other in a cycle.
    """
    matches = tuple(matches)
    owner: dict[str, str] = {}
    fused: list[tuple[int, Node]] = []
    fresh = _namer(graph.node_by_name)
    for m in matches:
        for n in m.taken:
            if n in owner:
                found = f"node {n!r} belongs to {owner[n]} and to {m.fusion}"
                raise GraphError("cannot fuse", m.fusion, found, "matches that share no node", node=n)
            owner[n] = m.fusion
        fused.append((graph.position[m.nodes[-1]], _call(graph, m, catalog[m.fusion].spec, fresh)))
    if not fused:
        return graph
    at = dict(fused)
    nodes = [at.get(i, n) for i, n in enumerate(graph.nodes) if i in at or n.name not in owner]
    renamed = {n: at[graph.position[m.nodes[-1]]].name for m in matches for n in m.taken} if _impure(graph) else {}
    order = [(renamed.get(a, a), renamed.get(b, b)) for a, b in hazards(graph)] if renamed else []
    return _pruned(graph.with_(nodes=sort(nodes, order, graph.name)))


def _impure(graph: Graph) -> bool:
    return any(mutated(n) for n in graph.nodes)


def _call(graph: Graph, m: Match, spec: Any, fresh: Any) -> Node:
    given = tuple(m.inputs.get(i, "") for i in spec.inputs)
    outs = tuple(m.outputs.get(o, "") for o in spec.outputs)
    present = [g for g in given if g]
    unique = list(dict.fromkeys(present))
    body = extract(graph, m.nodes, m.fusion, unique, [o for o in outs if o])
    if len(unique) < len(present):  # one value bound twice: the body takes it twice and reads the first
        spare = _namer(body.values)
        seen: set[str] = set()
        names, values = [], dict(body.values)
        for g in present:
            name = g if g not in seen else spare(g)
            seen.add(g)
            names.append(name)
            values[name] = replace(body.values[g], name=name)
        body = body.with_(inputs=tuple(names), values=FrozenDict(values))
    root = graph.node_by_name[m.root]
    return Node(
        fresh(f"{m.fusion}@{m.root}"),
        FUSED + m.fusion,
        given,
        outs,
        FrozenDict(m.keywords(spec)),
        source=root.source,
        graphs=FrozenDict({"body": body}),
    )


def _namer(taken: Iterable[str]) -> Any:
    used = set(taken)
    counts: dict[str, int] = {}

    def fresh(stem: str) -> str:
        name, i = stem, counts.get(stem, 1)
        while name in used:
            i += 1
            name = f"{stem}_{i}"
        counts[stem] = i
        used.add(name)
        return name

    return fresh


def sort(nodes: Sequence[Node], order: Iterable[tuple[str, str]] = (), whom: str = "") -> tuple[Node, ...]:
    """The nodes in topological order, as near to the given order as can be.

    ``order``: further (earlier, later) pairs of node names. :class:`GraphError` naming a node of a cycle.
    """
    at = {n.name: i for i, n in enumerate(nodes)}
    made = {o: i for i, n in enumerate(nodes) for o in n.outputs if o}
    after: list[list[int]] = [[] for _ in nodes]
    waits = [0] * len(nodes)
    ordered = True
    edges = ((made[r], i) for i, n in enumerate(nodes) for r in (n.reads if n.graphs else n.inputs) if r in made)
    extra = ((at[a], at[b]) for a, b in order if a != b)
    for source, i in (*edges, *extra):
        after[source].append(i)
        waits[i] += 1
        ordered = ordered and source < i
    if ordered:
        return tuple(nodes)
    ready = [i for i, w in enumerate(waits) if not w]
    found: list[Node] = []
    while ready:
        i = heapq.heappop(ready)
        found.append(nodes[i])
        for j in after[i]:
            waits[j] -= 1
            if not waits[j]:
                heapq.heappush(ready, j)
    if len(found) < len(nodes):
        stuck = next(n.name for n, w in zip(nodes, waits, strict=True) if w)
        raise GraphError("cannot order", whom, f"{stuck!r} waits for itself", "no cycle among the nodes", node=stuck)
    return tuple(found)


def eliminate_dead(graph: Graph) -> Graph:
    """Without nodes that no output and no in-place write depends on, and without constants that nobody reads.

    Graph inputs stay, read or not: they are the caller's contract.
    """
    needed = set(graph.outputs)
    kept: list[Node] = []
    for n in reversed(graph.nodes):
        if needed.intersection(n.outputs) or mutated(n):
            needed.update(n.inputs)
            if n.graphs:
                needed |= n.captures
            kept.append(n)
    return _pruned(graph if len(kept) == len(graph.nodes) else graph.with_(nodes=tuple(reversed(kept))))


#: Operators of stacked matrices, and those of filters, which have as many axes.
_OF_EXPERTS = frozenset({"fusionreg::RoutedMatMul", "fusionreg::GroupedMatMul"})
_OF_FILTERS = frozenset({"Conv", "ConvTranspose"})


def fold_constants(graph: Graph, ops: Vocabulary, limit: int = 16 << 20) -> Graph:
    """With every node evaluated whose operands are constants, and every ``Shape`` and ``Size`` of static extents.

    Left alone: what reads an overridable constant, draws random numbers (it has a ``seed``), has sub-graphs, touches
    memory that something writes in place, writes a graph output, fails, or makes more than ``limit`` bytes beyond what
    it reads. Values are those of the unfused chain: rounded to each result's dtype.
    """
    known = {n: a for n, a in graph.constants.items() if n not in graph.overridable}
    group = aliases(graph) if _impure(graph) else {}
    impure = {group.get(v, v) for n in graph.nodes for v in mutated(n)}
    present = {n.op for n in graph.nodes}
    ranks = (2, 3) if present & _OF_EXPERTS or not present & _OF_FILTERS else (2,)
    values, kept = dict(graph.values), []
    for n in graph.nodes:
        pinned = any(o in graph.output_names or group.get(o, o) in impure for o in n.outputs)
        found = None
        if not pinned and not any(group.get(i, i) in impure for i in n.inputs):
            found = _fold(n, values, known, ops, limit, ranks)
        if found is None:
            kept.append(n)
            continue
        known.update(found)
        values.update((k, Value(k, values[k].dtype, tuple(a.shape))) for k, a in found.items())
    if len(kept) == len(graph.nodes):
        return graph
    constants: FrozenDict[str, Any] = FrozenDict({**graph.constants, **known})
    return _pruned(graph.with_(nodes=tuple(kept), values=FrozenDict(values), constants=constants))


def _widens_weight(n: Node, values: Mapping[str, Value], ranks: tuple[int, ...]) -> bool:
    """Whether the node makes floats of a matrix stored in 8 bits, bytes of one stored in 4, or cuts ranks: a
    product reads that as it is stored. ``ranks``: 2, and 3 where that is stacked matrices."""
    if n.op not in ("DequantizeLinear", "Cast"):
        return n.op in ("fusionreg::UnpackInt4", "fusionreg::LimitRank")
    x, y = values[n.inputs[0]], values[n.outputs[0]]
    return x.dtype in ("int8", "float8_e4m3fn") and len(x.shape or ()) in ranks and dtype(y.dtype).floating


def _fold(
    n: Node, values: Mapping[str, Value], known: Mapping[str, Any], ops: Vocabulary, limit: int, ranks: tuple[int, ...]
) -> dict[str, Any] | None:
    """The node's results by name, None where it is to stay. ``ranks``: of weights, see :func:`_widens_weight`."""
    if n.op not in ops or n.graphs or n.mutates or "seed" in ops[n.op].attributes:
        return None
    if _widens_weight(n, values, ranks):
        return None
    names = [o for o in n.outputs if o]
    if n.op in ("Shape", "Size") and n.inputs[0] not in known:
        import numpy as np

        shape = values[n.inputs[0]].shape
        part = None if shape is None else shape[slice(n.attrs.get("start", 0), n.attrs.get("end"))]
        if part is None or any(isinstance(d, str) for d in part):
            return None
        extents = np.array(part, dtype="int64")
        return {names[0]: extents if n.op == "Shape" else np.asarray(extents.prod(dtype="int64"))}
    if any(i and i not in known for i in n.inputs):
        return None
    constants: dict[str, Any] = {i: known[i] for i in n.inputs if i}
    try:
        spec = ops[n.op]
        given = [values[i] if i else None for i in n.inputs]
        at = {k: constants[i] for k, i in enumerate(n.inputs) if i}
        inferred = spec.infer(given, complete(spec, n.attrs), at)
        grown = -sum(a.nbytes for a in constants.values())
        for kind, shape in inferred[: len(n.outputs)]:
            if shape is None or any(not isinstance(d, int) for d in shape):
                return None
            grown += dtype(kind).bytes * prod(shape)
        if grown > limit:
            return None
        types: FrozenDict[str, Value] = FrozenDict({v: values[v] for v in (*constants, *names)})
        alone = Graph(n.name, (), tuple(names), (n,), types, FrozenDict(constants))
        return evaluate(alone, {}, ops=ops, backend=numpy_backend())
    except (FusionregError, ValueError, IndexError):
        return None


def _pruned(graph: Graph) -> Graph:
    """Without values and constants that no node, input or output names."""
    used = {*graph.inputs, *graph.outputs}
    for n in graph.nodes:
        used.update(n.inputs)
        used.update(n.outputs)
        if n.graphs:
            used |= n.captures
    values, constants = graph.values, graph.constants
    if any(v not in used for v in values):
        values = FrozenDict({k: v for k, v in values.items() if k in used})
    if any(c not in used for c in constants):
        constants = FrozenDict({k: v for k, v in constants.items() if k in used})
    return graph.with_(values=values, constants=constants, overridable=graph.overridable & constants.keys())


@dataclass(frozen=True)
class Replacement:
    """One site of :func:`replace_nodes`.

    Attributes:
        nodes: names of the nodes that go.
        new: nodes that come, in order; they may write values that the old ones wrote, under the same names.
        values: types of values that the new nodes write, where new or changed.
        constants: arrays that the new nodes read.
        renames: old value → the value that takes its place everywhere else.
    """

    nodes: tuple[str, ...]
    new: tuple[Node, ...] = ()
    values: tuple[Value, ...] = ()
    constants: FrozenDict[str, Any] = EMPTY
    renames: FrozenDict[str, str] = EMPTY


def replace_nodes(graph: Graph, replacements: Iterable[Replacement]) -> Graph:
    """All replacements at once. They must not share nodes; each new node stands where its site's last node stood.

    A rename follows chains (``a`` → ``b`` where another site renames ``b`` → ``c``), reaches into sub-graphs that
    capture the value, and keeps the name of a graph output by an ``Identity``.
    :class:`GraphError` when sites share a node or the result breaks an invariant.
    """
    owner: dict[str, int] = {}
    at: dict[int, list[Node]] = {}
    values, constants = dict(graph.values), dict(graph.constants)
    renames: dict[str, str] = {}
    for index, r in enumerate(replacements):
        for old in r.nodes:
            if old in owner:
                raise GraphError(
                    "cannot replace", graph.name, f"two sites share node {old!r}", "disjoint sites", node=old
                )
            owner[old] = index
        place = max(graph.position[n] for n in r.nodes)
        at.setdefault(place, []).extend(r.new)
        values.update((v.name, v) for v in r.values)
        constants.update(r.constants)
        for c, array in r.constants.items():
            if c not in values:
                raise GraphError(
                    "cannot replace", graph.name, f"constant {c!r} {array.shape} has no type", "a Value for it"
                )
        renames.update(r.renames)
    if not owner:
        return graph
    final = {old: _end(old, renames, graph.name) for old in renames}
    nodes: list[Node] = []
    for i, n in enumerate(graph.nodes):
        if n.name not in owner:
            nodes.append(n)
        nodes.extend(at.get(i, ()))
    if final:
        nodes = [rename(n, final) for n in nodes]
        fresh = _namer([n.name for n in nodes])
        for old in dict.fromkeys(o for o in graph.outputs if o in final):
            nodes.append(Node(fresh(f"keep_{old}"), "Identity", (final[old],), (old,)))
    return _pruned(
        graph.with_(nodes=sort(nodes, (), graph.name), values=FrozenDict(values), constants=FrozenDict(constants))
    ).check(graph.free_names)


def _end(name: str, renames: Mapping[str, str], whom: str) -> str:
    seen = [name]
    while seen[-1] in renames:
        seen.append(renames[seen[-1]])
        if len(seen) > len(renames) + 1:
            raise GraphError("cannot replace", whom, f"renames go round: {' → '.join(seen[:4])}", "an end", value=name)
    return seen[-1]


def rename(node: Node, names: Mapping[str, str]) -> Node:
    """The node reading other values, its sub-graphs included; what it writes keeps its name."""
    graphs = node.graphs
    if graphs and not node.op.startswith(FUSED) and any(c in names for c in node.captures):
        graphs = FrozenDict({k: _rename_free(g, names) for k, g in graphs.items()})
    inputs = tuple(names.get(i, i) for i in node.inputs)
    mutates = tuple(names.get(i, i) for i in node.mutates)
    if inputs == node.inputs and mutates == node.mutates and graphs is node.graphs:
        return node
    return replace(node, inputs=inputs, mutates=mutates, graphs=graphs)


def _rename_free(graph: Graph, names: Mapping[str, str]) -> Graph:
    free = {k: v for k, v in names.items() if k in graph.free_names}
    if not free:
        return graph
    nodes = tuple(rename(n, free) for n in graph.nodes)
    return graph.with_(nodes=nodes, outputs=tuple(free.get(o, o) for o in graph.outputs))
