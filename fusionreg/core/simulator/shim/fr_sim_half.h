// What NVIDIA's half-precision headers offer on the device alone, for __half and __nv_bfloat16: computed in float or double,
// rounded once.
#pragma once

namespace fr_sim {
template <class T> struct Narrow;
template <> struct Narrow<__half> {
  using Pair = __half2;
  static double wide(__half x) { return double(__half2float(x)); }
  static __half round(double x) { return __double2half(x); }
  static __half2 pair(__half a, __half b) { return __halves2half2(a, b); }
};
template <> struct Narrow<__nv_bfloat16> {
  using Pair = __nv_bfloat162;
  static double wide(__nv_bfloat16 x) { return double(__bfloat162float(x)); }
  static __nv_bfloat16 round(double x) { return __double2bfloat16(x); }
  static __nv_bfloat162 pair(__nv_bfloat16 a, __nv_bfloat16 b) { return __halves2bfloat162(a, b); }
};
// The sum of an exact product and a third term may need more than 53 bits: fma() rounds it to odd, in effect, for these widths.
template <class T> inline T fused(T a, T b, T c) {
  const double p = Narrow<T>::wide(a) * Narrow<T>::wide(b), z = Narrow<T>::wide(c), s = p + z;
  const double bb = s - p, error = (p - (s - bb)) + (z - bb);
  double r = s;
  if (error != 0 && s - s == 0 && !(to_bits(s) & 1)) r = from_bits<double>(to_bits(s) + ((error > 0) == (s > 0) ? 1 : -1));
  return Narrow<T>::round(r);
}
template <class T> inline bool is_nan(T x) { return Narrow<T>::wide(x) != Narrow<T>::wide(x); }
template <class T> inline T clamp01(T x) {
  const double v = Narrow<T>::wide(x);
  return Narrow<T>::round(v > 1 ? 1.0 : v > 0 ? v : 0.0);
}
template <class T> inline T relu(T x) { return Narrow<T>::wide(x) < 0 ? Narrow<T>::round(0.0) : x; }
}  // namespace fr_sim

#define FRSIM_FMA(T, P)                                                                                              \
  inline T __hfma(T a, T b, T c) { return fr_sim::fused(a, b, c); }                                                  \
  inline T __hfma_sat(T a, T b, T c) { return fr_sim::clamp01(fr_sim::fused(a, b, c)); }                             \
  inline T __hfma_relu(T a, T b, T c) { return fr_sim::relu(fr_sim::fused(a, b, c)); }                               \
  inline P __hfma2(P a, P b, P c) { return fr_sim::Narrow<T>::pair(__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)); }  \
  inline P __hfma2_sat(P a, P b, P c) { return fr_sim::Narrow<T>::pair(__hfma_sat(a.x, b.x, c.x), __hfma_sat(a.y, b.y, c.y)); } \
  inline P __hfma2_relu(P a, P b, P c) { return fr_sim::Narrow<T>::pair(__hfma_relu(a.x, b.x, c.x), __hfma_relu(a.y, b.y, c.y)); }
FRSIM_FMA(__half, __half2)
FRSIM_FMA(__nv_bfloat16, __nv_bfloat162)
#undef FRSIM_FMA

#define FRSIM_UNARY(name, expression)                                                                        \
  inline __half h##name(__half h) { const double x = fr_sim::Narrow<__half>::wide(h); return fr_sim::Narrow<__half>::round(expression); } \
  inline __nv_bfloat16 h##name(__nv_bfloat16 h) {                                                            \
    const double x = fr_sim::Narrow<__nv_bfloat16>::wide(h); return fr_sim::Narrow<__nv_bfloat16>::round(expression); } \
  inline __half2 h2##name(__half2 h) { return __halves2half2(h##name(h.x), h##name(h.y)); }                  \
  inline __nv_bfloat162 h2##name(__nv_bfloat162 h) { return __halves2bfloat162(h##name(h.x), h##name(h.y)); }
FRSIM_UNARY(exp, ::exp(x))
FRSIM_UNARY(exp2, ::exp2(x))
FRSIM_UNARY(exp10, ::pow(10.0, x))
FRSIM_UNARY(log, ::log(x))
FRSIM_UNARY(log2, ::log2(x))
FRSIM_UNARY(log10, ::log10(x))
FRSIM_UNARY(sqrt, ::sqrt(x))
FRSIM_UNARY(rsqrt, 1.0 / ::sqrt(x))
FRSIM_UNARY(rcp, 1.0 / x)
FRSIM_UNARY(sin, ::sin(x))
FRSIM_UNARY(cos, ::cos(x))
FRSIM_UNARY(tanh, ::tanh(x))
FRSIM_UNARY(floor, ::floor(x))
FRSIM_UNARY(ceil, ::ceil(x))
FRSIM_UNARY(trunc, ::trunc(x))
FRSIM_UNARY(rint, ::nearbyint(x))
#undef FRSIM_UNARY
inline __half htanh_approx(__half x) { return __float2half_rn(fr_sim::tanh_approx(__half2float(x))); }
inline __nv_bfloat16 htanh_approx(__nv_bfloat16 x) { return __float2bfloat16_rn(fr_sim::tanh_approx(__bfloat162float(x))); }

#define FRSIM_NARROW_TO(prefix, T, widen, suffix, I)                                       \
  inline I prefix##2##suffix##_rn(T x) { return fr_sim::saturate<I>(nearbyintf(widen(x))); } \
  inline I prefix##2##suffix##_ru(T x) { return fr_sim::saturate<I>(ceilf(widen(x))); }    \
  inline I prefix##2##suffix##_rd(T x) { return fr_sim::saturate<I>(floorf(widen(x))); }
#define FRSIM_NARROW(prefix, T, widen)                              \
  FRSIM_NARROW_TO(prefix, T, widen, short, short)                   \
  FRSIM_NARROW_TO(prefix, T, widen, ushort, unsigned short)         \
  FRSIM_NARROW_TO(prefix, T, widen, int, int)                       \
  FRSIM_NARROW_TO(prefix, T, widen, uint, unsigned)                 \
  FRSIM_NARROW_TO(prefix, T, widen, ll, long long)                  \
  FRSIM_NARROW_TO(prefix, T, widen, ull, unsigned long long)
FRSIM_NARROW(__half, __half, __half2float)
FRSIM_NARROW(__bfloat16, __nv_bfloat16, __bfloat162float)
#undef FRSIM_NARROW
#undef FRSIM_NARROW_TO
