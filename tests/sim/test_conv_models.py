"""Networks of convolutions: every block of a residual network and of a detector becomes one kernel; the values stay."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import replace

import numpy as np
import onnx_models
import pytest
import torch
from catalogs import shipped
from torch import nn

import fusionreg
from fusionreg.api import Registry
from fusionreg.integrations.onnx.reference import run
from fusionreg.torch import backend


class Block(nn.Module):
    """Convolution, normalisation, activation."""

    def __init__(self, c: int, k: int, kernel=3, stride=1, act=None, affine=True, **fields) -> None:
        super().__init__()
        self.conv = nn.Conv2d(c, k, kernel, stride, kernel // 2, bias=False, **fields)
        self.norm, self.act = nn.BatchNorm2d(k, eps=1e-3, affine=affine), act or nn.Identity()

    def forward(self, x):
        return self.act(self.norm(self.conv(x)))


class Residual(nn.Module):
    """ResNet-50's parts: a first layer with its pool, a block that halves the map, and one that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.pool = Block(3, 8, 7, 2, nn.ReLU(inplace=True)), nn.MaxPool2d(3, 2, 1)
        self.left = nn.Sequential(Block(8, 8, 1, 1, nn.ReLU()), Block(8, 8, 3, 2, nn.ReLU()), Block(8, 16, 1))
        self.right, self.relu = Block(8, 16, 1, 2), nn.ReLU(inplace=True)
        self.next = nn.Sequential(Block(16, 8, 1, 1, nn.ReLU()), Block(8, 16, 3, affine=False))

    def forward(self, x):
        x = self.pool(self.stem(x))
        x = self.relu(self.left(x) + self.right(x))
        return self.relu(self.next(x) + x)


class Detector(nn.Module):
    """YOLO's parts: SiLU behind every normalisation, halves of channels that meet again, a depthwise layer, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.mix = Block(3, 16, 3, 2, nn.SiLU(inplace=True)), Block(8, 8, 3, 1, nn.SiLU())
        self.join, self.deep = Block(24, 16, 1, 1, nn.SiLU()), Block(16, 16, 3, 1, nn.SiLU(), groups=16)
        self.head = nn.Conv2d(16, 5, 1)

    def forward(self, x):
        a, b = self.down(x).chunk(2, 1)
        return self.head(self.deep(self.join(torch.cat([a, b, b + self.mix(b)], 1))))


def trained(module: nn.Module) -> nn.Module:
    """In evaluation, with statistics of its own: those of a new module change nothing."""
    torch.manual_seed(0)
    for part in module.modules():
        if isinstance(part, nn.BatchNorm1d | nn.BatchNorm2d):
            part.running_mean.normal_()
            part.running_var.uniform_(0.5, 2.0)
            if part.affine:
                part.weight.data.uniform_(0.5, 1.5)
                part.bias.data.normal_()
    return module.eval()


@pytest.fixture
def fusions():
    return Registry(shipped("conv", "pointwise"), device="sim")


def sites(fused) -> Counter[str]:
    return Counter(".".join(site.fusion.split(".")[:2]) for site in fused.sites if site.status == "fused")


RESIDUAL = {"conv.conv_bn_relu_pool": 1, "conv.conv_bn_relu": 5, "conv.conv_bn": 1}


@pytest.mark.parametrize("order", [torch.channels_last, torch.contiguous_format], ids=str)
def test_a_residual_network_is_fused_whole(fusions, order):
    module = trained(Residual()).to(memory_format=order)
    x = torch.randn(2, 3, 18, 22).contiguous(memory_format=order)
    fused = fusions.fuse(module, x, policy="aggressive")
    with torch.no_grad():
        got, want = fused(x), module(x)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert got.stride() == want.stride()
    assert sites(fused) == RESIDUAL and sum(RESIDUAL.values()) == len(fused.sites)


def test_a_detector_is_fused_whole(fusions):
    """SiLU and a sum stand in the convolution's epilogue; joining channels is all that is left."""
    module, x = trained(Detector()), torch.randn(1, 3, 9, 12)
    fused = fusions.fuse(module, x, policy="aggressive")
    with torch.no_grad():
        torch.testing.assert_close(fused(x), module(x), rtol=1e-5, atol=1e-5)
    assert sites(fused) == {"conv.conv_bn": 5}
    assert {node.op for node in fused.model.graph.nodes} - {"Split", "Concat"} == {
        f"fused::{site.fusion}" for site in fused.sites
    }


