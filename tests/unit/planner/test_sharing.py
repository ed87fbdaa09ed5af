"""Sites with a value in between that is read elsewhere: found, priced, chosen where they pay, right when applied."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from graphs import Net, feeds, fusion, gemm, matches_of, quick_gelu, run, sites, vocabulary

from fusionreg.core import rewrite
from fusionreg.core.matcher.sharing import shared
from fusionreg.core.planner.costs import CostModel
from fusionreg.core.planner.executor import EAGER
from fusionreg.core.planner.plan import Plan, plan


def everything(graph, *fusions):
    legal = matches_of(graph, *fusions)
    return [*legal, *shared(graph, fusions, vocabulary(), legal)]


def decided(graph, *fusions, policy="aggressive"):
    return plan(graph, everything(graph, *fusions), cost=CostModel(vocabulary(), executor=EAGER), policy=policy)


def applied(graph, made, *fusions):
    """The graph with the plan applied, its results bit by bit as before."""
    result = rewrite.apply(graph, made, {f.name: f for f in fusions}).check()
    given = feeds(graph)
    before, after = run(graph, given), run(result, given)
    for name, expected in before.items():
        np.testing.assert_array_equal(after[name], expected, err_msg=name)
    return sites(result)


def gelu(read: str, outside: str = "Neg"):
    """``x · sigmoid(1.702 x)``; ``read``: which value in between another operator reads too."""
    net = Net()
    x = net.input("x", "float32", (64, 512))
    values = {"product": net.op("Mul", x, net.const(1.702))}
    values["sigmoid"] = net.op("Sigmoid", values["product"])
    return net.build([net.op("Mul", x, values["sigmoid"]), net.op(outside, values[read])])


def test_a_value_that_is_read_elsewhere_is_computed_for_its_readers_too():
    graph, f = gelu("product"), quick_gelu()
    assert not matches_of(graph, f)
    made = decided(graph, f)
    (m,) = made.chosen
    product = graph.nodes[0].name
    assert m.kept == (product,) and product in m.nodes and product not in m.taken
    assert made.saved.launches == 1 and made.saved.bytes == 4 * 64 * 512 * (5 - 2) and made.exact
    assert applied(graph, made, f) == {"Mul": 1, "act.quick_gelu": 1, "Neg": 1}
    lines = str(made).splitlines()
    assert lines[2].endswith("beside it") and lines[3].endswith(product)


def test_only_where_that_saves_time():
    made = decided(gelu("sigmoid"), quick_gelu())
    (loser,) = made.losers
    assert not made.chosen and "would run beside it, and it saves" in loser.reason


def test_it_is_not_read_by_a_fused_call_alone():
    """The smaller site that is legal as it stands is taken, unless more is saved."""
    net = Net()
    x = net.input("x", "float32", (4, 8))
    h = net.op("MatMul", x, net.weight((8, 16)))
    b = net.op("Add", net.op("Mul", h, net.const(0.5)), net.weight((16,), name="bias"))
    graph = net.build([net.op("Relu", b), net.op("Neg", b)])
    made = decided(graph, gemm())
    assert [len(m.nodes) for m in made] == [3] and made.chosen[0].kept == ()
    assert applied(graph, made, gemm()) == {"gemm.scale_bias": 1, "Relu": 1, "Neg": 1}


def test_an_operand_that_was_made_of_such_a_value():
    """What leaves the site comes back into it, by way of the node that stays: no cycle."""
    f = fusion("f.gate", "y = Mul(Relu(Sigmoid(x)), g)", {"x": "T[M N]", "g": "T[M N]"}, {"y": "T[M N]"})
    net = Net()
    s = net.op("Sigmoid", net.input("x", "float32", (64, 512)))
    graph = net.build([net.op("Mul", net.op("Relu", s), net.op("Exp", net.op("Exp", s)))])
    made = decided(graph, f)
    (m,) = made.chosen
    assert [graph.node_by_name[n].op for n in m.kept] == ["Sigmoid"]
    assert applied(graph, made, f) == {"Sigmoid": 1, "Exp": 2, "f.gate": 1}


def test_two_sites_may_keep_one_node():
    f = fusion("f.one", "y = Relu(Exp(Sigmoid(x)))", {"x": "T[M N]"}, {"y": "T[M N]"})
    g = fusion("f.two", "y = Neg(Abs(Sigmoid(x)))", {"x": "T[M N]"}, {"y": "T[M N]"})
    net = Net()
    s = net.op("Sigmoid", net.input("x", "float32", (64, 512)))
    one, two = net.op("Relu", net.op("Exp", s)), net.op("Neg", net.op("Abs", s))
    graph = net.build([one, two, net.op("Sqrt", s)])
    made = decided(graph, f, g)
    assert [m.fusion for m in made] == ["f.one", "f.two"] and len({m.kept for m in made}) == 1
    assert applied(graph, made, f, g) == {"Sigmoid": 1, "f.one": 1, "f.two": 1, "Sqrt": 1}


@pytest.mark.parametrize("op", ["fusionreg::Dropout", "Sigmoid"])
def test_what_draws_random_numbers_does_not_run_twice(op):
    steps = {"Sigmoid": "Sigmoid(x)", "fusionreg::Dropout": "fusionreg.Dropout(x, rng, p=0.5)"}
    inputs = {"x": "T[M N]"} | ({} if op == "Sigmoid" else {"rng": "int64[2]"})
    f = fusion("f.exp", f"y = Relu(Exp({steps[op]}))", inputs, {"y": "T[M N]"})
    net = Net()
    x, more, attributes = net.input("x", "float32", (64, 512)), [], {}
    if op != "Sigmoid":
        more, attributes = [net.input("rng", "int64", (2,))], {"p": 0.5}
    s = net.op(op, x, *more, **attributes)
    graph = net.build([net.op("Relu", net.op("Exp", s)), net.op("Neg", s)])
    assert len(everything(graph, f)) == (op == "Sigmoid")


def test_a_plan_comes_back_from_json():
    made = decided(gelu("product"), quick_gelu())
    again = Plan.from_dict(json.loads(json.dumps(made.to_dict())))
    assert again == made and again.chosen[0].taken == made.chosen[0].taken
    old = made.to_dict()
    for row in (*old["chosen"], *old["losers"]):
        del row["kept"], row["around"]
    (m,) = Plan.from_dict(old).chosen
    assert m == replace(made.chosen[0], kept=())
