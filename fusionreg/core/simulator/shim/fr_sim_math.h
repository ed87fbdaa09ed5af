// CUDA's math beyond C's. Fast variants (__expf, ...) are computed exactly rounded: the device is within a few ulp of that.
#pragma once

inline float rsqrtf(float x) { return float(1.0 / sqrt(double(x))); }
inline double rsqrt(double x) { return 1.0 / sqrt(x); }
inline float rsqrt(float x) { return rsqrtf(x); }
inline float rcbrtf(float x) { return float(1.0 / cbrt(double(x))); }
inline float exp10f(float x, int) { return float(pow(10.0, double(x))); }
inline float erfinvf(float y) {   // Newton on erf from the usual starting value; double inside
  if (y <= -1.0f || y >= 1.0f) return fabsf(y) == 1.0f ? copysignf(INFINITY, y) : NAN;
  const double w = log((1.0 - double(y)) * (1.0 + double(y))), t = 2.0 / (M_PI * 0.147) + 0.5 * w;
  double x = copysign(sqrt(sqrt(t * t - w / 0.147) - t), double(y));
  for (int i = 0; i < 4; ++i) x -= (erf(x) - double(y)) / (M_2_SQRTPI * exp(-x * x));
  return float(x);
}
inline float normcdff(float x) { return float(0.5 * erfc(-double(x) * M_SQRT1_2)); }
inline double normcdf(double x) { return 0.5 * erfc(-x * M_SQRT1_2); }
inline float erfcxf(float x) { return float(exp(double(x) * x) * erfc(double(x))); }
inline float sinpif(float x) { return float(sin(M_PI * fmod(double(x), 2.0))); }
inline float cospif(float x) { return float(cos(M_PI * fmod(double(x), 2.0))); }
inline void sincospif(float x, float* s, float* c) { *s = sinpif(x); *c = cospif(x); }
inline float rhypotf(float a, float b) { return float(1.0 / hypot(double(a), double(b))); }
inline float norm3df(float a, float b, float c) { return float(sqrt(double(a) * a + double(b) * b + double(c) * c)); }
inline float fdividef(float a, float b) { return a / b; }


inline float __expf(float x) { return float(exp(double(x))); }
inline float __exp10f(float x) { return float(pow(10.0, double(x))); }
inline float __logf(float x) { return float(log(double(x))); }
inline float __log2f(float x) { return float(log2(double(x))); }
inline float __log10f(float x) { return float(log10(double(x))); }
inline float __powf(float a, float b) { return float(pow(double(a), double(b))); }
inline float __sinf(float x) { return float(sin(double(x))); }
inline float __cosf(float x) { return float(cos(double(x))); }
inline float __tanf(float x) { return float(tan(double(x))); }
inline void __sincosf(float x, float* s, float* c) { *s = __sinf(x); *c = __cosf(x); }
inline float __tanhf(float x) { return float(tanh(double(x))); }
// Programming guide: for 2^126 < |b| < 2^128 the quotient is 0 (NaN for an infinite a).
inline float __fdividef(float a, float b) {
  if (fabsf(b) > 0x1p126f && !isinf(b)) return isinf(a) ? NAN : copysignf(0.0f, a) * copysignf(1.0f, b);
  return a / b;
}
inline float __saturatef(float x) { return x > 1.0f ? 1.0f : x > 0.0f ? x : 0.0f; }
inline float __frsqrt_rn(float x) { return rsqrtf(x); }
inline float __fmaf_ieee_rn(float a, float b, float c) { return fmaf(a, b, c); }

// Directed rounding: a float operation is exact, or close enough to tell its side, in double.
#define FRSIM_ROUNDED(name, arguments, nearest, exact)                                      \
  inline float name##_rn arguments { return nearest; }                                      \
  inline float name##_rz arguments { return fr_sim::directed(nearest, exact, 0); }          \
  inline float name##_ru arguments { return fr_sim::directed(nearest, exact, 1); }          \
  inline float name##_rd arguments { return fr_sim::directed(nearest, exact, -1); }
FRSIM_ROUNDED(__fadd, (float a, float b), a + b, double(a) + double(b))
FRSIM_ROUNDED(__fsub, (float a, float b), a - b, double(a) - double(b))
FRSIM_ROUNDED(__fmul, (float a, float b), a * b, double(a) * double(b))
FRSIM_ROUNDED(__fdiv, (float a, float b), a / b, double(a) / double(b))
FRSIM_ROUNDED(__fmaf, (float a, float b, float c), fmaf(a, b, c), double(a) * double(b) + double(c))
FRSIM_ROUNDED(__frcp, (float a), 1.0f / a, 1.0 / double(a))
FRSIM_ROUNDED(__fsqrt, (float a), sqrtf(a), sqrt(double(a)))
#undef FRSIM_ROUNDED
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dsub_rn(double a, double b) { return a - b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline double __fma_rn(double a, double b, double c) { return fma(a, b, c); }
inline double __drcp_rn(double a) { return 1.0 / a; }
inline double __dsqrt_rn(double a) { return sqrt(a); }

namespace fr_sim {
inline float flushed(float x) { return fabsf(x) < 0x1p-126f ? copysignf(0.0f, x) : x; }   // .ftz, operand and result
inline float ex2_approx(float x) { return flushed(float(exp2(double(flushed(x))))); }
inline float lg2_approx(float x) { return float(log2(double(x))); }
inline float rcp_approx(float x) { return flushed(1.0f / flushed(x)); }
inline float rsqrt_approx(float x) { return rsqrtf(x); }
inline float sqrt_approx(float x) { return sqrtf(x); }
inline float sin_approx(float x) { return __sinf(x); }
inline float cos_approx(float x) { return __cosf(x); }
inline float tanh_approx(float x) {   // PTX ISA: maximum relative error 2^-11
  const float t = float(tanh(double(x)));
  if (t != t) return t;
  return __uint_as_float((__float_as_uint(t) + 0x800u) & 0xFFFFF000u);
}
}  // namespace fr_sim
