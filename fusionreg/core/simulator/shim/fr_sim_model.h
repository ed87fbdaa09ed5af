// The interface between a compiled unit and the simulator's runtime library: everything a unit calls by C linkage.
#pragma once
#include <cstddef>
#include <cstdint>

namespace fr_sim {

// What a kernel sees of its own thread; the runtime's Fiber extends it.
struct Context {
  unsigned thread[3], block[3], block_dim[3], grid_dim[3];
  unsigned lane, warp;
};

constexpr unsigned kDynamic = 232448;   // bytes of dynamic shared memory that a block may ask for, at most

struct Index3 { unsigned x, y, z; };

enum Shuffle : int { kShflIdx, kShflUp, kShflDown, kShflXor };
enum WarpOp : int { kSyncWarp, kShfl, kBallot, kAny, kAll, kUni, kMatchAny, kMatchAll, kReduceAdd, kReduceMin, kReduceMax, kReduceMinU,
                    kReduceMaxU, kReduceAnd, kReduceOr, kReduceXor, kMma, kLdmatrix, kStmatrix, kMovmatrix, kElect };
enum BlockOp : int { kSyncThreads, kSyncCount, kSyncAnd, kSyncOr };
enum AccessKind : int { kRead = 0, kWrite = 1, kAtomic = 2, kVolatile = 4, kEngine = 8, kProxy = 24, kPeek = 32 };
// kEngine: not a lane's own instruction; kProxy: of those, the ones of the async proxy (TMA, wgmma); kPeek: checked, but not kept
enum MmaType : int { kF16, kBF16, kTF32, kE4M3, kE5M2, kS8, kU8 };
enum Scope : int { kScopeBlock, kScopeDevice, kScopeSystem };

struct ShuffleArgs { uint64_t value, result; int kind, lane, width; };
struct VoteArgs { uint64_t value; unsigned result; int predicate; };
struct MmaArgs { const uint32_t* a; const uint32_t* b; const void* c; void* d; int type, k; bool half_accumulator; };
struct WgmmaArgs { float* d; const uint32_t* a; uint64_t a_descriptor, b_descriptor; int type, n; bool scale_d, a_transposed, b_transposed; };
struct MatrixArgs { uint32_t* registers; void* address; int count; bool transposed; };

// The tensor map of the simulator, in place of the 128 opaque bytes that cuTensorMapEncodeTiled makes for a GPU: simulator/tensor_map.py
// packs it, the models of runtime/tensor_map.cpp read it. Little-endian; axes with the contiguous one first.
struct TensorMap {
  uint64_t magic, base;
  uint32_t rank, element_bytes, swizzle, reserved;   // rank 1 to 5; swizzle: 0 none, 1 32 bytes, 2 64 bytes, 3 128 bytes
  uint64_t dims[5], strides[4];                      // in elements; in bytes, of axes 1 to 4
  uint16_t box[5];                                   // elements of a tile along each axis
  uint8_t fill, padding[13];                         // what loads give outside of the tensor: 0 zeros, 1 NaN
};
static_assert(sizeof(TensorMap) == 128, "as large as a CUtensorMap");
constexpr uint64_t kTensorMapMagic = 0x0050414D46524D54;

// What a loaded copy of a unit tells about itself.
struct Parameter { int kind; unsigned bytes, pointee; };   // kind: 0 integer, 1 float, 2 pointer, 3 pointer to const, 4 structure
struct Unit {
  void (*entry)(void**);
  char* shared; uint64_t shared_bytes;
  char* dynamic; uint64_t dynamic_bytes;
  char* image; uint64_t image_bytes;
  const Parameter* parameters; uint64_t n_parameters;
};

}  // namespace fr_sim

extern "C" {
extern __thread fr_sim::Context* frsim_current __attribute__((tls_model("initial-exec")));
// By value and `const`, so that checked builds neither report nor repeat these reads. what: 0 thread, 1 block, 2 block size, 3 grid size
fr_sim::Index3 frsim_index(int what) __attribute__((const));
unsigned frsim_lane() __attribute__((const));

int frsim_sync_block(int op, int predicate, const char* file, int line);
void frsim_warp(int op, unsigned mask, void* args, const char* file, int line);
unsigned frsim_activemask();
void frsim_named_barrier(int id, int threads, bool wait);
void frsim_cluster_arrive();
void frsim_cluster_wait();
void frsim_grid_sync();
void* frsim_map_shared(const void* smem, unsigned rank);
unsigned frsim_smem_address(const void* smem);
void frsim_global(const volatile void* p);
unsigned frsim_cluster_info(int what, unsigned* three);  // 0 rank, 1 size, 2 dims, 3 ctaid
void frsim_spin();
void frsim_fence(int scope);
long long frsim_clock();
void frsim_trap(const char* what, const char* file, int line) __attribute__((noreturn));

void frsim_access(const volatile void* p, size_t bytes, int kind);  // one access that the compiler does not report by itself
void frsim_load(void* registers, const void* memory, size_t bytes);
void frsim_store(void* memory, const void* registers, size_t bytes);
uint64_t frsim_atomic_load(const volatile void* p, int bytes);
void frsim_atomic_store(volatile void* p, uint64_t v, int bytes, bool release);
bool frsim_atomic_cas(volatile void* p, uint64_t* expected, uint64_t desired, int bytes);

void frsim_cp_async(void* smem, const void* global, int bytes, int src_bytes);
void frsim_cp_async_commit();
void frsim_dependency_wait();
void frsim_cp_async_wait(int groups);  // -1: everything, committed or not
void frsim_bulk(void* dst, const void* src, unsigned bytes, void* bar, int kind, unsigned mask);  // kind: 0 g2s, 1 s2cluster, 2 s2g, 3 multicast
void frsim_tensor_prefetch(const void* map);
void frsim_tensor_load(void* smem, const void* map, const int* at, int rank, uint64_t* bar, bool multicast, unsigned mask);
void frsim_tensor_store(const void* smem, const void* map, const int* at, int rank);
void frsim_wgmma(const fr_sim::WgmmaArgs* args);
void frsim_wgmma_fence();
void frsim_wgmma_commit();
void frsim_wgmma_wait(int groups);
void frsim_bulk_commit();
void frsim_bulk_wait(int groups);
void frsim_fence_proxy_async();
void frsim_mbarrier_init(uint64_t* bar, unsigned count);
void frsim_mbarrier_inval(uint64_t* bar);
uint64_t frsim_mbarrier_arrive(uint64_t* bar, unsigned count, unsigned expect_tx);
void frsim_mbarrier_tx(uint64_t* bar, int delta);
bool frsim_mbarrier_try(uint64_t* bar, unsigned parity, bool may_yield);
void frsim_mbarrier_wait(uint64_t* bar, unsigned parity);
void frsim_cp_async_mbarrier(uint64_t* bar, bool noinc);
}
