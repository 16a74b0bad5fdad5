// Norms whose rows are quantized while the second cache has them, as torch ops.

#include "norms.h"
#include "quantizing.h"

namespace opgraft_cpu_kernels {
namespace {

Tensor normed_by_given_scales(const char* op, const RmsNormOfRows& norm, const Tensor& scale,
                              at::IntArrayRef group_shape) {
  refuse_gradient(op, scale);
  const Tensor& x = norm.x.tensor;
  QuantizedRows rows(op, x.sizes(), x.scalar_type(), dtype_of(op, x), group_shape, scale);
  rows.take(0, norm.x.rows, norm);
  return rows.out;
}

std::tuple<Tensor, Tensor> normed_by_own_scales(const char* op, const RmsNormOfRows& norm, at::IntArrayRef group_shape,
                                                const ScaleRule& rule) {
  const Tensor& x = norm.x.tensor;
  QuantizedRows rows(op, x.sizes(), x.scalar_type(), dtype_of(op, x), group_shape, rule);
  rows.take(0, norm.x.rows, norm);
  rows.finish();
  return {rows.out, rows.scales};
}

Tensor rms_norm_quant_fp8_static(const Tensor& x, const Tensor& scale, at::IntArrayRef group_shape,
                                 const OptionalTensor& weight, double eps) {
  const char* op = "rms_norm_quant_fp8_static";
  return normed_by_given_scales(op, {op, x, {}, weight, eps, false}, scale, group_shape);
}

std::tuple<Tensor, Tensor> rms_norm_quant_fp8_dynamic(const Tensor& x, at::IntArrayRef group_shape,
                                                      const OptionalTensor& weight, double eps,
                                                      const OptionalTensor& scale_ub, bool use_ue8m0) {
  const char* op = "rms_norm_quant_fp8_dynamic";
  return normed_by_own_scales(op, {op, x, {}, weight, eps, false}, group_shape, {scale_ub, use_ue8m0});
}

std::tuple<Tensor, Tensor> fused_add_rms_norm_quant_fp8_static(const Tensor& x, const Tensor& residual,
                                                               const Tensor& scale, at::IntArrayRef group_shape,
                                                               const OptionalTensor& weight, double eps) {
  const char* op = "fused_add_rms_norm_quant_fp8_static";
  const RmsNormOfRows norm(op, x, residual, weight, eps, false);
  return {normed_by_given_scales(op, norm, scale, group_shape), norm.sum};
}

std::tuple<Tensor, Tensor, Tensor> fused_add_rms_norm_quant_fp8_dynamic(const Tensor& x, const Tensor& residual,
                                                                        at::IntArrayRef group_shape,
                                                                        const OptionalTensor& weight, double eps,
                                                                        const OptionalTensor& scale_ub,
                                                                        bool use_ue8m0) {
  const char* op = "fused_add_rms_norm_quant_fp8_dynamic";
  const RmsNormOfRows norm(op, x, residual, weight, eps, false);
  const auto [out, scales] = normed_by_own_scales(op, norm, group_shape, {scale_ub, use_ue8m0});
  return {out, scales, norm.sum};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(opgraft_cpu_kernels, library) {
  library.def(
      "rms_norm_quant_fp8_static(Tensor x, Tensor scale, int[] group_shape, Tensor? weight, float eps) -> Tensor");
  library.def(
      "rms_norm_quant_fp8_dynamic(Tensor x, int[] group_shape, Tensor? weight, float eps, Tensor? scale_ub=None, bool "
      "use_ue8m0=False) -> (Tensor, Tensor)");
  library.def(
      "fused_add_rms_norm_quant_fp8_static(Tensor x, Tensor residual, Tensor scale, int[] group_shape, Tensor? "
      "weight, float eps) -> (Tensor, Tensor)");
  library.def(
      "fused_add_rms_norm_quant_fp8_dynamic(Tensor x, Tensor residual, int[] group_shape, Tensor? weight, float eps, "
      "Tensor? scale_ub=None, bool use_ue8m0=False) -> (Tensor, Tensor, Tensor)");
}

#define QUANTIZED_NORMS(apply)                                                  \
  apply(rms_norm_quant_fp8_static) apply(rms_norm_quant_fp8_dynamic)            \
      apply(fused_add_rms_norm_quant_fp8_static) apply(fused_add_rms_norm_quant_fp8_dynamic)

IMPLEMENT(QUANTIZED_NORMS)

}  // namespace opgraft_cpu_kernels
