// Experts as a torch op: on few tokens, over the weights as they are, of which only those of chosen experts are read.

#include <cstring>

#include "ops.h"

namespace opgraft_cpu_kernels {
namespace {

constexpr const char* EXPERTS = "fused_experts";

void expect(const char* name, const Tensor& tensor, at::IntArrayRef sizes, const Tensor& x) {
  TORCH_CHECK_VALUE(tensor.sizes() == sizes && tensor.is_contiguous() && tensor.scalar_type() == x.scalar_type(),
                    EXPERTS, ": ", name, " has shape ", tensor.sizes(), " and dtype ", tensor.scalar_type(),
                    ", expected a contiguous ", sizes, " of dtype ", x.scalar_type());
}

// The rows of one expert among those that are sorted.
struct Chosen {
  int64_t expert, begin, count;
};

// Which row each choice of a token has, -1 for none, of which token each row is, and which experts are chosen.
struct Places {
  std::vector<int64_t> rows, tokens;
  std::vector<Chosen> chosen;
  int64_t count = 0;

  Places(const Tensor& ids, int64_t experts) : rows(ids.numel(), -1), tokens(ids.numel()) {
    const int64_t* id = ids.const_data_ptr<int64_t>();
    std::vector<int64_t> counts(experts, 0), next(experts, 0);
    for (size_t pair = 0; pair < rows.size(); ++pair) {
      TORCH_CHECK_VALUE(-1 <= id[pair] && id[pair] < experts, EXPERTS, ": topk_ids have ", id[pair],
                        ", expected -1 to ", experts - 1);
      if (id[pair] >= 0) ++counts[id[pair]];
    }
    for (int64_t expert = 0; expert < experts; ++expert) {
      next[expert] = count;
      if (counts[expert]) chosen.push_back({expert, count, counts[expert]});
      count += counts[expert];
    }
    for (size_t pair = 0; pair < rows.size(); ++pair) {
      if (id[pair] < 0) continue;
      rows[pair] = next[id[pair]]++;
      tokens[rows[pair]] = int64_t(pair) / ids.size(1);
    }
  }
};

// Some of the chosen, one after another, and how the work on them is shared among threads: by rows, beside which
// reading a matrix takes as long as products of so many.
struct Group {
  static constexpr int64_t READING = 12;
  const Chosen *first, *last;

  int64_t begin() const { return first->begin; }
  int64_t rows() const { return last[-1].begin + last[-1].count - first->begin; }
  static int64_t cost(const Chosen& one) { return one.count + READING; }
  int64_t cost() const { return rows() + (last - first) * READING; }
};

// A product of the rows of each expert of a group, which `x` has, with that one's matrix.
void products(const Tensor& x, const Tensor& weight, const Tensor& bias, const Group& group, const Tensor& out) {
  const int64_t columns = weight.size(1), width = weight.size(2), size = x.element_size();
  const LinearKernel kernel = path().linear[dtype_of(EXPERTS, x)];
  share(group.cost() * columns, width, [&](int64_t begin, int64_t end) {
    int64_t at = 0;  // where an expert's share of the work begins
    for (const Chosen* one = group.first; one != group.last && at < end; at += group.cost(*one++) * columns) {
      const auto column = [&](int64_t work) { return std::clamp<int64_t>((work - at) / group.cost(*one), 0, columns); };
      const int64_t first = column(begin), last = column(end), row = one->begin - group.begin();
      if (first == last) continue;
      Linear linear;
      linear.x = {static_cast<const char*>(x.const_data_ptr()) + row * width * size, width};
      linear.weight = static_cast<const char*>(weight.const_data_ptr()) + one->expert * columns * width * size;
      if (bias.defined()) linear.bias = static_cast<const char*>(bias.const_data_ptr()) + one->expert * columns * size;
      linear.out = {static_cast<char*>(out.mutable_data_ptr()) + row * columns * size, columns};
      linear.rows = one->count;
      linear.in_features = width;
      linear.out_features = columns;
      kernel(linear, first, last);
    }
  });
}

Tensor activated(const Tensor& gate_up, c10::string_view activation) {
  if (activation == "silu") return silu_and_mul(gate_up);
  if (activation == "gelu") return gelu_and_mul(gate_up, "none");
  TORCH_CHECK_VALUE(activation == "swigluoai", EXPERTS, ": activation is '", activation,
                    "', expected silu, gelu or swigluoai");
  return swigluoai_and_mul(gate_up, 1.702, 7.0);
}

// Of each row of a group the token.
Tensor gathered(const Tensor& x, const Places& places, const Group& group) {
  const int64_t rows = group.rows(), bytes = x.size(1) * int64_t(x.element_size());
  const Tensor out = fresh({rows, x.size(1)}, x.scalar_type());
  char* const to = static_cast<char*>(out.mutable_data_ptr());
  const char* const from = static_cast<const char*>(x.const_data_ptr());
  const int64_t* const token = places.tokens.data() + group.begin();
  share(rows, x.size(1), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) std::memcpy(to + row * bytes, from + token[row] * bytes, size_t(bytes));
  });
  return out;
}

