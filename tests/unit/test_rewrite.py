"""Graph to graph: cutting out, fusing, replacing, folding, dropping what is dead."""

from __future__ import annotations

import numpy as np
import pytest
from graphs import Net, chain, feeds, fused, fusion, gemm, matches_of, plan_of, run, sites, vocabulary

from fusionreg.core.errors import GraphError
from fusionreg.core.frozen import FrozenDict
from fusionreg.core.ir import Node, Value
from fusionreg.core.matcher.find import Match
from fusionreg.core.rewrite import Replacement, apply, eliminate_dead, extract, fold_constants, replace_nodes, sort
from fusionreg.core.spec import OpSpec


def catalog(*fusions):
    return {f.name: f for f in fusions}


# --- extract --------------------------------------------------------------------------------------------------------


def test_extract_is_a_graph_of_its_own():
    graph = chain()
    names = [n.name for n in graph.nodes]
    cut = extract(graph, reversed(names[1:3]), "cut")
    assert cut.inputs == ("matmul",) and cut.outputs == ("add",)
    assert [n.name for n in cut.nodes] == names[1:3]
    assert set(cut.constants) == {"c", "bias"} and cut.values["matmul"] == graph.values["matmul"]
    given = {"matmul": feeds(cut)["matmul"]}
    expected = given["matmul"] * graph.constants["c"] + graph.constants["bias"]
    np.testing.assert_array_equal(run(cut, given)["add"], expected)


def test_extract_takes_inputs_in_order_of_first_use():
    net = Net()
    b, a = net.input("b", "float32", (4,)), net.input("a", "float32", (4,))
    s = net.op("Sub", a, b)
    graph = net.build([net.op("Mul", s, b)])
    assert extract(graph, [n.name for n in graph.nodes], "cut").inputs == ("a", "b")


def test_extract_gives_back_what_is_read_outside():
    graph = chain(("mul",))
    cut = extract(graph, [n.name for n in graph.nodes[:3]], "cut")
    assert cut.outputs == ("mul", "add")


def test_extract_keeps_an_overridable_constant_an_input():
    net = Net()
    w = net.weight((4,), overridable=True)
    graph = net.build([net.op("Add", net.input("x", "float32", (4,)), w)])
    assert extract(graph, ["Add_add"], "cut").inputs == ("x", w)
    with pytest.raises(GraphError, match="no input of the cut"):
        extract(graph, ["Add_add"], "cut", inputs=["x"])


# --- apply ----------------------------------------------------------------------------------------------------------


def test_apply_writes_one_call_with_its_body():
    graph = chain()
    result = fused(graph, gemm())
    (call,) = result.nodes
    assert call.op == "fused::gemm.scale_bias" and call.inputs == ("x", "w", "c", "bias") and call.outputs == ("relu",)
    assert dict(call.attrs) == {"transB": False, "activation": "Relu"}
    body = call.graphs["body"]
    assert body.inputs == call.inputs and body.outputs == ("relu",) and len(body.nodes) == 4 and not body.constants
    assert result.inputs == graph.inputs and set(result.constants) == {"w", "c", "bias"}
    assert set(result.values) == {"x", "w", "c", "bias", "relu"}  # interior values are gone


def test_apply_marks_absent_inputs():
    net = Net()
    h = net.op("MatMul", net.input("x", "float32", (4, 3)), net.weight((3, 5)))
    graph = net.build([net.op("Add", h, net.weight((5,), name="bias"))])
    (call,) = fused(graph, gemm()).nodes
    assert call.inputs == ("x", "w", "", "bias") and call.graphs["body"].inputs == ("x", "w", "bias")
    assert call.attrs["activation"] == "none"


def test_apply_keeps_literals_in_the_body_only():
    gelu = fusion("act.quick", "y = Mul(x, Sigmoid(Mul(x, 1.702)))", {"x": "T[... N]"}, {"y": "T[... N]"})
    net = Net()
    x = net.input("x", "float32", (3, 5))
    graph = net.build([net.op("Mul", x, net.op("Sigmoid", net.op("Mul", x, net.const(1.702))))])
    result = fused(graph, gelu)
    assert not result.constants and list(result.nodes[0].graphs["body"].constants) == ["c"]


