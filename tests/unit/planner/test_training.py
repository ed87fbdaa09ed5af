"""What a backward pass computes again, in a plan: its price, the policies' word on it, and how it is told."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from graphs import Net, chain, gemm, matches_of, vocabulary

from fusionreg.core.frozen import FrozenDict
from fusionreg.core.planner.costs import Cost, CostModel, DeviceModel, Gain
from fusionreg.core.planner.executor import EAGER, INDUCTOR
from fusionreg.core.planner.plan import Plan, plan
from fusionreg.core.planner.training import Backward

DEVICE = DeviceModel("toy", bandwidth=1e6, flops={"float32": 1e9}, vector_flops=1e8, launch=1e-3)


def model(**fields) -> CostModel:
    return CostModel(vocabulary(), DEVICE, **fields)


def gate():
    """``sigmoid(x * w + b)``; backward it reads the sum's sigmoid."""
    net = Net()
    x, w, b = net.input("x", "float32", (4, 8)), net.input("w", "float32", (8,)), net.input("b", "float32", (8,))
    graph = net.build([net.op("Sigmoid", net.op("Add", net.op("Mul", x, w), b))])
    return graph, [n.name for n in graph.nodes]


def test_pointwise_operators_cost_their_operands_in_place_of_their_results():
    graph, (mul, add, _) = gate()
    total = graph.node_by_name[add].outputs[0]
    again = Backward("", ("x", "w", "b"), graph, (mul, add), (total,))
    moved = 4 * (32 + 8 + 8) - 4 * 32  # x, w and b are read, and the sum is not
    assert again.cost(model()) == Cost(moved, 64, 0, pytest.approx(moved / 1e6 + 64 / 1e8))
    product = graph.node_by_name[mul].outputs[0]
    less = Backward("", ("x", "w"), graph, (mul,), (product, total))  # two results are not read
    moved = 4 * (32 + 8) - 2 * 4 * 32
    assert less.cost(model()).bytes == moved < 0
    assert less.cost(model(executor=INDUCTOR)).bytes == 0, "which computes again what costs less to compute"


def test_other_operators_run_as_the_executor_runs_them():
    graph = chain(m=4, k=8, n=16)
    names = [n.name for n in graph.nodes[:2]]
    again = Backward("", ("x",), graph, tuple(names), ())
    for executor in (EAGER, INDUCTOR):
        cost = model(executor=executor)
        assert again.cost(cost) == cost.on(graph).unfused(names) and again.cost(cost).launches >= 1
    assert again.products == ("MatMul",)
    assert Backward("acme.backward").cost(model()) == Cost() == Backward("", ("x", "y"), graph).cost(model())


def decided(policy, again, **options):
    """The plan of a product with three operators behind it, whose backward pass computes ``again``."""
    graph = chain(m=64, k=8, n=64)
    names = {n.op: n.name for n in graph.nodes}
    found = matches_of(graph, gemm())
    whole = max(found, key=lambda m: len(m.nodes))

    def gradients(match):
        if match is not whole:
            return "not this one"
        nodes = tuple(names[op] for op in again)
        values = tuple(graph.node_by_name[n].outputs[0] for n in nodes[-1:])
        return Backward("", tuple(match.inputs), graph, nodes, values)

    return plan(graph, found, cost=model(), policy=policy, gradients=gradients, **options), whole


TWICE = "its backward pass would compute MatMul again, which only policy aggressive takes"


@pytest.mark.parametrize(
    ("policy", "again", "refusal"),
    [
        ("balanced", (), None),
        ("balanced", ("Mul", "Add"), None),
        ("balanced", ("MatMul", "Mul"), TWICE),
        ("aggressive", ("MatMul", "Mul"), None),
        ("conservative", ("Mul", "Add"), "policy conservative: its backward pass would compute Mul, Add again"),
    ],
)
def test_policies(policy, again, refusal):
    made, whole = decided(policy, again, fusions={"f": None})
    reasons = {x.match: x.reason for x in made.losers}
    if refusal is None:
        assert list(made) == [whole]
    else:
        assert not made.chosen and reasons.pop(whole) == refusal
    assert set(reasons.values()) == {"not this one"}


