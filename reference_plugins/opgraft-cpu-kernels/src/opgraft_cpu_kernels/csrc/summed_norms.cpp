// Norms of sums over ranks, rows of which are normed and quantized before the next rows are exchanged.

#include "norms.h"
#include "quantizing.h"
#include "shared_group.h"

namespace opgraft_cpu_kernels {
namespace {

// The norm of a sum over ranks. The memory of the sum takes the residual, too.
struct SummedNorm {
  Tensor given, sum;
  RmsNormOfRows norm;

  SummedNorm(const char* op, const Tensor& x, const OptionalTensor& residual, const OptionalTensor& weight, double eps,
             bool gemma)
      : given(x.contiguous()),
        sum(fresh(x.sizes(), x.scalar_type())),
        norm(op, sum, {}, weight, eps, gemma) {
    refuse_gradient(op, x, defined(residual));
    if (residual) norm.add(op, *residual, sum);
  }

  void quantize(SharedGroup& group, QuantizedRows& rows) const {
    group.all_reduce_rows(given, sum, [&](int64_t first, int64_t last) { rows.take(first, last, norm); });
    rows.finish();
  }
};

}  // namespace

Tensors all_reduce_rms_norm(const c10::intrusive_ptr<SharedGroup>& group, const Tensor& x,
                            const OptionalTensor& residual, const OptionalTensor& weight, double eps, bool gemma) {
  const SummedNorm summed("all_reduce_rms_norm", x, residual, weight, eps, gemma);
  const Tensor out = fresh(x.sizes(), x.scalar_type());
  const MutableRows to = rows_of(out, summed.norm.norm.width);
  group->all_reduce_rows(summed.given, summed.sum, [&](int64_t first, int64_t last) {
    share(last - first, to.stride,
          [&](int64_t begin, int64_t end) { summed.norm(to, first + begin, first + end); });
  });
  return {out, summed.sum};
}

Tensors all_reduce_rms_norm_quant_fp8_static(const c10::intrusive_ptr<SharedGroup>& group, const Tensor& x,
                                             const OptionalTensor& residual, const Tensor& scale,
                                             const std::vector<int64_t>& group_shape, const OptionalTensor& weight,
                                             double eps) {
  const char* op = "all_reduce_rms_norm_quant_fp8_static";
  refuse_gradient(op, scale);
  const SummedNorm summed(op, x, residual, weight, eps, false);
  QuantizedRows rows(op, x.sizes(), x.scalar_type(), dtype_of(op, x), group_shape, scale);
  summed.quantize(*group, rows);
  return {rows.out, summed.sum};
}

Tensors all_reduce_rms_norm_quant_fp8_dynamic(const c10::intrusive_ptr<SharedGroup>& group, const Tensor& x,
                                              const OptionalTensor& residual, const std::vector<int64_t>& group_shape,
                                              const OptionalTensor& weight, double eps, const OptionalTensor& scale_ub,
                                              bool use_ue8m0) {
  const char* op = "all_reduce_rms_norm_quant_fp8_dynamic";
  const SummedNorm summed(op, x, residual, weight, eps, false);
  QuantizedRows rows(op, x.sizes(), x.scalar_type(), dtype_of(op, x), group_shape, ScaleRule{scale_ub, use_ue8m0});
  summed.quantize(*group, rows);
  return {rows.out, rows.scales, summed.sum};
}

}  // namespace opgraft_cpu_kernels
