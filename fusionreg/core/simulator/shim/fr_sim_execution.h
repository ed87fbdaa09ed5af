// Threads, barriers, warp collectives, votes, fences.
#pragma once

namespace fr_sim {
#ifdef FUSIONREG_SIM_CHECKED
inline Index3 index(int what) { return ::frsim_index(what); }
inline unsigned lane() { return ::frsim_lane(); }
#else
inline __attribute__((always_inline)) Index3 index(int what) {
  const unsigned* v = (&frsim_current->thread)[what];
  return {v[0], v[1], v[2]};
}
inline unsigned lane() { return frsim_current->lane; }
#endif
inline __attribute__((always_inline)) uint3 index_of(int what) { const Index3 i = index(what); return {i.x, i.y, i.z}; }
inline __attribute__((always_inline)) dim3 extent_of(int what) { const Index3 i = index(what); return dim3(i.x, i.y, i.z); }

template <class T> inline uint64_t to_bits(T v) {
  static_assert(sizeof(T) <= 8, "a warp exchanges values of at most 8 bytes");
  uint64_t bits = 0;
  __builtin_memcpy(&bits, static_cast<const void*>(&v), sizeof v);
  return bits;
}

template <class T> inline T from_bits(uint64_t bits) {
  T v;
  __builtin_memcpy(static_cast<void*>(&v), &bits, sizeof v);
  return v;
}

template <class T> inline T shuffle(int kind, unsigned mask, T v, int lane, int width, const char* file, int line) {
  ShuffleArgs a{to_bits(v), 0, kind, lane, width};
  ::frsim_warp(kShfl, mask, &a, file, line);
  return from_bits<T>(a.result);
}

inline VoteArgs vote(int op, unsigned mask, int predicate, uint64_t value, const char* file, int line) {
  VoteArgs a{value, 0, predicate};
  ::frsim_warp(op, mask, &a, file, line);
  return a;
}
}  // namespace fr_sim

#define threadIdx (::fr_sim::index_of(0))
#define blockIdx (::fr_sim::index_of(1))
#define blockDim (::fr_sim::extent_of(2))
#define gridDim (::fr_sim::extent_of(3))
#define warpSize 32

inline void __syncthreads(FRSIM_HERE) { frsim_sync_block(fr_sim::kSyncThreads, 0, file, line); }
inline int __syncthreads_count(int p, FRSIM_HERE) { return frsim_sync_block(fr_sim::kSyncCount, p, file, line); }
inline int __syncthreads_and(int p, FRSIM_HERE) { return frsim_sync_block(fr_sim::kSyncAnd, p, file, line); }
inline int __syncthreads_or(int p, FRSIM_HERE) { return frsim_sync_block(fr_sim::kSyncOr, p, file, line); }
inline void __syncwarp(unsigned mask = 0xFFFFFFFFu, FRSIM_HERE) { frsim_warp(fr_sim::kSyncWarp, mask, nullptr, file, line); }
// Lanes that have not exited: in divergent code a device may name fewer.
inline unsigned __activemask() { return frsim_activemask(); }

template <class T> inline T __shfl_sync(unsigned mask, T v, int lane, int width = 32, FRSIM_HERE) {
  return fr_sim::shuffle(fr_sim::kShflIdx, mask, v, lane, width, file, line);
}
template <class T> inline T __shfl_up_sync(unsigned mask, T v, unsigned delta, int width = 32, FRSIM_HERE) {
  return fr_sim::shuffle(fr_sim::kShflUp, mask, v, int(delta), width, file, line);
}
template <class T> inline T __shfl_down_sync(unsigned mask, T v, unsigned delta, int width = 32, FRSIM_HERE) {
  return fr_sim::shuffle(fr_sim::kShflDown, mask, v, int(delta), width, file, line);
}
template <class T> inline T __shfl_xor_sync(unsigned mask, T v, int lanes, int width = 32, FRSIM_HERE) {
  return fr_sim::shuffle(fr_sim::kShflXor, mask, v, lanes, width, file, line);
}

