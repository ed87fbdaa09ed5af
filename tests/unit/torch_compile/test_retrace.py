"""The second trace of a segment, and what it leaves behind in Dynamo's own: nothing."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from fusionreg.integrations.torch.compile.retrace import to_aten


def traced(f: Any, *shape: int) -> tuple[ShapeEnv, torch.fx.GraphModule]:
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    context: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * len(shape))
    x = mode.from_tensor(torch.ones(shape), symbolic_context=context)
    return env, to_aten(torch.fx.symbolic_trace(f), [x])


def chosen(x: torch.Tensor) -> torch.Tensor:
    """What a router of experts does: the extents of two searches are held to be one."""
    return x.index_add(0, torch.where(x[:, 0] > 0)[0], x[torch.where(x[:, 0] > 0)[0]])


def test_extents_that_data_decide_need_no_explanation() -> None:
    """Dynamo would look for their symbols in its own graph, and fail: they are asked for once more, and forgotten."""
    env, made = traced(chosen, 4, 6)
    assert len(made.graph.find_nodes(op="call_function", target=torch.ops.aten.index_add.default)) == 1
    assert not env.deferred_runtime_asserts and not env.pending_fresh_unbacked_symbols


def test_questions_of_the_second_trace_are_no_guards() -> None:
    env, made = traced(lambda x: torch.nn.functional.layer_norm(x, (6,)), 4, 6)
    assert made.graph.find_nodes(op="call_function", target=torch.ops.aten.layer_norm.default)
    assert not env.guards
