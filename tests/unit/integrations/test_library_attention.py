"""Competitors of our attention: torch's own backends."""

from __future__ import annotations

import contextlib
import itertools

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


def of_sequences(outputs: int):
    """Sequences of 4 and 2 tokens, forward (``outputs`` 1 or 2) or backward (3)."""
    net = kit.Net()
    q, k, v = (net.input(n, "bfloat16", (6, h, 8)) for n, h in (("q", 4), ("k", 2), ("v", 2)))
    around = [net.input(n, "bfloat16", (6, 4, 8)) for n in ("dy", "y")] if outputs == 3 else []
    lse = [net.input("lse", "float32", (4, 6))] if outputs == 3 else []
    edges = [net.input(n, "int32", (3,)) for n in ("cu_q", "cu_k")]
    op = f"fusionreg::VarlenAttention{'Grad' if outputs == 3 else ''}"
    found = net.op(op, *around[:1], q, k, v, *around[1:], *lse, *edges, outputs=outputs, is_causal=1)
    return net.build([found] if outputs == 1 else found)


@pytest.mark.parametrize("outputs", [1, 2, 3])
def test_torch_attends_within_sequences_forward_and_backward(monkeypatch, outputs) -> None:
    """The lengths of sequences are read once for each set of arrays, and gradients have one forward pass."""
    asked = []

    def attend(q, k, v, cu_q, cu_k, longest_q, longest_k, **given):
        asked.append((longest_q, longest_k, given))
        parts = [
            torch.nn.functional.scaled_dot_product_attention(
                *(x[a:b].transpose(0, 1) for x in (q, k, v)), is_causal=True, enable_gqa=True
            ).transpose(0, 1)
            for a, b in itertools.pairwise(cu_q.tolist())
        ]
        return torch.cat(parts)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(library_attention.varlen, "varlen_attn", attend)
    (peer,) = library_peers(of_sequences(outputs), OPS)
    assert (peer.name, peer.computes) == ("flash", "")
    q, k, v, dy = (torch.randn(6, h, 8) for h in (4, 2, 2, 4))
    edges = torch.tensor([0, 4, 6], dtype=torch.int32)
    around = (dy, q, k, v, None, None) if outputs == 3 else (q, k, v)
    for _ in range(2):
        found = peer.call(*around, edges, edges)
    lse = {"return_aux": library_attention.varlen.AuxRequest(lse=True)} if outputs == 2 else {}
    given = {"window_size": (-1, 0), "scale": None, "enable_gqa": True, **lse}
    assert asked == [(4, 4, given)] * (1 if outputs == 3 else 2)
    (*wanted,) = peer.exact(*around, edges, edges) if outputs < 3 else ()
    if outputs == 3:
        leaves = [x.double().requires_grad_() for x in (q, k, v)]
        wanted = torch.autograd.grad(attend(*leaves, edges, edges, 4, 4), leaves, dy.double())
    for got, want in zip(found if outputs == 3 else (found,), wanted, strict=outputs != 2):
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5)
