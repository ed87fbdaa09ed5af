"""Matching grows with nodes and with patterns, not with their product nor with a square. Ratios, never seconds."""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path

import pytest

from fusionreg.core.matcher.find import View, find, scan
from fusionreg.core.matcher.program import PatternIndex
from fusionreg.core.ops import default_vocabulary

_PATH = Path(__file__).parents[2] / "benchmarks" / "matching.py"
_SPEC = importlib.util.spec_from_file_location("bench_matching", _PATH)
assert _SPEC is not None and _SPEC.loader is not None
bench = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(bench)


def seconds(make, entries, repeats=3) -> float:
    """Least processor time of matching a fresh graph."""
    best = float("inf")
    for _ in range(repeats):
        graph = make()
        start = time.process_time()
        find(graph, entries, default_vocabulary())
        best = min(best, time.process_time() - start)
    return best


@pytest.mark.parametrize("make", [bench.layers, bench.scattered], ids=["layers", "random"])
def test_time_is_linear_in_nodes(make):
    entries = bench.fusions(20)
    small, large = (seconds(lambda n=n: make(n), entries) for n in (800, 6400))
    assert large / small < 8 * 2.2  # linear is 8, quadratic 64


def test_most_pairs_are_never_looked_at():
    graph, entries = bench.scattered(2000), bench.fusions(100)
    index = PatternIndex([e.patterns[0] for e in entries], default_vocabulary())
    tried = sum(1 for _ in scan(View(graph), index))
    by_root = sum(len(index.by_root.get(n.op, ())) for n in graph.nodes)
    found = len(find(graph, entries, default_vocabulary()))
    assert by_root > 5 * tried and tried < 3 * found


def test_a_value_read_by_everything_is_no_trap():
    """Patterns with two heads over one input look among its readers: many readers must not make that quadratic."""
    from graphs import Net, fusion

    heads = fusion("p.heads", "a = Relu(x)\nb = Tanh(a)", {"x": "T[N]"}, {"a": "T[N]", "b": "T[N]"})

    def hub(n: int):
        net = Net()
        x = net.input("x", "float32", (4,))
        return net.build([net.op("Tanh", net.op("Relu", x)) for _ in range(n)])

    small, large = (seconds(lambda n=n: hub(n), [heads]) for n in (300, 2400))
    assert large / small < 8 * 2.2


def test_a_long_chain_needs_no_recursion_and_no_long_walks():
    from graphs import Net, fusion

    pair = fusion("p.pair", "a = Relu(x)\nb = Neg(a)", {"x": "T[N]"}, {"a": "T[N]", "b": "T[N]"})

    def long(n: int):
        net = Net()
        v = net.input("x", "float32", (4,))
        for _ in range(n):
            v = net.op("Neg", net.op("Relu", v))
        return net.build([v])

    small, large = (seconds(lambda n=n: long(n), [pair]) for n in (250, 2000))
    assert large / small < 8 * 2.2
