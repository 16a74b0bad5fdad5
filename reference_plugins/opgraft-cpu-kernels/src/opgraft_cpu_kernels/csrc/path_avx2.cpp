#include "common.h"

#if defined(__x86_64__)
OPGRAFT_TARGET_BEGIN("avx2,fma,f16c")
namespace opgraft_cpu_kernels {
namespace avx2 {
#include "vector_avx2.inc"
#include "path.inc"
#include "table.inc"
}  // namespace avx2
}  // namespace opgraft_cpu_kernels
OPGRAFT_TARGET_END

const opgraft_cpu_kernels::Path opgraft_cpu_kernels::avx2_path = opgraft_cpu_kernels::avx2::table("avx2");
#endif
