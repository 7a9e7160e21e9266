// Decoder layers for one row, called once for a run of layers: their products, ours or ATen's, attention, and the small operations
// between them written out. At batch 1 a small model spends as long on calling those operations one by one as on the products themselves.

#pragma once

#include <torch/custom_class.h>

#include <ATen/ATen.h>
#include <ATen/ops/_weight_int4pack_mm_for_cpu.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <tuple>
#include <vector>

#include "attention.h"
#include "crew.h"
#include "products.h"

namespace {

using at::Tensor;

// Rows between float and the dtype of a product; loops that a compiler turns into vector code.

void from_float(const float* in, void* out, at::ScalarType dtype, int64_t n) {
  if (dtype == at::kFloat) {
    std::copy(in, in + n, static_cast<float*>(out));
  } else if (dtype == at::kBFloat16) {
    auto* to = static_cast<uint16_t*>(out);
    for (int64_t i = 0; i < n; ++i) {
      uint32_t bits;
      __builtin_memcpy(&bits, in + i, 4);
      const uint32_t nearest = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;  // ties to even
      to[i] = static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : nearest);  // rounding would carry a NaN into another number
    }
  } else {
    auto* to = static_cast<at::Half*>(out);
    int64_t i = 0;
#ifdef __F16C__
    for (; i + 8 <= n; i += 8) {
      auto eight = _mm256_cvtps_ph(_mm256_loadu_ps(in + i), _MM_FROUND_TO_NEAREST_INT);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), eight);
    }
#endif
    for (; i < n; ++i) to[i] = in[i];
  }
}

template <typename T>
void widen(const T* in, float* out, int64_t n) {
  int64_t i = 0;
  for (; i + lanes::N <= n; i += lanes::N) lanes::store(out + i, lanes::widen(in + i));
  for (; i < n; ++i) out[i] = in[i];
}

void to_float(const Tensor& in, float* out, int64_t n) {
  products::with_weights(in, [&](const auto* from) { widen(from, out, n); });
}

struct Product {
  Tensor weight;            // [N, K], or 4-bit codes: ATen's packing [N, K / 2], or blocks of 16 outputs (see products.h)
  Tensor scales_and_zeros;  // defined for 4-bit codes
  Tensor bias;              // [N] float, or undefined
  int64_t group = 0;
  bool ours = false;        // the loops of products.h instead of ATen's kernels

  int64_t inputs() const { return weight.dim() == 3 ? 8 * weight.size(1) : group ? scales_and_zeros.size(0) * group : weight.size(1); }
  int64_t outputs() const { return weight.dim() == 3 ? 16 * weight.size(0) : weight.size(0); }
  at::ScalarType dtype() const { return group ? at::kBFloat16 : weight.scalar_type(); }

  // y [N] float = W x + b, for x [K] float, by all members; finish(begin, end) is called by the one that has made those outputs.
  template <typename F>
  void operator()(const crew::Member& member, const float* x, int64_t k, float* y, F&& finish) const {
    auto done = [&](int64_t begin, int64_t end) {
      if (bias.defined()) {
        const float* b = bias.const_data_ptr<float>();
        for (int64_t i = begin; i < end; ++i) y[i] += b[i];
      }
      finish(begin, end);
    };
    if (ours && !group) {
      products::dense(member, weight, x, y, done);
    } else if (ours) {
      products::int4(member, weight, scales_and_zeros, group, x, y, done);
    } else {
      Tensor row = at::empty({1, k}, at::TensorOptions().dtype(dtype()));
      from_float(x, row.data_ptr(), dtype(), k);
      Tensor out = group ? at::_weight_int4pack_mm_for_cpu(row, weight, group, scales_and_zeros) : at::linear(row, weight);
      to_float(out, y, outputs());
      done(0, outputs());
    }
  }
};

struct Layer {
  Product qkv, o, gate_up, down;
  Tensor input_norm, post_norm, qk_norm;
  int64_t window = 0;

