// The maths of one number, under the names that the formulas of csrc/losses use. All of it is the library's own, to a few units
// in the last place, NaN and infinities included; no fast-math variant.
#pragma once
#include <math.h>

#include <cstdint>

#include "cuda/launch.h"

namespace PYL_ISA {

template <class T>
PYL_INLINE constexpr T infinity() {
  return static_cast<T>(__builtin_huge_val());
}
template <class T>
PYL_INLINE T nan() {
  return infinity<T>() - infinity<T>();
}

template <class V>
PYL_INLINE V splat(V x) {
  return x;
}
template <class I, class V>
PYL_INLINE V where(I mask, V yes, V no) {
  return mask ? yes : no;
}
template <class T>
PYL_INLINE T larger(T a, T b) {  // the second operand when either is NaN
  return a > b ? a : b;
}
PYL_INLINE float absolute(float x) { return ::fabsf(x); }
PYL_INLINE double absolute(double x) { return ::fabs(x); }

PYL_INLINE float exp(float x) { return ::expf(x); }
PYL_INLINE double exp(double x) { return ::exp(x); }
PYL_INLINE float expm1(float x) { return ::expm1f(x); }
PYL_INLINE double expm1(double x) { return ::expm1(x); }
PYL_INLINE float log(float x) { return ::logf(x); }
PYL_INLINE double log(double x) { return ::log(x); }
PYL_INLINE float log1p(float x) { return ::log1pf(x); }
PYL_INLINE double log1p(double x) { return ::log1p(x); }
PYL_INLINE float square_root(float x) { return ::sqrtf(x); }
PYL_INLINE double square_root(double x) { return ::sqrt(x); }
PYL_INLINE float power(float x, float p) { return ::powf(x, p); }
PYL_INLINE double power(double x, double p) { return ::pow(x, p); }
template <class V>
PYL_INLINE V exp_below(V x) {
  return exp(x);
}
template <class V>
PYL_INLINE V log1p_above(V x) {
  return log1p(x);
}
// tanh(x) and, in `slope`, 1 - tanh(x)^2 without cancellation
template <class V>
PYL_INLINE V tanh(V x, V& slope) {
  V e = expm1(-2 * absolute(x)), t = -e / (e + 2), q = e + 1;
  slope = 4 * exp(-2 * absolute(x)) / ((q + 1) * (q + 1));
  return where(x < 0, -t, t);
}
// The smallest number of type T that is not below `mean` >= 0: e >= it exactly when e >= mean.
PYL_INLINE double not_below(double mean, double) { return mean; }
PYL_INLINE float not_below(double mean, float) {
  float t = static_cast<float>(mean);
  return static_cast<double>(t) < mean ? ::nextafterf(t, infinity<float>()) : t;
}

// Numbers as they are stored, and the type in which they are computed with.
template <class D>
struct Stored {
  typedef D T;
  static PYL_INLINE T load(D x) { return x; }
  static PYL_INLINE D store(T x) { return x; }
};
template <>
struct Stored<__nv_bfloat16> {
  typedef float T;
  static PYL_INLINE float load(__nv_bfloat16 x) { return __bfloat162float(x); }
  static PYL_INLINE __nv_bfloat16 store(float x) { return __float2bfloat16_rn(x); }
};
template <>
struct Stored<__half> {
  typedef float T;
  static PYL_INLINE float load(__half x) { return __half2float(x); }
  static PYL_INLINE __half store(float x) { return __float2half_rn(x); }
};
template <class D>
using Accumulate = typename Stored<D>::T;

// An integer as a saved number: its bits, whatever number they spell.
PYL_INLINE float number_of(int j, float) {
  union {
    int i;
    float f;
  } u;
  u.i = j;
  return u.f;
}
PYL_INLINE double number_of(int j, double) { return static_cast<double>(j); }
PYL_INLINE int class_of(float number) {
  union {
    float f;
    int i;
  } u;
  u.f = number;
  return u.i;
}
PYL_INLINE int class_of(double number) { return static_cast<int>(number); }

}  // namespace PYL_ISA
