// Whether tensors share memory, which decides whether a kernel may write to one while it reads another.
#pragma once

#include <ATen/MemoryOverlap.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <limits>
#include <utility>

namespace opgraft_cpu_kernels {

// The bytes that a tensor reaches over along its strides shorter than a period; the period, which leaves no room for
// another tensor, where a longer stride is no multiple of it.
inline int64_t reach(const at::Tensor& x, int64_t period) {
  const int64_t size = int64_t(x.element_size());
  int64_t bytes = size;
  for (int64_t dim = 0; dim < x.dim(); ++dim) {
    const int64_t stride = x.stride(dim) * size;
    if (x.size(dim) <= 1) continue;
    if (stride < period)
      bytes += stride * (x.size(dim) - 1);
    else if (stride % period)
      return period;
  }
  return bytes;
}

// False only where no byte belongs to both: they lie one behind the other, or side by side in the rows of a third, as
// query and key of a fused projection do.
inline bool may_share(const at::Tensor& a, const at::Tensor& b) {
  if (!a.defined() || !b.defined() || !a.numel() || !b.numel()) return false;
  const int64_t apart = static_cast<const char*>(b.const_data_ptr()) - static_cast<const char*>(a.const_data_ptr());
  constexpr int64_t whole = std::numeric_limits<int64_t>::max();
  if (apart >= reach(a, whole) || -apart >= reach(b, whole)) return false;
  for (int64_t dim = 0; dim < a.dim(); ++dim) {
    const int64_t period = a.stride(dim) * int64_t(a.element_size());
    if (a.size(dim) <= 1 || !period) continue;
    const int64_t offset = (apart % period + period) % period;
    if (reach(a, period) <= offset && offset + reach(b, period) <= period) return false;
  }
  return true;
}

template <class... Others>
bool may_share_any(const at::Tensor& a, const Others&... others) {
  return (may_share(a, others) || ...);
}

inline bool is_same_view(const at::Tensor& a, const at::Tensor& b) {
  return a.const_data_ptr() == b.const_data_ptr() && a.sizes() == b.sizes() && a.strides() == b.strides();
}

// Whether no two elements of a tensor share memory, as its strides tell: each is longer than what lies within it.
inline bool is_apart(const at::Tensor& x) {
  if (x.is_contiguous()) return true;
  c10::SmallVector<std::pair<int64_t, int64_t>, 6> dims;
  for (int64_t dim = 0; dim < x.dim(); ++dim) {
    if (x.size(dim) > 1) dims.emplace_back(x.stride(dim), x.size(dim));
  }
  std::sort(dims.begin(), dims.end());
  int64_t extent = 1;
  for (const auto& [stride, size] : dims) {
    if (stride < extent) return false;
    extent += stride * (size - 1);
  }
  return true;
}

}  // namespace opgraft_cpu_kernels
