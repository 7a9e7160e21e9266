// A row times a matrix of weights. At batch 1 a product is one read of its weights, so these loops are built around the stream
// from memory: rows in order, fetched well ahead.

#pragma once

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "crew.h"
#include "lanes.h"

namespace products {

using at::Tensor;

// f(pointer to the weights in their own type)
template <typename F>
inline void with_weights(const Tensor& weight, F&& f) {
  switch (weight.scalar_type()) {
    case at::kHalf: return f(weight.const_data_ptr<at::Half>());
    case at::kBFloat16: return f(weight.const_data_ptr<at::BFloat16>());
    default: return f(weight.const_data_ptr<float>());
  }
}

// One row of a product. Called, never inlined: a row that is multiplied by itself gets the very number that the whole product gives it.
template <typename T>
[[gnu::noinline]] float row(const T* w, const float* x, int64_t k) {
  return lanes::dot(w, x, k);
}

// y [N] = W x for W [N, K] of 16 or 32 bits; activations and sums are floats. finish(begin, end): called by the member that has made
// those outputs.
template <typename F>
void dense(const crew::Member& member, const Tensor& weight, const float* x, float* y, F&& finish) {
  const int64_t n = weight.size(0), k = weight.size(1);
  with_weights(weight, [&](const auto* w) {
    member.share(n, std::max<int64_t>(1, 65536 / k), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) y[r] = row(w + r * k, x, k);
      finish(begin, end);
    });
  });
}

// 4-bit codes, in blocks of 16 outputs: codes [N / 16, K / 8, 64], where byte 4 o + i of one row of 64 holds input i of output o in
// its low half and input i + 4 in its high half; scales [N / 16, K / group, 2, 16], bfloat16: the scale s and the shift t of
// w = (code - 8) s + t. Inputs are taken in 16-bit fixed point with a scale for each group, as two bytes, so that whole-number
// instructions can multiply them: finer than bfloat16, whose mantissa has 8 bits.

#if RIVER_LANES == 16
using I = __m512i;
inline I bytes(const uint8_t* p) { return _mm512_loadu_si512(p); }
inline I spread(int32_t x) { return _mm512_set1_epi32(x); }
inline I low(I v) { return _mm512_and_si512(v, _mm512_set1_epi8(15)); }
inline I high(I v) { return low(_mm512_srli_epi16(v, 4)); }
inline I plus(I a, I b) { return _mm512_add_epi32(a, b); }
inline I times256(I v) { return _mm512_slli_epi32(v, 8); }
inline lanes::V floats(I v) { return _mm512_cvtepi32_ps(v); }
inline I dot4(I sum, I codes, I x) {
#ifdef __AVX512VNNI__
  return _mm512_dpbusd_epi32(sum, codes, x);
#else  // pairs add up to 2 * 15 * 128 at most, which 16 bits hold
  return plus(sum, _mm512_madd_epi16(_mm512_maddubs_epi16(codes, x), _mm512_set1_epi16(1)));
#endif
}
#elif RIVER_LANES == 8
using I = __m256i;
inline I bytes(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const I*>(p)); }
inline I spread(int32_t x) { return _mm256_set1_epi32(x); }
inline I low(I v) { return _mm256_and_si256(v, _mm256_set1_epi8(15)); }
inline I high(I v) { return low(_mm256_srli_epi16(v, 4)); }
inline I plus(I a, I b) { return _mm256_add_epi32(a, b); }
inline I times256(I v) { return _mm256_slli_epi32(v, 8); }
inline lanes::V floats(I v) { return _mm256_cvtepi32_ps(v); }
inline I dot4(I sum, I codes, I x) {
#ifdef __AVXVNNI__
  return _mm256_dpbusd_avx_epi32(sum, codes, x);
#else
  return plus(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(codes, x), _mm256_set1_epi16(1)));
#endif
}
#endif

// One row of inputs in fixed point: x = scale (256 high + low), with the sum of every group. A group that holds a value which is not finite has
// no scale that is a number, so every output says so.
struct Fixed {
  std::vector<int8_t> high, low;
  std::vector<float> scale, sum;

