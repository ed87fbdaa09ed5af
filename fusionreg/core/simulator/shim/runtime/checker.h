// Checked builds: what memory there is, what of it was written, and who touched it last.
#pragma once
#include <string>

#include "runtime.h"

namespace fr_sim {

// State of one byte.
enum : u8 { kValid = 1, kInit = 2, kWritable = 4, kInFlight = 8 };

// Last accesses to one byte: stamps (0: none) and the program counters they came from (offsets into the unit's image).
struct Cell { u32 write, write_pc, read1, read1_pc, read2, read2_pc; };

// A stamp is one thread's stretch between two synchronisations; stamps are numbered in the order of execution.
enum : u16 { kPlainStamp, kAtomicStamp, kProxyStamp, kStampKinds };
struct Stamp { u32 block; u16 tid; u16 kind; };

struct Region {
  char* base = nullptr;
  u64 bytes = 0;
  u8* state = nullptr;
  Cell* cells = nullptr;
  int buffer = -1;          // index, or -2 for shared memory
  u32 first_stamp = 0;      // older stamps belong to blocks whose memory this was before
  const Block* block = nullptr;
};

// What a thread knows of other threads of its cluster: everything before these stamps has happened before.
struct Knowledge {
  std::vector<u32> floors;   // by rank: all threads of that block, stamps below
  std::vector<u32> threads;  // by slot: that thread, stamps up to
};

struct SiteCount { u64 instructions = 0, wavefronts = 0, ideal = 0, words[32] = {}; };

struct Checker {
  Launch* launch = nullptr;
  std::vector<Region> globals;
  std::vector<Region> fixed, dynamic;      // per resident block
  std::vector<Stamp> stamps;
  u32 grid_floor = 0;
  std::unordered_map<u64, std::unordered_map<u64, u32>> published;   // by address: what atomics on it carry
  bool races = false, uninitialised = false, banks = false;
  struct Phases { Knowledge* gather = nullptr; Knowledge* known = nullptr; };
  std::unordered_map<u64, Phases> mbarriers;   // by address
  Region* last = nullptr;
  // bank conflicts: addresses of one warp's n-th execution of one access, per resident block
  struct Lane { u64 address; u32 lane, bytes; };
  struct Instruction { u64 site; std::vector<Lane> lanes; };
  struct Log { std::unordered_map<u64, Instruction> open; std::unordered_map<u64, u32> occurrence; };
  std::vector<Log> logs;
  std::map<u64, SiteCount> sites;
};

inline Checker* checker_of(const Fiber* f) { return f->worker->launch->checker; }

Region* find_region(Checker& c, Fiber* f, const char* p, size_t bytes);
void check_race(Checker& c, Region& region, u64 offset, size_t bytes, int kind, Fiber* f, const void* pc);
void count_banks(Checker& c, Fiber* f, u64 offset, size_t bytes, const void* pc);
void close_banks(Checker& c, const Block& block);
[[noreturn]] void fail_at_buffer(const char* detector, const Site& site, int buffer, long long offset, u64 bytes, const Where* other, const char* message);

}  // namespace fr_sim
