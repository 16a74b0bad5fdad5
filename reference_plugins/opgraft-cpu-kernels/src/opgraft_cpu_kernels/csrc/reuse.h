// Memory of results that nobody holds any more, for the next ones of their shape: while it is in the caches, and without
// calls of the allocator, which take as long as a small kernel.
#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <c10/core/InferenceMode.h>

#include <array>

namespace opgraft_cpu_kernels {

class Reuse {
 public:
  // The results that new ones of this thread take the place of; null where each has memory of its own.
  static Reuse*& in_force() {
    static thread_local Reuse* reuse = nullptr;
    return reuse;
  }

  at::Tensor get(at::IntArrayRef sizes, at::ScalarType dtype) {
    for (const at::Tensor& kept : kept_) {
      if (kept.defined() && kept.scalar_type() == dtype && kept.sizes() == sizes && is_free(kept)) return kept;
    }
    at::Tensor made(at::detail::empty_cpu(sizes, dtype));
    if (made.nbytes() <= MOST_BYTES) kept_[next_++ % kept_.size()] = made;
    return made;
  }

  // Leaves a result to the caller for good.
  void give_away(const at::Tensor& result) {
    for (at::Tensor& kept : kept_) {
      if (kept.is_same(result)) kept.reset();
    }
  }

 private:
  static constexpr size_t MOST_BYTES = size_t(1) << 18;

  static bool is_free(const at::Tensor& x) {
    return x.use_count() == 1 && x.storage().use_count() == 1 && x.is_inference() == c10::InferenceMode::is_enabled();
  }

  std::array<at::Tensor, 16> kept_;
  size_t next_ = 0;
};

// Has results of this thread reuse memory, as long as it is there.
class Reusing {
 public:
  Reusing() : before_(std::exchange(Reuse::in_force(), &kept())) {}
  ~Reusing() { Reuse::in_force() = before_; }
  Reusing(const Reusing&) = delete;
  Reusing& operator=(const Reusing&) = delete;

  template <class... Tensors>
  void give_away(const Tensors&... results) {
    (kept().give_away(results), ...);
  }

 private:
  static Reuse& kept() {
    static thread_local Reuse reuse;
    return reuse;
  }

  Reuse* const before_;
};

}  // namespace opgraft_cpu_kernels
