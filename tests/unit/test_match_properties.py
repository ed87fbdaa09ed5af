"""Random graphs: every match is a whole, injective, edge-preserving image of its pattern; no plan changes a value."""

from __future__ import annotations

import random

import hypothesis
import numpy as np
import pytest
from graphs import Net, feeds, fusion, gemm, plan_of, quick_gelu, run, vocabulary
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from fusionreg.core import rewrite
from fusionreg.core.matcher.find import find as matches
from fusionreg.core.matcher.search import View, match_pattern
from fusionreg.core.pattern.instantiate import Input, Literal, Output

UNARY = ("Relu", "Tanh", "Sigmoid", "Neg")
BINARY = ("Add", "Mul", "Sub")
SAME = {"x": "T[M N]"}, {"y": "T[M N]"}
AB = {"a": "T[M N]", "b": "T[M N]"}

FUSIONS = (
    gemm(),
    quick_gelu(),
    fusion("p.swish", "y = Mul(x, Sigmoid(x))", *SAME),
    fusion("p.double", "y = Add(Relu(x), Tanh(x))", *SAME),
    fusion("p.tail", 'y = optional(any_of(Relu, Neg), "act")(Mul(a, Add(a, b)))', AB, SAME[1]),
    fusion("p.heads", "h = Add(a, b)\np = Relu(h)\nq = Tanh(h)", AB, {"p": "T[M N]", "q": "T[M N]"}),
    fusion("p.inner", "h = Sub(a, b)\nq = Mul(h, c)", AB | {"c": "T[M N]"}, {"h": "T[M N]", "q": "T[M N]"}),
    fusion("p.bias", "y = any_of(Relu, Tanh, \"act\")(Add(x, bias))", {"x": "T[M N]", "bias": "T[N]"}, {"y": "T[M N]"}),
)  # fmt: skip


@st.composite
def graphs(draw):
    """A DAG of up to a dozen nodes over square or non-square values, biases, scalars and weights."""
    n = draw(st.sampled_from([3, 4]))
    m = draw(st.sampled_from([n, 2]))
    net = Net()
    live = [net.input("x", "float32", (m, n)), net.input("z", "float32", (m, n))]
    row, scalar, column = net.weight((n,), name="row"), net.const(1.702), net.weight((m, 1), name="column")
    weight = net.weight((n, n))
    for _ in range(draw(st.integers(3, 12))):
        kind = draw(st.sampled_from(["unary", "binary", "binary", "fork", "bias", "scale", "column", "product"]))
        v = draw(st.sampled_from(live[-4:]))
        if kind == "unary":
            live.append(net.op(draw(st.sampled_from(UNARY)), v))
        elif kind == "binary":
            live.append(net.op(draw(st.sampled_from(BINARY)), *draw(st.permutations([v, draw(st.sampled_from(live))]))))
        elif kind == "fork":
            live += [net.op(draw(st.sampled_from(UNARY)), v), net.op(draw(st.sampled_from(UNARY)), v)]
        elif kind == "product":
            live.append(net.op("MatMul", v, weight))
        else:
            other = {"bias": row, "scale": scalar, "column": column}[kind]
            live.append(net.op(draw(st.sampled_from(["Add", "Mul"])), *draw(st.permutations([v, other]))))
    outputs = draw(st.lists(st.sampled_from(live[2:]), min_size=1, max_size=3, unique=True))
    return net.build(list(dict.fromkeys([*outputs, live[-1]])))


SETTINGS = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))


