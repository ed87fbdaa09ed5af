"""``fusionreg bisect``: it names the planted site, and tells when no site is to blame."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import onnx
import plugin_kit
import pytest
from onnx_models import model, node

from fusionreg.api import load_registry
from fusionreg.bisecting import CHAIN, ORIGINAL, bisect
from fusionreg.core.errors import ModelError, SimulatorError
from fusionreg.integrations import open_model

WIDTHS = (8, 16, 24, 32, 40, 8)


@pytest.fixture
def deep_model(tmp_path):
    """Five layers, each a product and a site of ``acme.add_relu``, every one of another width."""
    rng = np.random.default_rng(5)
    nodes, constants, x = [], {}, "x"
    for i, (k, n) in enumerate(itertools.pairwise(WIDTHS)):
        constants |= {f"w{i}": rng.normal(size=(k, n)).astype("f"), f"b{i}": rng.normal(size=n).astype("f")}
        nodes += [
            node("MatMul", [x, f"w{i}"], [f"m{i}"], name=f"product{i}"),
            node("Add", [f"m{i}", f"b{i}"], [f"a{i}"], name=f"add{i}"),
            node("Relu", [f"a{i}"], [f"r{i}"], name=f"relu{i}"),
        ]
        x = f"r{i}"
    path = tmp_path / "deep.onnx"
    onnx.save(model(nodes, {"x": [4, 8]}, {x: [4, 8]}, constants), path)
    return path


def plant(site, factor):
    """The kernel with a result that is ``factor`` times the right one where a row has 24 elements."""
    wrong = plugin_kit.ADD_RELU.replace("fr::relu(", f"(N == 24 ? {factor}f : 1.0f) * fr::relu(")
    site.write({"fusionreg_acme/k.cu.j2": wrong})


def test_it_names_the_planted_site_and_its_kernel(cli, acme, deep_model):
    plant(acme, 1.01)
    ran = cli("bisect", deep_model, "--device", "sim", "--json")
    assert ran.code == 1
    found = ran.json
    assert (found["sites"], found["index"], found["fusion"]) == (5, 1, "acme.add_relu")
    assert found["nodes"] == ["add1", "relu1"] and found["kernel"] == "acme.add_relu/plain"
    assert found["against"] == ORIGINAL and not found["unfused"]
    assert 1e-3 < found["max_rel"] < 1e-1 and "from float64" in found["reason"]
    assert found["runs"] <= 5
    told = cli("bisect", deep_model, "--device", "sim")
    assert told.code == 1
    assert told.out.startswith("site 2 of 5 changes the result: acme.add_relu at relu1")
    assert "kernel acme.add_relu/plain" in told.out


def test_the_tolerance_is_the_caller_s(cli, acme, deep_model):
    plant(acme, 1.01)
    assert cli("bisect", deep_model, "--device", "sim", "--tolerance", "0.5").code == 0
    strict = cli("bisect", deep_model, "--device", "sim", "--tolerance", "1e-4", "--json")
    assert strict.code == 1 and strict.json["nodes"] == ["add1", "relu1"]


def test_where_every_site_is_right(cli, acme, deep_model):
    ran = cli("bisect", deep_model, "--device", "sim")
    assert ran.code == 0 and ran.out.startswith("all 5 sites fused, the result is that of the original")


def test_where_nothing_is_fused(cli, acme, plain_model):
    ran = cli("bisect", plain_model, "--device", "sim")
    assert ran.code == 5 and "nothing in" in ran.err


def test_a_failing_run_is_a_bad_one(acme, deep_model, monkeypatch):
    registry = load_registry(device="sim")
    opened = open_model(str(deep_model), ops=registry.catalog.ops)
    execute = registry.runtime.execute

    def faulty(fusion, args, attributes):
        if args[1].shape == (32,):
            raise SimulatorError("fault in", fusion, "a write beyond y")
        return execute(fusion, args, attributes)

    monkeypatch.setattr(registry.runtime, "execute", faulty)
    found = bisect(registry, opened, registry.plan(opened.graph), device="sim")
    assert found.nodes == ("add2", "relu2") and found.reason == "fault in acme.add_relu: a write beyond y."


def test_where_the_original_itself_is_another(acme, deep_model):
    """What is read is not what the original computes: no fusion is to blame."""
    registry = load_registry(device="sim")
    opened = open_model(str(deep_model), ops=registry.catalog.ops)
    plan = registry.plan(opened.graph)
    assert len(plan) == 5
    other = replace(opened, reference=lambda inputs: {k: v + 1 for k, v in opened.reference(inputs).items()})
    found = bisect(registry, other, plan, device="sim")
    assert found.unfused and found.index is None and str(found).startswith("no fusion is to blame")

    def none(inputs):
        raise ModelError("cannot run", "it", "no reference")

    alone = bisect(registry, replace(opened, reference=none), plan, device="sim")
    assert alone.index is None and alone.against == CHAIN and alone.max_rel < 1e-5


def test_fuel_cuts_a_plan_off(acme, deep_model, monkeypatch, cli):
    monkeypatch.setenv("FUSIONREG_FUEL", "2")
    registry = load_registry(device="sim")
    fused = registry.fuse(deep_model)
    assert [s.nodes[-1] for s in fused.sites] == ["relu0", "relu1"]
    assert [x.match.root for x in fused.plan.losers if x.reason == "fuel"] == ["relu2", "relu3", "relu4"]
    assert fused.plan.fuel == 2 and "fuel 2" in str(fused.plan)
    monkeypatch.setenv("FUSIONREG_FUEL", "two")
    ran = cli("match", deep_model)
    assert ran.code == 1 and "FUSIONREG_FUEL='two'" in ran.err
