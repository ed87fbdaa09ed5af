"""Loops over experts, unrolled by torch.export, are lifted to a layer of stacked matrices; near misses are not."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from exported import OPS, agree
from onnx import helper
from onnx_models import model
from torch import nn

import fusionreg
from fusionreg.core.evaluate.evaluator import evaluate
from fusionreg.core.lift import lift
from fusionreg.core.lift.near import near_lifts
from fusionreg.integrations.torch import export, import_exported
from fusionreg.integrations.torch.module import ExportedCallable

E, K, D, I, M = 3, 2, 16, 24, 6


class Expert(nn.Module):
    def __init__(self, act=nn.functional.silu):
        super().__init__()
        self.w1, self.w3 = nn.Linear(D, I, bias=False), nn.Linear(D, I, bias=False)
        self.w2, self.act = nn.Linear(I, D, bias=False), act

    def forward(self, x):
        return self.w2(self.act(self.w1(x)) * self.w3(x))


def relu2(h):
    return nn.functional.relu(h).square()


class Stacked(nn.Module):
    """The same as rows of stacked matrices."""

    def __init__(self):
        super().__init__()
        self.gate_up, self.down = nn.Parameter(0.3 * torch.randn(2 * I, D)), nn.Parameter(0.3 * torch.randn(D, I))

    def forward(self, x):
        gate, up = nn.functional.linear(x, self.gate_up).chunk(2, dim=-1)
        return nn.functional.linear(nn.functional.silu(gate) * up, self.down)


class Loop(nn.Module):
    """Mixtral's block before its matrices were stacked; Qwen's and DeepSeek's differ in how rows are taken."""

    def __init__(
        self, expert=Expert, experts=range(E), wide=False, rows=None, start=torch.zeros_like, equal=False, share=None,
        add=None,
    ):  # fmt: skip
        super().__init__()
        torch.manual_seed(0)
        self.gate = nn.Linear(D, E, bias=False)
        self.experts = nn.ModuleList(expert() for _ in range(E))
        self.turns, self.wide, self.start = experts, wide, start
        self.rows, self.equal = rows or (lambda x, token: x[token]), equal
        self.share = share or (lambda weights, token, rank: weights[token, rank, None])
        self.add = add or (lambda y, token, h: y.index_add(0, token, h))

    def forward(self, x):
        weights, ids = torch.topk(self.gate(x).softmax(1, dtype=torch.float), K, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        weights = weights if self.wide else weights.to(x.dtype)
        y = self.start(x)
        mask = nn.functional.one_hot(ids, num_classes=E).permute(2, 1, 0)
        for e in self.turns:
            rank, token = reversed(torch.where(ids == e)) if self.equal else torch.where(mask[e])
            h = self.experts[e](self.rows(x, token)) * self.share(weights, token, rank)
            y = self.add(y, token, h.to(x.dtype))
        return y


def put(y, token, h):
    """As Mistral's own code has it: a token has an expert once."""
    y[token] += h
    return y


def scattered(y, token, h):
    return y.scatter_add(0, token[:, None].expand(-1, D), h)


class Straying:
    """Rows of another x in the second turn."""

    def __init__(self):
        self.turns = 0

    def __call__(self, x, token):
        self.turns += 1
        return (x.flip(0) if self.turns % E == 2 else x)[token]


#: Where tokens are found by their ids; the last as index_select and scatter_add have it.
BY_ID = (
    {"equal": True, "wide": True},
    {"equal": True, "add": put, "expert": Stacked},
    {
        "equal": True, "add": scattered, "rows": lambda x, token: torch.index_select(x, 0, token),
        "share": lambda weights, token, rank: weights[token, rank].unsqueeze(-1),
    },
)  # fmt: skip


def lifted(module, dtype=torch.float32):
    x = torch.randn(M, D).to(dtype)
    module = module.to(dtype).eval()
    with torch.no_grad():
        imported = import_exported(export(module, (x,), None, None))
        graph = lift(imported.graph, OPS)
        return module, x, graph, ExportedCallable(imported, lambda given: evaluate(graph, given, ops=OPS))


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({"rows": lambda x, token: x[None, token].reshape(-1, D)}, torch.float32),
        ({"expert": Stacked}, torch.float32),
        ({"wide": True}, torch.bfloat16),
        ({"expert": lambda: Expert(relu2)}, torch.float32),
        ({"experts": (2, 0, 1)}, torch.bfloat16),
        *((options, torch.bfloat16 if "wide" in options else torch.float32) for options in BY_ID),
    ],
    ids=["modules", "stacked", "float32 weights", "relu2", "another order", "by id", "put", "scatter_add"],
)
def test_loops(options, dtype) -> None:
    module, x, graph, run = lifted(Loop(**options), dtype)
    found = [n.op for n in graph.nodes]
    assert found.count("fusionreg::RoutedMatMul") == 2 and "fusionreg::Route" in found and "NonZero" not in found
    with torch.no_grad():
        agree(run(x), module(x), 1e-5 if dtype is torch.float32 else 0.03)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"experts": (0, 2)}, "there are turns for experts [0, 2] of 3"),
        ({"experts": (0, 1), "equal": True}, "there are turns for experts [0, 1] of 3"),
        ({"experts": (0, 1, 2, 1)}, "there are turns for experts [0, 1, 2] of 3"),
        ({"start": torch.ones_like}, "adds to no zeros"),
        ({"rows": Straying()}, "turns read other tokens"),
        (
            {"expert": partial(next, map(Expert, (nn.functional.silu, nn.functional.gelu, nn.functional.silu)))},
            "experts have different activations",
        ),
        ({"expert": partial(Expert, nn.functional.tanh)}, "Tanh — expected"),
    ],
    ids=[
        "one is missing",
        "one of those by id is missing",
        "one comes twice",
        "onto something",
        "one reads other tokens",
        "one has another activation",
        "all have another",
    ],
)
def test_near_misses(options, reason) -> None:
    """Nothing is lifted, and the nearest rule says why."""
    _, _, graph, _ = lifted(Loop(**options))
    found = {n.op for n in graph.nodes}
    assert "fusionreg::RoutedMatMul" not in found and "NonZero" in found
    nearest, *_ = near_lifts(graph, OPS)
    assert nearest.fusion == "lifting: expert_loop" and reason in str(nearest)


