// fr_sim: what the device library (templates/*.cuh.j2, namespace fr) calls in place of inline PTX.
//
// Every unit that the simulator compiles has FUSIONREG_SIM defined and this header force-included. Write a wrapper as
//
//     __device__ inline void cp_async16(void* smem, const void* global, int src_bytes = 16) {
//     #ifdef FUSIONREG_SIM
//       fr_sim::cp_async(smem, global, 16, src_bytes);
//     #else
//       asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(smem_u32(smem)), "l"(global), "r"(src_bytes));
//     #endif
//     }
//
// What a unit may use without any wrapper: the CUDA C++ language (__global__, __shared__, extern __shared__, __device__,
// __constant__, threadIdx ...), cuda_fp16.h, cuda_bf16.h, cuda_fp8.h, vector types, __syncthreads*, __syncwarp, __shfl_*_sync,
// votes, __match_*_sync, __reduce_*_sync, atomics, fences, math and integer intrinsics, printf, assert, __trap,
// <cooperative_groups.h> (this_thread_block, tiled_partition, this_grid, this_cluster).
//
// How strict the model is, where devices are lenient:
//   - Shared memory, and outputs in checked launches, start as 0xFF bytes (NaN, -1). Reading them before a store is a fault.
//   - __syncthreads wants every thread of the block, at one place in the source. A thread that has exited is missed.
//   - __syncwarp orders memory among its lanes; shuffles, votes, ldmatrix and mma do not.
//   - __threadfence + atomics (or store_release, load_acquire) order memory among blocks; atomics alone do not.
//   - Two plain stores of one value to one address by unordered threads are a race all the same.
//   - What ordinary instructions stored in shared memory is nothing that TMA and wgmma know of, before fence_proxy_async() in the thread
//     that stored or in the one that starts the copy (a barrier apart).
//   - wgmma_fence() comes before the first wgmma of a thread and again after every wait; registers in flight are not written.
// And where it knows less: __activemask gives all lanes that have not exited, and so must not be used as the mask of a
// divergent branch; __device__ variables need an initialiser, and each block of a cluster or cooperative grid has its own.
//
// Macros: FUSIONREG_SIM = 1. FUSIONREG_ARCH and __CUDA_ARCH__ = the target's number (800, 900, ...), __CUDA_ARCH_FEAT_SM90_ALL for
// sm_90a; they are defined after NVIDIA's headers were read in host mode. Inline PTX does not compile here: keep it under
// `#ifndef FUSIONREG_SIM`.
//
// All pointers are plain generic pointers; "smem" ones must point into shared memory (checked in checked builds).
// Functions marked [warp] are .aligned collectives: all 32 lanes of the warp must call them, or a fault is reported.
#pragma once
#include <cstddef>
#include <cstdint>

