"""Sequences one behind the other, as torch.nn.attention.varlen has them, and keys in pages: found, and fused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fusionreg

varlen = pytest.importorskip("torch.nn.attention.varlen")
F = nn.functional


@pytest.fixture(scope="module")
def registry():
    return fusionreg.load_registry(allow=("attention",), device="sim")


class Documents(nn.Module):
    def __init__(self, **given):
        super().__init__()
        self.given = given

    def forward(self, q, k, v, cu_q, cu_k):
        return varlen.varlen_attn(q, k, v, cu_q, cu_k, 9, 18, enable_gqa=True, **self.given) * 2


def documents():
    q, k, v = (torch.randn(n, h, 64, dtype=torch.bfloat16) for n, h in ((20, 4), (30, 2), (30, 2)))
    return q, k, v, *(torch.tensor(c, dtype=torch.int32) for c in ([0, 9, 11, 20], [0, 12, 12, 30]))


@pytest.mark.parametrize(
    ("given", "facts"),
    [
        ({}, {"is_causal": 0, "left_window_size": -1}),
        ({"window_size": (-1, 0)}, {"is_causal": 1}),
        ({"window_size": (5, 2), "scale": 0.3}, {"left_window_size": 5, "right_window_size": 2, "scale": 0.3}),
    ],
)
def test_varlen(registry, given, facts):
    found, training = registry.match(Documents(**given), *documents()).matches
    assert (found.fusion, training.fusion) == ("attention.sdpa_varlen", "attention.sdpa_varlen_training")
    assert {n: found.attributes[n] for n in facts} == facts


def test_varlen_statistics_stay(registry):
    """Where the log-sum-exp is read as well, the call is not one that there is a form for."""

    class Both(nn.Module):
        def forward(self, *x):
            y, lse = varlen.varlen_attn(*x, 9, 18, enable_gqa=True, return_aux=varlen.AuxRequest(lse=True))
            return y, lse + 1

    with pytest.raises(fusionreg.FusionregError, match="varlen_attn"):
        registry.match(Both(), *documents())


def test_varlen_values(registry):
    """Each sequence by itself, its last query at its last key; a sequence without keys gives 0."""
    q, k, v, cu_q, cu_k = documents()
    y = registry.call(
        "attention.sdpa_varlen", *(x.float().numpy() for x in (q, k, v)), cu_q.numpy(), cu_k.numpy(), is_causal=1,
        scaling="usual",
    )  # fmt: skip
    for i in range(3):
        (a, b), (c, d) = cu_q[i : i + 2].tolist(), cu_k[i : i + 2].tolist()
        seen = torch.ones(b - a, d - c, dtype=torch.bool).tril(d - c - (b - a))
        one = [x.float().transpose(0, 1) for x in (q[a:b], k[c:d], v[c:d])]
        want = torch.zeros(4, b - a, 64)
        if d > c:
            want = F.scaled_dot_product_attention(*one, attn_mask=seen, enable_gqa=True)
        torch.testing.assert_close(torch.from_numpy(y[a:b]).transpose(0, 1), want, rtol=1e-4, atol=1e-5)


class Paged(nn.Module):
    def forward(self, q, keys, values, table, lengths):
        k = keys[table].reshape(table.shape[0], -1, 2, 64).transpose(1, 2)
        v = values[table].flatten(1, 2).transpose(1, 2)
        seen = torch.arange(k.shape[2]) < lengths[:, None]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None, None], enable_gqa=True)


def test_pages(registry):
    torch.manual_seed(0)
    keys, values = torch.randn(7, 16, 2, 64), torch.randn(7, 16, 2, 64)
    x = torch.randn(3, 4, 1, 64), keys, values, torch.randint(0, 7, (3, 4)), torch.tensor([3, 64, 20])
    found = {m.fusion for m in registry.match(Paged(), *x).matches}
    assert found == {"attention.sdpa_paged", "attention.sdpa_lengths"}  # the planner has the one that gathers nothing
    y = registry.call("attention.sdpa_paged", *(t.numpy() for t in x), scaling="usual")
    torch.testing.assert_close(torch.from_numpy(y), Paged()(*x), rtol=1e-4, atol=1e-5)
