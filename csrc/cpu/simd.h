// Vectors of the compiler's own kind (one source for SSE2, AVX2, AVX-512 and NEON), their maths, and loads and stores that
// convert. exp, log and friends are good to about one unit in the last place; NaN and infinities go through as in libm.
#pragma once
#include <cstdint>
#include "cpu/problem.h"
#if defined(__F16C__)
#include <immintrin.h>
#endif

#define PYL_INLINE inline __attribute__((always_inline))

namespace PYL_ISA {
using namespace pylosses;

#if defined(__AVX512F__)
constexpr int kBytes = 64;
#elif defined(__AVX__)
constexpr int kBytes = 32;
#else
constexpr int kBytes = 16;
#endif

template <class T>
struct Lanes;
template <>
struct Lanes<float> {
  typedef float V __attribute__((vector_size(kBytes)));
  typedef int32_t IntScalar;
  typedef int32_t I __attribute__((vector_size(kBytes)));
  typedef uint32_t U __attribute__((vector_size(kBytes)));
  typedef double Wide __attribute__((vector_size(2 * kBytes)));  // as many doubles
  static constexpr int W = kBytes / 4, mantissa = 23, bias = 127;
  // exp(x) is 0 below and inf above; in between 2^n fits a normal number
  static constexpr float exp_min = -87.3f, exp_max = 88.72f, smallest = 1.17549435e-38f;
  static constexpr float ln2_hi = 0.693359375f, ln2_lo = -2.12194440e-4f, round = 12582912.0f;
  static constexpr float exp_zero = -105;            // e^x is below every number there
  static constexpr int32_t round_bits = 0x4b400000;  // of `round`
};
template <>
struct Lanes<double> {
  typedef double V __attribute__((vector_size(kBytes)));
  typedef int64_t IntScalar;
  typedef int64_t I __attribute__((vector_size(kBytes)));
  typedef uint64_t U __attribute__((vector_size(kBytes)));
  typedef double Wide __attribute__((vector_size(kBytes)));
  static constexpr int W = kBytes / 8, mantissa = 52, bias = 1023;
  static constexpr double exp_min = -708.3, exp_max = 709.78, smallest = 2.2250738585072014e-308;
  static constexpr double ln2_hi = 6.93147180369123816490e-01, ln2_lo = 1.90821492927058770002e-10, round = 6755399441055744.0;
  static constexpr double exp_zero = -746;
  static constexpr int64_t round_bits = 0x4338000000000000;
};
typedef Lanes<float>::V vf;
typedef Lanes<double>::V vd;

template <class V>
struct ScalarOf;
template <>
struct ScalarOf<vf> {
  typedef float T;
};
template <>
struct ScalarOf<vd> {
  typedef double T;
};
template <class V>
using Scalar = typename ScalarOf<V>::T;
template <class V>
using Int = typename Lanes<Scalar<V>>::I;

template <class T>
constexpr T infinity() {
  return static_cast<T>(__builtin_inf());
}
template <class V>
PYL_INLINE V splat(Scalar<V> x) {
  return x - V{};
}
template <class I, class V>
PYL_INLINE V where(I mask, V yes, V no) {
  return mask ? yes : no;
}
template <class T>
PYL_INLINE T larger(T a, T b) {  // the second operand when either is NaN
  return a > b ? a : b;
}
// One instruction, which the compiler sees in some places only. (GCC 12 warns of the intrinsics without a mask.)
#if defined(__AVX512F__)
PYL_INLINE vf larger(vf a, vf b) { return (vf)_mm512_maskz_max_ps((__mmask16)-1, (__m512)a, (__m512)b); }
PYL_INLINE vd larger(vd a, vd b) { return (vd)_mm512_maskz_max_pd((__mmask8)-1, (__m512d)a, (__m512d)b); }
#elif defined(__AVX2__)
PYL_INLINE vf larger(vf a, vf b) { return (vf)_mm256_max_ps((__m256)a, (__m256)b); }
PYL_INLINE vd larger(vd a, vd b) { return (vd)_mm256_max_pd((__m256d)a, (__m256d)b); }
#endif
template <class V>
PYL_INLINE V absolute(V x) {
  typedef typename Lanes<Scalar<V>>::U U;
  return (V)((U)x & (~(U){} >> 1));
}

// ---- maths ----

// e^r - 1 = r + r^2 P(r) for |r| <= ln(2) / 2
PYL_INLINE vf exp_tail(vf r) {
  vf p = 1.3926183587713494542e-3f * r + 8.3631790527225773704e-3f;
  p = p * r + 4.1666554617204574203e-2f;
  p = p * r + 1.6666576989698775683e-1f;
  p = p * r + 0.5f;
  return p * (r * r) + r;
}
PYL_INLINE vd exp_tail(vd r) {
  vd p = 2.0914686968086877233e-9 * r + 2.5105217004720745164e-8;
  p = p * r + 2.7557273643110295328e-7;
  p = p * r + 2.755725540020642443e-6;
  p = p * r + 2.4801587325547741216e-5;
  p = p * r + 1.9841269874820625271e-4;
  p = p * r + 1.3888888888883748305e-3;
  p = p * r + 8.3333333333261351258e-3;
  p = p * r + 4.1666666666666669755e-2;
  p = p * r + 1.6666666666666670991e-1;
  p = p * r + 0.5;
  return p * (r * r) + r;
}

// x = n ln 2 + r: returns r, and 2^n's exponent bits in `bits` (for -exponent range < n < exponent range)
template <class V>
PYL_INLINE V reduce_exp(V x, Int<V>& bits) {
  typedef Lanes<Scalar<V>> L;
  V n = x * Scalar<V>(1.4426950408889634074) + L::round;
  bits = (Int<V>)n << L::mantissa;
  n -= L::round;
  return (x - n * L::ln2_hi) - n * L::ln2_lo;
}

#if defined(__AVX512F__)  // p 2^n, 0 where that is below every number
PYL_INLINE vf scaled(vf p, vf n) { return (vf)_mm512_maskz_scalef_ps((__mmask16)-1, (__m512)p, (__m512)n); }
PYL_INLINE vd scaled(vd p, vd n) { return (vd)_mm512_maskz_scalef_pd((__mmask8)-1, (__m512d)p, (__m512d)n); }
#endif

// e^x for x <= 88 (709), exactly 0 far down, NaN for NaN: the one in the inner loops. Above its range it gives some number.
// AVX-512 scales by 2^n in one instruction. Elsewhere 2^n is built as an integer that stops at 0, so that the far tail needs no
// comparison.
template <class V>
PYL_INLINE V exp_below(V x) {
  typedef Lanes<Scalar<V>> L;
  x = larger(splat<V>(L::exp_zero), x);
#if defined(__AVX512F__)
  V n = (x * Scalar<V>(1.4426950408889634074) + L::round) - L::round;
  return scaled(exp_tail((x - n * L::ln2_hi) - n * L::ln2_lo) + 1, n);
#else
  typedef typename L::IntScalar S;
  constexpr Scalar<V> round = L::round + L::bias;  // its last bits are those of 0 in the exponent's code
  V t = x * Scalar<V>(1.4426950408889634074) + round, n = t - round;
  V r = (x - n * L::ln2_hi) - n * L::ln2_lo;
  Int<V> floor = Int<V>{} + static_cast<S>(L::round_bits);
  Int<V> code = larger((Int<V>)t, floor) << L::mantissa;
  return (exp_tail(r) + 1) * (V)code;
#endif
}

template <class V>
PYL_INLINE V exp(V x) {
  typedef Lanes<Scalar<V>> L;
  V low = splat<V>(L::exp_min), high = splat<V>(L::exp_max);
  V clamped = where(x < low, low, x);
  clamped = where(clamped > high, high, clamped);
  Int<V> bits;
  V r = reduce_exp(clamped, bits);
  V y = (V)((Int<V>)(exp_tail(r) + 1) + bits);
  y = where(x > high, splat<V>(infinity<Scalar<V>>()), y);
  y = where(x < low, V{}, y);
  return where(x == x, y, x);
}

template <class V>
PYL_INLINE V expm1(V x) {
  typedef Lanes<Scalar<V>> L;
  V low = splat<V>(-40), high = splat<V>(L::exp_max);  // below, e^x - 1 rounds to -1
  V clamped = where(x < low, low, x);
  clamped = where(clamped > high, high, clamped);
  Int<V> bits;
  V r = reduce_exp(clamped, bits);
  V half = (V)(bits + (static_cast<typename L::IntScalar>(L::bias - 1) << L::mantissa));  // 2^n / 2: 2^128 is no float
  V y = (half * exp_tail(r) + (half - Scalar<V>(0.5))) * 2;
  y = where(x > high, splat<V>(infinity<Scalar<V>>()), y);
  return where(x == x, y, x);
}

// log((1 + s) / (1 - s)) = 2 s + s R(s^2)
PYL_INLINE vf log_tail(vf z) {
  vf p = 0.23332912804368642451f * z + 0.28550730844773806074f;
  p = p * z + 0.40000122633698782862f;
  return z * (p * z + 0.66666666553525361816f);
}
PYL_INLINE vd log_tail(vd z) {
  vd p = 0.14619343453512615192 * z + 0.1533148723586573324;
  p = p * z + 0.1818289618348308656;
  p = p * z + 0.22222211037816587724;
  p = p * z + 0.28571428626570203622;
  p = p * z + 0.39999999999898191947;
  return z * (p * z + 0.66666666666666697321);
}

template <class V>
PYL_INLINE V log(V x) {
  typedef Lanes<Scalar<V>> L;
  typedef Scalar<V> T;
  typedef typename L::IntScalar S;
  Int<V> tiny = x < L::smallest;  // scale numbers below the normal range up by 2^64
  V m = where(tiny, x * T(18446744073709551616.0), x);
  Int<V> bits = (Int<V>)m;
  Int<V> e = (bits >> L::mantissa) - S(L::bias);
  m = (V)((bits & ((S(1) << L::mantissa) - 1)) | (S(L::bias) << L::mantissa));
  Int<V> big = m > T(1.4142135623730951);
  m = where(big, m * T(0.5), m);
  e = where(big, e + 1, e);
  e = where(tiny, e - 64, e);
  V n = __builtin_convertvector(e, V);
  V f = m - 1;
  V s = f / (f + 2);
  V y = n * L::ln2_hi + ((f - s * (f - log_tail(s * s))) + n * L::ln2_lo);
  y = where(x == 0, splat<V>(-infinity<T>()), y);
  y = where(x == infinity<T>(), x, y);
  return where(x >= 0, y, splat<V>(static_cast<T>(__builtin_nan(""))));
}

// log(x) for x >= 1, and for 0 and NaN: a sum of exponentials relative to the largest
template <class V>
PYL_INLINE V log_sum(V x) {
  typedef Lanes<Scalar<V>> L;
  typedef Scalar<V> T;
  typedef typename L::IntScalar S;
  Int<V> bits = (Int<V>)x, big;
  V m = (V)((bits & ((S(1) << L::mantissa) - 1)) | (S(L::bias) << L::mantissa));
  big = m > T(1.4142135623730951);
  V n = __builtin_convertvector((bits >> L::mantissa) - S(L::bias) - big, V), f = where(big, m * T(0.5), m) - 1;
  V s = f / (f + 2);
  V y = n * L::ln2_hi + ((f - s * (f - log_tail(s * s))) + n * L::ln2_lo);
  return where(x > 0, y, where(x == 0, splat<V>(-infinity<T>()), x));
}
// log(1 + x) for x not far below 0, -1, inf and NaN: as n log 2 + log(1 + f), with f = x and all its digits where n = 0
template <class V>
PYL_INLINE V log1p_above(V x) {
  typedef Lanes<Scalar<V>> L;
  typedef Scalar<V> T;
  typedef typename L::IntScalar S;
  V u = x + 1, m = (V)(((Int<V>)u & ((S(1) << L::mantissa) - 1)) | (S(L::bias) << L::mantissa));
  Int<V> big = m > T(1.4142135623730951), e = ((Int<V>)u >> L::mantissa) - S(L::bias) - big;
  V n = __builtin_convertvector(e, V), f = where(e == 0, x, where(big, m * T(0.5), m) - 1), s = f / (f + 2);
  V y = n * L::ln2_hi + ((f - s * (f - log_tail(s * s))) + n * L::ln2_lo);
  return where((u > 0) & (u < infinity<T>()), y, where(u == 0, splat<V>(-infinity<T>()), u));
}
// log(1 + x) for -1/2 <= x <= 1: the rounding of 1 + x is divided out
template <class V>
PYL_INLINE V log1p(V x) {
  V u = x + 1, d = u - 1;
  return where(d == 0, x, log(u) * (x / d));
}
PYL_INLINE float square_root(float x) { return __builtin_sqrtf(x); }
PYL_INLINE double square_root(double x) { return __builtin_sqrt(x); }
template <class V>
PYL_INLINE V square_root(V x) {
  for (unsigned i = 0; i < sizeof(V) / sizeof(Scalar<V>); ++i) x[i] = __builtin_sqrt(x[i]);
  return x;
}
PYL_INLINE vf square_root(vf x) {
  for (int i = 0; i < Lanes<float>::W; ++i) x[i] = __builtin_sqrtf(x[i]);
  return x;
}
// x^y for x >= 0
template <class V>
PYL_INLINE V power(V x, Scalar<V> y) {
  return exp(y * log(x));
}
// tanh(x) and, in `slope`, 1 - tanh(x)^2 without cancellation
template <class V>
PYL_INLINE V tanh(V x, V& slope) {
  V e = expm1(-2 * absolute(x)), t = -e / (e + 2);
  V q = exp_below(-2 * absolute(x));
  slope = 4 * q / ((q + 1) * (q + 1));
  return where(x < 0, -t, t);
}

// ---- across lanes, in a fixed order: halves onto halves ----

template <class V>
PYL_INLINE Scalar<V> max_of(V v) {
  constexpr int W = sizeof(V) / sizeof(Scalar<V>);
  Scalar<V> m[W];
  for (int i = 0; i < W; ++i) m[i] = v[i];
  for (int half = W / 2; half; half /= 2)
    for (int i = 0; i < half; ++i) m[i] = larger(m[i + half], m[i]);
  return m[0];
}
template <class V>
PYL_INLINE double sum_of(V v) {
  constexpr int W = sizeof(V) / sizeof(Scalar<V>);
  double s[W];
  for (int i = 0; i < W; ++i) s[i] = v[i];
  for (int half = W / 2; half; half /= 2)
    for (int i = 0; i < half; ++i) s[i] += s[i + half];
  return s[0];
}
template <class I>
PYL_INLINE bool any(I mask) {
  typedef uint64_t Words __attribute__((vector_size(kBytes)));
  Words w = (Words)mask;
  uint64_t all = 0;
  for (int i = 0; i < kBytes / 8; ++i) all |= w[i];
  return all != 0;
}

// One bit a lane, lane 0 lowest; and back.
template <class T>
PYL_INLINE int bits_of(typename Lanes<T>::I mask) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4) return _mm512_movepi32_mask((__m512i)mask);
  else return _mm512_movepi64_mask((__m512i)mask);
