// Threads that stay awake for the kernels of one call, which follow one another so soon that to wake OpenMP's for each
// takes as long as a small kernel.
#pragma once

#include <ATen/Parallel.h>
#include <c10/util/FunctionRef.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <thread>
#include <utility>

#if defined(_OPENMP)
#include <omp.h>
#endif

namespace opgraft_cpu_kernels {

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  std::this_thread::yield();
#endif
}

class Team {
 public:
  using Work = c10::function_ref<void(int64_t begin, int64_t end)>;

  // The team that this thread leads; null if there is none.
  static Team*& led() {
    static thread_local Team* team = nullptr;
    return team;
  }

  // Calls a function while torch's threads wait for what it has them share. What torch itself computes in it, this
  // thread computes alone.
  template <class Body>
  static void lead(const Body& body) {
#if defined(_OPENMP)
    const int threads = at::get_num_threads();
    if (threads > 1 && !at::in_parallel_region()) {
      Team team;
      std::exception_ptr raised;
#pragma omp parallel num_threads(threads)
      {
        if (omp_get_thread_num())
          team.serve(omp_get_thread_num());
        else
          raised = team.led_by(body, omp_get_num_threads());
      }
      if (raised) std::rethrow_exception(raised);
      return;
    }
#endif
    body();
  }

  // Divides rows among the threads, a number of them at least for each.
  void share(int64_t rows, int64_t least, Work work) {
    rows_ = rows;
    part_ = std::max(least, (rows + threads_ - 1) / threads_);
    work_ = &work;
    left_.store(threads_ - 1, std::memory_order_relaxed);
    round_.fetch_add(1, std::memory_order_release);
    std::exception_ptr raised = take_part(0);
    wait([&] { return left_.load(std::memory_order_acquire) == 0; });
    if (has_raised_.exchange(false)) raised = std::exchange(raised_, nullptr);
    if (raised) std::rethrow_exception(raised);
  }

 private:
  static constexpr uint32_t END = UINT32_MAX;
  static constexpr int PATIENCE = 4096;  // some tens of microseconds, after which other work may run

  template <class Body>
  std::exception_ptr led_by(const Body& body, int threads) {
    std::exception_ptr raised;
    threads_ = threads;
    led() = this;
    try {
      body();
    } catch (...) {
      raised = std::current_exception();
    }
    led() = nullptr;
    round_.store(END, std::memory_order_release);
    return raised;
  }

  void serve(int thread) {
    for (uint32_t seen = 0, round = 0;; seen = round) {
      wait([&] { return (round = round_.load(std::memory_order_acquire)) != seen; });
      if (round == END) return;
      if (std::exception_ptr raised = take_part(thread); raised && !has_raised_.exchange(true)) raised_ = raised;
      left_.fetch_sub(1, std::memory_order_acq_rel);
    }
  }

  std::exception_ptr take_part(int thread) {
    const int64_t begin = thread * part_, end = std::min(begin + part_, rows_);
    if (begin >= end) return nullptr;
    try {
      (*work_)(begin, end);
    } catch (...) {
      return std::current_exception();
    }
    return nullptr;
  }

  template <class Condition>
  static void wait(const Condition& holds) {
    for (int turn = 0; !holds(); ++turn) turn < PATIENCE ? pause() : std::this_thread::yield();
  }

  int threads_ = 1;
  int64_t rows_ = 0, part_ = 0;
  const Work* work_ = nullptr;
  std::exception_ptr raised_;  // the first that another thread has raised
  std::atomic<bool> has_raised_{false};
  alignas(64) std::atomic<uint32_t> round_{0};
  alignas(64) std::atomic<int> left_{0};
};

}  // namespace opgraft_cpu_kernels
