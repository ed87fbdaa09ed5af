"""Operators on a GPU: gradients, Inductor, autocast, and dropout in CUDA graphs."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch_operators import SITES  # noqa: E402

from fusionreg import load_registry  # noqa: E402
from fusionreg.integrations.torch.operators import Operators  # noqa: E402

pytestmark = pytest.mark.gpu

ALL = pytest.mark.parametrize("site", SITES.values(), ids=SITES.keys())


@pytest.fixture(scope="module")
def operators():
    return Operators.of(load_registry(device="cuda"))


def called(operators, site, tensors):
    found = operators[site.fusion](*tensors.values(), **site.attributes)
    return found if isinstance(found, tuple) else (found,)


def gradients(outputs, site, inputs):
    sums = [(o * o.detach().sin()).sum() for o in outputs[: len(outputs) - site.constant]]
    return torch.autograd.grad(sum(sums), inputs)


@ALL
def test_values_and_gradients(operators, site):
    tensors = site.tensors(grad=True, device="cuda")
    inputs = [t for t in tensors.values() if t.requires_grad]
    outputs, expected = called(operators, site, tensors), site.expected(tensors)
    for found, right in zip(outputs, expected, strict=True):
        torch.testing.assert_close(found, right, rtol=5e-5, atol=5e-5)
    for found, right in zip(gradients(outputs, site, inputs), gradients(expected, site, inputs), strict=True):
        torch.testing.assert_close(found, right, rtol=2e-4, atol=2e-4)


@ALL
def test_opcheck(operators, site):
    arguments = tuple(site.tensors(grad=True, device="cuda").values())
    assert set(torch.library.opcheck(operators[site.fusion], arguments, site.attributes).values()) == {"SUCCESS"}


@pytest.mark.parametrize("name", ["gelu_dropout_layernorm", "residual_rmsnorm", "groupnorm_swish_dropout_last"])
def test_inductor(operators, name):
    site, op = SITES[name], operators[SITES[name].fusion]

    def f(*tensors):
        x, *rest = tensors
        found = op((x * 2).sin(), *rest, **site.attributes)
        return sum(o.pow(2) for o in found) if isinstance(found, tuple) else found.pow(2) + 1

    tensors = list(site.tensors(grad=True, device="cuda").values())
    inputs = [t for t in tensors if t.requires_grad]
    torch._dynamo.reset()
    results = []
    for g in (f, torch.compile(f, fullgraph=True)):
        y = g(*tensors)
        results.append([y, *torch.autograd.grad(y.sum(), inputs)])
    for eager, made in zip(*results, strict=True):
        torch.testing.assert_close(made, eager, rtol=2e-4, atol=2e-4)
        assert made.stride() == eager.stride()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_gives_the_dtypes_of_torch(operators, dtype):
    x, scale, bias = (torch.randn(s, device="cuda") for s in ((8, 64), (64,), (64,)))
    w = torch.randn(64, 32, device="cuda")
    image, channels = torch.randn(2, 8, 4, 4, device="cuda").to(dtype), torch.rand(8, device="cuda")
    with torch.autocast("cuda", dtype):
        pairs = [
            (operators["norm.layernorm"](x.to(dtype), scale, bias), F.layer_norm(x.to(dtype), (64,), scale, bias)),
            # torch 2.11 leaves this one in half precision, 2.13 casts it up
            (operators["norm.rmsnorm"](x.to(dtype), scale), F.rms_norm(x.to(dtype).float(), (64,), scale)),
            (
                operators["norm.groupnorm_swish"](image, channels, channels, groups=2),
                F.silu(F.group_norm(image, 2, channels, channels)),
            ),
            (operators["gemm.activation"](x, w, activation="Relu"), torch.relu(x @ w)),
        ]
    for found, right in pairs:
        assert found.dtype == right.dtype
        tolerance = 2e-2 if found.dtype == dtype else 1e-4
        torch.testing.assert_close(found, right, rtol=tolerance, atol=tolerance)


@pytest.fixture
def step(operators):
    """Forward and backward of a layer with dropout; the gradient of its sum is zero where an element was dropped."""
    op, rng = operators["norm.swish_dropout"], operators.rng
    x = torch.ones(64, 256, device="cuda", requires_grad=True)

    def run():
        y = op(x, rng(x, 0), p=0.5)
        (dx,) = torch.autograd.grad(y.sum(), x)
        return y, dx

    return run


def captured(step):
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = step()
    return graph, outputs


def test_every_replay_has_its_own_mask(step):
    """Other calls between two replays take nothing from them, and the seed decides after the capture too."""
    graph, (y, dx) = captured(step)

    def replay():
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y != 0, dx != 0), "one mask in both directions"
        return (y != 0).clone()

    torch.manual_seed(5)
    first, second = replay(), replay()
    eager = step()[0] != 0
    third = replay()
    masks = [first, second, third, eager]
    assert not any(torch.equal(a, b) for i, a in enumerate(masks) for b in masks[:i])
    torch.manual_seed(5)
    assert torch.equal(replay(), first) and torch.equal(replay(), second)
    torch.manual_seed(6)
    assert not torch.equal(replay(), first)


def test_graphed_callables(operators):
    """``torch.cuda.make_graphed_callables``: forward and backward are two graphs, and the backward one has the mask."""
    op, rng = operators["norm.gelu_dropout_layernorm"], operators.rng

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = torch.nn.LayerNorm(256)

        def forward(self, x):
            return op(x, rng(x, 0), self.norm.weight, self.norm.bias, p=0.5)

    torch.manual_seed(0)
    layer = Layer().cuda()
    x = torch.randn(64, 256, device="cuda", requires_grad=True)
    graphed = torch.cuda.make_graphed_callables(layer, (x,))

    def step(seed=None):
        x.grad = None
        if seed is not None:
            torch.manual_seed(seed)
        y = graphed(x)
        y.pow(2).mean().backward()
        return y.detach().clone(), x.grad.clone()

    (y, dx), (other, _), (again, same) = step(1), step(), step(1)
    assert 0.4 < (dx == 0).float().mean() < 0.6
    assert torch.equal(y, again) and torch.equal(dx, same) and not torch.equal(y, other)


def test_checkpointing_replays_the_mask(operators):
    op, rng = operators["norm.gelu_dropout_layernorm"], operators.rng
    x, scale, bias = (torch.randn(s, device="cuda", requires_grad=True) for s in ((16, 256), (256,), (256,)))

    def f(x, scale, bias):
        return op(x, rng(x, 0), scale, bias, p=0.5).sin() + op(x, rng(x, 1), scale, bias, p=0.5)

    results = []
    for run in (f, lambda *a: torch.utils.checkpoint.checkpoint(f, *a, use_reentrant=False)):
        torch.manual_seed(3)
        results.append(torch.autograd.grad(run(x, scale, bias).pow(2).sum(), (x, scale, bias)))
    for eager, again in zip(*results, strict=True):
        torch.testing.assert_close(again, eager, rtol=1e-5, atol=1e-5)
