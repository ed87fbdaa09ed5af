"""Asynchronous copies, mbarriers, clusters, distributed shared memory, grid-wide barriers: values and faults."""

from __future__ import annotations

import numpy as np
import pytest

from fusionreg.core.errors import SimulatorError
from fusionreg.core.simulator import Checks

FULL = Checks(accesses=True, orders=("forward", "reverse", "random:5"), timeout=60.0)


def raises(kernel, args, launch, detector, says="", checks=FULL):
    with pytest.raises(SimulatorError, match=says or None) as caught:
        kernel.launch(args, launch, checks=checks)
    assert caught.value.facts["detector"] == detector, str(caught.value)
    return caught.value


PIPELINE = """
extern "C" __global__ void k(const float* x, float* y, int tiles) {
  __shared__ __align__(16) float s[2][128];
  const int t = threadIdx.x;
  auto copy = [&](int tile) {
    if (tile < tiles) fr_sim::cp_async(&s[tile % 2][4 * t], x + tile * 128 + 4 * t, 16, t == 31 && tile == 1 ? 8 : 16);
    fr_sim::cp_async_commit();
  };
  copy(0);
  for (int i = 0; i < tiles; ++i) {
    copy(i + 1);
    WAIT;
    BARRIER;
    for (int j = 0; j < 4; ++j) y[i * 128 + 32 * j + t] = s[i % 2][127 - 32 * j - t];
    AFTER;
  }
}
"""


def pipeline(build, wait="fr_sim::cp_async_wait<1>()", barrier="__syncthreads()", after="__syncthreads()"):
    return build(f"#define WAIT {wait}\n#define BARRIER {barrier}\n#define AFTER {after}\n{PIPELINE}")


@pytest.fixture
def tiles():
    return [np.arange(512, dtype=np.float32), np.zeros(512, np.float32), 4]


def test_cp_async_pipeline(build, geometry, tiles):
    pipeline(build).launch(tiles, geometry(), checks=FULL)
    x = tiles[0].reshape(4, 128).copy()
    x[1, 126:] = 0  # only 8 of 16 bytes were read: the rest is zeros
    np.testing.assert_array_equal(tiles[1].reshape(4, 128), x[:, ::-1])


@pytest.mark.parametrize(
    ("change", "detector"),
    [
        ({"wait": "(void)0"}, ("async",)),
        ({"wait": "fr_sim::cp_async_wait<2>()"}, ("async",)),
        ({"barrier": "(void)0"}, ("async", "uninitialised")),  # another thread's copy has not landed
        ({"after": "(void)0"}, ("race",)),  # the next copy overwrites what others still read
        ({"wait": "__syncthreads()", "barrier": "fr_sim::cp_async_wait<1>()"}, ("async",)),  # in the wrong order
    ],
)
def test_cp_async_faults(build, geometry, tiles, change, detector):
    with pytest.raises(SimulatorError) as caught:
        pipeline(build, **change).launch(tiles, geometry(), checks=FULL)
    assert caught.value.facts["detector"] in detector, str(caught.value)


def test_a_missing_wait_shows_without_any_checks(build, geometry, tiles):
    """Data lands at the wait and not before, so even a plain run gives NaN."""
    pipeline(build, wait="(void)0").launch(tiles, geometry(), checks=Checks())
    assert np.isnan(tiles[1]).all()


@pytest.mark.parametrize(
    ("call", "detector"),
    [
        ("fr_sim::cp_async(s + 1, x, 16, 16)", "misaligned"),
        ("fr_sim::cp_async(s, x + 1, 16, 16)", "misaligned"),
        ("fr_sim::cp_async(s, x + 1, 16, 0)", ""),
        ("fr_sim::cp_async(s, x, 12, 12)", "async"),
        ("fr_sim::cp_async(s, x, 8, 12)", "async"),
        ("fr_sim::cp_async(const_cast<float*>(x), x, 16, 16)", "bounds"),
        ("fr_sim::cp_async(s, x + 508, 16, 16); fr_sim::cp_async(s, x + 512, 16, 16)", "bounds"),
    ],
)
def test_operands_of_cp_async(build, geometry, tiles, call, detector):
    kernel = build(f"""extern "C" __global__ void k(const float* x, float* y, int) {{
      __shared__ __align__(16) float s[64];
      if (threadIdx.x == 0) {{ {call}; }}
      y[threadIdx.x] = 0;
    }}""")
    if detector:
        raises(kernel, tiles, geometry(), detector)
    else:
        tiles[1] = np.zeros(32, np.float32)
        kernel.launch(tiles, geometry(), checks=FULL)


