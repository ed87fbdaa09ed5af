"""Seeded dropout: Philox against the published vectors, the mask's layout, and its statistics."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fusionreg.core.errors import GraphError
from fusionreg.core.ops import backend_of, default_vocabulary, numpy_backend
from fusionreg.core.ops.random import philox4x32, threshold

DROPOUT = default_vocabulary()["fusionreg::Dropout"].meaning

#: Random123, examples/kat_vectors, rows `philox4x32 10`: counter, key, result.
VECTORS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> tuple[int, ...]:
    return tuple(int(w, 16) for w in text.split())


def drop(x, seed=7, offset=3, p=0.3):
    return DROPOUT(numpy_backend(), np.asarray(x), np.array([seed, offset]), p=p)


@pytest.mark.parametrize(("counter", "key", "expected"), VECTORS)
def test_philox_known_answers(counter, key, expected):
    assert philox4x32(words(counter), words(key)) == words(expected)
    arrays = philox4x32(tuple(np.full(3, w) for w in words(counter)), tuple(np.int64(w) for w in words(key)))
    for got, wanted in zip(arrays, words(expected), strict=True):
        np.testing.assert_array_equal(got, np.full(3, wanted))


def test_the_layout_of_the_mask():
    """Element i is word i % 8 of block i // 8, its 16 bits the low half first; written out for one probability."""
    seed, offset, p = -0x123456789ABCDEF, 1 << 40 | 5, 0.4
    expected = []
    for i in range(37):
        counter = (i // 8, 0, offset & 0xFFFFFFFF, offset >> 32)
        out = philox4x32(counter, (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF))
        word = out[i % 8 // 2] >> 16 * (i % 2) & 0xFFFF
        expected.append(65536 / (65536 - 26214) if word >= 26214 else 0.0)
    np.testing.assert_array_equal(drop(np.ones(37), seed, offset, p), expected)
    np.testing.assert_array_equal(drop(np.ones((1, 37)), seed, offset, p)[0], expected)


def test_the_mask_follows_the_logical_index():
    x = np.arange(1.0, 25.0).reshape(4, 6)
    expanded = np.broadcast_to(np.ones((1, 64)), (32, 64))
    np.testing.assert_array_equal(drop(np.asfortranarray(x)), drop(x))
    rows = drop(expanded)
    assert len({r.tobytes() for r in rows}) == 32  # each expanded element has a mask of its own


def test_torch_and_numpy_agree():
    x = np.random.default_rng(0).standard_normal((5, 77)).astype(np.float32)
    xt, rng = torch.from_numpy(x), torch.tensor([-5, 1 << 50])
    got = DROPOUT(backend_of(xt), xt, rng, p=0.37)
    np.testing.assert_array_equal(got.numpy(), drop(x, -5, 1 << 50, 0.37))


@pytest.mark.parametrize("p", [0.0, 1e-9])
def test_nothing_dropped_is_the_identity(p):
    x = np.array([np.nan, np.inf, -0.0, 1e-45, 3.0])
    assert drop(x, p=p).tobytes() == x.tobytes()


def test_everything_dropped_is_zero():
    np.testing.assert_array_equal(drop([np.nan, np.inf, -np.inf, 1.0], p=1.0), np.zeros(4))
    assert drop(np.ones((0, 3)), p=0.5).shape == (0, 3)


@pytest.mark.parametrize("p", [-0.1, 1.1, float("nan"), float("inf")])
def test_what_is_no_probability_is_refused(p):
    with pytest.raises(GraphError, match="probability"):
        drop([1.0], p=p)


def test_the_threshold_is_that_of_float32():
    assert threshold(0.3) == 19661 and threshold(0.5) == 32768 and threshold(1.0) == 65536
    assert threshold(0.5 / 65536) == 0 and threshold(1.5 / 65536) == 2  # half to even


def test_kept_fractions_and_independence():
    """Overall, per lane, per row and per column; consecutive offsets and other seeds are uncorrelated."""
    n, p = 1 << 20, 0.3
    ones = np.ones((1024, 1024), np.float32)
    mask = drop(ones, 1, 0, p) > 0
    assert set(np.unique(drop(ones, 1, 0, p))) == {0.0, np.float32(65536 / (65536 - 19661))}
    assert abs(mask.mean() - 0.7) < 0.0018
    flat = mask.reshape(-1)
    for m in (2, 4, 8):
        for lane in range(m):
            assert abs(flat[lane::m].mean() - 0.7) < 4 * np.sqrt(0.21 * m / n)
    for axis in (0, 1):
        assert np.abs(mask.mean(axis=axis) - 0.7).max() < 5.5 * np.sqrt(0.21 / 1024)
    for seed, offset in ((1, 1), (2, 0), (1, 1 << 32), (1 << 32 | 1, 0)):
        other = (drop(ones, seed, offset, p) > 0).reshape(-1)
        assert abs(np.corrcoef(flat, other)[0, 1]) < 4 / np.sqrt(n)
