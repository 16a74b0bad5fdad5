// Sleep of a thread until another process changes a word that both have mapped.

#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>

#if defined(__linux__)
#include <climits>
#include <linux/futex.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace opgraft_cpu_kernels {

constexpr std::chrono::milliseconds NAP(100);  // of sleep before one looks whether the other still lives

#if defined(__linux__)
inline void sleep_on(std::atomic<uint32_t>& word, uint32_t seen) {
  const timespec nap{0, std::chrono::nanoseconds(NAP).count()};
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT, seen, &nap, nullptr, 0);
}

inline void wake(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

// Gives the thread the name by which opgraft.distributed.Communicator knows that it waits, until this is gone.
class Waiting {
 public:
  Waiting() {
    prctl(PR_GET_NAME, before_);
    prctl(PR_SET_NAME, "opgraft waits");
  }
  ~Waiting() { prctl(PR_SET_NAME, before_); }

 private:
  char before_[16];  // the longest name with its end
};
#else
inline void sleep_on(std::atomic<uint32_t>&, uint32_t) { std::this_thread::sleep_for(std::chrono::microseconds(400)); }
inline void wake(std::atomic<uint32_t>&) {}
class Waiting {};
#endif

}  // namespace opgraft_cpu_kernels
