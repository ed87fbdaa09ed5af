// Asynchronous copies and mbarriers. A copy's destination holds NaN bytes and counts as "in flight" until somebody waits for it:
// what the hardware may deliver late is always delivered as late as it may be.
#include "checker.h"

namespace fr_sim {

void shared_only(const void* p, u64 bytes, u64 alignment, const char* what, const void* pc) {
  Fiber* f = self();
  const Site site{nullptr, 0, pc};
  const auto* a = static_cast<const char*>(p);
  const Request& r = *f->worker->launch->request;
  const Block* b = f->owner->first_of_cluster;
  for (u32 i = 0; i < f->worker->launch->cluster_blocks; ++i) {
    const Copy& c = *b[i].copy;
    if (u64(a - c.dynamic) + bytes <= r.dynamic_shared || u64(a - c.shared) + bytes <= c.shared_bytes) {
      if (reinterpret_cast<u64>(p) % alignment)
        fail("misaligned", site, "%s needs a shared address aligned to %llu bytes; this one is off by %llu", what, (unsigned long long)alignment,
             (unsigned long long)(reinterpret_cast<u64>(p) % alignment));
      return;
    }
  }
  fail("bounds", site, "%s at address %p, of which %llu bytes are not in shared memory (%u bytes dynamic)", what, p, (unsigned long long)bytes, r.dynamic_shared);
}

void global_only(const void* global, const char* what, const void* pc) {
  Fiber* f = self();
  const auto* p = static_cast<const char*>(global);
  if (u64(p - f->stack_lo) < u64(f->stack_hi - f->stack_lo)) fail("space", Site{nullptr, 0, pc}, "%s takes an address of global memory; this one is in local memory", what);
  const Block* b = f->owner->first_of_cluster;
  for (u32 i = 0; i < f->worker->launch->cluster_blocks; ++i) {
    const Copy& c = *b[i].copy;
    if (u64(p - c.dynamic) < f->worker->launch->request->dynamic_shared || u64(p - c.shared) < c.shared_bytes)
      fail("space", Site{nullptr, 0, pc}, "%s takes an address of global memory; this one is in shared memory", what);
  }
}

namespace {

void begin(char* dst, const char* src, u32 bytes, u32 src_bytes, const void* pc, int engine = 0) {
  if (self()->worker->launch->checker) {
    if (src_bytes) note_access(src, src_bytes, kRead, pc);
    note_access(dst, bytes, kWrite | engine, pc);
    set_in_flight(dst, bytes, true);
  }
  std::memset(dst, 0xFF, bytes);
}

void land(Fiber* f, u32 groups_before, bool all) {
  size_t kept = 0;
  for (auto& c : f->copies) {
    if (!all && c.group >= groups_before) { f->copies[kept++] = c; continue; }
    if (f->worker->launch->checker) {
      set_in_flight(c.dst, c.bytes, false);
      note_access(c.dst, c.bytes, kWrite | kEngine, c.pc);   // to others, the data appears now
    }
    std::memcpy(c.dst, c.src, c.src_bytes);
    std::memset(c.dst + c.src_bytes, 0, c.bytes - c.src_bytes);
  }
  f->copies.resize(kept);
}

// An mbarrier's eight bytes: phase, expected and pending arrivals, pending transaction bytes (biased).
struct Bits {
  u64 phase : 1, expected : 20, pending : 20, tx : 22, live : 1;
};
constexpr u32 kBias = 1u << 21;

Bits read(const u64* bar, const void* pc) {
  shared_only(bar, 8, 8, "mbarrier", pc);
  Bits b;
  std::memcpy(&b, bar, 8);
  if (*bar == ~u64(0) || !b.live || !b.expected) fail("mbarrier", Site{nullptr, 0, pc}, "an mbarrier is used before mbarrier.init, or was overwritten");
  if (self()->worker->launch->checker) note_access(bar, 8, kAtomic, pc);
  return b;
}

void write(u64* bar, Bits b) { std::memcpy(bar, &b, 8); }

void finish_if_complete(u64* bar, Bits& b) {
  if (b.pending || b.tx != kBias) return;
  b.phase ^= 1;
  b.pending = b.expected;
  if (Checker* c = checker_of(self()); c && c->races) {
    auto& p = c->mbarriers[reinterpret_cast<u64>(bar)];
    std::swap(p.known, p.gather);
    delete_knowledge(p.gather);
  }
}

void publish(u64* bar) {
  if (Checker* c = checker_of(self()); c && c->races) release_to(c->mbarriers[reinterpret_cast<u64>(bar)].gather, self());
}

void add_tx(u64* bar, long long delta, const void* pc) {
  Bits b = read(bar, pc);
  b.tx = u32((long long)b.tx + delta);
  finish_if_complete(bar, b);
  write(bar, b);
  progress();
}

void load_now(char* dst, const char* src, u32 bytes, u64* bar, const void* pc) {
  shared_only(dst, bytes, 16, "cp.async.bulk", pc);
  shared_only(bar, 8, 8, "mbarrier", pc);
  begin(dst, src, bytes, bytes, pc, kProxy);
  publish(bar);
  self()->worker->landings[reinterpret_cast<u64>(bar)].push_back({dst, src, bytes});
}

void deliver(u64* bar, const void* pc) {   // somebody waits: what was on its way to this barrier arrives
  auto& all = self()->worker->landings;
  auto it = all.find(reinterpret_cast<u64>(bar));
  if (it == all.end()) return;
  const std::vector<Landing> list = std::move(it->second);
  all.erase(it);
  for (auto& l : list) {
    set_in_flight(l.dst, l.bytes, false);
    if (l.tile) land_tile(*l.tile, l.dst);
    else std::memcpy(l.dst, l.src, l.bytes);
    add_tx(bar, -(long long)l.bytes, pc);
  }
}

void store_now(Fiber* f, u32 groups_before, bool all) {
  size_t kept = 0;
  for (auto& c : f->bulk) {
    if (!all && c.group >= groups_before) { f->bulk[kept++] = c; continue; }
    if (c.tile) { store_tile(*c.tile, c.src, c.pc); continue; }
    if (f->worker->launch->checker) { note_access(c.src, c.bytes, kRead | kProxy, c.pc); note_access(c.dst, c.bytes, kWrite | kProxy, c.pc); }
    std::memcpy(c.dst, c.src, c.bytes);
  }
  f->bulk.resize(kept);
}

}  // namespace

void begin_landing(char* dst, u32 bytes, u64* bar, const std::shared_ptr<Tile>& tile, const void* pc) {
  shared_only(bar, 8, 8, "mbarrier", pc);
  begin(dst, nullptr, bytes, 0, pc, kProxy);
  publish(bar);
  self()->worker->landings[reinterpret_cast<u64>(bar)].push_back({dst, nullptr, bytes, tile});
}

}  // namespace fr_sim

