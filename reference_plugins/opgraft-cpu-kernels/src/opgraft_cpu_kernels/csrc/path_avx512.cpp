#include "common.h"

#if defined(__x86_64__)
OPGRAFT_TARGET_BEGIN("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
namespace opgraft_cpu_kernels {
namespace avx512 {
#include "vector_avx512.inc"
#include "path.inc"
#include "table.inc"
}  // namespace avx512
}  // namespace opgraft_cpu_kernels
OPGRAFT_TARGET_END

const opgraft_cpu_kernels::Path opgraft_cpu_kernels::avx512_path = opgraft_cpu_kernels::avx512::table("avx512");
#endif
