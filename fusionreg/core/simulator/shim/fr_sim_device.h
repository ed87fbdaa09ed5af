// fr_sim_api.h, put into effect: thin calls into the runtime library; and what the driver needs to call a kernel.
#pragma once

namespace fr_sim {
template <class T> struct MmaTypeOf;
template <> struct MmaTypeOf<__half> { static constexpr int value = kF16; };
template <> struct MmaTypeOf<__nv_bfloat16> { static constexpr int value = kBF16; };
template <> struct MmaTypeOf<tf32> { static constexpr int value = kTF32; };
template <> struct MmaTypeOf<__nv_fp8_e4m3> { static constexpr int value = kE4M3; };
template <> struct MmaTypeOf<__nv_fp8_e5m2> { static constexpr int value = kE5M2; };
template <> struct MmaTypeOf<signed char> { static constexpr int value = kS8; };
template <> struct MmaTypeOf<unsigned char> { static constexpr int value = kU8; };

inline void mma(int type, int k, void* d, const uint32_t* a, const uint32_t* b, const void* c, bool half_accumulator = false) {
  MmaArgs m{a, b, c, d, type, k, half_accumulator};
  ::frsim_warp(kMma, 0xFFFFFFFFu, &m, nullptr, 0);
}
template <class T> inline void mma_m16n8k16(float d[4], const uint32_t a[4], const uint32_t b[2], const float c[4]) { mma(MmaTypeOf<T>::value, 16, d, a, b, c); }
template <class T> inline void mma_m16n8k8(float d[4], const uint32_t* a, const uint32_t* b, const float c[4]) { mma(MmaTypeOf<T>::value, 8, d, a, b, c); }
template <class T> inline void mma_m16n8k4(float d[4], const uint32_t a[2], const uint32_t b[1], const float c[4]) { mma(MmaTypeOf<T>::value, 4, d, a, b, c); }
template <class T> inline void mma_m16n8k32(float d[4], const uint32_t a[4], const uint32_t b[2], const float c[4]) { mma(MmaTypeOf<T>::value, 32, d, a, b, c); }
template <class T> inline void mma_m16n8k32(int d[4], const uint32_t a[4], const uint32_t b[2], const int c[4]) { mma(MmaTypeOf<T>::value, 32, d, a, b, c); }
inline void mma_m16n8k16_f16(uint32_t d[2], const uint32_t a[4], const uint32_t b[2], const uint32_t c[2]) { mma(kF16, 16, d, a, b, c, true); }

template <class T, int N> inline void wgmma(float* d, const uint32_t* a, uint64_t a_descriptor, uint64_t b_descriptor, bool scale_d, bool a_transposed, bool b_transposed) {
  const WgmmaArgs args{d, a, a_descriptor, b_descriptor, MmaTypeOf<T>::value, N, scale_d, a_transposed, b_transposed};
  ::frsim_wgmma(&args);
}
inline void wgmma_fence() { ::frsim_wgmma_fence(); }
inline void wgmma_commit() { ::frsim_wgmma_commit(); }
inline void wgmma_wait_n(int n) { ::frsim_wgmma_wait(n); }

template <int N, bool Trans> inline void ldmatrix(uint32_t* d, const void* smem) {
  MatrixArgs m{d, const_cast<void*>(smem), N, Trans};
  ::frsim_warp(kLdmatrix, 0xFFFFFFFFu, &m, nullptr, 0);
}
template <int N, bool Trans> inline void stmatrix(void* smem, const uint32_t* s) {
  MatrixArgs m{const_cast<uint32_t*>(s), smem, N, Trans};
  ::frsim_warp(kStmatrix, 0xFFFFFFFFu, &m, nullptr, 0);
}
inline uint32_t movmatrix_trans(uint32_t a) {
  MatrixArgs m{&a, nullptr, 1, true};
  ::frsim_warp(kMovmatrix, 0xFFFFFFFFu, &m, nullptr, 0);
  return a;
}

inline void cp_async(void* smem, const void* global, int bytes, int src_bytes) { ::frsim_cp_async(smem, global, bytes, src_bytes); }
inline void grid_dependency_wait() { ::frsim_dependency_wait(); }
inline void cp_async_commit() { ::frsim_cp_async_commit(); }
inline void cp_async_wait_n(int n) { ::frsim_cp_async_wait(n); }
inline void cp_async_wait_all() { ::frsim_cp_async_wait(-1); }

inline void mbarrier_init(uint64_t* bar, uint32_t count) { ::frsim_mbarrier_init(bar, count); }
inline void mbarrier_inval(uint64_t* bar) { ::frsim_mbarrier_inval(bar); }
inline void fence_mbarrier_init() {}
inline uint64_t mbarrier_arrive(uint64_t* bar, uint32_t count) { return ::frsim_mbarrier_arrive(bar, count, 0); }
inline uint64_t mbarrier_arrive_expect_tx(uint64_t* bar, uint32_t bytes) { return ::frsim_mbarrier_arrive(bar, 1, bytes); }
inline void mbarrier_expect_tx(uint64_t* bar, uint32_t bytes) { ::frsim_mbarrier_tx(bar, int(bytes)); }
inline void mbarrier_complete_tx(uint64_t* bar, uint32_t bytes) { ::frsim_mbarrier_tx(bar, -int(bytes)); }
inline bool mbarrier_try_wait(uint64_t* bar, uint32_t parity) { return ::frsim_mbarrier_try(bar, parity, true); }
inline bool mbarrier_test_wait(uint64_t* bar, uint32_t parity) { return ::frsim_mbarrier_try(bar, parity, false); }
inline void mbarrier_wait(uint64_t* bar, uint32_t parity) { ::frsim_mbarrier_wait(bar, parity); }
inline void mbarrier_wait_token(uint64_t* bar, uint64_t token) { ::frsim_mbarrier_wait(bar, uint32_t(token & 1)); }
inline void cp_async_mbarrier_arrive(uint64_t* bar, bool noinc) { ::frsim_cp_async_mbarrier(bar, noinc); }

inline void bulk_load(void* smem, const void* global, uint32_t bytes, uint64_t* bar) { ::frsim_bulk(smem, global, bytes, bar, 0, 0); }
inline void bulk_load_multicast(void* smem, const void* global, uint32_t bytes, uint64_t* bar, uint16_t mask) { ::frsim_bulk(smem, global, bytes, bar, 3, mask); }
inline void bulk_copy_cluster(void* remote, const void* smem, uint32_t bytes, uint64_t* remote_bar) { ::frsim_bulk(remote, smem, bytes, remote_bar, 1, 0); }
inline void bulk_store(void* global, const void* smem, uint32_t bytes) { ::frsim_bulk(global, smem, bytes, nullptr, 2, 0); }
inline void tensor_prefetch(const void* map) { ::frsim_tensor_prefetch(map); }
inline void tensor_load(void* smem, const void* map, const int* at, int rank, uint64_t* bar) { ::frsim_tensor_load(smem, map, at, rank, bar, false, 0); }
inline void tensor_load_multicast(void* smem, const void* map, const int* at, int rank, uint64_t* bar, uint16_t mask) { ::frsim_tensor_load(smem, map, at, rank, bar, true, mask); }
inline void tensor_store(const void* map, const int* at, int rank, const void* smem) { ::frsim_tensor_store(smem, map, at, rank); }
inline void bulk_commit() { ::frsim_bulk_commit(); }
inline void bulk_wait_n(int n, bool) { ::frsim_bulk_wait(n); }
inline void fence_proxy_async() { ::frsim_fence_proxy_async(); }

inline uint32_t cluster_rank() { return ::frsim_cluster_info(0, nullptr); }
inline uint32_t cluster_size() { return ::frsim_cluster_info(1, nullptr); }
inline void cluster_dims(uint32_t dims[3]) { ::frsim_cluster_info(2, dims); }
inline void cluster_ctaid(uint32_t id[3]) { ::frsim_cluster_info(3, id); }
inline void cluster_arrive() { ::frsim_cluster_arrive(); }
inline void cluster_wait() { ::frsim_cluster_wait(); }
inline void* map_shared(const void* smem, uint32_t rank) { return ::frsim_map_shared(smem, rank); }

inline void barrier_sync(int id, int threads) { ::frsim_named_barrier(id, threads, true); }
inline void barrier_arrive(int id, int threads) { ::frsim_named_barrier(id, threads, false); }
inline void grid_sync() { ::frsim_grid_sync(); }
inline bool elect_one() { return vote(kElect, 0xFFFFFFFFu, 1, 0, nullptr, 0).result != 0; }
inline unsigned lane_id() { return lane(); }
inline unsigned warp_id() {
  const Index3 t = index(0), n = index(2);
  return (t.x + n.x * (t.y + n.y * t.z)) / 32;
}
inline unsigned smem_address(const void* smem) { return ::frsim_smem_address(smem); }
template <class T> inline T* global(T* p) {
  ::frsim_global(p);
  return p;
}
inline void nanosleep(unsigned) { ::frsim_spin(); }

template <int Bytes> inline void load_vector(void* registers, const void* memory) {
#ifdef FUSIONREG_SIM_CHECKED
  ::frsim_load(registers, memory, Bytes);
#else
  __builtin_memcpy(registers, memory, Bytes);
#endif
}
template <int Bytes> inline void store_vector(void* memory, const void* registers) {
#ifdef FUSIONREG_SIM_CHECKED
  ::frsim_store(memory, registers, Bytes);
#else
  __builtin_memcpy(memory, registers, Bytes);
#endif
}

// ---- for the driver -----------------------------------------------------------------------------------------------------
// Ends the assembler's line early: what the compiler adds to the section's name would contradict it.
#if defined(__aarch64__)
#define FRSIM_COMMENT "//"
#else
#define FRSIM_COMMENT "#"
#endif
#define FRSIM_PLAIN __attribute__((no_sanitize("thread", "alignment", "bounds")))

template <class T> struct Describe {
  static constexpr Parameter value{std::is_floating_point<T>::value ? 1 : std::is_class<T>::value ? 4 : 0, unsigned(sizeof(T)), 0};
};
template <class T> struct PointeeSize { static constexpr unsigned value = sizeof(T); };
template <> struct PointeeSize<void> { static constexpr unsigned value = 0; };
template <> struct PointeeSize<const void> { static constexpr unsigned value = 0; };
template <class T> struct Describe<T*> { static constexpr Parameter value{std::is_const<T>::value ? 3 : 2, unsigned(sizeof(T*)), PointeeSize<T>::value}; };
template <class T> constexpr Parameter Describe<T>::value;
template <class T> constexpr Parameter Describe<T*>::value;

template <class Function> struct Call;
template <class... A> struct Call<void (*)(A...)> {
  template <size_t... I> FRSIM_PLAIN static void spread(void (*f)(A...), void** args, std::index_sequence<I...>) {
    f(*static_cast<std::remove_cv_t<A>*>(args[I])...);
  }
  FRSIM_PLAIN static void call(void (*f)(A...), void** args) { spread(f, args, std::index_sequence_for<A...>{}); }
  static const Parameter* parameters() {
    static const Parameter list[sizeof...(A) + 1] = {Describe<std::remove_cv_t<A>>::value..., Parameter{-1, 0, 0}};
    return list;
  }
  static constexpr size_t count = sizeof...(A);
};
}  // namespace fr_sim

