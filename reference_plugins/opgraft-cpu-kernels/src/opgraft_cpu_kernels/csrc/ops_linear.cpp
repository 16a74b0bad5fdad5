// The linear layer as torch ops: on a few rows, and over a packed weight.

#include <atomic>

#include "ops.h"

namespace opgraft_cpu_kernels {
namespace {

Activation activation_of(c10::string_view name) {
  constexpr const char* names[] = {"none", "relu", "silu", "gelu", "gelu_tanh"};
  for (int kind = NONE; kind <= GELU_TANH_ALONE; ++kind) {
    if (name == names[kind]) return Activation(kind);
  }
  TORCH_CHECK_VALUE(false, "linear: activation is '", name, "', expected none, relu, silu, gelu or gelu_tanh");
}

// The arguments of a call, and memory for its result.
struct Call {
  Matrix x;
  Tensor bias, out;
  std::optional<Matrix> residual;
  Linear linear;

  Call(const Tensor& input, const Tensor& weight, const OptionalTensor& optional_bias, c10::string_view activation,
       const OptionalTensor& added)
      : x("linear", input) {
    const Tensor &given = defined(optional_bias), &sum = defined(added);
    refuse_gradient("linear", input, weight, given, sum);
    TORCH_CHECK_VALUE(weight.dim() == 2 && weight.size(1) == x.width && weight.is_contiguous() &&
                          weight.scalar_type() == input.scalar_type(),
                      "linear: weight has shape ", weight.sizes(), " and dtype ", weight.scalar_type(),
                      ", expected a contiguous [out_features, ", x.width, "] of dtype ", input.scalar_type());
    c10::SmallVector<int64_t, 6> sizes(input.sizes().begin(), input.sizes().end());
    sizes.back() = weight.size(0);
    int64_t rows = 1;
    for (size_t dim = 0; dim + 1 < sizes.size(); ++dim) rows *= sizes[dim];
    out = fresh(sizes, input.scalar_type());
    linear.activation = activation_of(activation);
    if (given.defined()) {
      TORCH_CHECK_VALUE(given.dim() == 1 && given.size(0) == weight.size(0) &&
                            given.scalar_type() == input.scalar_type(),
                        "linear: bias has shape ", given.sizes(), " and dtype ", given.scalar_type(), ", expected [",
                        weight.size(0), "] of dtype ", input.scalar_type());
      bias = given.contiguous();
      linear.bias = bias.const_data_ptr();
    }
    if (sum.defined()) {
      expect_same("linear", "residual", sum, out);
      residual.emplace("linear", sum);
      linear.residual = residual->view();
    }
    linear.x = x.view();
    linear.weight = weight.const_data_ptr();
    linear.out = rows_of(out, weight.size(0));
    linear.rows = rows;
    linear.in_features = x.width;
    linear.out_features = weight.size(0);
    linear.call = number_of_call();
  }
};

void run_rows(const Call& call, Dtype dtype) {
  const LinearKernel kernel = path().linear[dtype];
  const int64_t work = std::max<int64_t>(1, call.linear.in_features * call.linear.rows);
  share(call.linear.rows ? call.linear.out_features : 0, work,
        [&](int64_t begin, int64_t end) { kernel(call.linear, begin, end); });
}

}  // namespace

Tensor linear(const Tensor& x, const Tensor& weight, const OptionalTensor& bias, c10::string_view activation,
              const OptionalTensor& residual) {
  const Call call(x, weight, bias, activation, residual);
  run_rows(call, dtype_of("linear", x));
  return call.out;
}

// For compiled code. More rows than `few` go to the kernel of linear.py, which implements the other op.
Tensor linear_of_rows(const Tensor& x, const Tensor& weight, const OptionalTensor& bias, c10::string_view activation,
                      const OptionalTensor& residual, int64_t few) {
  if (weight.dim() == 2 && x.numel() <= few * weight.size(1)) return linear(x, weight, bias, activation, residual);
  static const auto many = c10::Dispatcher::singleton()
                               .findSchemaOrThrow("opgraft_cpu_kernels::linear_of_many_rows", "")
                               .typed<Tensor(const Tensor&, const Tensor&, const OptionalTensor&, c10::string_view,
                                             const OptionalTensor&)>();
  return many.call(x, weight, bias, activation, residual);
}

namespace {

constexpr int64_t PANEL = 32;  // rows and columns of the result that are computed together
constexpr int64_t TILE = PANEL * PANEL / 2;
int64_t panels(int64_t count) { return (count + PANEL - 1) / PANEL; }

bool is_packed(const Tensor& packed, int64_t across, int64_t along) {
  return packed.scalar_type() == at::kBFloat16 && packed.is_contiguous() && packed.dim() == 5 &&
         packed.size(0) == across && packed.size(1) == along && (packed.size(2) == 2 || packed.size(2) == 3) &&
         packed.size(3) == 2 && packed.size(4) == TILE;
}

// Nothing where this path has no tiles, or where bfloat16 cannot hold a weight.
Tensor pack_linear(const Tensor& weight, int64_t parts) {
  TORCH_CHECK_VALUE(weight.dim() == 2 && weight.is_contiguous() && weight.scalar_type() == at::kFloat,
                    "pack_linear: weight has shape ", weight.sizes(), " and dtype ", weight.scalar_type(),
                    ", expected a contiguous matrix of float32");
  TORCH_CHECK_VALUE(parts == 2 || parts == 3, "pack_linear: parts is ", parts, ", expected 2 or 3");
  const PackKernel kernel = path().pack;
  if (!kernel) return fresh({0}, at::kBFloat16);
  const int64_t rows = weight.size(0), width = weight.size(1);
  const Tensor packed = fresh({panels(rows), panels(width), parts, 2, TILE}, at::kBFloat16);
  std::atomic<bool> held{true};
  share(panels(rows), PANEL * width, [&](int64_t begin, int64_t end) {
    if (!kernel(weight.const_data_ptr<float>(), width, rows, int(parts),
                static_cast<uint16_t*>(packed.mutable_data_ptr()), begin, end))
      held = false;
  });
  return held ? packed : fresh({0}, at::kBFloat16);
}

// `packed` is what pack_linear made of `weight`.
Tensor packed_linear(const Tensor& x, const Tensor& weight, const Tensor& packed, const OptionalTensor& bias,
                     c10::string_view activation, const OptionalTensor& residual) {
  Call call(x, weight, bias, activation, residual);
  Linear& linear = call.linear;
  const int64_t across = panels(linear.out_features), down = panels(linear.rows);
  TORCH_CHECK_VALUE(x.scalar_type() == at::kFloat && is_packed(packed, across, panels(linear.in_features)),
                    "packed_linear: x has dtype ", x.scalar_type(), " and packed has shape ", packed.sizes(),
                    " and dtype ", packed.scalar_type(),
                    ", expected float32 and what pack_linear returned for a weight of shape ", weight.sizes());
  if (call.out.numel() == 0) return call.out;
  linear.packed = static_cast<const uint16_t*>(packed.const_data_ptr());
  linear.parts = int(packed.size(2));
  const PackedLinearKernel kernel = path().packed_linear;
  std::atomic<bool> held{kernel != nullptr};
  const auto run = [&](int64_t begin, int64_t end, int64_t first, int64_t last) {
    if (!kernel(linear, begin * PANEL, std::min(end * PANEL, linear.rows), first, last)) held = false;
  };
  const int64_t threads = at::get_num_threads();
  if (!kernel) {
  } else if (linear.rows * linear.out_features * linear.in_features < 64 * GRAIN) {
    run(0, down, 0, across);
  } else if (down >= 4 * threads || down % threads == 0) {
    at::parallel_for(0, down, 1, [&](int64_t begin, int64_t end) { run(begin, end, 0, across); });
  } else {
    at::parallel_for(0, across, 1, [&](int64_t first, int64_t last) { run(0, down, first, last); });
  }
  if (!held) run_rows(call, FLOAT32);  // in float32 throughout
  return call.out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(opgraft_cpu_kernels, library) {
  library.def(
      "linear(Tensor x, Tensor weight, Tensor? bias=None, str activation=\"none\", Tensor? residual=None) -> Tensor");
  library.def(
      "linear_of_rows(Tensor x, Tensor weight, Tensor? bias, str activation, Tensor? residual, int few) -> Tensor");
  library.def(
      "linear_of_many_rows(Tensor x, Tensor weight, Tensor? bias, str activation, Tensor? residual) -> Tensor");
  library.def("pack_linear(Tensor weight, int parts) -> Tensor");
  library.def(
      "packed_linear(Tensor x, Tensor weight, Tensor packed, Tensor? bias=None, str activation=\"none\", Tensor? "
      "residual=None) -> Tensor");
}

#define LINEAR(apply) apply(linear) apply(linear_of_rows) apply(pack_linear) apply(packed_linear)

IMPLEMENT(LINEAR)

}  // namespace opgraft_cpu_kernels
