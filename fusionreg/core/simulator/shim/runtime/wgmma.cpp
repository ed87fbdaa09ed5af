// wgmma: matrix products of a warpgroup (PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions"). A product is computed when the
// first thread waits for its group and not before, so operands that were overwritten early give wrong results; until a thread has
// waited, its accumulator registers hold NaN.
#include "checker.h"

namespace fr_sim {

// Accumulators of 64 x n in the registers of 128 threads. settled: threads that have them back.
struct Accumulators {
  float* registers[128];
  std::vector<float> values;
  u32 n = 0, group = 0, settled = 0;
  bool has[128] = {};
};

// K-major or MN-major matrix in shared memory, as its descriptor tells it. span: bytes of a swizzled row, 16 where there is none.
struct Operand { u32 start = 0, leading = 0, stride = 0, span = 16; bool transposed = false; };

struct Product {
  std::shared_ptr<Accumulators> to;
  WgmmaArgs args;
  Operand a, b;
  std::vector<u32> fragments;   // A of all threads, where it comes from registers
  u32 group = 0;
  const void* pc = nullptr;
};

// 128 threads whose warps are next to each other, the first a multiple of four.
struct Warpgroup {
  const WgmmaArgs* args[128];
  const WgmmaArgs* first = nullptr;
  u32 arrived = 0;
  std::vector<Fiber*> waiting;
  std::vector<std::shared_ptr<Accumulators>> open;
  std::vector<Product> queue;
  float a[64][32], b[32][256];  // operands of the product that is being computed
  // What reads the operands: no thread, but ordered after what the issuing threads knew, and before what those do that have waited.
  Fiber proxy;
  Warp team;
  Knowledge* known = nullptr;
};

namespace {

constexpr u32 kPoison = ~u32(0);
constexpr u32 kSpans[] = {16, 128, 64, 32};   // by the descriptor's swizzle mode

using Lanes = float __attribute__((vector_size(32)));
using Words = int __attribute__((vector_size(32)));

Lanes load(const float* p) {
  Lanes x;
  std::memcpy(&x, p, sizeof x);
  return x;
}

void store(float* p, const Lanes& x) { std::memcpy(p, &x, sizeof x); }

Warpgroup& group_of(Fiber* f, const char* what, const void* pc) {
  Block& b = *f->owner;
  const u32 index = f->tid / 128;
  if (index * 128 + 128 > b.threads)
    fail("wgmma", Site{nullptr, 0, pc}, "%s in a warpgroup of %u threads: threads %u to %u of a block of %u", what, b.threads - index * 128, index * 128, index * 128 + 127, b.threads);
  if (b.warpgroups.size() <= index) b.warpgroups.resize(index + 1);
  if (auto& g = b.warpgroups[index]; !g) {
    g = std::make_shared<Warpgroup>();
    g->proxy.owner = &b;
    g->proxy.worker = f->worker;
    g->proxy.team = &g->team;
    g->proxy.tid = b.threads + 32 * index;
  }
  return *b.warpgroups[index];
}

Operand decode(u64 descriptor, bool transposed, const char* name, const void* pc) {
  const Site here{nullptr, 0, pc};
  Operand o;
  o.start = u32(descriptor & 0x3FFF) << 4;
  o.leading = u32(descriptor >> 16 & 0x3FFF) << 4;
  o.stride = u32(descriptor >> 32 & 0x3FFF) << 4;
  o.span = kSpans[descriptor >> 62];
  o.transposed = transposed;
  if (descriptor >> 49 & 7) fail("wgmma", here, "the descriptor of %s has a base offset: tiles start where the swizzle pattern does", name);
  if (o.span == 16) return o;
  const u32 period = 8 * o.span;
  if (o.start % period >= o.span)
    fail("wgmma", here, "the descriptor of %s starts at 0x%x, inside of the %u bytes that a %u-byte swizzle repeats after: align the tile to them", name, o.start, period, o.span);
  if (!transposed && o.start % o.span + 32 > o.span)
    fail("wgmma", here, "the descriptor of %s starts at byte %u of a %u-byte row, which ends within the 32 bytes of one step", name, o.start % o.span, o.span);
  return o;
}

// The 16 bytes that hold element (row, k): consecutive k where the matrix is K-major, consecutive rows otherwise. PTX ISA, "Strides";
// the swizzle exchanges address bits 4.. and 7.. of the result. per: elements in 16 bytes.
u32 offset_of(const Operand& o, u32 row, u32 k, u32 per) {
  u32 at;
  if (!o.transposed) {
    at = o.start + row % 8 * o.span + row / 8 * o.stride + k / per * (o.span == 16 ? o.leading : 16);
  } else {
    const u32 piece = row / per, pieces = o.span / 16;
    at = o.start + k % 8 * o.span + (o.span == 16 ? piece * o.stride + k / 8 * o.leading : piece % pieces * 16 + piece / pieces * o.leading + k / 8 * o.stride);
  }
  return at ^ ((at >> 7 & (o.span / 16 - 1)) << 4);
}

const char* chunk(Fiber* f, const Operand& o, u32 row, u32 k, u32 per, const void* pc) {
  const u32 at = offset_of(o, row, k, per);
  const char* p = shared_at(f, at);
  if (!p || !shared_at(f, at + 15)) fail("bounds", Site{nullptr, 0, pc}, "wgmma reads byte 0x%x of the shared window, where this block has no memory", at);
  return p;
}

template <class Visit> void each_chunk(Fiber* f, const Operand& o, u32 rows, u32 depth, u32 per, const void* pc, Visit visit) {
  if (o.transposed) {
    for (u32 k = 0; k < depth; ++k)
      for (u32 row = 0; row < rows; row += per) visit(row, k, chunk(f, o, row, k, per, pc));
  } else {
    for (u32 row = 0; row < rows; ++row)
      for (u32 k = 0; k < depth; k += per) visit(row, k, chunk(f, o, row, k, per, pc));
  }
}

u32 depth_of(int type) { return type <= kBF16 ? 16 : 32; }
u32 per_chunk(int type) { return type <= kBF16 ? 8 : 16; }

template <class Read> void each_operand(Fiber* f, const Product& p, Read read) {
  const u32 depth = depth_of(p.args.type), per = per_chunk(p.args.type);
  if (!p.args.a) each_chunk(f, p.a, 64, depth, per, p.pc, read);
  each_chunk(f, p.b, u32(p.args.n), depth, per, p.pc, read);
}

void note_reads(Fiber* f, Warpgroup& g, const Product& p) {
  Checker* c = checker_of(f);
  if (!c || !c->races) return;
  each_operand(f, p, [&](u32, u32, const char* at) {
    if (Region* r = find_region(*c, f, at, 16)) check_race(*c, *r, u64(at - r->base), 16, kRead | kEngine, &g.proxy, p.pc);
  });
}

void convert(int type, const char* from, float* to) {
  const u32 n = per_chunk(type);
  u32 words[4];
  std::memcpy(words, from, 16);
  for (u32 i = 0; i < n; ++i) to[i] = n == 8 ? element(type, words[i / 2], int(i % 2)) : element(type, words[i / 4], int(i % 4));
}

// c[n] += sum over k of a[k] * b[k][n] as fp8 products are summed on Hopper: all terms are aligned to the largest exponent, and 14 bits
// of each are kept (DeepSeek-V3 technical report, section 3.5.2); the sum goes back with as many. Terms that are NaN or infinite
// are summed as floats.
void add_narrow(float* c, const float* a, const float* b, u32 stride, u32 n) {
  for (u32 j = 0; j < n; j += 8) {
    Lanes terms[33], plain = {};
    Words largest = {};
    for (u32 k = 0; k < 33; ++k) {
      terms[k] = k < 32 ? a[k] * load(b + k * stride + j) : load(c + j);
      plain += terms[k];
      const Words size = Words(terms[k]) & 0x7FFFFFFF, more = size > largest;   // floats in the order of their bits
      largest = (size & more) | (largest & ~more);
    }
    const Words exponent = largest >> 23, normal = exponent > 14, lowest = ((exponent - 13) & normal) | (1 & ~normal);   // of the last bit that is kept
    const Lanes unit = Lanes(lowest << 23), inverse = Lanes((254 - lowest) << 23);
    Words sum = {};
    for (const Lanes& x : terms) sum += __builtin_convertvector(x * inverse, Words);
    const Lanes total = Lanes(Words(__builtin_convertvector(sum, Lanes) * unit) & ~0x3FF);   // 13 bits of fraction
    const Words finite = plain - plain == 0;
    store(c + j, Lanes((Words(total) & finite) | (Words(plain) & ~finite)));
  }
}

void compute(Fiber* f, Warpgroup& g, Product& p) {
  const int type = p.args.type;
  const u32 n = u32(p.args.n), depth = depth_of(type), per = per_chunk(type);
  auto& a = g.a;
  auto& b = g.b;
  if (p.fragments.empty()) {
    each_chunk(f, p.a, 64, depth, per, p.pc, [&](u32 row, u32 k, const char* at) {
      float values[16];
      convert(type, at, values);
      for (u32 i = 0; i < per; ++i) p.a.transposed ? a[row + i][k] = values[i] : a[row][k + i] = values[i];
    });
  } else {
    const u32 words = per / 4;   // elements in one register
    for (u32 t = 0; t < 128; ++t)
      for (u32 r = 0; r < 4; ++r)
        for (u32 i = 0; i < words; ++i)
          a[t / 32 * 16 + t % 32 / 4 + r % 2 * 8][t % 4 * words + r / 2 * 4 * words + i] = element(type, p.fragments[4 * t + r], int(i));
  }
  each_chunk(f, p.b, n, depth, per, p.pc, [&](u32 row, u32 k, const char* at) {
    float values[16];
    convert(type, at, values);
    for (u32 i = 0; i < per; ++i) p.b.transposed ? b[k][row + i] = values[i] : b[k + i][row] = values[i];
  });
  float* c = p.to->values.data();
  if (!p.args.scale_d) std::fill_n(c, 64 * n, 0.0f);
  for (u32 row = 0; row < 64; ++row, c += n) {
    if (type > kBF16) { add_narrow(c, a[row], b[0], 256, n); continue; }
    for (u32 k = 0; k < depth; ++k) {
      const float x = a[row][k];
      for (u32 j = 0; j < n; j += 8) store(c + j, load(c + j) + x * load(b[k] + j));
    }
  }
}

// Value i of thread t: PTX ISA, "Register Fragments for wgmma.mma_async.m64nN", matrix D.
u32 place(u32 t, u32 i, u32 n) { return (t / 32 * 16 + t % 32 / 4 + i / 2 % 2 * 8) * n + i / 4 * 8 + t % 4 * 2 + i % 2; }

void check_poison(const Accumulators& x, u32 t, const void* pc) {
  for (u32 i = 0; i < x.n / 2; ++i) {
    u32 bits;
    std::memcpy(&bits, x.registers[t] + i, 4);
    if (bits != kPoison) fail("wgmma", Site{nullptr, 0, pc}, "accumulator register %u was written while wgmma.mma_async was still to write it", i);
  }
}

std::shared_ptr<Accumulators> accumulators(Warpgroup& g, const void* pc) {
  const WgmmaArgs& first = *g.args[0];
  for (auto& x : g.open)
    if (x->registers[0] == first.d) {
      if (x->settled) fail("wgmma", Site{nullptr, 0, pc}, "only %u of 128 threads have waited for these accumulators since they were last used", x->settled);
      if (x->n != u32(first.n)) fail("wgmma", Site{nullptr, 0, pc}, "accumulators of 64 x %u are in flight, and used as 64 x %d", x->n, first.n);
      for (u32 t = 0; t < 128; ++t) {
        if (g.args[t]->d != x->registers[t]) fail("wgmma", Site{nullptr, 0, pc}, "thread %u of a warpgroup goes on with other accumulators than thread 0", t);
        check_poison(*x, t, pc);
      }
      return x;
    }
  auto x = std::make_shared<Accumulators>();
  x->n = u32(first.n);
  x->values.resize(64 * x->n);
  for (u32 t = 0; t < 128; ++t) {
    x->registers[t] = g.args[t]->d;
    for (u32 i = 0; i < x->n / 2; ++i) x->values[place(t, i, x->n)] = x->registers[t][i];
    std::memset(x->registers[t], 0xFF, 2 * x->n);
  }
  g.open.push_back(x);
  return x;
}

void issue(Fiber* f, Warpgroup& g, const void* pc) {
  Product p;
  p.args = *g.args[0];
  p.pc = pc;
  p.group = f->products_committed;
  p.to = accumulators(g, pc);
  p.to->group = p.group;
  if (p.args.a) {
    p.fragments.resize(512);
    for (u32 t = 0; t < 128; ++t) std::memcpy(&p.fragments[4 * t], g.args[t]->a, 16);
  } else {
    p.a = decode(p.args.a_descriptor, p.args.a_transposed, "A", pc);
  }
  p.b = decode(p.args.b_descriptor, p.args.b_transposed, "B", pc);
  ++f->worker->mma;
  if (Checker* c = checker_of(f)) {
    Fiber* const lanes = &f->owner->fibers[f->tid / 128 * 128];
    Context* const caller = frsim_current;
    for (u32 t = 0; t < 128; t += 32) {   // each warp has to be sure of the operands
      frsim_current = &lanes[t];
      each_operand(&lanes[t], p, [&](u32, u32, const char* at) { note_access(at, 16, kRead | kProxy | kPeek, pc); });
    }
    frsim_current = caller;
    if (c->races) {
      Knowledge* gather = nullptr;
      for (u32 t = 0; t < 128; ++t) release_to(gather, &lanes[t]);
      acquire_from(gather, &g.proxy);
      delete_knowledge(gather);
    }
  }
  g.queue.push_back(std::move(p));
}

bool same(const WgmmaArgs& x, const WgmmaArgs& y) {
  return x.type == y.type && x.n == y.n && !x.a == !y.a && x.a_descriptor == y.a_descriptor && x.b_descriptor == y.b_descriptor &&
         x.scale_d == y.scale_d && x.a_transposed == y.a_transposed && x.b_transposed == y.b_transposed;
}

}  // namespace

void products_exit(Fiber* f) {
  if (f->owner->warpgroups.size() <= f->tid / 128 || !f->owner->warpgroups[f->tid / 128]) return;
  Warpgroup& g = *f->owner->warpgroups[f->tid / 128];
  for (auto& x : g.open)
    if (!x->has[f->tid % 128]) fail("wgmma", f->site, "a thread exits before it has waited for its wgmma.mma_async (no wait_group)");
}

void forget_products(Block& b) {
  for (auto& g : b.warpgroups)
    if (g) { delete_knowledge(g->known); delete_knowledge(g->proxy.extra); }
  b.warpgroups.clear();
}

}  // namespace fr_sim

