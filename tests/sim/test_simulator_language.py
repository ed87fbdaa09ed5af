"""CUDA C++ as kernels use it: the language, warp functions, atomics, intrinsics; values against NumPy."""

from __future__ import annotations

import re

import ml_dtypes
import numpy as np
import pytest

from fusionreg.core.simulator import Checks

FULL = Checks(accesses=True, orders=("forward", "reverse", "random:7"), timeout=60.0)
ORDERS = Checks(guard=True, orders=("forward", "reverse", "random:7"), timeout=60.0)

SHUFFLES = """
extern "C" __global__ void k(const float* x, float* y, int width) {
  const int t = threadIdx.x;
  float v = x[t];
  y[t] = __shfl_sync(~0u, v, (t * 7 + 3) % 64, width);
  y[64 + t] = __shfl_up_sync(~0u, v, 3, width);
  y[128 + t] = __shfl_down_sync(~0u, v, 5, width);
  y[192 + t] = __shfl_xor_sync(~0u, v, 9, width);
  y[256 + t] = __shfl_xor_sync(t % 32 < 16 ? 0xffffu : 0xffff0000u, v, 1, 16);
  const double d = __shfl_xor_sync(~0u, static_cast<double>(v) + 0.5, 1);
  const __half h = __shfl_sync(~0u, __float2half(v), 4);
  const long long l = __shfl_down_sync(~0u, (1ll << 40) + t, 1);
  y[320 + t] = static_cast<float>(d) + __half2float(h) + static_cast<float>(l >> 40);
}
"""


def shuffled(x: np.ndarray, width: int) -> np.ndarray:
    """PTX ISA, shfl.sync."""
    t = np.arange(64)
    lane, warp = t % 32, t // 32 * 32
    low = lane // width * width
    idx = low + (t * 7 + 3) % 64 % width
    up = np.where(lane - 3 >= low, lane - 3, lane)
    down = np.where(lane + 5 < low + width, lane + 5, lane)
    xor = np.where((lane ^ 9) < low + width, lane ^ 9, lane)
    down1 = np.where(lane < 31, t + 1, t)
    last = x[t ^ 1] + 0.5 + x[warp + 4].astype(np.float16).astype(np.float32) + (((1 << 40) + down1) >> 40)
    return np.concatenate([*(x[warp + s] for s in (idx, up, down, xor)), x[t ^ 1], last]).astype(np.float32)


@pytest.mark.parametrize("width", [32, 16, 8, 4, 2, 1])
def test_shuffles(build, geometry, width):
    x, y = np.arange(64, dtype=np.float32) * 3, np.zeros(384, np.float32)
    build(SHUFFLES).launch([x, y, width], geometry(block=(64, 1, 1)), checks=FULL)
    np.testing.assert_array_equal(y, shuffled(x, width))


def test_votes_and_reductions(build, geometry):
    kernel = build("""
    extern "C" __global__ void k(const int* x, unsigned* y) {
      const int t = threadIdx.x, v = x[t];
      int same;
      unsigned r[] = {__ballot_sync(~0u, v & 1), (unsigned)__any_sync(~0u, v == 5), (unsigned)__all_sync(~0u, v > -100),
        __match_any_sync(~0u, v % 4), __match_all_sync(~0u, v / 1000, &same), (unsigned)__reduce_add_sync(~0u, v),
        (unsigned)__reduce_min_sync(~0u, v), __reduce_max_sync(~0u, (unsigned)v), __reduce_xor_sync(~0u, (unsigned)v),
        (unsigned)__syncthreads_count(v & 1), (unsigned)__syncthreads_or(v == 5), (unsigned)__syncthreads_and(v != 5)};
      for (int i = 0; i < 12; ++i) y[i * 64 + t] = r[i];
    }""")
    x = (np.arange(64) * 37 % 101 - 50).astype(np.int32)
    y = np.zeros(12 * 64, np.uint32)
    kernel.launch([x, y], geometry(block=(64, 1, 1)), checks=FULL)
    got = y.reshape(12, 64)
    bits = (1 << np.arange(32, dtype=np.uint64)).astype(np.uint32)
    for w in (0, 1):
        v = x[32 * w : 32 * w + 32]
        u = v.astype(np.uint32)
        of = got[:, 32 * w : 32 * w + 32]
        c = np.fmod(v, 4)
        expected = [
            (bits * (v & 1)).sum(), (v == 5).any(), (v > -100).all(), [bits[c == a].sum() for a in c], 0xFFFFFFFF,
            int(v.sum()) % 2**32, int(v.min()) % 2**32, u.max(), np.bitwise_xor.reduce(u),
            (x & 1).sum(), (x == 5).any(), (x != 5).all(),
        ]  # fmt: skip
        for i, e in enumerate(expected):
            np.testing.assert_array_equal(of[i], np.broadcast_to(np.uint32(e), 32), err_msg=f"row {i}")


