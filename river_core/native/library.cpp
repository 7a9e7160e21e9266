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
}
