"""Layers of experts as transformers has them are lifted to products with the experts of tokens; near misses are not."""

from __future__ import annotations

import pytest
import torch
from exported import OPS, agree
from torch import nn

from fusionreg.core.evaluate.evaluator import evaluate
from fusionreg.core.lift import lift
from fusionreg.integrations.torch import export, import_exported
from fusionreg.integrations.torch.module import ExportedCallable

E, K, D, I, M = 4, 2, 16, 24, 6


class Layer(nn.Module):
    """Router, rows sorted by expert, products, and back; ``parts`` may be replaced."""

    def __init__(self, **parts):
        super().__init__()
        self.gate_up = nn.Parameter((torch.randn(E, 2 * I, D) / D**0.5).bfloat16())
        self.down = nn.Parameter((torch.randn(E, D, I) / I**0.5).bfloat16())
        self.parts = {
            "scores": lambda s: s.float().softmax(-1).topk(K),
            "sort": lambda ids: torch.sort(ids),
            "bins": lambda ids: torch.histc(ids.float(), bins=E, min=0, max=E - 1),
            "row": lambda perm: perm // K,
            "split": lambda h: h.chunk(2, dim=-1),
            "places": lambda perm: torch.arange(perm.size(0)),
            "sum": lambda y: y.view(M, K, D).sum(dim=1),
            "guard": lambda rows, ordered: rows,
        } | parts

    def forward(self, x, logits):
        part = self.parts
        weights, ids = part["scores"](logits)
        ordered, perm = part["sort"](ids.reshape(-1))
        ends = torch.cumsum(part["bins"](ordered), dim=0, dtype=torch.int32)
        rows = part["guard"](x[part["row"](perm)], ordered)
        h = part["guard"](torch._grouped_mm(rows, self.gate_up.transpose(-2, -1), offs=ends), ordered)
        gate, up = part["split"](h)
        d = torch._grouped_mm(nn.functional.silu(gate) * up, self.down.transpose(-2, -1), offs=ends)
        d = d * weights.to(x.dtype).reshape(-1)[perm].unsqueeze(-1)
        back = torch.empty_like(perm)
        back[perm] = part["places"](perm)
        return part["sum"](d[back])


def lifted(**parts):
    """(module, operands, graph, what computes it)."""
    torch.manual_seed(0)
    module, given = Layer(**parts), (torch.randn(M, D).bfloat16(), torch.randn(M, E))
    with torch.no_grad():
        imported = import_exported(export(module, given, None, None))
    graph = lift(imported.graph, OPS)
    return module, given, graph, ExportedCallable(imported, lambda g: evaluate(graph, g, ops=OPS))


def operators(**parts) -> set[str]:
    return {n.op for n in lifted(**parts)[2].nodes}


def renormalised(weights):
    return weights / weights.sum(-1, keepdim=True)


def sigmoids(logits, bias=None, small=1e-20, factor=2.5):
    """DeepSeek-V3's router without groups."""
    scores = logits.sigmoid()
    ids = torch.topk(scores if bias is None else scores + bias, K, dim=-1, sorted=False)[1]
    weights = scores.gather(1, ids)
    return weights / (weights.sum(-1, keepdim=True) + small) * factor, ids


def in_groups(logits, bias=None, lowest=float("-inf"), ones=1, groups=2):
    """DeepSeek-V3's router: two experts of the better one of two groups."""
    scores = logits.sigmoid()
    ranked = scores if bias is None else scores + bias
    sums = ranked.view(-1, groups, E // groups).topk(2, dim=-1)[0].sum(dim=-1)
    best = torch.topk(sums, k=1, dim=-1, sorted=False)[1]
    mask = torch.zeros_like(sums).scatter_(1, best, ones).unsqueeze(-1).expand(-1, groups, E // groups)
    mask = mask.reshape(-1, E)
    ids = torch.topk(ranked.masked_fill(~mask.bool(), lowest), k=K, dim=-1, sorted=False)[1]
    weights = scores.gather(1, ids)
    return weights / (weights.sum(-1, keepdim=True) + 1e-20) * 2.5, ids


GROUPS = {"scoring": "sigmoid", "renormalise": 1, "scale": 2.5, "groups": 2, "kept_groups": 1, "leaders": 2}


def after(logits):
    chosen, ids = logits.topk(K)
    return chosen.softmax(-1), ids


def past(bound):
    """transformers fills rows of experts of other ranks, whose index is past the last one."""
    return lambda rows, ordered: rows.masked_fill((ordered >= bound).unsqueeze(-1), 0.0)


@pytest.mark.parametrize("parts", [{}, {"guard": past(E)}], ids=["plain", "guarded"])
def test_all_of_it(parts) -> None:
    found = operators(**parts)
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
        {"guard": past(E - 1)},
    ],
    ids=["other rows", "up first", "places reversed", "other sum", "descending", "wider bins", "later bins", "past"],
)
def test_near_misses(parts) -> None:
    assert "fusionreg::RoutedMatMul" not in operators(**parts)


@pytest.mark.parametrize(
    ("scores", "wanted"),
    [
        (lambda s: (renormalised(s.softmax(-1).topk(K)[0]), s.softmax(-1).topk(K)[1]), None),
        (after, {"scoring": "softmax_after"}),
        (sigmoids, {"scoring": "sigmoid", "renormalise": 1, "scale": 2.5}),
        (
            lambda s: sigmoids(s, torch.linspace(0.4, -0.4, E), factor=1.0),
            {"scoring": "sigmoid", "renormalise": 1, "scale": 1.0},
        ),
        (in_groups, GROUPS),
        (lambda s: in_groups(s, torch.tensor([0.3, -0.2, 0.1, 0.2])), GROUPS),
        (
            lambda s: in_groups(s, torch.tensor([0.3, -0.2, 0.1, 0.2]), groups=1),
            {**GROUPS, "groups": 1, "leaders": 1},
        ),
    ],
    ids=["twice", "softmax after", "sigmoid", "biased", "in groups", "in groups, biased", "in one group"],
)
def test_routers(scores, wanted) -> None:
    module, given, graph, run = lifted(scores=scores)
    routes = [dict(n.attrs) for n in graph.nodes if n.op == "fusionreg::Route"]
    if wanted is not None:
        (found,) = routes
        assert {n: found.get(n, OPS["fusionreg::Route"].attributes[n]) for n in wanted} == wanted
    with torch.no_grad():
        agree(run(*given), module(*given), 0.05)


@pytest.mark.parametrize(
    "scores",
    [
        lambda s: s.float().softmax(0).topk(K),
        lambda s: s.float().softmax(-1).topk(K, largest=False),
        lambda s: (s.float().softmax(-1) + 1).topk(K),
        lambda s: sigmoids(s, small=1e-3),
        lambda s: (lambda v, ids: (v.softmax(0), ids))(*s.topk(K)),
        lambda s: in_groups(s, lowest=0.0),  # which a bias may be below
        lambda s: in_groups(s, ones=0),
    ],
    ids=["over tokens", "least", "shifted", "a larger divisor", "after, over tokens", "0 outside", "no group"],
)
def test_other_routers(scores) -> None:
    found = operators(scores=scores)
    assert "fusionreg::RoutedMatMul" in found and "fusionreg::Route" not in found
