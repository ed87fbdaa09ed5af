"""Layers of experts as transformers has them are lifted to products with the experts of tokens; near misses are not."""

from __future__ import annotations

import pytest
import torch
from exported import OPS
from torch import nn

from fusionreg.core.lift import lift
from fusionreg.integrations.torch import export, import_exported

E, K, D, I, M = 4, 2, 16, 24, 6


class Layer(nn.Module):
    """Router, rows sorted by expert, products, and back; ``parts`` may be replaced."""

    def __init__(self, **parts):
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(E, 2 * I, D).bfloat16())
        self.down = nn.Parameter(torch.randn(E, D, I).bfloat16())
        self.parts = {
            "scores": lambda s: s.float().softmax(-1).topk(K),
            "sort": lambda ids: torch.sort(ids),
            "bins": lambda ids: torch.histc(ids.float(), bins=E, min=0, max=E - 1),
            "row": lambda perm: perm // K,
            "split": lambda h: h.chunk(2, dim=-1),
            "places": lambda perm: torch.arange(perm.size(0)),
            "sum": lambda y: y.view(M, K, D).sum(dim=1),
        } | parts

    def forward(self, x, logits):
        part = self.parts
        weights, ids = part["scores"](logits)
        ordered, perm = part["sort"](ids.reshape(-1))
        ends = torch.cumsum(part["bins"](ordered), dim=0, dtype=torch.int32)
        h = torch._grouped_mm(x[part["row"](perm)], self.gate_up.transpose(-2, -1), offs=ends)
        gate, up = part["split"](h)
        d = torch._grouped_mm(nn.functional.silu(gate) * up, self.down.transpose(-2, -1), offs=ends)
        d = d * weights.to(x.dtype).reshape(-1)[perm].unsqueeze(-1)
        back = torch.empty_like(perm)
        back[perm] = part["places"](perm)
        return part["sum"](d[back])


def operators(**parts) -> set[str]:
    given = (torch.randn(M, D).bfloat16(), torch.randn(M, E))
    with torch.no_grad():
        imported = import_exported(export(Layer(**parts), given, None, None))
    return {n.op for n in lift(imported.graph, OPS).nodes}


def test_all_of_it() -> None:
    found = operators()
    assert {"fusionreg::Route", "fusionreg::RoutedMatMul", "fusionreg::RoutedSum"} <= found
    assert not found & {"TopK", "fusionreg::GroupedMatMul", "fusionreg::GroupEnds", "Softmax"}


@pytest.mark.parametrize(
    "parts",
    [
        {"row": lambda perm: perm // (K + 1)},
        {"split": lambda h: (h[:, I:], h[:, :I])},
        {"places": lambda perm: torch.arange(perm.size(0)).flip(0)},
        {"sum": lambda y: y.view(K, M, D).sum(dim=0)},
        {"sort": lambda ids: torch.sort(ids, descending=True)},
        {"bins": lambda ids: torch.histc(ids.float(), bins=E, min=0, max=E)},
        {"bins": lambda ids: torch.histc(ids.float(), bins=E, min=1, max=E)},
    ],
    ids=["other rows", "up first", "places reversed", "other sum", "descending", "wider bins", "later bins"],
)
def test_near_misses(parts) -> None:
    assert "fusionreg::RoutedMatMul" not in operators(**parts)


@pytest.mark.parametrize(
    "scores",
    [
        lambda s: s.float().softmax(0).topk(K),
        lambda s: s.float().softmax(-1).topk(K, largest=False),
        lambda s: (s.float().softmax(-1) + 1).topk(K),
    ],
    ids=["over tokens", "least", "shifted"],
)
def test_other_routers(scores) -> None:
    found = operators(scores=scores)
    assert "fusionreg::RoutedMatMul" in found and "fusionreg::Route" not in found
