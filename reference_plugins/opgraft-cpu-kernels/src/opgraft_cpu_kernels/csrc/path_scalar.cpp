#include "common.h"

namespace opgraft_cpu_kernels {
namespace scalar {
#include "vector_scalar.inc"
#include "path.inc"
#include "table.inc"
}  // namespace scalar
}  // namespace opgraft_cpu_kernels

const opgraft_cpu_kernels::Path opgraft_cpu_kernels::scalar_path = opgraft_cpu_kernels::scalar::table("scalar");
