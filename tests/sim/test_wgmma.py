"""Products of warpgroups in the simulator: how many bits e4m3 keeps, and each misuse once.

What they compute otherwise: tests/support/hopper_products.py.
"""

from __future__ import annotations

import numpy as np
import pytest
from hopper import TYPES, unit
from hopper_products import launch, narrow
from simulated import FULL, raises

from fusionreg.core.errors import CompileError
from fusionreg.core.simulator import Checks


def test_e4m3_accumulates_with_fourteen_bits(build, geometry):
    """So that a kernel which does not add to fp32 of its own in between fails its tolerance."""
    rng, kind, k = np.random.default_rng(2), TYPES["__nv_fp8_e4m3"], 1024
    a, b = rng.uniform(0.5, 2, (64, k)).astype(kind), rng.uniform(0.5, 2, (k, 8)).astype(kind)
    c = rng.uniform(0.5, 2, (64, 8)).astype(np.float32)
    got = launch(build, geometry, "__nv_fp8_e4m3", 8, False, False, 128, a, b, c, Checks())
    expected = c.astype(float)
    for at in range(0, k, 32):
        expected = narrow(a[:, at : at + 32], b[at : at + 32], expected)
    np.testing.assert_array_equal(got, expected)
    exact = a.astype(float) @ b.astype(float) + c
    assert (np.abs(got - exact) / exact).mean() > 1e-3


MISUSE = """
  extern __shared__ __align__(1024) unsigned char s[];
  const int t = threadIdx.x;
  for (int i = t; i < 16384; i += THREADS) s[i] = 0;
  fr::fence_proxy_async();
  __syncthreads();
  float d[4];
  const unsigned long long a = fr::wgmma_k_major<128>(s), b = fr::wgmma_k_major<128>(s + 8192);
  fr::wgmma_fence();
  fr::wgmma<__half, 8>(d, a, b, false);
  fr::wgmma_commit();
  fr::wgmma_wait<0>();
  y[t] = d[0];
"""
ISSUE = "fr::wgmma<__half, 8>(d, a, b, false)"


@pytest.mark.parametrize(
    ("old", "new", "detector", "says"),
    [
        ("fr::wgmma_fence();", "", "wgmma", "without wgmma.fence"),
        ("fr::wgmma_commit();", "", "wgmma", "no wgmma.commit_group"),
        ("fr::wgmma_wait<0>();", "", "wgmma", "exits before it has waited"),
        ("fr::wgmma_wait<0>();", "fr::wgmma_wait<1>();", "wgmma", "exits before it has waited"),
        ("fr::wgmma_commit();", "fr::wgmma_commit(); d[1] = 1;", "wgmma", "register 1 was written"),
        ("fr::wgmma_commit();", f"fr::wgmma_commit(); fr::wgmma_wait<0>(); {ISSUE};", "wgmma", "without wgmma.fence"),
        (ISSUE, f"if (t < 96) {ISSUE}", "deadlock", "the rest of its warpgroup"),
        (ISSUE, "fr::wgmma<__half, 8>(d, a, b + t / 64 * 2, false)", "wgmma", "not the same"),
        ("k_major<128>(s)", "k_major<128>(s + 128)", "wgmma", "A starts at 0x.*align the tile"),
        ("k_major<128>(s + 8192)", "k_major<128>(s + 8192 + 112)", "wgmma", "B starts at byte 112"),
        ("k_major<128>(s + 8192)", "k_major<128>(s + 16384)", "bounds", "no memory"),
        ("fr::fence_proxy_async();", "", "proxy", "no fence.proxy.async"),
        ("  __syncthreads();", "", "race", "load races with a store"),
        ("fr::wgmma_commit();", "fr::wgmma_commit(); s[8192 + t] = 0;", "race", "wgmma of warpgroup 0|load races"),
        ("y[t] = d[0];", "y[t] = d[0]; if (t == 127) s[0] = 0;", "", ""),
        ("THREADS", "THREADS", "", ""),
    ],
)  # fmt: skip
def test_misuse(build, geometry, old, new, detector, says):
    assert old in MISUSE
    kernel = build(unit("float* y", MISUSE.replace(old, new, 1).replace("THREADS", "128")))
    args, where = [np.zeros(128, np.float32)], geometry(block=(128, 1, 1), shared_memory=16384)
    if detector:
        raises(kernel, args, where, detector, says)
    else:
        kernel.launch(args, where, checks=FULL)


