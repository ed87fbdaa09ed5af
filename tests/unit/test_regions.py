"""Point-wise regions: what is captured, that its program means the same, and where growing it would make a cycle."""

from __future__ import annotations

import random

import numpy as np
import pytest

from fusionreg import Registry
from fusionreg.core.errors import ArgumentError, SpecError, UnknownNameError
from fusionreg.core.evaluate.evaluator import evaluate
from fusionreg.core.ir import Graph, GraphBuilder, Value
from fusionreg.core.matcher.regions import CODE, MAX_NODES, MAX_RANK, MAX_TENSORS, SPACE, Capture, capture, near_misses
from fusionreg.core.ops import default_vocabulary
from fusionreg.core.pattern.instantiate import instantiate
from fusionreg.core.registry.catalog import load
from fusionreg.core.registry.regions import derive
from fusionreg.core.render.pointwise import supported
from fusionreg.core.rewrite import extract
from fusionreg.core.spec import FusionSpec, Region
from fusionreg.hookspecs import hookimpl

OPS = default_vocabulary()
SHAPE = (3, 4)
OPEN = {"api": 1, "name": "points.region", "pattern": "region", "inputs": {}, "outputs": {}, "dtypes": {}}


class Build:
    """A graph of float32 values, operator by operator."""

    def __init__(self) -> None:
        self.b = GraphBuilder("model")

    def input(self, name: str, shape: tuple = SHAPE, dtype: str = "float32") -> str:
        return self.b.input(name, dtype, shape)

    def constant(self, name: str, value: object, dtype: str = "float32") -> str:
        return self.b.constant(name, np.asarray(value, dtype=dtype), dtype)

    def __call__(self, op: str, *inputs: str, shape: tuple = SHAPE, dtype: str = "float32", **attrs: object) -> str:
        name = self.b.fresh(op.lower())
        self.b.node(op, inputs, (Value(name, dtype, shape),), attrs=attrs)
        return name

    def done(self, *outputs: str) -> Graph:
        return self.b.build(outputs)


def captures(graph: Graph, **options: object) -> list[Capture]:
    return list(capture(graph, OPS, supported, **options))


def ops_of(found: Capture) -> list[str]:
    return [n.op for n in found.nodes]


@hookimpl
def register_fusions():
    region = Region(
        name="add_mul", pattern="v0 = Add(in0, in1)\nout0 = Mul(v0, in1)",
        inputs={"in0": "float32[A0]", "in1": "float32[A0]"}, outputs={"out0": "float32[A0]"},
    )  # fmt: skip
    return [FusionSpec(**{**OPEN, "regions": (region,)})]


@pytest.fixture(scope="module")
def catalog():
    import sys

    return load(entry_points=(), extra_plugins=[("points", sys.modules[__name__])], strict=True)


def same_values(graph: Graph, found: Capture, catalog) -> None:
    """The derived fusion's reference computes what the captured nodes compute."""
    entry = catalog.derive(catalog["points.region"], found.region)
    part = extract(
        graph, tuple(n.name for n in found.nodes), "part", list(found.inputs.values()), list(found.outputs.values())
    )
    rng = np.random.default_rng(0)
    arrays = {}
    for name, value in found.inputs.items():
        known = graph.values[value]
        shape = tuple(5 if isinstance(d, str) else d for d in known.shape)
        if value in graph.constants:
            arrays[name] = graph.constants[value]
        elif known.dtype == "bool":
            arrays[name] = rng.random(shape) < 0.5
        else:
            arrays[name] = (4 * rng.standard_normal(shape)).astype(known.dtype)
    pattern = instantiate(
        entry.patterns[0], entry.spec, dtypes={}, shapes={n: a.shape for n, a in arrays.items()}, ops=OPS
    )
    mine = evaluate(pattern, arrays, ops=OPS)
    theirs = evaluate(part, {found.inputs[n]: a for n, a in arrays.items()}, ops=OPS)
    assert list(mine) == list(found.outputs)
    for name, value in found.outputs.items():
        np.testing.assert_array_equal(mine[name], theirs[value])
        assert mine[name].dtype == theirs[value].dtype


def test_chain_of_twelve_is_one_region(catalog):
    g = Build()
    x, bias = g.input("x"), g.input("bias", (4,))
    for op in ("Relu", "Neg", "Abs", "Exp", "Sqrt", "Tanh", "Sigmoid", "Softplus", "Erf", "Gelu"):
        x = g(op, x)
    y = g("Mul", g("Add", x, bias), bias)
    graph = g.done(y)
    (found,) = captures(graph)
    assert len(found.nodes) == 12
    assert dict(found.region.inputs) == {"in0": "float32[A0 A1]", "in1": "float32[A1]"}
    assert dict(found.axes) == {"A0": 3, "A1": 4}
    same_values(graph, found, catalog)


def test_what_others_read_is_an_output(catalog):
    g = Build()
    a = g("Relu", g.input("x"))
    b = g("Neg", a)
    c = g("Exp", b)
    s = g("ReduceSum", a, shape=(1, 1))
    graph = g.done(c, s)
    (found,) = captures(graph)
    assert ops_of(found) == ["Relu", "Neg", "Exp"]
    assert list(found.outputs.values()) == [a, c]
    same_values(graph, found, catalog)


