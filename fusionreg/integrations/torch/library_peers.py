"""Bare library kernels for part of a graph: cuBLAS products, cuBLASLt epilogues, convolutions of cuDNN, normalisations
of cuDNN, Liger and QuACK, gradients of attention of cuDNN and FlashAttention, attention of sequences one behind the
other.

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

from .library_attention import gradients, of_sequences
from .schemas import torch_dtype


@dataclass(frozen=True)
class LibraryPeer:
    """One library call.

    Attributes:
        name: ``product``, ``epilogue``, ``cudnn``, ``flash``, ``liger`` or ``quack``.
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


_ATTENTION = {
    "fusionreg::AttentionGrad": gradients,
    "fusionreg::VarlenAttention": of_sequences,
    "fusionreg::VarlenAttentionGrad": of_sequences,
}


def library_peers(graph: Graph, ops: Vocabulary) -> tuple[LibraryPeer, ...]:
    """Those that fit ``graph``; a library that is not installed has none."""
    products = [n for n in graph.nodes if n.op == "MatMul"]
    found: list[LibraryPeer | None] = []
    if len(products) == 1 and set(products[0].inputs) <= set(graph.inputs) and not products[0].attrs.get("transA"):
        found += [_product(graph, products[0], ops), _epilogue(graph, products[0])]
    if len(products) == 1:
        found.append(_scaled_product(graph, products[0], ops))
    pair = _residual_norm(graph)
    for node in graph.nodes:
        if node.op in ("LayerNormalization", "RMSNormalization", "Softmax", "GroupNormalization"):
            found += [(_pair if pair else _installed)(name, graph, node, ops) for name in ("liger", "quack")]
            break
        if node.op == "BatchNormalization" and node.attrs.get("training_mode"):
            found.append(_cudnn_batch_norm(graph, node, ops))
        if node.op == "Conv":
            found.append(_cudnn_convolution(graph, node, ops))
        if calls := _ATTENTION.get(node.op):
            exact = _exactly(graph, node, ops)
            found += [LibraryPeer(name, "", tuple(node.inputs), call, exact) for name, call in calls(graph, node)]
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


def _scaled_product(graph: Graph, product: Node, ops: Vocabulary) -> LibraryPeer | None:
    """cuBLASLt's product of two e4m3 tensors with a scale of each, as ``torch._scaled_mm`` calls it."""
    made = {o: n for n in graph.nodes for o in n.outputs}
    casts = [made.get(i) for i in product.inputs]
    if any(c is None or c.op != "Cast" or c.inputs[0] not in graph.inputs for c in casts):
        return None
    x, w = (c.inputs[0] for c in casts if c is not None)
    narrow = all(graph.values[name].dtype == "float8_e4m3fn" for name in (x, w))
    part, y = [*casts, product], product.outputs[0]
    scales: list[str] = []
    for node in graph.nodes:
        if node.op == "Mul" and node.inputs[0] == y and node.inputs[1] in graph.inputs and len(scales) < 2:
            scales.append(node.inputs[1])
            part.append(node)
            y = node.outputs[0]
    if not narrow or len(scales) < 2 or not product.attrs.get("transB") or len(graph.values[x].shape or ()) != 2:
        return None
    alone = extract(graph, [n.name for n in part if n is not None], "alone")
    kind = torch_dtype(graph.values[graph.outputs[0]].dtype)

    def call(x: Any, w: Any, rows: Any, columns: Any) -> Any:
        if rows.dim() or columns.dim():  # both along their axes, or neither
            rows, columns = rows.expand(x.shape[0], 1), columns.expand(1, w.shape[0])
        return torch._scaled_mm(x, w.t(), rows.contiguous(), columns.contiguous(), out_dtype=kind)

    def exact(*arrays: Any) -> tuple[Any, ...]:
        given = dict(zip((x, w, *scales), arrays, strict=True))
        return tuple(evaluate(alone, given, ops=ops, mode="exact").values())

    whole = all(n.op == "Cast" for n in graph.nodes if n not in part)
    computes = "" if whole else f"({x} @ {w}) times its scales"
    return LibraryPeer("product", computes, (x, w, *scales), call, exact)


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


