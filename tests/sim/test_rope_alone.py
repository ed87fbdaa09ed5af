"""Rotary embedding alone in the simulator, against complex numbers, and found in a model that spells it out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from catalogs import shipped
from torch_blocks import llama_block

import fusionreg
from fusionreg.core.cache import Cache
from fusionreg.core.conformance import run
from fusionreg.core.frozen import FrozenDict
from fusionreg.core.runtime import Runtime

CATALOG = shipped("attention")
B, S, H, G, D, L = 2, 5, 4, 2, 16, 24


def test_conforms():
    report = run(CATALOG, ["attention.rope"], device="sim", cases="quick", cache=Cache())
    assert report.ok, "\n".join(map(str, report.failures))
    assert report.counts["PASSED"] >= 40


def call(name, *given, **attributes):
    entry = CATALOG[name]
    kernels = tuple(replace(k, spec=k.spec.model_copy(update={"pending": ""})) for k in entry.kernels)
    catalog = replace(CATALOG, fusions=FrozenDict({name: replace(entry, kernels=kernels)}))
    return Runtime(catalog, device="sim").call(name, *given, **attributes)


def turned(x, angles, interleaved=False):
    a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., : D // 2], x[..., D // 2 :])
    z = (a + 1j * b) * np.exp(1j * angles)
    return np.stack([z.real, z.imag], -1).reshape(x.shape) if interleaved else np.concatenate([z.real, z.imag], -1)


@pytest.mark.parametrize("interleaved", [0, 1])
def test_by_position(interleaved):
    rng = np.random.default_rng(5)
    q, k = (rng.standard_normal((B, S, h, D)).astype(np.float32).transpose(0, 2, 1, 3) for h in (H, G))
    angles, positions = rng.uniform(0, 6, (L, D // 2)), rng.integers(0, L, (B, S), np.int32)
    tables = [f(angles).astype(np.float32) for f in (np.cos, np.sin)]
    found = call("attention.rope", q, k, *tables, positions, interleaved=interleaved)
    for y, x in zip(found, (q, k), strict=True):
        np.testing.assert_allclose(y, turned(x, angles[positions][:, None], interleaved), atol=1e-5)
        assert y.strides == x.strides  # heads lie as they did


@pytest.mark.parametrize("shape", [(S,), (1, 1, S), (B, 1, S)])
def test_by_tables(shape):
    rng = np.random.default_rng(6)
    q, k = (rng.standard_normal((B, h, S, D)).astype(np.float32) for h in (H, G))
    angles = rng.uniform(0, 6, (*shape, D // 2))
    tables = [np.concatenate([f(angles)] * 2, -1).astype(np.float32) for f in (np.cos, np.sin)]
    for y, x in zip(call("attention.rope_half", q, k, *tables), (q, k), strict=True):
        np.testing.assert_allclose(y, turned(x, angles), atol=1e-5)


class Rotary(torch.nn.Module):
    def __init__(self, turn):
        super().__init__()
        self.turn = turn

    def forward(self, q, k, cos, sin):
        return tuple(x * cos + self.turn(x) * sin for x in (q, k))


TURNS = {
    "half": lambda x: torch.cat((-x[..., D // 2 :], x[..., : D // 2]), -1),
    "chunk": lambda x: (lambda a, b: torch.cat((-b, a), -1))(*x.chunk(2, -1)),
    "third": lambda x: torch.cat((-x[..., D // 4 :], x[..., : D // 4]), -1),  # no half
    "unsigned": lambda x: torch.cat((x[..., D // 2 :], x[..., : D // 2]), -1),
    "other": lambda x: torch.cat((-x[..., : D // 2], x[..., D // 2 :]), -1),
}


@pytest.mark.parametrize("turn", TURNS)
def test_spelled_out(turn):
    registry = fusionreg.load_registry(allow=("attention",), device="sim")
    given = [torch.randn(B, h, S, D) for h in (H, G)] + [torch.randn(1, 1, S, D) for _ in range(2)]
    found = [m.fusion for m in registry.match(Rotary(TURNS[turn]), *given).matches]
    assert ("attention.rope_half" in found) == (turn in ("half", "chunk"))


def test_in_a_decoder():
    """Llama's tables, which are constants where positions are."""
    module, given = llama_block()
    registry = fusionreg.load_registry(allow=("attention",), device="sim")
    found = [m for m in registry.match(module.eval(), *given).matches if m.fusion == "attention.rope_half"]
    assert found and all({m.axes["H"], m.axes["G"]} == {4, 2} for m in found)
