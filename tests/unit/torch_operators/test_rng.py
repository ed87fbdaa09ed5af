"""``fusionreg::rng``: drawn from torch's generator, never shared between calls, the same again where torch replays."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import config
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils.checkpoint import checkpoint

P = 0.5


@pytest.fixture
def inputs():
    torch.manual_seed(0)
    return tuple(torch.randn(s, requires_grad=True) for s in ((4, 64), (64,), (64,)))


@pytest.fixture
def block(operators):
    """Two layers with dropout on the same tensor: two masks."""
    op, rng = operators["norm.gelu_dropout_layernorm"], operators.rng

    def f(x, scale, bias):
        return op(x, rng(x, 0), scale, bias, p=P) * 2 + op(x, rng(x, 1), scale, bias, p=P).sin()

    return f


def trained(f, inputs, seed=3):
    torch.manual_seed(seed)
    y = f(*inputs)
    return [y, *torch.autograd.grad(y.pow(2).sum(), inputs)]


def agree(found, expected):
    for f, e in zip(found, expected, strict=True):
        torch.testing.assert_close(f, e, rtol=1e-6, atol=1e-6)


def compiled(f, graphs):
    def keep(graph, inputs):
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep, partition_fn=min_cut_rematerialization_partition)
    return torch.compile(f, backend=backend, fullgraph=True)


def draws(graph, operators):
    return [n for n in graph.graph.nodes if operators.rng in (n.target, *n.args)]


def test_what_is_drawn(operators):
    x = torch.randn(3, requires_grad=True)
    torch.manual_seed(5)
    a, b = operators.rng(x, 0), operators.rng(x, 0)
    assert a.shape == (2,) and a.dtype == torch.int64 and not a.requires_grad and bool((a >= 0).all())
    assert not torch.equal(a, b)
    torch.manual_seed(5)
    assert torch.equal(operators.rng(x, 7), a)  # the site has no part in it
    with torch.inference_mode():
        assert not torch.equal(operators.rng(x, 0), a)


def test_its_place_in_traces(operators, registry):
    assert torch.Tag.nondeterministic_seeded in operators.rng.tags
    with torch._subclasses.FakeTensorMode():
        fake = operators.rng(torch.empty(3), 0)
    assert (fake.shape, fake.dtype) == ((2,), torch.int64)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    assert set(torch.library.opcheck(operators.rng, (torch.randn(3), 1), test_utils=checks).values()) == {"SUCCESS"}
    assert type(operators)(registry).rng is operators.rng


def test_two_sites_have_two_masks_and_a_trace_keeps_both(operators, block, inputs):
    """Common sub-expressions are united before the partition: two draws that looked alike would be one."""
    graphs = []
    found = trained(compiled(block, graphs), inputs)
    agree(found, trained(block, inputs))
    forward, backward = graphs
    assert len(draws(forward, operators)) == 2 and not draws(backward, operators)
    assert not torch.equal(found[0], trained(block, inputs, seed=4)[0])


@pytest.mark.parametrize("options", [{"aggressive_recomputation": True}, {"activation_memory_budget": 0.3}])
def test_recomputation_keeps_the_draw(operators, block, inputs, options):
    graphs = []
    with config.patch(**options):
        agree(trained(compiled(block, graphs), inputs), trained(block, inputs))
    assert not draws(graphs[1], operators)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_replay_it(block, inputs, reentrant):
    """torch restores its generator before it runs the forward pass again, and the draw follows."""

    def passes(f):
        torch.manual_seed(3)
        f(*inputs).pow(2).sum().backward()
        found = [t.grad for t in inputs]
        for t in inputs:
            t.grad = None
        return found

    agree(passes(lambda *a: checkpoint(block, *a, use_reentrant=reentrant)), passes(block))


def test_compiled_checkpoints_replay_it(operators, block, inputs):
    graphs = []
    f = compiled(lambda *a: checkpoint(block, *a, use_reentrant=False), graphs)
    agree(trained(f, inputs), trained(block, inputs))
    assert len(draws(graphs[1], operators)) == 2  # drawn again, from the state that the forward pass had kept


def test_vmap_asks_what_randomness_is_meant(operators):
    x = torch.randn(3, 5)
    with pytest.raises(RuntimeError, match="randomness"):
        torch.vmap(lambda v: operators.rng(v, 0))(x)
    different = torch.vmap(lambda v: operators.rng(v, 0), randomness="different")(x)
    assert different.shape == (3, 2) and len({tuple(r.tolist()) for r in different}) == 3
    same = torch.vmap(lambda v: operators.rng(v, 0), randomness="same")(x)
    assert same.shape == (3, 2) and len({tuple(r.tolist()) for r in same}) == 1
