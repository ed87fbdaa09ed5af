"""The reference is onnxruntime's own answer, or a reason; example inputs are ones that a model can be run on."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx_models import OPS, model, node

from fusionreg.core.errors import FusionregError, ModelError
from fusionreg.integrations.onnx import load, opening, reference

I64 = np.int64


def test_bfloat16_goes_in_and_out():
    import ml_dtypes

    proto = model([node("Cast", ["x"], ["y"], to=1)], {"x": ([3], "bfloat16")}, ["y"])
    x = np.array([1.0078125, -2, np.inf], ml_dtypes.bfloat16)
    np.testing.assert_array_equal(reference.run(proto, {"x": x})["y"], x.astype("f"))
    proto = model([node("Cast", ["x"], ["y"], to=16)], {"x": [0, 3]}, {"y": ([0, 3], "bfloat16")})
    for rows in (2, 0):
        found = reference.run(proto, {"x": np.full((rows, 3), 1.01, "f")})["y"]
        assert found.dtype == ml_dtypes.bfloat16 and found.shape == (rows, 3)
        assert (found.astype("f") == 1.0078125).all()


@pytest.mark.parametrize("kind", ["float16", "float64", "int8", "uint8", "int64", "bool"])
def test_other_dtypes(kind):
    proto = model([node("Identity", ["x"], ["y"])], {"x": ([2, 3], kind)}, {"y": ([2, 3], kind)})
    x = np.arange(6).reshape(2, 3).astype(kind)
    for given in (x, x.T.copy().T):  # any memory order
        found = reference.run(proto, {"x": given})["y"]
        assert found.dtype == x.dtype
        np.testing.assert_array_equal(found, x)


def test_no_kernel_is_a_reason_not_an_answer():
    proto = model([node("Relu", ["x"], ["y"])], {"x": ([3], "bfloat16")}, {"y": ([3], "bfloat16")})
    found = reference.run(proto, reference.example_inputs(load(proto)))
    assert isinstance(found, reference.Missing) and not found
    assert "Relu" in found.reason and "\n" not in found.reason


def test_a_failing_run_is_a_reason():
    nodes = [node("Gather", ["x", "i"], ["y"])]
    proto = model(nodes, {"x": [3], "i": ([1], "int64")}, ["y"])
    found = reference.run(proto, {"x": np.zeros(3, "f"), "i": np.array([7])})
    assert isinstance(found, reference.Missing) and "onnxruntime failed" in found.reason


def test_a_session_serves_many_runs():
    proto = model([node("Relu", ["x"], ["y"])], {"x": ["N"]}, ["y"])
    run = reference.Reference(proto)
    for size in (1, 4):
        assert run.run({"x": -np.ones(size, "f")})["y"].tolist() == [0.0] * size


def test_optimisations_are_off():
    """onnxruntime at its default level is what several of its bug reports are about."""
    run = reference.Reference(model([node("Relu", ["x"], ["y"])], {"x": [2]}, ["y"]))
    import onnxruntime as ort

    options = run.session.get_session_options()
    assert options.graph_optimization_level == ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    assert run.session.get_providers() == ["CPUExecutionProvider"]


def test_extent_zero_in_the_file_means_any():
    proto = model([node("Relu", ["x"], ["y"])], {"x": [0, 3]}, ["y"])
    before = proto.SerializeToString()
    assert reference.run(proto, {"x": np.ones((2, 3), "f")})["y"].shape == (2, 3)
    assert proto.SerializeToString() == before


# --- example inputs -------------------------------------------------------------------------------------------------


def test_examples_are_reproducible_and_fit():
    shapes = {"x": ["N", 3], "h": (["N"], "float16"), "m": ([2, 2], "bool"), "s": (["N"], "string")}
    outputs = {f"{name}_": (None, kind[1] if isinstance(kind, tuple) else "float32") for name, kind in shapes.items()}
    graph = load(model([node("Identity", [n], [n + "_"]) for n in shapes], shapes, outputs))
    one, same, other = (reference.example_inputs(graph, seed, {"N": 5}) for seed in (1, 1, 2))
    assert one["x"].shape == (5, 3) and one["h"].dtype == np.float16 and one["m"].dtype == bool
    np.testing.assert_array_equal(one["x"], same["x"])
    assert (one["x"] != other["x"]).any()
    assert reference.example_inputs(graph, 0)["x"].shape == (2, 3)


def test_indices_lie_inside_what_they_index():
    """Ids of an embedding of 5 rows, through a Cast and a Reshape; a one-hot depth; elements of a smaller table too."""
    constants = {"table": np.zeros((5, 4), "f"), "small": np.zeros((3, 4), "f"), "flat": np.array([-1], I64)}
    nodes = [
        node("Cast", ["ids"], ["wide"], to=7),
        node("Reshape", ["wide", "flat"], ["f"]),
        node("Gather", ["table", "f"], ["a"]),
        node("Gather", ["small", "types"], ["b"]),
        node("OneHot", ["hot", "depth", "values"], ["c"]),
    ]
    constants |= {"depth": np.array(4, I64), "values": np.array([0, 1], "f")}
    proto = model(
        nodes,
        {"ids": (["N", 50], "int32"), "types": ([60], "int64"), "hot": ([70], "int64")},
        ["a", "b", "c"],
        constants,
    )
    found = reference.example_inputs(load(proto), 0, {"N": 3})
    assert set(found["ids"].reshape(-1)) == {0, 1, 2, 3, 4} and found["ids"].dtype == np.int32
    assert set(found["types"]) == {0, 1, 2} and set(found["hot"]) == {0, 1, 2, 3}
    assert reference.run(proto, found)


def test_counts_and_extents_stay_small():
    nodes = [node("TopK", ["x", "k"], ["v", "i"]), node("Expand", ["v", "s"], ["y"])]
    proto = model(nodes, {"x": [2, 3], "k": ([1], "int64"), "s": ([2], "int64")}, ["y"])
    assert reference.run(proto, reference.example_inputs(load(proto)))


def test_unknown_rank_has_no_example():
    proto = model([node("Relu", ["x"], ["y"])], {"x": None}, ["y"])
    with pytest.raises(FusionregError, match="rank"):
        reference.example_inputs(load(proto))


def test_overridable_initialisers_are_left_to_their_default():
    proto = model([node("Add", ["x", "w"], ["y"])], {"x": [2], "w": [2]}, ["y"], {"w": np.ones(2, "f")})
    assert list(reference.example_inputs(load(proto))) == ["x"]


# --- opening --------------------------------------------------------------------------------------------------------


def test_opened_model_has_everything(tmp_path):
    proto = model([node("Sigmoid", ["x"], ["s"]), node("Mul", ["x", "s"], ["y"])], {"x": ["N", 3]}, ["y"])
    onnx.save(proto, tmp_path / "net.onnx")
    opened = opening.open_path(tmp_path / "net.onnx", ops=OPS)
    assert opened.name == "net" and [n.op for n in opened.graph.nodes] == ["Swish"] and not opened.reason
    x = opened.example(0)
    np.testing.assert_allclose(opened.reference(x)["y"], x["x"] / (1 + np.exp(-x["x"])), rtol=1e-6)
    assert opening.open_object(proto, ops=OPS).graph.inputs == ("x",)
    with pytest.raises(ModelError, match="int"):
        opening.open_object(3, ops=OPS)


def test_opened_model_without_a_reference_says_why():
    proto = model([node("Relu", ["x"], ["y"])], {"x": ([3], "bfloat16")}, {"y": ([3], "bfloat16")})
    opened = opening.open_object(proto, ops=OPS)
    with pytest.raises(ModelError, match=r"no reference.*Relu"):
        opened.reference(opened.example(0))


def test_a_reference_that_fails_is_skipped_not_passed(tmp_path, monkeypatch):
    """The original itself cannot be run on these inputs: that is no verdict on ours."""
    from fusionreg.api import load_registry
    from fusionreg.checking import check_model

    onnx.save(model([node("Relu", ["x"], ["y"])], {"x": [4]}, ["y"]), tmp_path / "m.onnx")
    assert check_model(load_registry(device="sim"), str(tmp_path / "m.onnx")).row.status.name == "PASSED"
    monkeypatch.setattr(reference.Reference, "run", lambda self, inputs: reference.Missing("out of memory"))
    row = check_model(load_registry(device="sim"), str(tmp_path / "m.onnx")).row
    assert row.status.name.startswith("SKIPPED") and row.reason == "out of memory"