def _cudnn_batch_norm(graph: Graph, node: Node, ops: Vocabulary) -> LibraryPeer | None:
    """cuDNN's batch normalisation in training, running statistics updated in place; its result is compared alone."""
    if not set(node.inputs) <= set(graph.inputs):
        return None
    momentum, epsilon = 1.0 - node.attrs.get("momentum", 0.9), node.attrs.get("epsilon", 1e-5)
    whole = _exactly(graph, node, ops)

    def call(x: Any, scale: Any, bias: Any, mean: Any, var: Any) -> Any:
        return torch.ops.aten.cudnn_batch_norm(x, scale, bias, mean, var, True, momentum, epsilon)[0]

    def exact(*arrays: Any) -> tuple[Any, ...]:
        return whole(*arrays)[:1]

    return LibraryPeer("cudnn", "BatchNormalization alone", tuple(node.inputs), call, exact)


def _cudnn_convolution(graph: Graph, node: Node, ops: Vocabulary) -> LibraryPeer | None:
    """cuDNN's convolution, without what follows it."""
    pads = tuple(node.attrs.get("pads", ())) or (0, 0, 0, 0)
    if not set(node.inputs) <= set(graph.inputs) or len(pads) != 4 or pads[:2] != pads[2:]:
        return None
    window: dict[str, Any] = {
        "stride": node.attrs.get("strides") or 1,
        "padding": pads[:2],
        "dilation": node.attrs.get("dilations") or 1,
        "groups": node.attrs.get("group", 1),
    }

    def call(*arrays: Any) -> Any:
        x, w, *bias = arrays
        return F.conv2d(x, w, *bias[:1], **window)

    computes = "" if len(graph.nodes) == 1 else "the convolution alone"
    return LibraryPeer("cudnn", computes, tuple(node.inputs), call, _exactly(graph, node, ops))


def _has(library: str) -> bool:
    return find_spec({"liger": "liger_kernel", "quack": "quack"}[library]) is not None


def _residual_norm(graph: Graph) -> tuple[Node, Node] | None:
    """An addition of two inputs and the RMSNormalization of its sum, where both results are the graph's outputs."""
    if [n.op for n in graph.nodes] != ["Add", "RMSNormalization"]:
        return None
    add, norm = graph.nodes
    whole = {*add.inputs, *norm.inputs[1:]} <= set(graph.inputs) and norm.inputs[0] == add.outputs[0]
    both = tuple(graph.outputs) == (norm.outputs[0], add.outputs[0])
    return (add, norm) if whole and both and _last_axis(graph, norm) else None


def _pair(library: str, graph: Graph, node: Node, ops: Vocabulary) -> LibraryPeer | None:
    """Residual and RMSNorm in one kernel of a library: the whole workload."""
    if not _has(library):
        return None
    add, norm = graph.nodes
    epsilon = norm.attrs.get("epsilon", 1e-5)

    def call(x: Any, residual: Any, scale: Any) -> Any:
        if library == "liger":
            from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction

            return LigerFusedAddRMSNormFunction.apply(x, residual, scale, epsilon, 0.0, "llama", False)
        from quack import rmsnorm

        return rmsnorm(x, scale, residual=residual, eps=epsilon, prenorm=True)

    def exact(*arrays: Any) -> tuple[Any, ...]:
        given = dict(zip((*add.inputs, norm.inputs[1]), arrays, strict=True))
        return tuple(evaluate(graph, given, ops=ops, mode="exact").values())

    return LibraryPeer(library, "", (*add.inputs, norm.inputs[1]), call, exact)


def _last_axis(graph: Graph, node: Node) -> bool:
    rank = len(graph.values[node.inputs[0]].shape or ())
    return node.attrs.get("axis", -1) in (-1, rank - 1)


def _installed(library: str, graph: Graph, node: Node, ops: Vocabulary) -> LibraryPeer | None:
    """A normalisation by Liger or QuACK, over the last axis or over groups, on inputs of the graph of the right
    shapes."""
    if not _has(library):
        return None
    data = graph.values[node.inputs[0]]
    if node.op != "GroupNormalization" and not _last_axis(graph, node):
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
        if node.op == "GroupNormalization":
            from liger_kernel.ops.group_norm import LigerGroupNormFunction

            return LigerGroupNormFunction.apply(x, *rest, x.shape[1], node.attrs["num_groups"], epsilon)
        from liger_kernel.ops.softmax import LigerSoftmaxFunction

        return LigerSoftmaxFunction.apply(x)

    def quack(x: Any, *rest: Any) -> Any:
        from quack import rmsnorm, softmax

        flat = x.reshape(-1, x.shape[-1])
        y = rmsnorm(flat, *rest, eps=epsilon) if node.op == "RMSNormalization" else softmax(flat)
        return y.reshape(x.shape)

    if library == "liger":
        return None if node.op == "LayerNormalization" and len(node.inputs) < 3 else liger
    return quack if node.op in ("RMSNormalization", "Softmax") else None
