// Every access of a checked build: is it inside a buffer, aligned, of memory that was written, and not in flight?
#include <sys/mman.h>

#include "checker.h"

namespace fr_sim {
namespace {

template <class T> T* lazy_zeros(u64 count) {   // pages appear when they are touched
  if (!count) return nullptr;
  void* p = mmap(nullptr, count * sizeof(T), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return p == MAP_FAILED ? nullptr : static_cast<T*>(p);
}

void free_region(Region& r) {
  if (r.state) munmap(r.state, r.bytes);
  if (r.cells) munmap(r.cells, r.bytes * sizeof(Cell));
}

Region make_region(Checker& c, char* base, u64 bytes, int buffer) {
  Region r;
  r.base = base;
  r.bytes = bytes;
  r.buffer = buffer;
  r.state = lazy_zeros<u8>(bytes);
  if (c.races) r.cells = lazy_zeros<Cell>(bytes);
  return r;
}

bool inside(const Region& r, const char* p) { return u64(p - r.base) < r.bytes; }

const char* verb(int kind) { return kind & kAtomic ? "atomic access" : kind & kWrite ? "store" : "load"; }

[[noreturn]] void outside(Checker& c, Fiber* f, const char* p, size_t bytes, int kind, const void* pc) {
  const Site site{nullptr, 0, pc};
  char text[256];
  if (reinterpret_cast<u64>(p) < 65536) fail("bounds", site, "a %zu-byte %s through a null pointer (address %p)", bytes, verb(kind), (const void*)p);
  for (auto& b : f->worker->blocks) {
    const char* lo = b.fibers[0].stack_lo;
    if (p >= lo && p < b.fibers[b.threads - 1].stack_hi) {
      const u32 tid = u32((p - lo) / f->worker->launch->request->stack_bytes);
      fail("bounds", site, "a %zu-byte %s touches local memory of another thread, (%u, %u, %u)", bytes, verb(kind), b.fibers[tid].thread[0],
           b.fibers[tid].thread[1], b.fibers[tid].thread[2]);
    }
    if (b.copy != f->owner->copy && u64(p - b.copy->shared) < b.copy->shared_bytes)
      fail("bounds", site, "a %zu-byte %s touches shared memory of a block outside the cluster", bytes, verb(kind));
  }
  const Request& r = *f->worker->launch->request;
  const Copy& copy = *f->owner->copy;
  const char* dynamic_end = copy.dynamic + r.dynamic_shared;
  if (p >= copy.dynamic - 4096 && p < dynamic_end + (1 << 20)) {
    std::snprintf(text, sizeof text, "a %zu-byte %s at offset %lld of dynamic shared memory, which has %u bytes", bytes, verb(kind),
                  (long long)(p - copy.dynamic), r.dynamic_shared);
    fail_at_buffer("bounds", site, -2, p - copy.dynamic, bytes, nullptr, text);
  }
  long best = -1;
  long long distance = 1ll << 40;
  for (size_t i = 0; i < c.globals.size(); ++i) {
    const Region& g = c.globals[i];
    const long long d = p < g.base ? g.base - p : p - (g.base + g.bytes);
    if (d < distance) { distance = d; best = long(i); }
  }
  if (best < 0 || distance > (1ll << 32)) fail("bounds", site, "a %zu-byte %s at address %p, which no buffer is near", bytes, verb(kind), (const void*)p);
  const Region& g = c.globals[size_t(best)];
  std::snprintf(text, sizeof text, "a %zu-byte %s outside of its buffer of %llu bytes", bytes, verb(kind), (unsigned long long)g.bytes);
  fail_at_buffer("bounds", site, g.buffer, p - g.base, bytes, nullptr, text);
}

void check_state(Checker& c, Region& r, u64 offset, size_t bytes, int kind, const void* pc) {
  const Site site{nullptr, 0, pc};
  const bool write = kind & (kWrite | kAtomic), read = !(kind & kWrite) || (kind & kAtomic);
  const u64 room = r.bytes - offset;
  char text[256];
  u8* s = r.state + offset;
  for (size_t i = 0; i < bytes; ++i) {
    if (i >= room || !(s[i] & kValid)) {
      std::snprintf(text, sizeof text, i >= room ? "a %zu-byte %s runs %zu bytes past the end" : "a %zu-byte %s touches bytes that are not the tensor's, %zu in", bytes,
                    verb(kind), i >= room ? bytes - i : i);
      fail_at_buffer("bounds", site, r.buffer, (long long)offset, bytes, nullptr, text);
    }
    if (s[i] & kInFlight) {
      std::snprintf(text, sizeof text, "a %zu-byte %s touches the destination of an asynchronous copy that nobody has waited for", bytes, verb(kind));
      fail_at_buffer("async", site, r.buffer, (long long)offset, bytes, nullptr, text);
    }
    if (write && !(s[i] & kWritable)) {
      std::snprintf(text, sizeof text, "a %zu-byte %s to a buffer the kernel takes as const", bytes, verb(kind));
      fail_at_buffer("bounds", site, r.buffer, (long long)offset, bytes, nullptr, text);
    }
    if (read && c.uninitialised && !(s[i] & kInit)) {
      std::snprintf(text, sizeof text, "a %zu-byte %s of memory that was never written%s", bytes, verb(kind),
                    r.buffer < -1 ? ", or not yet: a barrier may be missing" : "");
      fail_at_buffer("uninitialised", site, r.buffer, (long long)(offset + i), bytes, nullptr, text);
    }
    if (write) s[i] |= kInit;
  }
}

}  // namespace

Region* find_region(Checker& c, Fiber* f, const char* p, size_t) {
  if (c.last && inside(*c.last, p) && (!c.last->block || c.last->block == f->owner)) return c.last;
  const size_t slot = size_t(f->owner - f->worker->blocks.data());
  for (Region* r : {&c.dynamic[slot], &c.fixed[slot]})
    if (inside(*r, p)) return c.last = r;
  for (auto& r : c.globals)
    if (inside(r, p)) return c.last = &r;
  const u32 n = f->worker->launch->cluster_blocks;
  if (n > 1) {
    const size_t first = size_t(f->owner->first_of_cluster - f->worker->blocks.data());
    for (size_t s = first; s < first + n; ++s)
      for (Region* r : {&c.dynamic[s], &c.fixed[s]})
        if (inside(*r, p)) {
          if (!f->worker->blocks[s].live)
            fail("cluster", Site{}, "a thread touches the shared memory of block %u of its cluster, which has already exited", f->worker->blocks[s].rank);
          return r;
        }
  }
  return nullptr;
}

void note_access(const volatile void* where, size_t bytes, int kind, const void* pc) {
  Fiber* f = self();
  if (!f || !f->owner || !bytes) return;
  Checker* c = checker_of(f);
  const char* p = const_cast<const char*>(static_cast<const volatile char*>(where));
  if (!c || u64(p - f->stack_lo) < u64(f->stack_hi - f->stack_lo)) return;
  Worker& w = *f->worker;
  if (__builtin_expect(w.launch->expired, 0)) fail_expired(Site{nullptr, 0, pc});
  Region* r = find_region(*c, f, p, bytes);
  if (!r) {
    const Copy& copy = *f->owner->copy;
    if (p >= copy.image && p < copy.image + copy.image_bytes && !(p >= copy.dynamic && p < copy.dynamic + (1 << 18))) return;   // constants of the unit
    outside(*c, f, p, bytes, kind, pc);
  }
  if (kind & (kWrite | kAtomic)) { ++w.writes; f->dirty = f->dirty || r->buffer >= 0; } else { ++w.reads; }
  const u64 offset = u64(p - r->base);
  if (r->buffer >= 0 && w.launch->request->programmatic && !f->owner->cluster->settled) {
    char text[160];
    std::snprintf(text, sizeof text, "a %zu-byte %s before grid_dependency_wait()", bytes, verb(kind));
    fail_at_buffer("dependency", Site{nullptr, 0, pc}, r->buffer, (long long)offset, bytes, nullptr, text);
  }
  check_state(*c, *r, offset, bytes, kind, pc);
  if (c->races) check_race(*c, *r, offset, bytes, kind, f, pc);
  if (c->banks && !(kind & kEngine) && r->buffer < -1 && r->block == f->owner) count_banks(*c, f, offset, bytes, pc);
}

void set_in_flight(const char* p, size_t bytes, bool on) {
  Checker* c = checker_of(self());
  if (!c) return;
  for (auto* list : {&c->dynamic, &c->fixed})
    for (auto& r : *list)
      if (inside(r, p))
        for (size_t i = 0; i < bytes; ++i) {
          u8& s = r.state[u64(p - r.base) + i];
          s = on ? u8(s | kInFlight) : u8(s & ~kInFlight);
        }
}

void check_block_start(Block& b) {
  Launch& l = *b.fibers->worker->launch;
  Checker* c = l.checker;
  if (!c) return;
  const size_t slot = size_t(&b - b.fibers->worker->blocks.data());
  for (Region* r : {&c->fixed[slot], &c->dynamic[slot]}) {
    const u8* mask = r->buffer == -3 ? b.copy->shared_mask : nullptr;
    for (u64 i = 0; i < r->bytes; ++i) r->state[i] = u8(!mask || mask[i] ? kValid | kWritable : kWritable);
    r->first_stamp = u32(c->stamps.size());
    r->block = &b;
  }
  b.floor = b.first_stamp = u32(c->stamps.size());
  b.fenced_floor = 0;
  b.any_extra = b.any_fence = false;
  b.acquired.clear();
  delete_knowledge(b.known);
  for (auto& n : b.named) delete_knowledge(n.known);
  for (u32 t = 0; t < b.threads; ++t) {
    Fiber& f = b.fibers[t];
    f.stamp = f.fence_floor = f.fence_stamp = f.proxy_stamp = f.proxy_time = 0;
    f.stamp_closed = true;
    f.fenced = f.dirty = false;
    delete_knowledge(f.extra);
    delete f.acquired;
    f.acquired = nullptr;
  }
  if (!b.rank) { delete_knowledge(b.cluster->known); delete_knowledge(b.cluster->gather); }
}

void check_block_end(Block& b) {
  if (Checker* c = b.fibers->worker->launch->checker; c && c->banks) close_banks(*c, b);
}

void start_checker(Launch& l) {
  auto* c = new Checker;
  const Request& r = *l.request;
  l.checker = c;
  c->launch = &l;
  c->races = r.races;
  c->uninitialised = r.uninitialised;
  c->banks = r.banks;
  c->logs.resize(r.banks ? l.resident : 0);
  c->stamps.push_back(Stamp{~u32(0), 0, kPlainStamp});
  for (u32 i = 0; i < r.n_buffers; ++i) {
    const Buffer& b = r.buffers[i];
    Region g = make_region(*c, b.base, b.bytes, int(i));
    const u8 flags = u8((b.writable ? kWritable : 0) | (b.initialised ? kInit : 0));
    for (u64 k = 0; k < b.bytes; ++k) g.state[k] = u8((!b.mask || b.mask[k] ? kValid : 0) | flags);
    c->globals.push_back(g);
  }
  for (u32 s = 0; s < l.resident; ++s) {
    const Copy& copy = r.copies[s];
    c->fixed.push_back(make_region(*c, copy.shared, copy.shared_bytes, -3));
    c->dynamic.push_back(make_region(*c, copy.dynamic, r.dynamic_shared, -2));
  }
}

void finish_checker(Launch& l) {
  Checker* c = l.checker;
  const Request& r = *l.request;
  for (u32 i = 0; i < r.n_buffers; ++i) {
    Buffer& b = r.buffers[i];
    b.unwritten = 0;
    for (u64 k = 0; k < b.bytes; ++k)
      if ((c->globals[i].state[k] & (kValid | kInit)) == kValid && !b.unwritten++) b.first_unwritten = k;
  }
  for (auto& s : c->sites) {
    const u32 at = l.result->n_banks++;
    if (at >= r.n_sites) continue;
    BankSite& site = r.sites[at];
    site = {s.first, s.second.instructions, s.second.wavefronts, s.second.ideal, {}};
    std::copy(std::begin(s.second.words), std::end(s.second.words), site.words);
  }
  for (auto* list : {&c->globals, &c->fixed, &c->dynamic})
    for (auto& g : *list) free_region(g);
  for (auto& m : c->mbarriers) { delete_knowledge(m.second.gather); delete_knowledge(m.second.known); }
  delete c;
  l.checker = nullptr;
}

}  // namespace fr_sim

using namespace fr_sim;

FRSIM_API void frsim_access(const volatile void* p, size_t bytes, int kind) {
  if (__builtin_expect(self()->worker->launch->checker != nullptr, 0)) note_access(p, bytes, kind, FRSIM_PC);
}