  void set(const float* x, int64_t k, int64_t group) {
    high.resize(k), low.resize(k), scale.resize(k / group), sum.resize(k / group);
    for (int64_t g = 0; g < k / group; ++g) {
      const float* in = x + g * group;
      const float most = lanes::largest<true>(in, group);
      if (!(most < INFINITY)) {
        std::fill_n(high.data() + g * group, group, int8_t{0}), std::fill_n(low.data() + g * group, group, int8_t{0});
        scale[g] = sum[g] = NAN;
        continue;
      }
      const float unit = std::max(most, 1e-30f) / 32512, inverse = 1 / unit;  // 127 * 256: both bytes stay signed
      int32_t total = 0;
      int8_t *h = high.data() + g * group, *l = low.data() + g * group;
      for (int64_t i = 0; i < group; ++i) {
        const auto whole = static_cast<int32_t>(in[i] * inverse + (in[i] < 0 ? -0.5f : 0.5f));
        const int32_t top = (whole + 128) >> 8;
        h[i] = static_cast<int8_t>(top), l[i] = static_cast<int8_t>(whole - 256 * top);
        total += whole;
      }
      scale[g] = unit, sum[g] = unit * total;
    }
  }
};

#if RIVER_LANES >= 8
// As `dense`, for 4-bit codes.
template <typename F>
void int4(const crew::Member& member, const Tensor& codes, const Tensor& scales, int64_t group, const float* x, float* y, F&& finish) {
  static thread_local Fixed fixed;
  constexpr int64_t L = lanes::N, parts = 16 / L;  // vectors that hold the 16 outputs of a block
  const int64_t blocks = codes.size(0), k = 8 * codes.size(1), groups = k / group;
  fixed.set(x, k, group);
  const auto* c = codes.const_data_ptr<uint8_t>();
  const auto* s = scales.const_data_ptr<at::BFloat16>();
  // The caller's, for all threads that ATen may bring.
  const auto *high_bytes = fixed.high.data(), *low_bytes = fixed.low.data();
  const auto *scale_of = fixed.scale.data(), *sum_of = fixed.sum.data();
  auto four = [](const int8_t* p) {
    int32_t x;
    __builtin_memcpy(&x, p, 4);
    return spread(x);
  };
  member.share(blocks, std::max<int64_t>(1, 8192 / k), [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      lanes::V out[parts];
      for (auto& v : out) v = lanes::set(0);
      const uint8_t* from = c + b * k * 8;
      const at::BFloat16* row = s + b * groups * 32;
      for (int64_t g = 0; g < groups; ++g, row += 32) {
        const int8_t *xh = high_bytes + g * group, *xl = low_bytes + g * group;
        I h[parts], l[parts], h2[parts], l2[parts];  // two sums of each, as one would wait for itself
        for (int64_t p = 0; p < parts; ++p) h[p] = l[p] = h2[p] = l2[p] = spread(0);
        for (int64_t i = 0; i < group; i += 8, from += 64) {
          __builtin_prefetch(from + lanes::AHEAD);
          const I h_first = four(xh + i), l_first = four(xl + i), h_last = four(xh + i + 4), l_last = four(xl + i + 4);
          for (int64_t p = 0; p < parts; ++p) {
            const I v = bytes(from + 4 * L * p), first = low(v), last = high(v);
            h[p] = dot4(h[p], first, h_first), l[p] = dot4(l[p], first, l_first);
            h2[p] = dot4(h2[p], last, h_last), l2[p] = dot4(l2[p], last, l_last);
          }
        }
        const lanes::V unit = lanes::set(scale_of[g]), sum = lanes::set(sum_of[g]), eight = lanes::set(-8 * sum_of[g]);
        for (int64_t p = 0; p < parts; ++p) {
          const lanes::V scale = lanes::widen(row + L * p), shift = lanes::widen(row + 16 + L * p);
          const lanes::V found = lanes::fma(floats(plus(times256(plus(h[p], h2[p])), plus(l[p], l2[p]))), unit, eight);
          out[p] = lanes::fma(scale, found, lanes::fma(shift, sum, out[p]));
        }
      }
      for (int64_t p = 0; p < parts; ++p) lanes::store(y + 16 * b + L * p, out[p]);
    }
    finish(16 * begin, 16 * end);
  });
}
#else
template <typename F>
void int4(const crew::Member&, const Tensor&, const Tensor&, int64_t, const float*, float*, F&&) {
  TORCH_CHECK(false, "4-bit products are not written for this processor");
}
#endif

inline void no_more(int64_t, int64_t) {}  // to finish with

}  // namespace products
