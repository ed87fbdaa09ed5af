"""Shared-memory bank conflicts, counted on kernels whose conflicts are known."""

from __future__ import annotations

import numpy as np
import pytest

from fusionreg.core.simulator import Checks, SimReport

BANKS = Checks(accesses=True, banks=True)


@pytest.fixture
def shared(build, geometry):
    """``shared(body)``: what one warp does with ``s``, 16 KB of shared memory → sites by line of the body."""

    def run(body: str) -> dict[int, tuple[int, int, int]]:
        kernel = build(
            'extern "C" __global__ void k(float* y) {\n'
            "  __shared__ __align__(1024) float s[4096];\n"
            "  const int t = threadIdx.x;\n"
            "  for (int i = t; i < 4096; i += blockDim.x) s[i] = float(i);\n"
            "  __syncthreads();\n"
            f'  float r = 0;\n#line 1 "body.cu"\n{body}\n  y[t] = r;\n}}'
        )
        report = kernel.launch([np.zeros(32, np.float32)], geometry(), checks=BANKS)
        return by_line(report, "body.cu")

    return run


def by_line(report: SimReport, file: str) -> dict[int, tuple[int, int, int]]:
    found = {}
    for site in report.shared:
        places = [p for p in site.where.replace(", called from ", " ").split() if p.startswith(f"{file}:")]
        if places:
            found[int(places[-1].rpartition(":")[2])] = (site.instructions, site.wavefronts, site.ideal)
    return found


def test_strides_of_words(shared) -> None:
    assert shared("r += s[t];\nr += s[2 * t];\nr += s[32 * t];\nr += s[33 * t];\nr += s[8 * t];\nr += s[7];") == {
        1: (1, 1, 1),  # neighbours
        2: (1, 2, 1),
        3: (1, 32, 1),  # all lanes in one bank
        4: (1, 1, 1),  # padded by one word
        5: (1, 8, 1),
        6: (1, 1, 1),  # one word for all lanes is a broadcast
    }


def test_words_of_several_lanes_are_one(shared) -> None:
    body = """r += reinterpret_cast<unsigned short*>(s)[t];
r += reinterpret_cast<unsigned short*>(s)[64 * t];
r += reinterpret_cast<unsigned char*>(s)[t];"""
    assert shared(body) == {1: (1, 1, 1), 2: (1, 32, 1), 3: (1, 1, 1)}


def test_eight_bytes_go_by_half_warps(shared) -> None:
    body = """const float2 a = *reinterpret_cast<float2*>(&s[2 * t]); r += a.x + a.y;
const float2 b = *reinterpret_cast<float2*>(&s[4 * t]); r += b.x + b.y;
const float2 c = *reinterpret_cast<float2*>(&s[(t / 16) * 64 + 2 * (t % 16)]); r += c.x + c.y;"""
    assert shared(body) == {1: (1, 2, 2), 2: (1, 4, 2), 3: (1, 2, 2)}


def test_sixteen_bytes_go_by_quarter_warps(shared) -> None:
    body = """const float4 a = *reinterpret_cast<float4*>(&s[4 * t]); r += a.x + a.y + a.z + a.w;
const float4 b = *reinterpret_cast<float4*>(&s[32 * t]); r += b.x + b.y + b.z + b.w;
const float4 c = *reinterpret_cast<float4*>(&s[36 * t]); r += c.x + c.y + c.z + c.w;
const float4 d = *reinterpret_cast<float4*>(&s[32 * t + 4 * (t % 8)]); r += d.x + d.y + d.z + d.w;
__syncthreads(); *reinterpret_cast<float4*>(&s[64 * (t % 2) + 4 * (t / 2)]) = make_float4(1, 2, 3, 4);"""
    assert shared(body) == {
        1: (1, 4, 4),  # 512 bytes take four passes at best
        2: (1, 32, 4),  # a column of 16-byte pieces: the eight lanes of a quarter meet in four banks
        3: (1, 4, 4),  # rows padded by 16 bytes
        4: (1, 4, 4),  # rows swizzled
        5: (1, 8, 4),  # two rows in turn: lanes 2i and 2i + 1 meet
    }