#elif defined(__AVX2__)
  if constexpr (sizeof(T) == 4) return _mm256_movemask_ps((__m256)mask);
  else return _mm256_movemask_pd((__m256d)mask);
#else
  int bits = 0;
  for (int i = 0; i < Lanes<T>::W; ++i) bits |= (mask[i] & 1) << i;
  return bits;
#endif
}
template <class T>
PYL_INLINE typename Lanes<T>::I lanes_of(int bits) {
  typedef typename Lanes<T>::I I;
  I lane;
  for (int i = 0; i < Lanes<T>::W; ++i) lane[i] = typename Lanes<T>::IntScalar(1) << i;
  return ((I{} + bits) & lane) != 0;
}
// Writes the lanes whose bit is set side by side to p, where a whole vector has room; returns how many they are.
template <class V>
PYL_INLINE int put_lanes(Scalar<V>* p, V v, int bits) {
#if defined(__AVX512F__)
  if constexpr (sizeof(Scalar<V>) == 4) v = (V)_mm512_maskz_compress_ps((__mmask16)bits, (__m512)v);
  else v = (V)_mm512_maskz_compress_pd((__mmask8)bits, (__m512d)v);
  __builtin_memcpy(p, &v, sizeof v);
  return __builtin_popcount(bits);
#else
  int n = 0;
  for (; bits; bits &= bits - 1) p[n++] = v[__builtin_ctz(bits)];
  return n;
#endif
}
// The bits of lanes i.. of a long row of bits; i is a multiple of W. Put them in rising order of i.
template <class T>
PYL_INLINE void put_bits(uint8_t* row, int64_t i, int bits) {
  constexpr int W = Lanes<T>::W;
  if constexpr (W == 16) {
    uint16_t word = static_cast<uint16_t>(bits);
    __builtin_memcpy(row + i / 8, &word, 2);
  } else {
    int shift = W < 8 ? static_cast<int>(i % 8) : 0;
    row[i / 8] = static_cast<uint8_t>(shift ? row[i / 8] | bits << shift : bits);
  }
}
template <class T>
PYL_INLINE int get_bits(const uint8_t* row, int64_t i) {
  constexpr int W = Lanes<T>::W;
  if constexpr (W == 16) {
    uint16_t word;
    __builtin_memcpy(&word, row + i / 8, 2);
    return word;
  }
  return row[i / 8] >> (W < 8 ? i % 8 : 0);
}

