// Warp collectives. Each lane leaves a pointer to its operands (they lie on its own stack, which outlives the wait) and waits; the
// lane that completes the set computes everybody's result.
#include "runtime.h"

namespace fr_sim {

const char* op_name(int op) {
  static const char* const names[] = {"__syncwarp", "__shfl_sync", "__ballot_sync", "__any_sync", "__all_sync", "__uni_sync", "__match_any_sync",
                                      "__match_all_sync", "__reduce_add_sync", "__reduce_min_sync", "__reduce_max_sync", "__reduce_min_sync",
                                      "__reduce_max_sync", "__reduce_and_sync", "__reduce_or_sync", "__reduce_xor_sync", "mma.sync", "ldmatrix",
                                      "stmatrix", "movmatrix", "elect.sync"};
  return names[op];
}

void run_mma(Warp& warp, void* const* args);
void run_ldmatrix(Warp& warp, void* const* args, const void* pc);
void run_stmatrix(Warp& warp, void* const* args, const void* pc);
void run_movmatrix(void* const* args);

namespace {

bool aligned(int op) { return op == kMma || op == kLdmatrix || op == kStmatrix || op == kMovmatrix || op == kElect; }

template <class F> void each(u32 mask, F f) {
  for (u32 m = mask; m; m &= m - 1) f(u32(__builtin_ctz(m)));
}

void shuffle(Warp& warp, Collective& c) {
  each(c.arrived, [&](u32 lane) {
    auto& a = *static_cast<ShuffleArgs*>(c.args[lane]);
    // PTX ISA, shfl.sync: the segment of `width` lanes bounds the source; outside it a lane keeps its own value.
    const int width = a.width, low = int(lane) & ~(width - 1), high = low + width - 1;
    int source = int(lane);
    bool inside = true;
    switch (a.kind) {
      case kShflIdx: source = low + (a.lane & (width - 1)); break;
      case kShflUp: source = int(lane) - a.lane; inside = source >= low; break;
      case kShflDown: source = int(lane) + a.lane; inside = source <= high; break;
      default: source = int(lane) ^ a.lane; inside = source <= high; break;
    }
    if (!inside) source = int(lane);
    if (c.arrived >> source & 1) {
      a.result = static_cast<ShuffleArgs*>(c.args[source])->value;
    } else {
      a.result = ~u64(0);
      if (warp.lanes[lane]->worker->launch->request->uninitialised)
        fail("warp", c.site, "__shfl_sync: lane %u of warp %u reads lane %d, which takes no part (mask 0x%08x, lanes there 0x%08x)", lane, warp.index,
             source, c.mask, c.arrived);
    }
  });
}

void vote(Collective& c) {
  u32 ballot = 0;
  bool all_equal = true;
  u64 first = 0;
  bool have = false;
  each(c.arrived, [&](u32 lane) {
    auto& a = *static_cast<VoteArgs*>(c.args[lane]);
    if (a.predicate) ballot |= 1u << lane;
    if (!have) { first = a.value; have = true; }
    all_equal = all_equal && a.value == first;
  });
  each(c.arrived, [&](u32 lane) {
    auto& a = *static_cast<VoteArgs*>(c.args[lane]);
    switch (c.op) {
      case kBallot: a.result = ballot; break;
      case kAny: a.result = ballot != 0; break;
      case kAll: a.result = ballot == c.arrived; break;
      case kUni: a.result = ballot == 0 || ballot == c.arrived; break;
      case kElect: a.result = lane == u32(__builtin_ctz(c.arrived)); break;
      case kMatchAll: a.predicate = all_equal; a.result = all_equal ? c.arrived : 0; break;
      default:   // kMatchAny
        a.result = 0;
        each(c.arrived, [&](u32 other) { if (static_cast<VoteArgs*>(c.args[other])->value == a.value) a.result |= 1u << other; });
    }
  });
}

void reduce(Collective& c) {
  bool have = false;
  u32 r = 0;
  each(c.arrived, [&](u32 lane) {
    const u32 v = u32(static_cast<VoteArgs*>(c.args[lane])->value);
    if (!have) { r = v; have = true; return; }
    switch (c.op) {
      case kReduceAdd: r += v; break;
      case kReduceMin: r = u32(std::min(int(r), int(v))); break;
      case kReduceMax: r = u32(std::max(int(r), int(v))); break;
      case kReduceMinU: r = std::min(r, v); break;
      case kReduceMaxU: r = std::max(r, v); break;
      case kReduceAnd: r &= v; break;
      case kReduceOr: r |= v; break;
      default: r ^= v;
    }
  });
  each(c.arrived, [&](u32 lane) { static_cast<VoteArgs*>(c.args[lane])->result = r; });
}

void complete(Warp& warp, Collective& c) {
  ++warp.lanes[__builtin_ctz(c.arrived)]->worker->collectives;
  if (aligned(c.op) && c.arrived != 0xFFFFFFFFu)
    fail("divergent-warp", c.site, "%s needs all 32 lanes of warp %u; only 0x%08x are there", op_name(c.op), warp.index, c.arrived);
  switch (c.op) {
    case kSyncWarp: order_warp(warp, c.arrived); break;
    case kShfl: shuffle(warp, c); break;
    case kMma: run_mma(warp, c.args); break;
    case kLdmatrix: run_ldmatrix(warp, c.args, c.site.pc); break;
    case kStmatrix: run_stmatrix(warp, c.args, c.site.pc); break;
    case kMovmatrix: run_movmatrix(c.args); break;
    case kBallot: case kAny: case kAll: case kUni: case kMatchAny: case kMatchAll: case kElect: vote(c); break;
    default: reduce(c);
  }
}

u32 present(const Warp& warp, u32 mask) {
  u32 m = 0;
  for (u32 i = 0; i < warp.members; ++i)
    if (!warp.lanes[i]->exited) m |= 1u << i;
  return m & mask;
}

bool everybody(const Warp& warp, const Collective& c) {
  return warp.live == 32 ? c.arrived == c.mask : c.arrived == present(warp, c.mask);
}

void wake_others(Warp& warp, u32 arrived, u32 except) {
  // To the front, in lane order: the warp goes on together, which is kind to the cache.
  for (int i = 31; i >= 0; --i)
    if ((arrived >> i & 1) && u32(i) != except) {
      warp.lanes[i]->wait = Wait::None;
      warp.lanes[i]->worker->push_front(warp.lanes[i]);
    }
}

void erase(Warp& warp, Collective* c) {
  *c = warp.pending.back();
  warp.pending.pop_back();
}

}  // namespace

void warp_lane_left(Warp& warp, Fiber* f) {
  for (size_t i = warp.pending.size(); i-- > 0;) {
    Collective& c = warp.pending[i];
    if (!(c.mask >> f->lane & 1) || !everybody(warp, c)) continue;
    complete(warp, c);
    wake_others(warp, c.arrived, 32);
    erase(warp, &c);
  }
}

}  // namespace fr_sim

