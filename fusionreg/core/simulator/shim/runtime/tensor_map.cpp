// Tile copies through a tensor map (PTX ISA, "cp.async.bulk.tensor", tiled mode). What the hardware may move late is moved as late as it
// may be: a load when somebody waits for its mbarrier, a store when its thread waits for the group.
#include "checker.h"

namespace fr_sim {

namespace {

struct Piece { u64 memory; u32 shared, bytes; bool inside; };   // of one row: offsets into the tensor and into the box

u32 box_bytes(const TensorMap& m) {
  u32 n = m.element_bytes;
  for (u32 i = 0; i < m.rank; ++i) n *= m.box[i];
  return n;
}

TensorMap read_map(const void* map, int rank, const void* pc) {
  const Site here{nullptr, 0, pc};
  TensorMap m;
  if (reinterpret_cast<u64>(map) % 64) fail("tensor-map", here, "a tensor map at address %p, which is not a multiple of 64", map);
  std::memcpy(&m, map, sizeof m);
  if (m.magic != kTensorMapMagic) fail("tensor-map", here, "what is used as a tensor map is none: it was not encoded for the simulator");
  if (rank && m.rank != u32(rank)) fail("tensor-map", here, "%d coordinates for a tensor map of rank %u", rank, m.rank);
  if (m.rank < 1 || m.rank > 5) fail("tensor-map", here, "a tensor map of rank %u", m.rank);
  if (m.element_bytes != 1 && m.element_bytes != 2 && m.element_bytes != 4 && m.element_bytes != 8) fail("tensor-map", here, "a tensor map of elements of %u bytes", m.element_bytes);
  if (m.base % 16) fail("tensor-map", here, "a tensor map's global address 0x%llx is not a multiple of 16", (unsigned long long)m.base);
  if (m.swizzle > 3) fail("tensor-map", here, "a tensor map of swizzle mode %u", m.swizzle);
  for (u32 i = 0; i < m.rank; ++i) {
    if (!m.dims[i] || m.dims[i] > u64(1) << 32) fail("tensor-map", here, "extent %llu of a tensor map's axis %u", (unsigned long long)m.dims[i], i);
    if (!m.box[i] || m.box[i] > 256) fail("tensor-map", here, "a box of %u elements along axis %u; 1 to 256 are possible", m.box[i], i);
    if (i && (m.strides[i - 1] % 16 || m.strides[i - 1] >= u64(1) << 40))
      fail("tensor-map", here, "stride %llu of a tensor map's axis %u; it takes multiples of 16 bytes below 2^40", (unsigned long long)m.strides[i - 1], i);
  }
  const u32 row = m.box[0] * m.element_bytes, span = m.swizzle ? 16u << m.swizzle : 0;
  if (row % 16) fail("tensor-map", here, "rows of a box have %u bytes, which is no multiple of 16", row);
  if (span && row != span) fail("tensor-map", here, "rows of a box have %u bytes, and its swizzle %u: only tiles as wide as that are modelled", row, span);
  return m;
}

// The innermost coordinate is one of whole 16 bytes: hardware traps otherwise ("illegal instruction").
void check_coordinates(const TensorMap& m, const int* at, const void* pc) {
  if ((long long)at[0] * m.element_bytes % 16)
    fail("misaligned", Site{nullptr, 0, pc}, "cp.async.bulk.tensor at innermost coordinate %d of elements of %u bytes, which is no multiple of 16 bytes", at[0], m.element_bytes);
}

// Stores take no negative coordinate, which loads do: hardware traps ("illegal instruction").
void check_store(int rank, const int* at, const void* pc) {
  for (int i = 0; i < rank; ++i)
    if (at[i] < 0) fail("tensor-map", Site{nullptr, 0, pc}, "a tile is stored at coordinate %d of axis %d; only loads take negative ones", at[i], i);
}

// Where byte `at` of the box is in shared memory: address bits 4.. are exchanged with bits 7.. (the tile at a multiple of 128).
char* swizzled(const TensorMap& m, char* tile, u32 at) {
  u64 p = reinterpret_cast<u64>(tile) + at;
  if (m.swizzle) p ^= (p >> 7 & ((1u << m.swizzle) - 1)) << 4;
  return reinterpret_cast<char*>(p);
}

// Visits the rows of the box: (global address, offset in the box, bytes before, inside and after what the tensor has of the row).
template <class Visit> void each_row(const TensorMap& m, const int* at, Visit visit) {
  const u32 element = m.element_bytes;
  u32 rows = 1;
  for (u32 i = 1; i < m.rank; ++i) rows *= m.box[i];
  const long long low = std::max<long long>(0, -(long long)at[0]);
  const long long high = std::min<long long>(m.box[0], (long long)m.dims[0] - at[0]);
  for (u32 r = 0; r < rows; ++r) {
    bool inside = low < high;
    u64 address = m.base + u64((long long)at[0] + low) * element;
    for (u32 i = 1, rest = r; i < m.rank; rest /= m.box[i], ++i) {
      const long long c = (long long)at[i] + rest % m.box[i];
      inside = inside && c >= 0 && c < (long long)m.dims[i];
      address += u64(c) * m.strides[i - 1];
    }
    const u32 before = inside ? u32(low) * element : m.box[0] * element, bytes = inside ? u32(high - low) * element : 0;
    visit(reinterpret_cast<char*>(address), r * m.box[0] * element, before, bytes);
  }
}

// The parts of bytes [at, at + bytes) of the box that lie together in shared memory.
template <class Visit> void each_part(const TensorMap& m, char* tile, u32 at, u32 bytes, Visit visit) {
  if (!m.swizzle) { visit(tile + at, 0, bytes); return; }
  for (u32 done = 0; done < bytes;) {
    const u32 part = std::min(16 - (at + done) % 16, bytes - done);
    visit(swizzled(m, tile, at + done), done, part);
    done += part;
  }
}

void fill(const TensorMap& m, char* to, u32 bytes) {
  if (!m.fill) { std::memset(to, 0, bytes); return; }
  const u16 half = 0x7FFF;   // NaN in fp16 and bf16
  const u32 word = 0x7FFFFFFF;
  for (u32 i = 0; i < bytes; i += m.element_bytes)
    if (m.element_bytes == 2) std::memcpy(to + i, &half, 2);
    else std::memcpy(to + i, &word, std::min<u32>(4, m.element_bytes));
}

void check_map_fill(const TensorMap& m, const void* pc) {
  if (m.fill > 1 || (m.fill && m.element_bytes != 2 && m.element_bytes != 4)) fail("tensor-map", Site{nullptr, 0, pc}, "a tensor map that fills elements of %u bytes with NaN", m.element_bytes);
}

}  // namespace

struct Tile { TensorMap map; int at[5]; };

void land_tile(const Tile& t, char* dst) {
  each_row(t.map, t.at, [&](const char* from, u32 row, u32 before, u32 bytes) {
    const u32 all = t.map.box[0] * t.map.element_bytes;
    char line[2048];
    fill(t.map, line, all);
    std::memcpy(line + before, from, bytes);
    each_part(t.map, dst, row, all, [&](char* to, u32 done, u32 part) { std::memcpy(to, line + done, part); });
  });
}

void note_tile(const Tile& t, const char* tile, bool memory, bool shared, const void* pc) {   // of a store
  each_row(t.map, t.at, [&](char* to, u32 row, u32 before, u32 bytes) {
    if (!bytes) return;
    if (shared)
      each_part(t.map, const_cast<char*>(tile), row + before, bytes, [&](char* from, u32, u32 part) { note_access(from, part, kRead | kProxy, pc); });
    if (memory) note_access(to, bytes, kWrite | kProxy, pc);
  });
}

void store_tile(const Tile& t, const char* src, const void* pc) {
  if (self()->worker->launch->checker) note_tile(t, src, true, true, pc);
  each_row(t.map, t.at, [&](char* to, u32 row, u32 before, u32 bytes) {
    each_part(t.map, const_cast<char*>(src), row + before, bytes, [&](char* from, u32 done, u32 part) { std::memcpy(to + done, from, part); });
  });
}

}  // namespace fr_sim

