// From tensors to rows in memory, and the sharing of rows among torch's threads.
#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <optional>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "kernels.h"
#include "reuse.h"
#include "team.h"

namespace opgraft_cpu_kernels {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

template <class... Tensors>
void refuse_gradient(const char* op, const Tensors&... tensors) {
  if (at::GradMode::is_enabled()) {
    TORCH_CHECK(!((tensors.defined() && tensors.requires_grad()) || ...), op,
                ": this kernel has no backward; call it under torch.no_grad()");
  }
}

inline const Tensor& defined(const OptionalTensor& tensor) {
  static const Tensor none;
  return tensor ? *tensor : none;
}

inline Dtype dtype_of(const char* op, const Tensor& x) {
  switch (x.scalar_type()) {
    case at::kFloat:
      return FLOAT32;
    case at::kBFloat16:
      return BFLOAT16;
    case at::kHalf:
      return FLOAT16;
    default:
      TORCH_CHECK_TYPE(false, op, ": x has dtype ", x.scalar_type(), ", expected float32, bfloat16 or float16");
  }
}

inline void expect_same(const char* op, const char* name, const Tensor& other, const Tensor& x) {
  TORCH_CHECK_VALUE(other.sizes() == x.sizes(), op, ": ", name, " has shape ", other.sizes(), ", expected that of x, ",
                    x.sizes());
  TORCH_CHECK_VALUE(other.scalar_type() == x.scalar_type(), op, ": ", name, " has dtype ", other.scalar_type(),
                    ", expected that of x, ", x.scalar_type());
}

// The distance of the rows of the last dimension, or -1 where there is not one distance, or elements lie apart.
inline int64_t row_stride(const Tensor& x) {
  const int64_t width = x.size(-1);
  if (x.is_contiguous()) return width;
  if (width != 1 && x.stride(-1) != 1) return -1;
  int64_t stride = -1, next = 0;
  for (int64_t dim = x.dim() - 2; dim >= 0; --dim) {
    if (x.size(dim) == 1) continue;
    if (stride < 0)
      stride = x.stride(dim);
    else if (x.stride(dim) != next)
      return -1;
    next = x.stride(dim) * x.size(dim);
  }
  return stride < 0 ? width : stride;
}

// A tensor as rows; a copy of it where its memory does not lie in rows.
struct Matrix {
  Tensor tensor;
  int64_t stride, width, rows;

  Matrix(const char* op, const Tensor& x) : tensor(x) {
    TORCH_CHECK_VALUE(x.dim() > 0, op, ": x has no dimension, expected at least one");
    stride = row_stride(x);
    if (stride < 0) {
      tensor = x.contiguous();
      stride = x.size(-1);
    }
    width = x.size(-1);
    rows = width ? x.numel() / width : 0;
  }

  Rows view(int64_t offset = 0) const {
    return {static_cast<const char*>(tensor.const_data_ptr()) + offset * tensor.element_size(), stride};
  }
};

// New memory. Large blocks come fresh from the operating system, and clearing them page by page would take longer than
// a kernel does: they are asked for in huge pages.
inline Tensor fresh(at::IntArrayRef sizes, at::ScalarType dtype) {
  if (Reuse* const reuse = Reuse::in_force()) return reuse->get(sizes, dtype);
  Tensor result(at::detail::empty_cpu(sizes, dtype));
#if defined(MADV_HUGEPAGE)
  constexpr size_t huge = size_t(1) << 21;
  if (result.nbytes() >= 2 * huge) {
    const size_t begin = reinterpret_cast<size_t>(result.mutable_data_ptr());
    const size_t first = (begin + huge - 1) & ~(huge - 1), last = (begin + result.nbytes()) & ~(huge - 1);
    madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
  }
#endif
  return result;
}

// To be called for a tensor that was written to, so that autograd can tell.
inline void written(const Tensor& x) {
  if (!x.is_inference()) x.unsafeGetTensorImpl()->bump_version();
}

inline MutableRows rows_of(const Tensor& x, int64_t stride) { return {x.mutable_data_ptr(), stride}; }

// Of results of so many bytes the caches keep little until they are read: written past them, their memory need not be
// read first. Measured on CPUs with 32 MiB for a group of cores.
constexpr size_t UNCACHED = size_t(1) << 25;

// The rows of a result for a kernel that can write past the caches.
inline MutableRows result_rows(const Tensor& x, int64_t stride) {
  MutableRows rows = rows_of(x, stride);
  const size_t begin = reinterpret_cast<size_t>(rows.data), step = size_t(stride) * x.element_size();
  rows.streamed = begin % 64 == 0 && step % 64 == 0 && x.nbytes() >= UNCACHED;
  return rows;
}

inline void expect_floating(const char* op, const Tensor& weight) {
  const at::ScalarType dtype = weight.scalar_type();
  TORCH_CHECK_VALUE(dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf || dtype == at::kDouble, op,
                    ": a weight or table has dtype ", dtype, ", expected a floating-point one");
}

// The index of a weight's dtype in the tables: 1 for float32, 0 for that of x. Another dtype is converted to float32.
inline Tensor usable(const char* op, const Tensor& weight, const Tensor& x) {
  expect_floating(op, weight);
  Tensor contiguous = weight.contiguous();
  return contiguous.scalar_type() == x.scalar_type() ? contiguous : contiguous.to(at::kFloat);
}
inline int index_of(const Tensor& weight) { return weight.scalar_type() == at::kFloat; }

// Each call of a linear layer has a number, by which a thread knows the rows that it has packed for another piece.
inline uint64_t number_of_call() {
  static std::atomic<uint64_t> calls{0};
  return ++calls;
}

// Waking a thread takes as long as a kernel on so many elements.
constexpr int64_t GRAIN = 32768;

// Divides rows among threads, a number of them at least for each.
template <class Work>
void divide(int64_t rows, int64_t least, const Work& work) {
  if (rows <= least) {
    if (rows) work(0, rows);
  } else if (Team* const team = Team::led()) {
    team->share(rows, least, work);
  } else {
    at::parallel_for(0, rows, least, work);
  }
}

template <class Work>
void share(int64_t rows, int64_t width, const Work& work) {
  divide(rows, std::max<int64_t>(1, GRAIN / std::max<int64_t>(1, width)), work);
}

}  // namespace opgraft_cpu_kernels

// Registers functions as the CPU kernels of the ops of their names. They refuse gradients; what does not reach them,
// the tensors of a compiler and those with tangents, autograd refuses.
#define OPGRAFT_ON_CPU(op) library.impl(#op, &op);
#define OPGRAFT_REFUSES_GRADIENTS(op) library.impl(#op, torch::autograd::autogradNotImplementedFallback());
#define OPGRAFT_PAST_VIEWS(op) library.impl(#op, torch::CppFunction::makeFallthrough());
#define IMPLEMENT(ops)                                                                        \
  TORCH_LIBRARY_IMPL(opgraft_cpu_kernels, CPU, library) { ops(OPGRAFT_ON_CPU) }               \
  TORCH_LIBRARY_IMPL(opgraft_cpu_kernels, AutogradCPU, library) { ops(OPGRAFT_REFUSES_GRADIENTS) } \
  TORCH_LIBRARY_IMPL(opgraft_cpu_kernels, ADInplaceOrView, library) { ops(OPGRAFT_PAST_VIEWS) }