extern "C" {
extern char __bss_start[] __attribute__((visibility("hidden")));
extern char __ehdr_start[] __attribute__((visibility("hidden")));
extern char _end[] __attribute__((visibility("hidden")));
}
// Outside of .bss, and of no size in the file.
static __attribute__((used, aligned(1024), section("fr_dynamic,\"aw\",@nobits" FRSIM_COMMENT))) unsigned char frsim_dynamic[fr_sim::kDynamic];

// The last line of every unit.
#define FRSIM_EXPORT(kernel)                                                                                                   \
  extern "C" FRSIM_PLAIN __attribute__((visibility("hidden"))) void frsim_call(void** args) {                                  \
    ::fr_sim::Call<decltype(&kernel)>::call(&kernel, args);                                                                    \
  }                                                                                                                            \
  extern "C" FRSIM_PLAIN __attribute__((visibility("default"))) void frsim_unit(::fr_sim::Unit* u) {                           \
    char* const dynamic = reinterpret_cast<char*>(frsim_dynamic);                                                             \
    char* const end = dynamic > __bss_start && dynamic < _end ? dynamic : _end;                                                \
    char* const last = dynamic + sizeof frsim_dynamic > _end ? dynamic + sizeof frsim_dynamic : _end;                          \
    *u = {&frsim_call, __bss_start, uint64_t(end - __bss_start), dynamic, sizeof frsim_dynamic, __ehdr_start,                  \
          uint64_t(last - __ehdr_start), ::fr_sim::Call<decltype(&kernel)>::parameters(), ::fr_sim::Call<decltype(&kernel)>::count}; \
  }
