// Shared-memory bank conflicts: 32 banks of 4 bytes. Lanes of a warp run one after another here, so an instruction is put together
// again as "the n-th time that this access site runs in this warp".
#include "checker.h"

namespace fr_sim {
namespace {

constexpr u32 kWidest = 16;   // bytes that one lane moves in one instruction, at most

// Wavefronts of one instruction. Accesses of up to 4 bytes are served for the whole warp together, of 8 by half warps, of 16 by quarter
// warps (so too each 8x8 matrix of ldmatrix and stmatrix, whose rows are the addresses of 8 lanes). Within such a phase a bank serves
// one word a pass, to all lanes that ask for it.
void measure(const std::vector<Checker::Lane>& lanes, SiteCount& count) {
  u32 width = 1;
  for (auto& l : lanes) width = std::max(width, l.bytes);
  const u32 per = width <= 4 ? 32 : width <= 8 ? 16 : 8;
  ++count.instructions;
  for (u32 first = 0; first < 32; first += per) {
    u64 words[32 * (kWidest / 4 + 1)];
    u32 distinct = 0, worst = 0, busy[32] = {};
    for (auto& l : lanes) {
      if (l.lane < first || l.lane >= first + per) continue;
      for (u64 w = l.address / 4; w <= (l.address + l.bytes - 1) / 4; ++w) {
        if (std::find(words, words + distinct, w) != words + distinct) continue;
        words[distinct++] = w;
        worst = std::max(worst, ++busy[w % 32]);
        ++count.words[w % 32];
      }
    }
    count.wavefronts += worst;
    count.ideal += (distinct + 31) / 32;
  }
}

u64 mix(u64 a, u64 b) { return (a * 0x9E3779B97F4A7C15ULL) ^ (b + 0x632BE59BD9B4E019ULL + (a << 6) + (a >> 2)); }

void count_piece(Checker& c, Fiber* f, u64 site, u32 piece, u64 address, u32 bytes) {
  auto& log = c.logs[size_t(f->owner - f->worker->blocks.data())];
  const u64 part = mix(site, piece);
  const u32 n = log.occurrence[mix(part, f->tid)]++;
  const u64 key = mix(mix(part, f->tid / 32), n);
  auto& open = log.open[key];
  open.site = site;
  open.lanes.push_back({address, u32(f->lane), bytes});
  if (open.lanes.size() < 32) return;
  measure(open.lanes, c.sites[site]);
  log.open.erase(key);
}

}  // namespace

void count_banks(Checker& c, Fiber* f, u64 offset, size_t bytes, const void* pc) {
  const u64 site = reinterpret_cast<u64>(pc) - reinterpret_cast<u64>(f->owner->copy->image);
  for (size_t done = 0; done < bytes; done += kWidest)   // a larger structure is moved 16 bytes at a time
    count_piece(c, f, site, u32(done / kWidest), offset + done, u32(std::min<size_t>(kWidest, bytes - done)));
}

void close_banks(Checker& c, const Block& b) {   // what fewer than 32 lanes executed
  auto& log = c.logs[size_t(&b - b.fibers->worker->blocks.data())];
  for (auto& o : log.open) measure(o.second.lanes, c.sites[o.second.site]);
  log.open.clear();
  log.occurrence.clear();
}

}  // namespace fr_sim