  std::array<const Product*, 4> products() const { return {&qkv, &o, &gate_up, &down}; }  // in the order of a step
};

float mean_square(const float* x, int64_t n) { return lanes::dot<false>(x, x, n) / n; }

// 1 / root of the mean square of x; no number where that square is not finite, since 0 would hide it.
float norm_scale(const float* x, int64_t n, float eps) {
  const float square = mean_square(x, n);
  return square < INFINITY ? 1.0f / std::sqrt(square + eps) : NAN;
}

void rms_norm(const float* x, const float* weight, int64_t n, float eps, std::vector<float>& out) {
  const float scale = norm_scale(x, n, eps);
  out.resize(n);
  for (int64_t i = 0; i < n; ++i) out[i] = scale * x[i] * weight[i];
}

double cosine(const float* a, const float* b, int64_t n) {
  lanes::V abs = lanes::set(0), aas = abs, bbs = abs, abs2 = abs, aas2 = abs, bbs2 = abs;  // two of each, as one would wait for itself
  int64_t i = 0;
  for (; i + 2 * lanes::N <= n; i += 2 * lanes::N) {
    const lanes::V x = lanes::widen(a + i), y = lanes::widen(b + i), x2 = lanes::widen(a + i + lanes::N), y2 = lanes::widen(b + i + lanes::N);
    abs = lanes::fma(x, y, abs), aas = lanes::fma(x, x, aas), bbs = lanes::fma(y, y, bbs);
    abs2 = lanes::fma(x2, y2, abs2), aas2 = lanes::fma(x2, x2, aas2), bbs2 = lanes::fma(y2, y2, bbs2);
  }
  float ab = lanes::sum(abs + abs2), aa = lanes::sum(aas + aas2), bb = lanes::sum(bbs + bbs2);
  for (; i < n; ++i) ab += a[i] * b[i], aa += a[i] * a[i], bb += b[i] * b[i];
  return ab / std::sqrt(std::max(static_cast<double>(aa) * bb, 1e-30));
}

// out = silu(gate) * up
void silu_times(const float* gate, const float* up, int64_t n, std::vector<float>& out) {
  out.resize(n);
  int64_t i = 0;
  for (; i + lanes::N <= n; i += lanes::N) {
    const lanes::V g = lanes::widen(gate + i);
    lanes::store(out.data() + i, g / (lanes::set(1) + lanes::exp(lanes::set(0) - g)) * lanes::widen(up + i));
  }
  for (; i < n; ++i) out[i] = gate[i] / (1 + std::exp(-gate[i])) * up[i];
}

// One head of a row, head_dim floats, turned to its position by rotary_dim / 2 cosines and sines; what lies beyond rotary_dim stays.
void rotate(const float* head, const float* cos, const float* sin, int64_t head_dim, int64_t rotary_dim, float* turned) {
  const int64_t half = rotary_dim / 2;
  for (int64_t i = 0; i < half; ++i) turned[i] = head[i] * cos[i] - head[half + i] * sin[i];
  for (int64_t i = 0; i < half; ++i) turned[half + i] = head[half + i] * cos[i] + head[i] * sin[i];
  std::copy(head + rotary_dim, head + head_dim, turned + rotary_dim);
}

// The layers of one backbone or one river; immutable once filled.
struct Stack : torch::CustomClassHolder {
  std::vector<Layer> layers;
  int64_t heads, kv_heads, head_dim, rotary_dim;
  double eps;

  Stack(int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t rotary_dim, double eps)
      : heads(heads), kv_heads(kv_heads), head_dim(head_dim), rotary_dim(rotary_dim), eps(eps) {}

