"""Plans on paper: the same again from JSON, refused where they are damaged or of another graph, equal everywhere."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from graphs import Net, chain, gemm, layernorm, quick_gelu, vocabulary

from fusionreg.core.errors import PlanError
from fusionreg.core.frozen import FrozenDict
from fusionreg.core.matcher.find import find
from fusionreg.core.matcher.match import Match
from fusionreg.core.planner.costs import Cost, CostModel
from fusionreg.core.planner.digest import graph_digest
from fusionreg.core.planner.plan import Loser, Plan, plan
from fusionreg.core.planner.stored import check_graph

FUSIONS = (gemm(), quick_gelu(), layernorm())


def layers(count=4):
    """Products with bias and activation, a gate, and a spelled-out normalisation, ``count`` times."""
    net = Net()
    x = net.input("x", "float32", (16, 32))
    for _ in range(count):
        h = net.op("Relu", net.op("Add", net.op("MatMul", x, net.weight((32, 32))), net.weight((32,))))
        h = net.op("Mul", h, net.op("Sigmoid", net.op("Mul", h, net.const(1.702))))
        c = net.op("Sub", h, net.op("ReduceMean", h, net.const([-1], "int64")))
        v = net.op("ReduceMean", net.op("Mul", c, c), net.const([-1], "int64"))
        n = net.op("Div", c, net.op("Sqrt", net.op("Add", v, net.const(1e-5))))
        x = net.op("Add", net.op("Mul", n, net.weight((32,))), net.weight((32,)))
    return net.build([x])


def made(graph, **options) -> Plan:
    found = list(find(graph, FUSIONS, vocabulary()))
    order = options.pop("order", None)
    if order is not None:
        random.Random(order).shuffle(found)
    return plan(graph, found, cost=CostModel(vocabulary()), **options)


def test_the_same_plan_comes_back_from_json():
    p = made(layers(), fuel=5)
    assert len(p.chosen) == 5 and len(p.losers) > 5
    text = json.dumps(p.to_dict(), allow_nan=False)
    again = Plan.from_dict(json.loads(text))
    assert again == p and again.digest == p.digest and hash(again.chosen[0]) == hash(p.chosen[0])
    assert json.dumps(again.to_dict()) == text and str(again) == str(p)


def test_attributes_that_json_has_no_word_for():
    m = Match(
        "f.f", "f", 0, "n", ("n",), FrozenDict(x="x"), FrozenDict(y="y"), axes=FrozenDict(M="N", K=4), leading=("B", 2),
        attributes=FrozenDict(a=float("inf"), b=-0.0, c=(1, (2.5, float("-inf"))), d="nan", e=True, f=1),
    )  # fmt: skip
    p = Plan((m,), (Cost(1, 2, 3, 4e-6),), (Loser(m, "why", m), Loser(m, "else")), "balanced", basis=("model",))
    again = Plan.from_dict(json.loads(json.dumps(p.to_dict(), allow_nan=False)))
    assert again == p
    assert [type(v) for v in again.chosen[0].attributes.values()] == [float, float, tuple, str, bool, int]


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda d: d.pop("graph"), "graph: Field required"),
        (lambda d: d.update(format="fusionreg-plan/9"), "format: Input should be 'fusionreg-plan/1'"),
        (lambda d: d.update(policy="daring"), "policy: Input should be"),
        (lambda d: d["chosen"][0].update(nodes=7), "chosen.0.nodes"),
        (lambda d: d["chosen"].pop(0), "is not among the chosen"),
        (lambda d: d["chosen"].reverse(), "digest: "),
        (lambda d: d["chosen"][0]["inputs"].update(x="other"), "digest: "),
        (lambda d: d.update(more=1), "more: Extra inputs are not permitted"),
    ],
)
def test_a_damaged_plan_is_refused_with_the_place(damage, said):
    data = json.loads(json.dumps(made(layers()).to_dict()))
    damage(data)
    with pytest.raises(PlanError) as caught:
        Plan.from_dict(data)
    assert said in str(caught.value) and caught.value.facts["field"]


def test_what_is_no_mapping_is_refused():
    with pytest.raises(PlanError):
        Plan.from_dict([1, 2])  # type: ignore[arg-type]


def test_a_plan_fits_its_own_graph_alone():
    p = made(layers(2))
    check_graph(p, layers(2))
    with pytest.raises(PlanError, match="it has no node"):
        check_graph(p, chain())
    with pytest.raises(PlanError, match="digest"):
        check_graph(p, layers(3))


def test_a_graph_s_digest_counts_what_a_plan_depends_on():
    def net(op="Relu", width=8, constant=0.5, name="x", axis=-1, weights=0):
        n = Net()
        n.rng = np.random.default_rng(weights)
        x = n.input(name, "float32", (4, width))
        h = n.op(op, n.op("Mul", n.op("MatMul", x, n.weight((width, 8))), n.const(constant)))
        return n.build([n.op("Softmax", h, axis=axis)])

    others = (net("Tanh"), net(width=9), net(constant=0.25), net(name="z"), net(axis=0))
    digests = [graph_digest(g) for g in (net(), *others)]
    assert len(set(digests)) == len(digests)
    assert graph_digest(net()) == digests[0] == graph_digest(net(weights=1))


def test_limited():
    p = made(layers())
    some = p.limited(3)
    assert some.chosen == p.chosen[:3] and some.savings == p.savings[:3] and some.fuel == 3
    assert [x.match for x in some.losers if x.reason == "fuel"] == list(p.chosen[3:])
    assert {x.match for x in some.losers} | set(some.chosen) == {x.match for x in p.losers} | set(p.chosen)
    assert p.limited(99).chosen == p.chosen and p.limited(0).chosen == ()
    assert all(x.by is None or x.by in some.chosen for x in some.losers)
    assert p.digest != some.digest != p.limited(2).digest


def test_a_plan_prints_as_a_table():
    p = made(layers(1))
    lines = str(p).splitlines()
    assert lines[0] == f"plan {p.digest[:12]} of graph {p.graph[:12]}: balanced beside library, exact"
    assert lines[1].startswith(f"{len(p)} sites save ")
    assert lines[2].split() == ["fusion", "at", "nodes", "saves", "µs", "bytes", "launches", "by"]
    assert [line.split()[0] for line in lines[3 : 3 + len(p)]] == [m.fusion for m in p]
    assert lines[4 + len(p)] == "not taken" and "part of gemm.scale_bias" in str(p)
    assert "not taken" not in p.describe(losers=False)
    assert str(made(layers(1), policy="off")).splitlines()[1] == "0 sites save 0.00 µs, 0 bytes, 0 launches"


def test_the_plan_is_equal_in_any_order_of_matches():
    graph = layers(6)
    assert len({made(graph, order=seed) for seed in range(6)}) == 1


SCRIPT = """
import sys
sys.path[:0] = {paths!r}
from test_stored import layers, made
p = made(layers(6), order={order})
print(p.digest, p.graph, len(p.chosen), round(p.saved.seconds * 1e12))
"""


def test_the_plan_is_equal_in_every_process():
    here = Path(__file__)
    paths = [str(here.parent), str(here.parents[2] / "support")]
    said = set()
    for seed in ("0", "1", "4242"):
        script = SCRIPT.format(paths=paths, order=int(seed))
        env = {**os.environ, "PYTHONHASHSEED": seed}
        ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=env)
        said.add(ran.stdout)
    p = made(layers(6))
    assert said == {f"{p.digest} {p.graph} {len(p)} {round(p.saved.seconds * 1e12)}\n"}
