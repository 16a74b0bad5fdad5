// Collectives of ranks of one host, over memory that all of them have mapped.
#pragma once

#include <torch/custom_class.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <numeric>

#include "tensors.h"

namespace opgraft_cpu_kernels {

constexpr int64_t MOST_RANKS = 64;

// The place of a rank at the head of the memory, on cache lines of its own.
struct alignas(128) Seat {
  std::atomic<uint32_t> arrived;   // its steps so far; others sleep on it
  std::atomic<uint32_t> sleepers;  // how many do
  std::atomic<uint32_t> left;      // it makes no more steps
};

// A collective is made of steps. In a step a rank writes to its own slot, arrives, waits for those whose slots it reads,
// and reads them. Slots of odd and of even steps are apart, so that a rank may write while others still read what it
// wrote a step before. What it wrote two steps before they have read when they have arrived since, for which it waits.
//
// Ranks make the same calls in the same order, one thread at a time. After an error no call succeeds, as ranks are out
// of step.
class SharedGroup : public torch::CustomClassHolder {
 public:
  // `file` is mapped and left to the caller; `processes` are pidfds of all ranks, which are closed in the end. `spins`:
  // each rank has a processor of its own, so that who waits may keep one for a while.
  SharedGroup(int64_t file, int64_t rank, std::vector<int64_t> processes, double seconds, bool spins);
  ~SharedGroup() override;
  static int64_t bytes(int64_t ranks);  // of the file

  Tensor all_reduce(const Tensor& x);
  void all_reduce_(const Tensor& x);  // contiguous
  // Sums contiguous rows to `out`, and calls a function for some rows at a time, while the caches have their sums.
  using RowsDone = c10::function_ref<void(int64_t first, int64_t last)>;
  void all_reduce_rows(const Tensor& x, const Tensor& out, const RowsDone& done);
  Tensor all_gather(const Tensor& x, int64_t dim);
  OptionalTensor gather(const Tensor& x, int64_t to, int64_t dim);
  Tensor reduce_scatter(const Tensor& x, int64_t dim);
  Tensor broadcast(const Tensor& x, int64_t from);
  Tensor all_to_all(const Tensor& x, const std::vector<int64_t>& sent, const std::vector<int64_t>& received);
  void leave();  // others that wait for this rank fail at once
  bool spins() const { return spins_; }
  // Calls, bytes that this rank gave to them, their seconds, and those in which it waited for others.
  std::tuple<int64_t, int64_t, double, double> used() const { return {calls_, given_, taken_, waited_}; }

 private:
  using Clock = std::chrono::steady_clock;
  using Piece = std::function<void(int64_t rank, int64_t first, int64_t size, char* memory)>;

  struct Counted {
    SharedGroup& group;
    const Clock::time_point start = Clock::now();
    Counted(SharedGroup& group, int64_t bytes) : group(group) {
      ++group.calls_;
      group.given_ += bytes;
    }
    ~Counted() { group.taken_ += seconds_since(start); }
  };

  static double seconds_since(Clock::time_point start) {
    return std::chrono::duration<double>(Clock::now() - start).count();
  }

  void begin();  // a step: waits until its slot may be written
  void arrive();
  void wait_for(int64_t rank, uint32_t step);
  void wait_for_all();
  static bool spin_for(const Seat& seat, uint32_t step, Clock::time_point start);  // whether it has arrived
  void sleep_for(int64_t rank, uint32_t step, Clock::time_point start);
  [[noreturn]] void fail(const std::string& reason);
  char* slot(int64_t rank) const;
  int64_t largest(int64_t own);  // of the numbers that all ranks give
  void all_reduce_to(const char* x, char* out, int64_t count, at::ScalarType dtype);
  void sum_step(const char* x, char* out, int64_t count, at::ScalarType dtype);
  Tensor gathered(const Tensor& x, int64_t dim, int64_t to);
  void exchange(int64_t bytes, const Piece& write, const Piece& read);

  char* memory_;
  Seat* seats_;
  const int64_t rank_, ranks_;
  const std::vector<int64_t> processes_;
  const double seconds_;
  const bool spins_;
  uint32_t step_ = 0;
  int64_t calls_ = 0, given_ = 0;
  double taken_ = 0, waited_ = 0;
  std::string failed_;
};

using Tensors = std::vector<Tensor>;

// Sums over ranks that are normed, and quantized, while the caches have them. The last result is the sum. Results are
// lists, as torch takes two microseconds to find the type of a tuple.
Tensors all_reduce_rms_norm(const c10::intrusive_ptr<SharedGroup>& group, const Tensor& x,
                            const OptionalTensor& residual, const OptionalTensor& weight, double eps, bool gemma);
Tensors all_reduce_rms_norm_quant_fp8_static(const c10::intrusive_ptr<SharedGroup>& group, const Tensor& x,
                                             const OptionalTensor& residual, const Tensor& scale,
                                             const std::vector<int64_t>& group_shape, const OptionalTensor& weight,
                                             double eps);
Tensors all_reduce_rms_norm_quant_fp8_dynamic(const c10::intrusive_ptr<SharedGroup>& group, const Tensor& x,
                                              const OptionalTensor& residual, const std::vector<int64_t>& group_shape,
                                              const OptionalTensor& weight, double eps, const OptionalTensor& scale_ub,
                                              bool use_ue8m0);

// Before any class or op that has one as an argument.
void define_shared_group(torch::Library& library);

}  // namespace opgraft_cpu_kernels
