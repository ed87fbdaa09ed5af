"""What real programs do around the operators: modes, writes, other people's operators, shapes that vary."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fusionreg.core.errors import ArgumentError, UnknownNameError
from fusionreg.torch import FusionWarning

from .conftest import fused, same

LIBRARY = torch.library.Library("fusionreg_tests", "DEF")
LIBRARY.define("twice(Tensor x) -> Tensor")
LIBRARY.impl("twice", lambda x: x + x, "CompositeExplicitAutograd")
LIBRARY._register_fake("twice", torch.empty_like)


def norm(x: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, (x.shape[-1],), torch.ones(x.shape[-1]) * 1.5, torch.ones(x.shape[-1]))


def dropped(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(F.dropout(F.gelu(x), 0.5, True), (16,), w, w)


def test_a_dropout_draws_one_mask_for_both_directions(compiled: Any, reports: Any) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(F.silu(F.group_norm(x, 2)), 0.5, True)

    x = torch.randn(2, 4, 8, requires_grad=True)
    step = compiled(f)
    torch.manual_seed(3)
    first = step(x)
    kept = first != 0
    assert fused(reports) == ["norm.groupnorm_swish_dropout"]
    assert 0.2 < kept.float().mean() < 0.8
    same(first, torch.where(kept, 2.0 * F.silu(F.group_norm(x, 2)), 0.0))
    (mine,) = torch.autograd.grad((first * first.detach()).sum(), x)
    expected = torch.where(kept, 2.0 * F.silu(F.group_norm(x, 2)), 0.0)
    (other,) = torch.autograd.grad((expected * expected.detach()).sum(), x)
    same(mine, other, 1e-4)
    second = step(x)
    assert not torch.equal(second != 0, kept), "another call, another mask"
    torch.manual_seed(3)
    assert torch.equal(step(x), first), "the seed of the program decides"


def test_two_dropouts_of_one_graph_draw_two_masks(compiled: Any, reports: Any) -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return dropped(x, w), dropped(x, w)

    a, b = compiled(f, inner="inductor")(torch.randn(4, 16), torch.ones(16))
    assert fused(reports) == ["norm.gelu_dropout_layernorm"] * 2
    assert not torch.equal(a, b)


@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_nothing_but_inputs_and_seed_is_saved_for_the_backward_pass(compiled: Any, inner: str) -> None:
    saved: list[torch.Tensor] = []

    def keep(t: torch.Tensor) -> torch.Tensor:
        saved.append(t)
        return t

    x, w = torch.randn(4, 16, requires_grad=True), torch.ones(16, requires_grad=True)
    step = compiled(dropped, inner=inner)
    step(x, w)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        step(x, w)
    storages = {t.untyped_storage().data_ptr() for t in saved}
    floating = [t for t in saved if t.is_floating_point()]
    own = {x.untyped_storage().data_ptr(), w.untyped_storage().data_ptr()}
    assert {t.untyped_storage().data_ptr() for t in floating} <= own, "neither a mask nor a value from inside"
    assert [tuple(t.shape) for t in saved if not t.is_floating_point()] == [(2,)], "seed and offset"
    assert len(storages) <= 3


def test_gradients_end_where_the_program_ends_them(compiled: Any, reports: Any) -> None:
    w = torch.ones(16)

    def detached(x: torch.Tensor) -> torch.Tensor:
        return x + F.layer_norm((x * 2).detach(), (16,), w, w)

    def disabled(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y = F.layer_norm(x * 2, (16,), w, w)
        return x + y

    for f in (detached, disabled):
        x = torch.randn(3, 16, requires_grad=True)
        got = compiled(f)(x)
        same(got, f(x))
        (gradient,) = torch.autograd.grad(got.sum(), x)
        assert torch.equal(gradient, torch.ones_like(x)), f.__name__
    assert fused(reports).count("norm.layernorm") + sum(n.startswith("norm.layernorm.r") for n in fused(reports)) == 2


def test_modes_that_change_nothing_divide_nothing(compiled: Any, reports: Any) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        y = F.group_norm(x, 2)
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            steps = torch.arange(8.0).sin()
        z = F.silu(y) + steps
        with torch.no_grad():
            return z * F.silu(F.group_norm(z, 2)).detach()

    x = torch.randn(2, 4, 8, requires_grad=True)
    got, expected = compiled(f)(x), f(x)
    same(got, expected)
    assert not got.requires_grad, "the last region reads what has a gradient"
    assert len([n for n in fused(reports) if n.startswith("norm.groupnorm_swish")]) == 2
    got = compiled(lambda x: f(x.detach()) + x)(x)
    same(torch.autograd.grad(got.sum(), x)[0], torch.ones_like(x))


@pytest.mark.parametrize("inside", [True, False])
def test_autocast(compiled: Any, reports: Any, inside: bool) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.SiLU())
    reference = copy.deepcopy(model)

    def f(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x)

    x = torch.randn(4, 16)
    with torch.autocast("cpu", torch.bfloat16):
        expected = reference(x)
        got = compiled(f if inside else model)(x)
    same(got, expected, 0.02)
    got.float().square().sum().backward()
    expected.float().square().sum().backward()
    assert model[0].weight.grad.dtype == torch.float32
    same(model[0].weight.grad, reference[0].weight.grad, 0.05)
    assert any(n.startswith("norm.layernorm") for n in fused(reports))
    assert not torch.is_autocast_enabled("cpu")


def test_writes_to_arguments_are_made(compiled: Any, reports: Any) -> None:
    def f(x: torch.Tensor, count: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        count.add_(1)
        return F.layer_norm(x * count, (16,), w, w)

    x, w = torch.randn(3, 16), torch.ones(16)
    mine, other = torch.zeros(1), torch.zeros(1)
    step = compiled(f)
    for _ in range(2):
        same(step(x, mine, w), f(x, other, w))
        assert torch.equal(mine, other)
    assert fused(reports)


def test_an_argument_that_is_written_and_returned_stays_one_tensor(compiled: Any, reports: Any) -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = F.layer_norm(x, (16,), w, w)
        return x.mul_(2.0), y

    x, w = torch.randn(3, 16), torch.ones(16)
    expected = f(x.clone(), w)
    got = compiled(f)(x, w)
    same(got[0], expected[0])
    same(got[1], expected[1])
    same(x, expected[0])
    assert got[0].data_ptr() == x.data_ptr() and fused(reports) == ["norm.layernorm"]


def test_operators_of_other_libraries_stay(compiled: Any, reports: Any) -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        h = torch.ops.fusionreg_tests.twice(F.layer_norm(x, (16,), w, w))
        return F.layer_norm(h, (16,), w, w)

    x, w = torch.randn(3, 16), torch.rand(16)
    same(compiled(f)(x, w), f(x, w))
    assert fused(reports) == ["norm.layernorm"] * 2
    assert reports[0].opaque == ("fusionreg_tests.twice.default",)


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return g * 3 * x**2


def test_autograd_functions_stand_between_segments(compiled: Any, reports: Any) -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(Cube.apply(F.layer_norm(x, (16,), w, w)), (16,), w, w)

    x, w = torch.randn(3, 16, requires_grad=True), torch.rand(16)
    got, expected = compiled(f)(x, w), f(x, w)
    same(got, expected)
    (mine,), (other,) = torch.autograd.grad(got.sin().sum(), x), torch.autograd.grad(expected.sin().sum(), x)
    same(mine, other, 1e-4)
    assert fused(reports) == ["norm.layernorm"] * 2


def test_numbers_that_leave_the_graph(compiled: Any) -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> Any:
        y = F.layer_norm(x, (16,), w, w)
        return y * y.mean().item(), y.shape[0] * 2

    x, w = torch.randn(3, 16), torch.rand(16)
    got, expected = compiled(f, strict=False)(x, w), f(x, w)
    same(got[0], expected[0])
    assert got[1] == expected[1]


def test_one_graph_serves_several_extents(compiled: Any, reports: Any) -> None:
    w = torch.rand(16)

    def f(x: torch.Tensor) -> torch.Tensor:
        return F.silu(F.group_norm(F.layer_norm(x, (16,), w, w).view(x.shape[0], 4, -1), 2))

    step = compiled(f, dynamic=True)
    for rows in (3, 5, 7, 2):
        x = torch.randn(rows, 16)
        same(step(x), f(x))
    assert fused(reports) == ["norm.layernorm", "norm.groupnorm_swish"]
    assert len([r for r in reports if r.stage == "captured"]) == 1, "compiled once"


def test_a_dimension_that_is_one_at_first(compiled: Any) -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(x + y) * x

    step = compiled(f, dynamic=None)
    for shape in ((1, 8), (4, 8), (6, 8), (1, 8)):
        x, y = torch.randn(4, 8), torch.randn(shape[0] if shape[0] in (1, 4) else 4, 8)
        same(step(x, y), f(x, y))


@pytest.mark.parametrize("first", [True, False], ids=["channels last first", "channels last second"])
def test_what_is_fused_lies_as_operators_would_have_it(compiled: Any, reports: Any, first: bool) -> None:
    """A map whose channels lie last stays one, so that no operator behind it has to move it."""
    moved, plain, scale = torch.randn(2, 5, 4, 6).permute(0, 3, 1, 2), torch.randn(2, 6, 5, 4), torch.rand(6, 1, 1)
    x, y = (moved, plain) if first else (plain, moved)
    f = compiled(lambda x, y: torch.relu(x * scale + y))
    got, expected = f(x, y), torch.relu(x * scale + y)
    assert fused(reports) == ["pointwise.region"] and got.stride() == expected.stride()
    assert got.is_contiguous(memory_format=torch.channels_last) == first
    same(got, expected)


def test_tensors_on_the_cpu_are_left_alone_unless_it_is_a_test(compiled: Any, reports: Any) -> None:
    with pytest.warns(FusionWarning, match="explain"):
        same(compiled(norm, device="cuda", strict=False)(torch.ones(2, 8)), norm(torch.ones(2, 8)))
    assert fused(reports) == []
    assert "fused kernels run on a GPU" in reports[0].refused[0]
    with pytest.warns(FusionWarning, match="explain"):
        compiled(lambda x: x.cumsum(0).unique_consecutive(), strict=False)(torch.ones(4))


def test_policy_off(compiled: Any, reports: Any) -> None:
    compiled(norm, policy="off")(torch.ones(2, 8))
    assert fused(reports) == []


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"polcy": "off"}, UnknownNameError, "policy"),
        ({"policy": "of"}, UnknownNameError, "off"),
        ({"inner": "indctor"}, UnknownNameError, "inductor"),
        ({"device": "tpu"}, ArgumentError, "cuda"),
        ({"inner_options": 3}, ArgumentError, "mapping"),
        ({"mode": "max-autotun"}, UnknownNameError, "max-autotune-no-cudagraphs"),
        ({"mode": 3}, UnknownNameError, "mode of torch.compile"),
        ({"policy": ["off"]}, UnknownNameError, "policy"),
        ({"report": 3}, ArgumentError, "report 3 — a function"),
        ({"registry": "moe"}, ArgumentError, "load_registry"),
        ({"explain": "no"}, ArgumentError, "explain 'no' — True or False"),
        ({"cuda_graph": 1}, ArgumentError, "True or False"),
        ({"strict": None}, ArgumentError, "True or False"),
        ({"measure": "5"}, ArgumentError, "seconds"),
        ({"measure": float("nan")}, ArgumentError, "seconds"),
        ({"inner": "eager", "mode": "max-autotune"}, ArgumentError, "Inductor"),
    ],
)
def test_wrong_options(options: Any, error: type[Exception], words: str) -> None:
    from fusionreg.torch import Options

    with pytest.raises(error, match=words):
        Options.parse(options)


@pytest.mark.parametrize(
    "transformed",
    [
        lambda f: torch.vmap(f),
        lambda f: torch.func.grad(lambda x: f(x).sin().sum()),
        lambda f: lambda x: torch.func.jvp(f, (x,), (x * 2,))[1],
        lambda f: torch.vmap(torch.func.jacrev(f)),
    ],
)
def test_transforms_stand_between_segments(compiled: Any, reports: Any, transformed: Any) -> None:
    """What they compute on stands for batches, or has tangents, which a trace does not see through."""
    w = torch.rand(8)

    def f(x: torch.Tensor) -> torch.Tensor:
        y = transformed(lambda a: (F.gelu(a) * 2).softmax(-1))(F.gelu(x) * 3)
        return F.layer_norm(y, (8,), w)

    x = torch.randn(3, 8)
    same(compiled(f)(x), f(x), 1e-3)  # rows of derivatives hardly vary: dividing by that enlarges the last bits
    assert fused(reports) == ["pointwise.region", "norm.layernorm_unbiased"]


def test_tensors_that_wrap_others_are_fused_where_they_come_down_to_those(compiled: Any, reports: Any) -> None:
    module = nn.Linear(8, 16)

    def f(rows: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return F.gelu(module(rows)), F.layer_norm(F.gelu(x) * 2, (16,))

    rows = torch.nested.nested_tensor([torch.randn(3, 8), torch.randn(5, 8)], layout=torch.jagged)
    x = torch.randn(4, 16)
    for got, expected in zip(compiled(f)(rows, x), f(rows, x), strict=True):
        same(*(t.values() if t.is_nested else t for t in (got, expected)))
    assert [n.partition(".r")[0] for n in fused(reports)] == ["norm.layernorm_unbiased"]
    assert [n.partition(".r")[0] for n in fused(reports, "forward")] == ["gemm.bias"]


def test_a_compiled_module_can_be_copied(compiled: Any) -> None:
    module, x = torch.nn.Linear(4, 4), torch.randn(2, 4)
    step = compiled(module)
    other = copy.deepcopy(step)
    torch.nn.init.ones_(module.weight)
    same(step(x), module(x))
    assert other.weight is not module.weight and not torch.allclose(other(x), step(x))


def test_the_backend_is_found_by_name() -> None:
    assert "fusionreg" in torch._dynamo.list_backends(exclude_tags=None)


def test_modes_are_as_they_were_after_a_failure(registry: Any) -> None:
    from fusionreg.integrations.torch.compile.segments import rewrite_graph

    seen: list[torch.fx.GraphModule] = []

    def keep(gm: torch.fx.GraphModule, example: Any) -> Any:
        seen.append(gm)
        return gm.forward

    def f(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            y = x @ x
        return y + x

    torch._dynamo.reset()
    torch.compile(f, backend=keep)(torch.ones(2, 2))

    def fail(segment: Any, values: Any) -> Any:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        rewrite_graph(seen[0], fail)
    assert torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")


def test_extents_that_data_decides(compiled: Any, reports: Any) -> None:
    """The second trace of an operator that makes an extent leaves no symbol behind that Dynamo could not explain."""

    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        rows = torch.nonzero(x[:, 0] > 0).squeeze(1)
        return F.layer_norm(x[rows], (16,), w, w)

    x, w = torch.randn(8, 16), torch.rand(16)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True), torch.no_grad():
        step = compiled(f, strict=False)
        for _ in range(2):
            x = torch.randn(8, 16)
            same(step(x, w), f(x, w))
    assert any(n.startswith("norm.layernorm") for n in fused(reports))


def test_gradients_flow_through_parts_that_are_written(compiled: Any, reports: Any) -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        c = torch.zeros(6, 16)
        c[2:4] = x[0]
        return F.layer_norm(c, (16,), w, w) + c * x

    x, w = torch.randn(6, 16, requires_grad=True), torch.rand(16, requires_grad=True)
    got, expected = compiled(f)(x, w), f(x, w)
    same(got, expected)
    for mine, other in zip(
        torch.autograd.grad(got.sin().sum(), (x, w)), torch.autograd.grad(expected.sin().sum(), (x, w)), strict=True
    ):
        same(mine, other, 1e-4)
    assert fused(reports)
