"""Competitors of our gradients of attention: torch's own backends."""

from __future__ import annotations

import contextlib

import graphs as kit
import pytest
import torch

from fusionreg.integrations.torch import library_attention
from fusionreg.integrations.torch.library_peers import library_peers

OPS = kit.vocabulary()


def gradient_of_attention(*masks, dtype="bfloat16", keys=6, **attributes):
    net = kit.Net()
    q, k, v = (net.input(n, dtype, (1, h, s, 8)) for n, h, s in (("q", 4, 6), ("k", 2, keys), ("v", 2, keys)))
    dy, y = (net.input(n, dtype, (1, 4, 6, 8)) for n in ("dy", "y"))
    lse = net.input("lse", "float32", (1, 4, 6))
    mask = [net.input(m, dtype, (6, keys)) for m in masks]
    return net.build(net.op("fusionreg::AttentionGrad", dy, q, k, v, y, lse, *mask, outputs=3, **attributes))


def test_backends_of_torch_compute_gradients_of_attention(monkeypatch) -> None:
    """The forward pass of each set of arrays runs once, on the backend that is asked for."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    peers = library_peers(gradient_of_attention(is_causal=1, scale=0.5), OPS)
    assert [(p.name, p.computes) for p in peers] == [("cudnn", ""), ("flash", "")]
    asked, attend = [], torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(library_attention, "sdpa_kernel", lambda backend: contextlib.nullcontext(asked.append(backend)))
    q, k, v, dy = (torch.randn(1, h, 6, 8) for h in (4, 2, 2, 4))
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    y = attend(*leaves, is_causal=True, scale=0.5, enable_gqa=True)
    wanted = torch.autograd.grad(y, leaves, dy.double())
    for _ in range(2):
        for found, want in zip(peers[1].call(dy, q, k, v, None, None), wanted, strict=True):
            torch.testing.assert_close(found.double(), want, rtol=1e-4, atol=1e-5)
    assert asked == [torch.nn.attention.SDPBackend.FLASH_ATTENTION]


@pytest.mark.parametrize(
    ("masks", "given"),
    [(("mask",), {}), ((), {"softcap": 2.0}), ((), {"keys": 8, "is_causal": 1}), ((), {"dtype": "float32"})],
)  # fmt: skip
def test_backends_of_torch_are_not_asked_for_more(monkeypatch, masks, given) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert library_peers(gradient_of_attention(*masks, **given), OPS) == ()
