"""Attention of torch and ONNX, found as one fusion, and saved for runtimes that know no Attention."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from onnx_models import OPS, model, node, ort, ours, random, same

import fusionreg
from fusionreg.core.lift import lift
from fusionreg.integrations.onnx import load, save

F = torch.nn.functional
torch.manual_seed(0)


@pytest.fixture(scope="module")
def registry():
    return fusionreg.load_registry(allow=("attention",), device="sim")


class Heads(torch.nn.Module):
    """Heads split and merged by views, as transformers do it; ``attend`` gets (q, k, v, mask)."""

    def __init__(self, attend, heads, groups, width):
        super().__init__()
        self.attend, self.heads, self.groups, self.width = attend, heads, groups, width

    def forward(self, q, k, v, mask):
        def split(x, heads):
            return x.view(x.shape[0], x.shape[1], heads, self.width).transpose(1, 2)

        y = self.attend(split(q, self.heads), split(k, self.groups), split(v, self.groups), mask)
        return y.transpose(1, 2).flatten(2)


SDPA = {
    "plain": lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v),
    "scaled": lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, scale=0.3),
    "causal": lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    "bool": lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m > 0.5),
    "added": lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m),
    "grouped": lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
    "spelled": lambda q, k, v, m: (q @ k.transpose(-2, -1) / 8.0).softmax(-1) @ v,
    "by a tensor": lambda q, k, v, m: (q @ k.transpose(-2, -1) * m[0, 0, 0, 0]).softmax(-1) @ v,
    "twice": lambda q, k, v, m: twice(q @ k.transpose(-2, -1) / 8.0, lambda s: s.amax(-1, keepdim=True)) @ v,
    "summed again": lambda q, k, v, m: once(q @ k.transpose(-2, -1) / 8.0) @ v,
    "triu": lambda q, k, v, m: hidden(q, k, torch.ones(9, 9, dtype=torch.bool).triu(1), -torch.inf) @ v,
    "tril": lambda q, k, v, m: hidden(q, k, torch.ones(9, 9).tril() == 0, torch.finfo(q.dtype).min) @ v,
}
CAUSAL = ("causal", "grouped", "triu", "tril")


def hidden(q, k, mask, low):
    """Weights as code before F.scaled_dot_product_attention has them."""
    return (q @ k.transpose(-2, -1) / 8.0).masked_fill(mask, low).softmax(-1)


def twice(s, most):
    """A softmax whose numerator is written out again for its sum."""
    return (s - most(s)).exp() / (s - most(s)).exp().sum(-1, keepdim=True)


def once(s):
    """The same around one maximum."""
    m = s.amax(-1, keepdim=True)
    return twice(s, lambda _: m)


@pytest.mark.parametrize("kind", SDPA)
def test_torch(registry, kind):
    groups = 2 if kind == "grouped" else 4
    module = Heads(SDPA[kind], 4, groups, 64)
    q, k, v = torch.randn(2, 9, 256), torch.randn(2, 9, groups * 64), torch.randn(2, 9, groups * 64)
    given = (q, k, v, torch.rand(2, 1, 9, 9))
    found = registry.match(module, *given).matches
    words = ["sdpa_masked", "sdpa_masked_training"] if kind in ("bool", "added") else ["sdpa", "sdpa_training"]
    words += ["sdpa_position_bias_training"] if kind == "added" else []
    assert [m.fusion for m in found] == [f"attention.{w}" for w in words]
    assert found[0].attributes["is_causal"] == (kind in CAUSAL)
    assert found[0].choices["scaling"] == ("given" if kind in ("scaled", "by a tensor") else "usual")
    assert found[0].axes["G"] == groups


@pytest.mark.parametrize("kind", ["axis", "temperature"])
def test_look_alikes(registry, kind):
    """pytorch#196468, timm's xcit: a softmax over another axis, a temperature for each head."""

    def attend(q, k, v, m):
        if kind == "temperature":
            return (q @ k.transpose(-2, -1) * m.reshape(-1)[:4].reshape(4, 1, 1)).softmax(-1) @ v
        return (q @ k.transpose(-2, -1) / 8.0).softmax(-2) @ v

    given = [torch.randn(2, 9, 256) for _ in range(3)]
    found = registry.match(Heads(attend, 4, 4, 64), *given, torch.rand(2, 1, 9, 9)).matches
    assert not any(m.fusion.startswith("attention.sdpa") for m in found)


@pytest.mark.parametrize("kind", ["triangle", "beyond", "grouped"])
def test_saved_for_runtimes_without_the_operator(tmp_path, kind):
    groups = 1 if kind == "grouped" else 2
    constants = {"c": np.float32(0.3), "low": np.float32(-np.inf), "axes": np.array([2])}
    constants["m"] = np.tri(4, 6, 2 if kind == "beyond" else 0) > 0
    constants["flat"] = np.array([0, 2, 6, 8])
    nodes = [node("Where", ["m", "t", "low"], ["u"])]
    if kind == "grouped":
        nodes = [node("Identity", ["t"], ["u"])]
    repeat = []
    for x in "kv":
        if kind == "grouped":
            repeat += [
                node("Unsqueeze", [x, "axes"], [f"{x}1"]),
                node("Expand", [f"{x}1", f"{x}wide"], [f"{x}2"]),
                node("Reshape", [f"{x}2", "flat"], [f"{x}3"]),
            ]
            constants[f"{x}wide"] = np.array([3, 1, 2, 6, 8])
        else:
            repeat.append(node("Identity", [x], [f"{x}3"]))
    nodes = [
        *repeat,
        node("Transpose", ["k3"], ["kt"], perm=[0, 1, 3, 2]),
        node("MatMul", ["q", "kt"], ["s"]),
        node("Mul", ["s", "c"], ["t"]),
        *nodes,
        node("Softmax", ["u"], ["p"], axis=-1),
        node("MatMul", ["p", "v3"], ["y"]),
    ]
    read = {i for n in nodes for i in n.input}
    shapes = {"q": [3, 2, 4, 8], "k": [3, groups, 6, 8], "v": [3, groups, 6, 8]}
    proto = model(nodes, shapes, ["y"], {k: c for k, c in constants.items() if k in read})
    path = tmp_path / "m.onnx"
    lifted = lift(load(proto), OPS)
    assert [(n.op, len(n.inputs)) for n in lifted.nodes] == [("Attention", 3)]
    save(lifted, proto, path)
    onnx.checker.check_model(onnx.load(path), full_check=True)
    x = random(proto)
    same(ours(lifted, x), ort(proto, x))
    same(ort(str(path), x), ort(proto, x))
