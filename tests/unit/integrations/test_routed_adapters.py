"""Low-rank adapters by token as models write them: matched, run in the simulator, and equal to the original."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from onnx_models import model, node
from torch import nn

import fusionreg
from fusionreg.api import NothingFusedWarning

TOKENS, K, N, E, R = 6, 32, 24, 4, 8
FUSION = "gemm.lora_routed"


@pytest.fixture(scope="module")
def registry():
    return fusionreg.load_registry(device="sim")


class Adapted(nn.Module):
    """One way to write x @ W + 0.5 · B[id] (A[id] x)."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(E, R, K)), nn.Parameter(torch.randn(E, N, R))
        self.w, self.s, self.way = nn.Parameter(torch.randn(N, K)), nn.Parameter(torch.rand(E)), way

    def forward(self, x, ids):
        way, a, b = self.way, self.a, self.b
        base = nn.functional.linear(x, self.w)
        at = ids if way == "wrapped" else ids.clamp(min=0)
        if way == "column":
            delta = (b[at] @ (a[at] @ x[:, :, None])).squeeze(-1)
        elif way == "einsum":
            delta = torch.einsum("tr,tnr->tn", torch.einsum("tk,trk->tr", x, a[at]), b[at])
        elif way == "selected":
            h = torch.bmm(x.unsqueeze(1), torch.index_select(a, 0, at).transpose(1, 2))
            delta = torch.bmm(h, torch.index_select(b, 0, at).mT).squeeze(1)
        elif way == "untransposed":
            delta = (x.unsqueeze(1) @ a.transpose(1, 2).contiguous()[at] @ b.mT.contiguous()[at])[:, 0]
        else:
            delta = (x.unsqueeze(1) @ a[ids.clamp(min=0) if way == "unscaled" else at].mT @ b[at].mT).squeeze(1)
        if way == "einsum":
            return base + (0.5 * delta).masked_fill((ids < 0)[:, None], 0.0)
        if way == "unscaled":
            return base + torch.where((ids > -1)[:, None], delta, 0.0)
        if way == "own_scales":
            return base + torch.where((ids >= 0)[:, None], delta * self.s[at][:, None], 0.0)
        if way == "unmasked":
            return base + delta * 0.5
        if way == "other_mask":
            return base + torch.where((ids >= 1)[:, None], delta, 0.0)
        return torch.where((ids >= 0).unsqueeze(1), delta * 0.5, 0.0) + base


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(TOKENS, K), torch.tensor([0, -1, 2, 3, -1, 0])


WAYS = ("row", "column", "einsum", "selected", "untransposed", "wrapped", "unscaled", "own_scales")


@pytest.mark.parametrize("way", WAYS)
def test_ways_of_torch(registry, way) -> None:
    torch.manual_seed(0)
    x, ids = inputs()
    module = Adapted(way)
    fused = registry.fuse(torch.export.export(module, (x, ids)))
    assert [s.fusion for s in fused.sites] == [FUSION]
    with torch.no_grad():
        torch.testing.assert_close(fused(x, ids), module(x, ids), rtol=1e-4, atol=1e-4)


class Layers(nn.Module):
    """Two layers that read the same indices and the same mask."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(2, E, R, K)), nn.Parameter(torch.randn(2, E, K, R))

    def forward(self, x, ids):
        at, mask = ids.clamp(min=0), (ids >= 0)[:, None]
        for a, b in zip(self.a, self.b, strict=True):
            x = torch.tanh(x + torch.where(mask, (x.unsqueeze(1) @ a[at].mT @ b[at].mT).squeeze(1), 0.0))
        return x


def test_layers_share_indices_and_masks(registry) -> None:
    torch.manual_seed(0)
    module, args = Layers(), inputs()
    fused = registry.fuse(torch.export.export(module, args))
    assert [s.fusion for s in fused.sites if s.fusion.startswith("gemm")] == [FUSION] * 2
    with torch.no_grad():
        torch.testing.assert_close(fused(*args), module(*args), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("way", ["unmasked", "other_mask"])
def test_what_is_another_function(registry, way) -> None:
    """Without a mask an id of -1 is the last adapter; with another one, adapter 0 is none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NothingFusedWarning)
        fused = registry.fuse(torch.export.export(Adapted(way), inputs()))
    assert FUSION not in [s.fusion for s in fused.sites]


@pytest.mark.parametrize("clamp", ["Max", "Clip", ""])
def test_ways_of_onnx(registry, tmp_path, clamp) -> None:
    import onnx
    import onnxruntime

    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((E, K, R)).astype("f"), rng.standard_normal((E, R, N)).astype("f")
    constants = {"a": a, "b": b, "zero": np.int64(0), "one": np.array([1]), "s": np.float32(0.5), "no": np.float32(0)}
    at = "at" if clamp else "ids"
    nodes = [node(clamp, ["ids", "zero"], ["at"])] if clamp else []
    nodes += [
        node("Gather", ["a", at], ["a_at"]), node("Gather", ["b", at], ["b_at"]),
        node("Unsqueeze", ["x", "one"], ["row"]), node("MatMul", ["row", "a_at"], ["h"]),
        node("MatMul", ["h", "b_at"], ["d"]), node("Squeeze", ["d", "one"], ["delta"]),
        node("Mul", ["delta", "s"], ["scaled"]), node("Less", ["ids", "zero"], ["none"]),
        node("Unsqueeze", ["none", "one"], ["mask"]), node("Where", ["mask", "no", "scaled"], ["masked"]),
        node("Add", ["base", "masked"], ["y"]),
    ]  # fmt: skip
    path = tmp_path / "adapted.onnx"
    shapes = {"base": [TOKENS, N], "x": [TOKENS, K], "ids": ([TOKENS], "int64")}
    onnx.save(model(nodes, shapes, {"y": [TOKENS, N]}, constants), path)
    feed = {
        "base": rng.standard_normal((TOKENS, N)).astype("f"), "x": rng.standard_normal((TOKENS, K)).astype("f"),
        "ids": np.array([3, -1, 0, 2, -1, 1]),
    }  # fmt: skip
    fused = registry.fuse(path)
    assert [s.fusion for s in fused.sites] == [FUSION]
    (expected,) = onnxruntime.InferenceSession(path).run(None, feed)
    np.testing.assert_allclose(fused(**feed)["y"], expected, rtol=1e-4, atol=1e-4)
