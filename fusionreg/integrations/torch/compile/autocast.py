"""Autocast spelled out: a graph that was traced under it, with every cast as a node.

What autocast does to the operands of an operator is not in the graph that it was traced to. Here each operator is run
once more, on the fake tensors it was recorded with, and the casts of its operands are seen arriving below autocast.
Spelled out they stay right under autocast as well: it leaves operands alone that have the dtype it wants.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class _Casts(TorchDispatchMode):
    """Notes the casts of the watched tensors, by identity."""

    def __init__(self, watched: dict[int, torch.fx.Node]) -> None:
        super().__init__()
        self.watched = watched
        self.found: dict[torch.fx.Node, torch.dtype] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and kwargs.get("dtype") is not None:
            node = self.watched.get(id(args[0]))
            if node is not None:
                self.found.setdefault(node, kwargs["dtype"])
        return func(*args, **kwargs)


def spell_out(module: torch.fx.GraphModule, device: str) -> None:
    """Adds the casts that the present autocast of ``device`` makes, in place; nothing where it is off."""
    if not torch.is_autocast_enabled(device):
        return
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        _spell_out(module)
    finally:
        torch.set_autocast_cache_enabled(cached)
    module.recompile()


def _spell_out(module: torch.fx.GraphModule) -> None:
    done: dict[tuple[torch.fx.Node, torch.dtype], torch.fx.Node] = {}
    for node in list(module.graph.nodes):
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        operands = [n for n in node.all_input_nodes if _floating(n.meta.get("val"))]
        casts = _casts(node, operands) if operands else {}
        for operand, dtype in casts.items():
            if (operand, dtype) not in done:
                with module.graph.inserting_before(node):
                    cast = module.graph.call_function(torch.ops.aten.to.dtype, (operand, dtype))
                value = operand.meta["val"]
                with value.fake_mode:
                    fake = torch.empty_strided(value.shape, value.stride(), dtype=dtype, device=value.device)
                    cast.meta = {**node.meta, "val": fake.requires_grad_(value.requires_grad)}
                done[operand, dtype] = cast
            node.replace_input_with(operand, done[operand, dtype])


def _casts(node: torch.fx.Node, operands: list[torch.fx.Node]) -> dict[torch.fx.Node, torch.dtype]:
    """Operand → the dtype that autocast gives it there."""
    values = {n: n.meta["val"].detach() for n in operands}

    def fill(n: torch.fx.Node) -> Any:
        return values.get(n, n.meta.get("val"))

    args, kwargs = torch.fx.map_arg(node.args, fill), torch.fx.map_arg(node.kwargs, fill)
    seen = _Casts({id(v): n for n, v in values.items()})
    with torch.no_grad(), seen:
        node.target(*args, **kwargs)  # type: ignore[operator]
    return {n: dtype for n, dtype in seen.found.items() if dtype != n.meta["val"].dtype}


def _floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype.is_floating_point
