"""Coverage locks: each clause of the rule, with a change that it must survive and one that it must tell."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import plugin_kit
import pytest
from onnx_models import model, node

import fusionreg
from fusionreg.core.errors import ArgumentError, ModelError
from fusionreg.core.ir import Node
from fusionreg.verifying.lock import Lock, LockedSite, place


@pytest.fixture(scope="module")
def registry(tmp_path_factory):
    """``acme.add_relu`` with an optional Relu, and ``acme.mul_relu``."""
    specs = (
        plugin_kit.add_relu(pattern='y = optional(Relu, "act")(Add(x, bias))'),
        plugin_kit.add_relu(name="acme.mul_relu", pattern="y = Relu(Mul(x, bias))"),
    )
    templates = {"k.cu.j2": plugin_kit.ADD_RELU}
    return fusionreg.Registry(plugin_kit.catalog(tmp_path_factory.mktemp("p"), templates, *specs))


def chain(names=("plus", "bend", "plus_b", "bend_b"), ops=("Add", "Relu", "Add", "Relu"), outputs=("y",), extra=()):
    """x → op → op → op → op → y, the values called v0 …"""
    values = ["x", "v0", "v1", "v2", "y"]
    nodes = []
    for i, (name, op) in enumerate(zip(names, ops, strict=True)):
        operands = [values[i], f"b{i}"] if op in ("Add", "Mul") else [values[i]]
        nodes.append(node(op, operands, [values[i + 1]], name=name))
    constants = {f"b{i}": np.full(8, i + 2, "f") for i, op in enumerate(ops) if op in ("Add", "Mul")}
    return model([*nodes, *extra], {"x": [4, 8]}, {name: [4, 8] for name in outputs}, constants)


def taken(registry, proto, policy="aggressive", explain=True):
    graph = registry.graph(proto)
    found = registry.match(graph, explain=explain)
    return graph, registry.plan(graph, policy=policy, matches=found), found.failures


def lock_of(registry, proto):
    graph, plan, _ = taken(registry, proto)
    return Lock.of("m.onnx", graph, plan)


def against(registry, before, after, **options):
    """What the lock of one model says of another."""
    graph, plan, failures = taken(registry, after, **options)
    return lock_of(registry, before).compare(graph, plan, failures)


def test_what_is_locked(registry):
    lock = lock_of(registry, chain())
    assert lock.policy == "aggressive" and lock.sites == (
        LockedSite("acme.add_relu", ("Add @ plus", "Relu @ bend")),
        LockedSite("acme.add_relu", ("Add @ plus_b", "Relu @ bend_b")),
    )
    same = against(registry, chain(), chain())
    assert same.ok and same.kept == 2 and not list(same.lines())


def test_unrelated_nodes_come_go_and_are_renamed(registry):
    """Two branches more, one of which fuses: reported, not failed."""
    extra = [node("Neg", ["x"], ["n"], name="aside"), node("Add", ["n", "b0"], ["z"], name="beside")]
    found = against(registry, chain(), chain(outputs=("y", "z"), extra=extra))
    assert found.ok and found.kept == 2 and not found.moved
    assert found.new == (LockedSite("acme.add_relu", ("Add @ beside",)),)
    assert list(found.lines()) == ["+ acme.add_relu: Add @ beside"]
    back = against(registry, chain(outputs=("y", "z"), extra=extra), chain())
    assert not back.ok and "the model has no Add @ beside" in back.lost[0].reason


def test_an_operator_that_a_site_lost_is_told(registry):
    """The Add's result is an output now: the fusion still takes the Add, not the Relu."""
    found = against(registry, chain(), chain(outputs=("y", "v0")))
    (lost,) = found.lost
    assert lost.site.nodes == ("Add @ plus", "Relu @ bend") and (lost.count, lost.locked) == (1, 1)
    assert "acme.add_relu takes Add @ plus" in lost.reason and found.kept == 1
    line = next(iter(found.lines()))
    assert line.startswith("- acme.add_relu: Add @ plus, Relu @ bend: ")


def test_a_site_that_loses_its_place_names_the_clause(registry):
    after = chain(ops=("Mul", "Relu", "Add", "Relu"), outputs=("y", "v0"))
    before = chain(ops=("Mul", "Relu", "Add", "Relu"))
    (lost,) = against(registry, before, after).lost
    assert lost.site.fusion == "acme.mul_relu"
    assert "interior values are needed elsewhere, plus would run beside it" in lost.reason


def test_a_policy_that_takes_less_is_another_plan(registry):
    with pytest.raises(ArgumentError, match="Add --policy aggressive"):
        against(registry, chain(), chain(), policy="balanced")


def test_a_loser_says_why(registry):
    """A plan that was cut short: the site matches, and was not taken."""
    graph, plan, _ = taken(registry, chain())
    (lost,) = lock_of(registry, chain()).compare(graph, plan.limited(1)).lost
    assert lost.site.nodes == ("Add @ plus_b", "Relu @ bend_b") and lost.reason.startswith("not taken: ")


def test_a_renamed_site_has_moved(registry):
    found = against(registry, chain(), chain(names=("sum", "clip", "plus_b", "bend_b")))
    assert found.ok and found.kept == 1 and not found.new
    ((old, new),) = found.moved
    assert old.nodes == ("Add @ plus", "Relu @ bend") and new.nodes == ("Add @ sum", "Relu @ clip")
    assert list(found.lines()) == ["~ acme.add_relu moved: Add @ plus, Relu @ bend → Add @ sum, Relu @ clip"]


