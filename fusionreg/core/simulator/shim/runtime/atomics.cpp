// Atomics: real ones, since a fast launch may run blocks on several host threads.
#include "checker.h"

using namespace fr_sim;

namespace {

template <class T> u64 load(const volatile void* p) { return u64(__atomic_load_n(static_cast<const volatile T*>(p), __ATOMIC_SEQ_CST)); }
template <class T> void store(volatile void* p, u64 v) { __atomic_store_n(static_cast<volatile T*>(p), T(v), __ATOMIC_SEQ_CST); }
template <class T> bool cas(volatile void* p, u64* e, u64 d) {
  T expected = T(*e);
  const bool done = __atomic_compare_exchange_n(static_cast<volatile T*>(p), &expected, T(d), false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
  if (done && expected != T(d)) progress();
  *e = u64(expected);
  return done;
}

void check(const volatile void* p, int bytes, int kind, const void* pc) {
  Fiber* f = self();
  if (reinterpret_cast<u64>(p) % u64(bytes))
    fail("misaligned", Site{nullptr, 0, pc}, "an atomic of %d bytes at address %p", bytes, const_cast<const void*>(p));
  if (__builtin_expect(f->worker->launch->checker != nullptr, 0)) note_access(p, size_t(bytes), kind, pc);
  // A loop of atomics may wait for another thread: let it run now and then.
  if (++f->restless > 64) {
    f->site = Site{nullptr, 0, pc};
    yield_here();
  }
}

}  // namespace

FRSIM_API u64 frsim_atomic_load(const volatile void* p, int bytes) {
  check(p, bytes, kRead | kVolatile, FRSIM_PC);
  if (self()->worker->launch->checker) release_acquire_address(p, self(), false, true);
  switch (bytes) {
    case 1: return load<u8>(p);
    case 2: return load<u16>(p);
    case 4: return load<u32>(p);
    default: return load<u64>(p);
  }
}

FRSIM_API void frsim_atomic_store(volatile void* p, u64 v, int bytes, bool release) {
  check(p, bytes, kWrite | kVolatile, FRSIM_PC);
  progress();
  if (Fiber* f = self(); f->worker->launch->checker) {
    if (release) order_fence(f, true);
    release_acquire_address(p, f, true, false);
  }
  switch (bytes) {
    case 1: return store<u8>(p, v);
    case 2: return store<u16>(p, v);
    case 4: return store<u32>(p, v);
    default: return store<u64>(p, v);
  }
}

FRSIM_API bool frsim_atomic_cas(volatile void* p, u64* expected, u64 desired, int bytes) {
  check(p, bytes, kAtomic, FRSIM_PC);
  Fiber* f = self();
  ++f->worker->atomics;
  if (f->worker->launch->checker) release_acquire_address(p, f, true, true);
  switch (bytes) {
    case 1: return cas<u8>(p, expected, desired);
    case 2: return cas<u16>(p, expected, desired);
    case 4: return cas<u32>(p, expected, desired);
    default: return cas<u64>(p, expected, desired);
  }
}

FRSIM_API void frsim_load(void* registers, const void* memory, size_t bytes) {
  if (reinterpret_cast<u64>(memory) % std::min<size_t>(bytes, 16))
    fail("misaligned", Site{nullptr, 0, FRSIM_PC}, "a vector load of %zu bytes at address %p", bytes, memory);
  if (__builtin_expect(self()->worker->launch->checker != nullptr, 0)) note_access(memory, bytes, kRead, FRSIM_PC);
  std::memcpy(registers, memory, bytes);
}

FRSIM_API void frsim_store(void* memory, const void* registers, size_t bytes) {
  if (reinterpret_cast<u64>(memory) % std::min<size_t>(bytes, 16))
    fail("misaligned", Site{nullptr, 0, FRSIM_PC}, "a vector store of %zu bytes at address %p", bytes, memory);
  if (__builtin_expect(self()->worker->launch->checker != nullptr, 0)) note_access(memory, bytes, kWrite, FRSIM_PC);
  std::memcpy(memory, registers, bytes);
}