def test_apply_one_value_for_two_inputs():
    residual = fusion("act.res", "y = Add(Relu(x), r)", {"x": "T[... N]", "r": "T[... N]"}, {"y": "T[... N]"})
    net = Net()
    x = net.input("x", "float32", (3, 5))
    graph = net.build([net.op("Add", net.op("Relu", x), x)])
    (call,) = fused(graph, residual).nodes
    body = call.graphs["body"]
    assert call.inputs == ("x", "x") and len(body.inputs) == 2 and len(set(body.inputs)) == 2


def test_apply_reorders_only_where_it_must():
    pair = fusion("act.pair", "a = Relu(x)\nb = Tanh(x)", {"x": "T[N]"}, {"a": "T[N]", "b": "T[N]"})
    net = Net()
    x = net.input("x", "float32", (4,))
    first = net.op("Neg", x)
    a = net.op("Relu", x)
    reads_a = net.op("Abs", a)  # stands before the call's last node and must move behind it
    b = net.op("Tanh", x)
    graph = net.build([first, reads_a, b])
    result = fused(graph, pair)
    assert [n.op for n in result.nodes] == ["Neg", "fused::act.pair", "Abs"]


def test_apply_refuses_matches_that_share_a_node():
    found = matches_of(chain(), gemm())
    with pytest.raises(GraphError, match="share no node"):
        apply(chain(), found, catalog(gemm()))


def test_apply_refuses_a_cycle():
    pair = fusion("act.pair", "a = Relu(x)\nb = Add(a, z)", {"x": "T[N]", "z": "T[N]"}, {"a": "T[N]", "b": "T[N]"})
    net = Net()
    a = net.op("Relu", net.input("x", "float32", (4,)))
    z = net.op("Neg", a)
    graph = net.build([net.op("Add", a, z), a])
    forged = Match(
        "act.pair", "t", 0, "Add_add", ("Relu_relu", "Add_add"),
        FrozenDict(x="x", z=z), FrozenDict(a=a, b="add"),
    )  # fmt: skip
    with pytest.raises(GraphError, match="waits for itself"):
        apply(graph, [forged], catalog(pair))


def test_apply_keeps_the_order_of_reads_and_writes():
    pair = fusion("act.pair", "a = Relu(x)\nb = Tanh(x)", {"x": "T[N]"}, {"a": "T[N]", "b": "T[N]"})
    net = Net()
    x, q = net.input("x", "float32", (4,)), net.input("q", "float32", (4,))
    a = net.op("Relu", x)
    before = net.op("Sub", a, q)  # must move behind the call, and still read q before it is written
    net.op("Add", q, net.const(1.0), mutates=(q,))
    b = net.op("Tanh", x)
    after = net.op("Neg", q)
    graph = net.build([before, a, b, after])
    found = matches_of(graph, pair)
    assert len(found) == 1
    ops = [n.op for n in apply(graph, found, catalog(pair)).nodes]
    assert ops == ["fused::act.pair", "Sub", "Add", "Neg"]


def test_apply_nothing_is_the_graph_itself():
    graph = chain()
    assert apply(graph, [], {}) is graph


def test_applying_twice_is_applying_once():
    once = fused(chain(), gemm())
    assert not matches_of(once, gemm())
    assert [n.op for n in fused(once, gemm()).nodes] == [n.op for n in once.nodes]


def test_the_graph_given_is_left_as_it_was():
    graph = chain()
    before = (graph.nodes, dict(graph.values), {k: v.copy() for k, v in graph.constants.items()})
    fused(graph, gemm())
    assert graph.nodes == before[0] and dict(graph.values) == before[1]
    for name, array in before[2].items():
        np.testing.assert_array_equal(graph.constants[name], array)


# --- sort, dead code ------------------------------------------------------------------------------------------------


def test_sort_is_stable_and_obeys_further_orders():
    graph = chain()
    assert sort(graph.nodes) == graph.nodes
    assert sort(graph.nodes[::-1]) == graph.nodes
    a, b = Node("a", "Relu", ("x",), ("p",)), Node("b", "Relu", ("x",), ("q",))
    assert sort((a, b), [("b", "a")]) == (b, a)
    with pytest.raises(GraphError, match="waits for itself"):
        sort((a, b), [("b", "a"), ("a", "b")])


def test_dead_nodes_and_constants_go_but_inputs_and_writes_stay():
    net = Net()
    x, unused = net.input("x", "float32", (4,)), net.input("unused", "float32", (4,))
    y = net.op("Relu", x)
    net.op("Neg", net.op("Add", x, net.const(3.0)))
    net.op("Add", x, net.const(1.0), name="write", mutates=(x,))
    graph = net.build([y])
    result = eliminate_dead(graph)
    assert sites(result) == {"Relu": 1, "Add": 1} and result.inputs == (x, unused)
    assert len(result.constants) == 1 and "neg" not in result.values


