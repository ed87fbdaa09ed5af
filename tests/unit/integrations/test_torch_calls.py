"""Calls of fused torch modules: nesting of arguments and results, wrong arguments, files."""

from __future__ import annotations

import pytest
import torch
from exported import agree, fused
from torch import nn

from fusionreg.core.errors import ArgumentError
from fusionreg.core.evaluate.evaluator import evaluate
from fusionreg.core.ops import default_vocabulary
from fusionreg.integrations.torch import export, import_exported, import_pt2, load_pt2
from fusionreg.integrations.torch.module import ExportedCallable

OPS = default_vocabulary()
AUTO = torch.export.Dim.AUTO


def op_names(graph):
    return [n.op for n in graph.nodes]


# -- forms ---------------------------------------------------------------------------------------------------


class Nested(nn.Module):
    """Dict in, nested results, a None, a repeated value, an input handed back, a size, a parameter."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(4))

    def forward(self, x, *, more, flag=True, gain=2.0):
        y = x * self.w + more["k"][0] * gain
        return {"y": y, "none": None, "x": x, "pair": [y, (y, x.shape[0])], "w": self.w, "flag": flag}


def nested_call(tmp_path=None):
    kwargs = {"more": {"k": [torch.randn(3, 4)]}, "flag": True, "gain": 2.0}
    shapes = {"x": {0: AUTO}, "more": {"k": [{0: AUTO}]}, "flag": None, "gain": None}
    ep = export(Nested().eval(), (torch.randn(3, 4),), kwargs, shapes)
    if tmp_path is not None:
        torch.export.save(ep, tmp_path / "n.pt2")
        imported = import_pt2(tmp_path / "n.pt2")
    else:
        imported = import_exported(ep)
    return ep, ExportedCallable(imported, lambda given: evaluate(imported.graph, given, ops=OPS))


@pytest.mark.parametrize("route", ["fx", "pt2"])
def test_results_keep_their_nesting(route, tmp_path):
    """pt#121080: non-tensors, None, duplicates and inputs handed back come out as the module gives them."""
    ep, call = nested_call(tmp_path if route == "pt2" else None)
    x, k = torch.randn(5, 4), torch.randn(5, 4)
    got = call(x, more={"k": [k]}, gain=2.0, flag=True)
    w = ep.state_dict["w"]
    assert list(got) == ["y", "none", "x", "pair", "w", "flag"]
    agree(got["y"], x * w + k * 2)
    assert got["none"] is None and got["x"] is x and got["flag"] is True
    assert got["pair"][1][1] == 5 and isinstance(got["pair"], list) and isinstance(got["pair"][1], tuple)
    assert torch.equal(got["pair"][0], got["y"]) and torch.equal(got["w"], w.detach())
    assert got["w"].data_ptr() != w.data_ptr()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"gain": 3.0}, "2.0, fixed at export"),
        ({"more": {"q": []}}, "arguments"),
        ({"flag": 1}, "True, fixed at export"),
        ({"extra": 1}, "unknown ['extra']"),
        ({"more": {"k": [torch.zeros(3, 4).double()]}}, "float64 — float32"),
        ({"more": {"k": [torch.zeros(3, 5)]}}, "[3, 5] — "),
        ({"more": {"k": [2.0]}}, "a float32 tensor"),
        ({"more": {"k": [torch.zeros(3, 4, requires_grad=True)]}}, "no_grad"),
    ],
)
def test_wrong_arguments(change, words):
    _, call = nested_call()
    kwargs = {"more": {"k": [torch.zeros(3, 4)]}, "flag": True, "gain": 2.0} | change
    with pytest.raises(ArgumentError) as caught:
        call(torch.zeros(3, 4), **kwargs)
    assert words in str(caught.value)
    with pytest.raises(ArgumentError, match="missing"):
        call(torch.zeros(3, 4), flag=True)


def test_positional_parameters_by_keyword():
    call = fused(nn.Linear(4, 3).eval(), (torch.randn(2, 4),))
    x = torch.randn(2, 4)
    assert torch.equal(call(input=x), call(x))


def test_symbolic_numbers_as_arguments():
    """A SymInt argument is a graph input, read at each call."""

    class Scaled(nn.Module):
        def forward(self, x, n):
            return x * n, x[:, :n]

    call = fused(Scaled(), (torch.randn(2, 9), 3), ({}, AUTO))
    x = torch.randn(2, 9)
    for n in (3, 5):
        agree(call(x, n), (x * n, x[:, :n]))


def test_load_pt2_gives_the_graph(tmp_path):
    torch.export.save(export(nn.Linear(4, 3).eval(), (torch.randn(2, 4),)), tmp_path / "tiny.pt2")
    graph = load_pt2(tmp_path / "tiny.pt2")
    assert graph.name == "tiny" and op_names(graph) == ["MatMul", "Add"]
    assert set(graph.constants) == {"weight", "bias"}
