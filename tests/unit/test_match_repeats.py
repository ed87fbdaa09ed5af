"""What is known of one layer holds for the next: matching with and without that knowledge gives the same."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path

import numpy as np
import pytest
from graphs import Net, fusion, gemm, quick_gelu, vocabulary

from fusionreg.core.matcher import repeats
from fusionreg.core.matcher.find import find
from fusionreg.core.matcher.repeats import Repeats

_PATH = Path(__file__).parents[2] / "benchmarks" / "matching.py"
_SPEC = importlib.util.spec_from_file_location("repeats_bench", _PATH)
assert _SPEC is not None and _SPEC.loader is not None
bench = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(bench)

OPS = vocabulary()


def searched(graph, entries):
    """Every site by a search of its own."""
    with pytest.MonkeyPatch.context() as m:
        m.setattr(Repeats, "site", lambda self, node, pattern: None)
        return find(graph, entries, OPS).matches


def known(graph, entries, most=None):
    """Matches, and how many sites were looked up instead of searched."""
    taken = []
    real = Repeats.again
    with pytest.MonkeyPatch.context() as m:
        m.setattr(Repeats, "again", lambda self, *site: taken.append(1) or real(self, *site))
        found = find(graph, entries, OPS).matches
    return found, len(taken)


@pytest.mark.parametrize("make", [bench.layers, bench.scattered], ids=["layers", "random"])
def test_the_same_matches(make):
    graph, entries = make(600), bench.fusions(60)
    found, taken = known(graph, entries)
    assert found == searched(graph, entries) and len(found) > 50
    if make is bench.layers:
        assert taken > 0.9 * len(found)


GATED = fusion("p.gated", "g = Sigmoid(x)\ny = Mul(x, g)", {"x": "T[M N]"}, {"y": "T[M N]"})
TWICE = fusion("p.twice", "h = Mul(x, c)\ny = Add(h, c)", {"x": "T[M N]", "c": "T[N]"}, {"y": "T[M N]"})
NORM = fusion(
    "p.norm", "y = LayerNormalization(x, scale, bias, axis=axis)",
    {"x": "T[M N]", "scale": "T[N]", "bias": "T[N]"}, {"y": "T[M N]"},
    attributes={"axis": {"type": "int", "default": -1}},
)  # fmt: skip


def layer(net: Net, x: str, rng: random.Random) -> tuple[str, list[str]]:
    """A block with one of several peculiarities, and what of it is to be an output of the graph."""
    shown: list[str] = []
    width = 8
    a = net.op("MatMul", x, net.weight((width, width)))
    if rng.random() < 0.2:
        shown.append(a)  # interior, and seen from outside
    b = net.op("Add", a, net.weight(rng.choice([(width,), (width,), (1, width), (4, width)])))
    if rng.random() < 0.3:
        shown.append(net.op("Neg", b))  # one more reader of an interior value
    activation = rng.choice(["Relu", "Gelu", "Gelu"])
    c = net.op(activation, b, **({"approximate": rng.choice(["none", "tanh"])} if activation == "Gelu" else {}))
    g = net.op("Mul", c, net.op("Sigmoid", c)) if rng.random() < 0.5 else net.op("Mul", net.op("Sigmoid", c), c)
    same, other = net.const(np.full(width, 2.0, "f")), net.const(np.full(width, rng.choice([2.0, 3.0]), "f"))
    d = net.op("Add", net.op("Mul", g, same), rng.choice([same, other]))
    e = net.op("LayerNormalization", d, net.weight((width,)), net.weight((width,)), axis=rng.choice([-1, -1, 1]))
    return net.op("Add", e, x) if rng.random() < 0.7 else net.op("Add", x, e), shown


@pytest.mark.parametrize("seed", range(12))
def test_layers_that_differ_somewhere(seed):
    """In who reads a value, in attributes, in operand order, in what a constant holds, in extra leading extents."""
    rng, net, shown = random.Random(seed), Net(), []
    x = net.input("x", "float32", (4, 8))
    for _ in range(25):
        x, more = layer(net, x, rng)
        shown += more
    graph = net.build([x, *shown])
    entries = [gemm(), quick_gelu(), GATED, TWICE, NORM]
    found, taken = known(graph, entries)
    assert found == searched(graph, entries)
    assert {m.fusion for m in found} >= {"p.gated", "p.twice", "p.norm"} and taken > 5


def test_constants_that_are_read_twice_are_compared_where_they_stand():
    net = Net()
    x = net.input("x", "float32", (4, 8))
    for second in (2.0, 3.0, 2.0, 3.0):
        a, b = net.const(np.full(8, 2.0, "f")), net.const(np.full(8, second, "f"))
        x = net.op("Relu", net.op("Add", net.op("Mul", x, a), b))
    found, _ = known(net.build([x]), [TWICE])
    assert len(found) == 2


def test_a_graph_that_repeats_nothing_costs_little(monkeypatch):
    """Most nodes of it are not even described."""
    described = []
    real = Repeats._id
    monkeypatch.setattr(Repeats, "_id", lambda self, node: described.append(node.name) or real(self, node))
    graph, entries = bench.scattered(3000), bench.fusions(100)
    find(graph, entries, OPS)
    assert len(set(described)) < 0.5 * len(graph.nodes)


def test_patterns_that_look_ahead_are_searched():
    heads = fusion("p.heads", "a = Relu(x)\nb = Tanh(a)", {"x": "T[N]"}, {"a": "T[N]", "b": "T[N]"})
    net = Net()
    v = net.input("x", "float32", (4,))
    for _ in range(20):
        v = net.op("Tanh", net.op("Relu", v))
    found, taken = known(net.build([v]), [heads])
    assert taken == 0 and len(found) > 10
    assert repeats.DEEPEST > 4
