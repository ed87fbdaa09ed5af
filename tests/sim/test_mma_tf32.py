"""Products of tf32 operands: one is as wide as tf32, two parts of an operand are as good as fp32."""

from __future__ import annotations

import numpy as np
import pytest

from fusionreg.core.render import shared_library

LIBRARY = (shared_library() / "fusionreg.cuh.j2").read_text() + (shared_library() / "mma_tf32.cuh.j2").read_text()
G, T = np.arange(32) // 4, np.arange(32) % 4

PRODUCT = """
extern "C" __global__ void k(const float* a, const float* b, const float* c, float* y) {
  const int lane = threadIdx.x;
  float sum[4] = {c[4 * lane], c[4 * lane + 1], c[4 * lane + 2], c[4 * lane + 3]};
  unsigned high[4], low[4], right[2];
  for (int i = 0; i < 4; ++i) {
    const float top = fr::tf32_part(a[4 * lane + i]);
    high[i] = __float_as_uint(top), low[i] = __float_as_uint(a[4 * lane + i] - top);
  }
  for (int i = 0; i < 2; ++i) right[i] = __float_as_uint(b[2 * lane + i]);
  if (PARTS == 2) fr::mma_m16n8k8_tf32(sum, low, right);
  fr::mma_m16n8k8_tf32(sum, high, right);
  for (int i = 0; i < 4; ++i) y[4 * lane + i] = sum[i];
}
"""


@pytest.mark.parametrize(("parts", "bits"), [(1, 10), (2, 20)])
def test_a_product(build, geometry, parts, bits) -> None:
    """b is of fp16, which tf32 holds: what is lost is what the parts of a lack."""
    rng = np.random.default_rng(parts)
    a = rng.standard_normal((16, 8)).astype(np.float32)
    b = rng.standard_normal((8, 8)).astype(np.float16).astype(np.float32)
    c = rng.standard_normal((16, 8)).astype(np.float32)
    ra = np.stack([a[G, T], a[G + 8, T], a[G, T + 4], a[G + 8, T + 4]], axis=1)
    rb = np.stack([b[T, G], b[T + 4, G]], axis=1)
    rc = np.stack([c[G, 2 * T], c[G, 2 * T + 1], c[G + 8, 2 * T], c[G + 8, 2 * T + 1]], axis=1)
    ry = np.zeros_like(rc)
    kernel = build(f"#define PARTS {parts}\n{LIBRARY}{PRODUCT}")
    kernel.launch([ra.copy(), rb.copy(), rc.copy(), ry], geometry())
    y = np.empty((16, 8))
    y[G, 2 * T], y[G, 2 * T + 1], y[G + 8, 2 * T], y[G + 8, 2 * T + 1] = ry.T
    exact = a.astype(float) @ b.astype(float) + c
    error = np.abs(y - exact) / (np.abs(a) @ np.abs(b) + np.abs(c))
    assert error.max() <= 2.0**-bits
    assert error.max() >= 2.0 ** -(bits + 8)  # it is no better either: 1 part is not fp32
