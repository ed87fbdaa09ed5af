"""Where names of one ONNX graph live during a load, and small facts about ``onnx_ir`` objects."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir

from ...core.errors import ModelError
from ...core.ir import GraphBuilder

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


@dataclass
class Scope:
    """Where names of one ONNX graph or function body live.

    Attributes:
        builder: the graph under construction; a function's body goes into its caller's.
        names: ONNX value → name in the graph.
        outer: the scope around a sub-graph.
        opsets: domain → version that nodes here are written for.
        arguments: attributes of the function call, by parameter.
        prefix: put before the names of values and nodes of a function's body.
        hinted: whether names here are those that the hints are keyed by.
        wanted: outputs of a function's body → the names that the call gives them.
    """

    builder: GraphBuilder
    opsets: Mapping[str, int]
    outer: Scope | None = None
    names: dict[onnx_ir.Value, str] = field(default_factory=dict)
    arguments: Mapping[str, onnx_ir.Attr] = field(default_factory=dict)
    prefix: str = ""
    hinted: bool = True
    wanted: Mapping[onnx_ir.Value, str] = field(default_factory=dict)

    @property
    def visible(self) -> frozenset[str]:
        """Names that a sub-graph of this scope may capture."""
        outer = self.outer.visible if self.outer is not None else frozenset[str]()
        return outer | frozenset(self.builder._values)

    def find(self, value: onnx_ir.Value) -> str | None:
        scope: Scope | None = self
        while scope is not None:
            if value in scope.names:
                return scope.names[value]
            scope = scope.outer
        return None


def dtype_of(array: np.ndarray) -> str:
    return "string" if array.dtype.kind in "OUS" else array.dtype.name


def main_values(graph: onnx_ir.Graph) -> Iterable[onnx_ir.Value]:
    yield from graph.inputs
    yield from graph.initializers.values()
    for node in graph:
        yield from node.outputs


def source_of(node: onnx_ir.Node) -> str:
    """Where the node stands: the innermost Python line that the exporter recorded, else its name."""
    trace = node.metadata_props.get("pkg.torch.onnx.stack_trace", "")
    frames = _FRAME.findall(trace)
    return ":".join(frames[-1]) if frames else node.name or node.op_type


def in_order(graph: onnx_ir.Graph | onnx_ir.Function, whom: str) -> list[onnx_ir.Node]:
    """The nodes in topological order (files exist that are not)."""
    nodes = list(graph)
    position = {n: i for i, n in enumerate(nodes)}
    if all(position.get(p, -1) < i for i, n in enumerate(nodes) for p in _needs(n)):
        return nodes
    try:
        graph.sort()
    except ValueError as e:
        raise ModelError("cannot import model", whom, "its nodes form a cycle", "a graph without cycles") from e
    return list(graph)


def _needs(node: onnx_ir.Node) -> Iterable[Any]:
    for value in node.inputs:
        if value is not None and value.producer() is not None:
            yield value.producer()


#: Nodes that a model may have once its functions are inlined: nested calls multiply.
MOST_NODES = 2_000_000


def check_expansion(model: onnx_ir.Model, whom: str) -> None:
    """:class:`ModelError` when a function calls itself, or when inlining would make more than :data:`MOST_NODES`."""
    sizes: dict[Any, int] = {}

    def size(nodes: Iterable[onnx_ir.Node], calls: tuple[Any, ...]) -> int:
        total = 0
        for node in nodes:
            key = node.op_identifier()
            if key in calls:
                raise ModelError("cannot import model", whom, f"function {key[1]} calls itself", "no recursion")
            if key in model.functions and key not in sizes:
                sizes[key] = size(model.functions[key].all_nodes(), (*calls, key))
            total += sizes.get(key, 1)
        return total

    total = size(model.graph.all_nodes(), ())
    if total > MOST_NODES:
        raise ModelError(
            "cannot import model", whom, f"inlining its functions makes {total:.3g} nodes", f"at most {MOST_NODES}"
        )