def test_what_is_computed_again_is_part_of_the_saving():
    free, _ = decided("balanced", ())
    paid, _ = decided("balanced", ("Mul", "Add"))
    graph = chain(m=64, k=8, n=64)
    nodes = tuple(n.name for n in graph.nodes if n.op in ("Mul", "Add"))
    value = graph.node_by_name[nodes[-1]].outputs[0]
    extra = Backward("", (), graph, nodes, (value,)).cost(model())
    less = free.savings[0] - paid.savings[0]
    assert less == Cost(extra.bytes, extra.flops, 0, pytest.approx(extra.seconds)) and extra.seconds > 0
    assert paid.digest == free.digest, "what it does is the same"


def test_a_plan_tells_of_its_backward_passes_and_keeps_that():
    free, _ = decided("balanced", ())
    paid, _ = decided("balanced", ("Mul", "Add"))
    assert free.backwards == ("from x, w, scale, bias",) and paid.backwards[0].startswith("computes Mul, Add again, +")
    head, row = str(paid).splitlines()[2:4]
    assert head.split()[-1] == "backward" and row.endswith(paid.backwards[0])
    again = Plan.from_dict(json.loads(json.dumps(paid.to_dict())))
    assert again == paid and str(again) == str(paid)
    assert paid.limited(0).backwards == ()
    graph = chain(m=64, k=8, n=64)
    plain = plan(graph, matches_of(graph, gemm()), cost=model())
    assert plain.backwards == () and "backward" not in str(plain)


def test_a_backward_pass_that_takes_longer_than_the_forward_pass_saves():
    graph, large = chain(m=64, k=8, n=64), chain(m=4096, k=8, n=64)
    nodes = tuple(n.name for n in large.nodes if n.op == "Mul")
    made = plan(
        graph, matches_of(graph, gemm()), cost=model(), gradients=lambda match: Backward("", (), large, nodes, ())
    )
    assert not made.chosen and len(made.losers) == 4
    assert all("; its backward pass computes Mul again, +" in x.reason for x in made.losers)


@pytest.mark.parametrize(("ratio", "costs"), [(1.6, True), (0.5, False), (None, False)])
def test_a_backward_fusion_that_measured_slower_costs_the_difference(ratio, costs):
    """A site that wins forward loses where its backward fusion takes more than that."""
    graph = chain(m=64, k=8, n=64)
    found = matches_of(graph, gemm())
    whole = max(found, key=lambda m: len(m.nodes))
    call = replace(whole, fusion="acme.backward", outputs=FrozenDict(dx=whole.inputs["x"]))

    def gains(match, executor, size):
        return Gain(ratio, "r") if match is call and ratio is not None else None

    cost = model(gains=gains, kernels=lambda m: 8.0 if m is call else None)
    again = Backward("acme.backward", call=call, graph=graph)
    assert again.cost(cost) == (Cost(seconds=pytest.approx(8.0 * (1 - 1 / 1.6))) if costs else Cost())
    made = plan(graph, [whole], cost=cost, gradients=lambda match: again)
    assert bool(made.chosen) != costs
    if costs:
        assert "acme.backward, +3000000.00 µs as measured" in made.losers[0].reason


def test_layers_of_experts_train_fused_by_measurement():
    """Their backward fusion makes the products of the forward pass again, which others keep."""
    from fusionreg.core.planner.costs import ROUTED
    from fusionreg.core.planner.training import UNSURE

    (op,) = ROUTED
    graph = chain(m=64, k=8, n=64)
    whole = max(matches_of(graph, gemm()), key=lambda m: len(m.nodes))
    nodes = tuple(replace(n, op=op) if n.op == "MatMul" else n for n in graph.nodes)
    experts = Backward("acme.backward", call=whole, graph=graph.with_(nodes=nodes))
    assert experts.refusal("balanced", model()) == UNSURE and experts.refusal("aggressive", model()) is None
    assert experts.refusal("balanced", model(gains=lambda m, e, s: Gain(0.9))) is None
    assert Backward("acme.backward", call=whole, graph=graph).refusal("balanced", model()) is None