class Shared(nn.Module):
    """pytorch#197539: one convolution, used twice, normalised on one path; and a result that two read."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)

    def forward(self, x):
        c = self.conv(torch.relu(self.norm(self.conv(x))))
        return c, torch.relu(self.norm(c) + x)


def test_what_others_read_stays(fusions):
    module, x = trained(Shared()), torch.randn(1, 4, 5, 6)
    fused = fusions.fuse(module, x, policy="balanced")
    with torch.no_grad():
        for got, want in zip(fused(x), module(x), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert [site.nodes[0] for site in fused.sites if site.fusion.startswith("conv.")] == ["conv2d.Conv"]


class Normalised(nn.Module):
    """onnxruntime#22512, as LeViT has it: a product, normalised over the rows of all batches, added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.product, self.norm = nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8)

    def forward(self, x):
        y = self.product(x)
        return torch.relu(x + self.norm(y.flatten(0, 1)).reshape_as(y))


def test_a_normalised_product_stays_one():
    """The product is fused as such; what stands behind another view of it is neither its bias nor its residual."""
    module, x = trained(Normalised()), torch.randn(2, 5, 8)
    fused = Registry(shipped("conv", "gemm"), device="sim").fuse(module, x, policy="aggressive")
    with torch.no_grad():
        torch.testing.assert_close(fused(x), module(x), rtol=1e-5, atol=1e-5)
    assert [site.fusion for site in fused.sites if site.status == "fused"] == ["gemm.matmul"]


def test_compiled():
    """torch.compile takes the same sites in evaluation, and no normalisation in training."""
    module, x, reports = trained(Detector()), torch.randn(1, 3, 9, 12), []
    options = {"registry": fusionreg.load_registry(device="sim"), "device": "sim", "report": reports.append}
    compiled = torch.compile(module, backend=backend, options={**options, "policy": "aggressive", "inner": "eager"})
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), module(x), rtol=1e-5, atol=1e-5)
        found = [s.fusion for r in reports if r.stage == "captured" for s in r.fused]
        assert len(found) == 5 and all(name.startswith("conv.conv_bn.") for name in found[:-1])
        reports.clear()
        twin = copy.deepcopy(module.train())
        torch.testing.assert_close(compiled(x), twin(x), rtol=1e-4, atol=1e-4)
    assert all(s.operators == ("aten.conv2d",) for r in reports for s in r.fused if s.fusion.startswith("conv."))


def exported(folded: bool) -> object:
    """A block as exporters write it: every attribute spelled out; or its normalisation folded."""
    rng = np.random.default_rng(0)
    constants = {"w": rng.normal(size=(8, 3, 3, 3)), "b": rng.normal(size=8), "s": rng.uniform(0.5, 1.5, 8)}
    constants |= {"o": rng.normal(size=8), "m": rng.normal(size=8), "v": rng.uniform(0.5, 2.0, 8)}
    window = {"kernel_shape": [3, 3], "strides": [1, 1], "pads": [1, 1, 1, 1], "dilations": [1, 1], "group": 1}
    norm = [onnx_models.node("BatchNormalization", ["c", *"somv"], ["n"], epsilon=1e-3, momentum=0.97)]
    norm[0].input[1:3] = ["s", "o"]
    nodes = [
        onnx_models.node("Conv", ["x", "w", "b"], ["c"], **window),
        *([] if folded else norm),
        onnx_models.node("Relu", ["c" if folded else "n"], ["r"]),
        onnx_models.node("AveragePool", ["r"], ["y"], kernel_shape=[3, 2], strides=[2, 1], pads=[1, 0, 0, 1]),
    ]
    used = {n: np.asarray(a, np.float32) for n, a in constants.items() if not folded or n in "wb"}
    return onnx_models.model(nodes, {"x": [2, 3, 8, 7]}, ["y"], used)


