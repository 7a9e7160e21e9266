// The greedy token of an LM head without reading all of it: every row is scored with 8-bit copies of its weights, and
// only rows that the error bound leaves in the race are multiplied in full.

#pragma once

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <tuple>
#include <vector>

#include "lanes.h"
#include "layers.h"
#include "products.h"

namespace {

using at::Tensor;

// The head's input in 16-bit fixed point without a sign, as two bytes, for whole-number instructions: x = unit (256 high + low - 32768).
struct Unsigned {
  std::vector<uint8_t> high, low;
  float unit, apart;  // apart: length of the rounding error

  Unsigned(const float* x, int64_t k) : high(k), low(k) {
    std::vector<float> off(k);
    unit = std::max(lanes::largest<true>(x, k), 1e-30f) / 32512;
    for (int64_t i = 0; i < k; ++i) {
      const auto whole = static_cast<int32_t>(std::lrint(x[i] / unit));
      off[i] = x[i] - whole * unit;
      high[i] = static_cast<uint8_t>((whole + 32768) >> 8), low[i] = static_cast<uint8_t>((whole + 32768) & 255);
    }
    apart = std::sqrt(lanes::dot<false>(off.data(), off.data(), k));
  }
};

#if defined(__AVX512VNNI__) && RIVER_LANES == 16
#define RIVER_WHOLE 1
// Sum of codes times (256 high + low) over one row, exactly; the tail of a row that is no whole vector goes one by one.
inline int64_t whole_dot(const int8_t* codes, const uint8_t* high, const uint8_t* low, int64_t k) {
  __m512i h = _mm512_setzero_si512(), l = h;
  int64_t i = 0, rest = 0;
  for (; i + 64 <= k; i += 64) {
    __builtin_prefetch(codes + i + lanes::AHEAD);
    const __m512i c = _mm512_loadu_si512(codes + i);
    h = _mm512_dpbusd_epi32(h, _mm512_loadu_si512(high + i), c), l = _mm512_dpbusd_epi32(l, _mm512_loadu_si512(low + i), c);
  }
  for (; i < k; ++i) rest += codes[i] * (256 * high[i] + low[i]);
  return 256 * static_cast<int64_t>(_mm512_reduce_add_epi32(h)) + _mm512_reduce_add_epi32(l) + rest;
}
#endif

// state [1, K] float, the last layer's output -> what a head of `dtype` reads: its root-mean-square norm, rounded to that dtype.
Tensor head_input(const Tensor& state, const Tensor& norm, double eps, at::ScalarType dtype) {
  const int64_t k = state.numel();
  TORCH_CHECK(norm.numel() == k && state.is_contiguous() && norm.is_contiguous() && state.scalar_type() == at::kFloat, "shapes of a norm");
  std::vector<float> normed;
  rms_norm(state.const_data_ptr<float>(), norm.const_data_ptr<float>(), k, eps, normed);
  Tensor out = at::empty({1, k}, state.options().dtype(dtype));
  from_float(normed.data(), out.data_ptr(), dtype, k);
  return out;
}

// state, norm, eps: as for head_input. codes: int8 [V, K]; scales, errors, norms, sums: float [V], where errors[r] is
// the length of row r's rounding error, norms[r] at least the length of the row and of its rounded copy, sums[r] the sum of its codes.
// By Cauchy-Schwarz |score - exact| <= errors[r] |x| + norms[r] |x's own rounding error|; rounding inside either sum adds less than
// K 2^-22 norms[r] |x|. most: rows beyond which the full head is the cheaper one.
// Returns the row of the largest logit, the first of several; the rows that might have held it, ascending; and their exact logits. -1 and
// nothing if they are too many, or if the state is not finite: only the full head can show what is wrong then.
std::tuple<int64_t, Tensor, Tensor> screen(const Tensor& state, const Tensor& norm, double eps, const Tensor& codes, const Tensor& scales, const Tensor& errors, const Tensor& norms,
                                  const Tensor& sums, const Tensor& weight, int64_t most) {
  const int64_t rows = codes.size(0), k = codes.size(1);
  for (const Tensor& t : {scales, errors, norms, sums}) TORCH_CHECK(t.numel() == rows && t.scalar_type() == at::kFloat, "shapes of a screened head");
  TORCH_CHECK(state.numel() == k && weight.size(1) == k && codes.is_contiguous() && weight.is_contiguous(), "shapes of a screened head");
  std::vector<float> wide(k);
  to_float(head_input(state, norm, eps, weight.scalar_type()), wide.data(), k);
  const float *in = wide.data(), length = std::sqrt(k * mean_square(in, k));
  if (!(length < INFINITY)) return {-1, at::empty({0}, at::kLong), at::empty({0})};
  const auto* c = codes.const_data_ptr<int8_t>();
  const float *s = scales.const_data_ptr<float>(), *e = errors.const_data_ptr<float>();
  const float *n = norms.const_data_ptr<float>(), *total = sums.const_data_ptr<float>();
#ifdef RIVER_WHOLE
  const Unsigned whole(in, k);
  const float apart = whole.apart + length * k * 0x1p-22f;
#else
  const float apart = length * k * 0x1p-22f;
#endif
  constexpr int64_t PART = 1024;  // rows of one task
  const int64_t parts = (rows + PART - 1) / PART;
  static thread_local std::vector<float> score, reach;
  score.resize(rows), reach.resize(rows);
  float *score_of = score.data(), *reach_of = reach.data();  // the caller's, for all threads
  std::vector<float> lower(parts), upper(parts);  // the largest logit of a part is at least, at most this
  at::parallel_for(0, parts, 1, [&](int64_t begin, int64_t end) {
    for (int64_t part = begin; part < end; ++part) {
      lower[part] = upper[part] = -INFINITY;
      for (int64_t r = part * PART; r < std::min(rows, (part + 1) * PART); ++r) {
#ifdef RIVER_WHOLE
        const int64_t found = whole_dot(c + r * k, whole.high.data(), whole.low.data(), k) - 32768 * static_cast<int64_t>(total[r]);
        const float value = s[r] * whole.unit * found;
#else
        const float value = s[r] * lanes::dot(c + r * k, in, k);
#endif
        const float most_off = e[r] * length + n[r] * apart;
        score_of[r] = value, reach_of[r] = most_off;
        lower[part] = std::max(lower[part], value - most_off), upper[part] = std::max(upper[part], value + most_off);
      }
    }
  });
  const float least = *std::max_element(lower.begin(), lower.end());  // the largest logit of all is at least this
  std::vector<int64_t> left;
  for (int64_t part = 0; part < parts; ++part) {
    if (!(upper[part] >= least)) continue;
    for (int64_t r = part * PART; r < std::min(rows, (part + 1) * PART); ++r) {
      if (score_of[r] + reach_of[r] >= least) left.push_back(r);
    }
  }
  if (left.empty() || static_cast<int64_t>(left.size()) > most) return {-1, at::empty({0}, at::kLong), at::empty({0})};
  Tensor exact = at::empty({static_cast<int64_t>(left.size())}, at::kFloat);
  products::with_weights(weight, [&](const auto* w) {
    for (size_t i = 0; i < left.size(); ++i) exact.data_ptr<float>()[i] = products::row(w + left[i] * k, in, k);
  });
  const float* logits = exact.const_data_ptr<float>();
  return {left[std::max_element(logits, logits + left.size()) - logits], at::tensor(left, at::kLong), exact};
}

}  // namespace
