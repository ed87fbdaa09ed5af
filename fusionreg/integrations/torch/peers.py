"""A fusion's graph as the plain torch code a user would write: what our kernels are compared with.

The graph becomes a ``torch.fx`` module of ordinary torch calls, one per operator; a product with a bias is ``linear``,
for which torch and Inductor have a call of the library. Eager runs it as it stands, and
``torch.compile`` gets the very same module. It is no reference for numbers: the evaluator is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from fusionreg.core.frozen import FrozenDict
from fusionreg.core.ir import Graph, Node
from fusionreg.core.ops import Vocabulary, complete
from fusionreg.core.rewrite import eliminate_dead

from .arrays import from_numpy
from .peer_operators import DROPOUT, WRITERS
from .peer_site import Site, unwritten


def torch_module(graph: Graph, ops: Vocabulary, device: torch.device | str = "cpu") -> fx.GraphModule:
    """The graph as a module: inputs in the graph's order, one output or a tuple.

    Raises: :class:`MisfitError` for an operator, or a use of one, that has no plain torch form.
    """
    code = fx.Graph()
    tracer = fx.proxy.GraphAppendingTracer(code)
    root = torch.nn.Module()
    known: dict[str, Any] = {name: fx.Proxy(code.placeholder(name), tracer) for name in graph.inputs}
    for name, array in graph.constants.items():
        if array.size == 1 and array.ndim == 0:
            known[name] = array.item() if hasattr(array, "item") else float(array)
        else:
            root.register_buffer(name, from_numpy(array).to(device))
            known[name] = fx.Proxy(code.get_attr(name), tracer)
    for node in graph.nodes:
        results = _linear(node, graph, known) or _write(node, graph, known, ops)
        known.update({name: x for name, x in zip(node.outputs, results, strict=False) if name})
    wanted = tuple(known[name] for name in graph.outputs)
    code.output(tuple(_fx(x) for x in wanted) if len(wanted) > 1 else _fx(wanted[0]))
    code.eliminate_dead_code()
    return fx.GraphModule(root, code)


def undropped(graph: Graph) -> Graph | None:
    """The graph with nothing dropped, where it drops anything: torch draws another random stream, so a peer's numbers
    can be compared only without. None for a graph that draws no random numbers."""
    if all(node.op != DROPOUT for node in graph.nodes):
        return None
    nodes = (replace(n, attrs=n.attrs | {"p": 0.0}) if n.op == DROPOUT else n for n in graph.nodes)
    return graph.with_(nodes=tuple(nodes))


def _fx(x: Any) -> Any:
    return x.node if isinstance(x, fx.Proxy) else x


def _linear(node: Node, graph: Graph, known: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """A bias behind the product of a layer's weight [N K], where nothing else reads that; None for any other node. The
    product that was written for it goes with all that nobody reads."""
    if node.op != "Add":
        return None
    for product, bias in (node.inputs, node.inputs[::-1]):
        made, given = graph.producers.get(product), graph.values[bias]
        if made is None or made.op != "MatMul" or made.attrs.get("transA") or not made.attrs.get("transB"):
            continue
        rank = len(graph.values[made.inputs[1]].shape or ())
        alone = len(graph.consumers.get(product, ())) == 1 and product not in graph.output_names
        if rank == 2 and len(given.shape or ()) == 1 and given.dtype == graph.values[product].dtype and alone:
            return (torch.nn.functional.linear(known[made.inputs[0]], known[made.inputs[1]], known[bias]),)
    return None


def restricted(graph: Graph, outputs: int) -> Graph:
    """What gives the first ``outputs`` of a graph; 0: all. Nodes do not give what nobody reads."""
    if not outputs:
        return graph
    kept = eliminate_dead(graph.with_(outputs=graph.outputs[:outputs]))
    read = {*kept.outputs, *(i for n in kept.nodes for i in n.inputs)}
    nodes = (replace(n, outputs=tuple(o if o in read else "" for o in n.outputs)) for n in kept.nodes)
    return kept.with_(nodes=tuple(nodes))


def _write(node: Node, graph: Graph, known: Mapping[str, Any], ops: Vocabulary) -> tuple[Any, ...]:
    if node.op not in WRITERS:
        raise unwritten(node, "it has none")
    site = Site(
        node,
        tuple(known[name] if name else None for name in node.inputs),
        complete(ops[node.op], node.attrs, node.op),
        tuple(graph.values[name] if name else None for name in node.inputs),
        FrozenDict(
            {
                i: tuple(int(v) for v in graph.constants[name].reshape(-1))
                for i, name in enumerate(node.inputs)
                if name in graph.constants and graph.constants[name].dtype.kind in "iu"
            }
        ),
        sum(1 for name in node.outputs if name),
    )
    found = WRITERS[node.op](site)
    return found if isinstance(found, tuple) else (found,)
