// Linear layers with quantized weights as torch ops.

#include <ATen/ops/linear.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "ops.h"

namespace opgraft_cpu_kernels {
namespace {

constexpr int64_t VECTOR = 64;  // what rows of integers are filled up to
constexpr int64_t SIDE = 32;    // of a tile of codes, in outputs and in inputs

// Up to so many rows are multiplied with the codes; for more it pays to make plain numbers of these first. In tiles
// that was measured on one core of Zen 4, over weights of 576 to 11,008 inputs, up to 1,024 rows. With bfloat16, of
// which torch multiplies pairs, 128 rows take 0.95 of the time that they take over plain numbers, and 256 take 1.1. In
// other dtypes any number of rows takes 0.1 to 0.8.
constexpr int64_t few(int bits, bool tiled, Dtype dtype) {
  if (tiled) return dtype == BFLOAT16 ? 128 : INT64_MAX;
  return bits == 4 ? 16 : 8;
}

// Bytes of plain numbers that are made at once: what the last cache keeps.
constexpr int64_t PLAIN_BYTES = int64_t(1) << 23;

int64_t filled_up(int64_t count, int64_t unit) { return (count + unit - 1) / unit * unit; }

Tensor result_of(const Tensor& x, int64_t out_features) {
  c10::SmallVector<int64_t, 6> sizes(x.sizes().begin(), x.sizes().end());
  sizes.back() = out_features;
  return fresh(sizes, x.scalar_type());
}

Tensor bias_of(const char* op, const Tensor& bias, const Tensor& x, int64_t out_features) {
  if (!bias.defined()) return bias;
  TORCH_CHECK_VALUE(bias.dim() == 1 && bias.size(0) == out_features && bias.scalar_type() == x.scalar_type(), op,
                    ": bias has shape ", bias.sizes(), " and dtype ", bias.scalar_type(), ", expected [", out_features,
                    "] of dtype ", x.scalar_type());
  return bias.contiguous();
}

void expect_matrix(const char* op, const char* name, const Tensor& tensor, int64_t rows, int64_t columns,
                   at::ScalarType dtype) {
  TORCH_CHECK_VALUE(tensor.dim() == 2 && tensor.size(0) == rows && tensor.size(1) == columns &&
                        tensor.scalar_type() == dtype,
                    op, ": ", name, " has shape ", tensor.sizes(), " and dtype ", tensor.scalar_type(), ", expected [",
                    rows, ", ", columns, "] of dtype ", dtype);
}

// The arguments of a call, and memory for its result.
struct QuantizedCall {
  static constexpr const char* op = "quantized_linear";
  Dtype dtype;
  Matrix x;
  bool tiled;
  int64_t unit;  // outputs that a kernel counts as one
  Tensor weight, scales, offsets, bias, out;
  QuantizedLinear q;

  QuantizedCall(const Tensor& input, const Tensor& codes, const Tensor& given_scales,
                const OptionalTensor& given_offsets, const OptionalTensor& given_bias)
      : dtype(dtype_of(op, input)), x(op, input), tiled(codes.dim() == 3), unit(tiled ? SIDE : 1) {
    const Tensor &added = defined(given_offsets), &last = defined(given_bias);
    refuse_gradient(op, input, given_scales, added, last);
    q.bits = codes.scalar_type() == at::kByte ? 4 : 8;
    q.in_features = x.width;
    q.padded = filled_up(x.width, tiled ? SIDE : QuantizedLinear::BLOCK);
    q.row_bytes = q.bits == 4 ? q.padded / 2 : x.width;
    q.out_features = codes.dim() ? codes.size(0) * unit : 0;
    expect_codes(codes);
    q.groups = given_scales.dim() == codes.dim() ? given_scales.size(1) : 0;
    expect_scales("scales", given_scales, given_scales.scalar_type());
    const int64_t lanes = q.bits == 4 || tiled ? 2 * q.LANES : q.LANES;
    TORCH_CHECK_VALUE(q.groups == 1 || (x.width % q.groups == 0 && x.width / q.groups % lanes == 0), op,
                      ": scales have ", q.groups, " groups for ", x.width, " inputs, expected groups of a multiple of ",
                      lanes, " inputs");
    q.group = x.width / q.groups;
    q.scale_dtype = dtype_of(op, given_scales);
    weight = codes.contiguous();
    scales = given_scales.contiguous();
    if (added.defined()) {
      expect_scales("offsets", added, given_scales.scalar_type());
      offsets = added.contiguous();
      q.offsets = offsets.const_data_ptr();
    }
    bias = bias_of(op, last, input, q.out_features);
    q.codes = static_cast<const uint8_t*>(weight.const_data_ptr());
    q.scales = scales.const_data_ptr();
    q.bias = bias.defined() ? bias.const_data_ptr() : nullptr;
    q.rows = x.rows;
    out = result_of(input, q.out_features);
    q.out = rows_of(out, q.out_features);
  }

