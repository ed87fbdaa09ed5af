"""NonMaxSuppression, Unique, MaxUnpool, Col2Im, CenterCropPad on random input: against peers, and edges by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fusionreg.core.errors import GraphError
from fusionreg.core.ir import Value
from fusionreg.core.ops import backend_of, default_vocabulary, infer, numpy_backend

ort = pytest.importorskip("onnxruntime")
OPS = default_vocabulary()
RNG = np.random.default_rng(5)


def ours(op: str, *arrays: np.ndarray | None, to: str = "numpy", **attributes):
    xp = numpy_backend() if to == "numpy" else backend_of(torch.zeros(1))
    values = [None if a is None else Value(f"i{k}", a.dtype.name, a.shape) for k, a in enumerate(arrays)]
    known = {k: a for k, a in enumerate(arrays) if a is not None and a.dtype == np.int64 and a.ndim == 1}
    types = infer(OPS[op], values, attributes, known)
    given = [None if a is None else xp.asarray(a) for a in arrays]
    found = OPS[op].meaning(xp, *given, **{**OPS[op].attributes, **attributes})
    found = [xp.to_numpy(y) for y in (found if isinstance(found, tuple) else (found,))]
    for (dtype, shape), y in zip(types, found, strict=True):
        assert y.dtype.name == dtype
        assert all(d in (None, n) for d, n in zip(shape, y.shape, strict=True))
    return found if len(found) > 1 else found[0]


@pytest.mark.parametrize("center", [0, 1])
@pytest.mark.parametrize("floor", [None, 0.4])
def test_non_max_suppression_is_onnxruntimes(center: int, floor: float | None) -> None:
    from onnx import helper

    boxes = RNG.uniform(0, 4, (2, 40, 4)).astype(np.float32)
    scores = RNG.uniform(0, 1, (2, 3, 40)).astype(np.float32)
    most, overlap = np.array([6], np.int64), np.array([0.3], np.float32)
    feed = {"b": boxes, "s": scores, "m": most, "o": overlap}
    if floor is not None:
        feed["f"] = np.array([floor], np.float32)
    infos = [
        helper.make_tensor_value_info(k, helper.np_dtype_to_tensor_dtype(v.dtype), v.shape) for k, v in feed.items()
    ]
    node = helper.make_node("NonMaxSuppression", list(feed), ["y"], center_point_box=center)
    graph = helper.make_graph([node], "g", infos, [helper.make_tensor_value_info("y", 7, None)])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 11)], ir_version=8)
    want = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, feed)[0]
    assert len(want) > 10
    for to in ("numpy", "torch"):
        np.testing.assert_array_equal(ours("NonMaxSuppression", *feed.values(), to=to, center_point_box=center), want)


def test_non_max_suppression_of_nothing_and_of_equals() -> None:
    boxes, scores = np.array([[[0, 0, 1, 1], [5, 5, 6, 6], [0, 0, 1, 1]]], np.float32), np.ones((1, 1, 3), np.float32)
    assert ours("NonMaxSuppression", boxes, scores).shape == (0, 3)  # no limit given means none at all
    most, overlap = np.array([9], np.int64), np.array([0.5], np.float32)
    kept = ours("NonMaxSuppression", boxes, scores, most, overlap)
    assert kept.tolist() == [[0, 0, 0], [0, 0, 1]]  # of equal scores the lower box, and its twin is suppressed
    empty = ours("NonMaxSuppression", boxes[:, :0], scores[..., :0], most, overlap)
    assert empty.shape == (0, 3) and empty.dtype == np.int64


@pytest.mark.parametrize("axis", [None, 0, 1, -1])
@pytest.mark.parametrize("order", [0, 1])
def test_unique_puts_its_input_together_again(axis: int | None, order: int) -> None:
    x = RNG.integers(0, 3, (4, 2, 3))
    y, first, inverse, counts = ours("Unique", x, axis=axis, sorted=order)
    flat, along = (x.reshape(-1), 0) if axis is None else (x, axis)
    np.testing.assert_array_equal(np.take(y, inverse, axis=along), flat)
    np.testing.assert_array_equal(np.take(flat, first, axis=along), y)
    assert counts.sum() == flat.shape[along] and (np.bincount(inverse) == counts).all()
    if not order:
        assert (np.diff(first) > 0).all()
    if axis is None and order:
        np.testing.assert_array_equal(y, np.unique(x))
    again = ours("Unique", x, to="torch", axis=axis, sorted=order)
    for a, b in zip((y, first, inverse, counts), again, strict=True):
        np.testing.assert_array_equal(a, b)


def test_max_unpool_undoes_max_pool() -> None:
    x = RNG.standard_normal((2, 3, 6, 8)).astype(np.float32)
    pooled, index = torch.nn.functional.max_pool2d(torch.tensor(x), 2, return_indices=True)
    want = torch.nn.functional.max_unpool2d(pooled, index, 2).numpy()
    plane = np.arange(6).reshape(2, 3, 1, 1) * 48  # torch counts inside a plane, ONNX in the whole tensor
    for to in ("numpy", "torch"):
        got = ours("MaxUnpool", pooled.numpy(), index.numpy() + plane, to=to, kernel_shape=(2, 2), strides=(2, 2))
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    ("pads", "strides", "dilations"), [((0, 0, 0, 0), (1, 1), (1, 1)), ((1, 2, 1, 2), (2, 1), (1, 2))]
)
def test_col2im_is_torchs_fold(pads, strides, dilations) -> None:
    image, block = (7, 8), (2, 3)
    unfold = {"kernel_size": block, "dilation": dilations, "padding": pads[:2], "stride": strides}
    columns = torch.nn.functional.unfold(torch.ones((2, 3, *image)), **unfold)
    x = RNG.standard_normal(tuple(columns.shape)).astype(np.float32)
    want = torch.nn.functional.fold(torch.tensor(x), image, **unfold).numpy()
    for to in ("numpy", "torch"):
        shapes = np.array(image, np.int64), np.array(block, np.int64)
        got = ours("Col2Im", x, *shapes, to=to, pads=pads, strides=strides, dilations=dilations)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_what_does_not_fit_is_refused() -> None:
    image, block = np.array([7, 8], np.int64), np.array([2, 3], np.int64)
    with pytest.raises(GraphError, match="7 rows"):
        ours("Col2Im", np.ones((1, 7, 4), np.float32), image, block)
    with pytest.raises(ValueError, match="5 columns"):
        ours("Col2Im", np.ones((1, 6, 5), np.float32), image, block)
    with pytest.raises(GraphError, match="1 extents for 2 axes"):
        ours("CenterCropPad", np.ones((2, 3), np.float32), np.array([4], np.int64))
    with pytest.raises(GraphError, match="rank 2"):
        ours("NonMaxSuppression", np.ones((2, 4), np.float32), np.ones((1, 1, 2), np.float32))


def test_center_crop_pad_puts_the_odd_element_at_the_end() -> None:
    x = np.arange(5, dtype=np.float32)
    assert ours("CenterCropPad", x, np.array([2], np.int64)).tolist() == [1, 2]
    assert ours("CenterCropPad", x, np.array([8], np.int64)).tolist() == [0, 0, 1, 2, 3, 4, 0, 0][:1] + x.tolist() + [
        0,
        0,
    ]
