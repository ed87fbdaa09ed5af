// Shared-memory bank conflicts: 32 banks of 4 bytes. Lanes of a warp run one after another here, so an instruction is put together
// again as "the n-th time that this access site runs in this warp".
#include "checker.h"

namespace fr_sim {
namespace {

// Wavefronts of one instruction: 8-byte accesses go by half warps, 16-byte ones by quarter warps; equal words are one.
void measure(const std::vector<Checker::Lane>& lanes, SiteCount& count) {
  u32 width = 1;
  for (auto& l : lanes) width = std::max(width, l.bytes);
  const u32 per = width <= 4 ? 32 : width <= 8 ? 16 : 8;
  ++count.instructions;
  for (u32 first = 0; first < 32; first += per) {
    std::vector<u64> words[32];
    size_t distinct = 0, worst = 0;
    for (auto& l : lanes) {
      if (l.lane < first || l.lane >= first + per) continue;
      for (u64 w = l.address / 4; w <= (l.address + l.bytes - 1) / 4; ++w) {
        auto& bank = words[w % 32];
        if (std::find(bank.begin(), bank.end(), w) != bank.end()) continue;
        bank.push_back(w);
        ++distinct;
        worst = std::max(worst, bank.size());
      }
    }
    count.wavefronts += worst;
    count.ideal += (distinct + 31) / 32;
  }
}

u64 mix(u64 a, u64 b) { return (a * 0x9E3779B97F4A7C15ULL) ^ (b + 0x632BE59BD9B4E019ULL + (a << 6) + (a >> 2)); }

}  // namespace

void count_banks(Checker& c, Fiber* f, const Region& r, u64 offset, size_t bytes, const void* pc) {
  const u64 site = reinterpret_cast<u64>(pc) - reinterpret_cast<u64>(f->owner->copy->image);
  const u32 n = c.occurrence[mix(site, f->tid)]++;
  auto& group = c.open[mix(mix(site, f->warp), n)];
  if (group.empty()) group.reserve(33);
  group.push_back({reinterpret_cast<u64>(r.base) + offset, u32(f->lane), u32(bytes)});
  if (group.size() == 32) {
    measure(group, c.sites[site]);
    c.open.erase(mix(mix(site, f->warp), n));
  } else {
    c.open_site[mix(mix(site, f->warp), n)] = site;
  }
}

void close_banks(Checker& c, const Block&) {   // what fewer than 32 lanes executed
  for (auto& o : c.open) measure(o.second, c.sites[c.open_site[o.first]]);
  c.open.clear();
  c.open_site.clear();
  c.occurrence.clear();
}

}  // namespace fr_sim
