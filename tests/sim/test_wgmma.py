"""Warpgroup matrix products of the device library: values against NumPy for every layout, and each misuse once."""

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
