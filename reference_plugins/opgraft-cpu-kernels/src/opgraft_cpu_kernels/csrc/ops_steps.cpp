// Steps of a layer that follow one another as one op: for a single row, calling each from Python takes longer than
// computing it.

#include "ops.h"

namespace opgraft_cpu_kernels {
namespace {

// down(act(gate(x)) * up(x)); `gate_up` is the weight of gate, and below it that of up.
Tensor gated_mlp(const Tensor& x, const Tensor& gate_up, const OptionalTensor& gate_up_bias, const Tensor& down,
                 const OptionalTensor& down_bias, c10::string_view activation) {
  const Tensor gated = linear(x, gate_up, gate_up_bias, "none", {});
  TORCH_CHECK_VALUE(activation == "silu" || activation == "gelu" || activation == "gelu_tanh",
                    "gated_mlp: activation is '", activation, "', expected silu, gelu or gelu_tanh");
  const Tensor hidden =
      activation == "silu" ? silu_and_mul(gated) : gelu_and_mul(gated, activation == "gelu" ? "none" : "tanh");
  return linear(hidden, down, down_bias, "none", {});
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(opgraft_cpu_kernels, library) {
  library.def(
      "gated_mlp(Tensor x, Tensor gate_up, Tensor? gate_up_bias, Tensor down, Tensor? down_bias, str activation) -> "
      "Tensor");
}

#define STEPS(apply) apply(gated_mlp)

IMPLEMENT(STEPS)

}  // namespace opgraft_cpu_kernels
