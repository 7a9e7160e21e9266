// The greedy token of an LM head without reading all of it: every row is scored with 8-bit copies of its weights, and
// only rows that the error bound leaves in the race are multiplied in full.

#include <torch/library.h>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <cmath>
#include <tuple>
#include <vector>

namespace {

using at::Tensor;

float dot(const int8_t* codes, const float* x, int64_t n) {
  float sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += static_cast<float>(codes[i]) * x[i];
  return sum;
}

// x: [1, K], the head's input as the head reads it. codes: int8 [V, K]; scales, errors: float [V], where errors[r] is
// the length of row r's rounding error, so that |score - exact| <= errors[r] |x| (Cauchy-Schwarz). slack: what rounding
// inside the full product may add, as a share of the score. most: rows beyond which the full head is the cheaper one.
// Returns the rows that may hold the largest logit, ascending, and their exact logits; both empty if they are too many.
std::tuple<Tensor, Tensor> screen(const Tensor& x, const Tensor& codes, const Tensor& scales, const Tensor& errors,
                                  const Tensor& weight, double slack, int64_t most) {
  const int64_t rows = codes.size(0), k = codes.size(1);
  TORCH_CHECK(x.numel() == k && codes.is_contiguous() && scales.numel() == rows && errors.numel() == rows, "shapes of a screened head");
  Tensor wide = x.to(at::kFloat).contiguous();
  const float* in = wide.const_data_ptr<float>();
  const float length = std::sqrt(wide.square().sum().item<float>());
  const auto* c = codes.const_data_ptr<int8_t>();
  const float *s = scales.const_data_ptr<float>(), *e = errors.const_data_ptr<float>();
  std::vector<float> score(rows), reach(rows);
  at::parallel_for(0, rows, 1024, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      score[r] = s[r] * dot(c + r * k, in, k);
      reach[r] = e[r] * length + static_cast<float>(slack) * std::abs(score[r]) + 1e-3f;
    }
  });
  float least = -INFINITY;  // the largest logit is at least this
  for (int64_t r = 0; r < rows; ++r) least = std::max(least, score[r] - reach[r]);
  std::vector<int64_t> left;
  for (int64_t r = 0; r < rows; ++r) {
    if (score[r] + reach[r] >= least) left.push_back(r);
  }
  if (left.empty() || static_cast<int64_t>(left.size()) > most) return {at::empty({0}, at::kLong), at::empty({0})};
  Tensor chosen = at::tensor(left, at::kLong);
  return {chosen, at::linear(x, weight.index_select(0, chosen)).view(-1).to(at::kFloat)};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(river_native, m) { m.def("screen", &screen); }
