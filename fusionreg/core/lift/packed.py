"""One product for q, k and v, cut into them: columns by Split, heads by Reshape and Transpose. Floor 3.

Columns are q's, k's and v's, those of v as many as those of k. They are cut as slices of columns, as heads in front of
or behind their transpose, or taken from an axis of three; all of that are views, and one way to write it is enough.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..frozen import FrozenDict
from ..ir import Graph, Names, Node, Value
from ..matcher.legality import mutated
from ..ops import Vocabulary
from ..rewrite import Replacement, replace_nodes

_HEADS_FIRST = (0, 2, 1, 3)
#: Of [B S 3 H D]: to three times [B H S D].
_THREE_FIRST = (2, 0, 3, 1, 4)


@dataclass(frozen=True)
class _Parts:
    """How a product [B S N] is cut.

    Attributes:
        columns: of q, of k and of v.
        outputs: the values that they become.
        nodes: that do it.
        width: of a head, where the values have heads; else 0.
        turned: whether heads come in front of tokens.
    """

    columns: tuple[int, int, int]
    outputs: tuple[str, str, str]
    nodes: tuple[str, ...]
    width: int = 0
    turned: bool = False


def lift_packed(graph: Graph, ops: Vocabulary, log: list[tuple[str, str]] | None = None) -> Graph:
    """The graph with all such cuts in one spelling, where there is attention that may read them."""
    if not any(n.op == "Attention" for n in graph.nodes) or any(mutated(n) for n in graph.nodes):
        return graph
    names = Names({*graph.values, *graph.node_by_name})
    made = []
    for node in graph.nodes:
        value = node.outputs[0] if _product(graph, node) else ""
        parts = _parts(graph, value) if value and value not in graph.output_names else None
        if parts is not None:
            made.append(_replacement(graph, value, parts, names))
            if log is not None:
                log.append(("packed_heads", node.name))
    return replace_nodes(graph, made) if made else graph


def _product(graph: Graph, node: Node) -> bool:
    """x [B S C] times a matrix, and a bias."""
    if node.op == "Add":
        (rank, other) = (len(graph.values[i].shape or ()) for i in node.inputs)
        made = graph.producers.get(node.inputs[0 if rank == 3 else 1])
        return {rank, other} == {1, 3} and made is not None and _product(graph, made)
    shapes = [graph.values[i].shape for i in node.inputs] if node.op == "MatMul" else []
    return [len(s or ()) for s in shapes] == [3, 2]


def _parts(graph: Graph, value: str) -> _Parts | None:
    shape, readers = graph.values[value].shape, graph.consumers.get(value, ())
    if shape is None or len(shape) != 3 or not isinstance(shape[2], int):
        return None
    first = readers[0] if readers else None
    if first is None or first.op != "Reshape":
        cut = _cut(graph, value, 2)
        # one Split with its sizes is how it is to be written
        plain = first is not None and first.op == "Split" and len(first.inputs) == 2
        return _checked(cut, 1, shape[2]) if cut is not None and not plain else None
    heads = graph.values[first.outputs[0]].shape
    if len(readers) > 1 or heads is None or heads[:2] != shape[:2]:
        return None
    extents = [d for d in heads[2:] if isinstance(d, int)]
    value, gone, axis, turned = first.outputs[0], [first.name], 2, False
    after = graph.consumers.get(value, ())
    if len(after) == 1 and after[0].op == "Transpose" and value not in graph.output_names:
        perm = after[0].attrs.get("perm")
        if perm not in (_HEADS_FIRST, _THREE_FIRST) or len(perm) != len(heads):
            return None
        value, axis, turned = after[0].outputs[0], 1 if len(heads) == 4 else 0, True
        gone.append(after[0].name)
    if len(extents) == 2 and len(heads) == 4:
        cut, each = _cut(graph, value, axis), extents[1]
    elif len(extents) == 3 and heads[2] == 3:
        cut, each = _taken(graph, value, axis), extents[1] * extents[2]
    else:
        return None
    found = _checked(cut, each, shape[2]) if cut is not None and value not in graph.output_names else None
    if found is None:
        return None
    return _Parts(found.columns, found.outputs, (*gone, *found.nodes), extents[-1], turned)


def _checked(cut: _Parts, each: int, columns: int) -> _Parts | None:
    """With columns for what was counted, if those are all, and such as heads can have."""
    q, k, v = (each * n for n in cut.columns)
    fits = q + k + v == columns and k == v and k > 0 and q % k == 0
    return _Parts((q, k, v), cut.outputs, cut.nodes) if fits else None


def _cut(graph: Graph, value: str, axis: int) -> _Parts | None:
    """Three parts along an axis, one behind the other, by a Split or by three Slices."""
    shape, readers = graph.values[value].shape, graph.consumers.get(value, ())
    assert shape is not None
    extent = shape[axis]
    if not isinstance(extent, int):
        return None
    if len(readers) == 1 and readers[0].op == "Split":
        node = readers[0]
        extents = [(graph.values[o].shape or ())[axis : axis + 1] for o in node.outputs if o]
        if node.attrs.get("axis", 0) % len(shape) != axis or len(node.outputs) != 3 or len(extents) != 3:
            return None
        sizes = [e[0] for e in extents if e and isinstance(e[0], int)]
        return _Parts((*sizes,), (*node.outputs,), (node.name,)) if len(sizes) == 3 else None  # type: ignore[arg-type]
    found = sorted(
        ((_range(graph, n, axis, extent), n) for n in readers if n.op == "Slice"), key=lambda f: (f[0], f[1].name)
    )
    if (
        len(readers) != 3
        or len(found) != 3
        or [start for (start, _), _ in found] != [0, found[0][0][1], found[1][0][1]]
    ):
        return None
    sizes = [end - start for (start, end), _ in found]
    return _Parts((*sizes,), tuple(n.outputs[0] for _, n in found), tuple(n.name for _, n in found))  # type: ignore[arg-type]


def _range(graph: Graph, node: Node, axis: int, extent: int) -> tuple[int, int]:
    """From which element on and to which one a Slice goes; (-1, -1) if it is no such Slice."""
    rank = len(graph.values[node.inputs[0]].shape or ())
    if len(node.inputs) < 4 or not all(graph.is_constant(i) and graph.constants[i].size == 1 for i in node.inputs[1:]):
        return -1, -1
    start, end, along, *step = (int(graph.constants[i].reshape(-1)[0]) for i in node.inputs[1:])
    if along % rank != axis or any(s != 1 for s in step):
        return -1, -1
    start, end = (min(max(i + extent if i < 0 else i, 0), extent) for i in (start, end))
    return start, end


def _taken(graph: Graph, value: str, axis: int) -> _Parts | None:
    """The elements 0, 1 and 2 of an axis of three."""
    rank, found = len(graph.values[value].shape or ()), {}
    for n in graph.consumers.get(value, ()):
        index = graph.constants[n.inputs[1]] if n.op == "Gather" and graph.is_constant(n.inputs[1]) else None
        if index is None or index.ndim or n.attrs.get("axis", 0) % rank != axis or not -3 <= int(index) < 3:
            return None
        if int(index) % 3 in found:
            return None
        found[int(index) % 3] = n
    if len(found) != 3:
        return None
    nodes = [found[i] for i in range(3)]
    return _Parts((1, 1, 1), tuple(n.outputs[0] for n in nodes), tuple(n.name for n in nodes))  # type: ignore[arg-type]


def _replacement(graph: Graph, value: str, parts: _Parts, names: Names) -> Replacement:
    import numpy as np

    kind, shape = graph.values[value].dtype, graph.values[value].shape
    assert shape is not None
    values: list[Value] = []
    constants: dict[str, Any] = {}

    def ints(stem: str, *numbers: int) -> str:
        values.append(Value(names.fresh(stem), "int64", (len(numbers),)))
        constants[values[-1].name] = np.asarray(numbers, np.int64)
        return values[-1].name

    def fresh(stem: str, *extents: Any) -> str:
        values.append(Value(names.fresh(stem), kind, extents))
        return values[-1].name

    pieces = parts.outputs
    if parts.width:
        pieces = tuple(fresh(f"{o}_columns", *shape[:2], n) for o, n in zip(pieces, parts.columns, strict=True))  # type: ignore[assignment]
    source = graph.node_by_name[parts.nodes[0]].source
    sizes = ints(f"{value}_sizes", *parts.columns)
    axis: FrozenDict[str, Any] = FrozenDict({"axis": -1})
    perm: FrozenDict[str, Any] = FrozenDict({"perm": _HEADS_FIRST})
    new = [Node(names.fresh(f"{value}_split"), "Split", (value, sizes), pieces, axis, source=source)]
    for piece, out, columns in zip(pieces, parts.outputs, parts.columns, strict=True):
        if not parts.width:
            break
        heads, into = columns // parts.width, out
        target = ints(f"{out}_heads", 0, 0, heads, parts.width)
        if parts.turned:
            into = fresh(f"{out}_tokens", *shape[:2], heads, parts.width)
        new.append(Node(names.fresh(f"{out}_reshape"), "Reshape", (piece, target), (into,), source=source))
        if parts.turned:
            new.append(Node(names.fresh(f"{out}_transpose"), "Transpose", (into,), (out,), perm, source=source))
    return Replacement(parts.nodes, tuple(new), tuple(values), FrozenDict(constants))
