// What the compiler calls in checked builds: -fsanitize=thread reports every load and store (no libtsan is linked), and
// -fsanitize=alignment,bounds every misaligned pointer and array index (no libubsan).
#include "checker.h"

using namespace fr_sim;

#define ACCESS(name, bytes, kind) \
  FRSIM_API void __tsan_##name(void* p) { note_access(p, bytes, kind, FRSIM_PC); }
#define ACCESSES(n) \
  ACCESS(read##n, n, kRead) ACCESS(write##n, n, kWrite) ACCESS(unaligned_read##n, n, kRead) ACCESS(unaligned_write##n, n, kWrite) \
  ACCESS(volatile_read##n, n, kRead | kVolatile) ACCESS(volatile_write##n, n, kWrite | kVolatile) \
  ACCESS(unaligned_volatile_read##n, n, kRead | kVolatile) ACCESS(unaligned_volatile_write##n, n, kWrite | kVolatile)
ACCESSES(1) ACCESSES(2) ACCESSES(4) ACCESSES(8) ACCESSES(16)

FRSIM_API void __tsan_read_write4(void* p) { note_access(p, 4, kRead, FRSIM_PC); note_access(p, 4, kWrite, FRSIM_PC); }
FRSIM_API void __tsan_read_range(void* p, size_t n) { note_access(p, n, kRead, FRSIM_PC); }
FRSIM_API void __tsan_write_range(void* p, size_t n) { note_access(p, n, kWrite, FRSIM_PC); }
FRSIM_API void __tsan_func_entry(void*) {}
FRSIM_API void __tsan_func_exit() {}
FRSIM_API void __tsan_init() {}
FRSIM_API void __tsan_vptr_update(void**, void*) {}
FRSIM_API void __tsan_vptr_read(void**) {}
FRSIM_API void __tsan_ignore_thread_begin() {}
FRSIM_API void __tsan_ignore_thread_end() {}

// Block moves: gcc leaves them as calls, which the linker sends here (--wrap); clang names them __tsan_*.
#define MOVES(prefix)                                                                                                        \
  FRSIM_API void* prefix##memcpy(void* d, const void* s, size_t n) {                                                          \
    note_access(s, n, kRead, FRSIM_PC); note_access(d, n, kWrite, FRSIM_PC); return std::memcpy(d, s, n); }                    \
  FRSIM_API void* prefix##memmove(void* d, const void* s, size_t n) {                                                         \
    note_access(s, n, kRead, FRSIM_PC); note_access(d, n, kWrite, FRSIM_PC); return std::memmove(d, s, n); }                   \
  FRSIM_API void* prefix##memset(void* d, int v, size_t n) { note_access(d, n, kWrite, FRSIM_PC); return std::memset(d, v, n); }
MOVES(__wrap_) MOVES(__tsan_)

// Only one fiber runs at a time in a checked build: an atomic is a plain operation that is noted as one.
#define ATOMICS(bits, T)                                                                                                     \
  FRSIM_API T __tsan_atomic##bits##_load(const volatile T* p, int) { note_access(p, sizeof(T), kRead | kVolatile, FRSIM_PC); return *p; } \
  FRSIM_API void __tsan_atomic##bits##_store(volatile T* p, T v, int) { note_access(p, sizeof(T), kWrite | kVolatile, FRSIM_PC); *p = v; } \
  FRSIM_API T __tsan_atomic##bits##_exchange(volatile T* p, T v, int) { note_access(p, sizeof(T), kAtomic, FRSIM_PC); T o = *p; *p = v; return o; } \
  FRSIM_API T __tsan_atomic##bits##_fetch_add(volatile T* p, T v, int) { note_access(p, sizeof(T), kAtomic, FRSIM_PC); T o = *p; *p = T(o + v); return o; } \
  FRSIM_API T __tsan_atomic##bits##_fetch_sub(volatile T* p, T v, int) { note_access(p, sizeof(T), kAtomic, FRSIM_PC); T o = *p; *p = T(o - v); return o; } \
  FRSIM_API T __tsan_atomic##bits##_fetch_and(volatile T* p, T v, int) { note_access(p, sizeof(T), kAtomic, FRSIM_PC); T o = *p; *p = T(o & v); return o; } \
  FRSIM_API T __tsan_atomic##bits##_fetch_or(volatile T* p, T v, int) { note_access(p, sizeof(T), kAtomic, FRSIM_PC); T o = *p; *p = T(o | v); return o; } \
  FRSIM_API T __tsan_atomic##bits##_fetch_xor(volatile T* p, T v, int) { note_access(p, sizeof(T), kAtomic, FRSIM_PC); T o = *p; *p = T(o ^ v); return o; } \
  FRSIM_API int __tsan_atomic##bits##_compare_exchange_strong(volatile T* p, T* e, T v, int, int) {                           \
    note_access(p, sizeof(T), kAtomic, FRSIM_PC); if (*p == *e) { *p = v; return 1; } *e = *p; return 0; }                    \
  FRSIM_API int __tsan_atomic##bits##_compare_exchange_weak(volatile T* p, T* e, T v, int, int) {                             \
    note_access(p, sizeof(T), kAtomic, FRSIM_PC); if (*p == *e) { *p = v; return 1; } *e = *p; return 0; }
ATOMICS(8, u8) ATOMICS(16, u16) ATOMICS(32, u32) ATOMICS(64, u64)
FRSIM_API void __tsan_atomic_thread_fence(int) { if (self()->worker->launch->checker) order_fence(self(), true); }
FRSIM_API void __tsan_atomic_signal_fence(int) {}

// ---- the undefined-behaviour checks whose handlers are ours ---------------------------------------------------------------
namespace {
struct Location { const char* file; u32 line, column; };
struct Type { u16 kind, info; char name[1]; };
struct Mismatch { Location where; const Type* type; u8 log_alignment, kind; };
struct Bounds { Location where; const Type* array; const Type* index; };

void misaligned(const Mismatch* m, u64 p, const void* pc) {
  const Site site{m->where.file, int(m->where.line), pc};
  const u64 alignment = u64(1) << m->log_alignment;
  if (!p) fail("bounds", site, "null pointer used as %s", m->type->name);
  fail("misaligned", site, "address 0x%llx is not aligned to the %llu bytes of %s (off by %llu)", (unsigned long long)p, (unsigned long long)alignment,
       m->type->name, (unsigned long long)(p & (alignment - 1)));
}

void bad_index(const Bounds* b, u64 index, const void* pc) {
  fail("bounds", Site{b->where.file, int(b->where.line), pc}, "index %lld of an array %s", (long long)index, b->array->name);
}
}  // namespace

FRSIM_API void __ubsan_handle_type_mismatch_v1(void* data, u64 p) { misaligned(static_cast<Mismatch*>(data), p, FRSIM_PC); }
FRSIM_API void __ubsan_handle_type_mismatch_v1_abort(void* data, u64 p) { misaligned(static_cast<Mismatch*>(data), p, FRSIM_PC); }
FRSIM_API void __ubsan_handle_out_of_bounds(void* data, u64 index) { bad_index(static_cast<Bounds*>(data), index, FRSIM_PC); }
FRSIM_API void __ubsan_handle_out_of_bounds_abort(void* data, u64 index) { bad_index(static_cast<Bounds*>(data), index, FRSIM_PC); }
