"""Indices and masks that a graph makes twice, made once. Floor 3.

``a[ids.clamp(min=0)]`` and ``b[ids.clamp(min=0)]`` read one value, and a pattern says so by one name.
"""

from __future__ import annotations

from typing import Any

from ..dtypes import DTYPES
from ..frozen import FrozenDict
from ..ir import Graph, Node
from ..matcher.legality import mutated
from ..rewrite import Replacement, replace_nodes

#: What makes indices and truths of others, and nothing random.
_OPS = frozenset(
    {"Add", "And", "Cast", "Clip", "Div", "Equal", "Expand", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Max"}
    | {"Min", "Mod", "Mul", "Neg", "Not", "Or", "Reshape", "Squeeze", "Sub", "Unsqueeze", "Where", "Xor"}
)
#: Elements of a constant that is compared by what it holds.
_FEW = 64


def merge_indices(graph: Graph) -> Graph:
    """With one node for all that make the same indices or truths of the same operands; results of the graph stay."""
    if any(mutated(n) for n in graph.nodes):
        return graph
    first: dict[Any, str] = {}
    renamed: dict[str, str] = {}
    gone: list[Replacement] = []
    for n in graph.nodes:
        if n.op not in _OPS or not _light(graph, n):
            continue
        made = n.outputs[0]
        key = n.op, repr(sorted(n.attrs.items())), tuple(_operand(graph, renamed.get(i, i)) for i in n.inputs)
        known = first.setdefault(key, made)
        if known != made and made not in graph.output_names:
            renamed[made] = known
            gone.append(Replacement((n.name,), renames=FrozenDict({made: known})))
    return replace_nodes(graph, gone) if gone else graph


def _light(graph: Graph, n: Node) -> bool:
    row = DTYPES.get(graph.values[n.outputs[0]].dtype) if len(n.outputs) == 1 and not n.graphs else None
    return row is not None and not row.floating


def _operand(graph: Graph, name: str) -> Any:
    """What tells one operand from another: its name, or what a small constant holds."""
    if not name or not graph.is_constant(name) or graph.constants[name].size > _FEW:
        return name
    array = graph.constants[name]
    return array.dtype.name, array.shape, array.tobytes()
