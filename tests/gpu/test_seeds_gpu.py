"""Dropout on torch's CUDA generator: reproducible, different at every site, and at every replay of a graph."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from fusionreg import load_registry  # noqa: E402

pytestmark = pytest.mark.gpu


def _dropped(registry, x, p=0.25):
    return registry.call("norm.swish_dropout", x, registry.rng(x), p=p)


def test_reproducible_and_different_at_every_site():
    registry = load_registry(device="cuda")
    x = torch.ones(64, 1024, device="cuda", dtype=torch.bfloat16)
    torch.manual_seed(11)
    first, second = _dropped(registry, x), _dropped(registry, x)
    torch.manual_seed(11)
    assert torch.equal(_dropped(registry, x), first) and not torch.equal(first, second)
    kept = (first != 0).float().mean().item()
    assert abs(kept - 0.75) < 5 * (0.75 * 0.25 / x.numel()) ** 0.5


def test_replays_of_a_graph_differ():
    registry = load_registry(device="cuda")
    x = torch.ones(64, 1024, device="cuda", dtype=torch.bfloat16)
    dy = torch.ones_like(x)

    def step():
        rng = registry.rng(x)
        y = registry.call("norm.swish_dropout", x, rng, p=0.5)
        return y, registry.call("norm.swish_dropout_backward", dy, x, rng, p=0.5)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, dx = step()
    masks = []
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y != 0, dx != 0), "one mask in both directions"
        masks.append((y != 0).clone())
    assert not torch.equal(masks[0], masks[1]) and not torch.equal(masks[1], masks[2])
