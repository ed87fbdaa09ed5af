"""Graphs behind torch.compile on a real device: the fusionreg backend and Inductor, dynamic shapes, state, writes."""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="graphs are captured through torch")
pytestmark = pytest.mark.gpu

from torch._dynamo.backends.registry import lookup_backend  # noqa: E402

from fusionreg.integrations.torch.graphs import graphed  # noqa: E402
from fusionreg.torch import backend as fusionreg_backend  # noqa: E402


@pytest.fixture
def compiled():
    """``compiled(model, backend, **options)``: the compiled model, and the graphs that it will have."""
    torch._dynamo.reset()

    def make(model, inner, options=None, **dynamo):
        made = []

        def backend(module, inputs):
            compiler = fusionreg_backend if inner == "fusionreg" else lookup_backend(inner)
            inner_function = compiler(module, inputs, **({"options": options} if options else {}))
            made.append(graphed(inner_function, inputs))
            return made[-1]

        return torch.compile(model, backend=backend, **dynamo), made

    yield make
    torch._dynamo.reset()


def host_times(functions, *args, rounds: int = 60) -> list[float]:
    """Median seconds of host time of each, called in turn: what else the machine does meets all of them alike."""
    times = [[] for _ in functions]
    for _ in range(rounds):
        for function, mine in zip(functions, times, strict=True):
            torch.cuda.synchronize()
            start = time.perf_counter()
            function(*args)
            mine.append(time.perf_counter() - start)
    torch.cuda.synchronize()
    return [statistics.median(mine) for mine in times]


def test_a_transformer_by_the_backend_of_fusionreg(compiled):
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from examples.transformer_encoder import build

    model, (x,) = build()
    model, x = model.cuda(), x.cuda()
    plain = torch.compile(model, backend=fusionreg_backend, options={"inner": "eager"})
    run, made = compiled(model, "fusionreg", {"inner": "eager"})
    with torch.no_grad():
        for factor in (1, 1, 2, 3):
            torch.testing.assert_close(run(factor * x), model(factor * x), rtol=0.05, atol=0.05)
        assert len(made) == 1 and not made[0].reason and made[0].report.captured == 1
        launched, replayed = host_times((plain, run), x)
        print(f"\nhost time: {launched * 1e6:.0f} µs launched, {replayed * 1e6:.0f} µs as a graph\n{made[0].report}")
    graph = made[0].report.graphs[0][1]
    assert replayed < 0.8 * launched and graph.replayed < 0.5 * graph.launched


def test_dynamic_shapes_by_inductor(compiled):
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64), torch.nn.GELU()).cuda().eval()
    run, made = compiled(model, "inductor", dynamic=True)
    with torch.no_grad():
        for rows in (4, 4, 4, 9, 9, 9, 4):
            x = torch.randn(rows, 64, device="cuda")
            torch.testing.assert_close(run(x), model(x), rtol=1e-3, atol=1e-4)
    assert len(made) == 1 and not made[0].reason, made[0].reason
    assert made[0].report.captured == 2 and [g.calls for _, g in made[0].report.graphs] == [2, 3]


class Counting(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(64))

    def forward(self, x):
        self.total.add_(x.sum(0))
        return self.total * 2


def test_state_and_written_inputs_by_inductor(compiled):
    model = Counting().cuda()
    run, made = compiled(model, "inductor")
    x = torch.ones(4, 64, device="cuda")
    with torch.no_grad():
        for i in range(1, 5):
            assert (run(x) == 8 * i).all() and (model.total == 4 * i).all()
        assert made[0].report.captured == 1 and not made[0].reason
        writes, made = compiled(lambda x: x.mul_(2).sum(), "inductor")
        for _ in range(3):
            x = torch.ones(4, 64, device="cuda")
            assert writes(x).item() == 512 and (x == 2).all()
    assert "writes input 0" in made[0].reason