def test_language(build, geometry):
    """Three-dimensional geometry, constants, templates with shared memory of their own, static and dynamic, structs."""
    kernel = build("""
    #include <cuda_bf16.h>
    namespace { struct Pair { int a; float b; }; }
    __constant__ float table[4] = {1, 2, 4, 8};
    static __device__ const int offsets[2] = {3, 5};
    template <class T, int N> __device__ __forceinline__ T block_sum(T v) {
      static __shared__ T part[N];
      const int t = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
      part[t] = v;
      __syncthreads();
      T s = 0;
      for (int i = 0; i < N; ++i) s += part[i];
      __syncthreads();
      return s;
    }
    extern "C" __global__ void __launch_bounds__(24, 2)
    k(const __nv_bfloat16* __restrict__ x, float4* __restrict__ y, Pair p, float f, double d, bool flag, short s) {
      extern __shared__ __align__(16)
          unsigned char raw[];
      // extern __shared__ float comment[];
      __shared__ alignas(16) float4 mine;
      int* counts = reinterpret_cast<int*>(raw);
      const int t = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
      const int b = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
      counts[t] = t;
      if (t == 0) mine = make_float4(p.a, p.b, f, static_cast<float>(d));
      __syncthreads();
      const double other = block_sum<double, 24>(counts[23 - t]);
      const float sum = block_sum<float, 24>(__bfloat162float(x[t])) + static_cast<float>(other);
      if (t == 0) y[b] = make_float4(sum, mine.x + mine.y + mine.z + mine.w, table[b % 4] + offsets[flag], s);
    }""", target="sm_80")  # fmt: skip
    x = np.arange(24).astype(ml_dtypes.bfloat16)
    y = np.zeros((12, 4), np.float32).reshape(12, 4)
    pair = np.array([(7, 0.5)], dtype=[("a", "i4"), ("b", "f4")]).tobytes()
    out = np.ascontiguousarray(y).view(np.dtype((np.void, 16)))
    launch = geometry(grid=(2, 3, 2), block=(4, 3, 2), shared_memory=96)
    kernel.launch([x, out, pair, 0.25, 2.0, True, -3], launch, checks=FULL)
    expected = [[2 * 276, 9.75, 2.0 ** (b % 4) + 5, -3] for b in range(12)]
    np.testing.assert_array_equal(out.view(np.float32).reshape(12, 4), expected)


def test_architecture_macros(build, geometry):
    text = """
    #if __CUDA_ARCH__ >= 900 && FUSIONREG_SIM && FUSIONREG_ARCH == __CUDA_ARCH__ && defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern "C" __global__ void k(int* y) { *y = __CUDA_ARCH__; }
    #else
    extern "C" __global__ void k(int* y) { *y = -__CUDA_ARCH__; }
    #endif
    """
    for target, expected in (("sm_90a", 900), ("sm_80", -800)):
        y = np.zeros(1, np.int32)
        build(text, target=target).launch([y], geometry())
        assert y[0] == expected


def test_atomics(build, geometry):
    kernel = build("""
    #include <cuda_fp16.h>
    extern "C" __global__ void k(int* i, float* f, __half2* h, unsigned long long* u) {
      const int t = threadIdx.x + blockIdx.x * blockDim.x;
      atomicAdd(i, t); atomicMax(i + 1, t * 3 % 101); atomicMin(i + 2, -t); atomicOr(i + 3, 1 << t % 31);
      unsigned* w = reinterpret_cast<unsigned*>(i);
      atomicXor(i + 4, t); atomicSub(w + 5, 2u); atomicInc(w + 6, 9u);
      atomicAnd(i + 7, ~(1 << t % 5));
      atomicAdd(f, 0.5f);
      atomicAdd(h, __floats2half2_rn(1.0f, 2.0f));
      atomicAdd(u, 1ull << 33);
      for (int old = i[8], seen; (seen = atomicCAS(i + 8, old, old + t)) != old;) old = seen;
    }""")
    i = np.array([0, 0, 0, 0, 0, 1000, 0, -1, 0], np.int32)
    f, h, u = np.zeros(1, np.float32), np.zeros(2, np.float16), np.zeros(1, np.uint64)
    checks = Checks(guard=True, orders=("forward", "reverse"), timeout=60)
    names = ["i", "f", "h", "u"]
    kernel.launch(
        [i, f, h.view(np.uint32), u],
        geometry(grid=(2, 1, 1), block=(96, 1, 1)),
        checks=checks,
        names=names,
        inout=names,
    )
    t = np.arange(192)
    assert list(i) == [
        t.sum(), (t * 3 % 101).max(), -191, 0x7FFFFFFF, np.bitwise_xor.reduce(t), 1000 - 384, 192 % 10, ~31, t.sum(),
    ]  # fmt: skip
    assert (f[0], h[0], h[1], u[0]) == (96, 192, 384, 192 << 33)