@pytest.mark.parametrize("folded", [False, True])
def test_onnx(fusions, folded):
    model = exported(folded)
    x = {"x": np.random.default_rng(1).normal(size=(2, 3, 8, 7)).astype(np.float32)}
    fused = fusions.fuse(model, policy="aggressive")
    np.testing.assert_allclose(fused(**x)["y"], run(model, x)["y"], rtol=1e-4, atol=1e-5)
    assert sites(fused) == {"conv.conv_bn_relu_pool": 1}
    assert [len(site.nodes) for site in fused.sites] == [3 if folded else 4]


@pytest.mark.parametrize(
    ("network", "shape", "found"),
    [(Residual, (2, 3, 18, 22), RESIDUAL), (Detector, (1, 3, 9, 12), {"conv.conv_bn": 5})],
    ids=["residual", "detector"],
)
def test_networks_from_onnx(fusions, network, shape, found):
    """As torch exports them: normalisation is folded into weights, defaults are written down, SiLU is two operators."""
    module, x = trained(network()), torch.randn(shape)
    fused = fusions.fuse(torch.onnx.export(module, (x,), dynamo=True, verbose=False).model_proto, policy="aggressive")
    (got,) = fused(x=x.numpy()).values()
    with torch.no_grad():
        np.testing.assert_allclose(got, module(x).numpy(), rtol=1e-4, atol=1e-4)
    assert sites(fused) == found
    assert not {"Conv", "BatchNormalization", "MaxPool"} & {node.op for node in fused.graph.nodes}


@pytest.mark.parametrize(
    ("kind", "order", "taken"),
    [
        (torch.float16, torch.channels_last, ["conv.conv_bn_relu"]),
        (torch.bfloat16, torch.channels_last, ["conv.conv_bn_relu"]),
        (torch.float16, torch.contiguous_format, ["conv.conv_bn_relu"]),  # moved
        (torch.float32, torch.channels_last, []),
    ],
    ids=str,
)
def test_what_no_kernel_is_fast_on_stays_with_the_library(fusions, kind, order, taken):
    """A layer of ResNet-50: half precision with channels last was measured, with its normalisation, too."""
    module = trained(Block(64, 64, act=nn.ReLU())).to(kind).to(memory_format=order)
    x = torch.empty(32, 64, 56, 56, dtype=kind).contiguous(memory_format=order)
    plan = fusions.plan(module, x, policy="balanced")
    assert [match.fusion for match in plan.chosen if match.fusion.startswith("conv.")] == taken
    assert bool(plan.moved) == (order is torch.contiguous_format)


def test_a_layer_of_a_detector_is_taken(fusions):
    """SiLU behind the normalisation, in the convolution's epilogue: that kernel was measured, too."""
    module = trained(Block(64, 64, act=nn.SiLU())).half().to(memory_format=torch.channels_last)
    x = torch.empty(16, 64, 80, 80, dtype=torch.float16).contiguous(memory_format=torch.channels_last)
    plan = fusions.plan(module, x, policy="balanced")
    assert [match.base for match in plan.chosen] == ["conv.conv_bn"]


@pytest.mark.parametrize(
    ("images", "c", "k", "extent", "act", "taken"),
    [
        (32, 256, 128, 56, nn.ReLU, "conv.conv_bn_relu"),  # what was measured behind it is of half the channels
        (8, 64, 32, 160, nn.SiLU, "conv.conv_bn"),  # a convolution with as many bytes was, with nothing behind it
    ],
    ids=["relu", "silu"],
)
def test_an_activation_is_not_left_behind(fusions, images, c, k, extent, act, taken):
    """One convolution without it measured at the like better than one with it at the like: it is the same kernel."""
    module = nn.Sequential(nn.Conv2d(c, k, 1), act()).half().to(memory_format=torch.channels_last)
    x = torch.empty(images, c, extent, extent, dtype=torch.float16).contiguous(memory_format=torch.channels_last)
    plan = fusions.plan(module, x, policy="balanced")
    assert [(match.base or match.fusion, len(match.nodes)) for match in plan.chosen] == [(taken, 2)]