using namespace fr_sim;

FRSIM_API void frsim_cp_async(void* smem, const void* global, int bytes, int src_bytes) {
  Fiber* f = self();
  const Site here{nullptr, 0, FRSIM_PC};
  if ((bytes != 4 && bytes != 8 && bytes != 16) || src_bytes < 0 || src_bytes > bytes)
    fail("async", here, "cp.async of %d bytes out of %d — sizes are 4, 8 and 16, and no more is read than written", src_bytes, bytes);
  shared_only(smem, u64(bytes), u64(bytes), "cp.async", FRSIM_PC);
  if (src_bytes && reinterpret_cast<u64>(global) % u64(bytes))
    fail("misaligned", here, "cp.async of %d bytes from global address %p", bytes, global);
  if (src_bytes) global_only(global, "cp.async", FRSIM_PC);
  f->worker->async_bytes += u32(bytes);
  auto* dst = static_cast<char*>(smem);
  auto* src = static_cast<const char*>(global);
  begin(dst, src, u32(bytes), u32(src_bytes), FRSIM_PC);
  f->copies.push_back({dst, src, u32(bytes), u32(src_bytes), f->committed, FRSIM_PC});
}

FRSIM_API void frsim_cp_async_commit() { ++self()->committed; }

FRSIM_API void frsim_cp_async_wait(int groups) {
  Fiber* f = self();
  if (groups < 0) land(f, 0, true);
  else if (f->committed > u32(groups)) land(f, f->committed - u32(groups), false);
}

