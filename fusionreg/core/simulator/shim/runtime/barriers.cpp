// __syncthreads and its reductions, named barriers, cluster barriers, grid-wide barriers.
#include "runtime.h"

namespace fr_sim {
namespace {

void release_block(Block& b) {
  const int reduced = b.op == kSyncAnd ? b.reduced == int(b.threads) : b.op == kSyncOr ? b.reduced != 0 : b.reduced;
  b.arrived = 0;
  b.first_arrival = nullptr;
  ++b.fibers->worker->barriers;
  progress();
  order_block(b);
  reshuffle(b);
  for (Named& n : b.named)
    if (!n.arrived) n.counted = 0;   // whoever used it has left it: it may count others now
  for (u32 i = 0; i < b.threads; ++i) {
    b.order[i]->result = reduced;
    make_ready(b.order[i]);
  }
}

const char* block_op(int op) {
  static const char* const names[] = {"__syncthreads", "__syncthreads_count", "__syncthreads_and", "__syncthreads_or"};
  return names[op];
}

// A block's window of shared addresses: static memory, then dynamic memory. They are congruent to the host's, modulo 1024.
u64 fixed_begin(const Copy& c) { return reinterpret_cast<u64>(c.shared) % 1024; }
u64 dynamic_begin(const Copy& c) { return (fixed_begin(c) + c.shared_bytes + 1023) / 1024 * 1024; }

void wake(std::vector<Fiber*>& waiting) {
  for (Fiber* f : waiting) make_ready(f);
  waiting.clear();
}

}  // namespace

const char* shared_at(const Fiber* f, u32 address) {
  const Copy& c = *f->owner->copy;
  if (address - dynamic_begin(c) < f->worker->launch->request->dynamic_shared) return c.dynamic + (address - dynamic_begin(c));
  if (address - fixed_begin(c) < c.shared_bytes) return c.shared + (address - fixed_begin(c));
  return nullptr;
}

}  // namespace fr_sim

using namespace fr_sim;

FRSIM_API int frsim_sync_block(int op, int predicate, const char* file, int line) {
  Fiber* f = self();
  Block& b = *f->owner;
  const Site here{file, line, FRSIM_PC};
  if (!b.arrived) {
    b.op = op;
    b.reduced = 0;
    b.site = here;
    b.first_arrival = f;
  } else if (b.op != op || b.site.line != line || (b.site.file != file && std::strcmp(b.site.file, file))) {
    Where other;
    describe(other, b.first_arrival, b.site);
    fail("divergent-barrier", here, "threads of one block wait at different barriers: thread (%u, %u, %u) at %s of line %d, this one at %s of line %d",
         other.thread[0], other.thread[1], other.thread[2], block_op(b.op), b.site.line, block_op(op), line);
  }
  b.reduced += predicate != 0;
  f->wait_op = op;
  f->restless = 0;
  if (++b.arrived == b.threads) {
    release_block(b);          // this fiber is among those made ready
    f->site = here;
    f->wait = Wait::None;
    yield_to_ready();
  } else {
    block_here(Wait::Block, here);
  }
  return f->result;
}

FRSIM_API void frsim_named_barrier(int id, int threads, bool wait) {
  Fiber* f = self();
  const Site here{nullptr, 0, FRSIM_PC};
  if (id < 0 || id > 15) fail("barrier", here, "barrier.sync names barrier %d; there are 0 to 15", id);
  if (threads <= 0 || threads % 32 || threads > int((f->owner->threads + 31) / 32 * 32))
    fail("barrier", here, "barrier %d counts %d threads; it takes a multiple of 32 up to the block's %u", id, threads, f->owner->threads);
  Named& n = f->owner->named[id];
  // Threads of one phase may still leave while others arrive in the next: with another count the hardware mixes them up.
  if (!n.arrived && n.counted && n.counted != u32(threads))
    fail("divergent-barrier", here, "barrier %d counts %d threads here and counted %u before, with no __syncthreads between the two", id, threads, n.counted);
  if (!n.arrived) n.expected = n.counted = u32(threads);
  if (n.expected != u32(threads)) fail("divergent-barrier", here, "barrier %d is expected by %u threads here and by %d there", id, n.expected, threads);
  release_to(n.known, f);
  ++n.arrived;
  progress();
  if (wait) n.waiting.push_back(f);
  if (n.arrived == n.expected) {
    ++f->worker->barriers;
    n.arrived = 0;
    for (Fiber* other : n.waiting) acquire_from(n.known, other);
    wake(n.waiting);
    if (wait) yield_to_ready();
  } else if (wait) {
    f->wait_op = id;
    block_here(Wait::Named, here);
  }
}

