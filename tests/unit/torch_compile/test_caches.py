"""Decoding with caches of keys as models write them: in place, by concatenation, in pages."""

from __future__ import annotations

import attention as kit
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fusionreg.api import Registry

from .conftest import fused, same

B, H, G, D, PLACES, PAGE = 2, 4, 2, 16, 16, 4


@pytest.fixture(autouse=True)
def inference():
    with torch.no_grad():
        yield


def turned(x):
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


class Static:
    """Places for all keys, of which the first ``length`` are filled; transformers' StaticCache."""

    def __init__(self):
        self.keys, self.values = (torch.zeros(B, G, PLACES, D) for _ in range(2))
        self.length = torch.zeros((), dtype=torch.long)

    def update(self, k, v):
        at = torch.arange(k.shape[2]) + self.length
        self.length.add_(k.shape[2])
        self.keys.index_copy_(2, at, k)
        self.values.index_copy_(2, at, v)
        return self.keys, self.values, torch.arange(PLACES)[None, None, None] <= at[None, None, :, None]


class Written(Static):
    """The same, read as what the writes return."""

    def update(self, k, v):
        at = torch.arange(k.shape[2]) + self.length
        self.length.add_(k.shape[2])
        keys, values = self.keys.index_copy_(2, at, k), self.values.index_copy_(2, at, v)
        return keys, values, torch.arange(PLACES)[None, None, None] <= at[None, None, :, None]


class Dynamic:
    """What is there and what comes, one behind the other; transformers' DynamicCache."""

    def __init__(self):
        self.keys, self.values = (torch.zeros(B, G, 0, D) for _ in range(2))

    def update(self, k, v):
        before = self.keys.shape[2]
        self.keys, self.values = torch.cat([self.keys, k], 2), torch.cat([self.values, v], 2)
        return self.keys, self.values, torch.ones(k.shape[2], before + k.shape[2], dtype=torch.bool).tril(before)


class Paged:
    """Pages of four keys that a table names, slots counted over all pages; vLLM's."""

    def __init__(self):
        self.keys, self.values = (torch.zeros(9, PAGE, G, D) for _ in range(2))
        self.table, self.length = torch.tensor([[3, 1, 8, 0], [5, 2, 7, 4]]), torch.zeros((), dtype=torch.long)

    def update(self, k, v):
        at = torch.arange(k.shape[2]) + self.length
        self.length.add_(k.shape[2])
        slots = (self.table[:, at // PAGE] * PAGE + at % PAGE).flatten()
        for cache, x in ((self.keys, k), (self.values, v)):
            cache.view(-1, G, D)[slots] = x.transpose(1, 2).reshape(-1, G, D)
        keys, values = (c[self.table].view(B, PLACES, G, D).transpose(1, 2) for c in (self.keys, self.values))
        return keys, values, torch.arange(PLACES)[None, None, None] <= at[None, None, :, None]


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.project, self.out = nn.Linear(32, (H + 2 * G) * D, bias=False), nn.Linear(H * D, 32)

    def forward(self, x, cos, sin, cache):
        b, s, _ = x.shape
        q, k, v = self.project(x).view(b, s, -1, D).transpose(1, 2).split((H, G, G), 1)
        q, k = q * cos + turned(q) * sin, k * cos + turned(k) * sin
        keys, values, seen = cache.update(k, v)
        y = F.scaled_dot_product_attention(q, keys, values, attn_mask=seen, enable_gqa=True)
        return self.out(y.transpose(1, 2).reshape(b, s, -1)), keys


@pytest.mark.parametrize("kind", [Static, Written, Dynamic, Paged], ids=lambda k: k.__name__)
def test_decoding(kind, compiled, reports):
    """A prompt and a token; what is written in place is written, and what is returned of it is it."""
    torch.manual_seed(0)
    layer, mine, other = Layer(), kind(), kind()
    registry = Registry(kit.shipped("attention"), device="sim")
    step, at = compiled(layer, registry=registry, dynamic=False), 0
    keys, memory = mine.keys, mine.keys.data_ptr()
    for length in (5, 1):
        x, angles = torch.randn(B, length, 32), torch.arange(at, at + length)[:, None] * torch.rand(D // 2)
        cos, sin = (torch.cat((t, t), -1)[None, None] for t in (angles.cos(), angles.sin()))
        (y, given), (want, _) = step(x, cos, sin, mine), layer(x, cos, sin, other)
        same(y, want)
        same(mine.keys, other.keys)
        same(mine.values, other.values)
        if issubclass(kind, Static):
            assert given.data_ptr() == mine.keys.data_ptr()
        if kind is not Dynamic:
            assert mine.keys is keys and mine.keys.data_ptr() == memory and mine.length == at + length
        at += length
    names = fused(reports)
    assert names.count("attention.rope_half") == 2 and not [r for r in reports if r.refused]
    assert sum(n in ("attention.sdpa_masked", "attention.sdpa_lengths", "attention.sdpa") for n in names) == 2