FRSIM_API void frsim_mbarrier_init(u64* bar, unsigned count) {
  shared_only(bar, 8, 8, "mbarrier.init", FRSIM_PC);
  if (!count || count >= (1u << 20)) fail("mbarrier", Site{nullptr, 0, FRSIM_PC}, "mbarrier.init with a count of %u", count);
  if (self()->worker->launch->checker) note_access(bar, 8, kWrite, FRSIM_PC);
  write(bar, Bits{0, count, count, kBias, 1});
}

FRSIM_API void frsim_mbarrier_inval(u64* bar) {
  read(bar, FRSIM_PC);
  *bar = ~u64(0);
}

FRSIM_API u64 frsim_mbarrier_arrive(u64* bar, unsigned count, unsigned expect_tx) {
  Bits b = read(bar, FRSIM_PC);
  if (count > b.pending) fail("mbarrier", Site{nullptr, 0, FRSIM_PC}, "more threads arrive at an mbarrier than its phase still expects (%u of %u pending)", count, unsigned(b.pending));
  publish(bar);
  const u64 token = b.phase;
  b.tx += expect_tx;
  b.pending -= count;
  finish_if_complete(bar, b);
  write(bar, b);
  progress();
  return token;
}

FRSIM_API void frsim_mbarrier_tx(u64* bar, int delta) { add_tx(bar, delta, FRSIM_PC); }

static bool try_wait(u64* bar, unsigned parity, bool may_yield, const void* pc) {
  deliver(bar, pc);
  if (read(bar, pc).phase == (parity & 1)) {
    if (may_yield) {
      self()->site = Site{nullptr, 0, pc};
      yield_here();
    }
    deliver(bar, pc);
    if (read(bar, pc).phase == (parity & 1)) return false;
  }
  if (Checker* c = checker_of(self()); c && c->races) acquire_from(c->mbarriers[reinterpret_cast<u64>(bar)].known, self());
  return true;
}

FRSIM_API bool frsim_mbarrier_try(u64* bar, unsigned parity, bool may_yield) { return try_wait(bar, parity, may_yield, FRSIM_PC); }

FRSIM_API void frsim_mbarrier_wait(u64* bar, unsigned parity) {
  while (!try_wait(bar, parity, true, FRSIM_PC)) {}
}

FRSIM_API void frsim_cp_async_mbarrier(u64* bar, bool noinc) {
  land(self(), 0, true);
  Bits b = read(bar, FRSIM_PC);
  if (!noinc) { b.pending += 1; write(bar, b); }
  frsim_mbarrier_arrive(bar, 1, 0);
}

FRSIM_API void frsim_bulk(void* dst, const void* src, unsigned bytes, void* bar, int kind, unsigned mask) {
  Fiber* f = self();
  const Site here{nullptr, 0, FRSIM_PC};
  if (bytes % 16 || !bytes || reinterpret_cast<u64>(dst) % 16 || reinterpret_cast<u64>(src) % 16)
    fail("misaligned", here, "cp.async.bulk of %u bytes from %p to %p: all three must be multiples of 16", bytes, src, dst);
  if (kind != 1) global_only(kind == 2 ? dst : src, "cp.async.bulk", FRSIM_PC);
  f->worker->async_bytes += bytes;
  auto* d = static_cast<char*>(dst);
  auto* s = static_cast<const char*>(src);
  auto* b = static_cast<u64*>(bar);
  if (kind == 2) {
    shared_only(src, bytes, 16, "cp.async.bulk", FRSIM_PC);
    f->bulk.push_back({d, s, bytes, bytes, f->bulk_committed, FRSIM_PC});
  } else if (kind == 3) {
    for (u32 r = 0; r < f->worker->launch->cluster_blocks; ++r)
      if (mask >> r & 1) load_now(static_cast<char*>(frsim_map_shared(dst, r)), s, bytes, static_cast<u64*>(frsim_map_shared(bar, r)), FRSIM_PC);
  } else {
    load_now(d, s, bytes, b, FRSIM_PC);
  }
}

FRSIM_API void frsim_bulk_commit() { ++self()->bulk_committed; }

FRSIM_API void frsim_bulk_wait(int groups) {
  Fiber* f = self();
  if (f->bulk_committed > u32(groups)) store_now(f, f->bulk_committed - u32(groups), false);
}

FRSIM_API void frsim_global(const volatile void* p) { global_only(const_cast<const void*>(p), "this instruction", FRSIM_PC); }

FRSIM_API void frsim_fence_proxy_async() { order_proxy(self()); }
