"""Which overlapping matches win, why the others lose, and that the answer is the best there is."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from graphs import Net, chain, fused, fusion, gemm, matches_of, plan_of, quick_gelu, sites, vocabulary

from fusionreg.core.errors import UnknownNameError
from fusionreg.core.matcher.find import find
from fusionreg.core.ops import complete, numpy_backend
from fusionreg.core.planner.costs import Cost, CostModel, DeviceModel, Gain
from fusionreg.core.planner.executor import EAGER, PASSES
from fusionreg.core.planner.plan import Plan, plan


def model(**fields) -> CostModel:
    return CostModel(vocabulary(), **fields)


def decide(graph, *fusions, **options) -> Plan:
    options.setdefault("cost", model())
    return plan(graph, find(graph, fusions, vocabulary()), **options)


# --- costs ----------------------------------------------------------------------------------------------------------


def test_cost_of_a_node_and_of_a_match():
    graph = chain(m=4, k=8, n=16)
    device = DeviceModel("toy", bandwidth=1e6, flops={"float32": 1e9}, vector_flops=1e9, launch=1e-3)
    cost = CostModel(vocabulary(), device)
    product, scale = graph.nodes[0], graph.nodes[1]
    moved = 4 * (4 * 8 + 8 * 16 + 4 * 16)
    assert cost.node(graph, product) == Cost(moved, 2 * 4 * 8 * 16, 1, moved / 1e6 + 1e-3)
    assert cost.node(graph, scale) == Cost(4 * (64 + 1 + 64), 64, 1, 4 * 129 / 1e6 + 1e-3)
    m = max(matches_of(graph, gemm()), key=lambda m: len(m.nodes))
    whole = 4 * (4 * 8 + 8 * 16 + 1 + 16 + 64)
    assert cost.fused(graph, m) == Cost(whole, 2 * 4 * 8 * 16 + 3 * 64, 1, pytest.approx(whole / 1e6 + 1e-3))
    saved = cost.saved(graph, m)
    assert saved.launches == 3 and saved.flops == 0
    assert saved.bytes == 4 * (64 + 64) + 4 * (64 + 64) + 4 * (64 + 64)  # each interior value, written and read


def test_views_are_free_and_symbolic_extents_nominal():
    net = Net()
    x = net.input("x", "float16", ("N", 64))
    y = net.op("Relu", net.op("Unsqueeze", x, net.const([0], "int64")))
    graph = net.build([y])
    cost = model(extent=10)
    assert cost.node(graph, graph.nodes[0]) == Cost()
    assert cost.node(graph, graph.nodes[1]).bytes == 2 * 2 * 640


@pytest.mark.parametrize(
    ("build", "flops"),
    [
        (lambda n: n.op("MatMul", n.input("x", "float32", (2, 3, 5)), n.weight((5, 7))), 2 * 2 * 3 * 5 * 7),
        (lambda n: n.op("MatMul", n.input("x", "float32", (5, 3)), n.weight((5, 7)), transA=1), 2 * 3 * 5 * 7),
        (lambda n: n.op("Softmax", n.input("x", "float32", (3, 5))), 15),
        (lambda n: n.op("ReduceMean", n.input("x", "float32", (3, 5)), n.const([1], "int64")), 15),
    ],
)
def test_flops(build, flops):
    net = Net()
    graph = net.build([build(net)])
    assert model().flops(graph, graph.nodes[0]) == flops


@pytest.mark.parametrize("keys", [4, 7, 11])
@pytest.mark.parametrize(
    "attributes",
    [{}, {"is_causal": 1}, {"left_window_size": 2}, {"right_window_size": 3}, {"is_causal": 1, "right_window_size": 3},
     {"left_window_size": 0, "right_window_size": 1}, {"is_causal": 1, "left_window_size": 3}],
)  # fmt: skip
def test_flops_of_attention_are_those_of_pairs_that_see_each_other(attributes, keys):
    b, h, g, queries, d, e = 2, 4, 2, 7, 16, 8
    shapes = {"q": (b, h, queries, d), "k": (b, g, keys, d), "v": (b, g, keys, e), "dy": (b, h, queries, e)}
    left, right = (attributes.get(f"{side}_window_size", -1) for side in ("left", "right"))
    seen = [
        (i, j) for i in range(queries) for j in range(keys)
        if (left < 0 or j >= i - left) and (right < 0 or j <= i + right) and (not attributes.get("is_causal") or j <= i)
    ]  # fmt: skip
    gradient = "fusionreg::AttentionGrad", "dy q k v dy lse", 3 * d + 2 * e
    for op, names, width in (("Attention", "q k v", d + e), gradient):
        net = Net()
        values = {n: net.input(n, "float32", shapes.get(n, (b, h, queries))) for n in dict.fromkeys(names.split())}
        graph = net.build([net.op(op, *(values[n] for n in names.split()), **attributes)])
        assert model().flops(graph, graph.nodes[0]) == 2 * b * h * len(seen) * width


def test_a_measured_time_replaces_the_estimate():
    graph = chain()
    slow = decide(graph, gemm(), cost=model(measured=lambda m: 1.0 if len(m.nodes) == 4 else None))
    assert [len(m.nodes) for m in slow] == [3]
    assert any("saves nothing" in x.reason for x in slow.losers)


def normalised():
    net = Net()
    x, scale = net.input("x", "float32", (64, 256)), net.weight((256,))
    return net.build([net.op("LayerNormalization", x, scale, net.weight((256,)))])


NORM = fusion(
    "norm.layernorm", "y = LayerNormalization(x, scale, bias)",
    {"x": "T[M N]", "scale": "T[N]", "bias": "T[N]"}, {"y": "T[M N]"},
)  # fmt: skip


def test_an_operator_that_the_executor_runs_as_several_kernels():
    """One node of the graph: what fusing it saves depends on who would run it otherwise."""
    graph = normalised()
    ours = decide(graph, NORM)
    assert ours.saved.launches == PASSES["LayerNormalization"] - 1 and ours.saved.seconds > 7 * 4e-6
    theirs = decide(graph, NORM, cost=model(executor=EAGER))
    assert not theirs.chosen and theirs.losers[0].reason == "saves nothing: unfused it is one kernel already"
    slow = decide(graph, NORM, cost=model(measured=lambda m: 1.0))
    assert not slow.chosen and "7 launches" in slow.losers[0].reason and "µs more" in slow.losers[0].reason


class Counted(np.ndarray):
    """Counts the element-wise functions and reductions that touch as many elements as ``whole``."""

    seen: list[str]
    whole: int

    def __array_ufunc__(self, function, method, *inputs, out=None, **options):
        if max(np.size(i) for i in inputs) >= Counted.whole:
            Counted.seen.append(function.__name__)
        plain = [i.view(np.ndarray) if isinstance(i, Counted) else i for i in inputs]
        found = getattr(function, method)(*plain, **options)
        return found.view(Counted) if isinstance(found, np.ndarray) else found


@pytest.mark.parametrize("op", [op for op in PASSES if op != "fusionreg::Dropout"])  # its words are no array of ours
def test_passes_are_no_more_than_the_executor_makes(op):
    attends = op == "Attention"  # of as many scores as q has elements
    shape = (2, 3, 4, 4) if attends else (2, 4, 6)
    x = np.random.default_rng(0).random(shape).astype(np.float32).view(Counted)
    rows, channels = np.ones(6, np.float32), np.ones(4, np.float32)
    gradient, norm = op.endswith("Grad"), "Norm" in op
    per = channels if op.startswith(("Group", "Instance", "Batch")) else rows
    count = {"RMSNormalization": 1, "BatchNormalization": 4}.get(op, 1 if gradient else 2) if norm else 0
    spec = vocabulary()[op]
    attributes = complete(spec, {"num_groups": 2} if op.startswith("Group") else {})
    Counted.seen, Counted.whole = [], x.size
    spec.meaning(numpy_backend(), *[x] * (3 if attends else 2 if gradient else 1), *[per] * count, **attributes)
    assert PASSES[op] <= len(Counted.seen), Counted.seen


# --- choosing -------------------------------------------------------------------------------------------------------


def test_the_largest_form_wins_and_the_parts_say_so():
    p = decide(chain(), gemm())
    assert [m.root for m in p] == ["Relu_relu"] and len(p.losers) == 3 and p.exact
    reasons = {x.match.root: x for x in p.losers}
    assert reasons["Add_add"].reason == "part of gemm.scale_bias at Relu_relu"
    assert reasons["Add_add"].by is p.chosen[0]
    assert "saves nothing" in reasons["MatMul_matmul"].reason and reasons["MatMul_matmul"].by is None
    assert p.saved.launches == 3 and p.savings == (p.saved,)


def test_two_small_matches_beat_one_in_the_middle():
    kind = {"x": "T[... N]"}, {"y": "T[... N]"}
    first = fusion("act.first", "y = Exp(Neg(x))", *kind)
    last = fusion("act.last", "y = Tanh(Abs(x))", *kind)
    middle = fusion("act.middle", "y = Abs(Exp(x))", *kind)
    net = Net()
    v = net.input("x", "float32", (64, 64))
    for op in ("Neg", "Exp", "Abs", "Tanh"):
        v = net.op(op, v)
    graph = net.build([v])
    p = decide(graph, middle, last, first)
    assert [m.fusion for m in p] == ["act.first", "act.last"]
    (loser,) = p.losers
    assert loser.match.fusion == "act.middle" and "the plan saves more" in loser.reason and loser.by in p.chosen
    assert sites(fused(graph, first, middle, last, policy="balanced")) == {"act.first": 1, "act.last": 1}


def test_of_two_fusions_of_the_same_nodes_the_faster_wins_then_the_name():
    kind = {"x": "T[... N]"}, {"y": "T[... N]"}
    a, b = (fusion(name, "y = Exp(Neg(x))", *kind) for name in ("act.a", "act.b"))
    net = Net()
    graph = net.build([net.op("Exp", net.op("Neg", net.input("x", "float32", (8,))))])
    p = decide(graph, b, a)
    assert [m.fusion for m in p] == ["act.a"] and "covers the same nodes" in p.losers[0].reason
    faster = model(measured=lambda m: 1e-9 if m.fusion == "act.b" else 1e-7)
    assert [m.fusion for m in decide(graph, a, b, cost=faster)] == ["act.b"]


def test_the_plan_does_not_depend_on_the_order_of_matches():
    graph = chain()
    found = list(find(graph, [gemm(), quick_gelu()], vocabulary()))
    plans = {plan(graph, order, cost=model()) for order in itertools.permutations(found)}
    assert len(plans) == 1


# --- policies -------------------------------------------------------------------------------------------------------


def test_off_takes_nothing():
    p = decide(chain(), gemm(), policy="off")
    assert not p.chosen and {x.reason for x in p.losers} == {"the policy is off"} and p.saved == Cost()


def test_balanced_wants_savings_and_aggressive_does_not():
    net = Net()
    graph = net.build([net.op("MatMul", net.input("x", "float32", (4, 4)), net.weight((4, 4)))])
    assert not decide(graph, gemm(), policy="balanced").chosen
    assert len(decide(graph, gemm(), policy="aggressive")) == 1


@pytest.mark.parametrize(
    ("rounding", "pending", "count"), [("per_op", "", 1), ("once", "", 0), ("per_op", "untested", 0)]
)
def test_conservative_wants_a_kernel_that_rounds_per_operator(rounding, pending, count):
    kernel = SimpleNamespace(spec=SimpleNamespace(rounding=rounding, pending=pending))
    fusions = {"gemm.scale_bias": SimpleNamespace(kernels=(kernel,))}
    won = model(gains=lambda m, executor, size: Gain(0.5, "a measurement"))
    p = decide(chain(), gemm(), policy="conservative", fusions=fusions, cost=won)
    assert len(p) == count
    if not count:
        assert all("rounds per operator" in x.reason for x in p.losers)


def test_conservative_wants_a_measured_win():
    kernel = SimpleNamespace(spec=SimpleNamespace(rounding="per_op", pending=""))
    fusions = {"gemm.scale_bias": SimpleNamespace(kernels=(kernel,))}
    p = decide(chain(), gemm(), policy="conservative", fusions=fusions)
    assert not p.chosen
    assert {x.reason for x in p.losers} == {"policy conservative: nothing like it was measured against library"}
    lost = model(gains=lambda m, executor, size: Gain(1.5, "r/w on X: 1.5× eager"))
    p = decide(chain(), gemm(), policy="conservative", fusions=fusions, cost=lost)
    assert not p.chosen and all("µs more (r/w on X: 1.5× eager)" in x.reason for x in p.losers)


def test_a_site_that_no_kernel_accepts_loses_with_the_kernel_s_reason():
    def accepts(m):
        return "plain: K % 16 == 0 (K = 8)" if len(m.nodes) == 4 else None

    p = decide(chain(), gemm(), accepts=accepts)
    assert [len(m.nodes) for m in p] == [3]
    assert next(x for x in p.losers if len(x.match.nodes) == 4).reason == "plain: K % 16 == 0 (K = 8)"


def test_an_unknown_policy_is_named():
    with pytest.raises(UnknownNameError, match="balanced"):
        decide(chain(), gemm(), policy="balance")


# --- cycles among matches -------------------------------------------------------------------------------------------


def crossing():
    """Two pairs, each of which reads what the other makes first: legal alone, a cycle together."""
    net = Net()
    x = net.input("x", "float32", (16,))
    a1, b1 = net.op("Relu", x), net.op("Tanh", x)
    a2, b2 = net.op("Add", a1, b1, name="a2"), net.op("Mul", b1, a1, name="b2")
    return net.build([a1, a2, b1, b2])


def test_matches_that_make_a_cycle_together_are_not_chosen_together():
    kind = {"x": "T[N]", "z": "T[N]"}, {"p": "T[N]", "q": "T[N]"}
    a = fusion("pair.a", "p = Relu(x)\nq = Add(p, z)", *kind)
    b = fusion("pair.b", "p = Tanh(x)\nq = Mul(p, z)", *kind)
    graph = crossing()
    assert len(matches_of(graph, a, b)) == 2
    p = decide(graph, a, b)
    assert len(p) == 1 and not p.exact
    assert "would make a cycle together with" in p.losers[0].reason
    assert sites(fused(graph, a, b))["pair.a"] == 1


def test_a_cycle_through_other_nodes_is_seen():
    kind = {"x": "T[N]", "z": "T[N]"}, {"p": "T[N]", "q": "T[N]"}
    a = fusion("pair.a", "p = Relu(x)\nq = Add(p, z)", *kind)
    b = fusion("pair.b", "p = Tanh(x)\nq = Mul(p, z)", *kind)
    net = Net()
    x = net.input("x", "float32", (16,))
    a1, b1 = net.op("Relu", x), net.op("Tanh", x)
    left, right = net.op("Neg", net.op("Abs", b1)), net.op("Exp", a1)
    graph = net.build([net.op("Add", a1, left), net.op("Mul", b1, right), a1, b1])
    assert len(decide(graph, a, b)) == 1
    fused(graph, a, b)


# --- values ---------------------------------------------------------------------------------------------------------


def test_a_plan_is_plain_data_and_says_what_it_is():
    p = decide(chain(), gemm())
    data = json.loads(json.dumps(p.to_dict()))
    assert data["policy"] == "balanced" and data["exact"] is True and data["saved"]["launches"] == 3
    assert data["chosen"][0]["fusion"] == "gemm.scale_bias" and data["chosen"][0]["saved"]["launches"] == 3
    assert {x["by"]["root"] for x in data["losers"] if x["by"]} == {"Relu_relu"}
    assert repr(p).startswith("Plan(1 sites, 3 losers, saves ") and "balanced)" in repr(p)
    assert repr(replace(p, exact=False)).endswith("approximate)")
    with pytest.raises(AttributeError):
        p.policy = "off"  # type: ignore[misc]


def test_aggressive_and_balanced_agree_where_everything_saves():
    net = Net()
    v = net.input("x", "float32", (8, 8))
    for _ in range(3):
        v = net.op("Relu", net.op("MatMul", v, net.weight((8, 8))))
    graph = net.build([v])
    assert plan_of(graph, gemm(), policy="balanced").chosen == plan_of(graph, gemm(), policy="aggressive").chosen