def test_no_region_around_a_path_that_comes_back(catalog):
    g = Build()
    x = g.input("x")
    a = g("Relu", x)
    mean = g("ReduceMean", a, shape=(3, 1))
    b = g("Sub", a, mean)  # joins nothing: a → mean → b leaves the region of a
    c = g("Exp", b)
    graph = g.done(c)
    (found,) = captures(graph)
    assert ops_of(found) == ["Sub", "Exp"]
    same_values(graph, found, catalog)


def test_two_regions_that_would_wait_for_each_other_stay_two():
    g = Build()
    x, z = g.input("x"), g.input("z")
    a = g("Relu", x)
    b = g("Neg", z)
    up = g("Softmax", a)
    b2 = g("Add", b, up)  # behind a, in the region of b
    down = g("Softmax", b2)
    a2 = g("Mul", a, down)  # behind b2
    end = g("Add", a2, b)  # reads both
    graph = g.done(end)
    for found in captures(graph):
        names = {n.name for n in found.nodes}
        reach = _behind(graph, names)
        assert not reach & names


def _behind(graph: Graph, names: set[str]) -> set[str]:
    """Nodes that a path leads to from ``names`` through at least one node that is not among them."""
    stack = [r for n in names for o in graph.node_by_name[n].outputs for r in graph.consumers.get(o, ())]
    stack = [r for r in stack if r.name not in names]
    seen: set[str] = set()
    while stack:
        node = stack.pop()
        if node.name not in seen:
            seen.add(node.name)
            stack += [r for o in node.outputs for r in graph.consumers.get(o, ())]
    return seen


@pytest.mark.parametrize("seed", range(25))
def test_random_graphs_have_no_cycle_and_keep_their_values(seed, catalog):
    rng = random.Random(seed)
    g = Build()
    values = [g.input("x"), g.input("y")]
    others = [g.input("row", (4,)), g.constant("half", 0.5)]
    for _ in range(30):
        kind = rng.random()
        if kind < 0.2:
            values.append(g("Softmax", rng.choice(values)))
        elif kind < 0.5:
            values.append(g(rng.choice(("Relu", "Neg", "Abs", "Sigmoid")), rng.choice(values)))
        else:
            values.append(g(rng.choice(("Add", "Mul", "Max")), rng.choice(values), rng.choice(values + others)))
    graph = g.done(*values[-2:])
    found = captures(graph)
    assert len({n.name for f in found for n in f.nodes}) == sum(len(f.nodes) for f in found)
    _contractible(graph, found)
    for one in found:
        same_values(graph, one, catalog)


def _contractible(graph: Graph, found: list[Capture]) -> None:
    """All regions of a graph taken together leave it without a cycle."""
    unit = {n.name: n.name for n in graph.nodes}
    for i, one in enumerate(found):
        unit.update((n.name, f"region {i}") for n in one.nodes)
    waits: dict[str, set[str]] = {u: set() for u in unit.values()}
    for n in graph.nodes:
        for read in n.reads:
            producer = graph.producers.get(read)
            if producer is not None and unit[producer.name] != unit[n.name]:
                waits[unit[n.name]].add(unit[producer.name])
    while ready := [u for u, w in waits.items() if not w]:
        for u in ready:
            del waits[u]
        for w in waits.values():
            w.difference_update(ready)
    assert not waits, f"a cycle through {sorted(waits)}"


def test_constants_become_literals_where_they_mean_the_same(catalog):
    g = Build()
    x = g.input("x")
    y = g("Mul", x, g.constant("two", 2.0))
    y = g("Add", y, g.constant("inf", [[np.inf]]))
    y = g("Max", y, g.constant("nan", np.nan))
    y = g("Mul", y, g.constant("row", [1.0, 2.0, 3.0, 4.0]))
    graph = g.done(y)
    (found,) = captures(graph)
    assert "Mul(in0, 2.0)" in found.region.pattern
    assert "1e999" in found.region.pattern
    assert set(found.inputs.values()) == {"x", "nan", "row"}
    same_values(graph, found, catalog)


def test_constant_that_raises_the_rank_stays_an_operand():
    g = Build()
    row = g.input("row", (4,))
    y = g("Add", row, g.constant("one", [[1.0]]), shape=(1, 4))
    graph = g.done(g("Exp", y, shape=(1, 4)))
    (found,) = captures(graph)
    assert "one" in found.inputs.values()


def test_casts_comparisons_and_where(catalog):
    g = Build()
    x = g.input("x", dtype="float16")
    wide = g("Cast", x, to="float32")
    mask = g("Greater", wide, g.constant("zero", 0.0), dtype="bool")
    y = g("Where", mask, wide, g("Neg", wide))
    y = g("Cast", y, dtype="float16", to="float16")
    graph = g.done(y, mask)
    (found,) = captures(graph)
    assert len(found.nodes) == 5
    assert dict(found.region.outputs) == {"out0": "bool[A0 A1]", "out1": "float16[A0 A1]"}
    same_values(graph, found, catalog)


