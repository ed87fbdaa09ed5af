"""Training blocks of torch and ONNX: both ways to say batch normalisation are found, and run as unfused."""

from __future__ import annotations

import copy

import numpy as np
import onnx_models
import pytest
import torch
from catalogs import shipped
from torch import nn

from fusionreg.api import Registry
from fusionreg.integrations.onnx.reference import run


class Block(nn.Module):
    """The tail of a residual block: normalise, ReLU, convolve, normalise, add, ReLU."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.first, self.convolution = nn.BatchNorm2d(channels), nn.Conv2d(channels, channels, 1, bias=False)
        self.second = nn.BatchNorm2d(channels, momentum=0.3)

    def forward(self, x):
        h = torch.relu(self.first(x))
        return torch.relu(self.second(self.convolution(h)) + x)


@pytest.fixture
def fusions():
    return Registry(shipped("norm"), device="sim")


@pytest.mark.parametrize("order", [torch.channels_last, torch.contiguous_format], ids=str)
def test_a_block_of_torch_in_training(fusions, order):
    """Two steps: the running averages advance as eager's do, and channels last stays so."""
    torch.manual_seed(0)
    module = Block().train()
    twin, example = copy.deepcopy(module), torch.randn(2, 8, 5, 6).contiguous(memory_format=order)
    fused = fusions.fuse(module, example, policy="aggressive")
    for _step in range(2):
        x = torch.randn(2, 8, 5, 6).contiguous(memory_format=order)
        with torch.no_grad():
            got, want = fused(x), twin(x)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        if order is torch.channels_last:
            assert got.stride() == want.stride() == x.stride()
    for name, buffer in twin.named_buffers():
        torch.testing.assert_close(fused.buffers[name], buffer, rtol=1e-5, atol=1e-6)
    used = {k.split("/")[0] for k in fusions.runtime.kernels_used}
    assert used == {"norm.batchnorm_relu", "norm.batchnorm_add_relu"} and not fusions.runtime.fallbacks


@pytest.mark.parametrize("add", [False, True])
def test_onnx_in_training_mode(fusions, add):
    """The running variance is ONNX's, of the population."""
    constants = {k: np.array(v, np.float32) for k, v in {"s": [2, 1], "b": [0.5, 0], "m": [1, 0], "v": [4, 1]}.items()}
    nodes = [
        onnx_models.node("BatchNormalization", ["x", "s", "b", "m", "v"], ["n", "mean", "var"], training_mode=1),
        *([onnx_models.node("Add", ["n", "x"], ["z"])] if add else []),
        onnx_models.node("Relu", ["z" if add else "n"], ["y"]),
    ]
    model = onnx_models.model(nodes, {"x": [3, 2, 4, 5]}, ["y", "mean", "var"], constants, 20)
    x = {"x": np.random.default_rng(1).normal(2.0, 3.0, (3, 2, 4, 5)).astype(np.float32)}
    fused = fusions.fuse(model, policy="aggressive")
    got, want = fused(**x), run(model, x)
    for name in ("y", "mean", "var"):
        np.testing.assert_allclose(got[name], want[name], rtol=1e-4, atol=1e-5)
    assert {k.split("/")[0] for k in fusions.runtime.kernels_used} == {f"norm.batchnorm_{'add_' if add else ''}relu"}