 private:
  void expect_codes(const Tensor& codes) const {
    const at::ScalarType held = q.bits == 4 ? at::kByte : at::kChar;
    if (!tiled) return expect_matrix(op, "weight", codes, q.out_features, q.row_bytes, held);
    TORCH_CHECK_NOT_IMPLEMENTED(path().tiled_linear[dtype], op, ": the path ", path().name, " has no kernel for tiles");
    const int64_t tiles = q.padded / SIDE, bytes = SIDE * SIDE * q.bits / 8;
    TORCH_CHECK_VALUE(codes.size(1) == tiles && codes.size(2) == bytes && codes.scalar_type() == held, op,
                      ": weight has shape ", codes.sizes(), " and dtype ", codes.scalar_type(),
                      ", expected tiles [out_features / ", SIDE, ", ", tiles, ", ", bytes, "] of dtype ", held);
  }

  void expect_scales(const char* name, const Tensor& given, at::ScalarType held) const {
    const int64_t groups = std::max<int64_t>(1, q.groups), tiles = q.out_features / SIDE;
    if (!tiled) return expect_matrix(op, name, given, q.out_features, groups, held);
    TORCH_CHECK_VALUE(given.sizes() == at::IntArrayRef({tiles, groups, SIDE}) && given.scalar_type() == held, op, ": ",
                      name, " have shape ", given.sizes(), " and dtype ", given.scalar_type(), ", expected [", tiles,
                      ", ", groups, ", ", SIDE, "] of dtype ", held, " as the weight is in tiles");
  }
};

void on_codes(QuantizedCall& call) {
  QuantizedLinear& q = call.q;
  const Tensor memory = fresh({q.rows * (q.padded + q.groups + q.out_features)}, at::kFloat);
  float* x = memory.mutable_data_ptr<float>();
  float* group_sums = x + q.rows * q.padded;
  path().prepare_rows[call.dtype](call.x.view(), q, x, group_sums);
  q.x = x;
  q.group_sums = group_sums;
  q.sums = group_sums + q.rows * q.groups;
  const QuantizedLinearKernel kernel = path().quantized_linear[call.dtype];
  share(q.out_features, q.in_features * q.rows, [&](int64_t begin, int64_t end) { kernel(q, begin, end); });
}

void on_tiles(QuantizedCall& call) {
  QuantizedLinear& q = call.q;
  const IntegersKernel prepare = path().prepare_integers[call.dtype];
  const QuantizedLinearKernel kernel = path().tiled_linear[call.dtype];
  const int64_t tiles = q.out_features / SIDE, width = q.in_features * q.rows * SIDE;
  const int64_t numbers = q.rows * q.padded;  // of float32, which take no less memory than their integers
  if (q.rows == 1) {  // which each thread prepares for itself sooner than it has the integers from another
    share(tiles, width, [&](int64_t begin, int64_t end) {
      static thread_local std::vector<float> x;
      x.resize(std::max(x.size(), size_t(numbers)));
      QuantizedLinear own = q;
      prepare(call.x.view(), q, x.data(), 0, 1);
      own.x = x.data();
      kernel(own, begin, end);
    });
    return;
  }
  const Tensor memory = fresh({numbers}, at::kFloat);
  float* x = memory.mutable_data_ptr<float>();
  share(q.rows, q.in_features, [&](int64_t begin, int64_t end) { prepare(call.x.view(), q, x, begin, end); });
  q.x = x;
  share(tiles, width, [&](int64_t begin, int64_t end) { kernel(q, begin, end); });
}

// Some rows of the weight after the other become plain numbers, which torch multiplies.
void on_plain_numbers(const QuantizedCall& call) {
  const c10::impl::ExcludeDispatchKeyGuard as_it_is(c10::DispatchKeySet(
      {c10::DispatchKey::AutocastCPU, c10::DispatchKey::AutogradCPU, c10::DispatchKey::ADInplaceOrView}));
  const QuantizedLinear& q = call.q;
  const Tensor x = call.x.tensor.reshape({q.rows, q.in_features}), out = call.out.view({q.rows, q.out_features});
  const int64_t row_bytes = q.in_features * int64_t(x.element_size());
  const int64_t some = std::max(SIDE, std::min(PLAIN_BYTES / row_bytes / SIDE * SIDE, q.out_features));
  const Tensor memory = fresh({some, q.in_features}, x.scalar_type());
  const DequantizeKernel kernel = call.tiled ? path().dequantize_tiles : path().dequantize_rows[call.dtype];
  char* plain = static_cast<char*>(memory.mutable_data_ptr());
  for (int64_t first = 0; first < q.out_features; first += some) {
    const int64_t count = std::min(some, q.out_features - first);
    share(count / call.unit, q.in_features * call.unit, [&](int64_t begin, int64_t end) {
      kernel(q, first / call.unit + begin, first / call.unit + end, plain + begin * call.unit * row_bytes);
    });
    OptionalTensor bias;
    if (call.bias.defined()) bias = call.bias.narrow(0, first, count);
    out.narrow(1, first, count).copy_(at::linear(x, memory.narrow(0, 0, count), bias));
  }
}

}  // namespace

Tensor quantized_linear(const Tensor& x, const Tensor& weight, const Tensor& scales, const OptionalTensor& offsets,
                        const OptionalTensor& bias) {
  QuantizedCall call(x, weight, scales, offsets, bias);
  if (!call.out.numel() || !call.q.in_features) {
    if (call.out.numel()) call.bias.defined() ? call.out.copy_(call.bias) : call.out.zero_();
  } else if (call.q.rows <= few(call.q.bits, call.tiled, call.dtype)) {
    call.tiled ? on_tiles(call) : on_codes(call);
  } else {
    on_plain_numbers(call);
  }
  return call.out;
}

Tensor int8_dynamic_linear(const Tensor& input, const Tensor& weight, const Tensor& scales,
                           const OptionalTensor& given_bias) {
  const char* op = "int8_dynamic_linear";
  const Dtype dtype = dtype_of(op, input);
  const Matrix x(op, input);
  const Tensor& last = defined(given_bias);
  refuse_gradient(op, input, scales, last);
  Int8Linear q;
  q.in_features = x.width;
  q.padded = filled_up(x.width, VECTOR);
  q.out_features = weight.dim() ? weight.size(0) : 0;
  expect_matrix(op, "weight", weight, q.out_features, x.width, at::kChar);
  expect_matrix(op, "scales", scales.dim() == 1 ? scales.unsqueeze(1) : scales, q.out_features, 1,
                scales.scalar_type());
  const Tensor codes = weight.contiguous(), factors = scales.to(at::kFloat).contiguous();
  const Tensor bias = bias_of(op, last, input, q.out_features);
  const Tensor out = result_of(input, q.out_features);
  if (!out.numel()) return out;
  TORCH_CHECK_VALUE(x.width, op, ": x has no inputs, expected some");
  q.weight = codes.const_data_ptr<int8_t>();
  q.scales = factors.const_data_ptr<float>();
  q.bias = bias.defined() ? bias.const_data_ptr() : nullptr;
  q.rows = x.rows;
  q.out = rows_of(out, q.out_features);
  const Tensor rows = fresh({q.rows, q.padded}, at::kChar), x_scales = fresh({q.rows}, at::kFloat);
  int8_t* to = rows.mutable_data_ptr<int8_t>();
  float* scales_to = x_scales.mutable_data_ptr<float>();
  const Path& kernels = path();
  share(q.rows, q.in_features, [&](int64_t begin, int64_t end) {
    kernels.int8_rows[dtype](x.view(), q, to, scales_to, begin, end);
  });
  q.x = to;
  q.x_scales = scales_to;
  share(q.out_features, q.in_features * q.rows,
        [&](int64_t begin, int64_t end) { kernels.int8_linear[dtype](q, begin, end); });
  return out;
}

TORCH_LIBRARY_FRAGMENT(opgraft_cpu_kernels, library) {
  library.def(
      "quantized_linear(Tensor x, Tensor weight, Tensor scales, Tensor? offsets=None, Tensor? bias=None) -> Tensor");
  library.def("int8_dynamic_linear(Tensor x, Tensor weight, Tensor scales, Tensor? bias=None) -> Tensor");
}

#define QUANTIZED_LINEAR(apply) apply(quantized_linear) apply(int8_dynamic_linear)

IMPLEMENT(QUANTIZED_LINEAR)

}  // namespace opgraft_cpu_kernels