def test_workers_share_the_blocks(build, geometry):
    """Two host threads: shared memory and atomics stay apart and together, as they must."""
    kernel = build("""
    extern "C" __global__ void k(const int* x, int* y, int* total) {
      __shared__ int s[64];
      s[threadIdx.x] = x[blockIdx.x * 64 + threadIdx.x];
      __syncthreads();
      y[blockIdx.x * 64 + threadIdx.x] = s[63 - threadIdx.x];
      atomicAdd(total, 1);
    }""")
    x, y, total = np.arange(64 * 500, dtype=np.int32), np.zeros(64 * 500, np.int32), np.zeros(1, np.int32)
    kernel.launch([x, y, total], geometry(grid=(500, 1, 1), block=(64, 1, 1)), checks=Checks(workers=2))
    np.testing.assert_array_equal(y.reshape(500, 64), x.reshape(500, 64)[:, ::-1])
    assert total[0] == 64 * 500


def test_integer_intrinsics(build, geometry):
    kernel = build("""
    extern "C" __global__ void k(const unsigned* x, unsigned long long* y) {
      const unsigned v = x[threadIdx.x];
      const unsigned long long w = (unsigned long long)v << 20 | v;
      unsigned long long r[] = {(unsigned)__popc(v), (unsigned)__clz(v), (unsigned)__ffs(v), __brev(v),
        (unsigned)__popcll(w), (unsigned)__clzll(w), __umulhi(v, 0x9E3779B9u), __byte_perm(v, ~v, 0x5140),
        __funnelshift_l(v, ~v, 9), __funnelshift_r(v, ~v, 9),
        (unsigned)__float2int_rn(v * 0.25f), (unsigned)__float2int_rz(-1e20f), __float_as_uint(__uint2float_rz(v)),
        (unsigned)max((int)v, -5), min(v, 77u), (unsigned)__dp4a((int)v, 0x01020304, 1)};
      for (int i = 0; i < 16; ++i) y[i * 32 + threadIdx.x] = r[i];
    }""")
    x = np.array([0, 1, 2, 3, 0x80000000, 0xFFFFFFFF, 0x12345678, *range(1000, 1025)], np.uint32)
    y = np.zeros((16, 32), np.uint64)
    kernel.launch([x, y], geometry(), checks=FULL)

    def signed(v: int, bits: int) -> int:
        return v - (1 << bits) if v >> (bits - 1) else v

    for j, v in enumerate(map(int, x)):
        w, inv = (v << 20 | v) & (2**64 - 1), ~v & 0xFFFFFFFF
        both = inv << 32 | v
        as_float = np.float32(v)
        if float(as_float) > v:
            as_float = np.nextafter(as_float, np.float32(0))
        rounded = int(np.rint(np.float32(v) * np.float32(0.25)))
        expected = [
            v.bit_count(), 32 - v.bit_length(), (v & -v).bit_length(), int(f"{v:032b}"[::-1], 2), w.bit_count(),
            64 - w.bit_length(),
            v * 0x9E3779B9 >> 32, sum((both >> 8 * s & 0xFF) << 8 * i for i, s in enumerate((0, 4, 1, 5))),
            (both << 9 >> 32) & 0xFFFFFFFF, both >> 9 & 0xFFFFFFFF, rounded, 0x80000000, int(as_float.view(np.uint32)),
            max(signed(v, 32), -5) & 0xFFFFFFFF, min(v, 77),
            (1 + sum(signed(v >> 8 * i & 0xFF, 8) * (4 - i) for i in range(4))) & 0xFFFFFFFF,
        ]  # fmt: skip
        assert [int(a) for a in y[:, j]] == expected, hex(v)


