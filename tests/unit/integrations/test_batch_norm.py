"""Variants of batch normalisation (pytorch#45474): no affine parameters, no running statistics, training.

What normalises by the batch's own statistics is never taken for what normalises by stored ones.
"""

from __future__ import annotations

import copy
from itertools import product

import numpy as np
import onnx
import onnx_models
import pytest
import torch
from torch import nn

from fusionreg.core.errors import ModelError
from fusionreg.core.evaluate.evaluator import evaluate
from fusionreg.core.lift import lift
from fusionreg.core.ops import default_vocabulary
from fusionreg.integrations.onnx.load import load
from fusionreg.integrations.onnx.reference import run
from fusionreg.integrations.torch import export, import_exported
from fusionreg.integrations.torch.module import ExportedCallable

OPS = default_vocabulary()


def block(affine: bool, track: bool, momentum: float | None, bias: bool, groups: int) -> nn.Module:
    torch.manual_seed(3)
    norm = nn.BatchNorm2d(4, affine=affine, track_running_stats=track, momentum=momentum)
    with torch.no_grad():
        if affine:
            norm.weight.uniform_(0.5, 2.0)
            norm.bias.uniform_(-1.0, 1.0)
        if track:
            norm.running_mean.uniform_(-1.0, 1.0)
            norm.running_var.uniform_(0.5, 2.0)
    return nn.Sequential(nn.Conv2d(2, 4, 3, bias=bias, groups=groups), norm, nn.ReLU())


@pytest.mark.parametrize(
    ("affine", "track", "momentum", "bias", "groups", "training"),
    [
        *((a, t, 0.1, True, 1, m) for a, t, m in product((True, False), (True, False), (True, False))),
        (True, True, None, True, 1, False),
        (True, True, 0.1, False, 2, False),
        (False, True, None, False, 2, False),
    ],
)
def test_torch(affine, track, momentum, bias, groups, training) -> None:
    module = block(affine, track, momentum, bias, groups).train(training)
    x = 3.0 * torch.randn(3, 2, 6, 5) + 1.0
    imported = import_exported(export(module, (x,)))
    lifted = lift(imported.graph, OPS)
    with torch.no_grad():
        want = copy.deepcopy(module)(x)
    for graph in (imported.graph, lifted):
        got = ExportedCallable(imported, lambda given, g=graph: evaluate(g, given, ops=OPS))(x)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    stored = [n for n in lifted.nodes if n.op == "BatchNormalization" and not n.attrs.get("training_mode")]
    assert len(stored) == (track and not training)
    statistics = {n for n in lifted.nodes if n.op.startswith("Reduce") or n.attrs.get("training_mode")}
    assert bool(statistics) == (training or not track)


@pytest.mark.parametrize("opset", [14, 15, 20])
def test_onnx_training_mode_stays(opset) -> None:
    constants = {k: np.array(v, np.float32) for k, v in {"s": [2, 1], "b": [0.5, 0], "m": [1, 0], "v": [4, 1]}.items()}
    node = onnx_models.node("BatchNormalization", ["x", "s", "b", "m", "v"], ["y", "n", "w"], training_mode=1)
    m = onnx_models.model([node], {"x": [3, 2, 4]}, ["y", "n", "w"], constants, opset)
    x = {"x": np.random.default_rng(1).normal(2.0, 3.0, (3, 2, 4)).astype(np.float32)}
    lifted = lift(load(m), OPS)
    assert [n.attrs.get("training_mode") for n in lifted.nodes] == [1]
    got, want = evaluate(lifted, x, ops=OPS), run(m, x)
    for name in ("y", "n", "w"):
        np.testing.assert_allclose(got[name], want[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("opset", [9, 13])
def test_onnx_before_14_further_outputs_mean_training(opset) -> None:
    """Files name all five and leave the last four empty; one that is read asks for a training that no longer exists."""
    constants = {k: np.array(v, np.float32) for k, v in {"s": [2], "b": [0.5], "m": [1], "v": [4]}.items()}

    def made(*outputs: str):
        node = onnx_models.node("BatchNormalization", ["x", "s", "b", "m", "v"], list(outputs))
        return onnx_models.model([node], {"x": [3, 1, 1]}, ["y"], constants, opset)

    x = {"x": np.array([0, 1, 3], np.float32).reshape(3, 1, 1)}
    y = evaluate(load(made("y", "", "", "", "")), x, ops=OPS)["y"].reshape(-1)
    np.testing.assert_allclose(y, [-0.499999, 0.5, 2.499998], rtol=1e-5)
    with pytest.raises(ModelError, match="training mode"):
        load(made("y", "mean"))


def test_torch_training_as_onnx_writes_it(tmp_path) -> None:
    """The unbiased running variance is not ONNX's own: the file spells it out, and says the same."""
    from onnx.reference import ReferenceEvaluator

    from fusionreg.integrations.onnx.spell import write_graph

    module = nn.BatchNorm2d(4, momentum=0.3).train()
    x = 2.0 * torch.randn(3, 4, 5, 2) + 1.0
    graph = import_exported(export(module, (x,))).graph
    written = onnx.helper.make_model(write_graph(graph, 20), opset_imports=[onnx.helper.make_opsetid("", 20)])
    onnx.checker.check_model(written)
    given = {"x": x.numpy(), "mean": module.running_mean.numpy(), "var": module.running_var.numpy()}
    feeds = {n: next((v for k, v in given.items() if k in n), np.array(0)) for n in graph.inputs}
    feeds[graph.inputs[-1]] = x.numpy()
    found = dict(zip(graph.outputs, ReferenceEvaluator(written).run(None, feeds), strict=True))
    want = module(x).detach().numpy()
    np.testing.assert_allclose(next(v for v in found.values() if v.ndim == 4), want, rtol=1e-4, atol=1e-5)
    for name, buffer in (("mean", module.running_mean), ("var", module.running_var)):
        np.testing.assert_allclose(next(v for k, v in found.items() if name in k), buffer, rtol=1e-5, atol=1e-6)
