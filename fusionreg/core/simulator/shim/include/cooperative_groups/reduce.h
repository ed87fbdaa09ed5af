// cooperative_groups::reduce over tiles of a warp.
#pragma once
#include <cooperative_groups.h>

namespace cooperative_groups {
template <class T = void> struct plus { template <class U> U operator()(U a, U b) const { return a + b; } };
template <class T = void> struct less { template <class U> U operator()(U a, U b) const { return b < a ? b : a; } };
template <class T = void> struct greater { template <class U> U operator()(U a, U b) const { return a < b ? b : a; } };
template <class T = void> struct bit_and { template <class U> U operator()(U a, U b) const { return a & b; } };
template <class T = void> struct bit_or { template <class U> U operator()(U a, U b) const { return a | b; } };
template <class T = void> struct bit_xor { template <class U> U operator()(U a, U b) const { return a ^ b; } };

template <class Tile, class T, class Op> inline T reduce(const Tile& tile, T v, Op op) {
  for (unsigned o = Tile::num_threads() / 2; o; o /= 2) v = op(v, tile.shfl_xor(v, o));
  return v;
}
}  // namespace cooperative_groups