@pytest.mark.parametrize("options", [{}, {"expert": Stacked}, *BY_ID[1:]], ids=["modules", "stacked", "put", "scatter"])
def test_loops_as_torch_exports_them_to_onnx(options) -> None:
    module, x = Loop(**options).eval(), torch.randn(M, D)
    with torch.no_grad():
        proto = torch.onnx.export(module, (x,), dynamo=True, verbose=False).model_proto
        graph = fusionreg.load_registry(allow=("moe",), device="sim").graph(proto)
        assert [n.op for n in graph.nodes].count("fusionreg::RoutedMatMul") == 2
        (y,) = evaluate(graph, {graph.inputs[0]: x.numpy()}, ops=OPS).values()
        torch.testing.assert_close(torch.from_numpy(y), module(x), rtol=1e-5, atol=1e-5)


def test_rows_added_element_by_element() -> None:
    """As ONNX writes index_add without ScatterND: an index that is expanded along the columns."""
    nodes = [
        helper.make_node("Unsqueeze", ["index", "one"], ["column"]),
        helper.make_node("Expand", ["column", "shape"], ["at"]),
        helper.make_node("ScatterElements", ["base", "at", "updates"], ["y"], axis=0, reduction="add"),
    ]
    constants = {"one": np.array([1]), "shape": np.array([4, D])}
    inputs = {"base": (M, D), "index": ((4,), "int64"), "updates": (4, D)}
    graph = fusionreg.load_registry(allow=("moe",), device="sim").graph(model(nodes, inputs, ["y"], constants))
    assert [n.op for n in graph.nodes] == ["Unsqueeze", "ScatterND"]
    rng = np.random.default_rng(0)
    base, updates = rng.standard_normal((M, D)).astype("f"), rng.standard_normal((4, D)).astype("f")
    index = np.array([2, -1, 2, 0])
    (y,) = evaluate(graph, {"base": base, "index": index, "updates": updates}, ops=OPS).values()
    np.add.at(base, index, updates)
    np.testing.assert_allclose(y, base, rtol=1e-6)