using namespace fr_sim;

FRSIM_API void frsim_warp(int op, unsigned mask, void* args, const char* file, int line) {
  Fiber* f = self();
  Warp& warp = *f->team;
  const Site here{file, line, FRSIM_PC};
  const u32 bit = 1u << f->lane;
  f->restless = 0;
  if (!(mask & bit)) fail("warp", here, "%s with mask 0x%08x, which lacks the calling lane %u", op_name(op), mask, f->lane);
  Collective* c = nullptr;
  for (auto& p : warp.pending)
    if (p.mask & bit) { c = &p; break; }
  if (!c) {
    warp.pending.emplace_back();
    c = &warp.pending.back();
    c->mask = mask;
    c->op = op;
    c->site = here;
  } else if (c->mask != mask || c->op != op) {
    fail("divergent-warp", here, "lanes of warp %u meet in different collectives: %s (mask 0x%08x, line %d) and %s (mask 0x%08x, line %d)", warp.index,
         op_name(c->op), c->mask, c->site.line, op_name(op), mask, line);
  }
  c->arrived |= bit;
  c->args[f->lane] = args;
  if (everybody(warp, *c)) {
    progress();
    f->site = here;
    complete(warp, *c);
    wake_others(warp, c->arrived, f->lane);
    erase(warp, c);
  } else {
    f->wait_op = op;
    f->wait_mask = mask;
    block_here(Wait::Warp, here);
  }
}

FRSIM_API unsigned frsim_activemask() { return present(*self()->team, 0xFFFFFFFFu); }