using namespace fr_sim;

FRSIM_API void frsim_wgmma(const WgmmaArgs* args) {
  Fiber* f = self();
  const Site here{nullptr, 0, FRSIM_PC};
  Warpgroup& g = group_of(f, "wgmma.mma_async", FRSIM_PC);
  if (!f->products_fenced) fail("wgmma", here, "wgmma.mma_async without wgmma.fence since this thread last used the registers (its start, or its last wait_group)");
  f->restless = 0;
  const u32 t = f->tid % 128;
  if (!g.arrived) g.first = args;
  if (!same(*g.first, *args)) fail("wgmma", here, "threads of one warpgroup issue different wgmma.mma_async: shape, descriptors or scale are not the same");
  g.args[t] = args;
  if (!g.waiting.empty() && g.waiting[0]->products_committed != f->products_committed)
    fail("wgmma", here, "threads of one warpgroup have committed different numbers of wgmma groups: %u and %u", g.waiting[0]->products_committed, f->products_committed);
  if (++g.arrived < 128) {
    g.waiting.push_back(f);
    block_here(Wait::Warpgroup, here);
    return;
  }
  progress();
  f->site = here;
  issue(f, g, FRSIM_PC);
  g.arrived = 0;
  for (Fiber* other : g.waiting) make_ready(other);
  g.waiting.clear();
}

