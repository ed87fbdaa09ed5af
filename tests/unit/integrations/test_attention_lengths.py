"""Sequences of several lengths: masks that compare positions with lengths are found, look-alikes not; results stay."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx_models import model, node, ort, random, same
from torch import nn

import fusionreg
from fusionreg.core.lift import lift
from fusionreg.core.ops import default_vocabulary
from fusionreg.integrations.onnx import load, save

B, H, S, T, D = 3, 4, 9, 20, 16
ENDS = torch.tensor([3, 20, 0])


@pytest.fixture(scope="module")
def registry():
    return fusionreg.load_registry(allow=("attention",), device="sim")


def direct(steps, n):
    return steps[None, None, None, :] < n[:, None, None, None]


def viewed(steps, n):
    return (steps[None, :] < n[:, None])[:, None, None, :]


def hidden(steps, n):
    return ~(steps.expand(n.shape[0], -1) >= n.unsqueeze(1))[:, None, None, :]


def turned(steps, n):
    return (n.to(torch.int32)[:, None] > steps)[:, None, None].expand(-1, H, S, -1)


def one_more(steps, n):
    return (steps[None, :] <= n[:, None])[:, None, None, :]


def beginning(steps, n):
    return (steps[None, :] >= n[:, None])[:, None, None, :]


def stepped(steps, n):
    return (2 * steps[None, :] < n[:, None])[:, None, None, :]


def of_queries(steps, n):
    return (steps[None, :S] < n[:, None])[:, None, :, None].expand(-1, 1, -1, T)


class Attend(nn.Module):
    def __init__(self, mask):
        super().__init__()
        self.mask = mask

    def forward(self, q, k, v, n):
        seen = self.mask(torch.arange(T), n)
        y = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return nn.functional.scaled_dot_product_attention(y, k, v, attn_mask=seen)  # as layers share a mask


def given():
    torch.manual_seed(0)
    return torch.randn(B, H, S, D), torch.randn(B, H, T, D), torch.randn(B, H, T, D), ENDS


@pytest.mark.parametrize("mask", [direct, viewed, hidden, turned])
def test_masks_by_length(registry, mask):
    module, x = Attend(mask), given()
    assert [m.fusion for m in registry.match(module, *x).matches] == ["attention.sdpa_lengths"] * 2
    fused = registry.fuse(torch.export.export(module, x), policy="aggressive")
    torch.testing.assert_close(fused(*x), module(*x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mask", [one_more, beginning, stepped, of_queries])
def test_look_alikes(registry, mask):
    found = {m.fusion for m in registry.match(Attend(mask), *given()).matches}
    assert "attention.sdpa_masked" in found and "attention.sdpa_lengths" not in found


@pytest.mark.parametrize("opset", [21, 24])
def test_saved(tmp_path: Path, opset):
    """With the operator's own input, or spelled out for runtimes that have no such operator."""
    constants = {"steps": np.arange(6), "axes": np.array([1, 2, 3]), "low": np.float32(-np.inf)}
    constants |= {"zero": np.float32(0)}
    nodes = [
        node("Unsqueeze", ["n", "axes"], ["ends"]),
        node("Less", ["steps", "ends"], ["seen"]),
        node("Transpose", ["k"], ["kt"], perm=[0, 1, 3, 2]),
        node("MatMul", ["q", "kt"], ["s"]),
        node("Where", ["seen", "s", "low"], ["u"]),
        node("Softmax", ["u"], ["w"], axis=-1),
        node("IsNaN", ["w"], ["none"]),
        node("Where", ["none", "zero", "w"], ["p"]),
        node("MatMul", ["p", "v"], ["y"]),
    ]
    shapes = {"q": [3, 2, 4, 8], "k": [3, 2, 6, 8], "v": [3, 2, 6, 8]}
    proto = model(nodes, {**shapes, "n": ([3], "int64")}, ["y"], constants, opset=opset)
    lifted = lift(load(proto), default_vocabulary())
    assert [(n.op, len(n.inputs)) for n in lifted.nodes] == [("Attention", 7)]
    path = tmp_path / "m.onnx"
    save(lifted, proto, path)
    onnx.checker.check_model(onnx.load(path), full_check=True)
    x = random(proto) | {"n": np.array([1, 6, 4])}
    if opset < 24:
        same(ort(str(path), x), ort(proto, x))