  // products: four of (weight or codes, scales and zeros, bias), absent tensors empty; groups: 0 = dense; ours: products by the loops
  // of products.h, which want 4-bit codes in blocks.
  void add(const std::vector<Tensor>& products, const std::vector<int64_t>& groups, const std::vector<Tensor>& norms, int64_t window,
           bool ours) {
    TORCH_CHECK(products.size() == 12 && groups.size() == 4 && norms.size() == 3, "a layer has four products and three norms");
    auto defined = [](const Tensor& t) { return t.numel() ? t : Tensor(); };
    auto product = [&](int64_t i) {
      TORCH_CHECK(!groups[i] || (products[3 * i].dim() == 3) == ours, "codes are laid out for the other kernel");
      return Product{products[3 * i], defined(products[3 * i + 1]), defined(products[3 * i + 2]), groups[i], ours};
    };
    layers.push_back({product(0), product(1), product(2), product(3), norms[0], norms[1], defined(norms[2]), window});
  }

  // Layers first .. last - 1 over one row. hidden: [1, d] float. cache: [layers, 2, kv heads, capacity, head_dim]; layer l
  // writes its entry slots[l - first] (or slots[0], if there is one) and attends to all entries up to it. Stops after a layer whose
  // input and output have a cosine above tau; 2: never. Returns the state after every layer that ran, each [1, d], and those cosines.
  std::tuple<std::vector<Tensor>, std::vector<double>> run(const Tensor& hidden, int64_t first, int64_t last, const Tensor& cache,
                                                           const std::vector<int64_t>& slots, const Tensor& cos, const Tensor& sin,
                                                           double tau) const {
    TORCH_CHECK(0 <= first && first <= last && last <= static_cast<int64_t>(layers.size()), "no such layers");
    TORCH_CHECK(hidden.is_contiguous() && cos.is_contiguous() && sin.is_contiguous() && cache.stride(4) == 1, "rows must be contiguous");
    TORCH_CHECK(slots.size() == 1 || static_cast<int64_t>(slots.size()) == last - first, "a slot for every layer, or one for all");
    for (int64_t slot : slots) TORCH_CHECK(0 <= slot && slot < cache.size(3), "no such slot");
    const int64_t d = hidden.size(-1);
    Tensor states = at::empty({last - first, 1, d}, hidden.options());
    Shared shared = room(first, last, *std::max_element(slots.begin(), slots.end()) + 1);
    std::vector<double> similarities;
    with_members(first, last, [&](const crew::Member& member) {
      std::vector<float> x;
      const float* h = hidden.const_data_ptr<float>();
      for (int64_t l = first; l < last; ++l) {
        float* out = states.data_ptr<float>() + (l - first) * d;
        attend(member, layers[l], h, d, l, cache, slots.size() == 1 ? slots[0] : slots[l - first], cos, sin, shared, x, out);
        feed_forward(member, layers[l], d, shared, x, out);
        const double similarity = cosine(h, out, d);  // every member finds the same
        if (member.index == 0) similarities.push_back(similarity);
        if (similarity > tau) break;
        h = out;
      }
    });
    return {states.narrow(0, 0, similarities.size()).unbind(0), similarities};
  }

  // The products of layers first .. last - 1 in the order of a step, and nothing else: the floor that a step is measured against.
  void products_only(int64_t first, int64_t last) const {
    Shared shared = room(first, last, 1);
    with_members(first, last, [&](const crew::Member& member) {
      std::vector<float> x;
      for (int64_t l = first; l < last; ++l) {
        for (const Product* product : layers[l].products()) {
          x.assign(product->inputs(), 0.5f);
          (*product)(member, x.data(), product->inputs(), shared.y.data(), products::no_more);
          member.meet();  // the next product would need all of this one
        }
      }
    });
  }

 private:
  // What the members of one call make together: the outputs of products, the heads of the row in their places, parts of attention.
  struct Shared {
    std::vector<float> y, z, row;
    attention::Partial partial;
  };

  Shared room(int64_t first, int64_t last, int64_t entries) const {
    Shared shared;
    int64_t most = 0;
    for (int64_t l = first; l < last; ++l) {
      for (const Product* product : layers[l].products()) {
        most = std::max(most, product->outputs());
      }
    }
    shared.y.resize(most), shared.z.resize(most), shared.row.resize((heads + 2 * kv_heads) * head_dim);
    shared.partial.make_room(entries, heads, head_dim);
    return shared;
  }

