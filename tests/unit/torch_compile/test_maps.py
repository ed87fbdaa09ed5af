"""Programs that convolve are planned with channels last, where that saves more, and moved so; results lie as before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fusionreg
from fusionreg.core.errors import ModelError
from fusionreg.integrations.torch.compile import inner, maps, segment
from fusionreg.integrations.torch.compile.options import Options

from .conftest import fused, same

SHAPE = 2, 8, 6, 6


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(8, 16, 3, padding=1, bias=False), nn.Conv2d(16, 16, 1, bias=False)
        self.norm, self.other = nn.BatchNorm2d(16), nn.BatchNorm2d(16)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.relu(self.norm(self.first(x)))
        z = torch.relu(self.other(self.second(y)) + y)
        return z, z.mean((2, 3))


@pytest.fixture
def preferring(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Whether plans of what lies otherwise than row by row are said to save more."""

    def prefer(last: bool) -> None:
        monkeypatch.setattr(
            segment._Planned, "saves",
            property(lambda self: float(last and any(m.strides for m in self.plan.chosen))),
        )  # fmt: skip
        monkeypatch.setattr(maps, "seconds", lambda moved: 0.0)

    return prefer


def called(registry: Any) -> list[bool]:
    """Of every call of a convolution, whether its map and its kernel had channels last."""
    keys = [k for k in registry.runtime._prepared if k[1] == "conv.conv_bn_relu"]
    return [all(layout[2][1] == 1 for layout in key[2:4]) for key in keys]


@pytest.mark.parametrize("last", [True, False])
def test_maps_are_moved_where_that_saves_more(compiled: Any, reports: Any, preferring: Any, last: bool) -> None:
    preferring(last)
    torch.manual_seed(0)
    module, x = Residual().eval(), torch.randn(SHAPE)
    registry = fusionreg.load_registry(device="sim")
    with torch.no_grad():
        got, expected = compiled(module, registry=registry)(x), module(x)
    for mine, other in zip(got, expected, strict=True):
        same(mine, other)
        assert mine.stride() == other.stride()
    assert fused(reports) == ["conv.conv_bn_relu"] * 2 and not fused(reports, "inference"), "moving is no part of them"
    assert called(registry) == [last, last]
    assert reports[0].moved == 2 * last and ("moved to channels last: 2 inputs" in str(reports[0])) == last


def test_no_site_gives_maps_that_inductor_would_copy(
    compiled: Any, reports: Any, registry: Any, preferring: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs the convolution behind with channels last; the plan of the graph as it came knows that, and so do those
    of the graphs that autograd makes of it."""
    preferring(False)
    monkeypatch.setattr(inner, "inductor", lambda module, *_: module.forward)
    module, x = nn.Sequential(nn.GroupNorm(2, 8), nn.SiLU(), nn.Conv2d(8, 8, 3)).eval(), torch.randn(SHAPE)
    with torch.no_grad():
        same(compiled(module, inner="inductor")(x), module(x))
        fuser = segment.Fuser(registry, Options(policy="aggressive", device="sim"), "inductor")
        traced = torch.fx.experimental.proxy_tensor.make_fx(module)(x)
        assert fuser.rewrite_traced(traced) is traced and fuser.rewrite_traced(traced, moved=True) is not traced
    for report in (reports[0], fuser.reports[0]):
        assert not report.fused and segment.MOVED in {s.reason for s in report.lost}


def test_training_with_channels_last(compiled: Any, reports: Any, preferring: Any) -> None:
    """The gradient of a mean is row-major by itself, and Inductor would write it so: it comes as the map lies."""
    preferring(True)
    torch.manual_seed(0)
    module, x = Residual(), torch.randn(SHAPE, requires_grad=True)
    ends, registry = [x, *module.parameters()], fusionreg.load_registry(device="sim")
    got, expected = compiled(module, inner="inductor", registry=registry)(x), module(x)
    assert [y.stride() for y in got] == [y.stride() for y in expected]
    mine, other = (torch.autograd.grad(means.square().mean(), ends) for _, means in (got, expected))
    for a, b in zip(mine, other, strict=True):
        same(a, b, 1e-4)
    assert "norm.batchnorm_add_relu" in fused(reports)
    keys = [k for k in registry.runtime._prepared if k[1].startswith("norm.batchnorm") and k[1].endswith("backward")]
    assert keys and all(layout[2][1] == 1 for k in keys for layout in k[2:] if len(layout[1]) == 4), keys


def test_what_is_written_is_the_argument_itself(compiled: Any, preferring: Any) -> None:
    preferring(True)
    torch.manual_seed(0)
    module, x = Residual().eval(), torch.randn(SHAPE)

    def step(x: torch.Tensor) -> torch.Tensor:
        y = module(x)[0]
        x.mul_(2.0)
        return y

    mine, other = x.clone(), x.clone()
    with torch.no_grad():
        same(compiled(step)(mine), step(other))
    torch.testing.assert_close(mine, other, rtol=0, atol=0)
    assert mine.stride() == x.stride()


def test_what_is_not_moved() -> None:
    def places(module: nn.Module, x: torch.Tensor) -> list[int]:
        values = [x, *module.parameters()]
        names = [n for n, _ in module.named_parameters()]

        def run(x: Any, *weights: Any) -> Any:
            return torch.func.functional_call(module, dict(zip(names, weights, strict=True)), (x,))

        traced = torch.fx.experimental.proxy_tensor.make_fx(run)(*values)
        return sorted(maps.movable(traced, values))

    x = torch.randn(SHAPE)
    assert places(nn.Conv2d(8, 4, 3), x) == [0, 1]
    assert places(nn.Conv2d(8, 4, 3), x.to(memory_format=torch.channels_last)) == [1]
    assert places(nn.Conv2d(8, 4, 1), x) == [0], "a kernel of one pixel lies both ways"
    assert places(nn.Conv2d(8, 8, 3, groups=2), x) == [] and places(nn.Conv2d(8, 8, 3, groups=8), x) == [0]
    assert places(nn.ReLU(), x) == []


def test_a_result_that_no_call_could_give_back() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(2, 3, 4, 5)
    graph.output((x,))
    made, before = torch.fx.GraphModule(nn.Module(), graph), torch.fx.GraphModule(nn.Module(), torch.fx.Graph())
    (end,) = graph.find_nodes(op="output")
    y = before.graph.placeholder("y")
    y.meta["val"] = torch.empty(2, 3, 4, 10)[..., ::2]
    before.graph.output((y,))
    assert end.args == ((x,),)
    with pytest.raises(ModelError, match="cannot move maps"):
        maps.move(made, {}, before)


def test_inductor_moves_what_leads_to_a_convolution() -> None:
    """In the kernel that writes what the convolution reads: moving it first costs nothing beside that."""

    def block(x: torch.Tensor, skip: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return nn.functional.conv2d(nn.functional.silu(nn.functional.group_norm(x, 2)), w) + skip

    given = torch.randn(SHAPE), torch.randn(2, 4, 4, 4), torch.randn(4, 8, 3, 3)
    module = torch.fx.experimental.proxy_tensor.make_fx(block, pre_dispatch=True)(*given)
    moved = maps.movable(module, given)
    assert moved.keys() == {0, 1, 2} and maps.by_itself(module, moved).keys() == {1}
