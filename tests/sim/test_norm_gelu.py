"""The cheap GELUs of 16-bit rows against float64, over the whole line of fp32."""

from __future__ import annotations

from pathlib import Path

import jinja2
import ml_dtypes
import numpy as np
import pytest
import torch

import fusionreg_norm

TEMPLATES = Path(fusionreg_norm.__file__).parent / "templates"
SOURCE = (TEMPLATES / "row_gelu.cuh.j2").read_text("utf-8")
KERNEL = """
extern "C" __global__ void k(const float* x, float* y, long long n) {
  const long long i = blockIdx.x * 256ll + threadIdx.x;
  if (i < n) {
    y[i] = row::gelu_erf(x[i]);
    y[n + i] = row::gelu_tanh(x[i]);
    y[2 * n + i] = row::gelu_erf_grad(x[i]);
    y[3 * n + i] = row::gelu_tanh_grad(x[i]);
  }
}
"""


@pytest.fixture(scope="module")
def values(build, geometry):
    """x: every exponent of fp32 with 256 mantissas, either sign, and a fine grid where the functions bend; and each
    function's values, one row each."""
    top = np.arange(0x7F800000 >> 15, dtype=np.uint32)
    bits = (top << 15 | (top * 2654435761 & 0x7FFF)).astype(np.uint32)
    x = np.concatenate([bits.view(np.float32), np.linspace(0, 16, 20001, dtype=np.float32)])
    x = np.concatenate([x, -x, np.array([np.nan, np.inf, -np.inf], np.float32)])
    y = np.full(4 * x.size, np.nan, np.float32)
    build(SOURCE + KERNEL).launch([x, y, x.size], geometry(grid=(-(-x.size // 256), 1, 1), block=(256, 1, 1)))
    return x, y.reshape(4, -1)


def exact(x, approximate):
    t = torch.tensor(x.astype(np.float64), requires_grad=True)
    if approximate == "none":  # torch's own cancels in the tail
        y = t * torch.special.erfc(-t * 0.5**0.5) / 2
    else:
        y = t * torch.sigmoid(2 * (2 / torch.pi) ** 0.5 * (t + 0.044715 * t**3))
    y.sum().backward()
    return y.detach().numpy(), t.grad.numpy()


@pytest.mark.parametrize(
    ("row", "approximate", "fixed", "growing", "floor"),
    [(0, "none", 2.6e-4, 0.0, 5e-11), (1, "tanh", 2e-6, 1e-6, 1e-36)],
)
def test_stated_error(values, row, approximate, fixed, growing, floor):
    """Over the whole line: relative, and an absolute one where the tail is nothing beside any other element."""
    x, y = values[0][:-3], values[1][row][:-3]
    want = exact(x, approximate)[0]
    a = np.minimum(np.abs(x.astype(np.float64)), 20.0)
    bound = np.abs(want) * (fixed + growing * a**3) + floor
    wrong = np.abs(y - want) > bound
    assert not wrong.any(), (x[wrong][:5], y[wrong][:5], want[wrong][:5])


@pytest.mark.parametrize("row", [0, 1])
def test_the_tail_keeps_its_sign_and_vanishes(values, row):
    x, y = values[0][:-3], values[1][row][:-3]
    assert (y[x < 0] <= 0).all() and (y[x < -14] == 0).all() and (y[x > 0] >= 0).all()


@pytest.mark.parametrize(("row", "approximate", "stated"), [(2, "none", 1.3e-4), (3, "tanh", 2e-6)])
def test_stated_error_of_the_gradient(values, row, approximate, stated):
    x, y = values[0][:-3], values[1][row][:-3]
    want = np.nan_to_num(exact(x, approximate)[1], nan=0.0)  # inf - inf of the formula, far out
    want = np.where(np.abs(x) > 1e3, (x > 0).astype(float), want)
    np.testing.assert_allclose(y, want, rtol=0, atol=stated)


def test_special_values(values):
    for row in values[1]:
        assert np.isnan(row[-3])  # of NaN
    assert values[1][1][-2] == np.inf and values[1][3][-2] == 1 and values[1][3][-1] == 0


TABLE = """
#include <cuda_bf16.h>
namespace fr {{ using i64 = long long; }}
namespace row {{
__device__ unsigned both(float low, float high) {{
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const unsigned&>(pair);
}}
}}  // namespace row
{table}
extern "C" __global__ void k(unsigned* out) {{  // [65536] value and slope of every bfloat16
  extern __shared__ unsigned char memory[];
  const row::GeluTable table{{memory}};
  table.fill();
  __syncthreads();
  for (unsigned x = 2 * threadIdx.x; x < 65536; x += 2 * blockDim.x) {{
    unsigned values, slopes;
    table.at(row::GeluTable::places(x | (x + 1) << 16, table.base(), row::GeluTable::from_least(1)), values, slopes);
    out[x] = (values & 0xffffu) | slopes << 16;
    out[x + 1] = values >> 16 | (slopes & 0xffff0000u);
  }}
}}
"""


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_the_table_has_every_value_as_the_chain_rounds_it(build, geometry, approximate):
    """Of every bfloat16; where the table has no entry of its own, what stands there instead."""
    text = (TEMPLATES / "row_gelu_table.cuh.j2").read_text("utf-8")
    table = jinja2.Template(text).render(TANH=approximate == "tanh", include=lambda _: SOURCE)
    out = np.zeros(65536, np.uint32)
    build(TABLE.format(table=table)).launch([out], geometry(block=(256, 1, 1), shared_memory=49152))
    halves = out.view(np.uint16).reshape(-1, 2)
    value, slope = (h.copy().view(ml_dtypes.bfloat16).astype(np.float64) for h in halves.T)
    with np.errstate(invalid="ignore"):  # NaN that signals
        x = (np.arange(65536, dtype=np.uint32) << 16).view(np.float32).astype(np.float64)
    inside = (np.abs(x) > 2.0**-24) & (np.abs(x) < 255)
    want, rise = exact(x[inside], approximate)
    rounded = want.astype(ml_dtypes.bfloat16).astype(np.float64)
    same = (value[inside] == rounded) | (np.abs(want) < 1e-12)
    assert same.mean() > 0.999 and (np.abs(value[inside] - want) <= 2.0**-7 * np.abs(want) + 1e-12).all()
    np.testing.assert_allclose(slope[inside], rise, rtol=2.0**-8, atol=2.0**-9)
    assert np.isnan(value[(x >= 256) | (np.isnan(x) & ~np.signbit(x))]).all() and not value[np.abs(x) < 2.0**-24].any()
    assert not value[x <= -256].any() and not slope[x <= -256].any()
    assert out[0xFFFF] == 0  # what is dropped
