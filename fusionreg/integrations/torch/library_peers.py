"""Bare library kernels for part of a graph: cuBLAS products, cuBLASLt epilogues, normalisations of Liger and QuACK.

Most compute less than the fusion does. They are anchors: how fast the hard part alone is in a library's hands.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F

from fusionreg.core.evaluate.evaluator import evaluate
from fusionreg.core.ir import Graph, Node
from fusionreg.core.ops import Vocabulary
from fusionreg.core.rewrite import extract


@dataclass(frozen=True)
class LibraryPeer:
    """One library call.

    Attributes:
        name: ``product``, ``epilogue``, ``liger`` or ``quack``.
        computes: what it computes, "" where that is the graph itself.
        inputs: which inputs of the graph it takes.
        call: the call.
        exact: the same in float64, from the same arrays.
    """

    name: str
    computes: str
    inputs: tuple[str, ...]
    call: Callable[..., Any] = field(repr=False)
    exact: Callable[..., tuple[Any, ...]] = field(repr=False)


def library_peers(graph: Graph, ops: Vocabulary) -> tuple[LibraryPeer, ...]:
    """Those that fit ``graph``; a library that is not installed has none."""
    products = [n for n in graph.nodes if n.op == "MatMul"]
    found: list[LibraryPeer | None] = []
    if len(products) == 1 and set(products[0].inputs) <= set(graph.inputs) and not products[0].attrs.get("transA"):
        found += [_product(graph, products[0], ops), _epilogue(graph, products[0])]
    for node in graph.nodes:
        if node.op in ("LayerNormalization", "RMSNormalization", "Softmax"):
            found += [_installed(name, graph, node, ops) for name in ("liger", "quack")]
            break
    return tuple(p for p in found if p is not None)


def _product(graph: Graph, node: Node, ops: Vocabulary) -> LibraryPeer:
    turned = bool(node.attrs.get("transB"))

    def call(x: Any, w: Any) -> Any:
        return torch.matmul(x, w.transpose(-1, -2) if turned else w)

    x, w = node.inputs
    computes = "" if len(graph.nodes) == 1 else f"{x} @ {w} alone"
    return LibraryPeer("product", computes, (x, w), call, _exactly(graph, node, ops))


def _exactly(graph: Graph, node: Node, ops: Vocabulary) -> Callable[..., tuple[Any, ...]]:
    part = extract(graph, (node.name,), "alone")

    def exact(*arrays: Any) -> tuple[Any, ...]:
        return tuple(evaluate(part, dict(zip(part.inputs, arrays, strict=True)), ops=ops, mode="exact").values())

    return exact


def _epilogue(graph: Graph, product: Node) -> LibraryPeer | None:
    """cuBLASLt's product with bias, and Relu or the tanh form of Gelu, in its epilogue; None where no bias is added."""
    add = next((n for n in graph.nodes if n.op == "Add"), None)
    if add is None:
        return None
    bias = next((i for i in add.inputs if i in graph.inputs), "")
    shapes = {name: graph.values[name].shape for name in graph.inputs}
    x, w = product.inputs
    shape = shapes.get(bias)
    if not shape or len(shape) != 1 or len(shapes[w] or ()) != 2 or shape[0] == 1:
        return None
    last = graph.nodes[-1]
    activation = {"Relu": "relu", "Gelu": "gelu_tanh"}.get(last.op, "")
    if last is not add and not activation:
        return None
    turned = bool(product.attrs.get("transB"))
    same = len(graph.nodes) == (3 if activation else 2) and (
        last.op != "Gelu" or last.attrs.get("approximate", "none") == "tanh"
    )
    text = f"{x} @ {w} + {bias}"

    def call(x: Any, w: Any, bias: Any) -> Any:
        rows, w = x.reshape(-1, x.shape[-1]), w.t() if turned else w
        if activation:
            y = torch._addmm_activation(bias, rows, w, use_gelu=activation == "gelu_tanh")
        else:
            y = torch.addmm(bias, rows, w)
        return y.reshape(*x.shape[:-1], y.shape[-1])

    def exact(x: Any, w: Any, bias: Any) -> tuple[Any, ...]:
        y = x.double() @ (w.double().t() if turned else w.double()) + bias.double()
        if activation == "relu":
            y = torch.relu(y)
        return (F.gelu(y, approximate="tanh") if activation == "gelu_tanh" else y,)

    computes = "" if same else f"{activation}({text})" if activation else text
    return LibraryPeer("epilogue", computes, (x, w, bias), call, exact)


def _installed(library: str, graph: Graph, node: Node, ops: Vocabulary) -> LibraryPeer | None:
    """A normalisation over the last axis by Liger or QuACK, on inputs of the graph of the right shapes."""
    if find_spec({"liger": "liger_kernel", "quack": "quack"}[library]) is None:
        return None
    data = graph.values[node.inputs[0]]
    rank = len(data.shape or ())
    if node.attrs.get("axis", -1) not in (-1, rank - 1):
        return None
    stand_in = next(
        (n for n in graph.inputs if (graph.values[n].shape, graph.values[n].dtype) == (data.shape, data.dtype)), ""
    )
    inputs = (stand_in, *node.inputs[1:])
    if not all(name in graph.inputs for name in inputs):
        return None
    call = _call_of(library, node)
    if call is None:
        return None
    computes = "" if len(graph.nodes) == 1 else f"{node.op} alone"
    return LibraryPeer(library, computes, inputs, call, _exactly(graph, node, ops))


def _call_of(library: str, node: Node) -> Callable[..., Any] | None:
    """The library's function on (x, scale, bias) as far as the operator has them; imported when it is first called."""
    epsilon = node.attrs.get("epsilon", 1e-5)

    def liger(x: Any, *rest: Any) -> Any:
        if node.op == "LayerNormalization":
            from liger_kernel.ops.layer_norm import LigerLayerNormFunction

            return LigerLayerNormFunction.apply(x, *rest, epsilon)
        if node.op == "RMSNormalization":
            from liger_kernel.ops.rms_norm import LigerRMSNormFunction

            return LigerRMSNormFunction.apply(x, *rest, epsilon)
        from liger_kernel.ops.softmax import LigerSoftmaxFunction

        return LigerSoftmaxFunction.apply(x)

    def quack(x: Any, *rest: Any) -> Any:
        from quack import rmsnorm, softmax

        flat = x.reshape(-1, x.shape[-1])
        y = rmsnorm(flat, *rest, eps=epsilon) if node.op == "RMSNormalization" else softmax(flat)
        return y.reshape(x.shape)

    if library == "liger":
        return None if node.op == "LayerNormalization" and len(node.inputs) < 3 else liger
    return None if node.op == "LayerNormalization" else quack
