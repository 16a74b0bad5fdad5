// Heads that are rotated, as they lie in memory.
#pragma once

#include "tensors.h"

namespace opgraft_cpu_kernels {
namespace {

// Heads of a tensor: [tokens, heads, head_size] with any distances but those within a head.
struct Heads {
  Tensor tensor;
  int64_t tokens, heads, head_size, token_stride, head_stride;

  Heads(const char* op, const Tensor& x, int64_t tokens, int64_t head_size)
      : tensor(x), tokens(tokens), head_size(head_size) {
    TORCH_CHECK_VALUE(x.dim() >= 2 && head_size > 0 && x.size(-1) % head_size == 0 &&
                          (tokens == 0 ? x.numel() == 0 : x.numel() % (tokens * head_size) == 0),
                      op, ": a tensor to rotate has shape ", x.sizes(), ", expected ", tokens, " tokens of heads of ",
                      head_size);
    heads = tokens ? x.numel() / tokens / head_size : 0;
    const bool rows = x.dim() == 2 && x.stride(1) == 1 && x.size(0) == tokens;
    const bool cube = x.dim() == 3 && x.stride(2) == 1 && x.size(0) == tokens && x.size(2) == head_size;
    if (!rows && !cube) tensor = x.contiguous();
    token_stride = rows || cube ? x.stride(0) : heads * head_size;
    head_stride = cube ? x.stride(1) : head_size;
  }
};

Rotary rotation(const Heads& x, const Tensor& out, int64_t head_size, int64_t rotary_dim, bool neox) {
  Rotary r;
  r.x = x.tensor.const_data_ptr();
  r.out = out.mutable_data_ptr();
  r.heads = x.heads;
  r.head_size = head_size;
  r.rotary_dim = rotary_dim;
  r.token_stride = x.token_stride;
  r.head_stride = x.head_stride;
  const bool in_place = r.x == r.out;
  r.out_token_stride = in_place ? x.token_stride : x.heads * head_size;
  r.out_head_stride = in_place ? x.head_stride : head_size;
  r.neox = neox;
  return r;
}

}  // namespace
}  // namespace opgraft_cpu_kernels
