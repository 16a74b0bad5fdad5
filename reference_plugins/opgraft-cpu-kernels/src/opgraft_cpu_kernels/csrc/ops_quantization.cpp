// Quantization as torch ops.

#include <mutex>

#include "tensors.h"

namespace opgraft_cpu_kernels {
namespace {

// The groups of a quantization: [rows, columns], -1 for the whole extent. The last group of a row may be smaller.
struct Groups {
  bool whole;  // one scale for the tensor
  int64_t columns, count;

  Groups(const char* op, const Matrix& x, at::IntArrayRef shape) {
    TORCH_CHECK_VALUE(shape.size() == 2 && ((shape[0] == -1 && shape[1] == -1) || shape[0] == 1), op,
                      ": group_shape is ", shape, ", expected (-1, -1), (1, -1) or (1, columns)");
    whole = shape[0] == -1;
    columns = shape[1] == -1 ? x.width : shape[1];
    TORCH_CHECK_VALUE(x.width == 0 || (columns > 0), op, ": group_shape is ", shape, ", expected some columns");
    count = columns ? (x.width + columns - 1) / columns : 0;
  }
};

Quantization quantization(const Matrix& x, const Tensor& out, const Groups& groups, float* scales) {
  Quantization q;
  q.x = x.view();
  q.out = static_cast<uint8_t*>(out.mutable_data_ptr());
  q.width = x.width;
  q.group = groups.columns;
  q.scales = scales;
  q.scale_row_stride = groups.whole ? 0 : groups.count;
  q.scale_group_stride = groups.whole ? 0 : 1;
  return q;
}

void quantize(const QuantizationKernel kernel, const Quantization& q, const Matrix& x) {
  share(x.rows, x.width, [&](int64_t begin, int64_t end) { kernel(q, begin, end); });
}

Tensor quant_fp8_static(const Tensor& input, const Tensor& scale, at::IntArrayRef group_shape) {
  const char* op = "quant_fp8_static";
  refuse_gradient(op, input, scale);
  const Matrix x(op, input);
  const Groups groups(op, x, group_shape);
  const Tensor scales = scale.to(at::kFloat).contiguous();
  TORCH_CHECK_VALUE(scales.numel() == (groups.whole ? 1 : x.rows * groups.count), op, ": scale has shape ",
                    scale.sizes(), ", expected one element for each group");
  const Tensor out = fresh(input.sizes(), at::kFloat8_e4m3fn);
  quantize(path().fp8_static[dtype_of(op, input)],
           quantization(x, out, groups, const_cast<float*>(scales.const_data_ptr<float>())), x);
  return out;
}

float largest_absolute(Dtype dtype, const Matrix& x) {
  const MaximumKernel kernel = path().absolute_maximum[dtype];
  std::mutex one;
  float largest = 0;
  share(x.rows, x.width, [&](int64_t begin, int64_t end) {
    const float part = kernel(x.view(), x.width, begin, end);
    const std::lock_guard<std::mutex> guard(one);
    largest = std::max(largest, part);
  });
  return largest;
}

std::tuple<Tensor, Tensor> quantized(const char* op, const Tensor& input, at::IntArrayRef group_shape,
                                     const OptionalTensor& scale_ub, bool power_of_two, bool fp8) {
  refuse_gradient(op, input);
  const Dtype dtype = dtype_of(op, input);
  const Matrix x(op, input);
  const Groups groups(op, x, group_shape);
  std::vector<int64_t> sizes = input.sizes().vec();
  sizes.back() = groups.count;
  if (groups.whole) sizes = {1};
  const Tensor out = fresh(input.sizes(), fp8 ? at::kFloat8_e4m3fn : at::kChar), scales = fresh(sizes, at::kFloat);
  Quantization q = quantization(x, out, groups, scales.mutable_data_ptr<float>());
  const float largest_quantized = fp8 ? 448.0f : 127.0f;
  q.smallest_scale = fp8 ? 1.0f / (448.0f * 512.0f) : 1.17549435e-38f;
  q.power_of_two = power_of_two;
  if (scale_ub && scale_ub->defined()) q.upper_bound = scale_ub->item<float>();
  if (groups.whole) {
    *q.scales = scale_of(q, largest_absolute(dtype, x), largest_quantized);
    quantize(path().fp8_static[dtype], q, x);
  } else {
    quantize((fp8 ? path().fp8_dynamic : path().int8_dynamic)[dtype], q, x);
  }
  return {out, scales};
}

std::tuple<Tensor, Tensor> quant_fp8_dynamic(const Tensor& x, at::IntArrayRef group_shape,
                                             const OptionalTensor& scale_ub, bool use_ue8m0) {
  return quantized("quant_fp8_dynamic", x, group_shape, scale_ub, use_ue8m0, true);
}
std::tuple<Tensor, Tensor> quant_int8_dynamic(const Tensor& x) {
  return quantized("quant_int8_dynamic", x, {1, -1}, {}, false, false);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(opgraft_cpu_kernels, library) {
  library.def("quant_fp8_static(Tensor x, Tensor scale, int[] group_shape) -> Tensor");
  library.def(
      "quant_fp8_dynamic(Tensor x, int[] group_shape, Tensor? scale_ub=None, bool use_ue8m0=False) -> (Tensor, "
      "Tensor)");
  library.def("quant_int8_dynamic(Tensor x) -> (Tensor, Tensor)");
}

#define QUANTIZATION(apply) apply(quant_fp8_static) apply(quant_fp8_dynamic) apply(quant_int8_dynamic)

IMPLEMENT(QUANTIZATION)

}  // namespace opgraft_cpu_kernels
