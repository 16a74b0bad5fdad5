// Activations as torch ops.

#include <ATen/native/Math.h>

#include <cmath>

#include "ops.h"
#include "overlap.h"
#include "quantizing.h"

namespace opgraft_cpu_kernels {
namespace {

// Sizes of x with half its last dimension.
std::vector<int64_t> half(const char* op, const Tensor& x) {
  std::vector<int64_t> sizes = x.sizes().vec();
  TORCH_CHECK_VALUE(sizes.back() % 2 == 0, op, ": x has shape ", x.sizes(), ", expected an even last dimension");
  sizes.back() /= 2;
  return sizes;
}

Tensor gated(const char* op, Gated kind, const Tensor& input, float first = 0, float second = 0, bool swapped = false) {
  refuse_gradient(op, input);
  const Matrix x(op, input);
  const Tensor out = fresh(half(op, input), input.scalar_type());
  const int64_t width = x.width / 2;
  GatedActivation a{x.view(), x.view(width), result_rows(out, width), width, first, second};
  if (swapped) std::swap(a.gate, a.up);
  const GatedKernel kernel = path().gated[kind][dtype_of(op, input)];
  share(x.rows, x.width, [&](int64_t begin, int64_t end) { kernel(a, begin, end); });
  return out;
}

// Rows of silu(gate) * up, which go wherever the caller wants them.
struct SiluAndMulOfRows {
  Matrix x;
  Dtype dtype;
  std::vector<int64_t> sizes;
  GatedKernel kernel;

  SiluAndMulOfRows(const char* op, const Tensor& input)
      : x(op, input), dtype(dtype_of(op, input)), sizes(half(op, input)), kernel(path().gated[SILU_AND_MUL][dtype]) {
    refuse_gradient(op, input);
  }