MBARRIER = """
// A producer warp fills a ring of two buffers, three consumer warps empty it: full and empty barriers, parity by round.
extern "C" __global__ void k(const float* x, float* y, int rounds) {
  __shared__ __align__(128) float ring[2][96];
  __shared__ __align__(8) unsigned long full[2], empty[2];
  const int t = threadIdx.x;
  if (t == 0)
    for (int i = 0; i < 2; ++i) { fr_sim::mbarrier_init(&full[i], FULL_COUNT); fr_sim::mbarrier_init(&empty[i], 96); }
  INIT_BARRIER;
  if (t < 32) {
    for (int r = 0; r < rounds; ++r) {
      const int slot = r % 2;
      if (r >= 2) PRODUCER_WAIT;
      PRODUCE;
    }
  } else {
    for (int r = 0; r < rounds; ++r) {
      const int slot = r % 2;
      CONSUMER_WAIT;
      y[r * 96 + t - 32] = ring[slot][127 - t] * 2;
      fr_sim::mbarrier_arrive(&empty[slot]);
    }
  }
}
"""
ORDINARY = "for (int i = t; i < 96; i += 32) ring[slot][i] = x[r * 96 + i]; fr_sim::mbarrier_arrive(&full[slot])"
BULK = """if (t == 0) {
  fr_sim::mbarrier_arrive_expect_tx(&full[slot], 384);
  fr_sim::bulk_load(ring[slot], x + r * 96, 384, &full[slot]);
}"""


def ring(build, produce=ORDINARY, count=32, init="__syncthreads()", producer=None, consumer=None):
    defines = {
        "FULL_COUNT": count, "INIT_BARRIER": init, "PRODUCE": produce.replace("\n", " "),
        "PRODUCER_WAIT": producer or "fr_sim::mbarrier_wait(&empty[slot], (r / 2 - 1) & 1)",
        "CONSUMER_WAIT": consumer or "while (!fr_sim::mbarrier_try_wait(&full[slot], (r / 2) & 1)) {}",
    }  # fmt: skip
    return build("".join(f"#define {k} {v}\n" for k, v in defines.items()) + MBARRIER)


@pytest.fixture
def stream():
    return [np.arange(96 * 7, dtype=np.float32), np.zeros(96 * 7, np.float32), 7]


@pytest.mark.parametrize(("produce", "count"), [(ORDINARY, 32), (BULK, 1)], ids=["stores", "bulk"])
def test_producer_and_consumers(build, geometry, stream, produce, count):
    ring(build, produce, count).launch(stream, geometry(block=(128, 1, 1)), checks=FULL)
    np.testing.assert_array_equal(stream[1].reshape(7, 96), stream[0].reshape(7, 96)[:, ::-1] * 2)


@pytest.mark.parametrize(
    ("change", "detector"),
    [
        ({"consumer": "(void)0"}, ("race", "uninitialised")),
        ({"produce": BULK, "count": 1, "consumer": "(void)0"}, ("async", "uninitialised")),
        ({"producer": "(void)0"}, ("race", "deadlock")),  # laps its consumers
        ({"init": "(void)0"}, ("race", "mbarrier")),
        ({"count": 33}, ("deadlock",)),
        ({"count": 31}, ("mbarrier", "race", "deadlock")),
        ({"produce": BULK.replace("(&full[slot], 384)", "(&full[slot], 400)"), "count": 1}, ("deadlock",)),
        ({"produce": BULK.replace("x + r * 96", "x + r * 96 + 1"), "count": 1}, ("misaligned",)),
    ],
)
def test_mbarrier_faults(build, geometry, stream, change, detector):
    with pytest.raises(SimulatorError) as caught:
        ring(build, **change).launch(stream, geometry(block=(128, 1, 1)), checks=FULL)
    assert caught.value.facts["detector"] in detector, str(caught.value)


