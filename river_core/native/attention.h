// Attention of one row over one layer's cache. The query heads of a key/value head share every key that is read.

#pragma once

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "crew.h"
#include "lanes.h"

namespace attention {

// Keys of one task: enough tasks for the threads at a short context, few enough partial results at a long one. A multiple of every
// vector's length, so that a chunk's scores can be handled in whole vectors.
inline int64_t chunk_of(int64_t keys) { return std::max<int64_t>(32, std::min<int64_t>(512, keys / 8 / 32 * 32)); }

inline int64_t chunks_of(int64_t keys) { return (keys + chunk_of(keys) - 1) / chunk_of(keys); }

// What the tasks of one call leave behind, by key/value head and chunk: for each of its query heads the largest score, the sum of
// exponentials, and the values weighted with them.
struct Partial {
  std::vector<float> most, total, values;

  // For up to `count` keys. Chunks grow with the keys, so there may be more of them at fewer keys, but never more than 16 then.
  void make_room(int64_t count, int64_t heads, int64_t head_dim) {
    const int64_t chunks = std::max<int64_t>(16, chunks_of(count));
    most.resize(chunks * heads), total.resize(chunks * heads), values.resize(chunks * heads * head_dim);
  }
};

// scores [H, chunk] of H query heads [H, head_dim] over n keys; every key is widened once for all of them.
template <int H, typename T>
void scores_of(const float* query, const T* keys, int64_t n, int64_t stride, int64_t head_dim, float scale, float* scores, int64_t chunk) {
  for (int64_t i = 0; i < n; ++i, keys += stride) {
    lanes::V sums[H];
    for (auto& v : sums) v = lanes::set(0);
    int64_t d = 0;
    for (; d + lanes::N <= head_dim; d += lanes::N) {
      const lanes::V key = lanes::widen(keys + d);
      for (int h = 0; h < H; ++h) sums[h] = lanes::fma(key, lanes::widen(query + h * head_dim + d), sums[h]);
    }
    for (int h = 0; h < H; ++h) {
      float score = lanes::sum(sums[h]);
      for (int64_t rest = d; rest < head_dim; ++rest) score += static_cast<float>(keys[rest]) * query[h * head_dim + rest];
      scores[h * chunk + i] = scale * score;
    }
  }
}

// out [H, head_dim]: n values weighted with weights [H, chunk]; P vectors of every head at a time, as many sums as do not wait for
// one another.
template <int H, int P, typename T>
int64_t weigh_from(int64_t d, const float* weights, int64_t chunk, const T* values, int64_t n, int64_t stride, int64_t head_dim, float* out) {
  for (; d + P * lanes::N <= head_dim; d += P * lanes::N) {
    lanes::V sums[H * P];
    for (auto& v : sums) v = lanes::set(0);
    for (int64_t i = 0; i < n; ++i) {
      for (int p = 0; p < P; ++p) {
        const lanes::V value = lanes::widen(values + i * stride + d + p * lanes::N);
        for (int h = 0; h < H; ++h) sums[h * P + p] = lanes::fma(lanes::set(weights[h * chunk + i]), value, sums[h * P + p]);
      }
    }
    for (int h = 0; h < H; ++h) {
      for (int p = 0; p < P; ++p) lanes::store(out + h * head_dim + d + p * lanes::N, sums[h * P + p]);
    }
  }
  return d;
}

// One task: H query heads over n keys and values of their key/value head. Leaves their largest scores, sums of exponentials and
// weighted values, none of them a number if a score is not finite; scores: room for [H, chunk].
template <int H, typename T>
void few_heads(const float* query, const T* keys, const T* values, int64_t n, int64_t stride, int64_t head_dim, float scale, float* scores,
          int64_t chunk, float* most, float* total, float* sums) {
  scores_of<H>(query, keys, n, stride, head_dim, scale, scores, chunk);
  for (int h = 0; h < H; ++h) {
    float* s = scores + h * chunk;
    const float top = lanes::largest(s, n);
    auto raise = [&](int64_t i) {
      const lanes::V e = lanes::exp(lanes::widen(s + i) - lanes::set(top));
      lanes::store(s + i, e);
      return e;
    };
    lanes::V sums_of = lanes::set(0);
    int64_t i = 0;
    for (; i + lanes::N <= n; i += lanes::N) sums_of = sums_of + raise(i);
    float sum = lanes::sum(sums_of);
    if (i < n) raise(i);  // a whole vector: what lies beyond the last key is never read, and the buffer has room for it
    for (; i < n; ++i) sum += s[i];
    most[h] = top, total[h] = sum;
  }
  int64_t d = weigh_from<H, 2>(0, scores, chunk, values, n, stride, head_dim, sums);
  d = weigh_from<H, 1>(d, scores, chunk, values, n, stride, head_dim, sums);
  for (; d < head_dim; ++d) {
    for (int h = 0; h < H; ++h) {
      float sum = 0;
      for (int64_t i = 0; i < n; ++i) sum += scores[h * chunk + i] * static_cast<float>(values[i * stride + d]);
      sums[h * head_dim + d] = sum;
    }
  }
}

// out [heads, head_dim] for query [heads, head_dim], both floats. keys, values: entries 0 .. count - 1 of one layer's cache, whose
// heads are `head_stride` elements apart and whose entries `entry_stride`. Every member gets all of `out`, which is its own; `partial` is
// shared, and has room.
template <typename T>
void one_row(const crew::Member& member, const float* query, const T* keys, const T* values, int64_t count, int64_t head_stride, int64_t entry_stride,
             int64_t kv_heads, int64_t per_kv, int64_t head_dim, float* out, Partial& partial) {
  const int64_t chunk = chunk_of(count), chunks = chunks_of(count), heads = kv_heads * per_kv;
  const float scale = 1 / std::sqrt(static_cast<float>(head_dim));
  float *most = partial.most.data(), *total = partial.total.data(), *sums = partial.values.data();
  // A task of few keys is over sooner than another thread has woken.
  const int64_t grain = std::max<int64_t>(1, 16384 / (chunk * per_kv * head_dim));
  member.share(kv_heads * chunks, grain, [&](int64_t begin, int64_t end) {
    static thread_local std::vector<float> scores;
    scores.resize(chunk * 4);  // of the query heads that go through a task together
    for (int64_t task = begin; task < end; ++task) {
      const int64_t head = task / chunks, part = task % chunks, first = part * chunk, n = std::min(chunk, count - first);
      const T *k = keys + head * head_stride + first * entry_stride, *v = values + head * head_stride + first * entry_stride;
      for (int64_t h = 0; h < per_kv;) {
        const int64_t q = head * per_kv + h, at = part * heads + q;
        auto some = [&]<int H>() {
          few_heads<H>(query + q * head_dim, k, v, n, entry_stride, head_dim, scale, scores.data(), chunk, most + at, total + at, sums + at * head_dim);
          h += H;
        };
        const int64_t left = per_kv - h;
        if (left >= 4) some.template operator()<4>();
        else if (left == 3) some.template operator()<3>();
        else if (left == 2) some.template operator()<2>();
        else some.template operator()<1>();
      }
    }
  });
  member.meet();
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
