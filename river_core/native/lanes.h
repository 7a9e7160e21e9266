// Vectors of floats, as wide as this processor has them, and how weights of every dtype become floats on the way into one.

#pragma once

#include <ATen/ATen.h>

#include <cstdint>

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>
#endif

namespace lanes {

#if defined(__AVX512F__) && defined(__AVX512BW__)
#define RIVER_LANES 16

using V = __m512;
constexpr int64_t N = RIVER_LANES;
inline V set(float x) { return _mm512_set1_ps(x); }
inline V widen(const float* p) { return _mm512_loadu_ps(p); }
inline V widen(const at::Half* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
inline V widen(const at::BFloat16* p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 16));
}
inline V widen(const int8_t* p) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))); }
inline void store(float* p, V v) { _mm512_storeu_ps(p, v); }
inline V fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
inline float sum(V v) { return _mm512_reduce_add_ps(v); }

#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define RIVER_LANES 8

using V = __m256;
constexpr int64_t N = RIVER_LANES;
inline V set(float x) { return _mm256_set1_ps(x); }
inline V widen(const float* p) { return _mm256_loadu_ps(p); }
inline V widen(const at::Half* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline V widen(const at::BFloat16* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 16));
}
inline V widen(const int8_t* p) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)))); }
inline void store(float* p, V v) { _mm256_storeu_ps(p, v); }
inline V fma(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
inline float sum(V v) {
  __m128 half = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  half = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}

#else
#define RIVER_LANES 4

typedef float V __attribute__((vector_size(16)));
constexpr int64_t N = RIVER_LANES;
inline V set(float x) { return V{x, x, x, x}; }
template <typename T>
inline V widen(const T* p) {
  return V{static_cast<float>(p[0]), static_cast<float>(p[1]), static_cast<float>(p[2]), static_cast<float>(p[3])};
}
inline void store(float* p, V v) { __builtin_memcpy(p, &v, sizeof v); }
inline V fma(V a, V b, V c) { return a * b + c; }
inline float sum(V v) { return (v[0] + v[1]) + (v[2] + v[3]); }

#endif

// Bytes that a stream of weights is fetched ahead. A processor's own prefetcher stops at every page of 4 KB.
constexpr int64_t AHEAD = 6144;

// Sums are written out in vectors here, never left to a compiler that may reorder them: one that may also takes (x + c) - c for x.

// Dot product of n weights and n floats, summed in floats. FAR: the weights come from memory.
template <bool FAR = true, typename T>
inline float dot(const T* w, const float* x, int64_t n) {
  V a = set(0), b = a, c = a, d = a;
  int64_t i = 0;
  for (; i + 4 * N <= n; i += 4 * N) {
    for (int64_t line = 0; FAR && line < static_cast<int64_t>(4 * N * sizeof(T)); line += 64) {
      __builtin_prefetch(reinterpret_cast<const char*>(w + i) + AHEAD + line);
    }
    a = fma(widen(w + i), widen(x + i), a);
    b = fma(widen(w + i + N), widen(x + i + N), b);
    c = fma(widen(w + i + 2 * N), widen(x + i + 2 * N), c);
    d = fma(widen(w + i + 3 * N), widen(x + i + 3 * N), d);
  }
  for (; i + N <= n; i += N) a = fma(widen(w + i), widen(x + i), a);
  float rest = 0;
  for (; i < n; ++i) rest += static_cast<float>(w[i]) * x[i];
  return sum((a + b) + (c + d)) + rest;
}

// The largest of n floats, as they are or without their signs; no number where one of them is not finite.
template <bool MAGNITUDE = false>
inline float largest(const float* x, int64_t n) {
  auto take = [](auto v, auto zero) {
    if constexpr (MAGNITUDE) v = v < zero ? zero - v : v;
    return v;
  };
  float most = take(x[0], 0.0f), odd = 0 * x[0], each[N];  // 0 times what is not finite is no number
  int64_t i = 0;
  if (n >= N) {
    V top = take(widen(x), set(0)), odds = set(0) * widen(x);
    for (i = N; i + N <= n; i += N) {
      const V in = widen(x + i), v = take(in, set(0));
      top = v > top ? v : top, odds = fma(in, set(0), odds);
    }
    store(each, top);
    for (float one : each) most = most > one ? most : one;
    odd += sum(odds);
  }
  for (; i < n; ++i) most = most > take(x[i], 0.0f) ? most : take(x[i], 0.0f), odd += 0 * x[i];
  return most + odd;
}

// e^x to about two units in the last place; below -87 it is 0 for all that matters here, above 88 as large as floats go. What is no number
// stays none.
inline V exp(V x) {
  typedef int32_t Whole __attribute__((vector_size(4 * N)));
  constexpr float magic = 12582912;  // 1.5 * 2^23: adding it leaves the nearest whole number in the low bits
  const V asked = x;
  x = x < set(-87) ? set(-87) : x;
  x = x > set(88) ? set(88) : x;
  const V shifted = fma(x, set(1.44269504f), set(magic)), n = shifted - set(magic);
  const V r = fma(n, set(2.12194440e-4f), fma(n, set(-0.693359375f), x));  // x - n ln 2, |r| <= ln 2 / 2
  V y = set(1.9875691500e-4f);
  for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f}) y = fma(y, r, set(c));
  y = fma(y, r * r, r + set(1));
  y = (V)((Whole)y + ((Whole)shifted << 23));
  return asked == asked ? y : asked;
}

}  // namespace lanes