def test_cp_async_arrives_on_an_mbarrier(build, geometry):
    kernel = build("""extern "C" __global__ void k(const float* x, float* y) {
      __shared__ __align__(16) float s[128];
      __shared__ unsigned long bar;
      const int t = threadIdx.x;
      if (t == 0) fr_sim::mbarrier_init(&bar, 32);
      __syncthreads();
      fr_sim::cp_async(s + 4 * t, x + 4 * t, 16, 16);
      fr_sim::cp_async_mbarrier_arrive(&bar, true);
      fr_sim::mbarrier_wait(&bar, 0);
      for (int i = 0; i < 4; ++i) y[32 * i + t] = s[127 - 32 * i - t];
    }""")
    x, y = np.arange(128, dtype=np.float32), np.zeros(128, np.float32)
    kernel.launch([x, y], geometry(), checks=FULL)
    np.testing.assert_array_equal(y, x[::-1])


BULK_STORE = """extern "C" __global__ void k(float* y) {
  __shared__ __align__(16) float s[32];
  s[threadIdx.x] = threadIdx.x;
  fr_sim::fence_proxy_async();
  __syncthreads();
  if (threadIdx.x == 0) { fr_sim::bulk_store(y, s, 128); fr_sim::bulk_commit(); WAIT; }
}"""


def test_bulk_store(build, geometry):
    y = np.zeros(32, np.float32)
    build("#define WAIT fr_sim::bulk_wait<0>()\n" + BULK_STORE).launch([y], geometry(), checks=FULL)
    np.testing.assert_array_equal(y, np.arange(32))
    raises(build("#define WAIT (void)0\n" + BULK_STORE), [y], geometry(), "async", "before its bulk stores")


CLUSTER = """
#include <cooperative_groups.h>
namespace cg = cooperative_groups;
// Every block sums its row; then each reads all partial sums of its cluster through distributed shared memory.
extern "C" __global__ void k(const float* x, float* y) {
  extern __shared__ float dynamic[];
  __shared__ float part;
  auto cluster = cg::this_cluster();
  const int t = threadIdx.x;
  dynamic[t] = x[blockIdx.x * 32 + t];
  __syncthreads();
  if (t == 0) { float s = 0; for (int i = 0; i < 32; ++i) s += dynamic[i]; part = s; }
  FIRST;
  float total = 0;
  for (unsigned r = 0; r < cluster.num_blocks(); ++r)
    total += *cluster.map_shared_rank(&part, r) + cluster.map_shared_rank(dynamic, r)[t];
  LAST;
  y[blockIdx.x * 32 + t] = total * 100 + cluster.block_rank();
}
"""


@pytest.mark.parametrize(
    "first", ["cluster.sync()", "auto token = cluster.barrier_arrive(); cluster.barrier_wait(std::move(token))"]
)
def test_cluster(build, geometry, first):
    x, y = np.arange(8 * 32, dtype=np.float32), np.zeros(8 * 32, np.float32)
    kernel = build(f"#define FIRST {first}\n#define LAST cluster.sync()\n{CLUSTER}")
    kernel.launch([x, y], geometry(grid=(8, 1, 1), cluster=(4, 1, 1), shared_memory=128), checks=FULL)
    rows = x.reshape(2, 4, 32)
    expected = (rows.sum((1, 2))[:, None] + rows.sum(1))[:, None, :] * 100 + np.arange(4)[None, :, None]
    np.testing.assert_array_equal(y.reshape(2, 4, 32), expected)


@pytest.mark.parametrize(
    ("first", "last", "detector"),
    [
        ("(void)0", "cluster.sync()", ("race", "uninitialised")),
        ("cluster.barrier_arrive()", "cluster.barrier_wait()", ("race", "uninitialised")),
        ("cluster.sync()", "(void)0", ("cluster",)),  # a block leaves while others read its shared memory
        ("if (cluster.block_rank() != 2) cluster.sync()", "(void)0", ("deadlock", "cluster", "race")),
    ],
)
def test_cluster_faults(build, geometry, first, last, detector):
    kernel = build(f"#define FIRST {first}\n#define LAST {last}\n{CLUSTER}")
    args = [np.arange(256, dtype=np.float32), np.zeros(256, np.float32)]
    launch = geometry(grid=(8, 1, 1), cluster=(4, 1, 1), shared_memory=128)
    with pytest.raises(SimulatorError) as caught:
        kernel.launch(args, launch, checks=FULL)
    assert caught.value.facts["detector"] in detector, str(caught.value)