def test_symbolic_extents_and_broadcast_axes(catalog):
    g = Build()
    shape = ("batch", 1, 4)
    x = g.input("x", shape)
    y = g("Relu", g("Add", x, g.input("b", (1, 1, 4)), shape=shape), shape=shape)
    graph = g.done(y)
    (found,) = captures(graph)
    assert dict(found.region.inputs) == {"in0": "float32[A0 1 A2]", "in1": "float32[1 1 A2]"}
    assert dict(found.axes) == {"A0": "batch", "A2": 4}


def test_single_nodes_taken_nodes_and_identity_are_no_regions():
    g = Build()
    a = g("Relu", g.input("x"))
    graph = g.done(g("Identity", a))
    assert captures(graph) == []
    b = Build()
    y = b("Exp", b("Neg", b("Relu", b.input("x"))))
    graph = b.done(y)
    assert [ops_of(f) for f in captures(graph, taken={graph.nodes[0].name})] == [["Neg", "Exp"]]
    assert captures(graph, taken={graph.nodes[1].name}) == []


def test_regions_are_bounded():
    g = Build()
    x = g.input("x")
    for _ in range(3 * MAX_NODES):
        x = g("Neg", x)
    assert sorted(len(f.nodes) for f in captures(g.done(x))) == [MAX_NODES] * 3
    g = Build()
    x = g.input("x")
    for i in range(MAX_TENSORS + 4):
        x = g("Add", x, g.input(f"y{i}"))
    found = captures(g.done(x))
    assert [len(f.inputs) + len(f.outputs) for f in found] == [MAX_TENSORS, 8]


def test_why_a_node_is_in_no_region():
    g = Build()
    x = g.input("x", dtype="complex64")
    y = g("Add", x, x, dtype="complex64")
    deep = g.input("deep", (1,) * (MAX_RANK + 1))
    z = g("Relu", deep, shape=(1,) * (MAX_RANK + 1))
    graph = g.done(y, z)
    first, second = near_misses(graph, OPS, supported, "points.region")
    assert first.clause == CODE and "complex64" in first.found
    assert second.clause == SPACE and str(MAX_RANK) in second.expected
    assert captures(graph) == []


def test_equal_programs_are_one_fusion(catalog):
    g = Build()
    x, y = g.input("x"), g.input("y")
    one = g("Exp", g("Add", x, y))
    two = g("Exp", g("Add", g("Softmax", x), y))
    found = captures(g.done(one, two))
    assert len(found) == 2
    assert found[0].region == found[1].region
    base = catalog["points.region"]
    assert catalog.derive(base, found[0].region) is catalog.derive(base, found[1].region)


def test_open_fusions_and_their_members(catalog):
    base = catalog["points.region"]
    assert [e.name for e in catalog.entries()] == ["points.region.add_mul"]
    assert catalog["points.region.add_mul"] is base.members[0]
    assert catalog["points.region.add_mul"].base == "points.region"
    with pytest.raises(SpecError, match="never assigned"):
        derive(base, base.spec.regions[0].model_copy(update={"outputs": {"z": "float32[A0]"}}), OPS)


def test_outputs_lie_as_the_first_input_of_their_shape(catalog):
    texts = {"gain": "float32[A1]", "x": "float32[A0 A1]", "other": "float32[A0 A1]"}
    region = Region(
        name="order", pattern="a = Mul(gain, x)\ny = Add(a, other)\nsign = Greater(y, 0.0)", inputs=texts,
        outputs={"y": "float32[A0 A1]", "sign": "bool[A0 A1]"},
    )  # fmt: skip
    assert derive(catalog["points.region"], region, OPS).spec.layouts == {"y": "x", "sign": "x"}
    table = Region(name="table", pattern="y = Add(a, b)", inputs={"a": "float32[A0 1]", "b": "float32[A1]"},
                   outputs={"y": "float32[A0 A1]"})  # fmt: skip
    assert not derive(catalog["points.region"], table, OPS).spec.layouts


ROW = {"inputs": {"x": "float32[N]"}, "outputs": {"y": "float32[N]"}}


def test_an_open_fusion_is_called_by_its_members(catalog):
    registry = Registry(catalog, device="sim")
    x = np.ones(3, "float32")
    with pytest.raises(ArgumentError, match=r"no tensors of its own — one with a program: points\.region\.add_mul"):
        registry.call("points.region", x, x)
    with pytest.raises(UnknownNameError, match=r"points\.region"):
        registry.call("points.region.other", x, x)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, "at least one program"),
        ({"inputs": {"x": "float32[N]"}}, "each region states its own"),
        ({"pattern": "y = Relu(x)", **ROW, "regions": (Region(name="a", pattern="y = Neg(x)", **ROW),)}, "no slots"),
    ],
)  # fmt: skip
def test_specs_that_are_half_open_fail(fields, reason):
    class Plugin:
        @hookimpl
        def register_fusions(self):
            return [FusionSpec(**{**OPEN, **fields})]

    found = load(entry_points=(), extra_plugins=[("points", Plugin())])
    assert "points.region" not in found
    assert any(reason in f.reason for f in found.failures)