inline unsigned __ballot_sync(unsigned mask, int p, FRSIM_HERE) { return fr_sim::vote(fr_sim::kBallot, mask, p, 0, file, line).result; }
inline int __any_sync(unsigned mask, int p, FRSIM_HERE) { return int(fr_sim::vote(fr_sim::kAny, mask, p, 0, file, line).result); }
inline int __all_sync(unsigned mask, int p, FRSIM_HERE) { return int(fr_sim::vote(fr_sim::kAll, mask, p, 0, file, line).result); }
inline int __uni_sync(unsigned mask, int p, FRSIM_HERE) { return int(fr_sim::vote(fr_sim::kUni, mask, p, 0, file, line).result); }
template <class T> inline unsigned __match_any_sync(unsigned mask, T v, FRSIM_HERE) {
  return fr_sim::vote(fr_sim::kMatchAny, mask, 0, fr_sim::to_bits(v), file, line).result;
}
template <class T> inline unsigned __match_all_sync(unsigned mask, T v, int* p, FRSIM_HERE) {
  const auto a = fr_sim::vote(fr_sim::kMatchAll, mask, 0, fr_sim::to_bits(v), file, line);
  *p = a.predicate;
  return a.result;
}
#define FRSIM_REDUCE(name, T, op) \
  inline T name(unsigned mask, T v, FRSIM_HERE) { return T(fr_sim::vote(fr_sim::op, mask, 0, unsigned(v), file, line).result); }
FRSIM_REDUCE(__reduce_add_sync, unsigned, kReduceAdd)
FRSIM_REDUCE(__reduce_add_sync, int, kReduceAdd)
FRSIM_REDUCE(__reduce_min_sync, unsigned, kReduceMinU)
FRSIM_REDUCE(__reduce_min_sync, int, kReduceMin)
FRSIM_REDUCE(__reduce_max_sync, unsigned, kReduceMaxU)
FRSIM_REDUCE(__reduce_max_sync, int, kReduceMax)
FRSIM_REDUCE(__reduce_and_sync, unsigned, kReduceAnd)
FRSIM_REDUCE(__reduce_or_sync, unsigned, kReduceOr)
FRSIM_REDUCE(__reduce_xor_sync, unsigned, kReduceXor)
#undef FRSIM_REDUCE

inline void __threadfence_block() { frsim_fence(fr_sim::kScopeBlock); }
inline void __threadfence() { frsim_fence(fr_sim::kScopeDevice); }
inline void __threadfence_system() { frsim_fence(fr_sim::kScopeSystem); }
inline void __nanosleep(unsigned) { frsim_spin(); }
inline long long clock64() { return frsim_clock(); }
inline long long fr_sim_clock() { return frsim_clock(); }
inline unsigned long long globaltimer() { return static_cast<unsigned long long>(frsim_clock()); }
#define clock fr_sim_clock
inline void __trap(FRSIM_HERE) { frsim_trap("the kernel called __trap()", file, line); }
inline void __brkpt() {}
#define assert(condition) ((condition) ? (void)0 : frsim_trap("assertion failed: " #condition, __FILE__, __LINE__))

inline size_t __cvta_generic_to_shared(const void* p) { return frsim_smem_address(p); }
inline size_t __cvta_generic_to_global(const void* p) { return reinterpret_cast<size_t>(fr_sim::global(p)); }
template <class T> inline void __prefetch(const T*) {}
#ifndef __clang__
inline void __builtin_assume(bool) {}
#endif
#define __builtin_assume_aligned(p, n) (p)
inline unsigned __isShared(const void*) { return 1; }

template <class T> inline T __ldg(const T* p) { return *p; }
template <class T> inline T __ldca(const T* p) { return *p; }
template <class T> inline T __ldcg(const T* p) { return *p; }
template <class T> inline T __ldcs(const T* p) { return *p; }
template <class T> inline T __ldlu(const T* p) { return *p; }
template <class T> inline T __ldcv(const T* p) { return *p; }
template <class T> inline void __stwb(T* p, T v) { *p = v; }
template <class T> inline void __stcg(T* p, T v) { *p = v; }
template <class T> inline void __stcs(T* p, T v) { *p = v; }
template <class T> inline void __stwt(T* p, T v) { *p = v; }
