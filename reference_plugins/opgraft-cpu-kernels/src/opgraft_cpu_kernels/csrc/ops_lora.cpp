// The additions of LoRA adapters to rows of a linear layer, as a torch op: two products for each adapter, by the kernels
// of linear layers.

#include <ATen/ops/linear.h>

#include "ops.h"
#include "overlap.h"

namespace opgraft_cpu_kernels {
namespace {

void multiply(const Linear& linear, LinearKernel kernel) {
  const int64_t work = std::max<int64_t>(1, linear.in_features * linear.rows);
  share(linear.out_features, work, [&](int64_t begin, int64_t end) { kernel(linear, begin, end); });
}

std::vector<int64_t> ascending(const Tensor& bounds, int64_t adapters, int64_t rows) {
  TORCH_CHECK_VALUE(bounds.dim() == 1 && bounds.size(0) == adapters + 1 && bounds.is_cpu() &&
                        (bounds.scalar_type() == at::kInt || bounds.scalar_type() == at::kLong),
                    "add_lora_: bounds has shape ", bounds.sizes(), " and dtype ", bounds.scalar_type(), ", expected ",
                    adapters + 1, " integers");
  const Tensor contiguous = bounds.contiguous();
  std::vector<int64_t> values(adapters + 1);
  for (int64_t i = 0; i <= adapters; ++i) {
    values[i] = contiguous.scalar_type() == at::kInt ? contiguous.const_data_ptr<int32_t>()[i]
                                                     : contiguous.const_data_ptr<int64_t>()[i];
  }
  TORCH_CHECK_VALUE(std::is_sorted(values.begin(), values.end()) && values.front() >= 0 && values.back() == rows,
                    "add_lora_: bounds are ", bounds, ", expected them to ascend from at least 0 to ", rows);
  return values;
}

// The arguments of a call, which lie in memory as the kernels read them.
struct Additions {
  const Tensor &y, &a, &b;
  at::IntArrayRef sizes;
  Matrix x;
  LinearKernel kernel;
  int64_t rank, outputs, parts, size_of_element;

  Additions(const Tensor& result, const Tensor& input, const Tensor& first, const Tensor& second, at::IntArrayRef given)
      : y(result), a(first), b(second), sizes(given), x("add_lora_", input) {
    refuse_gradient("add_lora_", y, input, a, b);
    kernel = path().linear[dtype_of("add_lora_", input)];
    for (const Tensor* each : {&y, &a, &b}) {
      TORCH_CHECK_VALUE(each->scalar_type() == input.scalar_type() && each->is_cpu(),
                        "add_lora_: a tensor has dtype ", each->scalar_type(), ", expected that of x, ",
                        input.scalar_type());
    }
    TORCH_CHECK_VALUE(y.dim() == 2 && input.dim() == 2 && a.dim() == 3 && b.dim() == 3 && y.size(0) == input.size(0) &&
                          a.is_contiguous() && b.is_contiguous(),
                      "add_lora_: y, x, a and b have shapes ", y.sizes(), ", ", input.sizes(), ", ", a.sizes(),
                      " and ", b.sizes(), ", expected rows and contiguous matrices");
    rank = b.size(2), outputs = b.size(1), parts = int64_t(sizes.size());
    int64_t sum = 0;
    for (const int64_t size : sizes) {
      TORCH_CHECK_VALUE(size >= 0, "add_lora_: sizes are ", sizes, ", expected none below 0");
      sum += size;
    }
    TORCH_CHECK_VALUE(a.size(0) == b.size(0) && a.size(1) == parts * rank && a.size(2) == x.width &&
                          outputs == y.size(1) && outputs == sum,
                      "add_lora_: a and b have shapes ", a.sizes(), " and ", b.sizes(), " for sizes ", sizes);
    TORCH_CHECK_VALUE(row_stride(y) >= y.size(1) && is_apart(y) && !may_share_any(y, x.tensor, a, b),
                      "add_lora_: y shares memory, or does not lie in rows");
    size_of_element = int64_t(y.element_size());
  }

  bool is_empty() const { return !y.numel() || !x.width || !rank; }

  const char* matrix(const Tensor& matrices, int64_t adapter, int64_t row) const {
    const int64_t elements = (adapter * matrices.size(1) + row) * matrices.size(2);
    return static_cast<const char*>(matrices.const_data_ptr()) + elements * size_of_element;
  }

  void add(int64_t adapter, int64_t first, int64_t rows) const {
    const int64_t width = parts * rank, stride = row_stride(y);
    const Tensor narrow = fresh({rows, width}, y.scalar_type());
    Linear down;
    down.x = x.view(first * x.stride);
    down.weight = matrix(a, adapter, 0);
    down.out = rows_of(narrow, width);
    down.rows = rows, down.in_features = x.width, down.out_features = width;
    multiply(down, kernel);
    int64_t column = 0;
    for (int64_t part = 0; part < parts; column += sizes[part++]) {
      if (!sizes[part]) continue;
      char* const to = static_cast<char*>(y.mutable_data_ptr()) + (first * stride + column) * size_of_element;
      Linear up;
      up.x = {static_cast<const char*>(narrow.const_data_ptr()) + part * rank * size_of_element, width};
      up.weight = matrix(b, adapter, column);
      up.residual = {to, stride};
      up.out = {to, stride};
      up.rows = rows, up.in_features = rank, up.out_features = sizes[part];
      multiply(up, kernel);
    }
  }

  // Many rows, which torch multiplies faster.
  void add_many(int64_t adapter, int64_t first, int64_t rows) const {
    const Tensor narrow = at::linear(x.tensor.narrow(0, first, rows), a.select(0, adapter));
    int64_t column = 0;
    for (int64_t part = 0; part < parts; column += sizes[part++]) {
      const Tensor to = y.narrow(0, first, rows).narrow(1, column, sizes[part]);
      const Tensor up = b.select(0, adapter).narrow(0, column, sizes[part]);
      to.addmm_(narrow.narrow(1, part * rank, rank), up.t());
    }
  }
};

}  // namespace

// `few`: rows of an adapter up to which the kernels of the path are the faster ones.
void add_lora_(const Tensor& y, const Tensor& x, const Tensor& a, const Tensor& b, const Tensor& bounds,
               at::IntArrayRef sizes, int64_t few) {
  const Additions additions(y, x, a, b, sizes);
  const std::vector<int64_t> values = ascending(bounds, a.size(0), y.size(0));
  if (additions.is_empty()) return;
  for (int64_t adapter = 0; adapter < a.size(0); ++adapter) {
    const int64_t first = values[adapter], rows = values[adapter + 1] - first;
    if (rows > few)
      additions.add_many(adapter, first, rows);
    else if (rows)
      additions.add(adapter, first, rows);
  }
  written(y);
}

TORCH_LIBRARY_FRAGMENT(opgraft_cpu_kernels, library) {
  library.def("add_lora_(Tensor(a!) y, Tensor x, Tensor a, Tensor b, Tensor bounds, int[] sizes, int few) -> ()");
}

#define LORA(apply) apply(add_lora_)

IMPLEMENT(LORA)

}  // namespace opgraft_cpu_kernels