def test_a_new_site_elsewhere_makes_up_for_none(registry):
    """The first site is where it was and fuses no longer; another one appeared: that is no move."""
    extra = [node("Add", ["x", "b0"], ["z0"], name="other"), node("Relu", ["z0"], ["z"], name="other_bend")]
    found = against(registry, chain(), chain(outputs=("y", "v0", "z"), extra=extra))
    assert not found.ok and [x.site.nodes[0] for x in found.lost] == ["Add @ plus"]
    assert [s.nodes for s in found.new] == [("Add @ plus",), ("Add @ other", "Relu @ other_bend")]


def test_another_fusion_that_takes_all_of_it_replaces_it(registry):
    graph, plan, _ = taken(registry, chain())
    lock = Lock("m", "aggressive", (LockedSite("acme.old", ("Add @ plus", "Relu @ bend")),))
    found = lock.compare(graph, plan)
    assert found.ok and found.kept == 0
    assert found.replaced[0][1] == LockedSite("acme.add_relu", ("Add @ plus", "Relu @ bend"))
    assert "acme.old: Add @ plus, Relu @ bend → acme.add_relu" in next(iter(found.lines()))


def test_one_site_may_take_two(registry):
    """Neither of two locked sites is lost where one now takes both, and no two share its nodes."""
    graph, plan, _ = taken(registry, chain())
    one = (LockedSite("acme.add_relu", ("Add @ plus",)), LockedSite("acme.add_relu", ("Relu @ bend",)))
    assert Lock("m", "aggressive", one).compare(graph, plan).kept == 2
    twice = (LockedSite("acme.add_relu", ("Add @ plus",)), LockedSite("acme.old", ("Add @ plus",)))
    found = Lock("m", "aggressive", twice).compare(graph, plan)
    assert found.kept == 1 and not found.replaced and [x.site.fusion for x in found.lost] == ["acme.old"]


def test_sites_that_are_written_alike_are_counted(registry):
    """Numbers that an exporter appends are no part of a name: of three sites one was lost, whichever."""
    names = ("add", "relu", "add_1", "relu_1")
    lock = lock_of(registry, chain(names))
    assert lock.sites == (LockedSite("acme.add_relu", ("Add @ add", "Relu @ relu"), 2),)
    assert against(registry, chain(names), chain(("add_7", "relu_3", "add_9", "relu_12"))).kept == 2
    found = against(registry, chain(names), chain(names, outputs=("y", "v2")))
    (lost,) = found.lost
    assert (lost.count, lost.locked) == (1, 2) and found.kept == 1
    assert "(1 of 2)" in next(iter(found.lines()))


@pytest.mark.parametrize(
    ("source", "name", "found"),
    [
        ("/home/me/net.py:12 (layers.0.fc)", "linear.MatMul", "layers.0.fc"),
        ("/home/me/net.py:13 (layers.0.fc)", "linear_7.MatMul", "layers.0.fc"),
        ("/home/you/net.py:12", "mul_1", "net.py"),
        ("node_Add_12", "node_Add_12", "node_Add"),
        ("/layers.0/fc/MatMul", "/layers.0/fc/MatMul", "/layers.0/fc/MatMul"),
        ("", "Relu_3", "Relu"),
        ("val:1", "n", "val:1"),
    ],
)
def test_places(source, name, found):
    assert place(Node(name, "Add", (), (), source=source)) == found


# --- files ---------------------------------------------------------------------------------------------------------


def test_the_file(registry, tmp_path):
    lock = replace(lock_of(registry, chain()), model="net:build")
    lock.write(tmp_path / "lock.json")
    assert Lock.read(tmp_path / "lock.json") == lock
    data = json.loads((tmp_path / "lock.json").read_text())
    assert data["kind"] == "fusionreg coverage" and data["model"] == "net:build" and data["policy"] == "aggressive"
    assert data["sites"][0] == {"fusion": "acme.add_relu", "count": 1, "nodes": ["Add @ plus", "Relu @ bend"]}
    lines = (tmp_path / "lock.json").read_text().splitlines()
    assert sum("acme.add_relu" in line for line in lines) == 2  # a site a line: a diff shows which
    empty = Lock("m", "balanced", ())
    empty.write(tmp_path / "empty.json")
    assert Lock.read(tmp_path / "empty.json") == empty


def test_the_model_is_named_without_its_folder(registry):
    graph, plan, _ = taken(registry, chain())
    assert Lock.of("/home/me/m.onnx", graph, plan).model == "m.onnx"
    assert Lock.of("pkg.net:build", graph, plan).model == "pkg.net:build"


GOOD = {"kind": "fusionreg coverage", "version": 1, "model": "m", "policy": "balanced", "sites": []}
SITE = {"fusion": "a.b", "count": 1, "nodes": ["Add @ x"]}


@pytest.mark.parametrize(
    "content",
    [
        "", "no json", "[]", "null", "{}", json.dumps({**GOOD, "version": 2}), json.dumps({**GOOD, "kind": "x"}),
        json.dumps({**GOOD, "sites": 3}), json.dumps({**GOOD, "sites": [{}]}), json.dumps({**GOOD, "policy": 1}),
        json.dumps({**GOOD, "sites": [{**SITE, "count": 0}]}), json.dumps({**GOOD, "sites": [{**SITE, "count": True}]}),
        json.dumps({**GOOD, "sites": [{**SITE, "nodes": "Add"}]}),
        json.dumps({**GOOD, "sites": [{**SITE, "nodes": [1]}]}), json.dumps({**GOOD, "sites": [{**SITE, "fusion": 2}]}),
    ],
)  # fmt: skip
def test_what_is_no_lock(tmp_path, content):
    (tmp_path / "l.json").write_text(content)
    with pytest.raises(ModelError, match=r"cannot read lock .*l.json") as caught:
        Lock.read(tmp_path / "l.json")
    assert "--write-expect" in str(caught.value)