def test_byte_perm_reads_three_bits_of_a_selector(build, geometry):
    """As CUDA's intrinsic; prmt, whose fourth bit spreads a byte's sign, goes by its own name."""
    kernel = build("""extern "C" __global__ void k(unsigned* y) {
      y[0] = __byte_perm(0x80FF7F01u, 0x11223344u, 0xB9A8u);
      y[1] = fr_sim::prmt(0x80FF7F01u, 0x11223344u, 0xB9A8u);
    }""")
    y = np.zeros(2, np.uint32)
    kernel.launch([y], geometry(block=(1, 1, 1)), checks=FULL)
    assert [hex(v) for v in y] == ["0x807fff01", "0xff00ff00"]


def test_math_and_half_intrinsics(build, geometry):
    kernel = build("""
    #include <cuda_fp16.h>
    #include <cuda_bf16.h>
    extern "C" __global__ void k(const float* x, float* y) {
      const float v = x[threadIdx.x];
      const __half h = __float2half_rn(v);
      const __nv_bfloat16 b = __float2bfloat16_rn(v);
      float r[] = {__expf(v), __logf(fabsf(v)), rsqrtf(fabsf(v)), __fdividef(v, 3.0f), __fmaf_rn(v, v, 1.0f),
        __saturatef(v), normcdff(v),
        __fadd_rz(v, 1e-9f), __fmul_ru(v, 1.0000001f), erfinvf(tanhf(v) * 0.9f), __frcp_rn(v), __ldg(x + threadIdx.x),
        __half2float(__hfma(h, h, h)), __half2float(hexp(h)), __bfloat162float(__hfma(b, b, b)),
        __bfloat162float(hrsqrt(__habs(b))), __half2float(__hadd(h, h)),
        __low2float(__hmul2(__half2half2(h), __floats2half2_rn(3, 4))), (float)__half2int_rn(h),
        fr_sim::tanh_approx(v)};
      for (int i = 0; i < 20; ++i) y[i * 32 + threadIdx.x] = r[i];
    }""")
    x = np.linspace(-3, 3, 32, dtype=np.float32)
    y = np.zeros((20, 32), np.float32)
    kernel.launch([x, y], geometry(), checks=FULL)
    from scipy import special

    d = x.astype(np.float64)
    h, b = x.astype(np.float16).astype(np.float64), x.astype(ml_dtypes.bfloat16).astype(np.float64)
    f16, bf16 = (lambda v: v.astype(np.float16)), (lambda v: v.astype(np.float32).astype(ml_dtypes.bfloat16))
    expected = [
        np.exp(d), np.log(np.abs(d)), 1 / np.sqrt(np.abs(d)), d / 3, d * d + 1, np.clip(d, 0, 1), special.ndtr(d), None,
        None, special.erfinv((np.tanh(x) * np.float32(0.9)).astype(np.float64)), 1 / d, d, f16(h * h + h),
        f16(np.exp(h)), bf16(b * b + b),
        bf16(1 / np.sqrt(np.abs(b))), f16(h + h), f16(h * 3), np.rint(h), None,
    ]  # fmt: skip
    for i, e in enumerate(expected):
        if e is not None:
            np.testing.assert_allclose(
                y[i],
                np.asarray(e).astype(np.float32),
                rtol=(3e-7 if i == 9 else 1.3e-7) if i < 12 else 0,
                err_msg=f"row {i}",
            )
    toward_zero, up = x.astype(np.float64) + np.float64(np.float32(1e-9)), d * np.float64(np.float32(1.0000001))
    assert (np.abs(y[7]) <= np.abs(toward_zero)).all() and (y[8] >= up).all()
    np.testing.assert_allclose(y[7], toward_zero, rtol=1.3e-7)
    np.testing.assert_allclose(y[8], up, rtol=1.3e-7)
    np.testing.assert_allclose(y[19], np.tanh(d), rtol=2**-11)


