// Buffers between inaccessible zones: the end of the data lies as close to the second one as its alignment allows. The zones are
// wide (they cost address space alone), so that a wrong index far off still falls beside its own tensor.
#include <sys/mman.h>
#include <unistd.h>

#include "runtime.h"

using namespace fr_sim;

constexpr u8 kCanary = 0xA5;

// residue: the address modulo 16 (the widest access) that the data must have: a misaligned tensor stays exactly as misaligned.
FRSIM_API char* frsim_guarded(u64 bytes, u64 residue, char** mapping, u64* mapped) {
  const u64 page = u64(sysconf(_SC_PAGESIZE)), inner = (bytes + 16 + page - 1) / page * page;
  u64 zone = u64(256) << 20;
  void* base = MAP_FAILED;
  for (; base == MAP_FAILED && zone >= page; zone = zone > page ? page : 0) {
    *mapped = inner + 2 * zone;
    base = mmap(nullptr, *mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base != MAP_FAILED) break;
  }
  if (base == MAP_FAILED) return nullptr;
  char* data = static_cast<char*>(base) + zone;
  if (mprotect(data, inner, PROT_READ | PROT_WRITE)) { munmap(base, *mapped); return nullptr; }
  *mapping = static_cast<char*>(base);
  const u64 last = reinterpret_cast<u64>(data) + inner - bytes;
  const u64 at = last - (last - residue) % 16;
  std::memset(data, kCanary, at - reinterpret_cast<u64>(data));
  char* p = reinterpret_cast<char*>(at);
  std::memset(p + bytes, kCanary, u64(data + inner - (p + bytes)));
  return p;
}

// The distance from the data to a changed canary byte (negative: before it, from bytes on: behind it), or 0 when all are intact.
FRSIM_API long long frsim_canary(const char* data, u64 bytes) {
  const u64 page = u64(sysconf(_SC_PAGESIZE));
  for (const char* p = data + bytes; reinterpret_cast<u64>(p) % page; ++p)
    if (u8(*p) != kCanary) return p - data;
  for (const char* p = data - 1; reinterpret_cast<u64>(p + 1) % page; --p)
    if (u8(*p) != kCanary) return p - data;
  return 0;
}

FRSIM_API void frsim_release(char* mapping, u64 mapped) { munmap(mapping, mapped); }
