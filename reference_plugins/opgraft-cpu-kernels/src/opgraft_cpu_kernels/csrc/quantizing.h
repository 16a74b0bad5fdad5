// The quantization of rows to 8 bits, of a tensor or of rows that another kernel makes.
#pragma once

#include <cstdint>
#include <mutex>
#include <new>

#include "tensors.h"

namespace opgraft_cpu_kernels {

// The groups of a quantization: [rows, columns], -1 for the whole extent. The last group of a row may be smaller.
struct Groups {
  bool whole;  // one scale for the tensor
  int64_t columns, count;

  Groups(const char* op, int64_t width, at::IntArrayRef shape) {
    TORCH_CHECK_VALUE(shape.size() == 2 && ((shape[0] == -1 && shape[1] == -1) || shape[0] == 1), op,
                      ": group_shape is ", shape, ", expected (-1, -1), (1, -1) or (1, columns)");
    whole = shape[0] == -1;
    columns = shape[1] == -1 ? width : shape[1];
    TORCH_CHECK_VALUE(width == 0 || (columns > 0), op, ": group_shape is ", shape, ", expected some columns");
    count = columns ? (width + columns - 1) / columns : 0;
  }
};

// How scales are computed: at most by this bound, and as powers of two if so wanted.
struct ScaleRule {
  OptionalTensor upper_bound;
  bool power_of_two = false, fp8 = true;
};

// Where row 0 would lie if row `first` lies at x. As a number, since it points nowhere.
inline void* row_zero(const void* x, int64_t row_bytes, int64_t first) {
  return reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(x) - uintptr_t(first * row_bytes));
}

// Memory for some rows, in the place of rows of a matrix.
class RowMemory {
 public:
  RowMemory(int64_t rows, int64_t row_bytes)
      : row_bytes_(row_bytes), data_(::operator new(size_t(rows * row_bytes), std::align_val_t(64))) {}
  ~RowMemory() { ::operator delete(data_, std::align_val_t(64)); }
  RowMemory(const RowMemory&) = delete;
  RowMemory& operator=(const RowMemory&) = delete;

  // Row 0, if this is the memory of the rows from `first` on.
  void* as_rows_from(int64_t first) const { return row_zero(data_, row_bytes_, first); }

 private:
  int64_t row_bytes_;
  void* data_;
};

// Rows in 8 bits with their scales.
class QuantizedRows {
 public:
  Tensor out, scales;

  // By given scales.
  QuantizedRows(const char* op, at::IntArrayRef sizes, at::ScalarType type, Dtype dtype, at::IntArrayRef group_shape,
                const Tensor& scale)
      : QuantizedRows(op, sizes, type, dtype, group_shape, at::kFloat8_e4m3fn) {
    scales = scale.to(at::kFloat).contiguous();
    TORCH_CHECK_VALUE(scales.numel() == (groups_.whole ? 1 : rows_ * groups_.count), op, ": scale has shape ",
                      scales.sizes(), ", expected one element for each group");
    q_.scales = const_cast<float*>(scales.const_data_ptr<float>());
    kernel_ = path().fp8_static[dtype];
  }

  // By scales that are computed.
  QuantizedRows(const char* op, at::IntArrayRef sizes, at::ScalarType type, Dtype dtype, at::IntArrayRef group_shape,
                const ScaleRule& rule)
      : QuantizedRows(op, sizes, type, dtype, group_shape, rule.fp8 ? at::kFloat8_e4m3fn : at::kChar) {
    std::vector<int64_t> shape = sizes.vec();
    shape.back() = groups_.count;
    if (groups_.whole) shape = {1};
    scales = fresh(shape, at::kFloat);
    q_.scales = scales.mutable_data_ptr<float>();
    q_.smallest_scale = rule.fp8 ? 1.0f / (448.0f * 512.0f) : SMALLEST_SCALE;
    q_.power_of_two = rule.power_of_two;
    if (defined(rule.upper_bound).defined()) q_.upper_bound = rule.upper_bound->item<float>();
    largest_quantized_ = rule.fp8 ? 448.0f : 127.0f;
    by_largest_of_all_ = groups_.whole;
    const auto& kernels = by_largest_of_all_ ? path().fp8_static : rule.fp8 ? path().fp8_dynamic : path().int8_dynamic;
    kernel_ = kernels[dtype];
  }