// Results of all experts, computed by groups of so many rows that what lies between two products stays in the caches.
Tensor results(const Tensor& x, const Tensor& w13, const Tensor& up_bias, const Tensor& w2, const Tensor& down_bias,
               c10::string_view activation, const Places& places) {
  constexpr int64_t BYTES = int64_t(8) << 20;  // of the first product, the larger
  const Tensor out = fresh({places.count, x.size(1)}, x.scalar_type());
  const int64_t most = BYTES / std::max<int64_t>(1, w13.size(1) * int64_t(x.element_size()));
  const Chosen* const end = places.chosen.data() + places.chosen.size();
  for (Group group{places.chosen.data(), places.chosen.data()}; group.first != end; group.first = group.last) {
    int64_t rows = 0;
    do rows += group.last++->count;
    while (group.last != end && rows + group.last->count <= most);
    const Tensor gate_up = fresh({rows, w13.size(1)}, x.scalar_type());
    products(gathered(x, places, group), w13, up_bias, group, gate_up);
    products(activated(gate_up, activation), w2, down_bias, group, out.narrow(0, group.begin(), rows));
  }
  return out;
}

template <class X>
void combine(const Tensor& outputs, const Tensor& weights, const Places& places, const Tensor& out) {
  const int64_t topk = weights.size(1), width = out.size(1);
  const float* const weight = weights.const_data_ptr<float>();
  const X* const from = outputs.const_data_ptr<X>();
  X* const to = out.mutable_data_ptr<X>();
  share(out.size(0), topk * width, [&](int64_t begin, int64_t end) {
    std::vector<float> sums(width);
    for (int64_t token = begin; token < end; ++token) {
      std::fill(sums.begin(), sums.end(), 0.0f);
      for (int64_t pair = token * topk; pair < (token + 1) * topk; ++pair) {
        if (places.rows[pair] < 0) continue;
        const X* const row = from + places.rows[pair] * width;
        for (int64_t i = 0; i < width; ++i) sums[i] += weight[pair] * float(row[i]);
      }
      for (int64_t i = 0; i < width; ++i) to[token * width + i] = X(sums[i]);
    }
  });
}

Tensor fused_experts(const Tensor& x, const Tensor& w13, const Tensor& w2, const Tensor& topk_weights,
                     const Tensor& topk_ids, c10::string_view activation, const OptionalTensor& w13_bias,
                     const OptionalTensor& w2_bias) {
  const Tensor &up_bias = defined(w13_bias), &down_bias = defined(w2_bias);
  refuse_gradient(EXPERTS, x, w13, w2, topk_weights, up_bias, down_bias);
  const Dtype dtype = dtype_of(EXPERTS, x);
  TORCH_CHECK_VALUE(x.dim() == 2 && w2.dim() == 3 && topk_ids.dim() == 2 && topk_ids.size(0) == x.size(0) &&
                        topk_ids.sizes() == topk_weights.sizes() && at::isIntegralType(topk_ids.scalar_type(), false),
                    EXPERTS, ": x has shape ", x.sizes(), ", w2 ", w2.sizes(), ", topk_weights ", topk_weights.sizes(),
                    " and topk_ids ", topk_ids.sizes());
  const int64_t experts = w2.size(0), hidden = x.size(1), intermediate = w2.size(2);
  expect("w13", w13, {experts, 2 * intermediate, hidden}, x);
  expect("w2", w2, {experts, hidden, intermediate}, x);
  if (up_bias.defined()) expect("w13_bias", up_bias, {experts, 2 * intermediate}, x);
  if (down_bias.defined()) expect("w2_bias", down_bias, {experts, hidden}, x);
  const Places places(topk_ids.to(at::kLong).contiguous(), experts);
  const Tensor outputs = results(x.contiguous(), w13, up_bias, w2, down_bias, activation, places);
  const Tensor out = fresh(x.sizes(), x.scalar_type()), weights = topk_weights.to(at::kFloat).contiguous();
  if (dtype == FLOAT32)
    combine<float>(outputs, weights, places, out);
  else if (dtype == BFLOAT16)
    combine<c10::BFloat16>(outputs, weights, places, out);
  else
    combine<c10::Half>(outputs, weights, places, out);
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(opgraft_cpu_kernels, library) {
  library.def(
      "fused_experts(Tensor x, Tensor w13, Tensor w2, Tensor topk_weights, Tensor topk_ids, str activation=\"silu\", "
      "Tensor? w13_bias=None, Tensor? w2_bias=None) -> Tensor");
}

#define EXPERTS(apply) apply(fused_experts)

IMPLEMENT(EXPERTS)

}  // namespace opgraft_cpu_kernels