def test_what_a_subgraph_captures_is_alive():
    net = Net()
    h = net.op("Relu", net.input("x", "float32", (4,)))
    branch = Net("branch")
    branch.node("Neg", [h], [Value("n", "float32", (4,))])
    body = branch.build(["n"], outer=[h])
    graphs = FrozenDict(then_branch=body, else_branch=body)
    net.node("If", [net.input("c", "bool", ())], [Value("z", "float32", (4,))], graphs=graphs)
    assert sites(eliminate_dead(net.build(["z"]))) == {"Relu": 1, "If": 1}


# --- replace --------------------------------------------------------------------------------------------------------


def test_replace_many_sites_at_once():
    net = Net()
    v = net.input("x", "float32", (4,))
    for _ in range(6):
        v = net.op("Neg", net.op("Neg", v))
    graph = net.build([net.op("Relu", v)])
    pairs = [(graph.nodes[i], graph.nodes[i + 1]) for i in range(0, 12, 2)]
    swaps = [
        Replacement((a.name, b.name), renames=FrozenDict({b.outputs[0]: a.inputs[0]})) for a, b in pairs
    ]  # each renames to what the one before renames away
    result = replace_nodes(graph, swaps)
    assert [repr(n) for n in result.nodes] == ["relu = Relu(x)"]
    assert set(result.values) == {"x", "relu"}


def test_replace_keeps_the_name_of_an_output():
    net = Net()
    x = net.input("x", "float32", (4,))
    y = net.op("Neg", net.op("Neg", x))
    graph = net.build([y, y])
    names = tuple(n.name for n in graph.nodes)
    result = replace_nodes(graph, [Replacement(names, renames=FrozenDict({y: x}))])
    assert result.outputs == (y, y) and [n.op for n in result.nodes] == ["Identity"]
    np.testing.assert_array_equal(run(result, {"x": np.ones(4, "f4")})[y], np.ones(4))


def test_replace_with_new_nodes_values_and_constants():
    net = Net()
    x = net.input("x", "float32", (4,))
    y = net.op("Add", x, x)
    graph = net.build([net.op("Relu", y)])
    node = Node("twice", "Mul", (x, "two"), (y,))
    swap = Replacement(("Add_add",), (node,), (Value("two", "float32", ()),), FrozenDict(two=np.asarray(2, dtype="f4")))
    result = replace_nodes(graph, [swap])
    given = feeds(graph)
    np.testing.assert_array_equal(run(result, given)["relu"], run(graph, given)["relu"])
    assert sites(result) == {"Mul": 1, "Relu": 1}
    with pytest.raises(GraphError, match="has no type"):
        replace_nodes(graph, [Replacement(("Add_add",), (node,), (), swap.constants)])


def test_replace_reaches_into_subgraphs():
    net = Net()
    x = net.input("x", "float32", (4,))
    h = net.op("Identity", x)
    branch = Net("branch")
    branch.node("Neg", [h], [Value("n", "float32", (4,))])
    body = branch.build(["n"], outer=[h])
    graphs = FrozenDict(then_branch=body, else_branch=body)
    net.node("If", [net.input("c", "bool", ())], [Value("z", "float32", (4,))], graphs=graphs)
    graph = net.build(["z"])
    result = replace_nodes(graph, [Replacement(("Identity_identity",), renames=FrozenDict({h: x}))])
    given = {"x": np.arange(4, dtype="f4"), "c": np.asarray(True)}
    assert len(result.nodes) == 1 and result.nodes[0].captures == {"x"}
    np.testing.assert_array_equal(run(result, given)["z"], -given["x"])


def test_replace_refuses_overlaps_rings_and_dangling_reads():
    graph = chain()
    names = [n.name for n in graph.nodes]
    with pytest.raises(GraphError, match="share node"):
        replace_nodes(graph, [Replacement((names[0],)), Replacement((names[0],))])
    ring = Replacement((names[0], names[1]), renames=FrozenDict({"matmul": "mul", "mul": "matmul"}))
    with pytest.raises(GraphError, match="go round"):
        replace_nodes(graph, [ring])
    with pytest.raises(GraphError, match="reads 'matmul'"):
        replace_nodes(graph, [Replacement((names[0],))])