using namespace fr_sim;

FRSIM_API void frsim_tensor_prefetch(const void* map) { read_map(map, 0, FRSIM_PC); }

FRSIM_API void frsim_tensor_load(void* smem, const void* map, const int* at, int rank, u64* bar, bool multicast, unsigned mask) {
  Fiber* f = self();
  auto tile = std::make_shared<Tile>();
  tile->map = read_map(map, rank, FRSIM_PC);
  check_map_fill(tile->map, FRSIM_PC);
  check_coordinates(tile->map, at, FRSIM_PC);
  std::copy_n(at, rank, tile->at);
  const u32 bytes = box_bytes(tile->map);
  if (f->worker->launch->checker)
    each_row(tile->map, tile->at, [&](const char* from, u32, u32, u32 n) { if (n) note_access(from, n, kRead | kProxy, FRSIM_PC); });
  auto to = [&](void* dst, u64* signal) {
    f->worker->async_bytes += bytes;
    shared_only(dst, bytes, 128, "cp.async.bulk.tensor", FRSIM_PC);
    begin_landing(static_cast<char*>(dst), bytes, signal, tile, FRSIM_PC);
  };
  if (!multicast) { to(smem, bar); return; }
  if (!mask || mask >> f->worker->launch->cluster_blocks) fail("cluster", Site{nullptr, 0, FRSIM_PC}, "a multicast to blocks 0x%x of a cluster of %u", mask, f->worker->launch->cluster_blocks);
  for (u32 r = 0; r < f->worker->launch->cluster_blocks; ++r)
    if (mask >> r & 1) to(frsim_map_shared(smem, r), static_cast<u64*>(frsim_map_shared(bar, r)));
}

FRSIM_API void frsim_tensor_store(const void* smem, const void* map, const int* at, int rank) {
  Fiber* f = self();
  auto tile = std::make_shared<Tile>();
  tile->map = read_map(map, rank, FRSIM_PC);
  check_coordinates(tile->map, at, FRSIM_PC);
  check_store(rank, at, FRSIM_PC);
  std::copy_n(at, rank, tile->at);
  const u32 bytes = box_bytes(tile->map);
  shared_only(smem, bytes, 128, "cp.async.bulk.tensor", FRSIM_PC);
  auto* from = static_cast<const char*>(smem);
  f->worker->async_bytes += bytes;
  if (f->worker->launch->checker) note_tile(*tile, from, false, true, FRSIM_PC);
  f->bulk.push_back({nullptr, from, bytes, bytes, f->bulk_committed, FRSIM_PC, tile});
}