def test_cluster_of_three_dimensions(build, geometry):
    kernel = build("""extern "C" __global__ void k(int* y) {
      unsigned dims[3], id[3];
      fr_sim::cluster_dims(dims);
      fr_sim::cluster_ctaid(id);
      const int b = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
      if (threadIdx.x == 0) y[b] = fr_sim::cluster_rank() + 10 * id[0] + 100 * id[1] + 1000 * id[2] + 10000 * dims[1];
    }""")
    y = np.zeros((2, 4, 4), np.int32)
    kernel.launch([y], geometry(grid=(4, 4, 2), cluster=(2, 2, 1)), checks=FULL)
    z, r, c = np.indices(y.shape)
    np.testing.assert_array_equal(y, r % 2 * 2 + c % 2 + 10 * (c // 2) + 100 * (r // 2) + 1000 * z + 20000)


def test_remote_mbarrier_and_multicast(build, geometry):
    """One block of a cluster sends a tile to all; each tells it by a remote arrival when its copy is read."""
    kernel = build("""extern "C" __global__ void k(const float* x, float* y) {
      __shared__ __align__(128) float s[32];
      __shared__ unsigned long full, read;
      const int t = threadIdx.x;
      if (t == 0) { fr_sim::mbarrier_init(&full, 1); fr_sim::mbarrier_init(&read, fr_sim::cluster_size()); }
      fr_sim::cluster_sync();
      if (t == 0) fr_sim::mbarrier_arrive_expect_tx(&full, 128);
      fr_sim::cluster_sync();
      if (t == 0 && fr_sim::cluster_rank() == 0) fr_sim::bulk_load_multicast(s, x, 128, &full, 0xF);
      fr_sim::mbarrier_wait(&full, 0);
      y[blockIdx.x * 32 + t] = s[31 - t];
      __syncthreads();
      if (t == 0) fr_sim::mbarrier_arrive(fr_sim::map_shared_rank(&read, 0));
      if (fr_sim::cluster_rank() == 0) fr_sim::mbarrier_wait(&read, 0);
      fr_sim::cluster_sync();
    }""")
    x, y = np.arange(32, dtype=np.float32), np.zeros(128, np.float32)
    kernel.launch([x, y], geometry(grid=(4, 1, 1), cluster=(4, 1, 1)), checks=FULL)
    np.testing.assert_array_equal(y.reshape(4, 32), np.broadcast_to(x[::-1], (4, 32)))


GRID = """
#include <cooperative_groups.h>
extern "C" __global__ void k(const float* x, float* part, float* y) {
  const int t = threadIdx.x;
  if (t == 0) part[blockIdx.x] = x[blockIdx.x];
  SYNC;
  float s = 0;
  for (unsigned b = 0; b < gridDim.x; ++b) s += part[b];
  if (t == 0) y[blockIdx.x] = s;
}
"""


def test_grid_barrier(build, geometry):
    x, part, y = np.arange(20, dtype=np.float32), np.zeros(20, np.float32), np.zeros(20, np.float32)
    good = build("#define SYNC cooperative_groups::this_grid().sync()\n" + GRID)
    good.launch([x, part, y], geometry(grid=(20, 1, 1), cooperative=True), checks=FULL)
    np.testing.assert_array_equal(y, np.full(20, 190))
    raises(good, [x, part, y], geometry(grid=(20, 1, 1)), "launch", "not cooperative")
    bad = build("#define SYNC __syncthreads()\n" + GRID)
    with pytest.raises(SimulatorError) as caught:
        bad.launch([x, part, y], geometry(grid=(20, 1, 1), cooperative=True), checks=FULL)
    assert caught.value.facts["detector"] in ("race", "uninitialised")


def test_named_barriers(build, geometry):
    """Two warps meet at a barrier of their own while two others are elsewhere."""
    text = """extern "C" __global__ void k(const float* x, float* y) {
      __shared__ float s[128];
      const int t = threadIdx.x, pair = t / 64;
      s[t] = x[t];
      BARRIER;
      y[t] = s[pair * 64 + 63 - t % 64];
    }"""
    x, y = np.arange(128, dtype=np.float32), np.zeros(128, np.float32)
    build("#define BARRIER fr_sim::barrier_sync(1 + pair, 64)\n" + text).launch(
        [x, y], geometry(block=(128, 1, 1)), checks=FULL
    )
    np.testing.assert_array_equal(y.reshape(2, 64), x.reshape(2, 64)[:, ::-1])
    wrong = build("#define BARRIER fr_sim::barrier_sync(1 + t / 32, 32)\n" + text)
    with pytest.raises(SimulatorError) as caught:
        wrong.launch([x, y], geometry(block=(128, 1, 1)), checks=FULL)
    assert caught.value.facts["detector"] in ("race", "uninitialised")
    lonely = build("#define BARRIER if (pair == 0) fr_sim::barrier_sync(1, 96)\n" + text)
    raises(lonely, [x, y], geometry(block=(128, 1, 1)), "deadlock", "named barrier 1", Checks())


@pytest.mark.parametrize(
    ("between", "second", "fault"),
    [
        ("", "64", False),
        ("", "128", True),  # a thread of the first pair may not have left when the others arrive
        ("__syncthreads();", "128", False),
    ],
)
def test_a_named_barrier_counts_the_same_threads_each_time(build, geometry, between, second, fault):
    kernel = build(f"""extern "C" __global__ void k(const float* x, float* y) {{
      __shared__ float s[128];
      const int t = threadIdx.x;
      s[t] = x[t];
      if (t < 64) fr_sim::barrier_sync(3, 64);
      {between}
      if (t < {second}) fr_sim::barrier_sync(3, {second});
      y[t] = t < 64 ? s[63 - t] : s[t];
    }}""")
    x, y = np.arange(128, dtype=np.float32), np.zeros(128, np.float32)
    if fault:
        raises(kernel, [x, y], geometry(block=(128, 1, 1)), "divergent-barrier", "counts 128 threads", Checks())
    else:
        kernel.launch([x, y], geometry(block=(128, 1, 1)), checks=FULL)
        np.testing.assert_array_equal(y, [*x[63::-1], *x[64:]])


LAST_BLOCK = """
extern "C" __global__ void k(const float* x, float* y, float* part, unsigned* count) {
  __shared__ bool last;
  const int t = threadIdx.x;
  part[blockIdx.x * 32 + t] = x[blockIdx.x * 32 + t];
  FENCE_ALL;
  __syncthreads();
  if (t == 0) { FENCE_ONE; last = atomicAdd(count, 1u) == gridDim.x - 1; FENCE_ONE; }
  __syncthreads();
  if (!last) return;
  float s = 0;
  for (unsigned b = 0; b < gridDim.x; ++b) s += part[b * 32 + t];
  y[t] = s;
}
"""


@pytest.mark.parametrize(
    ("every", "one", "good"), [("__threadfence()", "", True), ("", "__threadfence()", True), ("", "", False)]
)
def test_last_block_reduction(build, geometry, every, one, good):
    """Programming guide, memory fences: fence, then count; the last block reads what all others stored."""
    x = np.arange(160, dtype=np.float32)
    y, part, count = np.zeros(32, np.float32), np.zeros(160, np.float32), np.zeros(1, np.uint32)
    kernel = build(f"#define FENCE_ALL {every}\n#define FENCE_ONE {one}\n{LAST_BLOCK}")
    args, launch = [x, y, part, count], geometry(grid=(5, 1, 1))
    checks = {"checks": FULL, "names": ["x", "y", "part", "count"], "inout": ["count"]}
    if good:
        kernel.launch(args, launch, **checks)
        np.testing.assert_array_equal(y, x.reshape(5, 32).sum(0))
    else:
        with pytest.raises(SimulatorError, match="part") as caught:
            kernel.launch(args, launch, **checks)
        assert caught.value.facts["detector"] == "race"
