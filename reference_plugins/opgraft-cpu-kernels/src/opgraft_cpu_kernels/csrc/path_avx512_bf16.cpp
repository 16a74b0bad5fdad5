// The path avx512 with the instructions that convert to bfloat16, which make zero of numbers below 2^-126, and those that
// multiply bytes.
#include "common.h"

#if defined(OPGRAFT_AVX512_BF16)
#define CONVERTS_TO_BFLOAT16
#define MULTIPLIES_BYTES
OPGRAFT_TARGET_BEGIN("avx512bf16,avx512vnni,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
namespace opgraft_cpu_kernels {
namespace avx512_bf16 {
#include "vector_avx512.inc"
#include "path.inc"
}  // namespace avx512_bf16
}  // namespace opgraft_cpu_kernels
OPGRAFT_TARGET_END

const opgraft_cpu_kernels::Path opgraft_cpu_kernels::avx512_bf16_path =
    opgraft_cpu_kernels::avx512_bf16::table("avx512_bf16");
#endif
