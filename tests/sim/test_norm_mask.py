"""The packed form of the dropout mask: bit for bit the vocabulary's, for every kind of threshold, seed and offset."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fusionreg.core.ops import default_vocabulary, numpy_backend

SHARED = Path(__file__).parents[2] / "templates"
KERNEL = """
extern "C" __global__ void k(const long long* rng, unsigned* out, float* factor, float p, long long first) {
  const fr::PackedDropout dropout(rng, p);
  unsigned keep[4];
  dropout.keep(static_cast<unsigned>(first) + threadIdx.x, keep);
  for (int i = 0; i < 4; ++i) out[threadIdx.x * 4 + i] = keep[i];
  if (threadIdx.x == 0) *factor = dropout.factor;
}
"""
BLOCKS = 512


@pytest.fixture(scope="module")
def packed(build, geometry):
    text = "".join((SHARED / f"{name}.cuh.j2").read_text("utf-8") for name in ("fusionreg", "philox"))
    kernel = build(text + KERNEL)

    def mask(rng, p, first=0):
        words, factor = np.zeros(4 * BLOCKS, np.uint32), np.zeros(1, np.float32)
        kernel.launch([rng, words, factor, p, first], geometry(block=(BLOCKS, 1, 1)))
        halves = words.view(np.uint16)
        assert np.isin(halves, (0, 0xFFFF)).all()
        return halves == 0xFFFF, float(factor[0])

    return mask


def wanted(rng, p, first=0):
    """What is kept, by the operator's meaning."""
    elements = np.ones(8 * (first + BLOCKS))
    made = default_vocabulary()["fusionreg::Dropout"].meaning(numpy_backend(), elements, rng, p=p)[8 * first :]
    return made > 0


@pytest.mark.parametrize("t", [0, 1, 2, 6554, 32767, 32768, 32769, 45875, 65534, 65535, 65536])
@pytest.mark.parametrize("rng", [(0, 0), (11, 2), (-1, 1 << 33), (1 << 62, -5)], ids=str)
def test_the_mask(packed, rng, t):
    state = np.array(rng)
    got, factor = packed(state, t / 65536)
    np.testing.assert_array_equal(got, wanted(state, t / 65536))
    assert factor == pytest.approx(65536 / (65536 - t) if t < 65536 else 0, rel=1e-6)


def test_later_blocks(packed):
    state = np.array((5, 6))
    np.testing.assert_array_equal(packed(state, 0.4, 1000)[0], wanted(state, 0.4, 1000))
