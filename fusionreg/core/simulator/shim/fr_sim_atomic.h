// Atomics: one compare-and-swap loop for every type and operation.
#pragma once

namespace fr_sim {
template <class T, class F> inline T update(T* p, F next) {
  static_assert(sizeof(T) <= 8, "an atomic is at most 8 bytes");
  uint64_t old = ::frsim_atomic_load(p, sizeof(T));
  while (!::frsim_atomic_cas(p, &old, to_bits(next(from_bits<T>(old))), sizeof(T))) {}
  return from_bits<T>(old);
}
template <class T> inline T load_acquire(const T* p) { return from_bits<T>(::frsim_atomic_load(p, sizeof(T))); }
template <class T> inline T load_relaxed(const T* p) { return from_bits<T>(::frsim_atomic_load(p, sizeof(T))); }
template <class T> inline void store_release(T* p, T v) { ::frsim_atomic_store(p, to_bits(v), sizeof(T), true); }
template <class T> inline void store_relaxed(T* p, T v) { ::frsim_atomic_store(p, to_bits(v), sizeof(T), false); }
}  // namespace fr_sim

#define FRSIM_ATOMIC(name, T, expression)                                                   \
  inline T name(T* p, T v) { return fr_sim::update(p, [v](T old) -> T { return expression; }); } \
  inline T name##_block(T* p, T v) { return name(p, v); }                                   \
  inline T name##_system(T* p, T v) { return name(p, v); }
#define FRSIM_ATOMIC_INTEGER(T)                              \
  FRSIM_ATOMIC(atomicAdd, T, static_cast<T>(uint64_t(old) + uint64_t(v)))                \
  FRSIM_ATOMIC(atomicMin, T, v < old ? v : old)              \
  FRSIM_ATOMIC(atomicMax, T, v > old ? v : old)              \
  FRSIM_ATOMIC(atomicAnd, T, static_cast<T>(old & v))                     \
  FRSIM_ATOMIC(atomicOr, T, static_cast<T>(old | v))                      \
  FRSIM_ATOMIC(atomicXor, T, static_cast<T>(old ^ v))                     \
  FRSIM_ATOMIC(atomicExch, T, (void(old), v))                \
  inline T atomicCAS(T* p, T compare, T v) { return fr_sim::update(p, [=](T old) -> T { return old == compare ? v : old; }); } \
  inline T atomicCAS_block(T* p, T compare, T v) { return atomicCAS(p, compare, v); }  \
  inline T atomicCAS_system(T* p, T compare, T v) { return atomicCAS(p, compare, v); }
FRSIM_ATOMIC_INTEGER(int)
FRSIM_ATOMIC_INTEGER(unsigned)
FRSIM_ATOMIC_INTEGER(long long)
FRSIM_ATOMIC_INTEGER(unsigned long long)
#undef FRSIM_ATOMIC_INTEGER
FRSIM_ATOMIC(atomicSub, int, int(unsigned(old) - unsigned(v)))
FRSIM_ATOMIC(atomicSub, unsigned, old - v)
FRSIM_ATOMIC(atomicInc, unsigned, old >= v ? 0u : old + 1)
FRSIM_ATOMIC(atomicDec, unsigned, old == 0 || old > v ? v : old - 1)
FRSIM_ATOMIC(atomicExch, float, (void(old), v))
FRSIM_ATOMIC(atomicAdd, float, old + v)
FRSIM_ATOMIC(atomicAdd, double, old + v)
FRSIM_ATOMIC(atomicAdd, __half, __hadd(old, v))
FRSIM_ATOMIC(atomicAdd, __nv_bfloat16, __hadd(old, v))
FRSIM_ATOMIC(atomicAdd, __half2, __hadd2(old, v))
FRSIM_ATOMIC(atomicAdd, __nv_bfloat162, __hadd2(old, v))
inline unsigned short atomicCAS(unsigned short* p, unsigned short compare, unsigned short v) {
  return fr_sim::update(p, [=](unsigned short old) { return old == compare ? v : old; });
}
#undef FRSIM_ATOMIC
// Element-wise atomics on vectors (sm_90): each element is atomic, the vector is not.
inline float2 atomicAdd(float2* p, float2 v) { return {atomicAdd(&p->x, v.x), atomicAdd(&p->y, v.y)}; }
inline float4 atomicAdd(float4* p, float4 v) { return {atomicAdd(&p->x, v.x), atomicAdd(&p->y, v.y), atomicAdd(&p->z, v.z), atomicAdd(&p->w, v.w)}; }

namespace fr_sim {
template <int N> inline void red_add_f32(float* p, const float* v) {
  for (int i = 0; i < N; ++i) ::atomicAdd(p + i, v[i]);
}
}  // namespace fr_sim
