// Integer intrinsics, bit casts, conversions with a named rounding.
#pragma once

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz(unsigned(x)) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll((unsigned long long)x) : 64; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline unsigned __brev(unsigned x) {
  unsigned r = 0;
  for (int i = 0; i < 32; ++i) r |= (x >> i & 1u) << (31 - i);
  return r;
}
inline unsigned long long __brevll(unsigned long long x) { return (unsigned long long)__brev(unsigned(x)) << 32 | __brev(unsigned(x >> 32)); }
namespace fr_sim {
// prmt.b32: the top bit of a selector takes the sign of its byte, all over.
inline unsigned prmt(unsigned a, unsigned b, unsigned s) {
  const unsigned long long both = (unsigned long long)b << 32 | a;
  unsigned r = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned selector = s >> 4 * i & 0xF;
    unsigned byte = unsigned(both >> 8 * (selector & 7)) & 0xFF;
    if (selector & 8) byte = byte & 0x80 ? 0xFF : 0;
    r |= byte << 8 * i;
  }
  return r;
}
}  // namespace fr_sim
// The intrinsic reads three bits of each selector.
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned s) { return fr_sim::prmt(a, b, s & 0x7777u); }
// Inside of the device library the simulator's branches mean the instruction, which stands in the device's.
namespace fr {
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned s) { return fr_sim::prmt(a, b, s); }
}  // namespace fr
inline unsigned __funnelshift_l(unsigned lo, unsigned hi, unsigned s) { return unsigned(((unsigned long long)hi << 32 | lo) << (s & 31) >> 32); }
inline unsigned __funnelshift_r(unsigned lo, unsigned hi, unsigned s) { return unsigned(((unsigned long long)hi << 32 | lo) >> (s & 31)); }
inline unsigned __funnelshift_lc(unsigned lo, unsigned hi, unsigned s) { return s >= 32 ? lo : __funnelshift_l(lo, hi, s); }
inline unsigned __funnelshift_rc(unsigned lo, unsigned hi, unsigned s) { return s >= 32 ? hi : __funnelshift_r(lo, hi, s); }
inline int __mulhi(int a, int b) { return int((long long)a * b >> 32); }
inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned((unsigned long long)a * b >> 32); }
inline long long __mul64hi(long long a, long long b) { return (long long)((__int128)a * b >> 64); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) { return (unsigned long long)((unsigned __int128)a * b >> 64); }
inline int __mul24(int a, int b) { return int((long long)(a << 8 >> 8) * (b << 8 >> 8)); }
inline unsigned __umul24(unsigned a, unsigned b) { return unsigned((unsigned long long)(a & 0xFFFFFF) * (b & 0xFFFFFF)); }
inline unsigned __sad(int a, int b, unsigned c) { return c + unsigned(a > b ? (long long)a - b : (long long)b - a); }
inline unsigned __usad(unsigned a, unsigned b, unsigned c) { return c + (a > b ? a - b : b - a); }
inline int __hadd(int a, int b) { return int(((long long)a + b) >> 1); }
inline int __rhadd(int a, int b) { return int(((long long)a + b + 1) >> 1); }
inline int __dp4a(int a, int b, int c) {
  for (int i = 0; i < 4; ++i) c += int(int8_t(a >> 8 * i)) * int(int8_t(b >> 8 * i));
  return c;
}
inline unsigned __dp4a(unsigned a, unsigned b, unsigned c) {
  for (int i = 0; i < 4; ++i) c += (a >> 8 * i & 0xFF) * (b >> 8 * i & 0xFF);
  return c;
}

inline int __float_as_int(float x) { return fr_sim::from_bits<int>(fr_sim::to_bits(x)); }
inline unsigned __float_as_uint(float x) { return fr_sim::from_bits<unsigned>(fr_sim::to_bits(x)); }
inline float __int_as_float(int x) { return fr_sim::from_bits<float>(fr_sim::to_bits(x)); }
inline float __uint_as_float(unsigned x) { return fr_sim::from_bits<float>(fr_sim::to_bits(x)); }
inline long long __double_as_longlong(double x) { return fr_sim::from_bits<long long>(fr_sim::to_bits(x)); }
inline double __longlong_as_double(long long x) { return fr_sim::from_bits<double>(fr_sim::to_bits(x)); }
inline int __double2hiint(double x) { return int(__double_as_longlong(x) >> 32); }
inline int __double2loint(double x) { return int(__double_as_longlong(x)); }
inline double __hiloint2double(int hi, int lo) { return __longlong_as_double((long long)((unsigned long long)unsigned(hi) << 32 | unsigned(lo))); }

