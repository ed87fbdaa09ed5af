"""Operators that run under a saved state of a generator, which checkpointing makes of those that draw numbers.

They hold the operator as an argument. A fused call is never made of one, so that what it draws stays where it is drawn,
the same in both runs; a seed that is drawn in one is a value like others.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch._prims import rng_prims
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

#: Operator → which argument is the operator that it runs.
_RUNS: dict[Any, int] = {rng_prims.run_and_save_rng_state: 0, rng_prims.run_with_rng_state: 1}
if hasattr(rng_prims, "graphsafe_run_with_rng_state"):
    _RUNS[rng_prims.graphsafe_run_with_rng_state] = 0


def describe(graph: torch.fx.Graph) -> None:
    """Adds to such calls, and to what is taken out of their results, what they give: nobody else recorded it."""
    for node in graph.nodes:
        if node.op != "call_function" or "val" in node.meta:
            continue
        if node.target in _RUNS:
            node.meta["val"] = _given(node, _RUNS[node.target])
        elif node.target is operator.getitem and isinstance(node.args[0].meta.get("val"), list | tuple):
            node.meta["val"] = node.args[0].meta["val"][node.args[1]]


def _given(node: torch.fx.Node, at: int) -> Any:
    function: Any = node.args[at]
    rest = node.args[at + 1 :]
    named = {k: v for k, v in node.kwargs.items() if k != "rng_state"}
    args, kwargs = torch.fx.map_arg((rest, named), lambda n: n.meta.get("val"))
    mode = next((a.fake_mode for a in args if isinstance(a, FakeTensor)), None) or FakeTensorMode()
    with torch.no_grad(), mode:
        found = function(*args, **kwargs)
        if node.target is not rng_prims.run_and_save_rng_state:
            return found
        return torch.empty(1, dtype=torch.uint8, device="cpu"), found
