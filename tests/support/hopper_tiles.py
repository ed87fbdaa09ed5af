"""Copies by TMA, against NumPy: the same in the simulator and on a GPU.

``build`` makes a kernel of a unit, ``geometry`` a launch: fixtures of the simulator's tests and of the GPU's.
"""

from __future__ import annotations

import numpy as np
import pytest
from hopper import PARTS, TYPES, swizzled, tensor_map, unit
from simulated import FULL

MAP = "const __grid_constant__ fr::TensorMap m"
LOAD = """
  extern __shared__ __align__(1024) unsigned char s[];
  __shared__ fr::Mbarrier full;
  const int t = threadIdx.x;
  if (t == 0) {
    fr::tma_prefetch(&m);
    fr::mbarrier_init(&full, 1);
    fr::mbarrier_fence_init();
  }
  __syncthreads();
  if (t == 0) {
    fr::mbarrier_arrive_expect_tx(&full, BYTES);
    fr::tma_load(s, &m, &full, AT);
  }
  WAIT;
  for (int i = t; i < BYTES; i += 32) y[i] = s[i];
"""
RANKS = [(37,), (9, 40), (3, 9, 24), (2, 3, 5, 16), (2, 2, 3, 4, 16)]


def load(build, x, box, at, swizzle=0, fill="zeros", wait="fr::mbarrier_wait(&full, 0)"):
    n = int(np.prod(box)) * x.itemsize
    body = LOAD.replace("BYTES", str(n)).replace("AT", ", ".join(map(str, at))).replace("WAIT", wait)
    kernel = build(unit(f"const unsigned char* x, unsigned char* y, {MAP}", body, 32))
    return kernel, [x, np.zeros(n, np.uint8), tensor_map(x, box, swizzle, fill)], n


def boxed(x: np.ndarray, box: tuple[int, ...], at: tuple[int, ...], fill: float = 0) -> np.ndarray:
    """The box of ``x`` at ``at`` (the last axis first), ``fill`` outside."""
    out = np.full(box[::-1], fill, x.dtype)
    for index in np.ndindex(*out.shape):
        place = tuple(i + a for i, a in zip(index, at[::-1], strict=True))
        if all(0 <= p < n for p, n in zip(place, x.shape, strict=True)):
            out[index] = x[place]
    return out


