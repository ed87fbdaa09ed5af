"""Clusters, distributed shared memory, barriers of the grid and of names, fences: values and faults."""

from __future__ import annotations

import numpy as np
import pytest
from simulated import FULL, raises

from fusionreg.core.errors import SimulatorError
from fusionreg.core.render import shared_library
from fusionreg.core.simulator import Checks

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


PUSH = """
extern "C" __global__ void k(const float* x, float* y) {
  __shared__ float inbox[4][32];
  __shared__ fr::Mbarrier bar;
  const int t = threadIdx.x, rank = fr::cluster_rank();
  if (t == 0) { fr::mbarrier_init(&bar, 1); fr::mbarrier_fence_init(); fr::mbarrier_arrive_expect_tx(&bar, BYTES); }
  fr::cluster_arrive_relaxed();
  fr::cluster_wait();
  for (int q = 0; q < 4; ++q) fr::cluster_push(&inbox[rank][t], q, x[rank * 32 + t] * (q + 1), &bar);
  fr::mbarrier_wait(&bar, 0);
  y[blockIdx.x * 32 + t] = inbox[0][31 - t] + inbox[1][31 - t] + inbox[2][31 - t] + inbox[3][31 - t];
}
"""


@pytest.mark.parametrize(("expected", "good"), [("sizeof(inbox)", True), ("sizeof(inbox) / 2", False)])
def test_pushes_to_other_blocks_complete_a_phase(build, geometry, expected, good):
    """Each block has a sum over all of them, without a barrier of the cluster behind the stores; a phase that expects
    too few of them is over too early."""
    library = "".join((shared_library() / f"{n}.cuh.j2").read_text() for n in ("cluster", "mbarrier", "cluster_push"))
    kernel = build(library + PUSH.replace("BYTES", expected))
    x, y = np.random.default_rng(0).standard_normal((4, 32)).astype(np.float32), np.zeros((4, 32), np.float32)
    where = geometry(grid=(4, 1, 1), cluster=(4, 1, 1), block=(32, 1, 1))
    if good:
        kernel.launch([x, y], where, checks=FULL)
        np.testing.assert_allclose(y, x.sum(0)[::-1] * np.arange(1, 5, dtype=np.float32)[:, None], rtol=1e-5)
    else:
        with pytest.raises(SimulatorError):
            kernel.launch([x, y], where, checks=FULL)


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
