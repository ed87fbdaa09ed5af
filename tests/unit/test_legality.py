"""The rules for contracting nodes, on graphs alone, and against a brute-force definition."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusionreg.core.frozen import FrozenDict
from fusionreg.core.ir import Graph, GraphBuilder, Value
from fusionreg.core.matcher.legality import (
    CAPTURED,
    CYCLE,
    EXPOSED,
    INJECTIVE,
    INSIDE,
    MUTATION,
    OUTPUT,
    SUBGRAPH,
    Legality,
    hazards,
    mutated,
)


def build(lines: str, outputs: str, mutates: dict[str, tuple[str, ...]] | None = None) -> Graph:
    """``"a = Relu x; b = Add a y"``: what is read but not made is an input; each node is named by what it writes."""
    b = GraphBuilder("g")
    made = {line.split(" = ")[0].strip() for line in lines.split(";")}
    for line in lines.split(";"):
        for name in line.split(" = ")[1].split()[1:]:
            if name not in made and name not in b._values:
                b.input(name, "float32", (4,))
    for line in lines.split(";"):
        out, call = (part.strip() for part in line.split(" = "))
        op, *reads = call.split()
        b.node(op, reads, [Value(out, "float32", (4,))], name=f"n_{out}", mutates=(mutates or {}).get(out, ()))
    return b.build(outputs.split())


def check(graph: Graph, nodes: str, inputs: str, outputs: str):
    chosen = [graph.node_by_name[f"n_{n}"] for n in nodes.split()]
    chosen.sort(key=lambda n: graph.position[n.name])
    return Legality(graph).check(chosen, inputs.split(), set(outputs.split()))


CHAIN = "a = Relu x; b = Add a y; c = Tanh b"


def test_a_chain_is_legal():
    assert check(build(CHAIN, "c"), "a b c", "x y", "c") is None


@pytest.mark.parametrize(
    ("lines", "outputs", "clause", "node"),
    [
        (CHAIN, "c a", OUTPUT, "n_a"),
        (CHAIN, "c b", OUTPUT, "n_b"),
        (CHAIN + "; d = Neg a", "c d", EXPOSED, "n_a"),
        (CHAIN + "; d = Neg b", "c", EXPOSED, "n_b"),  # even a dead reader reads
    ],
)
def test_exposed_values(lines, outputs, clause, node):
    bad = check(build(lines, outputs), "a b c", "x y", "c")
    assert (bad.clause, bad.node) == (clause, node)
    assert bad.clause in str(bad) and bad.found in str(bad)


def test_a_second_output_may_be_read_outside():
    graph = build(CHAIN + "; d = Neg a", "c d")
    assert check(graph, "a b c", "x y", "c a") is None


def test_an_input_made_inside():
    assert check(build("a = Relu x; b = Add a a", "b"), "a b", "x a", "b").clause == INSIDE


def test_one_node_twice():
    graph = build("a = Relu x", "a")
    node = graph.nodes[0]
    assert Legality(graph).check([node, node], ["x"], {"a"}).clause == INJECTIVE


def test_the_shortest_cycle():
    graph = build("a = Relu x; m = Neg a; b = Add a m", "b")
    bad = check(graph, "a b", "x m", "a b")
    assert bad.clause == CYCLE and bad.node == "n_b"
    assert check(graph, "a m b", "x", "b") is None


def test_a_long_cycle_and_a_detour_that_never_returns():
    lines = "a = Relu x; p = Neg a; q = Abs p; r = Exp q; b = Add a {}"
    assert check(build(lines.format("r"), "b"), "a b", "x r", "a b").clause == CYCLE
    assert check(build(lines.format("y"), "b r"), "a b", "x y", "a b") is None


def test_subgraphs_capture_and_are_not_matched():
    inner = GraphBuilder("inner")
    inner.node("Neg", ["a"], [Value("z", "float32", (4,))])
    body = inner.build(["z"], outer=["a"])
    b = GraphBuilder("g")
    x, c = b.input("x", "float32", (4,)), b.input("c", "bool", ())
    b.node("Relu", [x], [Value("a", "float32", (4,))], name="n_a")
    b.node("Tanh", ["a"], [Value("b", "float32", (4,))], name="n_b")
    graphs = FrozenDict(then_branch=body, else_branch=body)
    b.node("If", [c], [Value("d", "float32", (4,))], name="n_d", graphs=graphs)
    graph = b.build(["b", "d"])
    bad = check(graph, "a b", "x", "b")
    assert bad.clause == CAPTURED and bad.node == "n_a" and "n_d" in bad.found
    assert check(graph, "d", "c", "d").clause == SUBGRAPH


@pytest.mark.parametrize(
    ("lines", "written", "legal"),
    [
        ("a = Relu x; m = Add x q; b = Tanh a", "x", False),
        ("a = Relu x; m = Add q q; b = Tanh a", "q", True),
        ("m = Add x q; a = Relu x; b = Tanh a", "x", True),
        ("a = Relu x; b = Tanh a; m = Add x q", "x", True),
        ("v = Reshape x s; a = Relu x; m = Add v q; b = Tanh a", "v", False),
        ("v = Reshape x s; u = Transpose v; a = Relu x; m = Add u q; b = Tanh a", "u", False),
        ("v = Neg x; a = Relu x; m = Add v q; b = Tanh a", "v", True),
        ("v = aten::view x; a = Relu x; m = Add v q; b = Tanh a", "v", False),
        ("v = Reshape x s; a = Relu v; m = Add x q; b = Tanh a", "x", False),
    ],
)
def test_in_place_writes(lines, written, legal):
    graph = build(lines, "b m", {"m": (written,)})
    bad = check(graph, "a b", "x v" if "Relu v" in lines else "x", "b")
    assert (bad is None) == legal
    if bad:
        assert bad.clause == MUTATION and bad.node == "n_m"


def test_a_node_that_writes_in_place_is_never_matched():
    graph = build("a = Add x y; b = Relu a", "b", {"a": ("x",)})
    assert check(graph, "a b", "x y", "b").clause == MUTATION


def test_writes_inside_subgraphs_count():
    inner = GraphBuilder("inner")
    inner.node("Add", ["x", "x"], [Value("z", "float32", (4,))], mutates=("x",))
    body = inner.build(["z"], outer=["x"])
    b = GraphBuilder("g")
    x, c = b.input("x", "float32", (4,)), b.input("c", "bool", ())
    b.node("Relu", [x], [Value("a", "float32", (4,))], name="n_a")
    b.node("If", [c], [Value("d", "float32", (4,))], name="n_d", graphs=FrozenDict(then_branch=body, else_branch=body))
    b.node("Tanh", ["a"], [Value("b", "float32", (4,))], name="n_b")
    graph = b.build(["b", "d"])
    assert mutated(graph.node_by_name["n_d"]) == ("c", "x")
    assert check(graph, "a b", "x", "b").clause == MUTATION


def test_hazards_order_reads_and_writes():
    graph = build("a = Relu x; m = Add x q; b = Tanh x", "a b", {"m": ("x",)})
    assert set(hazards(graph)) == {("n_a", "n_m"), ("n_m", "n_b")}
    assert not list(hazards(build(CHAIN, "c")))


@st.composite
def dags(draw):
    count = draw(st.integers(3, 8))
    names = ["x", "y"]
    lines = []
    for i in range(count):
        reads = draw(st.lists(st.sampled_from(names), min_size=1, max_size=2))
        lines.append(f"v{i} = {'Relu' if len(reads) == 1 else 'Add'} {' '.join(reads)}")
        names.append(f"v{i}")
    outputs = draw(st.lists(st.sampled_from(names[2:]), min_size=1, max_size=3, unique=True))
    chosen = draw(st.lists(st.integers(0, count - 1), min_size=2, max_size=4, unique=True))
    return build("; ".join(lines), " ".join(outputs)), sorted(f"v{i}" for i in chosen)


def has_cycle(graph: Graph, inside: set[str]) -> bool:
    """Whether contracting the nodes leaves a graph with a cycle, by trying every order of reachability."""
    reach = {n.name: {r.name for o in n.outputs for r in graph.consumers.get(o, ())} for n in graph.nodes}
    outside = [n.name for n in graph.nodes if n.name not in inside]
    for k in range(len(outside) + 1):
        for path in itertools.permutations(outside, k):
            steps = list(path)
            if not steps:
                continue
            linked = all(b in reach[a] for a, b in itertools.pairwise(steps))
            if linked and any(steps[0] in reach[i] for i in inside) and reach[steps[-1]] & inside:
                return True
    return False


@settings(max_examples=150, deadline=None)
@given(dags())
def test_rules_equal_their_definition(case):
    graph, chosen = case
    inside = {f"n_{c}" for c in chosen}
    made = set(chosen)
    inputs = {i for n in graph.nodes if n.name in inside for i in n.inputs if i not in made}
    everything = check(graph, " ".join(chosen), " ".join(inputs), " ".join(made))
    assert (everything is not None and everything.clause == CYCLE) == has_cycle(graph, inside)
    last = max(chosen, key=lambda c: graph.position[f"n_{c}"])
    hidden = made - {last}
    exposed = any(v in graph.outputs or any(r.name not in inside for r in graph.consumers.get(v, ())) for v in hidden)
    verdict = check(graph, " ".join(chosen), " ".join(inputs), last)
    assert (verdict is not None and verdict.clause in (EXPOSED, OUTPUT)) == exposed
