// Decoder layers for one row, called once for a run of layers: the same products and the same attention as the Python
// path (ATen's), with the small operations between them written out. At batch 1 a small model spends as long on calling
// those operations one by one as on the products themselves.

#pragma once

#include <torch/custom_class.h>

#include <ATen/ATen.h>
#include <ATen/ops/_weight_int4pack_mm_for_cpu.h>

#include <cmath>
#include <cstdint>
#include <tuple>
#include <vector>

#include "attention.h"
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
      to[i] = static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);  // to nearest, ties to even
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

void to_float(const Tensor& in, float* out, int64_t n) {
  products::with_weights(in, [&](const auto* from) {
    int64_t i = 0;
    for (; i + lanes::N <= n; i += lanes::N) lanes::store(out + i, lanes::widen(from + i));
    for (; i < n; ++i) out[i] = from[i];
  });
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

  // y [N] float = W x + b, for x [K] float.
  void operator()(const float* x, int64_t k, std::vector<float>& y) const {
    const int64_t n = outputs();
    y.resize(n);
    if (ours && !group) {
      products::dense(weight, x, y.data());
    } else if (ours) {
      static thread_local products::Fixed fixed;
      products::int4(weight, scales_and_zeros, group, x, y.data(), fixed);
    } else {
      Tensor row = at::empty({1, k}, at::TensorOptions().dtype(dtype()));
      from_float(x, row.data_ptr(), dtype(), k);
      Tensor out = group ? at::_weight_int4pack_mm_for_cpu(row, weight, group, scales_and_zeros) : at::linear(row, weight);
      to_float(out, y.data(), n);
    }
    if (bias.defined()) {
      const float* b = bias.const_data_ptr<float>();
      for (int64_t i = 0; i < n; ++i) y[i] += b[i];
    }
  }
};

struct Layer {
  Product qkv, o, gate_up, down;
  Tensor input_norm, post_norm, qk_norm;
  int64_t window = 0;
};

float mean_square(const float* x, int64_t n) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) sum += x[i] * x[i];
  return sum / n;
}

void rms_norm(const float* x, const float* weight, int64_t n, float eps, std::vector<float>& out) {
  const float scale = 1.0f / std::sqrt(mean_square(x, n) + eps);
  out.resize(n);
  for (int64_t i = 0; i < n; ++i) out[i] = scale * x[i] * weight[i];
}

double cosine(const float* a, const float* b, int64_t n) {
  float ab = 0, aa = 0, bb = 0;
#pragma omp simd reduction(+ : ab, aa, bb)
  for (int64_t i = 0; i < n; ++i) ab += a[i] * b[i], aa += a[i] * a[i], bb += b[i] * b[i];
  return ab / std::sqrt(std::max(static_cast<double>(aa) * bb, 1e-30));
}

// gate = silu(gate) * up
void silu_times(float* gate, const float* up, int64_t n) {
  int64_t i = 0;
  for (; i + lanes::N <= n; i += lanes::N) {
    const lanes::V g = lanes::widen(gate + i);
    lanes::store(gate + i, g * lanes::widen(up + i) / (lanes::set(1) + lanes::exp(lanes::set(0) - g)));
  }
  for (; i < n; ++i) gate[i] = gate[i] * up[i] / (1 + std::exp(-gate[i]));
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
    const int64_t d = hidden.size(-1), all = heads + 2 * kv_heads, half = rotary_dim / 2;
    std::vector<Tensor> states;
    std::vector<double> similarities;
    states.reserve(last - first), similarities.reserve(last - first);
    std::vector<float> x, y, row(all * head_dim);
    Tensor current = hidden;
    attention::Partial partial;
    const auto kept = cache.scalar_type();
    for (int64_t l = first; l < last; ++l) {
      const Layer& layer = layers[l];
      const float* h = current.const_data_ptr<float>();
      Tensor next = at::empty({1, d}, hidden.options());
      float* out = next.data_ptr<float>();

      rms_norm(h, layer.input_norm.const_data_ptr<float>(), d, eps, x);
      layer.qkv(x.data(), d, y);
      if (layer.qk_norm.defined()) {
        const float* weight = layer.qk_norm.const_data_ptr<float>();
        for (int64_t n = 0; n < heads + kv_heads; ++n) {
          float* head = y.data() + n * head_dim;
          const float scale = 1.0f / std::sqrt(mean_square(head, head_dim) + static_cast<float>(eps));
          for (int64_t i = 0; i < head_dim; ++i) head[i] *= scale * weight[n * head_dim + i];
        }
      }
      const float *c = cos.const_data_ptr<float>(), *s = sin.const_data_ptr<float>();
      for (int64_t n = 0; n < all; ++n) {
        const float* head = y.data() + n * head_dim;
        const float *hc = c + n * head_dim, *hs = s + n * head_dim;
        float* turned = row.data() + n * head_dim;
        for (int64_t i = 0; i < half; ++i) turned[i] = head[i] * hc[i] + head[half + i] * hs[i];
        for (int64_t i = 0; i < half; ++i) turned[half + i] = head[half + i] * hc[half + i] + head[i] * hs[half + i];
        for (int64_t i = rotary_dim; i < head_dim; ++i) turned[i] = head[i] * hc[i];
      }
      const int64_t slot = slots.size() == 1 ? slots[0] : slots[l - first];
      for (int64_t which = 0; which < 2; ++which) {
        for (int64_t n = 0; n < kv_heads; ++n) {
          const int64_t at = l * cache.stride(0) + which * cache.stride(1) + n * cache.stride(2) + slot * cache.stride(3);
          char* entry = static_cast<char*>(cache.data_ptr()) + at * cache.element_size();
          from_float(row.data() + (heads + which * kv_heads + n) * head_dim, entry, kept, head_dim);
        }
      }
      const int64_t from = layer.window ? std::max<int64_t>(0, slot + 1 - layer.window) : 0;
      x.resize(heads * head_dim);
      products::with_weights(cache, [&](const auto* base) {
        const auto* keys = base + l * cache.stride(0) + from * cache.stride(3);
        attention::one_row(row.data(), keys, keys + cache.stride(1), slot + 1 - from, cache.stride(2), cache.stride(3), kv_heads,
                           heads / kv_heads, head_dim, x.data(), partial);
      });
      layer.o(x.data(), heads * head_dim, y);
      for (int64_t i = 0; i < d; ++i) out[i] = h[i] + y[i];

      rms_norm(out, layer.post_norm.const_data_ptr<float>(), d, eps, x);
      layer.gate_up(x.data(), d, y);
      const int64_t width = static_cast<int64_t>(y.size()) / 2;
      silu_times(y.data(), y.data() + width, width);
      layer.down(y.data(), width, x);
      for (int64_t i = 0; i < d; ++i) out[i] += x[i];
      states.push_back(next);
      similarities.push_back(cosine(h, out, d));
      if (similarities.back() > tau) break;
      current = next;
    }
    return {states, similarities};
  }

  // The products of layers first .. last - 1 in the order of a step, and nothing else: the floor that a step is measured against.
  void products_only(int64_t first, int64_t last) const {
    std::vector<float> x, y;
    for (int64_t l = first; l < last; ++l) {
      for (const Product* product : {&layers[l].qkv, &layers[l].o, &layers[l].gate_up, &layers[l].down}) {
        x.assign(product->inputs(), 0.5f);
        (*product)(x.data(), product->inputs(), y);
      }
    }
  }
};

}  // namespace