def test_a_warpgroup_has_128_threads(build, geometry):
    kernel = build(unit("float* y", MISUSE.replace("THREADS", "192")))
    where = geometry(block=(192, 1, 1), shared_memory=16384)
    raises(kernel, [np.zeros(192, np.float32)], where, "wgmma", "a warpgroup of 64 threads", Checks())


def test_accumulators_are_nan_until_the_wait_and_operands_are_read_late(build, geometry):
    """Also without any checks: what the hardware may do late shows."""
    body = MISUSE.replace("fr::wgmma_wait<0>();", "const float early = d[0]; LATE fr::wgmma_wait<0>();")
    body = body.replace("y[t] = d[0];", "y[t] = early; y[128 + t] = d[0];").replace("THREADS", "128")
    late = "if (t == 0) for (int i = 0; i < 16384; i += 2) *reinterpret_cast<__half*>(s + i) = __half(1.0f);"
    for change, expected in (("", 0.0), (f"__syncthreads(); {late} __syncthreads();", 16.0)):
        y = np.zeros(256, np.float32)
        kernel = build(unit("float* y", body.replace("LATE", change)))
        kernel.launch([y], geometry(block=(128, 1, 1), shared_memory=16384), checks=Checks())
        assert np.isnan(y[:128]).all()
        np.testing.assert_array_equal(y[128:], expected)


def test_what_reads_a_tile_is_done_when_any_thread_has_waited(build, geometry):
    """One thread's arrival after its wait lets a tile be overwritten; an arrival before the wait does not."""
    text = """
      extern __shared__ __align__(1024) unsigned char s[];
      __shared__ fr::Mbarrier empty;
      const int t = threadIdx.x;
      for (int i = t; i < 16384; i += 256) s[i] = 0;
      if (t == 0) fr::mbarrier_init(&empty, 1);
      fr::fence_proxy_async();
      __syncthreads();
      if (fr::warpgroup_index() == 0) {
        float d[4];
        fr::wgmma_fence();
        fr::wgmma<__half, 8>(d, fr::wgmma_k_major<128>(s), fr::wgmma_k_major<128>(s + 8192), false);
        fr::wgmma_commit();
        BEFORE
        fr::wgmma_wait<0>();
        AFTER
        y[t] = d[0];
      } else {
        fr::mbarrier_wait(&empty, 0);
        for (int i = t - 128; i < 16384; i += 128) s[i] = 1;
      }
    """
    arrive = "if (t == 77) fr::mbarrier_arrive(&empty);"
    where = geometry(block=(256, 1, 1), shared_memory=16384)
    good = build(unit("float* y", text.replace("BEFORE", "").replace("AFTER", arrive), 256))
    good.launch([np.zeros(128, np.float32)], where, checks=FULL)
    bad = build(unit("float* y", text.replace("BEFORE", arrive).replace("AFTER", ""), 256))
    raises(bad, [np.zeros(128, np.float32)], where, "race", "wgmma of warpgroup 0|load races")


def test_other_architectures_refuse_it(build):
    with pytest.raises(CompileError, match="sm_90a"):
        build(unit("float* y", MISUSE.replace("THREADS", "128")), target="sm_90").prepare("fast")
    with pytest.raises(CompileError, match="sm_90"):
        build(unit("float* y", "", parts=("fusionreg", "mbarrier")), target="sm_80").prepare("fast")
    with pytest.raises(CompileError, match="16-bit"):
        transposed = MISUSE.replace("wgmma<__half, 8>", "wgmma<__nv_fp8_e4m3, 8, true>").replace("THREADS", "128")
        build(unit("float* y", transposed)).prepare("fast")