// ---- memory ----

template <class T>
PYL_INLINE typename Lanes<T>::V load(const T* p) {
  typename Lanes<T>::V v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
template <class V>
PYL_INLINE void store_bytes(void* p, V v) {
  __builtin_memcpy(p, &v, sizeof v);
}
template <class T>
PYL_INLINE void store(T* p, typename Lanes<T>::V v) {
  store_bytes(p, v);
}
// The same past the caches, for memory that is larger than they are; p is aligned to the vector. A thread that has done so
// calls `fence` before others read.
template <class V>
PYL_INLINE void stream(void* p, V v) {
#if defined(__AVX512F__)
  if constexpr (sizeof(V) == 64) return _mm512_stream_si512(static_cast<__m512i*>(p), (__m512i)v);
#endif
#if defined(__AVX2__)
  if constexpr (sizeof(V) == 32) return _mm256_stream_si256(static_cast<__m256i*>(p), (__m256i)v);
#endif
  store_bytes(p, v);
}
PYL_INLINE void fence() {
#if defined(__AVX2__)
  _mm_sfence();
#endif
}
PYL_INLINE bool is_aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % kBytes == 0; }
// Brings a line of memory that will be read soon.
PYL_INLINE void fetch(const void* p) { __builtin_prefetch(p, 0, 2); }
// The first n < W lanes. AVX2 and AVX-512 have loads and stores under a mask; elsewhere lanes go one by one.
template <class T>
PYL_INLINE typename Lanes<T>::I first_lanes(int64_t n) {
  typename Lanes<T>::I index;
  for (int i = 0; i < Lanes<T>::W; ++i) index[i] = i;
  return index < static_cast<typename Lanes<T>::IntScalar>(n);
}
// n < W numbers, the rest of the lanes `fill`
template <class T>
PYL_INLINE typename Lanes<T>::V load_some(const T* p, int64_t n, T fill) {
  typedef typename Lanes<T>::V V;
#if defined(__AVX512F__)
  V v;
  if constexpr (sizeof(T) == 4) v = (V)_mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p);
  else v = (V)_mm512_maskz_loadu_pd((__mmask8)((1u << n) - 1), p);
  return where(first_lanes<T>(n), v, splat<V>(fill));