FRSIM_API void frsim_cluster_arrive() {
  Fiber* f = self();
  Cluster& c = *f->owner->cluster;
  const Site here{nullptr, 0, FRSIM_PC};
  if (f->cluster_phase != c.phase) fail("divergent-barrier", here, "barrier.cluster.arrive a second time without barrier.cluster.wait");
  f->cluster_phase = c.phase + 1;
  release_to(c.gather, f);
  progress();
  if (++c.arrived == c.threads) {
    ++f->worker->barriers;
    c.arrived = 0;
    ++c.phase;
    if (c.gather) {
      for (Fiber* other : c.waiting) acquire_from(c.gather, other);
      std::swap(c.known, c.gather);
      delete_knowledge(c.gather);
    }
    wake(c.waiting);
  }
}

FRSIM_API void frsim_cluster_wait() {
  Fiber* f = self();
  Cluster& c = *f->owner->cluster;
  const Site here{nullptr, 0, FRSIM_PC};
  if (f->cluster_phase == 0) fail("divergent-barrier", here, "barrier.cluster.wait before any barrier.cluster.arrive");
  if (f->cluster_phase == c.phase + 1) {   // this phase is still open
    c.waiting.push_back(f);
    block_here(Wait::Cluster, here);
  } else {
    acquire_from(c.known, f);
  }
}

FRSIM_API void frsim_grid_sync() {
  Fiber* f = self();
  Worker& w = *f->worker;
  const Site here{nullptr, 0, FRSIM_PC};
  if (!w.launch->request->cooperative) fail("launch", here, "grid-wide barrier in a launch that is not cooperative");
  progress();
  if (++w.grid_arrived == w.fibers.size()) {
    ++w.barriers;
    w.grid_arrived = 0;
    order_grid(w);
    for (auto& b : w.blocks)
      for (u32 i = 0; i < b.threads; ++i) make_ready(b.order[i]);
    yield_to_ready();
  } else {
    block_here(Wait::Grid, here);
  }
}

FRSIM_API void frsim_spin() { yield_here(); }

FRSIM_API void* frsim_map_shared(const void* smem, unsigned rank) {
  Fiber* f = self();
  const Block& mine = *f->owner;
  const Site here{nullptr, 0, FRSIM_PC};
  const u32 size = f->worker->launch->cluster_blocks;
  if (rank >= size) fail("bounds", here, "map_shared_rank names block %u of a cluster of %u", rank, size);
  const Copy& other = *mine.first_of_cluster[rank].copy;
  const char* p = static_cast<const char*>(smem);
  if (p >= mine.copy->shared && p < mine.copy->shared + mine.copy->shared_bytes) return other.shared + (p - mine.copy->shared);
  if (p >= mine.copy->dynamic && p <= mine.copy->dynamic + f->worker->launch->request->dynamic_shared) return other.dynamic + (p - mine.copy->dynamic);
  fail("bounds", here, "map_shared_rank takes a pointer into this block's shared memory");
}

FRSIM_API unsigned frsim_smem_address(const void* smem) {
  Fiber* f = self();
  const Copy& c = *f->owner->copy;
  const char* p = static_cast<const char*>(smem);
  if (p >= c.dynamic && p <= c.dynamic + f->worker->launch->request->dynamic_shared) return unsigned(dynamic_begin(c) + u64(p - c.dynamic));
  if (p >= c.shared && p < c.shared + c.shared_bytes) return unsigned(fixed_begin(c) + u64(p - c.shared));
  fail("bounds", Site{nullptr, 0, FRSIM_PC}, "a shared-memory address is taken of a pointer that is not into shared memory");
}

FRSIM_API unsigned frsim_cluster_info(int what, unsigned* three) {
  Fiber* f = self();
  const Request& r = *f->worker->launch->request;
  if (what == 2) std::memcpy(three, r.cluster, sizeof r.cluster);
  if (what == 3)
    for (int i = 0; i < 3; ++i) three[i] = f->owner->index[i] / r.cluster[i];
  return what == 0 ? f->owner->rank : f->worker->launch->cluster_blocks;
}

FRSIM_API void frsim_fence(int scope) {
  Fiber* f = self();
  if (f->worker->launch->checker) order_fence(f, scope != kScopeBlock);
}

FRSIM_API long long frsim_clock() { return (long long)(self()->worker->switches * 8 + ++self()->worker->main.restless); }

// The grids before this one have always finished here; checked builds see to it that nobody relies on that unasked.
FRSIM_API void frsim_dependency_wait() {
  Fiber* f = self();
  f->owner->cluster->settled = true;
  ++f->worker->waits;
}
