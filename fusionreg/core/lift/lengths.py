"""Masks of keys that come before a sequence's end, ``arange(keys) < lengths``, as lengths of Attention. Floor 3.

Attention with ``nonpad_kv_seqlen`` does not read what lies behind, where a mask is read with all keys. For inference:
gradients are known beside masks.
"""

from __future__ import annotations

from typing import Any

from ..frozen import FrozenDict
from ..ir import Graph, Names, Node, Value
from ..ops import Vocabulary
from ..rewrite import Replacement, replace_nodes

_VIEWS = frozenset(("Unsqueeze", "Squeeze", "Reshape", "Identity"))
#: Of (steps, ends): whether it is true for keys in front of the end.
_COMPARES = {"Less": True, "GreaterOrEqual": False}
#: The same of (ends, steps).
_TURNED = {"Greater": True, "LessOrEqual": False}
#: What Attention has in place of a mask by positions; lengths would count them from the last key.
_PLAIN = {"is_causal": 0, "left_window_size": -1, "right_window_size": -1, "qk_matmul_output_mode": 0}


def lift_lengths(graph: Graph, ops: Vocabulary, log: list[tuple[str, str]] | None = None) -> Graph:
    """The graph with such masks as lengths; a mask that others read stays for them."""
    names = Names({*graph.values, *graph.node_by_name})
    made = []
    for node in graph.nodes:
        replacement = _replaced(graph, node, names) if node.op == "Attention" else None
        if replacement is not None:
            made.append(replacement)
            if log is not None:
                log.append(("attention_lengths", node.name))
    return replace_nodes(graph, made) if made else graph


def _replaced(graph: Graph, node: Node, names: Names) -> Replacement | None:
    masked = len(node.inputs) == 4 and node.inputs[3] and len(node.outputs) == 1
    q, k = (graph.values[i].shape for i in node.inputs[:2])
    if not masked or q is None or k is None or len(q) != 4 or len(k) != 4:
        return None
    if any(node.attrs.get(name, plain) != plain for name, plain in _PLAIN.items()):
        return None
    ends = _ends(graph, node.inputs[3], q[0], k[2])
    if ends is None:
        return None
    new, values = [], []
    constants: dict[str, Any] = {}
    if len(graph.values[ends].shape or ()) != 1:
        import numpy as np

        flat = Value(names.fresh(f"{ends}_flat"), graph.values[ends].dtype, (q[0],))
        shape = Value(names.fresh("shape"), "int64", (1,))
        constants[shape.name] = np.array([-1], np.int64)
        values += [flat, shape]
        new.append(Node(names.fresh("flatten"), "Reshape", (ends, shape.name), (flat.name,)))
        ends = flat.name
    inputs = (*node.inputs[:3], "", "", "", ends)
    new.append(Node(names.fresh(node.name), "Attention", inputs, node.outputs, node.attrs, source=node.source))
    return Replacement((node.name,), tuple(new), tuple(values), FrozenDict(constants))


def _ends(graph: Graph, mask: str, batch: Any, keys: Any) -> str | None:
    """The lengths, one for each of a batch, that a mask over ``keys`` is made of; None where there are none."""
    shape, wanted = graph.values[mask].shape, True
    if shape is None or len(shape) != 4 or (shape[0], shape[3]) != (batch, keys) or not isinstance(keys, int):
        return None
    node = graph.producers.get(mask)
    if node is not None and node.op == "Expand":
        if (inner := graph.values[node.inputs[0]].shape) is None or inner != (batch, 1, 1, keys):
            return None
        node = graph.producers.get(node.inputs[0])
    elif shape[1:3] != (1, 1):
        return None
    while node is not None and (node.op in _VIEWS or node.op == "Not"):
        wanted ^= node.op == "Not"
        node = graph.producers.get(node.inputs[0])
    if node is None or node.op not in _COMPARES | _TURNED:
        return None
    steps, ends = node.inputs if node.op in _COMPARES else node.inputs[::-1]
    true = (_COMPARES | _TURNED)[node.op]
    made = graph.values[node.outputs[0]].shape
    if true != wanted or made is None or (made[0], made[-1]) != (batch, keys) or any(d != 1 for d in made[1:-1]):
        return None
    return _flat(graph, ends, batch) if _counts(graph, steps, keys) else None


def _counts(graph: Graph, steps: str, keys: int) -> bool:
    """Whether a constant is 0, 1, … in each row."""
    import numpy as np

    if not graph.is_constant(steps):
        return False
    array = graph.constants[steps]
    counted = array.dtype.kind in "iu" and array.ndim > 0 and array.shape[-1] == keys
    return counted and bool((array == np.arange(keys)).all())


def _flat(graph: Graph, ends: str, batch: Any) -> str | None:
    """Integers of one axis that ``ends`` is a view of, or itself; None where there is not one for each sequence."""
    found = None
    while True:
        value = graph.values[ends]
        if value.dtype not in ("int32", "int64") or value.shape is None or not value.shape:
            return found
        if value.shape[0] == batch and all(d == 1 for d in value.shape[1:]):
            found = ends
        node = graph.producers.get(ends)
        if len(value.shape) == 1 or node is None or node.op not in _VIEWS:
            return found
        ends = node.inputs[0]
