"""A stored plan applied to a model: the same fused graph, and a refusal where it does not fit."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from onnx_models import model, node

import fusionreg
from fusionreg.core.errors import PlanError
from fusionreg.core.planner.plan import Plan

RNG = np.random.default_rng(11)
CONSTANTS = {
    "w1": RNG.normal(size=(16, 32)).astype("f"), "b1": RNG.normal(size=32).astype("f"),
    "g": RNG.normal(size=32).astype("f"), "b": RNG.normal(size=32).astype("f"),
}  # fmt: skip


def mlp(rows=4):
    """A product with bias and activation, a normalisation with operators behind it, and a chain of point-wise ones."""
    nodes = [
        node("MatMul", ["x", "w1"], ["m"], name="product"),
        node("Add", ["m", "b1"], ["a"], name="bias"),
        node("Relu", ["a"], ["r"], name="act"),
        node("LayerNormalization", ["r", "g", "b"], ["n"], name="norm"),
        node("Neg", ["n"], ["p"], name="neg"),
        node("Exp", ["p"], ["e"], name="exp"),
        node("Mul", ["e", "r"], ["y"], name="mul"),
        node("Abs", ["x"], ["q"], name="abs"),
        node("Tanh", ["q"], ["z"], name="tanh"),
    ]
    return model(nodes, {"x": [rows, 16]}, {"y": [rows, 32], "z": [rows, 16]}, CONSTANTS)


@pytest.fixture(scope="module")
def registry():
    return fusionreg.load_registry(device="sim", allow=("gemm", "norm", "pointwise"))


@pytest.fixture(scope="module")
def stored(registry):
    return registry.plan(mlp())


def test_what_is_stored_is_applied(registry, stored):
    assert any(m.captured for m in stored) and len(stored) >= 2
    again = Plan.from_dict(json.loads(json.dumps(stored.to_dict())))
    assert again == stored
    fresh = fusionreg.load_registry(device="sim", allow=("gemm", "norm", "pointwise"))  # has derived no region yet
    fused = fresh.fuse(mlp(), plan=again)
    assert fused.plan == stored
    assert [n.op for n in fused.graph.nodes] == [n.op for n in registry.fuse(mlp()).graph.nodes]
    less = fresh.fuse(mlp(), plan=again.limited(1))
    assert len(less.sites) == 1 and less.sites[0].nodes == stored.chosen[0].nodes


def test_another_graph_is_refused(registry, stored):
    with pytest.raises(PlanError, match="digest"):
        registry.fuse(mlp(rows=5), plan=stored)


def test_plugins_that_do_not_find_its_sites_are_refused(stored):
    other = fusionreg.load_registry(device="sim", allow=("norm",))
    with pytest.raises(PlanError, match="is not found there"):
        other.fuse(mlp(), plan=stored)


def test_a_site_that_is_bound_otherwise_is_refused(registry, stored):
    first = stored.chosen[0]
    forged = replace(stored, chosen=(replace(first, spelling=first.spelling + 1), *stored.chosen[1:]))
    with pytest.raises(PlanError, match="is another match there"):
        registry.fuse(mlp(), plan=forged)


def test_fuel_of_the_environment_holds_for_stored_plans_too(registry, stored, monkeypatch):
    monkeypatch.setenv("FUSIONREG_FUEL", "1")
    assert len(registry.fuse(mlp(), plan=stored).sites) == 1
    assert len(registry.plan(mlp())) == 1 and len(registry.plan(mlp(), fuel=2)) == 2


def test_executors_by_name(registry):
    beside = registry.plan(mlp(), executor="inductor")
    assert beside.executor == "inductor" and not any(m.captured for m in beside)
    assert {m.fusion.split(".")[0] for m in registry.plan(mlp(), executor="eager")} >= {"pointwise"}
    refused = registry.plan(mlp(), refuses=lambda m: "not that one" if m.fusion.startswith("gemm") else None)
    assert not any(m.fusion.startswith("gemm") for m in refused)
    assert "not that one" in {x.reason for x in refused.losers}


def test_sites_of_one_problem_are_asked_about_once(registry, monkeypatch):
    nodes, x = [], "x"
    for i in range(6):
        nodes += [node("MatMul", [x, "w"], [f"m{i}"]), node("Relu", [f"m{i}"], [f"r{i}"])]
        x = f"r{i}"
    wide = [node("MatMul", [x, "v"], ["m"]), node("Relu", ["m"], ["y"])]
    weights = {"w": np.ones((16, 16), "f"), "v": np.ones((16, 32), "f")}
    deep = model([*nodes, *wide], {"x": [4, 16]}, {"y": [4, 32]}, weights)
    asked = []
    refusal = registry.runtime.refusal
    monkeypatch.setattr(registry.runtime, "refusal", lambda m: asked.append((m.root, m.fusion)) or refusal(m))
    assert len(registry.plan(deep)) == 7
    whole = [m for m in registry.match(deep) if len(m.nodes) == 2]
    assert len(whole) >= 7 and len(asked) < len(whole)
    assert len(set(asked)) == len(asked)
