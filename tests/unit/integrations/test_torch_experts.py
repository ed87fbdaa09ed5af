"""Products of many rows with one of many matrices each, as torch's grouped products, are those of the definition."""

from __future__ import annotations

import pytest
import torch

from fusionreg.core.frozen import FrozenDict
from fusionreg.core.ir import Graph, Node, Value
from fusionreg.core.ops import default_vocabulary
from fusionreg.integrations.torch import peer_experts
from fusionreg.integrations.torch.peers import torch_module

OPS = default_vocabulary()


@pytest.mark.parametrize("repeated", [True, False])
def test_grouped_products_are_those_of_the_gathered_matrices(repeated: bool, monkeypatch) -> None:
    torch.manual_seed(0)
    x, w = torch.randn(6, 1 if repeated else 3, 16).bfloat16(), torch.randn(5, 24, 16).bfloat16()
    ids = torch.randint(0, 5, (6, 3))
    values = {
        "x": Value("x", "bfloat16", tuple(x.shape)),
        "w": Value("w", "bfloat16", tuple(w.shape)),
        "ids": Value("ids", "int64", tuple(ids.shape)),
        "y": Value("y", "bfloat16", (6, 3, 24)),
    }
    node = Node("n", "fusionreg::RoutedMatMul", ("x", "w", "ids"), ("y",), FrozenDict({"trans": 1}))
    graph = Graph("g", ("x", "w", "ids"), ("y",), (node,), FrozenDict(values))
    gathered = torch_module(graph, OPS)(x, w, ids)
    monkeypatch.setattr(peer_experts, "GATHERED", 0)
    module = torch_module(graph, OPS)
    assert "_grouped_mm" in module.code
    torch.testing.assert_close(module(x, w, ids), gathered, rtol=2e-2, atol=2e-2)
    wanted = torch.einsum("mkd,mknd->mkn", x.float().expand(6, 3, 16), w.float()[ids])
    torch.testing.assert_close(gathered.float(), wanted, rtol=2e-2, atol=2e-2)
