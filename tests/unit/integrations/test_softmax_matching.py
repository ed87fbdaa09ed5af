"""Scores of exported models: which softmax takes which mask in, in every legal spelling, and what is left alone."""

from __future__ import annotations

import math

import numpy as np
import onnx_models
import pytest
import softmax as kit
import torch

from fusionreg.api import Registry
from fusionreg.integrations.onnx.reference import run

B, H, Q, K = 2, 3, 6, 8
LOWEST = torch.finfo(torch.float32).min


class Scores(torch.nn.Module):
    """A function of scores and what else it is called with; ``tri`` is a buffer, as GPT-2 has it."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.register_buffer("tri", torch.ones(1, 1, 16, 16).tril())

    def forward(self, *args):
        return self.function(self, *args)


def later(diagonal=1):
    return torch.ones(Q, K, dtype=torch.bool).triu(diagonal)


X, KEYS, FULL = (B, H, Q, K), (B, 1, 1, K), (B, 1, Q, K)
SPELLINGS = {
    "masked_fill": ("mask_softmax", lambda s, x, m: (x * 0.3).masked_fill(m, -math.inf), KEYS),
    "divided": ("mask_softmax", lambda s, x, m: (x / math.sqrt(24)).masked_fill(m, -1e4), FULL),
    "where": ("mask_softmax", lambda s, x, m: torch.where(m, x, LOWEST), FULL),
    "additive": ("bias_softmax", lambda s, x, m: x * 0.25 + m.float() * -1e4, KEYS),
    "triangle": ("causal_softmax", lambda s, x: (x * 0.3).masked_fill(later(), -math.inf), None),
    "buffer": ("causal_softmax", lambda s, x: torch.where(s.tri[:, :, :Q, :K] != 0, x, LOWEST), None),
    "positions": (
        "causal_softmax",
        lambda s, x: x.masked_fill(torch.arange(K)[None] > torch.arange(Q)[:, None] + K - Q, -math.inf),
        None,
    ),
    "both": ("mask_causal_softmax", lambda s, x, m: x.masked_fill(m, -1e4).masked_fill(later(), -1e4), KEYS),
    "and": ("mask_causal_softmax", lambda s, x, m: torch.where(m & ~later(), x, -1e9), KEYS),
    "causal bias": ("bias_causal_softmax", lambda s, x, m: (x + m.float()).masked_fill(later(3), -1e9), FULL),
    "no mask": ("softmax", lambda s, x: x / 3.0, None),
}


@pytest.fixture(scope="module")
def fusions():
    return Registry(kit.awake(), device="sim")


def whole(fusions, module, *args):
    """The largest match: its fusion, and how many nodes it covers."""
    found = max(fusions.match(module, *args), key=lambda m: len(m.nodes), default=None)
    return ("", 0) if found is None else (found.fusion.removeprefix("attention."), len(found.nodes))


@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings_of_torch(name, fusions):
    """All of what stands before the softmax is in the match."""
    wanted, function, mask = SPELLINGS[name]
    module = Scores(lambda s, *args: function(s, *args).softmax(-1))
    args = (torch.randn(X), *([] if mask is None else [torch.rand(mask) < 0.3]))
    fusion, nodes = whole(fusions, module, *args)
    outside = {"additive": 2, "causal bias": 1}.get(name, 0)  # what makes numbers of a bool mask
    assert (fusion, nodes) == (wanted, len(fusions.graph(module, *args).nodes) - outside)


@pytest.mark.parametrize("name", ["divided", "positions", "causal bias"])
def test_values_of_torch(name, fusions):
    """Against the definition in float64: finite and infinite numbers for what is hidden, last keys aligned."""
    wanted, function, mask = SPELLINGS[name]
    x, m = torch.randn(X), torch.rand(X if mask is None else mask) < 0.3
    args = (x,) if mask is None else (x, m)
    module = Scores(lambda s, *args: function(s, *args).softmax(-1))
    got = fusions.fuse(module, *args, policy="aggressive")(*args)
    s, m = x.double().numpy(), m.numpy()
    scores = {
        "divided": lambda: np.where(m, -1e4, s / np.float32(math.sqrt(24))),
        "positions": lambda: np.where(kit.visible(Q, K, K - Q), s, -math.inf),
        "causal bias": lambda: np.where(kit.visible(Q, K, 2), s + m, -1e9),
    }[name]()
    np.testing.assert_allclose(got.numpy(), kit.softmax(scores), rtol=1e-5, atol=1e-7)
    assert f"attention.{wanted}" in {k.split("/")[0] for k in fusions.runtime.kernels_used}


LOOKALIKES = {
    "axis": lambda s, x, m: x.masked_fill(m, -1e4).softmax(-2),
    "temperature": lambda s, x, m: (x * torch.arange(1.0, H + 1).view(H, 1, 1)).masked_fill(m, -1e4).softmax(-1),
    "scores read": lambda s, x, m: torch.stack([(t := x.masked_fill(m, -1e4)).softmax(-1), t]),
    "mask per element": lambda s, x, m: torch.where(m, x.flip(-1), x).softmax(-1),
}


@pytest.mark.parametrize("name", LOOKALIKES)
def test_look_alikes(name, fusions):
    module = Scores(LOOKALIKES[name])
    args = torch.randn(X), torch.rand(KEYS) < 0.3
    fusion, nodes = whole(fusions, module, *args)
    assert fusion in ({"axis": ("",), "temperature": ("mask_softmax",)}.get(name, ("softmax",)))
    assert nodes == {"axis": 0, "temperature": 2}.get(name, 1)  # the scale of each head stays outside


CROSS = torch.nn.functional.cross_entropy
LOSSES = {
    "mean": (lambda s, x, t: CROSS(x, t), "cross_entropy"),
    "sum": (lambda s, x, t: CROSS(x, t, reduction="sum", ignore_index=2), "cross_entropy"),
    "none": (lambda s, x, t: CROSS(x, t, reduction="none"), "cross_entropy_rows"),
    "logs": (lambda s, x, t: torch.nn.functional.nll_loss(x.log_softmax(-1), t), "cross_entropy"),
    "smoothed": (lambda s, x, t: CROSS(x, t, label_smoothing=0.1), ""),
    "weighed": (lambda s, x, t: CROSS(x, t, weight=torch.arange(1.0, K + 1)), ""),
    "probabilities": (lambda s, x, t: CROSS(x, torch.nn.functional.one_hot(t, K).float()), ""),
    "other axis": (lambda s, x, t: torch.nn.functional.nll_loss(x.log_softmax(0), t), ""),
    "logs read": (lambda s, x, t: torch.nn.functional.nll_loss(y := x.log_softmax(-1), t) + y.sum(), ""),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses(name):
    function, fusion = LOSSES[name]
    losses = Registry(kit.ready("cross_entropy"), device="sim")
    found = losses.match(Scores(function), torch.randn(Q, K), torch.tensor([0, K - 1, 2] * Q)[:Q]).matches
    assert [m.fusion for m in found] == ([f"attention.{fusion}"] if fusion else [])


def test_a_mask_that_makes_more_of_the_scores(fusions):
    """One set of scores, a mask for each of two: the softmax alone."""
    module = Scores(lambda s, x, m: (x + m).softmax(-1))
    assert whole(fusions, module, torch.randn(1, H, Q, K), torch.randn(FULL)) == ("softmax", 1)


def test_rows_that_torch_makes_zero(fusions):
    """Attention of torch with a mask given at run time looks for rows without any key: not these fusions' softmax."""

    def attend(s, q, k, v, m):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, m)

    q, k, v = torch.randn(B, H, Q, 8), torch.randn(B, H, K, 8), torch.randn(B, H, K, 8)
    fusion, nodes = whole(fusions, Scores(attend), q, k, v, torch.rand(FULL) < 0.5)
    assert (fusion, nodes) in (("softmax", 1), ("", 0))