@pytest.mark.parametrize("shape", RANKS, ids=len)
@pytest.mark.parametrize("where", ["inside", "before", "behind"])
def test_tiles_of_every_rank(build, geometry, shape, where):
    x = (np.arange(np.prod(shape)) % 2039 + 1).astype(np.float16)[: int(np.prod(shape))].reshape(shape)
    if len(shape) == 1:
        x = np.resize(x, 37)
    box = (8 if where == "inside" else 16, *(2 for _ in shape[1:]))
    at = {  # the innermost one at multiples of 16 bytes
        "inside": [8, *(n - 2 for n in shape[-2::-1])],
        "before": [-8, *(-1 for _ in shape[1:])],
        "behind": [(shape[-1] - 1) // 8 * 8, *(n - 1 for n in shape[-2::-1])],
    }[where]
    kernel, args, n = load(build, x, box, at)
    kernel.launch(args, geometry(shared_memory=n), checks=FULL)
    np.testing.assert_array_equal(args[1].view(np.float16), boxed(x, box, at).ravel())


@pytest.mark.parametrize("swizzle", [32, 64, 128])
@pytest.mark.parametrize("ctype", ["__nv_bfloat16", "__nv_fp8_e4m3", "float"])
def test_swizzles(build, geometry, swizzle, ctype):
    kind = TYPES[ctype]
    x = np.arange(24 * 256 // kind.itemsize).astype(np.uint8).astype(kind).reshape(24, -1)
    box, at = (swizzle // kind.itemsize, 20), (16 // kind.itemsize, 2)
    kernel, args, n = load(build, x, box, at, swizzle)
    kernel.launch(args, geometry(shared_memory=n), checks=FULL)
    np.testing.assert_array_equal(args[1], swizzled(boxed(x, box, at), swizzle))


@pytest.mark.parametrize("ctype", ["__nv_bfloat16", "float"])
def test_what_is_outside_may_be_nan(build, geometry, ctype):
    x = np.ones((3, 16), TYPES[ctype])
    kernel, args, n = load(build, x, (16, 4), (8, 1), fill="nan")
    kernel.launch(args, geometry(shared_memory=n), checks=FULL)
    expected = boxed(x.astype(float), (16, 4), (8, 1), np.nan)
    np.testing.assert_array_equal(args[1].view(x.dtype).astype(float), expected.ravel())


STORE = """
  extern __shared__ __align__(1024) unsigned char s[];
  const int t = threadIdx.x;
  for (int i = t; i < BYTES; i += 64) s[i] = x[i];
  fr::fence_proxy_async();
  __syncthreads();
  if (t == 0) {
    fr::tma_store(&m, s, AT);
    fr::store_commit();
    fr::store_wait<0>();
  }
"""


def store(build, y, box, at, swizzle=0, body=STORE):
    tile = np.random.default_rng(3).integers(1, 99, box[::-1]).astype(y.dtype)
    body = body.replace("BYTES", str(tile.nbytes)).replace("AT", ", ".join(map(str, at)))
    kernel = build(unit(f"const unsigned char* x, unsigned char* y, {MAP}", body, 64))
    return kernel, [swizzled(tile, swizzle), y, tensor_map(y, box, swizzle)], tile


@pytest.mark.parametrize(
    ("shape", "box", "at", "swizzle"),
    [
        ((40,), (16,), (8,), 0),
        ((16, 64), (32, 4), (16, 2), 64),
        ((10, 72), (64, 8), (8, 4), 128),
        ((10, 72), (16, 8), (64, 6), 32),
        ((3, 5, 16), (16, 4, 2), (8, 3, 2), 0),
        ((2, 2, 3, 4, 8), (8, 2, 2, 2, 2), (0, 3, 2, 1, 0), 0),
    ],
)
def test_stores_leave_out_what_is_outside(build, geometry, shape, box, at, swizzle):
    y = np.zeros(shape, np.float16)
    kernel, args, tile = store(build, y, box, at, swizzle)
    kernel.launch(args, geometry(block=(64, 1, 1), shared_memory=tile.nbytes), checks=FULL, inout=("argument 1",))
    expected = np.zeros(shape, np.float16)
    for index in np.ndindex(*tile.shape):
        place = tuple(i + a for i, a in zip(index, at[::-1], strict=True))
        if all(0 <= p < n for p, n in zip(place, shape, strict=True)):
            expected[place] = tile[index]
    np.testing.assert_array_equal(y, expected)


CLUSTER = """
  extern __shared__ __align__(1024) unsigned char s[];  // a half from each block
  __shared__ fr::Mbarrier full, used;
  const int t = threadIdx.x, rank = static_cast<int>(fr::cluster_rank());
  if (t == 0) {
    fr::mbarrier_init(&full, 1);
    fr::mbarrier_init(&used, 2);
    fr::mbarrier_fence_init();
  }
  fr::cluster_sync();
  for (int round = 0; round < 2; ++round) {
    if (t == 0) {
      if (round) fr::mbarrier_wait_cluster(&used, 0);
      fr::mbarrier_arrive_expect_tx(&full, 1024);
      fr::tma_load_multicast(s + 512 * rank, &m, &full, MASK, fr::Keep::kAgain, 0, 8 * (2 * round + rank));
    }
    fr::mbarrier_wait(&full, round);
    for (int i = t; i < 1024; i += 32) y[2048 * rank + 1024 * round + i] = s[i];
    __syncwarp();
    RELEASE
  }
  fr::cluster_sync();
"""
RELEASE = "if (t < 2) fr::mbarrier_arrive_cluster(&used, t);"


@pytest.mark.parametrize("arrive", ["arrive_cluster", "arrive_cluster_relaxed"])  # all has been read before either
def test_multicast(build, geometry, arrive):
    x = np.arange(32 * 32).reshape(32, 32).astype(np.float16)
    body = CLUSTER.replace("RELEASE", RELEASE.replace("arrive_cluster", arrive))
    parameters = f"const unsigned char* x, unsigned char* y, {MAP}"
    args = [x, np.zeros((2, 2048), np.uint8), tensor_map(x, (32, 8), 64)]
    where = geometry(grid=(2, 1, 1), cluster=(2, 1, 1), shared_memory=1024)
    build(unit(parameters, body.replace("MASK", "3"), 32)).launch(args, where, checks=FULL)
    halves = np.concatenate([swizzled(x[at : at + 8], 64) for at in range(0, 32, 8)])
    np.testing.assert_array_equal(args[1], np.stack([halves, halves]))


def test_memory_of_other_blocks(build, geometry):
    """One float, four at once, an ordinary pointer there; and what a block reads of another."""
    body = """
      __shared__ __align__(16) float s[12];
      const int t = threadIdx.x, other = fr::cluster_rank() ^ 1;
      const float* const mine = x + 9 * fr::cluster_rank();
      fr::cluster_sync();
      if (t == 0) fr::cluster_store(s, other, mine[0]);
      if (t == 1) fr::cluster_store4(s + 4, other, mine[1], mine[2], mine[3], mine[4]);
      if (t == 2) fr::store(fr::cluster_pointer(s + 8, other), fr::Vec<float, 4>{mine[5], mine[6], mine[7], mine[8]});
      fr::cluster_sync();
      if (t < 9) {
        const int at = t ? t + 3 : 0;
        y[18 * fr::cluster_rank() + t] = s[at];
        y[18 * fr::cluster_rank() + 9 + t] = fr::cluster_load(s + at, other);
      }
      fr::cluster_sync();
    """
    x, y = np.arange(18, dtype=np.float32), np.zeros((2, 2, 9), np.float32)
    parts = (*PARTS, "cluster_pointer")
    where = geometry(grid=(2, 1, 1), cluster=(2, 1, 1))
    build(unit("const float* x, float* y", body, 32, parts)).launch([x, y], where, checks=FULL)
    given = x.reshape(2, 9)
    np.testing.assert_array_equal(y, [[given[1], given[0]], [given[0], given[1]]])


def test_swizzled_elements(build, geometry):
    """fr::swizzled finds what TMA has written, and fr::swizzle is its own inverse."""
    x = np.arange(32 * 64).reshape(32, 64).astype(np.float16)
    body = LOAD[: LOAD.index("for (int")].replace("BYTES", "4096").replace("AT", "0, 0")
    body = body.replace("WAIT", "fr::mbarrier_wait(&full, 0)") + """
      static_assert(fr::swizzle<64>(fr::swizzle<64>(12345)) == 12345 && fr::swizzle_alignment<32> == 256, "");
      for (int c = 0; c < 64; ++c) y[t * 64 + c] = *fr::swizzled<128>(reinterpret_cast<__half*>(s), t, c);
    """
    kernel = build(unit(f"const __half* x, __half* y, {MAP}", body, 32))
    y = np.zeros_like(x)
    kernel.launch([x, y, tensor_map(x, (64, 32), 128)], geometry(shared_memory=4096), checks=FULL)
    np.testing.assert_array_equal(y, x)


def test_bulk_copies(build, geometry):
    body = """
      __shared__ __align__(128) float s[2][64];
      __shared__ fr::Mbarrier full;
      const int t = threadIdx.x;
      if (t == 0) {
        fr::mbarrier_init(&full, 1);
        fr::mbarrier_fence_init();
        fr::mbarrier_expect_tx(&full, 256);
        fr::bulk_load(s[0], x, 256, &full);
        fr::mbarrier_arrive(&full);
      }
      __syncthreads();
      fr::mbarrier_wait(&full, 0);
      for (int i = t; i < 64; i += 32) s[1][i] = 2 * s[0][63 - i];
      fr::fence_proxy_async();
      __syncwarp();
      if (t == 0) {
        fr::bulk_store(y, s[1], 256);
        fr::store_commit();
        fr::store_wait_read<0>();
        fr::store_wait<0>();
      }
    """
    x, y = np.arange(64, dtype=np.float32), np.zeros(64, np.float32)
    build(unit("const float* x, float* y", body, 32)).launch([x, y], geometry(), checks=FULL)
    np.testing.assert_array_equal(y, 2 * x[::-1])
