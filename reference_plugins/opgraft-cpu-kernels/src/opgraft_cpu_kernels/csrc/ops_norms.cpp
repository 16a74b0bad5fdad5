// The norms as torch ops.

#include "norms.h"
#include "ops.h"
#include "overlap.h"

namespace opgraft_cpu_kernels {
namespace {

// Where the results of a norm go: all to new memory, or to tensors that the caller has.
struct Destination {
  Tensor out, sum;
};

// Whether a kernel can write to a tensor: rows of contiguous elements, none of them shared.
bool is_writable(const Tensor& x) { return x.dim() > 0 && row_stride(x) >= x.size(-1); }

void run(const char* op, NormTable table, Norm& norm, const Matrix& x, const OptionalTensor& weight,
         const OptionalTensor& bias, const Destination& to) {
  const Factors factors(op, table, norm, x.tensor, weight, bias);
  norm.out = result_rows(to.out, row_stride(to.out));
  if (to.sum.defined()) norm.sum = rows_of(to.sum, row_stride(to.sum));
  share(x.rows, x.width, [&](int64_t begin, int64_t end) { factors.kernel(norm, begin, end); });
}

Tensor normed(const char* op, NormTable table, const Tensor& input, const OptionalTensor& weight,
              const OptionalTensor& bias, double eps, std::optional<int64_t> measured, bool gemma) {
  refuse_gradient(op, input, defined(weight), defined(bias));
  const Matrix x(op, input);
  Norm norm = norm_of(op, x, eps, measured, gemma);
  const Destination to{fresh(input.sizes(), input.scalar_type()), {}};
  run(op, table, norm, x, weight, bias, to);
  return to.out;
}

void normed_into(const char* op, NormTable table, const Tensor& input, const OptionalTensor& residual_input,
                 const OptionalTensor& weight, const OptionalTensor& bias, double eps, std::optional<int64_t> measured,
                 bool gemma, const Destination& to) {
  refuse_gradient(op, input, defined(weight), defined(bias), defined(residual_input));
  const Matrix x(op, input);
  Norm norm = norm_of(op, x, eps, measured, gemma);
  std::optional<Matrix> residual;
  if (residual_input) {
    expect_same(op, "residual", *residual_input, input);
    residual.emplace(op, *residual_input);
    norm.residual = residual->view();
  }
  run(op, table, norm, x, weight, bias, to);
}

// Writes to tensors of the caller, through new memory where a kernel cannot write to them or would change what it has
// yet to read. Only x may be what is written itself, as a row is read before it is written.
void overwritten(const char* op, const Tensor& x, const OptionalTensor& residual, const OptionalTensor& weight,
                 double eps, std::optional<int64_t> measured, bool gemma, const Destination& wanted) {
  expect_same(op, "out", wanted.out, x);
  at::assert_no_internal_overlap(wanted.out);
  const Tensor &other = defined(residual), &factors = defined(weight);
  Destination to = wanted;
  if (!is_writable(to.out) || may_share_any(to.out, other, factors) ||
      (may_share(to.out, x) && !is_same_view(to.out, x)))
    to.out = fresh(x.sizes(), x.scalar_type());
  if (residual) {
    at::assert_no_internal_overlap(other);
    if (!is_writable(other) || may_share_any(other, x, factors)) to.sum = fresh(other.sizes(), other.scalar_type());
  }
  normed_into(op, &Path::rms_norm, x, residual, weight, {}, eps, measured, gemma, to);
  if (!to.out.is_same(wanted.out)) wanted.out.copy_(to.out);
  written(wanted.out);
  if (!residual) return;
  if (!to.sum.is_same(wanted.sum)) wanted.sum.copy_(to.sum);
  written(wanted.sum);
}

std::tuple<Tensor, Tensor> added(const char* op, NormTable table, const Tensor& x, const Tensor& residual,
                                 const OptionalTensor& weight, const OptionalTensor& bias, double eps,
                                 std::optional<int64_t> measured, bool gemma) {
  const Destination to{fresh(x.sizes(), x.scalar_type()), fresh(x.sizes(), x.scalar_type())};
  normed_into(op, table, x, residual, weight, bias, eps, measured, gemma, to);
  return {to.out, to.sum};
}

}  // namespace

Tensor rms_norm(const Tensor& x, const OptionalTensor& weight, double eps, std::optional<int64_t> measured) {
  return normed("rms_norm", &Path::rms_norm, x, weight, {}, eps, measured, false);
}

namespace {
void rms_norm_out(const Tensor& x, const Tensor& out, const OptionalTensor& weight, double eps,
                  std::optional<int64_t> measured) {
  overwritten("rms_norm_out", x, {}, weight, eps, measured, false, {out, {}});
}
}  // namespace

std::tuple<Tensor, Tensor> fused_add_rms_norm(const Tensor& x, const Tensor& residual, const OptionalTensor& weight,
                                              double eps, std::optional<int64_t> measured) {
  return added("fused_add_rms_norm", &Path::rms_norm, x, residual, weight, {}, eps, measured, false);
}

namespace {
void fused_add_rms_norm_(const Tensor& x, const Tensor& residual, const OptionalTensor& weight, double eps,
                         std::optional<int64_t> measured) {
  overwritten("fused_add_rms_norm_", x, residual, weight, eps, measured, false, {x, residual});
}
Tensor gemma_rms_norm(const Tensor& x, const Tensor& weight, double eps) {
  return normed("gemma_rms_norm", &Path::rms_norm, x, weight, {}, eps, {}, true);
}
std::tuple<Tensor, Tensor> fused_add_gemma_rms_norm(const Tensor& x, const Tensor& residual, const Tensor& weight,
                                                    double eps) {
  return added("fused_add_gemma_rms_norm", &Path::rms_norm, x, residual, weight, {}, eps, {}, true);
}
void fused_add_gemma_rms_norm_(const Tensor& x, const Tensor& residual, const Tensor& weight, double eps) {
  overwritten("fused_add_gemma_rms_norm_", x, residual, weight, eps, {}, true, {x, residual});
}

// x with the dimensions that are normalised together made one.
Tensor flattened(const char* op, const Tensor& x, at::IntArrayRef shape) {
  const int64_t dims = int64_t(shape.size());
  TORCH_CHECK_VALUE(dims > 0 && x.dim() >= dims && x.sizes().slice(size_t(x.dim() - dims)) == shape, op,
                    ": x has shape ", x.sizes(), ", expected it to end in ", shape);
  return dims == 1 ? x : x.flatten(-dims);
}

// A weight or bias of the shape that is normalised, as a vector.
OptionalTensor vector_of(const char* op, const OptionalTensor& weight, at::IntArrayRef shape) {
  if (shape.size() == 1 || !weight || !weight->defined()) return weight;
  TORCH_CHECK_VALUE(weight->sizes() == shape, op, ": weight or bias has shape ", weight->sizes(), ", expected ", shape);
  return weight->reshape(-1);
}

Tensor layer_norm(const Tensor& x, at::IntArrayRef shape, const OptionalTensor& weight, const OptionalTensor& bias,
                  double eps) {
  const char* op = "layer_norm";
  const Tensor rows = flattened(op, x, shape);
  const Tensor out =
      normed(op, &Path::layer_norm, rows, vector_of(op, weight, shape), vector_of(op, bias, shape), eps, {}, false);
  return shape.size() == 1 ? out : out.view(x.sizes());
}
std::tuple<Tensor, Tensor> add_layer_norm(const Tensor& x, const Tensor& residual, at::IntArrayRef shape,
                                          const OptionalTensor& weight, const OptionalTensor& bias, double eps) {
  const char* op = "add_layer_norm";
  const auto [out, sum] = added(op, &Path::layer_norm, flattened(op, x, shape), flattened(op, residual, shape),
                                vector_of(op, weight, shape), vector_of(op, bias, shape), eps, {}, false);
  return {out.view(x.sizes()), sum.view(x.sizes())};
}

Tensor rms_norm_gated(const Tensor& input, const Tensor& weight, const OptionalTensor& gate, double eps,
                      std::optional<int64_t> group_size, bool norm_before_gate, c10::string_view activation) {
  const char* op = "rms_norm_gated";
  refuse_gradient(op, input, weight, defined(gate));
  if (gate) expect_same(op, "z", *gate, input);
  const bool sigmoid = activation == "sigmoid";
  TORCH_CHECK_VALUE(sigmoid || activation == "swish" || activation == "silu", op, ": activation is '", activation,
                    "', expected swish, silu or sigmoid");
  const Matrix x(op, input), z(op, gate ? *gate : input);
  const int64_t group = group_size.value_or(x.width);
  TORCH_CHECK_VALUE(weight.dim() == 1 && weight.numel() == x.width, op, ": x has shape ", input.sizes(),
                    ", expected a last dimension of ", weight.numel());
  TORCH_CHECK_VALUE(x.rows == 0 || (group > 0 && x.width % group == 0), op, ": group_size is ", group,
                    ", expected a divisor of ", x.width);
  const Tensor usable_weight = usable(op, weight, input), out = fresh(input.sizes(), input.scalar_type());
  const GatedNorm norm{x.view(),
                       gate ? z.view() : Rows{},
                       usable_weight.const_data_ptr(),
                       rows_of(out, x.width),
                       x.width,
                       group,
                       float(eps),
                       norm_before_gate,
                       sigmoid};
  const GatedNormKernel kernel = path().gated_norm[dtype_of(op, input)][index_of(usable_weight)];
  share(x.rows, x.width, [&](int64_t begin, int64_t end) { kernel(norm, begin, end); });
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(opgraft_cpu_kernels, library) {
  library.def("rms_norm(Tensor x, Tensor? weight=None, float eps=1e-6, int? variance_size=None) -> Tensor");
  library.def(
      "rms_norm_out(Tensor x, Tensor(a!) out, Tensor? weight=None, float eps=1e-6, int? variance_size=None) -> ()");
  library.def(
      "fused_add_rms_norm(Tensor x, Tensor residual, Tensor? weight=None, float eps=1e-6, int? variance_size=None) -> "
      "(Tensor, Tensor)");
  library.def(
      "fused_add_rms_norm_(Tensor(a!) x, Tensor(b!) residual, Tensor? weight=None, float eps=1e-6, int? "
      "variance_size=None) -> ()");
  library.def("gemma_rms_norm(Tensor x, Tensor weight, float eps=1e-6) -> Tensor");
  library.def("fused_add_gemma_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps=1e-6) -> (Tensor, Tensor)");
  library.def("fused_add_gemma_rms_norm_(Tensor(a!) x, Tensor(b!) residual, Tensor weight, float eps=1e-6) -> ()");
  library.def(
      "layer_norm(Tensor x, int[] normalized_shape, Tensor? weight=None, Tensor? bias=None, float eps=1e-5) -> Tensor");
  library.def(
      "add_layer_norm(Tensor x, Tensor residual, int[] normalized_shape, Tensor? weight=None, Tensor? bias=None, float "
      "eps=1e-5) -> (Tensor, Tensor)");
  library.def(
      "rms_norm_gated(Tensor x, Tensor weight, Tensor? z=None, float eps=1e-5, int? group_size=None, bool "
      "norm_before_gate=False, str activation=\"swish\") -> Tensor");
}

#define NORMS(apply)                                                                                             \
  apply(rms_norm) apply(rms_norm_out) apply(fused_add_rms_norm) apply(fused_add_rms_norm_) apply(gemma_rms_norm) \
      apply(fused_add_gemma_rms_norm) apply(fused_add_gemma_rms_norm_) apply(layer_norm) apply(add_layer_norm)   \
          apply(rms_norm_gated)

IMPLEMENT(NORMS)

}  // namespace opgraft_cpu_kernels
