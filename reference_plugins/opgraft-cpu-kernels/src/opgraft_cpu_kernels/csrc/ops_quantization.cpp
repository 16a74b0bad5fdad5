// Quantization as torch ops.

#include "quantizing.h"

namespace opgraft_cpu_kernels {
namespace {

Tensor quant_fp8_static(const Tensor& input, const Tensor& scale, at::IntArrayRef group_shape) {
  const char* op = "quant_fp8_static";
  refuse_gradient(op, input, scale);
  const Matrix x(op, input);
  QuantizedRows rows(op, input.sizes(), input.scalar_type(), dtype_of(op, input), group_shape, scale);
  rows.quantize(x.view());
  return rows.out;
}

std::tuple<Tensor, Tensor> quantized(const char* op, const Tensor& input, at::IntArrayRef group_shape,
                                     const ScaleRule& rule) {
  refuse_gradient(op, input);
  const Matrix x(op, input);
  QuantizedRows rows(op, input.sizes(), input.scalar_type(), dtype_of(op, input), group_shape, rule);
  rows.quantize(x.view());
  return {rows.out, rows.scales};
}

std::tuple<Tensor, Tensor> quant_fp8_dynamic(const Tensor& x, at::IntArrayRef group_shape,
                                             const OptionalTensor& scale_ub, bool use_ue8m0) {
  return quantized("quant_fp8_dynamic", x, group_shape, {scale_ub, use_ue8m0});
}
std::tuple<Tensor, Tensor> quant_int8_dynamic(const Tensor& x) {
  return quantized("quant_int8_dynamic", x, {1, -1}, {{}, false, false});
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
