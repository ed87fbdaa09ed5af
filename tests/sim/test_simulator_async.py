"""Asynchronous copies, bulk copies, mbarriers: values and faults."""

from __future__ import annotations

import numpy as np
import pytest
from simulated import FULL, raises

from fusionreg.core.errors import SimulatorError
from fusionreg.core.simulator import Checks

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
