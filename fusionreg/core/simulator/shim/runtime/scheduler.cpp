// Runs a launch: blocks one after another (all blocks of a cluster or of a cooperative grid together), each as a set of fibers
// that take turns. A fiber runs until it has to wait.
#include <algorithm>
#include <csignal>
#include <pthread.h>
#include <thread>
#include <time.h>
#include <unistd.h>

#include "fiber.h"

__thread fr_sim::Context* frsim_current __attribute__((tls_model("initial-exec"), visibility("default"))) = nullptr;

FRSIM_API fr_sim::Index3 frsim_index(int what) {
  const unsigned* v = (&frsim_current->thread)[what];
  return {v[0], v[1], v[2]};
}
FRSIM_API unsigned frsim_lane() { return frsim_current->lane; }

extern "C" void __asan_poison_memory_region(const volatile void*, size_t) __attribute__((weak));

namespace fr_sim {

namespace {

u64 next_random(u64& state) {   // xorshift64*
  state ^= state >> 12; state ^= state << 25; state ^= state >> 27;
  return state * 0x2545F4914F6CDD1DULL;
}

template <class T> void arrange(std::vector<T>& items, u32 order, u64& random) {
  if (order == 1) std::reverse(items.begin(), items.end());
  if (order == 2)
    for (size_t i = items.size(); i > 1; --i) std::swap(items[i - 1], items[next_random(random) % i]);
}

void switch_to(Fiber* from, Fiber* to) {
  ++from->worker->switches;
  if (__builtin_expect(from->worker->launch->expired, 0)) fail_expired(from->site);
  frsim_current = to;
  frsim_switch(&from->sp, to->sp);
}

void run_others(Fiber* f) {
  Worker& w = *f->worker;
  Fiber* next = w.count ? w.pop() : &w.main;
  if (next != f) switch_to(f, next);
}

void thread_exit(Fiber* f) {
  Warp& warp = *f->team;
  Block& block = *f->owner;
  if (!f->bulk.empty()) fail("async", f->site, "a thread exits before its bulk stores have read shared memory (no wait_group)");
  products_exit(f);
  f->exited = true;
  f->copies.clear();
  --block.live;
  --f->worker->resident_live;
  --warp.live;
  progress();
  if (warp.live && !warp.pending.empty()) warp_lane_left(warp, f);
  if (!block.live) check_block_end(block);
}

[[noreturn]] void fiber_main() {
  for (;;) {   // a fiber is reused by the next block without being rebuilt
    Fiber* f = self();
    f->owner->copy->entry(f->worker->launch->request->args);
    f = self();
    thread_exit(f);
    run_others(f);
  }
}

void set_up_block(Worker& w, u32 slot, u64 linear, u32 rank) {
  const Request& r = *w.launch->request;
  Block& b = w.blocks[slot];
  const u32 threads = b.threads;
  b.linear = u32(linear);
  b.rank = rank;
  b.index[0] = u32(linear % r.grid[0]);
  b.index[1] = u32(linear / r.grid[0] % r.grid[1]);
  b.index[2] = u32(linear / r.grid[0] / r.grid[1]);
  b.live = threads;
  b.arrived = 0;
  b.first_arrival = nullptr;
  forget_products(b);
  for (auto& n : b.named) { n.arrived = 0; n.waiting.clear(); }
  for (u32 t = 0; t < threads; ++t) {
    Fiber& f = b.fibers[t];
    std::memcpy(f.block, b.index, sizeof f.block);
    f.exited = false;
    f.wait = Wait::None;
    f.committed = f.bulk_committed = f.products_committed = 0;
    f.products_fenced = false;
    f.cluster_phase = 0;
  }
  for (auto& warp : b.warps) { warp.live = warp.members; warp.pending.clear(); warp.floor = 0; }
  if (r.order == 2) {
    std::vector<Fiber*> o(b.order, b.order + threads);
    arrange(o, 2, w.random);
    std::copy(o.begin(), o.end(), b.order);
  }
  // Shared memory starts as NaN bytes: what it holds on a device is whatever the last block left there.
  // (AddressSanitizer keeps forbidden zones between variables, and would take a memset for a fault.)
  if (!r.sanitized) std::memset(b.copy->shared, 0xFF, b.copy->shared_bytes);
  if (r.dynamic_shared) std::memset(b.copy->dynamic, 0xFF, r.dynamic_shared);
  check_block_start(b);
}

void set_up_worker(Worker& w, char* stacks, u32 stride) {
  Launch& l = *w.launch;
  const Request& r = *l.request;
  const u32 threads = r.block[0] * r.block[1] * r.block[2], warps = (threads + 31) / 32;
  w.main.worker = &w;
  w.random = 0x9E3779B97F4A7C15ULL ^ (u64(r.seed) << 20) ^ w.index;
  w.blocks.resize(l.resident);
  w.clusters.resize(l.resident / l.cluster_blocks);
  w.fibers.resize(u64(l.resident) * threads);
  w.orders.resize(w.fibers.size());
  u32 capacity = 64;
  while (capacity < w.fibers.size() + 1) capacity *= 2;
  w.ring.resize(capacity);
  w.ring_mask = capacity - 1;
  for (u32 s = 0; s < l.resident; ++s) {
    Block& b = w.blocks[s];
    b.threads = threads;
    b.copy = &r.copies[w.index * l.resident + s];
    if (r.sanitized && __asan_poison_memory_region) __asan_poison_memory_region(b.copy->dynamic + r.dynamic_shared, kDynamic - r.dynamic_shared);
    b.fibers = &w.fibers[u64(s) * threads];
    b.order = &w.orders[u64(s) * threads];
    b.cluster = &w.clusters[s / l.cluster_blocks];
    b.first_of_cluster = &w.blocks[s / l.cluster_blocks * l.cluster_blocks];
    b.warps.resize(warps);
    for (u32 t = 0; t < threads; ++t) {
      Fiber& f = b.fibers[t];
      f.tid = t;
      f.thread[0] = t % r.block[0];
      f.thread[1] = t / r.block[0] % r.block[1];
      f.thread[2] = t / r.block[0] / r.block[1];
      std::memcpy(f.block_dim, r.block, sizeof f.block_dim);
      std::memcpy(f.grid_dim, r.grid, sizeof f.grid_dim);
      f.lane = t % 32;
      f.warp = t / 32;
      f.worker = &w;
      f.owner = &b;
      f.team = &b.warps[t / 32];
      f.team->index = t / 32;
      f.team->lanes[t % 32] = &f;
      f.team->members = std::max(f.team->members, t % 32 + 1);
      f.stack_lo = stacks + (u64(s) * threads + t) * stride;
      f.stack_hi = f.stack_lo + stride;
      prepare(f, fiber_main);
      b.order[r.order == 1 ? threads - 1 - t : t] = &f;
    }
  }
}

void run_group(Worker& w, u64 group) {
  Launch& l = *w.launch;
  const Request& r = *l.request;
  const u32 per = l.cluster_blocks;
  const u64 clusters_here = l.resident / per;
  for (u64 c = 0; c < clusters_here; ++c) {
    // A cluster is a box of blocks; its members are ranked x first.
    const u64 id = group * clusters_here + c;
    const u32 gx = r.grid[0] / r.cluster[0], gy = r.grid[1] / r.cluster[1];
    const u64 cx = id % gx, cy = id / gx % gy, cz = id / gx / gy;
    Cluster& cluster = w.clusters[c];
    cluster.arrived = cluster.phase = 0;
    cluster.settled = false;
    cluster.waiting.clear();
    cluster.threads = cluster.live = per * w.blocks[0].threads;
    for (u32 k = 0; k < per; ++k) {
      const u64 x = cx * r.cluster[0] + k % r.cluster[0], y = cy * r.cluster[1] + k / r.cluster[0] % r.cluster[1],
                z = cz * r.cluster[2] + k / r.cluster[0] / r.cluster[1];
      set_up_block(w, u32(c * per + k), x + r.grid[0] * (y + r.grid[1] * z), k);
    }
  }
  w.landings.clear();
  w.grid_arrived = 0;
  w.head = w.count = 0;
  w.idle_spins = 0;
  w.resident_live = u32(w.fibers.size());
  const bool backwards = r.order == 1;
  for (u32 i = 0; i < l.resident; ++i) {
    Block& b = w.blocks[backwards ? l.resident - 1 - i : i];
    for (u32 t = 0; t < b.threads; ++t) w.push_back(b.order[t]);
  }
  run_others(&w.main);
  if (!l.failed && w.resident_live) report_deadlock(w);
}

void work(Worker& w, char* stacks, u32 stride) {
  Launch& l = *w.launch;
  set_up_worker(w, stacks, stride);
  frsim_current = &w.main;
  if (sigsetjmp(w.on_fault, 1) == 0) {
    while (!l.failed) {
      const u64 i = l.next++;
      if (i >= l.groups) break;
      run_group(w, l.group_order.empty() ? (l.request->order == 1 ? l.groups - 1 - i : i) : l.group_order[i]);
    }
  }
  frsim_current = nullptr;
}

}  // namespace

void make_ready(Fiber* f) {
  f->wait = Wait::None;
  f->worker->push_back(f);
}

void block_here(Wait why, const Site& site) {
  Fiber* f = self();
  f->wait = why;
  f->site = site;
  run_others(f);
}

void yield_to_ready() { run_others(self()); }

void yield_here() {
  Fiber* f = self();
  Worker& w = *f->worker;
  ++w.spins;
  f->restless = 0;
  if (++w.idle_spins > 200000 + 2000 * u64(w.resident_live)) {
    f->wait = Wait::Spin;
    report_deadlock(w);
    run_others(f);
  }
  w.push_back(f);
  f->wait = Wait::Spin;
  run_others(f);
  f->wait = Wait::None;
}

void progress() { self()->worker->idle_spins = 0; }

void reshuffle(Block& b) {   // called at block barriers: another interleaving in every interval
  if (b.fibers->worker->launch->request->order != 2) return;
  for (u32 i = b.threads; i > 1; --i) std::swap(b.order[i - 1], b.order[next_random(b.fibers->worker->random) % i]);
}

}  // namespace fr_sim

