"""GroupNorm, Swish and dropout as frameworks spell them, found as one fusion."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper

import fusionreg

F = torch.nn.functional


@pytest.fixture(scope="module")
def registry():
    return fusionreg.load_registry(allow=("norm",), device="sim")


class Block(torch.nn.Module):
    def __init__(self, affine=True):
        super().__init__()
        self.norm, self.dropout = torch.nn.GroupNorm(4, 16, affine=affine), torch.nn.Dropout(0.3)

    def forward(self, x):
        return self.dropout(F.silu(self.norm(x)))


class Last(Block):
    def forward(self, x):
        return F.silu(self.norm(x.permute(0, 3, 1, 2))).permute(0, 2, 3, 1)


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (Block(), (2, 16, 8)),
        (Block(), (2, 16, 4, 8)),
        (Block(affine=False), (2, 16, 4, 8)),
        (Block(), (2, 16, 2, 4, 8)),
        (Last(), (2, 4, 8, 16)),
    ],
    ids=["3", "4", "not_affine", "5", "transposed"],
)
def test_torch(registry, module, shape):
    x = torch.zeros(shape)
    assert registry.match(module.eval(), x).matches[0].fusion == "norm.groupnorm"  # a part of it
    found = registry.plan(module.eval(), x).chosen
    assert [m.fusion for m in found] == ["norm.groupnorm_swish"]
    assert found[0].attributes["groups"] == 4 and found[0].attributes["epsilon"] == pytest.approx(1e-5)
    assert found[0].axes["C"] == 16


def model(nodes, initializers, opset=17, shape=(2, 8, 4, 6), extra=()):
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, shape) for n in ("x", "y"))
    constants = [onnx.numpy_helper.from_array(v, n) for n, v in initializers.items()]
    graph = helper.make_graph([helper.make_node(*n[:3], **n[3]) for n in nodes], "g", [x, *extra], [y], constants)
    domains = [helper.make_opsetid("", opset), helper.make_opsetid("fusionreg", 1)]
    return helper.make_model(graph, opset_imports=domains, ir_version=8)


def channel(values):
    return np.asarray(values, np.float32)


def test_onnx_spells_it_as_instance_norm(registry):
    """Reshape to the groups, InstanceNormalization, back, scale and bias of each channel, x · σ(x)."""
    nodes = [
        ("Reshape", ["x", "s1"], ["r"], {}),
        ("InstanceNormalization", ["r", "one", "zero"], ["i"], {"epsilon": 1e-3}),
        ("Reshape", ["i", "s2"], ["n"], {}),
        ("Mul", ["n", "gamma"], ["m"], {}),
        ("Add", ["m", "beta"], ["a"], {}),
        ("Sigmoid", ["a"], ["g"], {}),
        ("Mul", ["a", "g"], ["y"], {}),
    ]
    initializers = {
        "s1": np.array([0, 2, -1]), "s2": np.array([2, 8, 4, 6]), "one": channel([1, 1]), "zero": channel([0, 0]),
        "gamma": channel(range(8)).reshape(8, 1, 1), "beta": channel(range(8)).reshape(8, 1, 1),
    }  # fmt: skip
    found = registry.plan(model(nodes, initializers)).chosen
    assert [m.fusion for m in found] == ["norm.groupnorm_swish"] and found[0].attributes["groups"] == 2


def test_seeded_dropout_after_it(registry):
    nodes = [
        ("GroupNormalization", ["x", "gamma", "beta"], ["n"], {"num_groups": 2}),
        ("Sigmoid", ["n"], ["g"], {}),
        ("Mul", ["n", "g"], ["a"], {}),
        ("Dropout", ["a", "rng"], ["y"], {"p": 0.25, "domain": "fusionreg"}),
    ]
    rng = helper.make_tensor_value_info("rng", TensorProto.INT64, (2,))
    affine = {"gamma": channel(range(8)), "beta": channel(range(8))}
    largest = max(registry.match(model(nodes, affine, 21, extra=[rng])).matches, key=lambda m: len(m.nodes))
    assert largest.fusion == "norm.groupnorm_swish_dropout" and largest.attributes["p"] == 0.25


class Conditioned(Block):
    """As in diffusion models: a gain and a shift for each channel of a sample, between normalisation and Swish."""

    def forward(self, x, e):
        gain, shift = e[:, :, None, None].chunk(2, dim=1)
        return F.silu(self.norm(x) * (1 + gain) + shift)


class Embedded(Block):
    def forward(self, x, e):
        return F.silu(self.norm(x + e[:, :, None, None]))


@pytest.mark.parametrize(
    ("module", "base", "nodes", "texts"),
    [
        (Conditioned(), "norm.groupnorm", 5, {"x": "T[N C S ...]", "in0": "T[N C 1 ...]", "in1": "T[N C 1 ...]"}),
        (Embedded(), "norm.groupnorm_swish", 3, {"in0": "T[N C S ...]", "in1": "T[N C 1 ...]"}),
    ],
    ids=["behind", "in_front"],
)
def test_a_number_for_each_channel_of_a_sample(registry, module, base, nodes, texts):
    channels = 32 if base == "norm.groupnorm" else 16
    (found,) = registry.plan(module.eval(), torch.zeros(2, 16, 4, 8), torch.zeros(2, channels)).chosen
    assert (found.base, len(found.nodes)) == (base, nodes)
    inputs = registry.catalog[found.fusion].spec.inputs
    texts = {name: text.replace("T[", "float32[") if name != "x" else text for name, text in texts.items()}
    assert dict(inputs) == {**texts, "scale": "T[C]", "bias": "T[C]"}
    assert {k.spec.name for k in registry.catalog[found.fusion].kernels} >= {"cluster", "last_tiles", "last_cluster"}
