"""Operators of a lifted graph as aten calls: those that may stand between a program and a fused call.

Most only move a value. A matrix product stands there because ``aten.linear`` is one call in a program: where a fusion
takes the bias, the product without it is asked for. Where a program scales scores by a tensor of one element, that is
done in front of attention.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fusionreg.core.frozen import FrozenDict
from fusionreg.core.ir import Graph, Node, Shape

from .. import schemas

#: The fx graph to add to, the operands that are tensors, the lifted graph, its node → the result.
Make = Callable[[torch.fx.Graph, Sequence[Any], Graph, Node], Any]


def constant(graph: Graph, name: str) -> int | float | bool | None:
    """The number that all elements of a constant are; None where they differ, or are none."""
    array = graph.constants[name]
    if array.size == 0 or array.dtype.kind == "V":
        return None
    flat = array.reshape(-1)
    if array.size > 1 and not bool((flat == flat[0]).all()):
        return None
    return flat[0].item() if flat.dtype.kind in "biuf" else float(flat[0])


def glued(graph: Graph, node: Node) -> bool:
    """Whether a node only moves its first input, by numbers that are known."""
    return node.op in GLUE and all(i in graph.constants for i in node.inputs[1:] if i)


def operands(graph: Graph, node: Node) -> tuple[str, ...] | None:
    """The values that a node needs as tensors, where it can be made as an aten call; None where it cannot."""
    if node.op in PRODUCTS or (node.op in SCALES and _one(graph.values[node.inputs[1]].shape)):
        return tuple(node.inputs)
    return node.inputs[:1] if glued(graph, node) else None


def _one(shape: Shape | None) -> bool:
    return shape is not None and all(d == 1 for d in shape)


def make(out: torch.fx.Graph, values: Sequence[Any], graph: Graph, node: Node) -> Any:
    """A node as aten calls, for :func:`operands` as fx nodes."""
    return {**GLUE, **PRODUCTS, **SCALES}[node.op](out, values, graph, node)


def _ints(graph: Graph, node: Node, index: int) -> list[int]:
    return [int(i) for i in graph.constants[node.inputs[index]].reshape(-1)]


def _identity(out: torch.fx.Graph, values: Sequence[Any], graph: Graph, node: Node) -> Any:
    return values[0]


def _reshape(out: torch.fx.Graph, values: Sequence[Any], graph: Graph, node: Node) -> Any:
    x = values[0]
    shape = _ints(graph, node, 1)
    if not node.attrs.get("allowzero"):
        keep = [i for i, d in enumerate(shape) if d == 0]
        sizes = {i: out.call_function(torch.ops.aten.sym_size.int, (x, i)) for i in keep}
        target: list[Any] = [sizes.get(i, d) for i, d in enumerate(shape)]
    else:
        target = list(shape)
    return out.call_function(torch.ops.aten.reshape.default, (x, target))


def _transpose(out: torch.fx.Graph, values: Sequence[Any], graph: Graph, node: Node) -> Any:
    x = values[0]
    rank = len(graph.values[node.inputs[0]].shape or ())
    perm = node.attrs.get("perm") or tuple(range(rank))[::-1]
    return out.call_function(torch.ops.aten.permute.default, (x, list(perm)))


def _cast(out: torch.fx.Graph, values: Sequence[Any], graph: Graph, node: Node) -> Any:
    x = values[0]
    return out.call_function(torch.ops.aten.to.dtype, (x, schemas.torch_dtype(graph.values[node.outputs[0]].dtype)))


def _unsqueeze(out: torch.fx.Graph, values: Sequence[Any], graph: Graph, node: Node) -> Any:
    x = values[0]
    rank = len(graph.values[node.outputs[0]].shape or ())
    for axis in sorted(a % rank for a in _ints(graph, node, 1)):
        x = out.call_function(torch.ops.aten.unsqueeze.default, (x, axis))
    return x


def _squeeze(out: torch.fx.Graph, values: Sequence[Any], graph: Graph, node: Node) -> Any:
    x = values[0]
    shape = graph.values[node.inputs[0]].shape or ()
    given = len(node.inputs) > 1 and node.inputs[1]
    axes = [a % len(shape) for a in _ints(graph, node, 1)] if given else [i for i, d in enumerate(shape) if d == 1]
    return out.call_function(torch.ops.aten.squeeze.dims, (x, axes))


def _matmul(out: torch.fx.Graph, values: Sequence[Any], graph: Graph, node: Node) -> Any:
    a, b = values
    ranks = [len(graph.values[i].shape or ()) for i in node.inputs]
    if node.attrs.get("transB") and not node.attrs.get("transA") and ranks[1] == 2:
        return out.call_function(torch.ops.aten.linear.default, (a, b))
    sides = []
    for x, name in ((a, "transA"), (b, "transB")):
        swapped = node.attrs.get(name)
        sides.append(out.call_function(torch.ops.aten.transpose.int, (x, -2, -1)) if swapped else x)
    return out.call_function(torch.ops.aten.matmul.default, tuple(sides))


def _scaled(call: Any) -> Make:
    return lambda out, values, graph, node: out.call_function(call, tuple(values))


PRODUCTS: Mapping[str, Make] = FrozenDict({"MatMul": _matmul})
SCALES: Mapping[str, Make] = FrozenDict(
    {"Mul": _scaled(torch.ops.aten.mul.Tensor), "Div": _scaled(torch.ops.aten.div.Tensor)}
)
GLUE: Mapping[str, Make] = FrozenDict(
    {
        "Identity": _identity,
        "Reshape": _reshape,
        "Transpose": _transpose,
        "Cast": _cast,
        "Unsqueeze": _unsqueeze,
        "Squeeze": _squeeze,
    }
)