namespace fr_sim {

// ---- tensor cores ------------------------------------------------------------------------------------------------------
// Fragments are laid out per lane exactly as the PTX ISA says. D and C may be the same array. T names the type of A and B.
struct tf32 {};  // operands of tf32 products: 32-bit floats, of which the tensor core reads the upper 19 bits

// [warp] mma.sync.aligned.m16n8k16.row.col.f32.T.T.f32; T: __half, __nv_bfloat16
template <class T> void mma_m16n8k16(float d[4], const uint32_t a[4], const uint32_t b[2], const float c[4]);
// [warp] mma.sync.aligned.m16n8k8: T = __half, __nv_bfloat16: a[2], b[1]; T = tf32: a[4], b[2]
template <class T> void mma_m16n8k8(float d[4], const uint32_t* a, const uint32_t* b, const float c[4]);
// [warp] mma.sync.aligned.m16n8k4.row.col.f32.tf32.tf32.f32: a[2], b[1]
template <class T> void mma_m16n8k4(float d[4], const uint32_t a[2], const uint32_t b[1], const float c[4]);
// [warp] mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 (fp16 accumulators, two per register)
void mma_m16n8k16_f16(uint32_t d[2], const uint32_t a[4], const uint32_t b[2], const uint32_t c[2]);
// [warp] mma.sync.aligned.m16n8k32.row.col.f32.T.T.f32; T: __nv_fp8_e4m3, __nv_fp8_e5m2
template <class T> void mma_m16n8k32(float d[4], const uint32_t a[4], const uint32_t b[2], const float c[4]);
// [warp] mma.sync.aligned.m16n8k32.row.col.s32.T.T.s32; T: signed char, unsigned char
template <class T> void mma_m16n8k32(int d[4], const uint32_t a[4], const uint32_t b[2], const int c[4]);

// [warp] ldmatrix.sync.aligned.m8n8.x{N}{.trans}.shared.b16: lane i gives the address of row i % 8 of matrix i / 8 (lanes
// below 8 * N; the others' pointers are ignored), 16-byte aligned. N: 1, 2, 4. d[N]
template <int N, bool Trans> void ldmatrix(uint32_t* d, const void* smem);
// [warp] stmatrix, the inverse (sm_90 up)
template <int N, bool Trans> void stmatrix(void* smem, const uint32_t* s);
// [warp] movmatrix.sync.aligned.m8n8.trans.b16
uint32_t movmatrix_trans(uint32_t a);

// ---- asynchronous copies (cp.async) ------------------------------------------------------------------------------------
// Copies src_bytes (0 <= src_bytes <= bytes) and zero-fills the rest; bytes: 4, 8, 16, both sides aligned to bytes.
// The destination is poisoned (0xFF bytes: NaN) and counts as "in flight" until the issuing thread waits for the group: a
// missing wait or a missing barrier after the wait is caught. global may be anything when src_bytes is 0.
void cp_async(void* smem, const void* global, int bytes, int src_bytes);
void cp_async_commit();               // cp.async.commit_group
void cp_async_wait_n(int n);          // cp.async.wait_group n: at most the n youngest groups stay in flight
template <int N> inline void cp_async_wait() { cp_async_wait_n(N); }
void cp_async_wait_all();             // cp.async.wait_all (committed or not)

// ---- mbarrier ----------------------------------------------------------------------------------------------------------
// A barrier is a uint64_t in shared memory. Its content is opaque. A generic pointer from map_shared_rank() names another
// block's barrier where PTX allows that (arrive, arrive_expect_tx, complete_tx).
void mbarrier_init(uint64_t* bar, uint32_t count);
void mbarrier_inval(uint64_t* bar);
void fence_mbarrier_init();                                     // fence.mbarrier_init.release.cluster
uint64_t mbarrier_arrive(uint64_t* bar, uint32_t count = 1);    // returns the phase token
uint64_t mbarrier_arrive_expect_tx(uint64_t* bar, uint32_t bytes);
void mbarrier_expect_tx(uint64_t* bar, uint32_t bytes);
void mbarrier_complete_tx(uint64_t* bar, uint32_t bytes);
bool mbarrier_try_wait(uint64_t* bar, uint32_t parity);         // try_wait.parity: lets other threads run before it says no
bool mbarrier_test_wait(uint64_t* bar, uint32_t parity);        // test_wait.parity
void mbarrier_wait(uint64_t* bar, uint32_t parity);             // the usual loop around try_wait.parity
void mbarrier_wait_token(uint64_t* bar, uint64_t token);
void cp_async_mbarrier_arrive(uint64_t* bar, bool noinc);       // cp.async.mbarrier.arrive{.noinc}.shared.b64

// ---- bulk copies (TMA without a tensor map): size and both addresses multiples of 16 ---------------------------------------
void bulk_load(void* smem, const void* global, uint32_t bytes, uint64_t* bar);     // .shared::cluster.global.mbarrier
void bulk_load_multicast(void* smem, const void* global, uint32_t bytes, uint64_t* bar, uint16_t cta_mask);
void bulk_copy_cluster(void* remote_smem, const void* smem, uint32_t bytes, uint64_t* remote_bar);
void bulk_store(void* global, const void* smem, uint32_t bytes);                   // .global.shared::cta.bulk_group
void bulk_commit();                                                                // cp.async.bulk.commit_group
void bulk_wait_n(int n, bool read_only);                                           // cp.async.bulk.wait_group{.read} n
template <int N> inline void bulk_wait() { bulk_wait_n(N, false); }
template <int N> inline void bulk_wait_read() { bulk_wait_n(N, true); }
void fence_proxy_async();                                                          // generic writes -> async proxy

// ---- tile copies through a tensor map (cp.async.bulk.tensor, tiled mode) ---------------------------------------------------------
// at: coordinates of the box's first element, the contiguous axis first; map: a tensor map (struct TensorMap of fr_sim_model.h),
// aligned to 64; smem: aligned to 128. A load completes the bytes of the whole box on bar, on every block of the mask its own.
void tensor_prefetch(const void* map);
void tensor_load(void* smem, const void* map, const int* at, int rank, uint64_t* bar);
void tensor_load_multicast(void* smem, const void* map, const int* at, int rank, uint64_t* bar, uint16_t cta_mask);
void tensor_store(const void* map, const int* at, int rank, const void* smem);   // in a bulk group, as bulk_store

// ---- warpgroup matrix products (wgmma, sm_90a) ------------------------------------------------------------------------------
// [warpgroup] wgmma.mma_async.sync.aligned.m64nNkK.f32.T.T: T: __half, __nv_bfloat16 (K = 16), __nv_fp8_e4m3, __nv_fp8_e5m2 (K = 32).
// d[N / 2]; a: null, or A in 4 registers; descriptors as the PTX ISA says, over __cvta_generic_to_shared addresses.
template <class T, int N> void wgmma(float* d, const uint32_t* a, uint64_t a_descriptor, uint64_t b_descriptor, bool scale_d, bool a_transposed, bool b_transposed);
void wgmma_fence();
void wgmma_commit();
void wgmma_wait_n(int n);

// ---- clusters ----------------------------------------------------------------------------------------------------------
uint32_t cluster_rank();          // %cluster_ctarank
uint32_t cluster_size();          // %cluster_nctarank
void cluster_dims(uint32_t dims[3]);   // %cluster_nctaid
void cluster_ctaid(uint32_t id[3]);    // %cluster_ctaid
void cluster_arrive();            // [all threads of the cluster] barrier.cluster.arrive.release
void cluster_wait();              // barrier.cluster.wait.acquire
inline void cluster_sync() { cluster_arrive(); cluster_wait(); }
void* map_shared(const void* smem, uint32_t rank);   // mapa, as a generic pointer
template <class T> inline T* map_shared_rank(T* smem, uint32_t rank) { return static_cast<T*>(map_shared(smem, rank)); }

// ---- barriers, grid, lanes ---------------------------------------------------------------------------------------------
void barrier_sync(int id, int threads);     // barrier.sync.aligned id, threads   (threads: a multiple of 32)
void barrier_arrive(int id, int threads);   // barrier.arrive
void grid_sync();                           // cooperative launches only
bool elect_one();                           // [warp] elect.sync: true in exactly one lane (the lowest)
unsigned lane_id();
unsigned warp_id();
unsigned smem_address(const void* smem);    // __cvta_generic_to_shared: an offset from the start of the block's window
template <class T> T* global(T* p);         // __cvta_generic_to_global: p, where it is not in shared or local memory
void nanosleep(unsigned ns);                // lets others run; call it in every spin loop
void grid_dependency_wait();                // griddepcontrol.wait; a programmatic launch that touches a buffer before is at fault
inline void grid_dependency_launch() {}     // griddepcontrol.launch_dependents
template <int N> inline void setmaxnreg_inc() {}
template <int N> inline void setmaxnreg_dec() {}

// ---- memory accesses that are one instruction on the device --------------------------------------------------------------
// Plain loads and stores of aligned vector types work too; these keep the access whole for bank-conflict counts and check
// its alignment. Bytes: 1, 2, 4, 8, 16, 32.
template <int Bytes> void load_vector(void* registers, const void* memory);
template <int Bytes> void store_vector(void* memory, const void* registers);
// Acquire, release and volatile-like accesses: never a race with one another.
template <class T> T load_acquire(const T* p);
template <class T> void store_release(T* p, T v);
template <class T> T load_relaxed(const T* p);
template <class T> void store_relaxed(T* p, T v);
// red.global.add.v2/.v4 f32 and friends: element-wise atomics on consecutive addresses
template <int N> void red_add_f32(float* p, const float* v);

// ---- approximate instructions: computed as the correctly rounded function (the device is within a few ulp of it) -----------
float ex2_approx(float x);    // 2^x, as ex2.approx.ftz: subnormal operands and results are 0
float lg2_approx(float x);
float rcp_approx(float x);    // 1 / x, as rcp.approx.ftz: subnormal operands and results are 0
float rsqrt_approx(float x);
float sqrt_approx(float x);
float tanh_approx(float x);   // rounded to 11 bits of fraction, as coarse as tanh.approx.f32 is
float sin_approx(float x);
float cos_approx(float x);

}  // namespace fr_sim
