// The ops that decoders are made of, for callers in C++: each is the torch op of its name.
#pragma once

#include "tensors.h"

namespace opgraft_cpu_kernels {

Tensor linear(const Tensor& x, const Tensor& weight, const OptionalTensor& bias, c10::string_view activation,
              const OptionalTensor& residual);
Tensor quantized_linear(const Tensor& x, const Tensor& weight, const Tensor& scales, const OptionalTensor& offsets,
                        const OptionalTensor& bias);
Tensor int8_dynamic_linear(const Tensor& x, const Tensor& weight, const Tensor& scales, const OptionalTensor& bias);
Tensor lossless_linear(const Tensor& x, const Tensor& weight, const Tensor& exponents, const Tensor& places,
                       const Tensor& units, const OptionalTensor& bias, int64_t few);
Tensor rms_norm(const Tensor& x, const OptionalTensor& weight, double eps, std::optional<int64_t> measured);
std::tuple<Tensor, Tensor> fused_add_rms_norm(const Tensor& x, const Tensor& residual, const OptionalTensor& weight,
                                              double eps, std::optional<int64_t> measured);
std::tuple<Tensor, Tensor> rotary_embedding(const Tensor& positions, const Tensor& query, const Tensor& key,
                                            int64_t head_size, const Tensor& cache, bool neox);
Tensor silu_and_mul(const Tensor& x);
void add_lora_(const Tensor& y, const Tensor& x, const Tensor& a, const Tensor& b, const Tensor& bounds,
               at::IntArrayRef sizes, int64_t few);
Tensor gelu_and_mul(const Tensor& x, c10::string_view approximate);
Tensor swigluoai_and_mul(const Tensor& x, double alpha, double limit);
Tensor attend_pages(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& cache,
                    const Tensor& slots, const Tensor& block_table, const Tensor& query_start_loc,
                    const Tensor& seq_lens, double scale, std::optional<int64_t> sliding_window,
                    std::optional<double> logits_soft_cap, const OptionalTensor& sinks);

}  // namespace opgraft_cpu_kernels
