// A norm of rows that is ready to run: its arguments, its kernel, and the tensors that hold their memory.
#pragma once

#include "tensors.h"

namespace opgraft_cpu_kernels {

using NormTable = NormKernel (Path::*)[DTYPES][2];

// The kernels multiply in float32 and round once; a definition rounds to a weight's dtype before, which makes no more
// difference than rounding does if that is the dtype of x, and none in float32. 1 + weight it computes as they do.
inline void expect_dtype_of_weight(const char* op, const char* name, const Tensor& weight, const Tensor& x) {
  TORCH_CHECK_VALUE(weight.scalar_type() == x.scalar_type() || weight.scalar_type() == at::kFloat, op, ": ", name,
                    " has dtype ", weight.scalar_type(), ", expected that of x, ", x.scalar_type(), ", or float32");
}

inline Norm norm_of(const char* op, const Matrix& x, double eps, std::optional<int64_t> measured, bool gemma) {
  Norm norm;
  norm.x = x.view();
  norm.width = x.width;
  norm.measured = measured.value_or(x.width);
  TORCH_CHECK_VALUE(x.rows == 0 || (0 < norm.measured && norm.measured <= x.width), op, ": variance_size is ",
                    norm.measured, ", expected 1 to ", x.width);
  norm.eps = float(eps);
  norm.one_plus_weight = gemma;
  return norm;
}

// Weight and bias of a norm, and the kernel for their dtype.
struct Factors {
  Tensor weight, bias;
  NormKernel kernel;

  Factors(const char* op, NormTable table, Norm& norm, const Tensor& x, const OptionalTensor& given_weight,
          const OptionalTensor& given_bias) {
    const Dtype dtype = dtype_of(op, x);
    int index = 0;
    if (given_weight && given_weight->defined()) {
      TORCH_CHECK_VALUE(given_weight->dim() == 1 && given_weight->numel() == norm.width, op, ": x has shape ",
                        x.sizes(), ", expected a last dimension of ", given_weight->sizes());
      if (!norm.one_plus_weight) expect_dtype_of_weight(op, "weight", *given_weight, x);
      weight = usable(op, *given_weight, x);
      index = index_of(weight);
      norm.weight = weight.const_data_ptr();
    }
    if (given_bias && given_bias->defined()) {
      TORCH_CHECK_VALUE(given_bias->dim() == 1 && given_bias->numel() == norm.width, op, ": bias has shape ",
                        given_bias->sizes(), ", expected ", norm.width);
      expect_dtype_of_weight(op, "bias", *given_bias, x);
      bias = usable(op, *given_bias, x);
      TORCH_CHECK_VALUE(!weight.defined() || bias.scalar_type() == weight.scalar_type(), op, ": bias has dtype ",
                        given_bias->scalar_type(), ", expected that of weight, ", weight.scalar_type());
      index = index_of(bias);
      norm.bias = bias.const_data_ptr();
    }
    kernel = (path().*table)[dtype][index];
  }
};

// The root mean square norm of rows, after a sum if there is a residual. Rows go wherever the caller wants them.
struct RmsNormOfRows {
  Matrix x;
  std::optional<Matrix> residual;
  Tensor sum;  // x + residual, rounded; undefined without a residual
  Norm norm;
  Factors factors;

  RmsNormOfRows(const char* op, const Tensor& input, const OptionalTensor& added, const OptionalTensor& weight,
                double eps, bool gemma)
      : x(op, input), norm(norm_of(op, x, eps, {}, gemma)), factors(op, &Path::rms_norm, norm, input, weight, {}) {
    refuse_gradient(op, input, defined(added), defined(weight));
    if (added) add(op, *added, fresh(input.sizes(), input.scalar_type()));
  }

  // Adds a residual first. `to` takes the sum, and may be x itself if x is contiguous.
  void add(const char* op, const Tensor& added, const Tensor& to) {
    expect_same(op, "residual", added, x.tensor);
    residual.emplace(op, added);
    sum = to;
    norm.residual = residual->view();
    norm.sum = rows_of(sum, x.width);
  }

  // Writes the rows [begin, end) to their places in `to`.
  void operator()(const MutableRows& to, int64_t begin, int64_t end) const {
    Norm rows = norm;
    rows.out = to;
    factors.kernel(rows, begin, end);
  }
};

}  // namespace opgraft_cpu_kernels