namespace fr_sim {
// Device conversions saturate, and NaN gives zero (64-bit ones: the top bit alone).
template <class I, class F> inline I saturate(F x) {
  if (x != x) return sizeof(I) == 8 ? I(1ull << 63) : I(0);
  const bool is_signed = I(-1) < I(0);
  const F limit = F(is_signed ? 1ull << (8 * sizeof(I) - 1) : 1ull << (8 * sizeof(I) - 1)) * (is_signed ? F(1) : F(2));
  if (x >= limit) return is_signed ? I((1ull << (8 * sizeof(I) - 1)) - 1) : I(-1);
  if (is_signed ? x < -limit : x < 0) return is_signed ? I(1ull << (8 * sizeof(I) - 1)) : I(0);
  return I(x);
}
// The float next to x in the direction of `exact`, for conversions that round toward one side.
inline float directed(float nearest, double exact, int mode) {   // mode: 1 up, -1 down, 0 toward zero
  if (double(nearest) == exact || nearest != nearest) return nearest;
  const int side = mode ? mode : exact < 0 ? 1 : -1;
  if (side > 0) return double(nearest) < exact ? nextafterf(nearest, INFINITY) : nearest;
  return double(nearest) > exact ? nextafterf(nearest, -INFINITY) : nearest;
}
}  // namespace fr_sim

#define FRSIM_TO_INTEGER(prefix, F, suffix, I)                                                   \
  inline I prefix##2##suffix##_rn(F x) { return fr_sim::saturate<I>(F(nearbyint(double(x)))); }  \
  inline I prefix##2##suffix##_rz(F x) { return fr_sim::saturate<I>(F(trunc(double(x)))); }      \
  inline I prefix##2##suffix##_ru(F x) { return fr_sim::saturate<I>(F(ceil(double(x)))); }       \
  inline I prefix##2##suffix##_rd(F x) { return fr_sim::saturate<I>(F(floor(double(x)))); }
FRSIM_TO_INTEGER(__float, float, int, int)
FRSIM_TO_INTEGER(__float, float, uint, unsigned)
FRSIM_TO_INTEGER(__float, float, ll, long long)
FRSIM_TO_INTEGER(__float, float, ull, unsigned long long)
FRSIM_TO_INTEGER(__double, double, int, int)
FRSIM_TO_INTEGER(__double, double, uint, unsigned)
FRSIM_TO_INTEGER(__double, double, ll, long long)
FRSIM_TO_INTEGER(__double, double, ull, unsigned long long)
#undef FRSIM_TO_INTEGER

#define FRSIM_FROM_INTEGER(prefix, I)                                                                 \
  inline float prefix##2float_rn(I x) { return float(x); }                                            \
  inline float prefix##2float_rz(I x) { return fr_sim::directed(float(x), double(x), 0); }            \
  inline float prefix##2float_ru(I x) { return fr_sim::directed(float(x), double(x), 1); }            \
  inline float prefix##2float_rd(I x) { return fr_sim::directed(float(x), double(x), -1); }           \
  inline double prefix##2double_rn(I x) { return double(x); }
FRSIM_FROM_INTEGER(__int, int)
FRSIM_FROM_INTEGER(__uint, unsigned)
FRSIM_FROM_INTEGER(__ll, long long)
FRSIM_FROM_INTEGER(__ull, unsigned long long)
#undef FRSIM_FROM_INTEGER
inline float __double2float_rn(double x) { return float(x); }
inline float __double2float_rz(double x) { return fr_sim::directed(float(x), x, 0); }
inline float __double2float_ru(double x) { return fr_sim::directed(float(x), x, 1); }
inline float __double2float_rd(double x) { return fr_sim::directed(float(x), x, -1); }

#define FRSIM_MINMAX(T, A, B)                                        \
  inline T min(A a, B b) { const T x = static_cast<T>(a), y = static_cast<T>(b); return x < y ? x : y; }       \
  inline T max(A a, B b) { const T x = static_cast<T>(a), y = static_cast<T>(b); return x > y ? x : y; }
FRSIM_MINMAX(int, int, int)
FRSIM_MINMAX(unsigned, unsigned, unsigned)
FRSIM_MINMAX(unsigned, int, unsigned)
FRSIM_MINMAX(unsigned, unsigned, int)
FRSIM_MINMAX(long, long, long)
FRSIM_MINMAX(unsigned long, unsigned long, unsigned long)
FRSIM_MINMAX(unsigned long, long, unsigned long)
FRSIM_MINMAX(unsigned long, unsigned long, long)
FRSIM_MINMAX(long long, long long, long long)
FRSIM_MINMAX(unsigned long long, unsigned long long, unsigned long long)
FRSIM_MINMAX(unsigned long long, long long, unsigned long long)
FRSIM_MINMAX(unsigned long long, unsigned long long, long long)
#undef FRSIM_MINMAX
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline double max(double a, double b) { return fmax(a, b); }
inline double min(float a, double b) { return fmin(a, b); }
inline double max(float a, double b) { return fmax(a, b); }
inline double min(double a, float b) { return fmin(a, b); }
inline double max(double a, float b) { return fmax(a, b); }
inline unsigned umin(unsigned a, unsigned b) { return a < b ? a : b; }
inline unsigned umax(unsigned a, unsigned b) { return a > b ? a : b; }
inline long long llmin(long long a, long long b) { return a < b ? a : b; }
inline long long llmax(long long a, long long b) { return a > b ? a : b; }
