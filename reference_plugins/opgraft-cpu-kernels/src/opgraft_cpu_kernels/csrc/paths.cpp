// Which paths this CPU has, and which of them is in force.

#include <atomic>

#include "kernels.h"

namespace opgraft_cpu_kernels {
namespace {

// Tables are constant, so that a reader on another thread needs no order but sees one or the other.
std::atomic<const Path*>& in_force() {
  static std::atomic<const Path*> path{supported_paths().front()};
  return path;
}

}  // namespace

std::vector<const Path*> supported_paths() {
  std::vector<const Path*> paths;
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
#if defined(OPGRAFT_AMX)
    if (has_amx()) paths.push_back(&amx_path());
#endif
#if defined(OPGRAFT_AVX512_BF16)
    if (__builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni"))
      paths.push_back(&avx512_bf16_path());
#endif
    paths.push_back(&avx512_path);
  }
  if (avx2) paths.push_back(&avx2_path);
#endif
  paths.push_back(&scalar_path);
  return paths;
}

const Path& path() { return *in_force().load(std::memory_order_relaxed); }

void set_path(const Path& path) { in_force().store(&path, std::memory_order_relaxed); }

}  // namespace opgraft_cpu_kernels
