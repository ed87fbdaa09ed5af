// Tensor-core instructions, element by element as the PTX ISA lays the fragments out ("Matrix Fragments for mma.m16n8k*").
#if defined(__F16C__)
#include <immintrin.h>
#endif

#include "runtime.h"

namespace fr_sim {
namespace {

float as_float(u32 bits) {
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

u32 as_bits(float f) {
  u32 bits;
  std::memcpy(&bits, &f, 4);
  return bits;
}

float from_half(u32 h) {
#if defined(__F16C__)
  return _cvtsh_ss(u16(h));
#elif defined(__aarch64__)
  __fp16 x;
  const u16 bits = u16(h);
  std::memcpy(&x, &bits, 2);
  return float(x);
#else
  const u32 sign = (h & 0x8000u) << 16, exponent = h >> 10 & 31, fraction = h & 0x3FFu;
  if (exponent == 31) return as_float(sign | 0x7F800000u | fraction << 13);
  if (exponent) return as_float(sign | (exponent + 112) << 23 | fraction << 13);
  const float f = float(fraction) * 0x1p-24f;
  return sign ? -f : f;
#endif
}

u32 to_half(float f) {   // nearest even
#if defined(__F16C__)
  return _cvtss_sh(f, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__aarch64__)
  const __fp16 x = __fp16(f);
  u16 bits;
  std::memcpy(&bits, &x, 2);
  return bits;
#else
  const u32 x = as_bits(f), sign = x >> 16 & 0x8000u, a = x & 0x7FFFFFFFu;
  if (a > 0x7F800000u) return sign | 0x7FFFu;
  if (a >= 0x477FF000u) return sign | 0x7C00u;
  if (a < 0x38800000u) return sign | as_bits(as_float(a) + 0.5f) & 0xFFFFu;   // subnormal: the addition rounds at 2^-24
  return sign | (a - 0x38000000u + 0xFFFu + (a >> 13 & 1)) >> 13;
#endif
}

float from_e4m3(u32 b) {
  const u32 e = b >> 3 & 15, m = b & 7;
  if (e == 15 && m == 7) return as_float(0x7FC00000u);
  const float v = e ? as_float((e + 120) << 23 | m << 20) : float(m) * 0x1p-9f;
  return b & 0x80 ? -v : v;
}

struct Tables {
  float e4m3[256], e5m2[256];
  Tables() {
    for (u32 i = 0; i < 256; ++i) { e4m3[i] = from_e4m3(i); e5m2[i] = from_half(i << 8); }
  }
};
const Tables tables;

float element(int type, u32 reg, int i) {
  switch (type) {
    case kF16: return from_half(reg >> 16 * i & 0xFFFFu);
    case kBF16: return as_float((reg >> 16 * i & 0xFFFFu) << 16);
    case kTF32: return as_float(reg & 0xFFFFE000u);
    case kE4M3: return tables.e4m3[reg >> 8 * i & 0xFFu];
    default: return tables.e5m2[reg >> 8 * i & 0xFFu];
  }
}

int integer(int type, u32 reg, int i) {
  const u32 b = reg >> 8 * i & 0xFFu;
  return type == kS8 ? int(int8_t(b)) : int(b);
}

// Spreads the warp's A and B registers over A[16][k] and B[k][8]. per: elements in one register.
template <class T, class Get> void gather(void* const* args, int k, int per, T (*a)[32], T (*b)[8], Get get) {
  const int half = 4 * per;                       // columns that one register column of the warp covers
  for (int lane = 0; lane < 32; ++lane) {
    const auto& m = *static_cast<const MmaArgs*>(args[lane]);
    const int group = lane / 4, within = lane % 4 * per;
    for (int block = 0; block * half < k; ++block)
      for (int i = 0; i < per; ++i) {
        const int column = block * half + within + i;
        a[group][column] = get(m.a[2 * block], i);
        a[group + 8][column] = get(m.a[2 * block + 1], i);
        b[column][group] = get(m.b[block], i);
      }
  }
}

}  // namespace

void run_mma(Warp& warp, void* const* args) {
  ++warp.lanes[0]->worker->mma;
  const auto& first = *static_cast<const MmaArgs*>(args[0]);
  const int type = first.type, k = first.k, per = type == kTF32 ? 1 : type <= kBF16 ? 2 : 4;
  if (type == kS8 || type == kU8) {
    int a[16][32], b[32][8];
    gather(args, k, per, a, b, [type](u32 r, int i) { return integer(type, r, i); });
    for (int lane = 0; lane < 32; ++lane) {
      const auto& m = *static_cast<const MmaArgs*>(args[lane]);
      int out[4];
      for (int e = 0; e < 4; ++e) {
        const int row = lane / 4 + 8 * (e / 2), column = lane % 4 * 2 + e % 2;
        u32 sum = u32(static_cast<const int*>(m.c)[e]);
        for (int x = 0; x < k; ++x) sum += u32(a[row][x] * b[x][column]);
        out[e] = int(sum);
      }
      std::memcpy(m.d, out, sizeof out);
    }
    return;
  }
  alignas(64) float a[16][32], b[32][8], d[16][8];
  switch (type) {   // one instance each, so that the conversions are inlined
    case kF16: gather(args, k, per, a, b, [](u32 r, int i) { return element(kF16, r, i); }); break;
    case kBF16: gather(args, k, per, a, b, [](u32 r, int i) { return element(kBF16, r, i); }); break;
    default: gather(args, k, per, a, b, [type](u32 r, int i) { return element(type, r, i); });
  }
  for (int lane = 0; lane < 32; ++lane) {
    const auto& m = *static_cast<const MmaArgs*>(args[lane]);
    for (int e = 0; e < 4; ++e) {
      const float c = first.half_accumulator ? from_half(static_cast<const u32*>(m.c)[e / 2] >> 16 * (e % 2) & 0xFFFFu) : static_cast<const float*>(m.c)[e];
      d[lane / 4 + 8 * (e / 2)][lane % 4 * 2 + e % 2] = c;
    }
  }
  for (int row = 0; row < 16; ++row) {
    float sum[8];
    std::memcpy(sum, d[row], sizeof sum);
    for (int x = 0; x < k; ++x)
      for (int column = 0; column < 8; ++column) sum[column] += a[row][x] * b[x][column];
    std::memcpy(d[row], sum, sizeof sum);
  }
  for (int lane = 0; lane < 32; ++lane) {
    const auto& m = *static_cast<const MmaArgs*>(args[lane]);
    for (int pair = 0; pair < 2; ++pair) {
      const float* v = &d[lane / 4 + 8 * pair][lane % 4 * 2];
      if (first.half_accumulator) static_cast<u32*>(m.d)[pair] = to_half(v[0]) | to_half(v[1]) << 16;
      else std::memcpy(static_cast<float*>(m.d) + 2 * pair, v, 8);
    }
  }
}

namespace {

// Row addresses of all lanes, checked as the hardware would: 16-byte aligned and in shared memory.
void rows_of(Warp& warp, void* const* args, const void* pc, int kind, void** rows) {
  const int n = static_cast<const MatrixArgs*>(args[0])->count;
  Context* const caller = frsim_current;
  for (int i = 0; i < 8 * n; ++i) {
    rows[i] = static_cast<const MatrixArgs*>(args[i])->address;
    frsim_current = warp.lanes[i];   // the lane that gave the address answers for it
    shared_only(rows[i], 16, 16, kind == kRead ? "ldmatrix" : "stmatrix", pc);
    if (warp.lanes[i]->worker->launch->checker) note_access(rows[i], 16, kind, pc);
  }
  frsim_current = caller;
}

}  // namespace

void run_ldmatrix(Warp& warp, void* const* args, const void* pc) {
  void* rows[32];
  rows_of(warp, args, pc, kRead, rows);
  for (int lane = 0; lane < 32; ++lane) {
    const auto& m = *static_cast<const MatrixArgs*>(args[lane]);
    for (int i = 0; i < m.count; ++i) {
      u16 v[2];
      for (int e = 0; e < 2; ++e) {
        const int row = m.transposed ? lane % 4 * 2 + e : lane / 4, column = m.transposed ? lane / 4 : lane % 4 * 2 + e;
        v[e] = static_cast<const u16*>(rows[8 * i + row])[column];
      }
      m.registers[i] = u32(v[0]) | u32(v[1]) << 16;
    }
  }
}

void run_stmatrix(Warp& warp, void* const* args, const void* pc) {
  void* rows[32];
  rows_of(warp, args, pc, kWrite, rows);
  for (int lane = 0; lane < 32; ++lane) {
    const auto& m = *static_cast<const MatrixArgs*>(args[lane]);
    for (int i = 0; i < m.count; ++i)
      for (int e = 0; e < 2; ++e) {
        const int row = m.transposed ? lane % 4 * 2 + e : lane / 4, column = m.transposed ? lane / 4 : lane % 4 * 2 + e;
        static_cast<u16*>(rows[8 * i + row])[column] = u16(m.registers[i] >> 16 * e);
      }
  }
}

void run_movmatrix(void* const* args) {
  u16 a[8][8];
  for (int lane = 0; lane < 32; ++lane)
    for (int e = 0; e < 2; ++e) a[lane / 4][lane % 4 * 2 + e] = u16(static_cast<const MatrixArgs*>(args[lane])->registers[0] >> 16 * e);
  for (int lane = 0; lane < 32; ++lane)
    static_cast<const MatrixArgs*>(args[lane])->registers[0] = u32(a[lane % 4 * 2][lane / 4]) | u32(a[lane % 4 * 2 + 1][lane / 4]) << 16;
}

}  // namespace fr_sim
