"""Random inputs for models with symbolic axes: extents that the original takes, and that leave something to compare."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx_models import model, node

from fusionreg.core.ops import default_vocabulary
from fusionreg.integrations.onnx import opening

I64 = np.int64


def extents(m: onnx.ModelProto) -> dict[str, tuple[int, ...]]:
    opened = opening.open_object(m, ops=default_vocabulary())
    inputs = opened.example(0)
    assert opened.reference(inputs)
    return {k: v.shape for k, v in inputs.items()}


def test_without_windows_every_symbolic_axis_is_two() -> None:
    assert extents(model([node("Relu", ["x"], ["y"])], {"x": ["N", "L", 3]}, ["y"])) == {"x": (2, 2, 3)}


@pytest.mark.parametrize(("width", "chosen"), [(3, 64), (65, 256), (257, 512)])
def test_windows_fit(width: int, chosen: int) -> None:
    """Without padding, a window of more than two elements needs a longer axis; the batch stays small."""
    weights = {"w": np.ones((1, 1, width), np.float32)}
    m = model([node("Conv", ["x", "w"], ["y"])], {"x": ["N", 1, "L"]}, ["y"], weights)
    assert extents(m) == {"x": (2, 1, chosen)}


def test_axes_that_only_a_small_extent_fits() -> None:
    """A table of four positions beside a convolution: 64 is refused by the original, 2 is not."""
    constants = {
        "w": np.ones((1, 1, 1), np.float32), "p": np.ones((1, 4), np.float32),
        "z": np.zeros(1, I64), "a": np.array([2], I64),
    }  # fmt: skip
    constants |= {"zero": np.array(0, I64), "one": np.array(1, I64)}
    nodes = [
        node("Conv", ["x", "w"], ["c"]), node("Shape", ["x"], ["s"], start=2, end=3),
        node("Squeeze", ["s", "z"], ["n"]), node("Range", ["zero", "n", "one"], ["r"]),
        node("Gather", ["p", "r"], ["g"], axis=1), node("Add", ["c", "g"], ["y"]),
    ]  # fmt: skip
    assert extents(model(nodes, {"x": ["N", 1, "L"]}, ["y"], constants, 18)) == {"x": (2, 1, 2)}


def test_a_state_has_its_batch_second() -> None:
    """``[layers B H]``: the batch of a recurrent state is that of the input, whatever extent the rest gets."""
    constants = {"w": np.ones((1, 1, 9), np.float32), "i": np.array(0, I64)}
    nodes = [
        node("Conv", ["x", "w"], ["c"]), node("ReduceMax", ["c"], ["m"], keepdims=0, axes=[2]),
        node("Gather", ["h", "i"], ["g"]), node("Add", ["m", "g"], ["y"]),
    ]  # fmt: skip
    shapes = {"x": ["N", 1, "L"], "h": [2, "M", 1]}
    assert extents(model(nodes, shapes, ["y"], constants, 13)) == {"x": (2, 1, 64), "h": (2, 2, 1)}


def test_outputs_without_elements_are_the_last_resort() -> None:
    """At 2 nothing is left of the slice; at 64 there is."""
    constants = {"s": np.array([8], I64), "e": np.array([1000], I64), "a": np.array([1], I64)}
    m = model([node("Slice", ["x", "s", "e", "a"], ["y"])], {"x": ["N", "L"]}, ["y"], constants)
    assert extents(m) == {"x": (2, 64)}


def test_the_original_runs_once_for_inputs_that_were_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []
    run = opening.Reference.run
    monkeypatch.setattr(opening.Reference, "run", lambda self, inputs: runs.append(1) or run(self, inputs))
    opened = opening.open_object(model([node("Relu", ["x"], ["y"])], {"x": [2, 3]}, ["y"]), ops=default_vocabulary())
    inputs = opened.example(0)
    first = opened.reference(dict(inputs))
    assert len(runs) == 1
    np.testing.assert_array_equal(opened.reference(dict(inputs))["y"], first["y"])
    assert len(runs) == 2  # kept for one use: it may be large
