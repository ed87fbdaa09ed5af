"""Libraries as competitors, where modules of their names are installed: what they compute, and what of it is ours."""

from __future__ import annotations

import sys
import types

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import graphs as kit  # noqa: E402

from fusionreg.integrations.torch.library_peers import library_peers  # noqa: E402

OPS = kit.vocabulary()


def fake_module(monkeypatch, name: str, **members) -> None:
    """A module of that name with these members, in packages of its own."""
    parts = name.split(".")
    for i in range(1, len(parts) + 1):
        path = ".".join(parts[:i])
        module = types.ModuleType(path)
        module.__spec__ = types.SimpleNamespace(name=path)
        module.__path__ = []
        if i == len(parts):
            vars(module).update(members)
        monkeypatch.setitem(sys.modules, path, module)


def function(apply):
    return type("Function", (), {"apply": staticmethod(apply)})


def normal(*shape):
    return torch.from_numpy(np.random.default_rng(len(shape)).normal(size=shape)).float()


def holds(peer, *given) -> None:
    got, want = peer.call(*given), peer.exact(*given)
    for a, b in zip(got if isinstance(got, tuple) else (got,), want, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-5)


def test_libraries_that_are_installed(monkeypatch) -> None:
    """With modules of their names in place, normalisations get a column for each."""
    net = kit.Net()
    x = net.input("x", "float32", (4, 8))
    scale, bias = (net.input(n, "float32", (8,)) for n in ("scale", "bias"))
    graph = net.build((net.op("LayerNormalization", net.op("Add", x, x), scale, bias),))
    assert library_peers(graph, OPS) == ()
    norm = function(lambda x, scale, bias, epsilon: torch.nn.functional.layer_norm(x, (8,), scale, bias, epsilon))
    fake_module(monkeypatch, "liger_kernel.ops.layer_norm", LigerLayerNormFunction=norm)
    (peer,) = library_peers(graph, OPS)
    assert (peer.name, peer.computes, peer.inputs) == ("liger", "LayerNormalization alone", ("x", "scale", "bias"))
    holds(peer, normal(4, 8), normal(8), normal(8))


def residual_norm(x, residual, scale, epsilon):
    h = x + residual
    return torch.nn.functional.rms_norm(h, (8,), scale, epsilon), h


@pytest.mark.parametrize("library", ["liger", "quack"])
def test_a_library_that_has_the_whole_workload(monkeypatch, library) -> None:
    """Residual and RMSNorm, both results: no anchor but a competitor; with one result, only the norm alone."""

    def graph(both: bool):
        net = kit.Net()
        x, residual = (net.input(n, "float32", (4, 8)) for n in ("x", "residual"))
        h = net.op("Add", x, residual)
        y = net.op("RMSNormalization", h, net.input("scale", "float32", (8,)), epsilon=1e-3)
        return net.build((y, h) if both else (y,))

    if library == "liger":
        fused = function(lambda x, r, w, e, offset, casting, in_place: residual_norm(x, r, w, e))
        fake_module(monkeypatch, "liger_kernel.ops.fused_add_rms_norm", LigerFusedAddRMSNormFunction=fused)
    else:
        fake_module(
            monkeypatch, "quack", softmax=torch.softmax,
            rmsnorm=lambda x, w, residual=None, eps=0.0, prenorm=False: residual_norm(x, residual, w, eps),
        )  # fmt: skip
    (peer,) = library_peers(graph(True), OPS)
    assert (peer.name, peer.computes, peer.inputs) == (library, "", ("x", "residual", "scale"))
    holds(peer, normal(4, 8), normal(4, 8), normal(8))
    (anchor,) = library_peers(graph(False), OPS)
    assert anchor.computes == "RMSNormalization alone" and anchor.inputs == ("x", "scale")


def test_group_normalisation_of_a_library(monkeypatch) -> None:
    net = kit.Net()
    x = net.input("x", "float32", (2, 4, 6))
    scale, bias = (net.input(n, "float32", (4,)) for n in ("scale", "bias"))
    graph = net.build((net.op("Swish", net.op("GroupNormalization", x, scale, bias, num_groups=2, epsilon=1e-3)),))
    norm = function(lambda x, w, b, c, g, e: torch.nn.functional.group_norm(x, g, w, b, e) if c == 4 else None)
    fake_module(monkeypatch, "liger_kernel.ops.group_norm", LigerGroupNormFunction=norm)
    (peer,) = library_peers(graph, OPS)
    assert (peer.name, peer.computes) == ("liger", "GroupNormalization alone")
    holds(peer, normal(2, 4, 6), normal(4), normal(4))


def test_cudnn_normalises_batches(monkeypatch) -> None:
    net = kit.Net()
    x = net.input("x", "float32", (3, 4, 6))
    vectors = [net.input(n, "float32", (4,)) for n in ("scale", "bias", "mean", "var")]
    found = net.op("BatchNormalization", x, *vectors, training_mode=1, momentum=0.9, outputs=3)
    graph = net.build((net.op("Relu", found[0]), *found[1:]))
    seen = {}

    def batch_norm(x, scale, bias, mean, var, training, momentum, epsilon):
        seen.update(training=training, momentum=momentum)
        return torch.nn.functional.batch_norm(x, mean, var, scale, bias, training, momentum, epsilon), None, None, None

    monkeypatch.setattr(torch.ops.aten, "cudnn_batch_norm", batch_norm)
    (peer,) = library_peers(graph, OPS)
    assert (peer.name, peer.computes, peer.inputs[0]) == ("cudnn", "BatchNormalization alone", "x")
    holds(peer, normal(3, 4, 6), normal(4), normal(4), normal(4), normal(4).abs())
    assert seen["training"] and seen["momentum"] == pytest.approx(0.1)


@pytest.mark.parametrize("pads", [(), (1, 0, 1, 0)])
def test_cudnn_convolves(pads) -> None:
    net = kit.Net()
    x, w = net.input("x", "float32", (2, 4, 7, 6)), net.input("w", "float32", (6, 2, 3, 2))
    graph = net.build((net.op("Relu", net.op("Conv", x, w, strides=(2, 1), group=2, pads=pads)),))
    (peer,) = library_peers(graph, OPS)
    assert (peer.name, peer.computes, peer.inputs) == ("cudnn", "the convolution alone", ("x", "w"))
    holds(peer, normal(2, 4, 7, 6), normal(6, 2, 3, 2))
