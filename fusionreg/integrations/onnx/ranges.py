"""Which integers an input may hold: an index must lie inside the axis that it indexes."""

from __future__ import annotations

from collections.abc import Iterator

from ...core.ir import Graph, Node

#: Operators that only move elements of their first operand: what is asked of the result is asked of it.
_CARRIERS = frozenset(
    (
        "Identity",
        "Reshape",
        "Transpose",
        "Squeeze",
        "Unsqueeze",
        "Flatten",
        "Expand",
        "Slice",
        "Split",
        "Concat",
        "Cast",
    )
)


def integer_ranges(graph: Graph) -> dict[str, tuple[int, int]]:
    """Input name → half-open range of safe values, for integer inputs that are used as indices or extents."""
    found: dict[str, tuple[int, int]] = {}
    for name in graph.inputs:
        if graph.values[name].dtype.startswith(("int", "uint")):
            bounds = tuple(_bounds(graph, name))
            if bounds:
                found[name] = (max(low for low, _ in bounds), min(high for _, high in bounds))
    return found


def _bounds(graph: Graph, start: str) -> Iterator[tuple[int, int]]:
    """Ranges that readers ask for, followed through operators that only move elements."""
    stack, seen = [start], {start}
    while stack:
        value = stack.pop()
        for node in graph.consumers.get(value, ()):
            bound = _asked(graph, node, value)
            if bound is not None:
                yield bound
            if node.op in _CARRIERS and value in node.inputs[: None if node.op == "Concat" else 1]:
                for out in node.outputs:
                    if out and out not in seen:
                        seen.add(out)
                        stack.append(out)


def _asked(graph: Graph, node: Node, value: str) -> tuple[int, int] | None:
    if node.op in ("Gather", "GatherElements", "ScatterElements") and _is(node, 1, value):
        shape = graph.values[node.inputs[0]].shape
        axis = int(node.attrs.get("axis", 0))
        extent = shape[axis] if shape else None
        return (0, extent if isinstance(extent, int) else 2)
    if node.op in ("GatherND", "ScatterND") and _is(node, 1, value):
        shape = graph.values[node.inputs[0]].shape or ()
        known = [d for d in shape if isinstance(d, int)]
        return (0, min(known, default=1))
    if node.op == "OneHot" and _is(node, 0, value) and graph.is_constant(node.inputs[1]):
        return (0, int(graph.constants[node.inputs[1]].reshape(-1)[0]))
    if node.op in ("Reshape", "Expand", "ConstantOfShape", "Tile", "Range", "TopK") and not _is(node, 0, value):
        return (1, 2)
    if node.op == "ConstantOfShape":
        return (1, 3)
    return None


def _is(node: Node, index: int, value: str) -> bool:
    return index < len(node.inputs) and node.inputs[index] == value
