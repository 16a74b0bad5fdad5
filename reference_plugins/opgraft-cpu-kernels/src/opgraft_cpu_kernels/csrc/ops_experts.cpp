// Experts as torch ops, over plain or quantized weights as they are, of which only those of chosen experts are read.

#include <cstring>
#include <functional>

#include "ops.h"

namespace opgraft_cpu_kernels {
namespace {

void expect(const char* op, const char* name, const Tensor& tensor, at::IntArrayRef sizes, at::ScalarType dtype) {
  TORCH_CHECK_VALUE(tensor.sizes() == sizes && tensor.is_contiguous() && tensor.scalar_type() == dtype, op, ": ", name,
                    " has shape ", tensor.sizes(), " and dtype ", tensor.scalar_type(), ", expected a contiguous ",
                    sizes, " of dtype ", dtype);
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

  Places(const char* op, const Tensor& ids, int64_t experts) : rows(ids.numel(), -1), tokens(ids.numel()) {
    const int64_t* id = ids.const_data_ptr<int64_t>();
    std::vector<int64_t> counts(experts, 0), next(experts, 0);
    for (size_t pair = 0; pair < rows.size(); ++pair) {
      TORCH_CHECK_VALUE(-1 <= id[pair] && id[pair] < experts, op, ": topk_ids have ", id[pair],
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

// The matrices of all experts, and what multiplies some rows with the columns [first, last) of one of them.
struct Matrices {
  Tensor bias;
  int64_t columns, width;
  std::function<void(Linear& rows, int64_t expert, int64_t first, int64_t last)> multiply;
};

// A product of the rows of each expert of a group, which `x` has, with that one's matrix.
void products(const Tensor& x, const Matrices& matrices, const Group& group, const Tensor& out) {
  const int64_t columns = matrices.columns, width = matrices.width, size = x.element_size();
  share(group.cost() * columns, width, [&](int64_t begin, int64_t end) {
    int64_t at = 0;  // where an expert's share of the work begins
    for (const Chosen* one = group.first; one != group.last && at < end; at += group.cost(*one++) * columns) {
      const auto column = [&](int64_t work) { return std::clamp<int64_t>((work - at) / group.cost(*one), 0, columns); };
      const int64_t first = column(begin), last = column(end), row = one->begin - group.begin();
      if (first == last) continue;
      Linear linear;
      linear.x = {static_cast<const char*>(x.const_data_ptr()) + row * width * size, width};
      if (matrices.bias.defined())
        linear.bias = static_cast<const char*>(matrices.bias.const_data_ptr()) + one->expert * columns * size;
      linear.out = {static_cast<char*>(out.mutable_data_ptr()) + row * columns * size, columns};
      linear.rows = one->count;
      linear.in_features = width;
      linear.out_features = columns;
      matrices.multiply(linear, one->expert, first, last);
    }
  });
}

Matrices plain(const Tensor& weight, const Tensor& bias, Dtype dtype) {
  const int64_t columns = weight.size(1), width = weight.size(2);
  const char* const data = static_cast<const char*>(weight.const_data_ptr());
  const int64_t bytes = columns * width * int64_t(weight.element_size());
  const LinearKernel kernel = path().linear[dtype];
  return {bias, columns, width, [=](Linear& linear, int64_t expert, int64_t first, int64_t last) {
            linear.weight = data + expert * bytes;
            kernel(linear, first, last);
          }};
}

Tensor activated(const char* op, const Tensor& gate_up, c10::string_view activation) {
  if (activation == "silu") return silu_and_mul(gate_up);
  if (activation == "gelu") return gelu_and_mul(gate_up, "none");
  TORCH_CHECK_VALUE(activation == "swigluoai", op, ": activation is '", activation,
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
Tensor results(const char* op, const Tensor& x, const Matrices& gate_up, const Matrices& down,
               c10::string_view activation, const Places& places) {
  constexpr int64_t BYTES = int64_t(8) << 20;  // of the first product, the larger
  const Tensor out = fresh({places.count, x.size(1)}, x.scalar_type());
  const int64_t most = BYTES / std::max<int64_t>(1, gate_up.columns * int64_t(x.element_size()));
  const Chosen* const end = places.chosen.data() + places.chosen.size();
  for (Group group{places.chosen.data(), places.chosen.data()}; group.first != end; group.first = group.last) {
    int64_t rows = 0;
    do rows += group.last++->count;
    while (group.last != end && rows + group.last->count <= most);
    const Tensor between = fresh({rows, gate_up.columns}, x.scalar_type());
    products(gathered(x, places, group), gate_up, group, between);
    products(activated(op, between, activation), down, group, out.narrow(0, group.begin(), rows));
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

void expect_choices(const char* op, const Tensor& x, const Tensor& topk_weights, const Tensor& topk_ids) {
  TORCH_CHECK_VALUE(x.dim() == 2 && topk_ids.dim() == 2 && topk_ids.size(0) == x.size(0) &&
                        topk_ids.sizes() == topk_weights.sizes() && topk_weights.is_floating_point() &&
                        at::isIntegralType(topk_ids.scalar_type(), false),
                    op, ": x has shape ", x.sizes(), ", topk_weights ", topk_weights.sizes(), " and topk_ids ",
                    topk_ids.sizes());
}

Tensor computed(const char* op, const Tensor& x, const Matrices& gate_up, const Matrices& down, int64_t experts,
                const Tensor& topk_weights, const Tensor& topk_ids, c10::string_view activation) {
  const Places places(op, topk_ids.to(at::kLong).contiguous(), experts);
  const Tensor outputs = results(op, x.contiguous(), gate_up, down, activation, places);
  const Tensor out = fresh(x.sizes(), x.scalar_type()), weights = topk_weights.to(at::kFloat).contiguous();
  switch (dtype_of(op, x)) {
    case FLOAT32:
      combine<float>(outputs, weights, places, out);
      break;
    case BFLOAT16:
      combine<c10::BFloat16>(outputs, weights, places, out);
      break;
    default:
      combine<c10::Half>(outputs, weights, places, out);
  }
  return out;
}

Tensor fused_experts(const Tensor& x, const Tensor& w13, const Tensor& w2, const Tensor& topk_weights,
                     const Tensor& topk_ids, c10::string_view activation, const OptionalTensor& w13_bias,
                     const OptionalTensor& w2_bias) {
  constexpr const char* op = "fused_experts";
  const Tensor &up_bias = defined(w13_bias), &down_bias = defined(w2_bias);
  refuse_gradient(op, x, w13, w2, topk_weights, up_bias, down_bias);
  const Dtype dtype = dtype_of(op, x);
  expect_choices(op, x, topk_weights, topk_ids);
  TORCH_CHECK_VALUE(w2.dim() == 3, op, ": w2 has shape ", w2.sizes(), ", expected three dimensions");
  const int64_t experts = w2.size(0), hidden = x.size(1), intermediate = w2.size(2);
  expect(op, "w13", w13, {experts, 2 * intermediate, hidden}, x.scalar_type());
  expect(op, "w2", w2, {experts, hidden, intermediate}, x.scalar_type());
  if (up_bias.defined()) expect(op, "w13_bias", up_bias, {experts, 2 * intermediate}, x.scalar_type());
  if (down_bias.defined()) expect(op, "w2_bias", down_bias, {experts, hidden}, x.scalar_type());
  return computed(op, x, plain(w13, up_bias, dtype), plain(w2, down_bias, dtype), experts, topk_weights, topk_ids,
                  activation);
}

constexpr int64_t PLAIN_BYTES = int64_t(1) << 18;  // of plain numbers that are made at once: half a second cache

// Memory of a thread that begins at a line of the caches.
template <class Number>
Number* memory_of(std::vector<char>& memory, int64_t count) {
  constexpr size_t LINE = 64;
  const size_t bytes = size_t(count) * sizeof(Number) + LINE;
  if (memory.size() < bytes) memory.resize(bytes);
  return reinterpret_cast<Number*>((reinterpret_cast<size_t>(memory.data()) + LINE - 1) / LINE * LINE);
}

// A row by the codes as they are, which takes less time than making plain numbers of them; for two rows it does not.
void row_on_codes(const QuantizedLinear& weight, Dtype dtype, const Linear& linear, int64_t first, int64_t last) {
  static thread_local std::vector<char> memory;
  QuantizedLinear q = weight;
  q.rows = linear.rows;
  q.bias = linear.bias;
  q.out = linear.out;
  float* const x = memory_of<float>(memory, q.padded + q.groups + q.out_features);
  path().prepare_rows[dtype](linear.x, q, x, x + q.padded);
  q.x = x;
  q.group_sums = x + q.padded;
  q.sums = x + q.padded + q.groups;
  path().quantized_linear[dtype](q, first, last);
}

void rows_on_plain_numbers(const QuantizedLinear& q, Dtype dtype, const Linear& linear, int64_t first, int64_t last) {
  static thread_local std::vector<char> memory;
  const int64_t size = dtype == FLOAT32 ? 4 : 2, row_bytes = linear.in_features * size;
  const int64_t some = std::max<int64_t>(4, PLAIN_BYTES / row_bytes / 4 * 4);
  char* const numbers = memory_of<char>(memory, some * row_bytes);
  for (int64_t column = first; column < last; column += some) {
    const int64_t count = std::min(some, last - column);
    path().dequantize_rows[dtype](q, column, column + count, numbers);
    Linear part = linear;
    part.weight = numbers;
    part.out.data = static_cast<char*>(part.out.data) + column * size;
    if (part.bias) part.bias = static_cast<const char*>(part.bias) + column * size;
    part.out_features = count;
    path().linear[dtype](part, 0, count);
  }
}

Format format_of(const char* op, const Tensor& codes, const Tensor& scales) {
  if (scales.scalar_type() == at::kFloat8_e8m0fnu) return MXFP4;
  switch (codes.scalar_type()) {
    case at::kByte:
    case at::kChar:
      return INTEGERS;
    case at::kFloat8_e4m3fn:
      return E4M3;
    case at::kFloat8_e5m2:
      return E5M2;
    default:
      TORCH_CHECK_NOT_IMPLEMENTED(false, op, ": there is no kernel for codes of dtype ", codes.scalar_type());
  }
}

// The quantized matrices of all experts, of so many inputs and columns. The tensors outlive what is returned.
Matrices quantized(const char* op, const char* name, const Tensor& codes, const Tensor& scales, const Tensor& offsets,
                   const Tensor& bias, int64_t experts, int64_t columns, int64_t width, const Tensor& x) {
  const Dtype dtype = dtype_of(op, x);
  QuantizedLinear q;
  q.format = format_of(op, codes, scales);
  q.bits = codes.scalar_type() == at::kByte ? 4 : 8;
  q.in_features = width;
  q.out_features = columns;
  const int64_t mx_blocks = (width + q.MX_BLOCK - 1) / q.MX_BLOCK;
  q.padded = (width + q.BLOCK - 1) / q.BLOCK * q.BLOCK;
  q.row_bytes = q.format == MXFP4 ? mx_blocks * q.MX_BLOCK / 2 : q.bits == 4 ? q.padded / 2 : width;
  expect(op, name, codes, {experts, columns, q.row_bytes}, q.format == MXFP4 ? at::kByte : codes.scalar_type());
  q.groups = scales.dim() == 3 ? scales.size(2) : 0;
  expect(op, "scales", scales, {experts, columns, q.format == MXFP4 ? mx_blocks : q.groups}, scales.scalar_type());
  if (offsets.defined()) expect(op, "offsets", offsets, scales.sizes(), scales.scalar_type());
  if (bias.defined()) expect(op, "bias", bias, {experts, columns}, x.scalar_type());
  if (q.format != MXFP4) {
    const int64_t lanes = q.bits == 4 ? 2 * q.LANES : q.LANES;
    TORCH_CHECK_VALUE(q.groups == 1 || (q.groups > 1 && width % (q.groups * lanes) == 0), op, ": ", name, " has ",
                      q.groups, " groups for ", width, " inputs, expected groups of a multiple of ", lanes, " inputs");
    q.group = width / q.groups;
    q.scale_dtype = dtype_of(op, scales);
  }
  TORCH_CHECK_VALUE(!offsets.defined() || q.format == INTEGERS, op, ": only integers have offsets");
  const auto* const of_codes = static_cast<const uint8_t*>(codes.const_data_ptr());
  const char* const of_scales = static_cast<const char*>(scales.const_data_ptr());
  const char* const of_offsets = offsets.defined() ? static_cast<const char*>(offsets.const_data_ptr()) : nullptr;
  const int64_t apart = columns * q.groups * int64_t(scales.element_size());
  return {bias, columns, width, [=](Linear& linear, int64_t expert, int64_t first, int64_t last) {
            QuantizedLinear one = q;
            one.codes = of_codes + expert * columns * q.row_bytes;
            one.scales = of_scales + expert * apart;
            if (of_offsets) one.offsets = of_offsets + expert * apart;
            const bool as_they_are = q.format == INTEGERS && linear.rows == 1;
            (as_they_are ? row_on_codes : rows_on_plain_numbers)(one, dtype, linear, first, last);
          }};
}

Tensor quantized_experts(const Tensor& x, const Tensor& w13, const Tensor& w13_scales, const Tensor& w2,
                         const Tensor& w2_scales, const Tensor& topk_weights, const Tensor& topk_ids,
                         c10::string_view activation, const OptionalTensor& w13_offsets,
                         const OptionalTensor& w2_offsets, const OptionalTensor& w13_bias,
                         const OptionalTensor& w2_bias) {
  constexpr const char* op = "quantized_experts";
  refuse_gradient(op, x, w13_scales, w2_scales, topk_weights, defined(w13_offsets), defined(w2_offsets),
                  defined(w13_bias), defined(w2_bias));
  expect_choices(op, x, topk_weights, topk_ids);
  TORCH_CHECK_VALUE(w13.dim() == 3 && w13.size(1) % 2 == 0 && w13.size(1) > 0 && x.size(1) > 0, op, ": w13 has shape ",
                    w13.sizes(), " and x ", x.sizes(), ", expected some rows of gate, as many of up, and some inputs");
  const int64_t experts = w13.size(0), rows = w13.size(1), hidden = x.size(1);
  const Matrices gate_up = quantized(op, "w13", w13, w13_scales, defined(w13_offsets), defined(w13_bias), experts, rows,
                                     hidden, x);
  const Matrices down = quantized(op, "w2", w2, w2_scales, defined(w2_offsets), defined(w2_bias), experts, hidden,
                                  rows / 2, x);
  return computed(op, x, gate_up, down, experts, topk_weights, topk_ids, activation);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(opgraft_cpu_kernels, library) {
  library.def(
      "fused_experts(Tensor x, Tensor w13, Tensor w2, Tensor topk_weights, Tensor topk_ids, str activation=\"silu\", "
      "Tensor? w13_bias=None, Tensor? w2_bias=None) -> Tensor");
  library.def(
      "quantized_experts(Tensor x, Tensor w13, Tensor w13_scales, Tensor w2, Tensor w2_scales, Tensor topk_weights, "
      "Tensor topk_ids, str activation=\"silu\", Tensor? w13_offsets=None, Tensor? w2_offsets=None, Tensor? "
      "w13_bias=None, Tensor? w2_bias=None) -> Tensor");
}

#define EXPERTS(apply) apply(fused_experts) apply(quantized_experts)

IMPLEMENT(EXPERTS)

}  // namespace opgraft_cpu_kernels