  void operator()(const MutableRows& to, int64_t begin, int64_t end) const {
    kernel({x.view(), x.view(x.width / 2), to, x.width / 2}, begin, end);
  }
};

bool is_tanh(const char* op, c10::string_view approximate) {
  const bool tanh = approximate == "tanh";
  TORCH_CHECK_VALUE(tanh || approximate == "none", op, ": approximate is '", approximate,
                    "', expected 'none' or 'tanh'");
  return tanh;
}

}  // namespace

Tensor silu_and_mul(const Tensor& x) { return gated("silu_and_mul", SILU_AND_MUL, x); }

Tensor gelu_and_mul(const Tensor& x, c10::string_view approximate) {
  return gated("gelu_and_mul", is_tanh("gelu_and_mul", approximate) ? GELU_TANH_AND_MUL : GELU_AND_MUL, x);
}

namespace {
Tensor silu_and_mul_quant_fp8_static(const Tensor& x, const Tensor& scale, at::IntArrayRef group_shape) {
  const char* op = "silu_and_mul_quant_fp8_static";
  refuse_gradient(op, scale);
  const SiluAndMulOfRows product(op, x);
  QuantizedRows rows(op, product.sizes, x.scalar_type(), product.dtype, group_shape, scale);
  rows.take(0, product.x.rows, product);
  return rows.out;
}
std::tuple<Tensor, Tensor> silu_and_mul_quant_fp8_dynamic(const Tensor& x, at::IntArrayRef group_shape,
                                                          const OptionalTensor& scale_ub, bool use_ue8m0) {
  const char* op = "silu_and_mul_quant_fp8_dynamic";
  const SiluAndMulOfRows product(op, x);
  QuantizedRows rows(op, product.sizes, x.scalar_type(), product.dtype, group_shape, ScaleRule{scale_ub, use_ue8m0});
  rows.take(0, product.x.rows, product);
  rows.finish();
  return {rows.out, rows.scales};
}
Tensor mul_and_silu(const Tensor& x) { return gated("mul_and_silu", SILU_AND_MUL, x, 0, 0, true); }
Tensor gelu_and_mul_sparse(const Tensor& x, double activation_sparsity, c10::string_view approximate) {
  const char* op = "gelu_and_mul_sparse";
  TORCH_CHECK_VALUE(0 < activation_sparsity && activation_sparsity < 1, op, ": activation_sparsity is ",
                    activation_sparsity, ", expected a number between 0 and 1");
  const float quantile = float(calc_ndtri(activation_sparsity));
  return gated(op, is_tanh(op, approximate) ? GELU_TANH_AND_MUL_SPARSE : GELU_AND_MUL_SPARSE, x, quantile);
}
Tensor fatrelu_and_mul(const Tensor& x, double threshold) {
  return gated("fatrelu_and_mul", FATRELU_AND_MUL, x, float(threshold));
}
float usable_limit(const char* op, double limit) {
  TORCH_CHECK_VALUE(limit >= 0, op, ": limit is ", limit, ", expected a number that is not negative");
  return float(limit);
}
Tensor silu_and_mul_with_clamp(const Tensor& x, double limit) {
  const char* op = "silu_and_mul_with_clamp";
  return gated(op, CLAMPED_SILU_AND_MUL, x, usable_limit(op, limit));
}
Tensor swiglustep_and_mul(const Tensor& x, double limit) {
  return gated("swiglustep_and_mul", SWIGLUSTEP, x, usable_limit("swiglustep_and_mul", limit));
}
}  // namespace

Tensor swigluoai_and_mul(const Tensor& x, double alpha, double limit) {
  return gated("swigluoai_and_mul", SWIGLUOAI, x, float(alpha), usable_limit("swigluoai_and_mul", limit));
}

namespace {

void activate(const char* op, Plain kind, const Tensor& x, const Tensor& out) {
  const PlainKernel kernel = path().plain[kind][dtype_of(op, x)];
  const void* from = x.const_data_ptr();
  void* to = out.mutable_data_ptr();
  share(x.numel(), 1, [&](int64_t begin, int64_t end) { kernel(from, to, begin, end); });
}

Tensor plain(const char* op, Plain kind, const Tensor& input) {
  refuse_gradient(op, input);
  const Tensor x = input.contiguous(), out = fresh(input.sizes(), input.scalar_type());
  activate(op, kind, x, out);
  return out;
}

// ln(1 + e^x) of the one element of a parameter.
float softplus(const char* op, const char* name, const Tensor& parameter) {
  TORCH_CHECK_VALUE(parameter.numel() == 1, op, ": ", name, " has shape ", parameter.sizes(), ", expected one element");
  expect_floating(op, parameter);
  const double value = float(parameter.item().toDouble());
  return float(value > 20 ? value : std::log1p(std::exp(value)));
}

Tensor xielu(const Tensor& input, const Tensor& alpha_p, const Tensor& alpha_n, double beta, double eps) {
  const char* op = "xielu";
  refuse_gradient(op, input, alpha_p, alpha_n);
  const float positive = softplus(op, "alpha_p", alpha_p), negative = softplus(op, "alpha_n", alpha_n);
  const XieluKernel kernel = path().xielu[dtype_of(op, input)];
  const Tensor x = input.contiguous(), out = fresh(input.sizes(), input.scalar_type());
  const Xielu a{x.const_data_ptr(), out.mutable_data_ptr(), positive, float(beta) + negative, float(beta), float(eps)};
  share(x.numel(), 1, [&](int64_t begin, int64_t end) { kernel(a, begin, end); });
  return out;
}

Tensor gelu(const Tensor& x, c10::string_view approximate) {
  return plain("gelu", is_tanh("gelu", approximate) ? GELU_TANH : GELU, x);
}
Tensor gelu_tanh(const Tensor& x) { return plain("gelu_tanh", GELU_TANH, x); }
Tensor gelu_new(const Tensor& x) { return plain("gelu_new", GELU_TANH, x); }
Tensor gelu_fast(const Tensor& x) { return plain("gelu_fast", GELU_FAST, x); }
Tensor quick_gelu(const Tensor& x) { return plain("quick_gelu", QUICK_GELU, x); }
Tensor silu(const Tensor& x) { return plain("silu", SILU, x); }
Tensor relu2(const Tensor& x) { return plain("relu2", RELU2, x); }
void silu_(const Tensor& x) {
  refuse_gradient("silu_", x);
  at::assert_no_internal_overlap(x);
  TORCH_CHECK_VALUE(is_apart(x), "silu_: elements of x share memory, expected to write to each once");
  if (x.is_contiguous()) {
    activate("silu_", SILU, x, x);
    written(x);
  } else {
    x.copy_(silu(x));
  }
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(opgraft_cpu_kernels, library) {
  library.def("silu_and_mul(Tensor x) -> Tensor");
  library.def("silu_and_mul_quant_fp8_static(Tensor x, Tensor scale, int[] group_shape) -> Tensor");
  library.def(
      "silu_and_mul_quant_fp8_dynamic(Tensor x, int[] group_shape, Tensor? scale_ub=None, bool use_ue8m0=False) -> "
      "(Tensor, Tensor)");
  library.def("mul_and_silu(Tensor x) -> Tensor");
  library.def("gelu_and_mul(Tensor x, str approximate=\"none\") -> Tensor");
  library.def("gelu_and_mul_sparse(Tensor x, float activation_sparsity, str approximate=\"none\") -> Tensor");
  library.def("fatrelu_and_mul(Tensor x, float threshold=0.0) -> Tensor");
  library.def("silu_and_mul_with_clamp(Tensor x, float limit) -> Tensor");
  library.def("swiglustep_and_mul(Tensor x, float limit=7.0) -> Tensor");
  library.def("swigluoai_and_mul(Tensor x, float alpha=1.702, float limit=7.0) -> Tensor");
  library.def("gelu(Tensor x, str approximate=\"none\") -> Tensor");
  library.def("gelu_tanh(Tensor x) -> Tensor");
  library.def("gelu_new(Tensor x) -> Tensor");
  library.def("gelu_fast(Tensor x) -> Tensor");
  library.def("quick_gelu(Tensor x) -> Tensor");
  library.def("silu(Tensor x) -> Tensor");
  library.def("silu_(Tensor(a!) x) -> ()");
  library.def("relu2(Tensor x) -> Tensor");
  library.def("xielu(Tensor x, Tensor alpha_p, Tensor alpha_n, float beta=0.5, float eps=-1e-06) -> Tensor");
}

#define ACTIVATIONS(apply)                                                                                         \
  apply(silu_and_mul) apply(silu_and_mul_quant_fp8_static) apply(silu_and_mul_quant_fp8_dynamic)                   \
      apply(mul_and_silu) apply(gelu_and_mul) apply(gelu_and_mul_sparse) apply(fatrelu_and_mul)                    \
          apply(silu_and_mul_with_clamp) apply(swiglustep_and_mul) apply(swigluoai_and_mul) apply(gelu)            \
              apply(gelu_tanh) apply(gelu_new) apply(gelu_fast) apply(quick_gelu) apply(silu) apply(silu_)         \
                  apply(relu2) apply(xielu)

IMPLEMENT(ACTIVATIONS)

}  // namespace opgraft_cpu_kernels
