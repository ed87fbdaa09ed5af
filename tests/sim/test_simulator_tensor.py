"""Tensor-core products and matrix loads, against matrix products whose fragments follow the PTX ISA's tables."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from simulated import FULL

from fusionreg.core.errors import SimulatorError
from fusionreg.core.simulator import Checks

LANE = np.arange(32)
G, T = LANE // 4, LANE % 4

MMA = """
#include <cuda_fp16.h>
#include <cuda_bf16.h>
#include <cuda_fp8.h>
extern "C" __global__ void k(const unsigned* a, const unsigned* b, const C* c, C* d) {
  const int t = threadIdx.x;
  unsigned ra[A_REGS], rb[B_REGS];
  C rc[4], rd[4];
  for (int i = 0; i < A_REGS; ++i) ra[i] = a[t * A_REGS + i];
  for (int i = 0; i < B_REGS; ++i) rb[i] = b[t * B_REGS + i];
  for (int i = 0; i < 4; ++i) rc[i] = c[t * 4 + i];
  fr_sim::SHAPE<TYPE>(rd, ra, rb, rc);
  for (int i = 0; i < 4; ++i) d[t * 4 + i] = rd[i];
}
"""

CASES = [
    ("mma_m16n8k16", "__half", np.float16, 16, 2),
    ("mma_m16n8k16", "__nv_bfloat16", ml_dtypes.bfloat16, 16, 2),
    ("mma_m16n8k8", "__half", np.float16, 8, 2),
    ("mma_m16n8k8", "__nv_bfloat16", ml_dtypes.bfloat16, 8, 2),
    ("mma_m16n8k8", "fr_sim::tf32", np.float32, 8, 1),
    ("mma_m16n8k4", "fr_sim::tf32", np.float32, 4, 1),
    ("mma_m16n8k32", "__nv_fp8_e4m3", ml_dtypes.float8_e4m3fn, 32, 4),
    ("mma_m16n8k32", "__nv_fp8_e5m2", ml_dtypes.float8_e5m2, 32, 4),
    ("mma_m16n8k32", "signed char", np.int8, 32, 4),
    ("mma_m16n8k32", "unsigned char", np.uint8, 32, 4),
]


def fragments(a: np.ndarray, b: np.ndarray, per: int) -> tuple[np.ndarray, np.ndarray]:
    """A[16 k] and B[k 8] as the registers of 32 lanes, from the tables "Matrix Fragments for mma.m16n8k*"."""
    k = a.shape[1]
    blocks = k // (4 * per)
    ra, rb = np.zeros((32, 2 * blocks, per), a.dtype), np.zeros((32, blocks, per), b.dtype)
    for lane in LANE:
        for block in range(blocks):
            for i in range(per):
                column = block * 4 * per + T[lane] * per + i
                ra[lane, 2 * block, i] = a[G[lane], column]
                ra[lane, 2 * block + 1, i] = a[G[lane] + 8, column]
                rb[lane, block, i] = b[column, G[lane]]
    return ra, rb


@pytest.mark.parametrize(("shape", "ctype", "dtype", "k", "per"), CASES, ids=lambda v: str(getattr(v, "__name__", v)))
def test_mma(build, geometry, shape, ctype, dtype, k, per):
    rng = np.random.default_rng(k)
    integer = np.dtype(dtype).kind in "iu"
    if integer:
        low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
        a, b = rng.integers(low, high, (16, k)).astype(dtype), rng.integers(low, high, (k, 8)).astype(dtype)
        c = rng.integers(-1000, 1000, (16, 8)).astype(np.int32)
    else:
        a, b = rng.standard_normal((16, k)).astype(dtype), rng.standard_normal((k, 8)).astype(dtype)
        c = rng.standard_normal((16, 8)).astype(np.float32)
    ra, rb = fragments(a, b, per)
    blocks = k // (4 * per)
    head = f"#define A_REGS {2 * blocks}\n#define B_REGS {blocks}\n#define SHAPE {shape}\n#define TYPE {ctype}\n"
    rc = np.stack([c[G, 2 * T], c[G, 2 * T + 1], c[G + 8, 2 * T], c[G + 8, 2 * T + 1]], axis=1).copy()
    rd = np.zeros_like(rc)
    text = head + f"#define C {'int' if integer else 'float'}\n" + MMA
    build(text).launch([ra.view(np.uint32).ravel(), rb.view(np.uint32).ravel(), rc, rd], geometry(), checks=FULL)
    wide = np.int64 if integer else np.float64
    if ctype.endswith("tf32"):  # the upper 19 bits
        a, b = ((v.view(np.uint32) & 0xFFFFE000).view(np.float32) for v in (a, b))
    expected = a.astype(wide) @ b.astype(wide) + c
    got = np.zeros((16, 8), wide)
    got[G, 2 * T], got[G, 2 * T + 1], got[G + 8, 2 * T], got[G + 8, 2 * T + 1] = rd.T
    np.testing.assert_allclose(got, expected, rtol=0, atol=0 if integer else 2e-5)


def test_mma_with_half_accumulators(build, geometry):
    rng = np.random.default_rng(1)
    a, b = rng.standard_normal((16, 16)).astype(np.float16), rng.standard_normal((16, 8)).astype(np.float16)
    c = rng.standard_normal((16, 8)).astype(np.float16)
    ra, rb = fragments(a, b, 2)
    rc = np.stack([c[G, 2 * T], c[G, 2 * T + 1], c[G + 8, 2 * T], c[G + 8, 2 * T + 1]], axis=1).copy()
    rd = np.zeros_like(rc)
    build("""extern "C" __global__ void k(const uint4* a, const uint2* b, const uint2* c, uint2* d) {
      const int t = threadIdx.x;
      unsigned out[2];
      fr_sim::mma_m16n8k16_f16(out, &a[t].x, &b[t].x, &c[t].x);
      d[t] = make_uint2(out[0], out[1]);
    }""").launch([x.view(np.uint8).ravel() for x in (ra, rb, rc, rd)], geometry(), checks=FULL)
    expected = (a.astype(np.float64) @ b.astype(np.float64) + c).astype(np.float16)
    np.testing.assert_allclose(rd[:, 0].astype(float), expected[G, 2 * T].astype(float), rtol=2e-3, atol=2e-3)
    np.testing.assert_allclose(rd[:, 3].astype(float), expected[G + 8, 2 * T + 1].astype(float), rtol=2e-3, atol=2e-3)


MATRIX = """
extern "C" __global__ void k(const unsigned short* x, unsigned* y, unsigned short* back) {
  __shared__ __align__(16) unsigned short s[32 * 8], r[32 * 8];
  const int t = threadIdx.x;
  for (int i = 0; i < 8; ++i) s[t * 8 + i] = x[t * 8 + i];
  __syncthreads();
  unsigned v[N];
  fr_sim::ldmatrix<N, TRANS>(v, s + t % (8 * N) * 8);
  for (int i = 0; i < N; ++i) y[i * 32 + t] = v[i];
  fr_sim::stmatrix<N, TRANS>(r + t % (8 * N) * 8, v);
  __syncthreads();
  if (t < 8 * N) for (int i = 0; i < 8; ++i) back[t * 8 + i] = r[t * 8 + i];
}
"""


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("trans", [False, True])
def test_ldmatrix_and_stmatrix(build, geometry, n, trans):
    x = np.arange(256, dtype=np.uint16)
    y, back = np.zeros((n, 32), np.uint32), np.zeros((8 * n, 8), np.uint16)
    build(f"#define N {n}\n#define TRANS {str(trans).lower()}\n{MATRIX}").launch([x, y, back], geometry(), checks=FULL)
    matrices = x.reshape(4, 8, 8)[:n]
    if trans:
        matrices = matrices.transpose(0, 2, 1)
    expected = matrices.reshape(n, 32, 2).copy().view(np.uint32)[..., 0]
    np.testing.assert_array_equal(y, expected)
    np.testing.assert_array_equal(back.ravel(), x[: 64 * n])


def test_movmatrix(build, geometry):
    x, y = np.arange(64, dtype=np.uint16), np.zeros(64, np.uint16)
    build("""extern "C" __global__ void k(const unsigned* x, unsigned* y) {
      y[threadIdx.x] = fr_sim::movmatrix_trans(x[threadIdx.x]);
    }""").launch(
        [x.view(np.uint32), y.view(np.uint32)], geometry(), checks=FULL
    )  # fmt: skip
    np.testing.assert_array_equal(y.reshape(8, 8), x.reshape(8, 8).T)


@pytest.mark.parametrize(
    ("body", "detector", "says"),
    [
        ("if (t < 16) fr_sim::ldmatrix<1, false>(v, s);", "divergent-warp", "all 32 lanes"),
        ("fr_sim::ldmatrix<1, false>(v, s + t % 8 * 8 + 1);", "misaligned", "16 bytes"),
        ("fr_sim::ldmatrix<1, false>(v, x);", "bounds", "not in shared memory"),
        ("if (t < 16) fr_sim::ldmatrix<1, false>(v, s); else fr_sim::ldmatrix<1, false>(v, s);", "", ""),
        ("if (t == 31) return; fr_sim::mma_m16n8k8<__half>(d, v, v, d);", "divergent-warp", "0x7fffffff"),
    ],
)
def test_faults_of_matrix_instructions(build, geometry, body, detector, says):
    kernel = build(f"""extern "C" __global__ void k(const unsigned short* x, unsigned* y) {{
      __shared__ __align__(16) unsigned short s[256];
      const int t = threadIdx.x;
      unsigned v[4] = {{}};
      float d[4] = {{}};
      for (int i = 0; i < 8; ++i) s[t * 8 + i] = 0;
      __syncwarp();
      {body}
      y[t] = v[0];
    }}""")
    args = [np.zeros(256, np.uint16), np.zeros(32, np.uint32)]
    if not detector:
        kernel.launch(args, geometry(), checks=FULL)
        return
    with pytest.raises(SimulatorError, match=says) as caught:
        kernel.launch(args, geometry(), checks=FULL)
    assert caught.value.facts["detector"] == detector


def test_bank_conflicts_are_counted_by_site(build, geometry):
    kernel = build("""extern "C" __global__ void k(float* y) {
      __shared__ __align__(16) float s[32 * 33];
      const int t = threadIdx.x;
      s[t] = 1;
      s[32 + t] = 1;
      __syncthreads();
      for (int i = 0; i < 32; ++i) s[t * 32 + i] = i;  // stride 32: all lanes in one bank
      __syncthreads();
      for (int i = 0; i < 32; ++i) s[t * 33 + i] = i;  // stride 33: none
      __syncthreads();
      const float4 v = *reinterpret_cast<float4*>(&s[t * 4]);  // 16 bytes a lane: 4 wavefronts, as few as can be
      y[t] = s[0] + v.x;                                       // one word for all: a broadcast
    }""")
    report = kernel.launch([np.zeros(32, np.float32)], geometry(), checks=Checks(accesses=True, banks=True))
    assert len(report.bank_conflicts) == 1
    conflict = report.bank_conflicts[0]
    assert (conflict.where, conflict.instructions, conflict.wavefronts, conflict.ideal) == ("unit.cu:7", 32, 1024, 32)
