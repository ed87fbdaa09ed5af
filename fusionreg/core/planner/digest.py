"""Digests that are equal in every process: of a graph, as far as a plan depends on it. Floor 4."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from ..ir import Graph, Node

#: Constants up to this many elements count by value: patterns name such; larger ones are weights.
SMALL = 16


def graph_digest(graph: Graph) -> str:
    """SHA-256 of nodes, types, inputs, outputs and small constants; the contents of weights do not count."""
    return hashlib.sha256(json.dumps(_graph(graph), separators=(",", ":")).encode()).hexdigest()


def _graph(graph: Graph) -> list[Any]:
    values = [[v.name, v.dtype, None if v.shape is None else list(v.shape)] for v in graph.values.values()]
    constants = [
        [name, array.tobytes().hex() if array.size <= SMALL else array.size]
        for name, array in sorted(graph.constants.items())
    ]
    return [
        list(graph.inputs), list(graph.outputs), [_node(n) for n in graph.nodes], sorted(values), constants,
        sorted(graph.overridable),
    ]  # fmt: skip


def _node(node: Node) -> list[Any]:
    graphs = [[name, _graph(g)] for name, g in sorted(node.graphs.items())]
    attrs = [[name, _text(value)] for name, value in sorted(node.attrs.items())]
    return [node.name, node.op, list(node.inputs), list(node.outputs), attrs, list(node.mutates), graphs]


def _text(value: Any) -> str:
    """A value of an attribute as text; ``repr`` tells 1, 1.0 and True apart."""
    if isinstance(value, Mapping):
        return repr(sorted((k, _text(v)) for k, v in value.items()))
    return repr(tuple(value)) if isinstance(value, list | tuple) else repr(value)
