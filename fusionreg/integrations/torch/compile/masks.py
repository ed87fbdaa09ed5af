"""Masks of attention that none of torch's fused kernels takes: beside them torch multiplies in float32.

They want the keys of a mask one behind the other, which they are not where a mask by queries was expanded over them, as
that of transformers' models is where nobody gave one. Where such a mask allows all, it goes; otherwise it is laid out.
"""

from __future__ import annotations

from typing import Any

import torch

_ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
_PLACE = 3  #: of the mask among its arguments
#: Elements up to which a mask is made to be looked at.
_MOST = 1 << 26


def lay_out(module: torch.fx.GraphModule) -> int:
    """In place: a traced program with masks that torch's kernels take, or none; of how many attentions."""
    found = [n for n in module.graph.find_nodes(op="call_function", target=_ATTENTION) if _apart(_mask(n))]
    laid: dict[torch.fx.Node, torch.fx.Node | None] = {}
    for node in found:
        mask = _mask(node)
        if mask not in laid:
            laid[mask] = None if _allows_all(mask) else _contiguous(module.graph, mask)
        args, kwargs = list(node.args), dict(node.kwargs)
        if "attn_mask" in kwargs:
            kwargs["attn_mask"] = laid[mask]
        else:
            args[_PLACE] = laid[mask]
        node.args, node.kwargs = tuple(args), kwargs
    if found:
        module.graph.eliminate_dead_code()
        module.recompile()
    return len(found)


def _mask(node: torch.fx.Node) -> Any:
    return node.kwargs.get("attn_mask", node.args[_PLACE] if len(node.args) > _PLACE else None)


def _apart(mask: Any) -> bool:
    value = mask.meta.get("val") if isinstance(mask, torch.fx.Node) else None
    return isinstance(value, torch.Tensor) and not value.requires_grad and value.dim() > 0 and value.stride(-1) != 1


def _contiguous(graph: torch.fx.Graph, mask: torch.fx.Node) -> torch.fx.Node:
    with graph.inserting_after(mask):
        made = graph.call_function(torch.ops.aten.contiguous.default, (mask,))
    made.meta = {**mask.meta, "val": mask.meta["val"].contiguous()}
    return made


def _allows_all(mask: torch.fx.Node) -> bool:
    """Whether it is made of constants, and adds nothing to any score."""
    made: dict[torch.fx.Node, None] = {}
    pending = [mask]
    while pending:
        node = pending.pop()
        if node not in made:
            if not _constant(node):
                return False
            made[node] = None
            pending += node.all_input_nodes
    values: dict[torch.fx.Node, Any] = {}
    for node in mask.graph.nodes:
        if node in made:
            args, kwargs = torch.fx.map_arg((node.args, dict(node.kwargs)), values.__getitem__)
            here = {"device": "cpu"} if "device" in kwargs else {}
            values[node] = node.target(*args, **{**kwargs, **here})
    value = values[mask]
    return bool((value if value.dtype == torch.bool else value == 0).all())


def _constant(node: torch.fx.Node) -> bool:
    """Whether a node gives the same whenever it is called with the same operands, and not much."""
    target, value = node.target, node.meta.get("val")
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return False
    fixed = isinstance(value, torch.Tensor) and all(type(d) is int for d in value.shape) and value.numel() <= _MOST
    return fixed and not target._schema.is_mutable and torch.Tag.nondeterministic_seeded not in target.tags


__all__ = ["lay_out"]
