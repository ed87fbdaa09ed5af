// The runtime's own data: a launch, its workers (host threads), their resident blocks, warps and fibers.
#pragma once
#include <algorithm>
#include <atomic>
#include <csetjmp>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "../fr_sim_model.h"

#define FRSIM_API extern "C" __attribute__((visibility("default")))
#define FRSIM_PC __builtin_return_address(0)

namespace fr_sim {
using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;

struct Block;
struct Worker;
struct Launch;
struct Knowledge;

// ---- what the Python driver hands over and gets back: mirrored field by field in abi.py -------------------------------
struct Buffer {
  char* base;
  u64 bytes;
  const u8* mask;      // one byte per byte: addressable or not; null: all are
  int writable;        // the kernel's parameter is a pointer to non-const
  int initialised;     // its content counts as written
  u64 unwritten;       // out: addressable bytes never written, and the first of them
  u64 first_unwritten;
};

struct Copy {          // one loaded copy of the unit: blocks that are resident together each run their own
  void (*entry)(void**);
  char* shared;
  u64 shared_bytes;
  const u8* shared_mask;   // one byte per byte of it: part of a variable or not
  char* dynamic;
  char* image;
  u64 image_bytes;
};

// One access site, added up over all warps; words: what each bank gave or took.
struct BankSite { u64 pc, instructions, wavefronts, ideal, words[32]; };

struct Request {
  const Copy* copies;
  void** args;
  Buffer* buffers;
  u32 n_copies, n_buffers, workers;
  u32 grid[3], block[3], cluster[3];
  u32 dynamic_shared, stack_bytes;
  u32 order;           // 0 forward, 1 reverse, 2 random
  u32 seed;
  u32 checked, races, uninitialised, banks, cooperative, programmatic;
  u32 timeout_ms;
  u32 sanitized;       // AddressSanitizer watches this process
  BankSite* sites;     // room for n_sites of them, where banks are counted
  u32 n_sites;
};

struct Where { u32 thread[3], block[3]; u64 pc; int line; char file[160]; };

struct Result {
  int failed;
  char detector[32];
  char message[1024];
  int buffer;          // index of the buffer concerned, -1 none, -2 dynamic, -3 static shared memory
  long long offset;
  u64 bytes, copy_image;   // copy_image: where the unit that pc belongs to was loaded
  Where at, other;
  int has_at, has_other;
  u64 switches, barriers, collectives, mma, async_bytes, atomics, reads, writes, spins, waits;
  u32 n_banks;         // sites found
};

// ---- execution --------------------------------------------------------------------------------------------------------
struct Site { const char* file = nullptr; int line = 0; const void* pc = nullptr; };
enum class Wait : u8 { None, Block, Warp, Warpgroup, Named, Cluster, Grid, Spin };

// tile: of copies through a tensor map
struct Tile;
struct AsyncCopy { char* dst; const char* src; u32 bytes, src_bytes, group; const void* pc; std::shared_ptr<Tile> tile; };
struct Landing { char* dst; const char* src; u32 bytes; std::shared_ptr<Tile> tile; };   // a bulk load that its mbarrier has yet to see

struct Warp;
struct Fiber : Context {
  void* sp = nullptr;
  char* stack_lo = nullptr;
  char* stack_hi = nullptr;
  Block* owner = nullptr;
  Warp* team = nullptr;
  Worker* worker = nullptr;
  u32 tid = 0;
  bool exited = false;
  Wait wait = Wait::None;
  Site site;
  u32 wait_mask = 0;
  int wait_op = 0, result = 0;
  u32 restless = 0;                   // atomics since this fiber last let others run
  u32 cluster_phase = 0;
  // asynchronous copies in flight; group numbers count commits
  std::vector<AsyncCopy> copies, bulk;
  u32 committed = 0, bulk_committed = 0;
  u32 products_committed = 0;         // groups of wgmma
  bool products_fenced = false;       // wgmma.fence since this thread last used the registers
  // happens-before (checked builds)
  u32 stamp = 0, fence_floor = 0, fence_stamp = 0, proxy_stamp = 0, proxy_time = 0;
  bool stamp_closed = true, fenced = false, fenced_device = false, dirty = false;
  Knowledge* extra = nullptr;
  std::unordered_map<u64, u32>* acquired = nullptr;
};

struct Collective { u32 mask = 0, arrived = 0; int op = 0; Site site; void* args[32]; };

struct Warp {
  Fiber* lanes[32];
  u32 members = 0, live = 0, index = 0;
  u32 floor = 0;
  std::vector<Collective> pending;
};

// expected: of the phase that is open; counted: of the last one, until all threads of the block meet
struct Named { u32 arrived = 0, expected = 0, counted = 0; Knowledge* known = nullptr; std::vector<Fiber*> waiting; };
struct Cluster {
  u32 arrived = 0, phase = 0, threads = 0, live = 0;
  bool settled = false;               // one of its threads has waited for the grids before this one
  Knowledge* gather = nullptr;
  Knowledge* known = nullptr;
  std::vector<Fiber*> waiting;
};

struct Warpgroup;
struct Block {
  u32 linear = 0, rank = 0, index[3] = {0, 0, 0}, threads = 0, live = 0;
  const Copy* copy = nullptr;
  Cluster* cluster = nullptr;
  Block* first_of_cluster = nullptr;
  Fiber** order = nullptr;
  Fiber* fibers = nullptr;
  std::vector<Warp> warps;
  std::vector<std::shared_ptr<Warpgroup>> warpgroups;   // those that have used wgmma
  u32 arrived = 0;
  int op = 0, reduced = 0;
  Site site;
  Fiber* first_arrival = nullptr;
  Named named[16];
  // happens-before
  u32 floor = 0, first_stamp = 0, fenced_floor = 0;
  bool any_extra = false, any_fence = false;
  Knowledge* known = nullptr;
  std::unordered_map<u64, u32> acquired;
};

struct Worker {
  Launch* launch = nullptr;
  u32 index = 0;
  Fiber main;
  std::vector<Fiber*> ring;
  u32 head = 0, count = 0, ring_mask = 0;
  std::vector<Block> blocks;
  std::vector<Cluster> clusters;
  std::vector<Fiber> fibers;
  std::vector<Fiber*> orders;
  u32 grid_arrived = 0, resident_live = 0;
  std::unordered_map<u64, std::vector<Landing>> landings;      // by mbarrier address
  u64 idle_spins = 0, random = 0;
  u64 switches = 0, barriers = 0, collectives = 0, mma = 0, async_bytes = 0, atomics = 0, reads = 0, writes = 0, spins = 0, waits = 0;
  sigjmp_buf on_fault;
  void push_back(Fiber* f) { ring[(head + count++) & ring_mask] = f; }
  void push_front(Fiber* f) { head = (head - 1) & ring_mask; ring[head] = f; ++count; }
  Fiber* pop() { Fiber* f = ring[head]; head = (head + 1) & ring_mask; --count; return f; }
};

struct Checker;
struct Launch {
  const Request* request = nullptr;
  Result* result = nullptr;
  std::atomic<u64> next{0};
  std::atomic<bool> failed{false}, expired{false};
  std::mutex mutex;
  u64 groups = 0;              // clusters, blocks, or one for a cooperative grid
  u32 cluster_blocks = 1, resident = 1;
  std::vector<u32> group_order;
  Checker* checker = nullptr;  // checked builds only
};

inline Fiber* self() { return static_cast<Fiber*>(frsim_current); }

// scheduler.cpp
void block_here(Wait why, const Site& site);    // gives the processor away until somebody makes this fiber ready
void yield_here();                              // to the back of the queue, as a spin loop does
void yield_to_ready();                          // to whoever is first in the queue, which holds the caller too
void make_ready(Fiber* f);
void progress();
void reshuffle(Block& block);                   // another interleaving for the next interval
// warp.cpp
const char* op_name(int op);
void warp_lane_left(Warp& warp, Fiber* f);      // a lane has exited: collectives that waited for it may complete
// report.cpp
void report_deadlock(Worker& worker);
[[noreturn]] void fail(const char* detector, const Site& site, const char* format, ...) __attribute__((format(printf, 3, 4)));
[[noreturn]] void fail_expired(const Site& site);
void describe(Where& where, const Fiber* f, const Site& site);
// fault.cpp
void catch_faults(bool on);
void watch(Launch& launch, std::atomic<bool>& done, unsigned long host_thread, u32 timeout_ms);
// async.cpp
void shared_only(const void* p, u64 bytes, u64 alignment, const char* what, const void* pc);   // else a fault
void global_only(const void* p, const char* what, const void* pc);                             // else a fault
void begin_landing(char* dst, u32 bytes, u64* bar, const std::shared_ptr<Tile>& tile, const void* pc);
// tensor_map.cpp
void land_tile(const Tile& tile, char* dst);
void store_tile(const Tile& tile, const char* src, const void* pc);
// wgmma.cpp
void products_exit(Fiber* f);                                 // a thread has exited: nothing of it may be in flight
void forget_products(Block& block);
// barriers.cpp
const char* shared_at(const Fiber* f, u32 address);           // of an address in the shared window; null outside
// memory.cpp, race.cpp
void note_access(const volatile void* p, size_t bytes, int kind, const void* pc);
void set_in_flight(const char* p, size_t bytes, bool on);     // destination of an asynchronous copy
void check_block_start(Block& block);
void check_block_end(Block& block);
void start_checker(Launch& launch);
void finish_checker(Launch& launch);
// race.cpp: what synchronisation orders
void order_block(Block& block);                              // all threads of the block have met
void order_warp(Warp& warp, u32 mask);                       // these lanes have met in __syncwarp
void release_to(Knowledge*& known, Fiber* f);                // f publishes what it knows
void acquire_from(Knowledge* known, Fiber* f);
void delete_knowledge(Knowledge*& known);
void forget(Worker& worker);                                 // frees what its threads know
void order_grid(Worker& worker);
void release_acquire_address(const volatile void* p, Fiber* f, bool release, bool acquire);
void order_fence(Fiber* f, bool device);
void order_proxy(Fiber* f);                                  // fence.proxy.async
void release_reads(Knowledge*& known, Fiber* proxy);         // what it has accessed, and nothing of what it knows

extern "C" void frsim_switch(void** save, void* load);
}  // namespace fr_sim
