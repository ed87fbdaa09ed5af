"""A graph on arrays whose interior values would not fit: attention, a batch entry and a head of keys at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal

import torch

from fusionreg.core.evaluate.evaluator import evaluate
from fusionreg.core.frozen import FrozenDict
from fusionreg.core.ir import Graph
from fusionreg.core.ops import Vocabulary
from fusionreg.core.planner.costs import ATTENTION

#: Bytes that all scores may take in float64; the operators hold several values of that size.
MOST = 4 << 30


def evaluated(
    graph: Graph, arrays: Mapping[str, Any], ops: Vocabulary, mode: Literal["exact", "step"]
) -> dict[str, Any]:
    """As ``evaluate``; where that would hold too many scores, the same part by part."""
    if not _too_large(graph, arrays):
        return evaluate(graph, arrays, ops=ops, mode=mode)
    results: dict[str, Any] = {}
    for part, at in _parts(graph, arrays):
        shapes = {name: tuple(a.shape) for name, a in part.items()}
        values = {n: replace(v, shape=shapes.get(n)) for n, v in graph.values.items()}
        for name, found in evaluate(replace(graph, values=FrozenDict(values)), part, ops=ops, mode=mode).items():
            shape = [int(d) for d in graph.values[name].shape or ()]
            if name not in results:
                results[name] = torch.empty(shape, dtype=found.dtype, device=found.device)
            _narrowed(results[name], (0, 1), at).copy_(found)
    return results


def _operands(graph: Graph, arrays: Mapping[str, Any]) -> tuple[Any, Any]:
    """q and k of the one operator."""
    node = graph.nodes[0]
    first = ATTENTION[node.op]
    return arrays[node.inputs[first]], arrays[node.inputs[first + 1]]


def _too_large(graph: Graph, arrays: Mapping[str, Any]) -> bool:
    node = graph.nodes[0]
    if len(graph.nodes) > 1 or node.op not in ATTENTION or not set(node.inputs) <= {*arrays, ""}:
        return False
    if ATTENTION[node.op] == 1 and len(node.outputs) > 3:  # that of a bias is a sum over parts
        return False
    q, k = _operands(graph, arrays)
    return q.ndim == 4 and q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] * 8 > MOST


def _parts(graph: Graph, arrays: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], tuple[tuple[int, int], ...]]]:
    """Inputs of each part, and where it is: its place among how many, of batch entries and of heads of k."""
    node = graph.nodes[0]
    q, k = _operands(graph, arrays)
    mask = node.inputs[3 if ATTENTION[node.op] == 0 else 6 :][:1]
    for batch in range(q.shape[0]):
        for head in range(k.shape[1]):
            at = (batch, q.shape[0]), (head, k.shape[1])
            axes = {n: (a.ndim - 4, a.ndim - 3) if n in mask else (0, 1) for n, a in arrays.items()}
            yield {n: _narrowed(a, axes[n], at) for n, a in arrays.items()}, at


def _narrowed(a: Any, axes: tuple[int, int], at: tuple[tuple[int, int], ...]) -> Any:
    """A part of ``a`` along its axes of batch entries and heads; where it has none or is broadcast, all of it."""
    for axis, (place, count) in zip(axes, at, strict=True):
        if 0 <= axis < a.ndim and a.shape[axis] > 1:
            each = a.shape[axis] // count
            a = a.narrow(axis, place * each, each)
    return a
