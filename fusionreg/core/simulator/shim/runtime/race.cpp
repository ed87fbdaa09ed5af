// Data races: two threads touch a byte, one of them writes, and no synchronisation orders the two. A stamp numbers a thread's stretch
// between synchronisations; barriers are "floors" (every stamp below is ordered), finer synchronisation is a vector of stamps.
#include "checker.h"

namespace fr_sim {
namespace {

// The slot of a thread among those of its cluster; behind each block's threads, warps of which one stands for a warpgroup's wgmma.
u32 slots(const Block& b) { return b.threads + (b.threads + 127) / 128 * 32; }
u32 slot(const Block& b, u32 rank, u32 tid) { return rank * slots(b) + tid; }

u32 current_stamp(Checker& c, Fiber* f, u16 kind) {
  if (f->stamp_closed || f->stamp < f->owner->floor || f->stamp < f->team->floor || f->stamp < c.grid_floor) {
    f->stamp = u32(c.stamps.size());     // one for every kind of access, next to each other
    for (u16 kind = kPlainStamp; kind < kStampKinds; ++kind) c.stamps.push_back(Stamp{f->owner->linear, u16(f->tid), kind});
    f->stamp_closed = false;
  }
  return f->stamp + kind;
}

bool known(const Knowledge* k, u32 rank, u32 index, u32 s) { return k && (s < k->floors[rank] || s < k->threads[index] + kStampKinds); }

// What atomics carried over, by (block, thread) or by whole block (thread 0xFFFF): stamps below are ordered.
u64 whole(u32 block) { return u64(block) << 16 | 0xFFFF; }
u64 single(u32 block, u32 tid) { return u64(block) << 16 | tid; }

bool published_before(const std::unordered_map<u64, u32>& map, const Stamp& x, u32 s) {
  if (auto it = map.find(whole(x.block)); it != map.end() && s < it->second) return true;
  auto it = map.find(single(x.block, x.tid));
  return it != map.end() && s < it->second;
}

bool ordered(Checker& c, const Stamp& x, u32 s, const Fiber* f) {
  const Block& b = *f->owner;
  if (x.block == b.linear) {
    if (x.tid == f->tid || s < b.floor) return true;
    if (x.tid / 32 == f->tid / 32 && s < f->team->floor) return true;
    const u32 index = slot(b, b.rank, x.tid);
    return known(f->extra, b.rank, index, s) || known(b.known, b.rank, index, s) || (f->acquired && published_before(*f->acquired, x, s));
  }
  if (s < c.grid_floor) return true;
  const Launch& l = *c.launch;
  if (l.cluster_blocks > 1) {
    for (u32 r = 0; r < l.cluster_blocks; ++r)
      if (b.first_of_cluster[r].linear == x.block) {
        const u32 index = slot(b, r, x.tid);
        if (known(f->extra, r, index, s) || known(b.known, r, index, s)) return true;
      }
  }
  return published_before(b.acquired, x, s) || (f->acquired && published_before(*f->acquired, x, s));
}

Where place_of(const Checker& c, const Stamp& s, const Fiber* f, u32 pc) {
  Where w{};
  const Request& q = *c.launch->request;
  w.thread[0] = s.tid % q.block[0];
  w.thread[1] = s.tid / q.block[0] % q.block[1];
  w.thread[2] = s.tid / q.block[0] / q.block[1];
  w.block[0] = s.block % q.grid[0];
  w.block[1] = s.block / q.grid[0] % q.grid[1];
  w.block[2] = s.block / q.grid[0] / q.grid[1];
  w.pc = reinterpret_cast<u64>(f->owner->copy->image) + pc;
  return w;
}

[[noreturn]] void report(Checker& c, Region& r, u64 offset, size_t bytes, bool write, Fiber* f, const void* pc, u32 other, u32 other_pc, bool other_write) {
  const Stamp& s = c.stamps[other];
  const Where w = place_of(c, s, f, other_pc);
  char whose[64], text[256];
  if (s.tid < f->owner->threads) std::snprintf(whose, sizeof whose, "of thread (%u, %u, %u)", w.thread[0], w.thread[1], w.thread[2]);
  else std::snprintf(whose, sizeof whose, "by wgmma of warpgroup %u", (s.tid - f->owner->threads) / 32);
  std::snprintf(text, sizeof text, "a %zu-byte %s races with a %s %s of block (%u, %u, %u): nothing orders them", bytes, write ? "store" : "load",
                other_write ? "store" : "load", whose, w.block[0], w.block[1], w.block[2]);
  fail_at_buffer("race", Site{nullptr, 0, pc}, r.buffer, (long long)offset, bytes, &w, text);
}

[[noreturn]] void report_unfenced(Checker& c, Region& r, u64 offset, size_t bytes, bool write, Fiber* f, const void* pc, u32 other, u32 other_pc) {
  const Where w = place_of(c, c.stamps[other], f, other_pc);
  char text[256];
  std::snprintf(text, sizeof text, "TMA or wgmma %s what thread (%u, %u, %u) stored, with no fence.proxy.async in between", write ? "overwrites" : "reads", w.thread[0],
                w.thread[1], w.thread[2]);
  fail_at_buffer("proxy", Site{nullptr, 0, pc}, r.buffer, (long long)offset, bytes, &w, text);
}

Knowledge& make(Knowledge*& k, const Fiber* f) {
  if (!k) {
    const u32 n = f->worker->launch->cluster_blocks;
    k = new Knowledge;
    k->floors.assign(n, 0);
    k->threads.assign(u64(n) * slots(*f->owner), 0);
  }
  return *k;
}

void join(Knowledge& to, const Knowledge& from) {
  for (size_t i = 0; i < to.floors.size(); ++i) to.floors[i] = std::max(to.floors[i], from.floors[i]);
  for (size_t i = 0; i < to.threads.size(); ++i) to.threads[i] = std::max(to.threads[i], from.threads[i]);
}

void close(Fiber* f) { f->stamp_closed = true; }

void release_own(Knowledge& k, Fiber* f) {
  u32& own = k.threads[slot(*f->owner, f->owner->rank, f->tid)];
  own = std::max(own, f->stamp);
}

// The async proxy does not see what a thread stored before the thread, or the one that starts the copy or product, has fenced.
bool behind_fence(const Checker& c, const Region& r, u32 s, const Fiber* f) {
  if (!s || s < r.first_stamp) return true;
  const Stamp& x = c.stamps[s];
  if (x.kind == kProxyStamp || s < f->proxy_time) return true;
  const Launch& l = *c.launch;
  for (u32 i = 0; i < l.cluster_blocks; ++i)
    if (const Block& b = f->owner->first_of_cluster[i]; b.linear == x.block && x.tid < b.threads) return s < b.fibers[x.tid].proxy_stamp + kStampKinds;
  return true;
}

void raise_to(std::unordered_map<u64, u32>& map, u64 who, u32 floor) {
  auto& v = map[who];
  v = std::max(v, floor);
}

void merge(std::unordered_map<u64, u32>& to, const std::unordered_map<u64, u32>& from) {
  for (auto& x : from) raise_to(to, x.first, x.second);
}

}  // namespace

void check_race(Checker& c, Region& r, u64 offset, size_t bytes, int kind, Fiber* f, const void* pc) {
  const bool strong = kind & (kAtomic | kVolatile), write = kind & (kWrite | kAtomic), proxy = (kind & kProxy) == kProxy && r.buffer < -1;
  const u32 mine = current_stamp(c, f, proxy ? kProxyStamp : strong ? kAtomicStamp : kPlainStamp);
  const u32 here = u32(reinterpret_cast<u64>(pc) - reinterpret_cast<u64>(f->owner->copy->image));
  u32 fenced = 0, fine = 0;   // the last stamp found to be no conflict: neighbouring bytes mostly carry the same one
  auto conflicts = [&](u32 s) {
    if (s < r.first_stamp || s == 0 || s == mine || s == fine) return false;
    const Stamp& x = c.stamps[s];
    if ((strong && x.kind == kAtomicStamp) || ordered(c, x, s, f)) { fine = s; return false; }
    return true;
  };
  for (size_t i = 0; i < bytes; ++i) {
    Cell& cell = r.cells[offset + i];
    if (conflicts(cell.write)) report(c, r, offset + i, bytes, write, f, pc, cell.write, cell.write_pc, true);
    if (proxy && cell.write != fenced) {
      if (!behind_fence(c, r, cell.write, f)) report_unfenced(c, r, offset + i, bytes, write, f, pc, cell.write, cell.write_pc);
      fenced = cell.write;
    }
    if (write) {
      if (conflicts(cell.read1)) report(c, r, offset + i, bytes, true, f, pc, cell.read1, cell.read1_pc, false);
      if (conflicts(cell.read2)) report(c, r, offset + i, bytes, true, f, pc, cell.read2, cell.read2_pc, false);
      // An atomic must not hide the plain store before it, which other threads' atomics may still race with.
      const bool keep = strong && cell.write >= r.first_stamp && cell.write && c.stamps[cell.write].kind != kAtomicStamp;
      cell.read1 = keep ? cell.write : strong ? cell.read1 : 0;
      if (keep) cell.read1_pc = cell.write_pc;
      if (!strong) cell.read2 = 0;
      cell.write = mine;
      cell.write_pc = here;
      continue;
    }
    if (kind & kPeek) continue;
    // Two readers are kept, of different warps if there are such: whoever writes next is at most one of them.
    if (cell.read1 == mine || cell.read2 == mine) continue;
    if (cell.read1 < r.first_stamp || !cell.read1 || ordered(c, c.stamps[cell.read1], cell.read1, f)) {
      cell.read1 = mine;
      cell.read1_pc = here;
    } else if (cell.read2 < r.first_stamp || !cell.read2 || c.stamps[cell.read1].tid / 32 != f->tid / 32 || c.stamps[cell.read1].block != f->owner->linear ||
               ordered(c, c.stamps[cell.read2], cell.read2, f)) {
      cell.read2 = mine;
      cell.read2_pc = here;
    }
  }
}

void order_block(Block& b) {
  Checker* c = b.fibers->worker->launch->checker;
  if (!c || !c->races) return;
  b.floor = u32(c->stamps.size());
  if (b.any_extra) {
    for (u32 t = 0; t < b.threads; ++t)
      if (b.fibers[t].extra) join(make(b.known, &b.fibers[t]), *b.fibers[t].extra);
  }
  if (b.any_fence) {
    bool clean = true;
    for (u32 t = 0; t < b.threads; ++t) {
      Fiber& f = b.fibers[t];
      clean = clean && !f.dirty;
      if (f.acquired) merge(b.acquired, *f.acquired);
    }
    if (clean) b.fenced_floor = b.floor;   // every thread fenced its stores before it came here
  }
}

void order_warp(Warp& warp, u32 mask) {
  Fiber* any = warp.lanes[__builtin_ctz(mask)];
  Checker* c = checker_of(any);
  if (!c || !c->races) return;
  Knowledge* gather = nullptr;
  u32 present = 0;
  bool extras = false;
  for (u32 i = 0; i < warp.members; ++i) {
    if (!warp.lanes[i]->exited) present |= 1u << i;
    extras = extras || ((mask >> i & 1) && warp.lanes[i]->extra);
  }
  if (mask == present) {
    warp.floor = u32(c->stamps.size());
    if (!extras) return;
  }
  for (u32 i = 0; i < warp.members; ++i)
    if (mask >> i & 1) release_to(gather, warp.lanes[i]);
  for (u32 i = 0; i < warp.members; ++i)
    if (mask >> i & 1) acquire_from(gather, warp.lanes[i]);
  delete_knowledge(gather);
}

void release_to(Knowledge*& to, Fiber* f) {
  Checker* c = checker_of(f);
  if (!c || !c->races) return;
  Knowledge& k = make(to, f);
  const Block& b = *f->owner;
  k.floors[b.rank] = std::max(k.floors[b.rank], b.floor);
  if (f->team->floor)
    for (u32 i = 0; i < f->team->members; ++i) {
      u32& t = k.threads[slot(b, b.rank, f->team->lanes[i]->tid)];
      t = std::max(t, std::min(f->team->lanes[i]->stamp, f->team->floor - 1));
    }
  release_own(k, f);
  if (f->extra) join(k, *f->extra);
  if (b.known) join(k, *b.known);
  close(f);
}

void release_reads(Knowledge*& to, Fiber* proxy) {
  if (Checker* c = checker_of(proxy); !c || !c->races) return;
  release_own(make(to, proxy), proxy);
  close(proxy);
}

void order_proxy(Fiber* f) {
  Checker* c = checker_of(f);
  if (!c || !c->races) return;
  f->proxy_stamp = f->stamp;
  f->proxy_time = u32(c->stamps.size());
  close(f);
}

void acquire_from(Knowledge* from, Fiber* f) {
  if (!from) return;
  join(make(f->extra, f), *from);
  f->owner->any_extra = true;
}

void delete_knowledge(Knowledge*& k) {
  delete k;
  k = nullptr;
}

void forget(Worker& w) {
  for (auto& f : w.fibers) { delete_knowledge(f.extra); delete f.acquired; f.acquired = nullptr; }
  for (auto& b : w.blocks) {
    delete_knowledge(b.known);
    forget_products(b);
    for (auto& n : b.named) delete_knowledge(n.known);
  }
  for (auto& c : w.clusters) { delete_knowledge(c.known); delete_knowledge(c.gather); }
}

void order_grid(Worker& w) {
  if (Checker* c = w.launch->checker) c->grid_floor = u32(c->stamps.size());
  for (auto& b : w.blocks) b.floor = w.launch->checker ? w.launch->checker->grid_floor : 0;
}

void order_fence(Fiber* f, bool device) {
  f->fence_floor = f->owner->floor;
  f->fence_stamp = f->stamp;
  f->fenced = true;
  f->fenced_device = device;
  if (device) f->dirty = false;
  f->owner->any_fence = true;
  close(f);
}

void release_acquire_address(const volatile void* p, Fiber* f, bool release, bool acquire) {
  Checker* c = checker_of(f);
  if (!c || !c->races) return;
  Block& b = *f->owner;
  const u64 everywhere = reinterpret_cast<u64>(p), here = everywhere ^ (u64(b.linear) + 1) << 48;   // a block-scope fence orders within its block
  if (acquire && !c->published.empty()) {
    for (u64 key : {everywhere, here}) {
      auto it = c->published.find(key);
      if (it == c->published.end()) continue;
      if (!f->acquired) f->acquired = new std::unordered_map<u64, u32>;
      merge(*f->acquired, it->second);
      b.any_fence = true;
    }
  }
  // An atomic publishes what was fenced before it: stores without __threadfence() stay unordered, as on the device.
  if (!release || (!f->fenced && !b.fenced_floor)) return;
  auto& out = c->published[f->fenced && !f->fenced_device && !b.fenced_floor ? here : everywhere];
  raise_to(out, whole(b.linear), std::max(f->fenced ? f->fence_floor : 0, b.fenced_floor));
  if (f->fenced) raise_to(out, single(b.linear, f->tid), f->fence_stamp + kStampKinds);
  if (f->acquired) merge(out, *f->acquired);
  merge(out, b.acquired);
}

}  // namespace fr_sim