  // Quantizes rows that exist.
  void quantize(const Rows& x) {
    q_.x = x;
    if (by_largest_of_all_) {
      share(rows_, q_.width, [&](int64_t begin, int64_t end) { measure(x, begin, end); });
      take_largest();
    }
    share(rows_, q_.width, [&](int64_t begin, int64_t end) { kernel_(q_, begin, end); });
  }

  // Has a function make the rows [first, last), and quantizes them while the second cache has them.
  // make(to, begin, end) writes these rows to their places in `to`. `finish` is to be called after the last.
  template <class Make>
  void take(int64_t first, int64_t last, const Make& make) {
    if (by_largest_of_all_ && !kept_.defined()) kept_ = fresh({rows_, q_.width}, type_);
    share(last - first, q_.width, [&](int64_t begin, int64_t end) {
      if (by_largest_of_all_)
        keep(first + begin, first + end, make);
      else
        pass(first + begin, first + end, make);
    });
  }

  void finish() {
    if (!by_largest_of_all_) return;
    take_largest();
    if (!kept_.defined()) return;
    q_.x = {kept_.const_data_ptr(), q_.width};
    share(rows_, q_.width, [&](int64_t begin, int64_t end) { kernel_(q_, begin, end); });
  }

  // Quantizes the rows [first, last), which lie `stride` elements apart from x on.
  void quantize_from(const void* x, int64_t stride, int64_t first, int64_t last) const {
    Quantization q = q_;
    q.x = {row_zero(x, stride * int64_t(c10::elementSize(type_)), first), stride};
    kernel_(q, first, last);
  }

 private:
  QuantizedRows(const char* op, at::IntArrayRef sizes, at::ScalarType type, Dtype dtype, at::IntArrayRef group_shape,
                at::ScalarType quantized)
      : out(fresh(sizes, quantized)),
        groups_(op, sizes.back(), group_shape),
        type_(type),
        dtype_(dtype),
        rows_(sizes.back() ? out.numel() / sizes.back() : 0) {
    q_.out = static_cast<uint8_t*>(out.mutable_data_ptr());
    q_.width = sizes.back();
    q_.group = groups_.columns;
    q_.scale_row_stride = groups_.whole ? 0 : groups_.count;
    q_.scale_group_stride = groups_.whole ? 0 : 1;
  }

  template <class Make>
  void pass(int64_t begin, int64_t end, const Make& make) const {
    const int64_t row_bytes = q_.width * int64_t(c10::elementSize(type_));
    const int64_t together = std::clamp(row_bytes ? CACHED / row_bytes : 1, int64_t(1), end - begin);
    const RowMemory memory(together, row_bytes);
    Quantization q = q_;
    for (int64_t first = begin; first < end; first += together) {
      const int64_t last = std::min(first + together, end);
      void* const rows = memory.as_rows_from(first);
      make(MutableRows{rows, q.width}, first, last);
      q.x = {rows, q.width};
      kernel_(q, first, last);
    }
  }

  // One scale serves all rows, so that none can be quantized before all are there.
  template <class Make>
  void keep(int64_t begin, int64_t end, const Make& make) {
    const MutableRows to = rows_of(kept_, q_.width);
    const Rows made{to.data, to.stride};
    float largest = 0;
    for (int64_t row = begin; row < end; ++row) {
      make(to, row, row + 1);
      largest = std::max(largest, path().absolute_maximum[dtype_](made, q_.width, row, row + 1));
    }
    note(largest);
  }

  void measure(const Rows& x, int64_t begin, int64_t end) {
    note(path().absolute_maximum[dtype_](x, q_.width, begin, end));
  }

  void note(float largest) {
    const std::lock_guard<std::mutex> guard(one_);
    largest_ = std::max(largest_, largest);
  }

  void take_largest() { *q_.scales = scale_of(q_, largest_, largest_quantized_); }

  static constexpr int64_t CACHED = int64_t(1) << 17;  // bytes of rows that the second cache keeps

  Groups groups_;
  at::ScalarType type_;
  Dtype dtype_;
  int64_t rows_;
  Quantization q_;
  QuantizationKernel kernel_ = nullptr;
  bool by_largest_of_all_ = false;
  float largest_ = 0, largest_quantized_ = 0;
  Tensor kept_;
  std::mutex one_;
};

}  // namespace opgraft_cpu_kernels
