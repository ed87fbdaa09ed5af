"""Functions over tensors behind CUDA graphs of their own, as a compiled graph is: values, parameters, state."""

from __future__ import annotations

import pytest

import fusionreg

torch = pytest.importorskip("torch", reason="graphs are captured through torch")
pytestmark = pytest.mark.gpu

from fusionreg.integrations.torch.graphs import graphed  # noqa: E402


def test_compiled_graphs():
    layer = torch.nn.Linear(64, 64, device="cuda")

    def function(x, weight, bias):
        return (torch.nn.functional.linear(x, weight, bias).relu(),)

    x = torch.randn(8, 64, device="cuda")
    with torch.no_grad():
        run = graphed(function, [x, layer.weight, layer.bias])
        for _ in range(4):
            x = torch.randn(8, 64, device="cuda")
            torch.testing.assert_close(run(x, layer.weight, layer.bias), function(x, layer.weight, layer.bias))
        assert not run.reason and run.report.captured == 1 and run.report.graphs[0][1].calls == 3
        layer.weight.mul_(2)  # in place: the graph reads the new values
        torch.testing.assert_close(run(x, layer.weight, layer.bias), function(x, layer.weight, layer.bias))
        layer.weight.data = layer.weight.data.clone()  # elsewhere: another graph
        for _ in range(2):
            torch.testing.assert_close(run(x, layer.weight, layer.bias), function(x, layer.weight, layer.bias))
        assert run.report.captured == 2
        writes = graphed(lambda x: (x.add_(1),), [x])
        assert (writes(torch.zeros(4, device="cuda"))[0] == 1).all() and "writes input 0" in writes.reason
    assert "requires grad" in graphed(function, [x, layer.weight, layer.bias]).reason


def test_state_that_stays_is_written_once_a_call():
    state = torch.zeros(2, device="cuda")
    torch._dynamo.mark_static_address(state)
    with torch.no_grad():
        run = graphed(lambda x, total: (total.add_(x) * 2,), [torch.ones(2, device="cuda"), state])
        for i in range(1, 5):
            assert run(torch.ones(2, device="cuda"), state)[0].tolist() == [2 * i] * 2
        assert state.tolist() == [4, 4] and run.report.captured == 1 and not run.reason


def test_a_compiled_graph_inside_the_callers_capture():
    with torch.no_grad():
        run = graphed(lambda x: (x + 1,), [torch.zeros(4, device="cuda")])
        for _ in range(3):
            run(torch.zeros(4, device="cuda"))
        whole = fusionreg.capture(lambda x: run(x)[0] * 2, torch.zeros(4, device="cuda"))
        assert (whole(torch.ones(4, device="cuda")) == 4).all()