def test_cooperative_groups(build, geometry):
    kernel = build("""
    #include <cooperative_groups.h>
    #include <cooperative_groups/reduce.h>
    namespace cg = cooperative_groups;
    extern "C" __global__ void k(const int* x, int* y) {
      auto block = cg::this_thread_block();
      auto tile = cg::tiled_partition<8>(block);
      const int sum = cg::reduce(tile, x[block.thread_rank()], cg::plus<int>());
      block.sync();
      y[block.thread_rank()] = sum * 100 + tile.meta_group_rank() * 10 + tile.thread_rank();
    }""")
    x, y = np.arange(64, dtype=np.int32), np.zeros(64, np.int32)
    kernel.launch([x, y], geometry(block=(64, 1, 1)), checks=FULL)
    t = np.arange(64)
    np.testing.assert_array_equal(y, x.reshape(8, 8).sum(1)[t // 8] * 100 + t // 8 * 10 + t % 8)


def test_kernel_printf(build, geometry, capfd):
    kernel = build(
        'extern "C" __global__ void k(int n) { if (threadIdx.x == 3) printf("lane %d of %d\\n", threadIdx.x, n); }'
    )
    kernel.launch([32], geometry())
    assert capfd.readouterr().out == "lane 3 of 32\n"


def test_the_whole_interface_of_the_device_library_compiles(build, geometry):
    """Every function that fr_sim_api.h declares has a definition: calls of all of them link."""
    from fusionreg.core.simulator.toolchain import SHIM

    calls = """
      unsigned r[4] = {}; float d[4] = {}; int i[4] = {}; unsigned u[3]; float v[4] = {};
      mma_m16n8k16<__half>(d, r, r, d); mma_m16n8k8<tf32>(d, r, r, d); mma_m16n8k4<tf32>(d, r, r, d); mma_m16n8k16_f16(r, r, r, r);
      mma_m16n8k32<__nv_fp8_e4m3>(d, r, r, d); mma_m16n8k32<signed char>(i, r, r, i);
      ldmatrix<4, true>(r, s); stmatrix<2, false>(s, r); r[0] = movmatrix_trans(r[0]);
      cp_async(s, x, 16, 16); cp_async_commit(); cp_async_wait_n(1); cp_async_wait<0>(); cp_async_wait_all();
      mbarrier_init(b, 1); mbarrier_inval(b); fence_mbarrier_init(); mbarrier_arrive(b); mbarrier_arrive_expect_tx(b, 1);
      mbarrier_expect_tx(b, 1); mbarrier_complete_tx(b, 1); mbarrier_try_wait(b, 0); mbarrier_test_wait(b, 0); mbarrier_wait(b, 0);
      mbarrier_wait_token(b, 0); cp_async_mbarrier_arrive(b, true); bulk_load(s, x, 16, b); bulk_load_multicast(s, x, 16, b, 1);
      bulk_copy_cluster(s, s, 16, b); bulk_store(y, s, 16); bulk_commit(); bulk_wait_n(0, true); bulk_wait<0>(); bulk_wait_read<1>();
      fence_proxy_async(); cluster_rank(); cluster_size(); cluster_dims(u); cluster_ctaid(u); cluster_arrive(); cluster_wait();
      cluster_sync(); map_shared(s, 0); map_shared_rank(s, 0); barrier_sync(1, 32); barrier_arrive(1, 32); grid_sync(); elect_one();
      lane_id(); warp_id(); smem_address(s); global(y); nanosleep(1); grid_dependency_wait(); grid_dependency_launch(); setmaxnreg_inc<40>();
      setmaxnreg_dec<24>(); load_vector<16>(v, x); store_vector<16>(y, v); load_acquire(y); store_release(y, 1.f); load_relaxed(y);
      store_relaxed(y, 1.f); red_add_f32<4>(y, v);
      tensor_prefetch(x); tensor_load(s, x, i, 1, b); tensor_load_multicast(s, x, i, 1, b, 1); tensor_store(x, i, 1, s);
      wgmma<__half, 8>(d, r, 0, 0, true, false, false); wgmma_fence(); wgmma_commit(); wgmma_wait_n(0);
      y[0] = ex2_approx(1) + lg2_approx(1) + rcp_approx(1) + rsqrt_approx(1) + sqrt_approx(1) + tanh_approx(1) + sin_approx(1) + cos_approx(1);
    """  # noqa: E501
    text = f"""using namespace fr_sim;
    extern "C" __global__ void k(const float* x, float* y, int n) {{
      __shared__ __align__(128) float s[64];
      __shared__ uint64_t b[1];
      if (n == 1) {{ {calls} }}
      y[0] = 2;
    }}"""
    y = np.zeros(4, np.float32)
    build(text).launch([y, y, 0], geometry())
    assert y[0] == 2
    declared = set(
        re.findall(
            r"^(?:template <[^>]*> )?(?:inline )?[\w:]+\*? \*?(\w+)\(", (SHIM / "fr_sim_api.h").read_text(), re.M
        )
    )
    assert len(declared) > 60
    assert declared <= set(re.findall(r"\w+", calls))