#elif defined(__AVX2__)
  auto mask = first_lanes<T>(n);
  V v;
  if constexpr (sizeof(T) == 4) v = (V)_mm256_maskload_ps(p, (__m256i)mask);
  else v = (V)_mm256_maskload_pd(p, (__m256i)mask);
  return where(mask, v, splat<V>(fill));
#else
  V v = splat<V>(fill);
  for (int64_t i = 0; i < n; ++i) v[i] = p[i];
  return v;
#endif
}
template <class T>
PYL_INLINE void store_some(T* p, int64_t n, typename Lanes<T>::V v) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4) _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1), (__m512)v);
  else _mm512_mask_storeu_pd(p, (__mmask8)((1u << n) - 1), (__m512d)v);
#elif defined(__AVX2__)
  if constexpr (sizeof(T) == 4) _mm256_maskstore_ps(p, (__m256i)first_lanes<T>(n), (__m256)v);
  else _mm256_maskstore_pd(p, (__m256i)first_lanes<T>(n), (__m256d)v);
#else
  for (int64_t i = 0; i < n; ++i) p[i] = v[i];
#endif
}

// A W-wide load of halves as floats, and back with round to nearest even.
typedef uint16_t vh __attribute__((vector_size(kBytes / 2)));
typedef Lanes<float>::U vu;
PYL_INLINE vu widen(const uint16_t* p) {
  vh h;
  __builtin_memcpy(&h, p, sizeof h);
  return __builtin_convertvector(h, vu);
}
// Two vectors of halves as one.
typedef uint16_t vhh __attribute__((vector_size(kBytes)));
PYL_INLINE vhh both(vh low, vh high) {
#if defined(__AVX512F__)
  return (vhh)_mm512_inserti64x4(_mm512_castsi256_si512((__m256i)low), (__m256i)high, 1);
#elif defined(__AVX2__)
  return (vhh)_mm256_set_m128i((__m128i)high, (__m128i)low);
#else
  vhh v;
  __builtin_memcpy(&v, &low, sizeof low);
  __builtin_memcpy(reinterpret_cast<char*>(&v) + sizeof low, &high, sizeof high);
  return v;
#endif
}
struct BF16 {
  static PYL_INLINE vf load(const uint16_t* p) { return (vf)(widen(p) << 16); }
  static PYL_INLINE vh halves(vf x) {
    vu b = (vu)x;
    vu rounded = (b + 0x7fff + ((b >> 16) & 1)) >> 16;
    return __builtin_convertvector(where(x == x, rounded, (vu){} + 0x7fc0), vh);
  }
};
struct F16 {
#if defined(__AVX512F__)
  static PYL_INLINE vf load(const uint16_t* p) { return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
  static PYL_INLINE vh halves(vf x) { return (vh)_mm512_cvtps_ph((__m512)x, 0); }
#elif defined(__F16C__)
  static PYL_INLINE vf load(const uint16_t* p) { return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
  static PYL_INLINE vh halves(vf x) { return (vh)_mm256_cvtps_ph((__m256)x, 0); }
#else
  static PYL_INLINE vf load(const uint16_t* p) {
    vu h = widen(p);
    vu magnitude = (h & 0x7fff) << 13;
    vf x = (vf)magnitude * 0x1p112f;  // moves the exponent's bias; exact for denormals too
    vu bits = where(magnitude >= 0x0f800000, magnitude | 0x7f800000, (vu)x);
    return (vf)(bits | ((h & 0x8000) << 16));
  }
  static PYL_INLINE vh halves(vf x) {
    vu sign = ((vu)x >> 16) & 0x8000;
    vf a = absolute(x);
    vu normal = (vu)a - (112u << 23);
    normal = (normal + 0xfff + ((normal >> 13) & 1)) >> 13;
    vu small = (vu)(a + 0.5f) - 0x3f000000;  // rounds to multiples of 2^-24
    vu h = where(a < 0x1p-14f, small, normal);
    h = where(a >= 65520.0f, (vu){} + 0x7c00, h);
    h = where(x == x, h, (vu){} + 0x7e00);
    return __builtin_convertvector(h | sign, vh);
  }
#endif
};

// n numbers at p (of type D, `stride` apart) to out, as T
template <class H>
inline void load_halves(const uint16_t* p, int64_t stride, int64_t n, float* out) {
  constexpr int W = Lanes<float>::W;
  int64_t i = 0;
  if (stride == 1)
    for (; i + W <= n; i += W) store(out + i, H::load(p + i));
  while (i < n) {
    uint16_t some[W] = {};
    int64_t m = n - i < W ? n - i : W;
    for (int64_t k = 0; k < m; ++k) some[k] = p[(i + k) * stride];
    store_some(out + i, m, H::load(some));
    i += m;
  }
}
// The same for n whole vectors side by side, and the largest of them.
template <class H>
inline float load_with_top(const uint16_t* p, int64_t n, float* out) {
  constexpr int W = Lanes<float>::W;
  vf top = splat<vf>(-infinity<float>());
  for (int64_t i = 0; i < n; i += W) {
    vf v = H::load(p + i);
    store(out + i, v);
    top = larger(v, top);
  }
  return max_of(top);
}
// Past the caches if `past`, see `stream`.
template <class H>
inline void store_halves(const float* in, int64_t n, uint16_t* p, int64_t stride, bool past) {
  constexpr int W = Lanes<float>::W;
  int64_t i = 0;
  if (stride == 1) {
    if (past && is_aligned(p))
      for (; i + 2 * W <= n; i += 2 * W) {
        stream(p + i, both(H::halves(load(in + i)), H::halves(load(in + i + W))));
      }
    for (; i + W <= n; i += W) store_bytes(p + i, H::halves(load(in + i)));
  }
  while (i < n) {
    int64_t m = n - i < W ? n - i : W;
    vh some = H::halves(load_some(in + i, m, 0.0f));
    for (int64_t k = 0; k < m; ++k) p[(i + k) * stride] = some[k];
    i += m;
  }
}
// Writes x to those of n places whose bit is set, 0 to the others.
inline void store_chosen(const uint8_t* bits, int64_t n, uint16_t x, uint16_t* p, bool past) {
  typedef uint16_t Halves __attribute__((vector_size(32)));
  Halves lane, yes = x - Halves{};
  for (int i = 0; i < 16; ++i) lane[i] = static_cast<uint16_t>(1 << i);
  int64_t i = 0;
  auto chosen = [&](int64_t at) {
    uint16_t word;
    __builtin_memcpy(&word, bits + at / 8, 2);
    return ((word - Halves{}) & lane) != 0 ? yes : Halves{};
  };
  if (past && reinterpret_cast<uintptr_t>(p) % 32 == 0)
    for (; i + 16 <= n; i += 16) stream(p + i, chosen(i));
  for (; i + 16 <= n; i += 16) store_bytes(p + i, chosen(i));
  for (; i < n; ++i) p[i] = bits[i / 8] >> (i % 8) & 1 ? x : 0;
}
template <class T, class D>
inline void copy_numbers(const T* p, int64_t stride, int64_t n, D* out, int64_t out_stride) {
  if (stride == 1 && out_stride == 1)
    for (int64_t i = 0; i < n; ++i) out[i] = static_cast<D>(p[i]);
  else
    for (int64_t i = 0; i < n; ++i) out[i * out_stride] = static_cast<D>(p[i * stride]);
}

inline void load_as(Dtype dtype, const void* base, int64_t at, int64_t stride, int64_t n, float* out) {
  switch (dtype) {
    case Dtype::f32:
      return copy_numbers(static_cast<const float*>(base) + at, stride, n, out, 1);
    case Dtype::f64:
      return copy_numbers(static_cast<const double*>(base) + at, stride, n, out, 1);
    case Dtype::bf16:
      return load_halves<BF16>(static_cast<const uint16_t*>(base) + at, stride, n, out);
    case Dtype::f16:
      return load_halves<F16>(static_cast<const uint16_t*>(base) + at, stride, n, out);
  }
}
inline void load_as(Dtype dtype, const void* base, int64_t at, int64_t stride, int64_t n, double* out) {
  if (dtype == Dtype::f64) return copy_numbers(static_cast<const double*>(base) + at, stride, n, out, 1);
  float some[64];
  for (int64_t i = 0; i < n; i += 64) {
    int64_t m = n - i < 64 ? n - i : 64;
    load_as(dtype, base, at + i * stride, stride, m, some);
    copy_numbers(some, 1, m, out + i, 1);
  }
}
inline void store_as(Dtype dtype, const float* in, int64_t n, void* base, int64_t at, int64_t stride, bool past = false) {
  switch (dtype) {
    case Dtype::f32:
      return copy_numbers(in, 1, n, static_cast<float*>(base) + at, stride);
    case Dtype::f64:
      return copy_numbers(in, 1, n, static_cast<double*>(base) + at, stride);
    case Dtype::bf16:
      return store_halves<BF16>(in, n, static_cast<uint16_t*>(base) + at, stride, past);
    case Dtype::f16:
      return store_halves<F16>(in, n, static_cast<uint16_t*>(base) + at, stride, past);
  }
}
inline void store_as(Dtype, const double* in, int64_t n, void* base, int64_t at, int64_t stride, bool = false) {
  copy_numbers(in, 1, n, static_cast<double*>(base) + at, stride);  // float64 logits only
}

}  // namespace PYL_ISA
