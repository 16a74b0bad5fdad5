// What sampling asks of logits, as a torch op.

#include "tensors.h"

namespace opgraft_cpu_kernels {
namespace {

// The greatest number of each row, in float32, and the first place where it stands. Of a row with NaN that is NaN.
std::tuple<Tensor, Tensor> greatest(const Tensor& rows) {
  const char* op = "greatest";
  refuse_gradient(op, rows);
  const Dtype dtype = dtype_of(op, rows);
  TORCH_CHECK_VALUE(rows.dim() == 2 && rows.size(1) > 0, op, ": x has shape ", rows.sizes(),
                    ", expected [rows, columns] and some columns");
  const Matrix x(op, rows);
  const Tensor values = fresh({x.rows}, at::kFloat), places = fresh({x.rows}, at::kLong);
  float* const to = values.mutable_data_ptr<float>();
  int64_t* const at = places.mutable_data_ptr<int64_t>();
  const GreatestKernel kernel = path().greatest[dtype];
  share(x.rows, x.width / 8, [&](int64_t begin, int64_t end) { kernel(x.view(), x.width, to, at, begin, end); });
  return {values, places};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(opgraft_cpu_kernels, library) { library.def("greatest(Tensor x) -> (Tensor, Tensor)"); }

#define SAMPLING(apply) apply(greatest)

IMPLEMENT(SAMPLING)

}  // namespace opgraft_cpu_kernels
