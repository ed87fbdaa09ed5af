// The basics of cooperative groups: block, tiles of a warp, cluster, grid. CUDA's own header needs its compiler.
#pragma once

namespace cooperative_groups {

class thread_block {
 public:
  static void sync(FRSIM_HERE) { __syncthreads(file, line); }
  static unsigned thread_rank() {
    const uint3 t = threadIdx;
    const dim3 n = blockDim;
    return t.x + n.x * (t.y + n.y * t.z);
  }
  static unsigned num_threads() { return blockDim.x * blockDim.y * blockDim.z; }
  static unsigned size() { return num_threads(); }
  static dim3 group_index() { const uint3 b = blockIdx; return dim3(b.x, b.y, b.z); }
  static dim3 thread_index() { const uint3 t = threadIdx; return dim3(t.x, t.y, t.z); }
  static dim3 group_dim() { return blockDim; }
  static dim3 dim_threads() { return blockDim; }
};
inline thread_block this_thread_block() { return {}; }

template <unsigned Size, class Parent = thread_block> class thread_block_tile {
  static_assert(Size >= 1 && Size <= 32 && (Size & (Size - 1)) == 0, "a tile here is a power of two of at most 32 threads");
  static unsigned mask() { return Size == 32 ? ~0u : ((1u << (Size % 32)) - 1) << (thread_block::thread_rank() % 32 / Size * Size); }

 public:
  static unsigned thread_rank() { return thread_block::thread_rank() % Size; }
  static constexpr unsigned num_threads() { return Size; }
  static constexpr unsigned size() { return Size; }
  static unsigned meta_group_rank() { return thread_block::thread_rank() / Size; }
  static unsigned meta_group_size() { return (thread_block::num_threads() + Size - 1) / Size; }
  static void sync(FRSIM_HERE) { __syncwarp(mask(), file, line); }
  template <class T> static T shfl(T v, int lane) { return __shfl_sync(mask(), v, lane, Size); }
  template <class T> static T shfl_up(T v, unsigned delta) { return __shfl_up_sync(mask(), v, delta, Size); }
  template <class T> static T shfl_down(T v, unsigned delta) { return __shfl_down_sync(mask(), v, delta, Size); }
  template <class T> static T shfl_xor(T v, unsigned lanes) { return __shfl_xor_sync(mask(), v, int(lanes), Size); }
  static int any(int p) { return __any_sync(mask(), p); }
  static int all(int p) { return __all_sync(mask(), p); }
  static unsigned ballot(int p) { return __ballot_sync(mask(), p) >> (thread_block::thread_rank() % 32 / Size * Size); }
};
template <unsigned Size, class Parent> inline thread_block_tile<Size, Parent> tiled_partition(const Parent&) { return {}; }

class grid_group {
 public:
  static void sync() { fr_sim::grid_sync(); }
  static bool is_valid() { return true; }
  static unsigned long long block_rank() { return blockIdx.x + (unsigned long long)gridDim.x * (blockIdx.y + (unsigned long long)gridDim.y * blockIdx.z); }
  static unsigned long long num_blocks() { return (unsigned long long)gridDim.x * gridDim.y * gridDim.z; }
  static unsigned long long thread_rank() { return block_rank() * thread_block::num_threads() + thread_block::thread_rank(); }
  static unsigned long long num_threads() { return num_blocks() * thread_block::num_threads(); }
  static unsigned long long size() { return num_threads(); }
  static dim3 dim_blocks() { return gridDim; }
};
inline grid_group this_grid() { return {}; }

class cluster_group {
 public:
  struct arrival_token {};
  static void sync() { fr_sim::cluster_sync(); }
  static arrival_token barrier_arrive() { fr_sim::cluster_arrive(); return {}; }
  static void barrier_wait() { fr_sim::cluster_wait(); }
  static void barrier_wait(arrival_token&&) { fr_sim::cluster_wait(); }
  static unsigned block_rank() { return fr_sim::cluster_rank(); }
  static unsigned num_blocks() { return fr_sim::cluster_size(); }
  static unsigned thread_rank() { return block_rank() * thread_block::num_threads() + thread_block::thread_rank(); }
  static unsigned num_threads() { return num_blocks() * thread_block::num_threads(); }
  static dim3 block_index() { unsigned d[3], b[3] = {blockIdx.x, blockIdx.y, blockIdx.z}; fr_sim::cluster_dims(d); return dim3(b[0] % d[0], b[1] % d[1], b[2] % d[2]); }
  static dim3 dim_blocks() { unsigned d[3]; fr_sim::cluster_dims(d); return dim3(d[0], d[1], d[2]); }
  template <class T> static T* map_shared_rank(T* p, int rank) { return fr_sim::map_shared_rank(p, unsigned(rank)); }
};
inline cluster_group this_cluster() { return {}; }

template <class Group> inline void sync(const Group& group) { group.sync(); }

}  // namespace cooperative_groups