def onnx_scores(nodes, inputs, constants, opset=20):
    return onnx_models.model(nodes, inputs, ["y"], constants, opset)


@pytest.mark.parametrize("how", ["constant", "trilu"])
def test_onnx(how, fusions):
    """A triangle as a constant, or made by Trilu; the fused file's functions say it with stock operators."""
    node = onnx_models.node
    tri = {"tri": kit.visible(Q, K)} if how == "constant" else {"ones": np.ones((Q, K), bool)}
    made = [] if how == "constant" else [node("Trilu", ["ones"], ["tri"], upper=0)]
    constants = {**tri, "c": np.array(0.3, np.float32), "low": np.array(-1e9, np.float32)}
    nodes = [
        *made, node("Mul", ["x", "c"], ["s"]), node("Where", ["m", "s", "low"], ["k"]),
        node("Where", ["tri", "k", "low"], ["t"]), node("Softmax", ["t"], ["y"], axis=3),
    ]  # fmt: skip
    model = onnx_scores(nodes, {"x": list(X), "m": (list(KEYS), "bool")}, constants)
    fusion, count = whole(fusions, model)
    assert (fusion, count) == ("mask_causal_softmax", 4)
    rng = np.random.default_rng(0)
    given = {"x": rng.standard_normal(X).astype(np.float32), "m": rng.random(KEYS) < 0.7}
    fused = fusions.fuse(model, policy="aggressive")
    scores = np.where(kit.visible(Q, K) & given["m"], given["x"].astype(np.float64) * np.float32(0.3), -1e9)
    np.testing.assert_allclose(fused(**given)["y"], kit.softmax(scores), rtol=1e-5, atol=1e-7)
    assert "attention.mask_causal_softmax" in {k.split("/")[0] for k in fusions.runtime.kernels_used}
    assert not fusions.runtime.fallbacks
    np.testing.assert_allclose(run(model, given)["y"], kit.softmax(scores), rtol=1e-5, atol=1e-6)
