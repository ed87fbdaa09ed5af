"""Whole models against their original: both rules, each with a value that it must refuse; and what has no original."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
import plugin_kit
import pytest
from onnx_models import model, node

import fusionreg
from fusionreg import checking
from fusionreg.checking import check_model, compare
from fusionreg.core.errors import ModelError
from fusionreg.core.frozen import FrozenDict
from fusionreg.core.proof.report import Status
from fusionreg.integrations.onnx import opening

RNG = np.random.default_rng(31)


def arrays(dtype="f", size=256):
    """The graph in float64, and an original and a chain that round it as ``dtype`` does."""
    exact = RNG.normal(size=size)
    return exact, exact.astype(dtype), exact.astype(dtype)


def judge(got, expected, exact, chain, narrowest="float32"):
    return compare({"y": got}, {"y": expected}, {"y": exact}, {"y": chain}, narrowest)


def test_rounding_passes():
    exact, original, chain = arrays()
    verdict = judge(chain.copy(), original, exact, chain)
    assert verdict.status is Status.PASSED and verdict.reason == "" and verdict.max_abs == 0


def test_the_first_rule_original_against_what_was_read():
    """One element of the original is not what our graph computes: the reading is wrong, even if we agree with it."""
    exact, original, chain = arrays()
    original[7] += 0.01
    verdict = judge(original.copy(), original, exact, chain)
    assert verdict.status is Status.INCORRECT_NUMERICAL and "the original is 0.01 from float64" in verdict.reason
    original[7] = chain[7] + 1e-5  # what summing in another order explains
    assert judge(chain.copy(), original, exact, chain).status is Status.PASSED


def test_the_first_rule_where_the_model_quantises():
    """Float64 rounded one value the other way, a whole step; the chain went the way of the original."""
    exact = RNG.normal(size=256)
    original = exact.astype("f")
    original[7] += 0.1
    assert judge(original.copy(), original, exact, original.copy()).status is Status.PASSED
    chain = original.copy()
    chain[9] += 0.1  # a chain that is elsewhere too explains nothing
    found = judge(chain, original, exact, chain)
    assert found.status is Status.INCORRECT_NUMERICAL and "as read" in found.reason


def test_functions_into_the_unit_interval_are_right_to_one_ulp_of_one():
    """onnxruntime's Sigmoid of -20 is 0: beside float64's 2e-9 that is all of it, and nothing beside 1."""
    exact = np.full(4, 2e-9)
    given = ({"y": exact.astype("f")}, {"y": np.zeros(4, "f")}, {"y": exact}, {"y": exact.astype("f")}, "float32")
    assert compare(*given).status is Status.INCORRECT_NUMERICAL
    assert compare(*given, bounded={"y"}).status is Status.PASSED
    off = ({"y": exact.astype("f")}, {"y": np.full(4, 1e-6, "f")}, *given[2:])
    assert compare(*off, bounded={"y"}).status is Status.INCORRECT_NUMERICAL


@pytest.mark.parametrize(("narrowest", "off"), [("float32", 3e-4), ("float16", 3e-2), ("bfloat16", 0.12)])
def test_the_first_rule_knows_the_dtype(narrowest, off):
    exact, original, chain = arrays()
    exact[0] = original[0] = chain[0] = 1.5
    original = original + np.float32(off)
    found = judge(original.copy(), original, exact, chain, narrowest)
    assert found.status is Status.INCORRECT_NUMERICAL and "as read" in found.reason
    wider = {"float32": "float16", "float16": "bfloat16", "bfloat16": "bfloat16"}[narrowest]
    if wider != narrowest:
        assert judge(original.copy(), original, exact, chain, wider).status is Status.PASSED


def test_the_second_rule_fused_against_float64():
    """The original is right; one element of the fused run is off by more than twice what the chain is."""
    exact, original, chain = arrays()
    got = chain.copy()
    got[99] += 1e-5
    verdict = judge(got, original, exact, chain)
    assert verdict.status is Status.INCORRECT_NUMERICAL and "from float64 — at most" in verdict.reason
    assert "y: " in verdict.reason and "as read" not in verdict.reason and verdict.max_abs > 9e-6
    chain[3] += 1e-5  # a chain that is as far off as that allows it
    assert judge(got, original, exact, chain).status is Status.PASSED


@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf])
def test_special_values_are_kept(special):
    exact, original, chain = arrays()
    exact[5], original[5], chain[5] = special, special, special
    got = chain.copy()
    assert judge(got, original, exact, chain).status is Status.PASSED
    got[5] = 0.0
    assert judge(got, original, exact, chain).status is Status.INCORRECT_NUMERICAL
    got[5] = special
    got[6] = special
    assert judge(got, original, exact, chain).status is Status.INCORRECT_NUMERICAL


@pytest.mark.parametrize(
    ("got", "status", "says"),
    [
        (np.zeros((4, 1), "f"), Status.INCORRECT_SHAPE, "(4, 1) — expected (4,)"),
        (np.zeros(4), Status.INCORRECT_DTYPE, "float64 — expected float32"),
    ],
)
def test_shape_and_dtype(got, status, says):
    zeros = np.zeros(4, "f")
    verdict = judge(got, zeros, zeros.astype("f8"), zeros)
    assert verdict.status is status and says in verdict.reason


@pytest.mark.parametrize("kind", ["int64", "bool", "str", "object"])
def test_what_is_no_float_is_equal_or_wrong(kind):
    labels, other = np.array([1, 1, 0]).astype(kind), np.array([1, 0, 0]).astype(kind)
    assert judge(labels.copy(), labels, labels, labels).status is Status.PASSED
    assert judge(other, labels, labels, labels).status is Status.INCORRECT_NUMERICAL
    assert judge(other, other, labels, labels).status is Status.INCORRECT_NUMERICAL  # it was misread
    assert judge(other, other, labels, other).status is Status.PASSED  # rounding decided a tie, in both alike


def test_large_integers_keep_every_bit():
    big = np.array([2**60])
    assert judge(big + 1, big, big, big).status is Status.INCORRECT_NUMERICAL


def test_complex_numbers():
    exact, original, chain = (np.array(v, "complex128") for v in (1 + 2j, 1 + 2j, 1 + 2j))
    original, chain = original.astype("complex64"), chain.astype("complex64")
    assert judge(chain.copy(), original, exact, chain).status is Status.PASSED
    assert judge(chain + np.complex64(0.1j), original, exact, chain).status is Status.INCORRECT_NUMERICAL


def test_an_original_that_overflowed():
    """In float16 the original and the chain are infinite where float64 is not: the fused model may be either, and has
    no more room elsewhere for that."""
    exact = np.array([1.0, 131.125, -2.0])
    original = np.array([1.0, np.inf, -2.0], "float16")
    chain = original.copy()
    for value in (np.inf, 131.125):
        got = np.array([1.0, value, -2.0], "float16")
        assert judge(got, original, exact, chain, "float16").status is Status.PASSED
    for wrong in ([1.0, 140.0, -2.0], [1.0, -np.inf, -2.0], [1.0, np.nan, -2.0], [1.5, np.inf, -2.0]):
        got = np.array(wrong, "float16")
        assert judge(got, original, exact, chain, "float16").status is Status.INCORRECT_NUMERICAL, wrong
    chain = np.array([1.0, 131.125, -2.0], "float16")  # nothing of ours overflows there: the model was misread
    assert judge(original.copy(), original, exact, chain, "float16").status is Status.INCORRECT_NUMERICAL


def test_every_output_is_compared():
    exact, original, chain = arrays()
    bad = chain + np.float32(1)
    named = {"y": original, "z": original}
    verdict = compare({"y": chain, "z": bad}, named, {"y": exact, "z": exact}, {"y": chain, "z": chain}, "float32")
    assert verdict.status is Status.INCORRECT_NUMERICAL and verdict.reason.startswith("z: ")
    missing = compare({"y": chain}, named, {"y": exact, "z": exact}, {"y": chain, "z": chain}, "float32")
    assert missing.status.failed and "z" in missing.reason


# --- files ---------------------------------------------------------------------------------------------------------

WRONG = plugin_kit.ADD_RELU.replace("bias[i % N]", "bias[0]")


def kit(folder, template):
    catalog = plugin_kit.catalog(folder, {"k.cu.j2": template}, plugin_kit.add_relu())
    return fusionreg.Registry(catalog)


@pytest.fixture
def path(tmp_path):
    nodes = [node("Add", ["x", "b"], ["s"]), node("Relu", ["s"], ["r"]), node("Neg", ["r"], ["y"])]
    constants = {"b": RNG.normal(size=8).astype("f")}
    onnx.save(model(nodes, {"x": ["N", 8]}, {"y": ["N", 8]}, constants), tmp_path / "m.onnx")
    return str(tmp_path / "m.onnx")


def test_a_right_kernel_passes_and_its_site_is_named(tmp_path, path):
    checked = check_model(kit(tmp_path / "plugin", plugin_kit.ADD_RELU), path, explain=True)
    row = checked.row
    assert row.status is Status.PASSED and row.model == path and row.nodes == 3
    assert [(s["fusion"], s["kernel"], s["status"]) for s in row.sites] == [
        ("acme.add_relu", "acme.add_relu/plain", "fused")
    ]
    assert len(row.sites[0]["nodes"]) == 2 and row.facts["device"] == "sim"


def test_a_wrong_kernel_fails(tmp_path, path):
    row = check_model(kit(tmp_path / "plugin", WRONG), path).row
    assert row.status is Status.INCORRECT_NUMERICAL and row.sites[0]["status"] == "fused"
    assert row.max_abs > 0.1 and "from float64" in row.reason


def test_a_wrong_reading_fails(tmp_path, path, monkeypatch):
    """Our graph has another constant than the file: fused, chain and float64 agree, and the original does not."""
    load = opening.load

    def misread(*args, **kwargs):
        graph = load(*args, **kwargs)
        return replace(graph, constants=FrozenDict({k: v * np.float32(1.01) for k, v in graph.constants.items()}))

    monkeypatch.setattr(opening, "load", misread)
    row = check_model(kit(tmp_path / "plugin", plugin_kit.ADD_RELU), path).row
    assert row.status is Status.INCORRECT_NUMERICAL and "as read" in row.reason


def test_without_a_reference_it_is_skipped(tmp_path, path, monkeypatch):
    opened = checking.open_model

    def without(*args, **kwargs):
        return replace(opened(*args, **kwargs), reference=None, reason="onnxruntime is not installed")

    monkeypatch.setattr(checking, "open_model", without)
    row = check_model(kit(tmp_path / "plugin", plugin_kit.ADD_RELU), path).row
    assert row.status is Status.SKIPPED_UNSUPPORTED and row.reason == "onnxruntime is not installed"
    assert row.sites[0]["status"] == "fused"  # it ran all the same

    def fails(inputs):
        raise ModelError("no reference", "m", "onnxruntime refuses it")

    monkeypatch.setattr(checking, "open_model", lambda *a, **k: replace(opened(*a, **k), reference=fails))
    row = check_model(kit(tmp_path / "plugin2", plugin_kit.ADD_RELU), path).row
    assert row.status is Status.SKIPPED_UNSUPPORTED and row.reason == "onnxruntime refuses it"


def test_another_seed_is_another_input(tmp_path, path):
    registry = kit(tmp_path / "plugin", WRONG)
    first, second, again = (check_model(registry, path, seed=s).row.max_abs for s in (0, 1, 0))
    assert first == again != second


def test_policy_off_leaves_the_model_alone(tmp_path, path):
    checked = check_model(kit(tmp_path / "plugin", WRONG), path, policy="off")
    assert checked.row.status is Status.PASSED and checked.row.sites == () and not checked.plan.chosen


def test_the_device_that_auto_is(monkeypatch):
    """A GPU where the driver finds one and torch is there to hold arrays on it, else the simulator."""

    class Driver:
        count = 0

        def device_count(self):
            return self.count

    made = Driver()
    monkeypatch.setattr(checking, "driver", lambda: made)
    assert [checking.chosen_device(word) for word in ("sim", "cuda", "auto")] == ["sim", "cuda", "sim"]
    made.count = 1
    assert [checking.chosen_device(word) for word in ("sim", "cuda", "auto")] == ["sim", "cuda", "cuda"]
    monkeypatch.setattr(checking, "find_spec", lambda name: None)
    assert checking.chosen_device("auto") == "sim"

    def none():
        raise ModelError("cannot use", "a GPU")

    monkeypatch.setattr(checking, "driver", none)
    assert checking.chosen_device("auto") == "sim"
