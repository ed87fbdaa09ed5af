"""Activation checkpointing: what is computed again draws the same numbers, and is fused around them."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fusionreg.integrations.torch.compile.segment import Fuser
from fusionreg.torch import Options

from .conftest import fused, same


def dropped(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(F.dropout(F.gelu(x), 0.5, True), (16,), w, w)


def test_checkpointed_blocks_are_fused_inside_and_draw_their_mask_again(compiled: Any, reports: Any) -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return checkpoint(dropped, x, w, use_reentrant=False).tanh()

    x, w = torch.randn(4, 16, requires_grad=True), torch.ones(16, requires_grad=True)
    torch.manual_seed(5)
    got = compiled(f)(x, w)
    assert fused(reports) == ["norm.gelu_dropout_layernorm"]
    assert fused(reports, "forward")[0].startswith("norm.gelu_dropout_layernorm.r"), "with a seed that is drawn before"
    mine = torch.autograd.grad(got.sin().sum(), (x, w))
    torch.manual_seed(5)
    plain = compiled(lambda x, w: dropped(x, w).tanh())(x, w)
    same(got, plain)
    for a, b in zip(mine, torch.autograd.grad(plain.sin().sum(), (x, w)), strict=True):
        same(a, b)


def test_a_checkpoint_around_the_compiled_call_saves_what_it_computes_again(compiled: Any, reports: Any) -> None:
    """It counts, and the first call compiles, which saves nothing for anybody."""
    x, w = torch.randn(4, 16, requires_grad=True), torch.rand(16, requires_grad=True)
    f = lambda x, w: F.layer_norm(F.gelu(x), (16,), w)  # noqa: E731
    mine = torch.autograd.grad(checkpoint(compiled(f), x, w, use_reentrant=False).sin().sum(), (x, w))
    assert fused(reports)
    for a, b in zip(mine, torch.autograd.grad(f(x, w).sin().sum(), (x, w)), strict=True):
        same(a, b)


def test_a_mask_of_torch_is_drawn_again_for_what_is_fused_around_it(compiled: Any, reports: Any) -> None:
    def block(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(F.dropout(x * w + 1.0, 0.5, True)) * 2.0 + x

    x, w = torch.randn(4, 16, requires_grad=True), torch.rand(16, requires_grad=True)
    got = compiled(lambda x, w: checkpoint(block, x, w, use_reentrant=False))(x, w)
    kept = (got - x).detach().sub(1.0).abs() > 1e-6
    assert 0.2 < kept.float().mean() < 0.8
    expected = torch.sigmoid(torch.where(kept, (x * w + 1.0) * 2.0, 0.0)) * 2.0 + x
    same(got, expected)
    mine = torch.autograd.grad(got.sin().sum(), (x, w))
    for a, b in zip(mine, torch.autograd.grad(expected.sin().sum(), (x, w)), strict=True):
        same(a, b)
    assert fused(reports) == ["pointwise.region"] * 2, "one on each side of the mask"


def test_a_generator_that_is_handed_in_stays_an_input(registry: Any) -> None:
    """As graphs on a GPU hold it; here nothing runs."""
    random = pytest.importorskip("torch._prims.rng_prims")
    if not hasattr(random, "graphsafe_run_with_rng_state"):
        pytest.skip("this torch has no such operator")
    graph = torch.fx.Graph()
    x, state = graph.placeholder("x"), graph.placeholder("state")
    dropout = torch.ops.aten.native_dropout.default
    pair = graph.call_function(random.graphsafe_run_with_rng_state, (dropout, x, 0.5, True), {"rng_state": state})
    y, mask = (graph.call_function(operator.getitem, (pair, i)) for i in range(2))
    z = graph.call_function(torch.ops.aten.add.Tensor, (graph.call_function(torch.ops.aten.sigmoid.default, (y,)), x))
    graph.output((z, mask))
    with FakeTensorMode() as mode:
        x.meta["val"], state.meta["val"] = mode.from_tensor(torch.ones(4, 16)), torch.Generator()
        for node, op in ((z.args[0], torch.sigmoid), (z, torch.clone)):
            node.meta["val"] = op(x.meta["val"])
    module = torch.fx.GraphModule({}, graph)
    fuser = Fuser(registry, Options(policy="aggressive", device="sim", strict=True), "eager")
    made = fuser.rewrite_traced(module)
    assert [s.fusion[:16] for r in fuser.reports for s in r.fused] == ["pointwise.region"]
    state, (call,) = list(made.graph.find_nodes(op="placeholder"))[1], made.graph.find_nodes(
        op="call_function", target=random.graphsafe_run_with_rng_state
    )
    assert call.args[0] is dropout and call.kwargs == {"rng_state": state}
