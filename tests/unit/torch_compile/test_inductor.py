"""Inductor as the executor of the rest: what autograd makes of a graph is matched, and its caches stay right."""

from __future__ import annotations

import copy
import re
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.utils import fresh_cache, run_and_get_code
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from fusionreg.integrations.torch.compile import inner
from fusionreg.integrations.torch.compile.options import Options
from fusionreg.integrations.torch.operators import Operators

from .conftest import fused, same


@pytest.fixture(autouse=True)
def cache():
    with fresh_cache():
        yield


def block(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.gelu(F.layer_norm(x, (16,), w, b)) * 2.0


def given() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=generator).requires_grad_() for s in ((4, 16), (16,), (16,))]


def gradients(f: Any, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = f(*inputs)
    return y.detach(), *torch.autograd.grad(y.sin().sum(), inputs)


def test_both_directions_are_matched_and_cached_with_their_calls(compiled: Any, reports: Any) -> None:
    expected = gradients(block, *given())
    for turn in range(2):
        counters.clear()
        reports.clear()
        for mine, other in zip(gradients(compiled(block, inner="inductor"), *given()), expected, strict=True):
            same(mine, other)
        assert fused(reports) == ["norm.layernorm", "pointwise.region"]
        for stage, name in (("forward", "norm.layernorm.r"), ("backward", "norm.layernorm_backward.r")):
            (found,) = fused(reports, stage)
            assert found.startswith(name), "with what stands around it"
        hits = counters["inductor"]["fxgraph_cache_hit"]
        assert hits == 2 * turn, "forward and backward, the second time"
        assert not counters["aot_autograd"]["autograd_cache_hit"]
    assert torch._functorch.config.enable_autograd_cache


def test_maps_that_inductor_moves_to_channels_last_reach_fused_calls_as_they_are(compiled: Any, reports: Any) -> None:
    """In both directions: what a convolution gives is what the call takes, and what it gives the next one takes."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.ConvTranspose2d(8, 16, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        nn.ConvTranspose2d(16, 8, 3, bias=False),
    )  # fmt: skip  # transposed ones are of no fusion
    reference, x = copy.deepcopy(model), torch.randn(2, 8, 8, 8)
    weights = [model[0].weight, model[1].weight, model[3].weight]
    with config.patch(force_layout_optimization=True):
        step = compiled(model, inner="inductor")
        found, code = run_and_get_code(lambda: torch.autograd.grad(step(x).square().sum(), weights))
    same(step(x), reference(x))
    expected = torch.autograd.grad(reference(x).square().sum(), [reference[i].weight for i in (0, 1, 3)])
    for mine, other in zip(found, expected, strict=True):
        same(mine, other, 1e-4)
    assert fused(reports) == ["norm.batchnorm_relu"]
    forward, backward = code
    (called,) = re.findall(r"batchnorm_relu\.default\((buf\d+)", forward)
    assert f"{called} = extern_kernels.convolution(" in forward
    gradient, saved = re.search(r"batchnorm_relu_backward\.default\((\w+), (\w+)", backward).groups()  # type: ignore[union-attr]
    assert saved == "convolution" and re.search(rf"assert_\w+\({gradient}, [^\n]*convolution_backward", backward)


def test_passes_of_the_user_run_and_keep_their_place(compiled: Any) -> None:
    seen: list[list[str]] = []

    def mine(graph: torch.fx.Graph) -> None:
        seen.append([n for n in map(str, (n.target for n in graph.nodes)) if n.startswith("fusionreg.")])

    inputs = given()
    with torch.no_grad(), config.patch(post_grad_custom_post_pass=mine):
        before = config.get_config_copy()
        step = compiled(block, inner="inductor", inner_options={"post_grad_custom_pre_pass": mine})
        same(step(*inputs), block(*inputs))
        assert config.get_config_copy() == before
    assert len(seen) == 2 and seen[0] == seen[1] and len(seen[0]) == 1


def test_the_key_of_compiled_graphs_is_marked_where_there_is_room(registry: Any) -> None:
    (slot,) = inner._marked({}, "k")
    assert inner._marked({}, "k")[slot].uuid() == "k"
    (other,) = inner._marked({slot: print}, "k")
    assert other != slot
    assert inner._marked(dict.fromkeys(inner._SLOTS, print), "k") == {
        "fx_graph_cache": False,
        "fx_graph_remote_cache": False,
    }


def test_the_key_covers_fusions_and_options(registry: Any) -> None:
    class Changed:
        def __init__(self, entry: Any) -> None:
            self.spec = entry.spec.model_copy(update={"summary": "another"})

    class Catalog:
        fusions = {n: Changed(e) if n == "norm.layernorm" else e for n, e in registry.catalog.fusions.items()}

    class Other:
        catalog = Catalog

    base = Options(device="sim")
    keys = [
        inner.key_of(registry, base), inner.key_of(registry, Options(device="sim", policy="aggressive")),
        inner.key_of(registry, Options()), inner.key_of(Other(), base),
    ]  # fmt: skip
    assert len(set(keys)) == 4
    assert inner.key_of(registry, base) == keys[0]
    assert Operators.of(registry).digest != Operators(Other()).digest  # type: ignore[arg-type]


def test_options_of_inductor_reach_it(compiled: Any) -> None:
    for wrong in ({"no_such_option": 1}, {"max_autotune": 1}):
        with (
            torch.no_grad(),
            pytest.raises(Exception, match=r"cannot compile backend fusionreg: inner_options .* types"),
        ):
            compiled(block, inner="inductor", inner_options=wrong)(*given())


def test_what_stands_around_fused_calls_is_taken_apart_for_inductor() -> None:
    from torch._inductor.lowering import lowerings

    aten, graph = torch.ops.aten, torch.fx.Graph()
    with FakeTensorMode() as mode:
        x, w = graph.placeholder("x"), graph.placeholder("w")
        x.meta["val"], w.meta["val"] = mode.from_tensor(torch.ones(2, 3, 4)), mode.from_tensor(torch.ones(5, 4))
    wide = graph.call_function(aten.linear.default, (x, graph.call_function(aten.to.dtype, (w, torch.float32))))
    turned = graph.call_function(aten.transpose.int, (wide, -2, -1))
    product = graph.call_function(aten.matmul.default, (turned, x))
    copied = graph.call_function(aten._to_copy.default, (product,), {"dtype": torch.float64})
    graph.output((copied, graph.call_function(aten.to.dtype, (product, torch.bfloat16))))
    module = torch.fx.GraphModule({}, graph)
    given = torch.randn(2, 3, 4), torch.randn(5, 4)
    expected = module(*given)
    made = inner._prepared(module)
    targets = {n.target for n in made.graph.nodes if n.op == "call_function"}
    assert targets <= lowerings.keys() and len(targets) > 3
    for one, other in zip(made(*given), expected, strict=True):
        assert one.dtype == other.dtype and torch.allclose(one, other)


def test_policy_off_is_inductor_alone(compiled: Any, reports: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    real = inner.lookup_backend("inductor")

    def watched(*inputs: Any, **named: Any) -> Any:
        asked.append(named)
        return real(*inputs, **named)

    monkeypatch.setattr(inner, "lookup_backend", lambda name: watched)
    x = torch.randn(2, 3)
    options = {"inner": "inductor", "inner_options": {"max_autotune": False}}
    with torch.no_grad():
        assert torch.equal(compiled(lambda x: x.t(), policy="off", **options)(x), x.t())
        assert torch.equal(compiled(lambda x: x.t(), **options)(x), x.t())
    assert asked[0] == {"config_patches": {"max_autotune": False}}
    assert asked[1]["config_patches"].keys() == {"max_autotune", inner._SLOTS[0]} and "inner_compile" in asked[1]
    assert [r.stage for r in reports] == ["captured", "captured", "inference"]


@pytest.mark.parametrize(
    "given",
    [{"mode": "max-autotune-no-cudagraphs"}, {"options": {"mode": "max-autotune-no-cudagraphs", "policy": "off"}}],
)
def test_a_mode_is_options_of_inductor(monkeypatch: pytest.MonkeyPatch, given: Any) -> None:
    """``torch.compile`` takes a mode or options: a mode may be among them."""
    asked: list[dict[str, Any]] = []
    found = lambda name: lambda gm, inputs, **named: asked.append(named) or gm.forward  # noqa: E731
    monkeypatch.setattr(inner, "lookup_backend", found)
    torch._dynamo.reset()
    with warnings.catch_warnings(action="ignore"):
        torch.compile(lambda x: x + 1, backend="fusionreg", **given)(torch.ones(2))
    assert asked[0]["config_patches"]["max_autotune"] is True


@pytest.mark.parametrize(
    ("options", "executor"),
    [
        ({"inner": "eager"}, "eager"),
        ({"inner": "inductor"}, "inductor"),
        ({"inner": "inductor", "inner_options": {"max_autotune_gemm": True}}, "inductor-max-autotune"),
        ({"inner": "inductor", "mode": "max-autotune-no-cudagraphs"}, "inductor-max-autotune"),
    ],
)
def test_a_plan_knows_who_runs_the_rest(
    compiled: Any, registry: Any, monkeypatch: pytest.MonkeyPatch, options: Any, executor: str
) -> None:
    """What Triton's products take in with them is no saving of ours."""
    seen = list[str]()
    monkeypatch.setattr(type(registry), "plan", lambda self, graph, executor, **_: seen.append(executor) or 1 / 0)
    for way in ("inductor", "eager"):
        monkeypatch.setattr(inner, way, lambda module, *_: module.forward)
    with torch.no_grad():
        compiled(block, strict=False, **options)(*given())
    assert seen == [executor]
    assert inner.tuned(Options(), "max-autotune-no-cudagraphs") and not inner.tuned(Options(), None)