@SETTINGS
@given(graphs())
def test_every_match_is_an_image_of_its_pattern(graph):
    by_name = {f.name: f for f in FUSIONS}
    for m in matches(graph, FUSIONS, vocabulary()):
        entry = by_name[m.fusion]
        pattern = entry.patterns[m.spelling]
        assert len(set(m.nodes)) == len(m.nodes)
        assert list(m.nodes) == sorted(m.nodes, key=graph.position.__getitem__)
        assert set(m.inputs) | (pattern.optional - set(m.inputs)) == set(entry.spec.inputs)
        image = next(
            b
            for b in match_pattern(graph, pattern, graph.node_by_name[m.root], vocabulary())
            if {n.name for n in b.nodes} == set(m.nodes) and dict(b.inputs) == dict(m.inputs)
        )
        skipped = {s.index for s in pattern.steps} - set(image.steps)
        assert all(pattern.steps[i].optional for i in skipped)
        assert len(image.steps) == len(m.nodes)

        def value(operand, pattern=pattern, image=image):
            while isinstance(operand, Output) and operand.step not in image.steps:
                operand = pattern.steps[operand.step].operands[0]
            if isinstance(operand, Input):
                return image.inputs[operand.name]
            return image.steps[operand.step].outputs[operand.index]

        for index, node in image.steps.items():
            step = pattern.steps[index]
            assert node.op in step.ops
            wanted = [None if isinstance(o, Literal) else value(o) for o in step.operands]
            orders = [wanted, wanted[1::-1] + wanted[2:]] if vocabulary()[node.op].commutative else [wanted]
            assert any(all(w in (None, i) for w, i in zip(o, node.inputs, strict=True)) for o in orders)
        inside = set(m.nodes)
        for name in m.nodes:
            for out in graph.node_by_name[name].outputs:
                if out not in m.outputs.values():
                    assert out not in graph.outputs
                    assert all(r.name in inside for r in graph.consumers.get(out, ()))


@SETTINGS
@given(graphs(), st.sampled_from(["balanced", "aggressive"]))
def test_no_plan_changes_a_value(graph, policy):
    chosen = plan_of(graph, *FUSIONS, policy=policy)
    result = rewrite.apply(graph, chosen, {f.name: f for f in FUSIONS}).check()
    assert len(result.nodes) == len(graph.nodes) - sum(len(m.nodes) - 1 for m in chosen)
    given_inputs = feeds(graph)
    before, after = run(graph, given_inputs), run(result, given_inputs)
    for name in graph.outputs:
        np.testing.assert_array_equal(before[name], after[name])


@SETTINGS
@given(graphs())
def test_each_match_alone_changes_no_value(graph):
    given_inputs = feeds(graph)
    before = run(graph, given_inputs)
    for m in matches(graph, FUSIONS, vocabulary()):
        after = run(rewrite.apply(graph, [m], {f.name: f for f in FUSIONS}).check(), given_inputs)
        for name in graph.outputs:
            np.testing.assert_array_equal(before[name], after[name], err_msg=str(m))


@SETTINGS
@given(graphs())
def test_the_index_hides_no_match_and_explaining_changes_none(graph):
    plain = matches(graph, FUSIONS, vocabulary())
    explained = matches(graph, FUSIONS, vocabulary(), explain=True)
    assert plain.matches == explained.matches
    matched = {(m.root, m.fusion) for m in plain}
    assert not any((f.root, f.fusion) in matched for f in explained.failures)
    view, roots = View(graph), {(m.root, m.fusion) for m in plain}
    for entry in FUSIONS:
        for node in graph.nodes:
            if (node.name, entry.name) in roots:
                assert next(match_pattern(view, entry.patterns[0], node, vocabulary(), legal=True), None) is not None


@pytest.mark.parametrize("name", ["gemm.scale_bias", "p.tail", "p.heads", "p.inner", "p.bias"])
def test_the_random_graphs_are_worth_it(name):
    """A generator that made no matches would leave the properties above empty."""
    entry = next(f for f in FUSIONS if f.name == name)
    hunt = settings(SETTINGS, max_examples=3000, database=None, phases=[Phase.generate])

    def has_one(graph):
        return any(len(m.nodes) > 1 for m in matches(graph, [entry], vocabulary()))

    assert hypothesis.find(graphs(), has_one, settings=hunt, random=random.Random(0)) is not None


@pytest.mark.parametrize("size", [8, 30])
def test_symmetric_patterns_end(size):
    """Every order of every sum fits: the search must neither hang nor miss."""
    names = [f"a{i}" for i in range(size + 1)]
    text = "s0 = Add(a0, a1)\n" + "\n".join(f"s{i} = Add(s{i - 1}, a{i + 1})" for i in range(1, size))
    total = fusion("p.total", text, dict.fromkeys(names, "T[N]"), {f"s{size - 1}": "T[N]"})
    net = Net()
    v = net.input("a0", "float32", (4,))
    for name in names[1:]:
        v = net.op("Add", net.input(name, "float32", (4,)), v)
    found = matches(net.build([v]), [total], vocabulary())
    assert [len(m.nodes) for m in found] == [size]
    net = Net()
    v = net.input("a0", "float64", (4,))
    for name in names[1:]:
        v = net.op("Add", net.input(name, "float64", (4,)), v)
    assert not len(matches(net.build([v]), [total], vocabulary()))