FRSIM_API void frsim_wgmma_fence() {
  Fiber* f = self();
  group_of(f, "wgmma.fence", FRSIM_PC);
  f->products_fenced = true;
}

FRSIM_API void frsim_wgmma_commit() {
  Fiber* f = self();
  group_of(f, "wgmma.commit_group", FRSIM_PC);
  ++f->products_committed;
}

FRSIM_API void frsim_wgmma_wait(int groups) {
  Fiber* f = self();
  Warpgroup& g = group_of(f, "wgmma.wait_group", FRSIM_PC);
  if (!g.queue.empty() && g.queue.back().group == f->products_committed)
    fail("wgmma", Site{nullptr, 0, FRSIM_PC}, "wgmma.wait_group does not wait for the last wgmma.mma_async: no wgmma.commit_group came after it");
  if (f->products_committed <= u32(groups)) return;
  const u32 before = f->products_committed - u32(groups);
  size_t done = 0;
  for (; done < g.queue.size() && g.queue[done].group < before; ++done) {
    note_reads(f, g, g.queue[done]);
    compute(f, g, g.queue[done]);
  }
  if (done) {
    g.queue.erase(g.queue.begin(), g.queue.begin() + long(done));
    release_reads(g.known, &g.proxy);
  }
  acquire_from(g.known, f);
  const u32 t = f->tid % 128;
  for (size_t i = g.open.size(); i-- > 0;) {
    Accumulators& x = *g.open[i];
    if (x.has[t] || x.group >= before) continue;
    check_poison(x, t, FRSIM_PC);
    for (u32 k = 0; k < x.n / 2; ++k) x.registers[t][k] = x.values[place(t, k, x.n)];
    x.has[t] = true;
    f->products_fenced = false;
    if (++x.settled == 128) g.open.erase(g.open.begin() + long(i));
  }
}