def test_filters_alone_are_moved(fusions):
    """The caller's maps have channels last, the module's filters do not: results lie as the module's do."""
    module = trained(Block(64, 64, act=nn.ReLU())).half()
    x = torch.empty(32, 64, 56, 56, dtype=torch.float16).contiguous(memory_format=torch.channels_last)
    plan = fusions.plan(module, x, policy="balanced")
    assert [m.fusion for m in plan.chosen] == ["conv.conv_bn_relu"] and plan.moved == ("conv.weight",)
    small = torch.randn(1, 64, 3, 4).half().contiguous(memory_format=torch.channels_last)
    moving = replace(fusions.plan(module, small, policy="aggressive"), moved=plan.moved)
    fused = fusions.fuse(module, small, plan=moving)
    assert fused.model.graph.constants["conv.weight"].strides[1] == 2
    with torch.no_grad():
        got, want = fused(small), module.float()(small.float())
    assert got.stride() == want.stride()
    torch.testing.assert_close(got.float(), want, rtol=2e-2, atol=2e-2)


def chain(layers: int, images: int | str, channels: int, extent: int) -> object:
    """Convolutions with normalisation and ReLU in half precision, as exporters write them: maps lie row by row."""
    rng, nodes, constants = np.random.default_rng(2), [], {}
    for i in range(layers):
        constants[f"w{i}"] = (rng.normal(size=(channels, channels, 3, 3)) / (3 * channels**0.5)).astype(np.float16)
        constants |= {f"{k}{i}": rng.uniform(0.5, 1.5, channels).astype(np.float32) for k in "somv"}
        read = [f"c{i}", *(f"{k}{i}" for k in "somv")]
        nodes += [
            onnx_models.node("Conv", ["x" if i == 0 else f"y{i - 1}", f"w{i}"], [f"c{i}"], pads=[1, 1, 1, 1]),
            onnx_models.node("BatchNormalization", read, [f"n{i}"]),
            onnx_models.node("Relu", [f"n{i}"], [f"y{i}"]),
        ]
    shape = ([images, channels, extent, extent], "float16")
    return onnx_models.model(nodes, {"x": shape}, {f"y{layers - 1}": shape}, constants, opset=15)


@pytest.mark.parametrize("images", [32, "N"])
def test_maps_are_moved_where_that_saves(fusions, images):
    """Channels last from the model's input to its output; also where how many images there are is the caller's."""
    plan = fusions.plan(chain(4, images, 64, 56), policy="balanced")
    assert plan.moved == ("x", "w0", "w1", "w2", "w3") and "moved to channels last: x, w0" in str(plan)
    assert [m.fusion for m in plan.chosen] == ["conv.conv_bn_relu"] * 4
    assert (again := type(plan).from_dict(plan.to_dict())) == plan and again.moved == plan.moved


def test_maps_stay_where_they_were_moved_to(fusions):
    """Between fused sites nothing is copied, and results lie as those of a model do."""
    model = chain(3, 2, 16, 5)
    opened = fusions._open(model, ())
    plan = replace(fusions.plan(model, policy="aggressive"), moved=("x", "w0", "w1", "w2"))
    fused, seen = fusions.build(opened, plan=plan), []

    def watch(node, operands, run):
        seen.extend(v.strides[1] for v in operands if v is not None and v.ndim == 4)
        return run()[0]

    x = np.random.default_rng(3).normal(size=(2, 16, 5, 5)).astype(np.float16)
    (got,), (want,) = fused.watched(watch, x).values(), run(model, {"x": x}).values()
    assert seen == [2] * 6 and got.flags.c_contiguous
    np.testing.assert_allclose(got.astype(np.float32), want.astype(np.float32), rtol=2e-2, atol=2e-2)


def test_a_convolution_alone_stays_with_the_library(fusions):
    """It matches, since a folded normalisation leaves that and a bias in front of what joins the slot."""
    module = nn.Conv2d(64, 64, 3, padding=1, bias=False, dtype=torch.float16).to(memory_format=torch.channels_last)
    x = torch.empty(32, 64, 56, 56, dtype=torch.float16).contiguous(memory_format=torch.channels_last)
    plan = fusions.plan(module, x, policy="balanced")
    assert not plan.chosen and [lost.match.fusion for lost in plan.losers] == ["conv.conv_bn"]
    behind = fusions.plan(nn.Sequential(module, nn.SiLU()), x, policy="aggressive")
    assert [match.base for match in behind.chosen] == ["conv.conv_bn"]