using namespace fr_sim;

FRSIM_API int frsim_launch(const Request* request, Result* result) {
  std::memset(result, 0, sizeof *result);
  result->buffer = -1;
  Launch l;
  l.request = request;
  l.result = result;
  const u64 blocks = u64(request->grid[0]) * request->grid[1] * request->grid[2];
  const u32 threads = request->block[0] * request->block[1] * request->block[2];
  l.cluster_blocks = request->cluster[0] * request->cluster[1] * request->cluster[2];
  l.resident = request->cooperative ? u32(blocks) : l.cluster_blocks;
  l.groups = blocks / l.resident;
  if (!l.groups) return 0;
  if (request->order == 2) {
    l.group_order.resize(l.groups);
    for (u64 i = 0; i < l.groups; ++i) l.group_order[i] = u32(i);
    u64 random = 0xD1B54A32D192ED03ULL ^ request->seed;
    arrange(l.group_order, 2, random);
  }
  const u32 workers = request->checked ? 1 : std::max<u32>(1, std::min<u64>(request->workers, l.groups));
  const u64 fibers = u64(l.resident) * threads;
  char* stacks = take_stacks(fibers * workers, request->stack_bytes);
  if (!stacks) {
    result->failed = 1;
    std::snprintf(result->detector, sizeof result->detector, "memory");
    std::snprintf(result->message, sizeof result->message, "no memory for the stacks of %llu threads", (unsigned long long)(fibers * workers));
    return 1;
  }
  if (request->checked) start_checker(l);
  catch_faults(true);
  std::vector<Worker> all(workers);
  for (u32 i = 0; i < workers; ++i) { all[i].launch = &l; all[i].index = i; }
  std::vector<std::thread> threads_of_host;
  auto stack_of = [&](u32 i) { return stacks + i * fibers * request->stack_bytes; };
  // The host thread that runs worker 0 is the caller's own: a hang is broken by a signal sent to it.
  std::atomic<bool> done{false};
  std::thread watchdog;
  if (request->timeout_ms) {
    pthread_t target = pthread_self();
    watchdog = std::thread([&l, &done, target, request] { watch(l, done, target, request->timeout_ms); });
  }
  for (u32 i = 1; i < workers; ++i) threads_of_host.emplace_back([&, i] { catch_faults(true); work(all[i], stack_of(i), request->stack_bytes); catch_faults(false); });
  work(all[0], stack_of(0), request->stack_bytes);
  for (auto& t : threads_of_host) t.join();
  done = true;
  if (watchdog.joinable()) watchdog.join();
  catch_faults(false);
  for (auto& w : all) {
    result->switches += w.switches; result->barriers += w.barriers; result->collectives += w.collectives; result->mma += w.mma;
    forget(w);
    result->async_bytes += w.async_bytes; result->atomics += w.atomics; result->reads += w.reads; result->writes += w.writes; result->spins += w.spins; result->waits += w.waits;
  }
  if (request->checked) finish_checker(l);
  give_stacks(stacks);
  std::fflush(stdout);
  return result->failed;
}
