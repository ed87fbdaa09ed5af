"""Products of warpgroups, and what else warpgroups have, against NumPy: the same in the simulator and on a GPU.

``build`` makes a kernel of a unit, ``geometry`` a launch: fixtures of the simulator's tests and of the GPU's.
"""

from __future__ import annotations

import numpy as np
import pytest
from hopper import TYPES, swizzled, unit
from simulated import FULL

T = np.arange(128)
ROW = T // 32 * 16 + T % 32 // 4


def gathered(d: np.ndarray, n: int) -> np.ndarray:
    """Accumulators of 128 threads as the 64 x n matrix: "Register Fragments for wgmma.mma_async.m64nN"."""
    out = np.zeros((64, n))
    for i in range(n // 2):
        out[ROW + i // 2 % 2 * 8, i // 4 * 8 + T % 4 * 2 + i % 2] = d[:, i]
    return out


def tiles(x: np.ndarray, swizzle: int) -> np.ndarray:
    """A matrix of rows, cut along its last axis into tiles whose rows have ``swizzle`` bytes, one after another."""
    per = swizzle // x.itemsize
    return np.concatenate([swizzled(x[:, at : at + per], swizzle) for at in range(0, x.shape[1], per)])


PRODUCT = """
  extern __shared__ __align__(1024) unsigned char s[];
  const int t = threadIdx.x;
  for (int i = t; i < a_bytes; i += 128) s[i] = a[i];
  for (int i = t; i < b_bytes; i += 128) s[A_ROOM + i] = b[i];
  fr::fence_proxy_async();
  __syncthreads();
  float d[N / 2];
  for (int i = 0; i < N / 2; ++i) d[i] = c[t * (N / 2) + i];
  fr::wgmma_fence();
  for (int step = 0; step < STEPS; ++step)
    fr::wgmma<TYPE, N, A_T, B_T>(d, A_AT, B_AT, true);
  fr::wgmma_commit();
  fr::wgmma_wait<0>();
  for (int i = 0; i < N / 2; ++i) y[t * (N / 2) + i] = d[i];
"""
PARAMETERS = "const unsigned char* a, int a_bytes, const unsigned char* b, int b_bytes, const float* c, float* y"


def operand(letter: str, swizzle: int, transposed: bool, rows: int, kind: np.dtype, base: str) -> str:
    """The descriptor of one step."""
    per, deep = swizzle // kind.itemsize, 32 // kind.itemsize
    if transposed:  # rows of K
        tile = f"{base} + step * {deep * swizzle}"
        return f"fr::wgmma_mn_major<{swizzle}>({tile}, {swizzle} * {letter}_K)"
    tile = f"{base} + step * {deep} / {per} * {rows * swizzle} + step * {deep} % {per} * {kind.itemsize}"
    return f"fr::wgmma_k_major<{swizzle}>({tile})"


def narrow(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """One step of e4m3: every term to 14 bits below the largest, towards zero; the sum to 14 bits of its own."""
    terms = np.concatenate([a.astype(float)[:, :, None] * b.astype(float)[None], c[:, None]], axis=1)
    unit_ = np.exp2(np.floor(np.log2(np.abs(terms).max(axis=1))) - 13)
    total = (np.trunc(terms / unit_[:, None]) * unit_[:, None]).sum(axis=1)
    last = np.exp2(np.floor(np.log2(np.abs(total))) - 13)
    return np.trunc(total / last) * last


CASES = [
    ("__nv_bfloat16", 64, False, False, 128),
    ("__half", 64, False, False, 64),
    ("__nv_bfloat16", 8, False, False, 32),
    ("__half", 128, True, True, 128),
    ("__nv_bfloat16", 64, False, True, 64),
    ("__half", 32, True, False, 32),
    ("__nv_bfloat16", 256, False, True, 128),
    ("__nv_fp8_e4m3", 96, False, False, 128),
    ("__nv_fp8_e4m3", 16, False, False, 32),
    ("__nv_fp8_e4m3", 192, False, False, 64),
    ("__half", 160, False, True, 64),
    ("__nv_bfloat16", 224, False, False, 128),
]


def launch(build, geometry, ctype, n, a_t, b_t, swizzle, a, b, c, checks=FULL):
    """a[64 K] b[K n] + c by wgmma."""
    kind, k = TYPES[ctype], a.shape[1]
    in_a = tiles(a.T if a_t else a, swizzle)
    in_b = tiles(b if b_t else b.T, swizzle)
    room = -(-in_a.size // 1024) * 1024
    numbers = {"N": n, "A_ROOM": room, "STEPS": k * kind.itemsize // 32, "A_K": k, "B_K": k, "A_T": a_t, "B_T": b_t}
    head = f"using TYPE = {ctype};\n" + "".join(f"constexpr int {key} = {int(v)};\n" for key, v in numbers.items())
    body = PRODUCT.replace("A_AT", operand("A", swizzle, a_t, 64, kind, "s"))
    text = unit(PARAMETERS, head + body.replace("B_AT", operand("B", swizzle, b_t, n, kind, "s + A_ROOM")))
    fragments = np.stack([c[ROW + i // 2 % 2 * 8, i // 4 * 8 + T % 4 * 2 + i % 2] for i in range(n // 2)], axis=1)
    y = np.zeros((128, n // 2), np.float32)
    args = [in_a, in_a.size, in_b, in_b.size, np.ascontiguousarray(fragments, np.float32), y]
    shared = room + in_b.size
    build(text).launch(args, geometry(block=(128, 1, 1), shared_memory=shared), checks=checks)
    return gathered(y, n)


@pytest.mark.parametrize(("ctype", "n", "a_t", "b_t", "swizzle"), CASES)
def test_products(build, geometry, ctype, n, a_t, b_t, swizzle):
    rng, kind = np.random.default_rng(n), TYPES[ctype]
    k = 128 // kind.itemsize  # four steps
    per = swizzle // kind.itemsize
    if (a_t and 64 % per) or (b_t and n % per):
        raise AssertionError("a case that no tile holds")
    a, b = (rng.integers(-4, 5, shape).astype(kind) for shape in ((64, k), (k, n)))
    c = rng.integers(-8, 9, (64, n)).astype(np.float32)
    got = launch(build, geometry, ctype, n, a_t, b_t, swizzle, a, b, c)
    np.testing.assert_array_equal(got, a.astype(float) @ b.astype(float) + c)


FROM_REGISTERS = """
  extern __shared__ __align__(1024) unsigned char s[];
  const int t = threadIdx.x;
  for (int i = t; i < b_bytes; i += 128) s[i] = b[i];
  fr::fence_proxy_async();
  __syncthreads();
  float d[N / 2];
  unsigned words[4];
  for (int i = 0; i < 4; ++i) words[i] = reinterpret_cast<const unsigned*>(a)[4 * t + i];
  fr::wgmma_fence();
  fr::wgmma<TYPE, N, B_T>(d, words, B_AT, false);
  fr::wgmma_commit();
  fr::wgmma_wait<0>();
  for (int i = 0; i < N / 2; ++i) y[t * (N / 2) + i] = d[i];
"""


def fragments(a: np.ndarray) -> np.ndarray:
    """A[64 k] as the registers of 128 threads: "Register Fragments for wgmma.mma_async.m64nN", matrix A."""
    per = 4 // a.itemsize
    words = [
        np.stack([a[ROW + i % 2 * 8, T % 4 * per + i // 2 * 4 * per + j] for j in range(per)], axis=1) for i in range(4)
    ]
    return np.ascontiguousarray(np.stack(words, axis=1)).view(np.uint8).ravel()


@pytest.mark.parametrize(
    ("ctype", "n", "b_t"), [("__half", 32, False), ("__nv_bfloat16", 64, True), ("__nv_fp8_e4m3", 16, False)]
)
def test_a_from_registers(build, geometry, ctype, n, b_t):
    rng, kind = np.random.default_rng(n), TYPES[ctype]
    k, swizzle = 32 // kind.itemsize, 128 if b_t else 32
    a, b = (rng.integers(-4, 5, shape).astype(kind) for shape in ((64, k), (k, n)))
    at = "fr::wgmma_mn_major<128>(s, 0)" if b_t else "fr::wgmma_k_major<32>(s)"
    head = f"using TYPE = {ctype};\nconstexpr int N = {n};\nconstexpr bool B_T = {int(b_t)};\n"
    in_b, y = tiles(b if b_t else b.T, swizzle), np.zeros((128, n // 2), np.float32)
    kernel = build(unit(PARAMETERS, head + FROM_REGISTERS.replace("B_AT", at)))
    args = [fragments(a), 0, in_b, in_b.size, y, y]
    kernel.launch(args, geometry(block=(128, 1, 1), shared_memory=in_b.size), checks=FULL)
    np.testing.assert_array_equal(gathered(y, n), a.astype(float) @ b.astype(float))


@pytest.mark.parametrize("b_t", [False, True])
def test_operands_without_swizzle(build, geometry, b_t):
    """Matrices of 8 x 16 bytes, whose distances the descriptor says: along N 128 bytes, along K 1024."""
    rng, n, kind = np.random.default_rng(1), 64, np.dtype(np.float16)
    a, b = (rng.integers(-4, 5, shape).astype(kind) for shape in ((64, 16), (16, n)))
    cut = b.reshape(2, 8, 8, 8).transpose(0, 2, 1, 3) if b_t else b.T.reshape(8, 8, 2, 8).transpose(2, 0, 1, 3)
    in_b, y = np.ascontiguousarray(cut).view(np.uint8).ravel(), np.zeros((128, n // 2), np.float32)
    at = "fr::wgmma_descriptor(s, 1024, 128, 0)"
    head = f"using TYPE = __half;\nconstexpr int N = {n};\nconstexpr bool B_T = {int(b_t)};\n"
    kernel = build(unit(PARAMETERS, head + FROM_REGISTERS.replace("B_AT", at)))
    args = [fragments(a), 0, in_b, in_b.size, y, y]
    kernel.launch(args, geometry(block=(128, 1, 1), shared_memory=in_b.size), checks=FULL)
    np.testing.assert_array_equal(gathered(y, n), a.astype(float) @ b.astype(float))


@pytest.mark.parametrize("ctype", ["__half", "__nv_fp8_e4m3"])
def test_products_keep_nan_and_infinity(build, geometry, ctype):
    kind = TYPES[ctype]
    k = 64 // kind.itemsize
    a, b, c = np.ones((64, k), kind), np.ones((k, 16), kind), np.zeros((64, 16), np.float32)
    a[3, 1] = np.nan
    b[2, 5] = np.nan
    c[9, 9], c[10, 10] = np.inf, -np.inf
    if ctype == "__half":
        a[20, 0], a[21, 0], a[21, 1] = np.inf, np.inf, -np.inf
    got = launch(build, geometry, ctype, 16, False, False, 32, a, b, c)
    with np.errstate(invalid="ignore"):
        expected = a.astype(float) @ b.astype(float) + c
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("trans", [False, True])
def test_stmatrix(build, geometry, n, trans):
    body = f"""
      __shared__ __align__(16) unsigned short s[256];
      const int t = threadIdx.x;
      unsigned r[{n}];
      for (int i = 0; i < {n}; ++i) r[i] = x[i * 32 + t];
      fr::stmatrix<{n}, {int(trans)}>(s + t % {8 * n} * 8, r);
      __syncwarp();
      for (int i = t; i < {64 * n}; i += 32) y[i] = s[i];
    """
    x = np.arange(64 * n, dtype=np.uint16)
    y = np.zeros((n, 8, 8), np.uint16)
    kernel = build(unit("const unsigned* x, unsigned short* y", body, 32))
    kernel.launch([x.view(np.uint32), y], geometry(), checks=FULL)
    matrices = x.reshape(n, 8, 8)
    np.testing.assert_array_equal(y, matrices.transpose(0, 2, 1) if trans else matrices)


@pytest.mark.parametrize("trans", [False, True])
def test_ldmatrix(build, geometry, trans):
    body = f"""
      __shared__ __align__(16) unsigned short s[256];
      const int t = threadIdx.x;
      for (int i = t; i < 256; i += 32) s[i] = x[i];
      __syncwarp();
      unsigned r[4];
      fr::ldmatrix_x4{"_trans" if trans else ""}(r, s + t * 8);
      for (int i = 0; i < 4; ++i) y[i * 32 + t] = r[i];
    """
    x = np.arange(256, dtype=np.uint16)
    y = np.zeros((4, 8, 8), np.uint16)
    kernel = build(unit("const unsigned short* x, unsigned* y", body, 32, ("fusionreg", "mma")))
    kernel.launch([x, y.view(np.uint32)], geometry(), checks=FULL)
    matrices = x.reshape(4, 8, 8)
    np.testing.assert_array_equal(y, matrices.transpose(0, 2, 1) if trans else matrices)


def test_warpgroups(build, geometry):
    """Indices, one lane of each warp, a barrier that one warpgroup waits at and the other passes, remote arrivals."""
    body = """
      __shared__ int first[128];
      __shared__ fr::Mbarrier done;
      const int t = threadIdx.x, group = fr::warpgroup_index();
      if (t == 0) {
        fr::mbarrier_init(&done, 8);
        fr::mbarrier_fence_init();
      }
      __syncthreads();
      if (group == 0) fr::registers_decrease<40>();
      else fr::registers_increase<160>();
      if (group == 0) {
        first[t] = t;
        fr::barrier_arrive(1, 256);
        y[t] = 100 * fr::warp_index();
      } else {
        fr::barrier_sync(1, 256);
        y[t] = 100 * fr::warp_index() + first[255 - t];
      }
      const bool elected = fr::elect_one();
      if (elected) fr::mbarrier_arrive(&done);
      fr::mbarrier_wait(&done, 0);
      y[256 + t] = elected;
      __syncthreads();
      if (t == 0) fr::mbarrier_inval(&done);
    """
    y = np.zeros(512, np.int32)
    build(unit("int* y", body, "256, 1")).launch([y], geometry(block=(256, 1, 1)), checks=FULL)
    t = np.arange(256)
    np.testing.assert_array_equal(y[:256], t // 32 * 100 + np.where(t < 128, 0, 255 - t))
    np.testing.assert_array_equal(y[256:].reshape(8, 32).sum(1), np.ones(8))
