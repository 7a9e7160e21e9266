// Attention of one row over one layer's cache. The query heads of a key/value head share every key that is read.

#pragma once

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "lanes.h"

namespace attention {

// Keys of one task: enough tasks for the threads at a short context, few enough partial results at a long one. A multiple of every
// vector's length, so that a chunk's scores can be handled in whole vectors.
inline int64_t chunk_of(int64_t keys) { return std::max<int64_t>(64, std::min<int64_t>(512, keys / 8 / 64 * 64)); }

// What the tasks of one call leave behind, by key/value head and chunk: for each of its query heads the largest score, the sum of
// exponentials, and the values weighted with them.
struct Partial {
  std::vector<float> most, total, values;
};

// out [heads, head_dim] for query [heads, head_dim], both floats. keys, values: entries 0 .. count - 1 of one layer's cache, whose
// heads are `head_stride` elements apart and whose entries `entry_stride`.
template <typename T>
void one_row(const float* query, const T* keys, const T* values, int64_t count, int64_t head_stride, int64_t entry_stride,
             int64_t kv_heads, int64_t per_kv, int64_t head_dim, float* out, Partial& partial) {
  const int64_t chunk = chunk_of(count), chunks = (count + chunk - 1) / chunk, heads = kv_heads * per_kv;
  const float scale = 1 / std::sqrt(static_cast<float>(head_dim));
  partial.most.resize(chunks * heads), partial.total.resize(chunks * heads), partial.values.resize(chunks * heads * head_dim);
  float *most = partial.most.data(), *total = partial.total.data(), *sums = partial.values.data();
  // A task of few keys is over sooner than another thread has woken.
  const int64_t grain = std::max<int64_t>(1, 16384 / (chunk * per_kv * head_dim));
  at::parallel_for(0, kv_heads * chunks, grain, [&](int64_t begin, int64_t end) {
    std::vector<float> scores(chunk * per_kv);
    for (int64_t task = begin; task < end; ++task) {
      const int64_t head = task / chunks, part = task % chunks, first = part * chunk, n = std::min(chunk, count - first);
      const float* q = query + head * per_kv * head_dim;
      const T *k = keys + head * head_stride + first * entry_stride, *v = values + head * head_stride + first * entry_stride;
      for (int64_t i = 0; i < n; ++i) {
        for (int64_t h = 0; h < per_kv; ++h) scores[h * chunk + i] = scale * lanes::dot<false>(k + i * entry_stride, q + h * head_dim, head_dim);
      }
      const int64_t at = part * heads + head * per_kv;
      for (int64_t h = 0; h < per_kv; ++h) {
        float* s = scores.data() + h * chunk;
        const float top = *std::max_element(s, s + n);
        // Whole vectors: what lies beyond the last key is never read, and the buffer has room for it.
        for (int64_t i = 0; i < n; i += lanes::N) lanes::store(s + i, lanes::exp(lanes::widen(s + i) - lanes::set(top)));
        float sum = 0;
        for (int64_t i = 0; i < n; ++i) sum += s[i];
        most[at + h] = top, total[at + h] = sum;
        float* into = sums + (at + h) * head_dim;
        int64_t d = 0;
        for (; d + lanes::N <= head_dim; d += lanes::N) {
          lanes::V a = lanes::set(0), b = a;
          int64_t i = 0;
          for (; i + 2 <= n; i += 2) {
            a = lanes::fma(lanes::set(s[i]), lanes::widen(v + i * entry_stride + d), a);
            b = lanes::fma(lanes::set(s[i + 1]), lanes::widen(v + (i + 1) * entry_stride + d), b);
          }
          if (i < n) a = lanes::fma(lanes::set(s[i]), lanes::widen(v + i * entry_stride + d), a);
          lanes::store(into + d, a + b);
        }
        for (; d < head_dim; ++d) {
          into[d] = 0;
          for (int64_t i = 0; i < n; ++i) into[d] += s[i] * static_cast<float>(v[i * entry_stride + d]);
        }
      }
    }
  });
  for (int64_t h = 0; h < heads; ++h) {
    float top = -INFINITY, sum = 0;
    for (int64_t part = 0; part < chunks; ++part) top = std::max(top, most[part * heads + h]);
    std::fill(out + h * head_dim, out + (h + 1) * head_dim, 0.0f);
    for (int64_t part = 0; part < chunks; ++part) {
      const float weight = std::exp(most[part * heads + h] - top);
      sum += weight * total[part * heads + h];
      const float* from = sums + (part * heads + h) * head_dim;
      for (int64_t d = 0; d < head_dim; ++d) out[h * head_dim + d] += weight * from[d];
    }
    for (int64_t d = 0; d < head_dim; ++d) out[h * head_dim + d] /= sum;
  }
}

}  // namespace attention
