// The one file that is compiled: PyTorch's headers take longer to read than all of this code. Registers what Python calls.

#include <torch/library.h>

#include "layers.h"
#include "products.h"
#include "screen.h"

namespace {

// x [T, K] float, weight [N, K] -> [T, N] float.
Tensor dense_rows(const Tensor& x, const Tensor& weight) {
  TORCH_CHECK(x.dim() == 2 && weight.dim() == 2 && x.size(1) == weight.size(1) && weight.is_contiguous(), "shapes of a product");
  const Tensor in = x.to(at::kFloat).contiguous();
  Tensor out = at::empty({x.size(0), weight.size(0)}, in.options());
  for (int64_t t = 0; t < x.size(0); ++t) {
    products::dense({}, weight, in.const_data_ptr<float>() + t * x.size(1), out.data_ptr<float>() + t * weight.size(0), products::no_more);
  }
  return out;
}

// query [heads, head_dim] float over one layer of a cache [2, kv heads, S, head_dim] -> [heads, head_dim] float.
Tensor attend(const Tensor& query, const Tensor& cache) {
  TORCH_CHECK(query.dim() == 2 && query.is_contiguous() && query.scalar_type() == at::kFloat && cache.dim() == 4 && cache.stride(3) == 1 &&
                  cache.size(3) == query.size(1) && query.size(0) % cache.size(1) == 0,
              "shapes of an attention");
  Tensor out = at::empty_like(query);
  attention::Partial partial;
  partial.make_room(cache.size(2), query.size(0), query.size(1));
  products::with_weights(cache, [&](const auto* keys) {
    attention::one_row({}, query.const_data_ptr<float>(), keys, keys + cache.stride(0), cache.size(2), cache.stride(1), cache.stride(2),
                       cache.size(1), query.size(0) / cache.size(1), query.size(1), out.data_ptr<float>(), partial);
  });
  return out;
}

// Row `id` of an embedding [V, d] -> [1, d] float.
Tensor embed(const Tensor& embedding, int64_t id) {
  TORCH_CHECK(embedding.dim() == 2 && embedding.is_contiguous() && 0 <= id && id < embedding.size(0), "no such row");
  Tensor out = at::empty({1, embedding.size(1)}, at::kFloat);
  const int64_t d = embedding.size(1);
  products::with_weights(embedding, [&](const auto* rows) { widen(rows + id * d, out.data_ptr<float>(), d); });
  return out;
}

// The small operations one by one, so that each can be checked by itself; the layers call them where they need them.

// float [n] -> [n].
Tensor exponential(const Tensor& x) {
  const Tensor in = at::constant_pad_nd(x, {0, lanes::N}), out = at::empty_like(in);
  for (int64_t i = 0; i < x.size(0); i += lanes::N) {
    lanes::store(out.data_ptr<float>() + i, lanes::exp(lanes::widen(in.const_data_ptr<float>() + i)));
  }
  return out.narrow(0, 0, x.size(0));
}

// gate, up: float [n] -> silu(gate) up.
Tensor gated(const Tensor& gate, const Tensor& up) {
  std::vector<float> out;
  silu_times(gate.const_data_ptr<float>(), up.const_data_ptr<float>(), gate.numel(), out);
  return at::tensor(out);
}

// heads: float [heads, head_dim]; cos, sin: float [heads, rotary_dim / 2] -> [heads, head_dim].
Tensor rotated(const Tensor& heads, const Tensor& cos, const Tensor& sin) {
  Tensor out = at::empty_like(heads);
  const int64_t d = heads.size(1), half = cos.size(1);
  for (int64_t n = 0; n < heads.size(0); ++n) {
    rotate(heads.const_data_ptr<float>() + n * d, cos.const_data_ptr<float>() + n * half, sin.const_data_ptr<float>() + n * half, d, 2 * half,
           out.data_ptr<float>() + n * d);
  }
  return out;
}

// a, b: float [n].
double similarity(const Tensor& a, const Tensor& b) { return cosine(a.const_data_ptr<float>(), b.const_data_ptr<float>(), a.numel()); }

// x: float [n] -> [n] in `dtype`, as keys and values are written.
Tensor narrowed(const Tensor& x, at::ScalarType dtype) {
  Tensor out = at::empty_like(x, x.options().dtype(dtype));
  from_float(x.const_data_ptr<float>(), out.data_ptr(), dtype, x.numel());
  return out;
}

std::string isa() { return RIVER_LANES == 16 ? "avx512" : RIVER_LANES == 8 ? "avx2" : "generic"; }

bool has_int4() { return RIVER_LANES >= 8; }

// x [T, K] float, codes and scales as in products.h -> [T, N] float.
Tensor int4_rows(const Tensor& x, const Tensor& codes, const Tensor& scales, int64_t group) {
  TORCH_CHECK(has_int4(), "4-bit products are not written for this processor");
  TORCH_CHECK(x.dim() == 2 && codes.dim() == 3 && x.size(1) == 8 * codes.size(1) && codes.is_contiguous() && scales.is_contiguous() &&
                  scales.numel() * group == 2 * 16 * codes.size(0) * x.size(1),
              "shapes of a 4-bit product");
  const Tensor in = x.to(at::kFloat).contiguous();
  Tensor out = at::empty({x.size(0), 16 * codes.size(0)}, in.options());
  for (int64_t t = 0; t < x.size(0); ++t) {
    products::int4({}, codes, scales, group, in.const_data_ptr<float>() + t * x.size(1), out.data_ptr<float>() + t * out.size(1), products::no_more);
  }
  return out;
}

}  // namespace

TORCH_LIBRARY(river_native, m) {
  m.class_<Stack>("Stack")
      .def(torch::init<int64_t, int64_t, int64_t, int64_t, double>())
      .def("add", &Stack::add)
      .def("run", &Stack::run)
      .def("products_only", &Stack::products_only);
  m.def("screen", &screen);
  m.def("head_input", &head_input);
  m.def("embed", &embed);
  m.def("attend", &attend);
  m.def("dense_rows", &dense_rows);
  m.def("int4_rows", &int4_rows);
  m.def("has_int4", &has_int4);
  m.def("isa", &isa);
  m.def("exponential", &exponential);
  m.def("gated", &gated);
  m.def("rotated", &rotated);
  m.def("similarity", &similarity);
  m.def("narrowed", &narrowed);
}