@pytest.mark.parametrize(("at", "wavefronts"), [("64 * t", 32), ("64 * t + 8 * (t % 8)", 4), ("72 * t", 4)],
                         ids=["column", "swizzled", "padded"])  # fmt: skip
@pytest.mark.parametrize("store", [False, True], ids=["ldmatrix", "stmatrix"])
def test_matrices_go_by_eight_rows(build, geometry, store, at, wavefronts) -> None:
    """Each lane names a row of 16 bytes; four matrices of eight rows are four passes at best."""
    kernel = build(f"""
extern "C" __global__ void k(unsigned* y) {{
  __shared__ __align__(1024) unsigned short s[32 * 72];
  const int t = threadIdx.x;
  for (int i = t; i < 32 * 72; i += 32) s[i] = 1;
  __syncthreads();
  unsigned r[4] = {{1, 2, 3, 4}};
  fr_sim::{"stmatrix" if store else "ldmatrix"}<4, false>({f"&s[{at}], r" if store else f"r, &s[{at}]"});
  y[t] = r[0] + r[3];
}}""")
    report = kernel.launch([np.zeros(32, np.uint32)], geometry(), checks=BANKS)
    found = [s for s in report.shared if s.wavefronts == wavefronts and s.ideal == 4 and s.instructions == 1]
    assert len(found) == 1, [str(s) for s in report.shared]


def test_banks_of_a_site(build, geometry) -> None:
    kernel = build("""extern "C" __global__ void k(float* y) {
      __shared__ __align__(128) float s[1024];
      const int t = threadIdx.x;
      s[t * 16] = 1;
      __syncthreads();
      y[t] = s[t * 16];
    }""")
    report = kernel.launch([np.zeros(32, np.float32)], geometry(), checks=BANKS)
    store, load = sorted(report.shared, key=lambda s: s.where)
    for site in (store, load):
        assert site.words == tuple(16 if bank % 16 == 0 else 0 for bank in range(32))
        assert (site.instructions, site.wavefronts, site.ideal, site.conflicts) == (1, 16, 1, 15)
    assert report.bank_conflicts == report.shared


def test_asynchronous_copies_are_counted_once(build, geometry) -> None:
    """cp.async of 16 bytes stores by quarter warps when it is issued; its arrival is no further instruction."""
    kernel = build("""extern "C" __global__ void k(const float* x, float* y) {
      __shared__ __align__(16) float s[128 + 32 * 32 + 4];
      const int t = threadIdx.x;
      fr_sim::cp_async(&s[4 * t], &x[4 * t], 16, 16);
      __syncthreads();
      fr_sim::cp_async(&s[32 * t + 128 + 4 * (t < 4)], &x[4 * t], 16, 16);
      frsim_cp_async_commit();
      frsim_cp_async_wait(0);
      __syncthreads();
      y[t] = s[t];
    }""")
    x = np.arange(128, dtype=np.float32)
    report = kernel.launch([x, np.zeros(32, np.float32)], geometry(), checks=BANKS)
    found = {s.where: (s.instructions, s.wavefronts, s.ideal) for s in report.shared}
    # the second: lanes of the first quarter fall on two columns, four on each; the others all on one
    assert sorted(found.values()) == [(1, 1, 1), (1, 4, 4), (1, 28, 4)], found


def test_blocks_of_a_cluster_are_kept_apart(build, geometry) -> None:
    kernel = build("""extern "C" __global__ void k(float* y) {
      __shared__ float s[64];
      const int t = threadIdx.x;
      if (t < 24) s[2 * t] = 1;
      frsim_cluster_arrive();
      frsim_cluster_wait();
      if (t < 24) y[blockIdx.x * 24 + t] = s[2 * t];
    }""")
    launch = geometry(grid=(2, 1, 1), cluster=(2, 1, 1))
    report = kernel.launch([np.zeros(48, np.float32)], launch, checks=BANKS)
    assert [(s.instructions, s.wavefronts, s.ideal) for s in report.shared] == [(2, 4, 2)] * 2