  // ATen's kernels bring their own threads, and want to be called by one.
  template <typename F>
  void with_members(int64_t first, int64_t last, F&& f) const {
    const bool ours = std::all_of(layers.begin() + first, layers.begin() + last, [](const Layer& layer) { return layer.qkv.ours; });
    ours ? crew::together(f) : f(crew::Member{});
  }

  // out [d] = h [d] + attention, after writing entry `slot` of the cache. x: the input of the next product, which every member makes for
  // itself, because that takes less time than to wait for another's.
  void attend(const crew::Member& member, const Layer& layer, const float* h, int64_t d, int64_t l, const Tensor& cache, int64_t slot,
              const Tensor& cos, const Tensor& sin, Shared& shared, std::vector<float>& x, float* out) const {
    rms_norm(h, layer.input_norm.const_data_ptr<float>(), d, eps, x);
    float *y = shared.y.data(), *row = shared.row.data();
    layer.qkv(member, x.data(), d, y, products::no_more);
    member.meet();
    const int64_t all = heads + 2 * kv_heads;
    member.share(all, all, [&](int64_t begin, int64_t end) {
      const float *c = cos.const_data_ptr<float>(), *s = sin.const_data_ptr<float>();
      for (int64_t n = begin; n < end; ++n) {
        float* head = y + n * head_dim;
        if (layer.qk_norm.defined() && n < heads + kv_heads) {
          const float* weight = layer.qk_norm.const_data_ptr<float>() + n * head_dim;
          const float scale = norm_scale(head, head_dim, static_cast<float>(eps));
          for (int64_t i = 0; i < head_dim; ++i) head[i] *= scale * weight[i];
        }
        // cos, sin [1, kinds, rotary_dim / 2]: the first for queries, the last for keys; values keep their place.
        const int64_t kind = n < heads ? 0 : cos.numel() - rotary_dim / 2;
        rotate(head, c + kind, s + kind, head_dim, n < heads + kv_heads ? rotary_dim : 0, row + n * head_dim);
        if (n < heads) continue;
        const int64_t which = (n - heads) / kv_heads, kv_head = (n - heads) % kv_heads;  // keys, then values
        const int64_t at = l * cache.stride(0) + which * cache.stride(1) + kv_head * cache.stride(2) + slot * cache.stride(3);
        char* entry = static_cast<char*>(cache.data_ptr()) + at * cache.element_size();
        from_float(row + n * head_dim, entry, cache.scalar_type(), head_dim);
      }
    });
    member.meet();
    const int64_t from = layer.window ? std::max<int64_t>(0, slot + 1 - layer.window) : 0;
    x.resize(heads * head_dim);
    products::with_weights(cache, [&](const auto* base) {
      const auto* keys = base + l * cache.stride(0) + from * cache.stride(3);
      attention::one_row(member, row, keys, keys + cache.stride(1), slot + 1 - from, cache.stride(2), cache.stride(3), kv_heads,
                         heads / kv_heads, head_dim, x.data(), shared.partial);
    });
    layer.o(member, x.data(), heads * head_dim, out, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) out[i] += h[i];
    });
    member.meet();
  }

  // out [d] += the MLP of out.
  void feed_forward(const crew::Member& member, const Layer& layer, int64_t d, Shared& shared, std::vector<float>& x, float* out) const {
    rms_norm(out, layer.post_norm.const_data_ptr<float>(), d, eps, x);
    float* y = shared.y.data();
    layer.gate_up(member, x.data(), d, y, products::no_more);
    member.meet();
    const int64_t width = layer.gate_up.outputs() / 2;
    silu_times(y, y + width, width, x);
    float* z = shared.z.data();  // not y, which others may still be reading
    layer.down(member, x.data(), width, z, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) out[i] += z[i];
    });
    member.meet();
  }
};

}  // namespace
