// The path avx512 with the instructions that convert to bfloat16, which make zero of numbers below 2^-126, and those
// that multiply bytes.
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

namespace opgraft_cpu_kernels {
namespace {

template <class X>
void set_tiles(Path& path, Dtype dtype) {
  path.prepare_integers[dtype] = avx512_bf16::prepare_integers<X>;
  path.tiled_linear[dtype] = avx512_bf16::tiled_linear<X>;
}

// What neither converts nor multiplies bytes is compiled once, for avx512.
Path with_conversion(Path path) {
  path.name = "avx512_bf16";
  avx512_bf16::set_kernels<avx512_bf16::Bfloat16>(path, BFLOAT16);
  path.linear[FLOAT32] = avx512_bf16::linear_rows<float>;
  avx512_bf16::set_int8_linear<float>(path, FLOAT32);
  avx512_bf16::set_int8_linear<avx512_bf16::Float16>(path, FLOAT16);
  set_tiles<float>(path, FLOAT32);
  set_tiles<avx512_bf16::Bfloat16>(path, BFLOAT16);
  set_tiles<avx512_bf16::Float16>(path, FLOAT16);
  path.dequantize_tiles = avx512_bf16::dequantize_tiles<avx512_bf16::Bfloat16>;
  return path;
}

}  // namespace

const Path& avx512_bf16_path() {
  static const Path path = with_conversion(avx512_path);
  return path;
}

}  // namespace opgraft_cpu_kernels
#endif
