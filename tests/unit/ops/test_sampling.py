"""GridSample, AffineGrid and RoiAlign on random input: against torch, onnxruntime and onnx.reference."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from onnx import helper
from onnx.reference import ReferenceEvaluator

from fusionreg.core.errors import GraphError
from fusionreg.core.ir import Value
from fusionreg.core.ops import backend_of, default_vocabulary, infer, numpy_backend

OPS = default_vocabulary()
RNG = np.random.default_rng(11)


def ours(op: str, *arrays: np.ndarray, to: str = "numpy", **attributes) -> np.ndarray:
    xp = numpy_backend() if to == "numpy" else backend_of(torch.zeros(1))
    values = [Value(f"i{k}", a.dtype.name, a.shape) for k, a in enumerate(arrays)]
    ((dtype, shape),) = infer(OPS[op], values, attributes, {k: a for k, a in enumerate(arrays) if a.dtype == np.int64})
    given = [xp.asarray(a) for a in arrays]
    y = xp.to_numpy(OPS[op].meaning(xp, *given, **{**OPS[op].attributes, **attributes}))
    assert y.dtype.name == dtype
    assert all(d in (None, n) for d, n in zip(shape, y.shape, strict=True))
    return y


@pytest.mark.parametrize(
    ("mode", "padding", "align", "axes"),
    [
        *product(("linear", "nearest", "cubic"), ("zeros", "border", "reflection"), (0, 1), (2,)),
        *product(("linear", "nearest"), ("zeros", "border", "reflection"), (0, 1), (3,)),
    ],
)
def test_grid_sample_is_torchs(mode: str, padding: str, align: int, axes: int) -> None:
    x = RNG.standard_normal((2, 3, 5, 4, 3)[: axes + 2]).astype(np.float32)
    grid = RNG.uniform(-2.6, 2.6, (*(2, 6, 7, 2)[: axes + 1], axes)).astype(np.float32)
    word = {"linear": "bilinear", "cubic": "bicubic"}.get(mode, mode)
    want = torch.nn.functional.grid_sample(torch.tensor(x), torch.tensor(grid), word, padding, bool(align)).numpy()
    for to in ("numpy", "torch"):
        got = ours("GridSample", x, grid, to=to, mode=mode, padding_mode=padding, align_corners=align)
        np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
def test_grid_sample_far_away_and_nowhere(padding: str) -> None:
    x = RNG.standard_normal((1, 1, 4, 4)).astype(np.float32)
    grid = np.array([[[[1e30, 0.0], [-np.inf, 0.0], [np.nan, 0.0], [0.1, 0.2]]]], np.float32)
    got = ours("GridSample", x, grid, padding_mode=padding)[0, 0, 0]
    assert np.isnan(got[2]) and np.isfinite(got[3])
    if padding == "zeros":
        assert got[0] == 0
    if padding == "border":
        np.testing.assert_allclose(got[0], x[0, 0, 1:3, 3].mean(), rtol=1e-6)


def test_grid_sample_without_places_or_pixels() -> None:
    assert ours("GridSample", np.ones((1, 2, 3, 3), np.float32), np.ones((1, 0, 4, 2), np.float32)).shape == (
        1,
        2,
        0,
        4,
    )
    one = ours("GridSample", np.full((1, 1, 1, 1), 7, np.float32), np.zeros((1, 1, 1, 2), np.float32), align_corners=1)
    assert one.item() == 7


@pytest.mark.parametrize("attributes", [{"mode": "bilinear"}, {"padding_mode": "mirror"}])
def test_grid_sample_refuses_words_it_does_not_know(attributes: dict) -> None:
    with pytest.raises(GraphError, match=r"bilinear|mirror"):
        ours("GridSample", np.ones((1, 1, 2, 2), np.float32), np.ones((1, 1, 1, 2), np.float32), **attributes)


@pytest.mark.parametrize(("align", "size"), [(0, (2, 3, 4, 5)), (1, (2, 3, 4, 5)), (0, (2, 1, 3, 4, 5))])
def test_affine_grid_is_torchs(align: int, size: tuple[int, ...]) -> None:
    n = len(size) - 2
    theta = RNG.standard_normal((2, n, n + 1)).astype(np.float32)
    want = torch.nn.functional.affine_grid(torch.tensor(theta), size, bool(align)).numpy()
    for to in ("numpy", "torch"):
        got = ours("AffineGrid", theta, np.array(size, np.int64), to=to, align_corners=align)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("mode", "corners", "ratio"), list(product(("avg", "max"), ("half_pixel", "output_half_pixel"), (0, 2)))
)
def test_roi_align(mode: str, corners: str, ratio: int) -> None:
    x = np.abs(RNG.standard_normal((2, 3, 8, 9))).astype(np.float32)
    low = RNG.uniform(-1, 6, (5, 2))
    rois = np.concatenate([low, low + RNG.uniform(0.2, 9, (5, 2))], 1).astype(np.float32)
    batch = np.array([0, 1, 1, 0, 1], np.int64)
    attributes = {
        "mode": mode, "coordinate_transformation_mode": corners, "sampling_ratio": ratio, "spatial_scale": 0.9,
        "output_height": 3, "output_width": 2,
    }  # fmt: skip
    want = reference("RoiAlign", x, rois, batch, opset=16, **attributes)
    for to in ("numpy", "torch"):
        np.testing.assert_allclose(ours("RoiAlign", x, rois, batch, to=to, **attributes), want, rtol=2e-5, atol=2e-6)


def test_roi_align_of_nothing() -> None:
    x = np.ones((1, 2, 4, 4), np.float32)
    assert ours("RoiAlign", x, np.zeros((0, 4), np.float32), np.zeros(0, np.int64)).shape == (0, 2, 1, 1)
    inverted = np.array([[3, 3, 1, 1]], np.float32)  # no sample lies in it
    assert (ours("RoiAlign", x, inverted, np.zeros(1, np.int64)) == 0).all()


def reference(op: str, *arrays: np.ndarray, opset: int, **attributes) -> np.ndarray:
    names = [f"i{k}" for k in range(len(arrays))]
    kinds = [helper.np_dtype_to_tensor_dtype(a.dtype) for a in arrays]
    infos = [helper.make_tensor_value_info(n, k, a.shape) for n, k, a in zip(names, kinds, arrays, strict=True)]
    graph = helper.make_graph(
        [helper.make_node(op, names, ["y"], **attributes)], "g", infos, [helper.make_tensor_value_info("y", 1, None)]
    )
    program = ReferenceEvaluator(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)]))
    return program.run(None, dict(zip(names, arrays, strict=True)))[0]