# --- folding --------------------------------------------------------------------------------------------------------


def test_constants_fold_with_the_rounding_of_the_chain():
    net = Net()
    a, b = net.const(2049, "float16"), net.const(1.0, "float16")
    s = net.op("Add", net.op("Add", a, b), b)  # fp16 rounds after each: 2048 + 1 → 2048, again
    y = net.op("Mul", net.input("x", "float16", (3,)), s)
    graph = net.build([y])
    result = fold_constants(graph, vocabulary())
    assert sites(result) == {"Mul": 1} and len(result.constants) == 1
    given = feeds(graph)
    np.testing.assert_array_equal(run(result, given)[y], run(graph, given)[y])


def test_overridable_values_and_outputs_do_not_fold():
    net = Net()
    over, fixed = net.const(2.0, overridable=True), net.const(3.0)
    x = net.input("x", "float32", (2,))
    a = net.op("Mul", x, net.op("Add", over, fixed))
    graph = net.build([a, net.op("Neg", fixed)])
    assert sites(fold_constants(graph, vocabulary())) == {"Add": 1, "Mul": 1, "Neg": 1}


def test_random_numbers_do_not_fold():
    def meaning(xp, x, *, seed):
        return x

    def op(name, attributes):
        infer = vocabulary()["Neg"].infer
        return OpSpec(name=name, inputs=("x",), attributes=attributes, meaning=meaning, infer=infer)

    ops = vocabulary().with_ops([op("test::Noise", {"seed": 0})])
    net = Net()
    net.node("test::Noise", [net.const([1.0, 2.0])], [Value("noise", "float32", (2,))])
    graph = net.build([net.op("Mul", net.input("x", "float32", (2,)), "noise")])
    assert sites(fold_constants(graph, ops)) == {"test::Noise": 1, "Mul": 1}


def test_results_that_grow_too_much_do_not_fold():
    net = Net()
    big = net.op("Expand", net.const(1.0), net.const([64, 64], "int64"))
    graph = net.build([net.op("Add", net.input("x", "float32", (64, 64)), big)])
    assert sites(fold_constants(graph, vocabulary(), limit=64 * 64 * 4 - 21)) == {"Add": 1, "Expand": 1}
    assert sites(fold_constants(graph, vocabulary(), limit=64 * 64 * 4)) == {"Add": 1}
    huge = Net()
    h = huge.op("Expand", huge.const(1.0), huge.const([1 << 40], "int64"))  # must not be tried
    assert len(fold_constants(huge.build([huge.op("Neg", h)]), vocabulary()).nodes) == 2


def test_constants_that_something_writes_do_not_fold():
    net = Net()
    c = net.const([1.0, 2.0])
    a = net.op("Neg", c)
    net.op("Add", c, net.const(1.0), name="write", mutates=(c,))
    b = net.op("Exp", c)
    graph = net.build([net.op("Add", a, b)])
    assert len(fold_constants(graph, vocabulary()).nodes) == 4


@pytest.mark.parametrize(("shape", "folds"), [((2, 3), True), (("N", 3), False), (None, False)])
def test_shapes_fold_where_they_are_static(shape, folds):
    net = Net()
    x = net.input("x", "float32", shape)
    n = net.op("Size", x)
    y = net.op("Add", n, net.const(1, "int64"))
    graph = net.build([net.op("Mul", y, net.input("z", "int64", ()))])
    assert sites(fold_constants(graph, vocabulary())) == ({"Mul": 1} if folds else {"Size": 1, "Add": 1, "Mul": 1})


def test_part_of_a_shape_folds_where_it_is_static():
    net = Net()
    tail = net.op("Shape", net.input("x", "float32", ("N", 3, 4)), start=1)
    graph = net.build([net.op("Mul", tail, net.input("z", "int64", (2,)))])
    result = fold_constants(graph, vocabulary())
    assert sites(result) == {"Mul": 1}
    np.testing.assert_array_equal(run(result, {**feeds(graph), "z": np.array([1, 1])})["mul"], [3, 4])


def test_a_plan_of_many_layers_applies_at_once():
    net = Net()
    v = net.input("x", "float32", (4, 4))
    for _ in range(30):
        v = net.op("Relu", net.op("Add", net.op("MatMul", v, net.weight((4, 4))), net.weight((4,))))
    graph = net.build([v])
    assert len(plan_of(graph, gemm())) == 30
    assert sites(fused(graph, gemm())) == {"gemm.scale_bias": 30}
