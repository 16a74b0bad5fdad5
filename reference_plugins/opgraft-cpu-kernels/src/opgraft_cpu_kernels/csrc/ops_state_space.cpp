// Selective state spaces as torch ops.

#include <ATen/ops/add.h>
#include <ATen/ops/softplus.h>

#include "tensors.h"

namespace opgraft_cpu_kernels {
namespace {

constexpr int64_t CHANNELS_OF_PART = 64;  // that a thread takes at once

// What the scan of many tokens and the step of one have in common: tokens [tokens, heads, channels].
struct Heads3 {
  const char* op;
  Dtype dtype;
  Tensor x, step, a, b, c, d, z;
  int64_t heads, channels, size, groups;
  bool one;  // step and A are one number per head, expanded over its channels

  Heads3(const char* op, const Tensor& x_, const Tensor& dt, const Tensor& a_, const Tensor& b_, const Tensor& c_,
         const OptionalTensor& d_, const OptionalTensor& z_, const OptionalTensor& bias, bool softplus)
      : op(op), dtype(dtype_of(op, x_)) {
    TORCH_CHECK_VALUE(x_.dim() == 3 && a_.dim() == 3 && b_.dim() == 3, op, ": expected x, A and B of three dimensions");
    heads = x_.size(1), channels = x_.size(2), size = a_.size(2), groups = b_.size(1);
    TORCH_CHECK_VALUE(groups > 0 && heads % groups == 0, op, ": groups do not divide heads");
    expect(dt, x_.sizes(), "dt");
    expect(a_, {heads, channels, size}, "A");
    expect(b_, {x_.size(0), groups, size}, "B");
    expect(c_, b_.sizes(), "C");
    x = in_rows(x_, "x"), b = in_rows(b_, "B"), c = in_rows(c_, "C");
    if (defined(z_).defined()) expect(*z_, x_.sizes(), "z"), z = in_rows(*z_, "z");
    if (defined(d_).defined()) expect(*d_, {heads, channels}, "D"), d = d_->to(at::kFloat).contiguous();
    if (defined(bias).defined()) expect(*bias, {heads, channels}, "dt_bias");
    expect_floating(op, a_);
    one = dt.stride(2) == 0 && a_.stride(1) == 0 && a_.stride(2) == 0 && size > 0 && channels > 0 &&
          (!defined(bias).defined() || bias->stride(1) == 0);
    a = one ? a_.narrow(1, 0, 1).narrow(2, 0, 1).to(at::kFloat).contiguous() : a_.to(at::kFloat).contiguous();
    step = (one ? dt.narrow(2, 0, 1) : dt).to(at::kFloat);
    if (defined(bias).defined()) step = at::add(step, (one ? bias->narrow(1, 0, 1) : *bias).to(at::kFloat));
    if (softplus) step = at::softplus(step);
    step = step.contiguous();
  }

  void expect(const Tensor& tensor, at::IntArrayRef sizes, const char* name) const {
    TORCH_CHECK_VALUE(tensor.sizes() == sizes, op, ": ", name, " has shape ", tensor.sizes(), ", expected ", sizes);
    TORCH_CHECK_VALUE(tensor.is_cpu(), op, ": ", name, " is not on the CPU");
  }

  Tensor in_rows(const Tensor& tensor, const char* name) const {
    TORCH_CHECK_VALUE(dtype_of(op, tensor) == dtype, op, ": ", name, " has another dtype than x");
    return tensor.stride(2) == 1 || tensor.size(2) == 1 ? tensor : tensor.contiguous();
  }

  Rows rows(const Tensor& tensor, int64_t token, int64_t head) const {
    if (!tensor.defined()) return {};
    const int64_t offset = token * tensor.stride(0) + head * tensor.stride(1);
    return {static_cast<const char*>(tensor.const_data_ptr()) + offset * tensor.element_size(), tensor.stride(0)};
  }

  // Tokens [first, first + count) of a head, which bring `state` forward and whose results go to `out`.
  StateScan part(int64_t first, int64_t count, int64_t head, float* state, const Tensor& out) const {
    StateScan s;
    const int64_t group = head / (heads / groups), steps = step.size(2);
    s.x = rows(x, first, head), s.z = rows(z, first, head);
    s.b = rows(b, first, group), s.c = rows(c, first, group);
    const Rows to = rows(out, first, head);
    s.out = {const_cast<void*>(to.data), to.stride};
    s.step = step.const_data_ptr<float>() + (first * heads + head) * steps;
    s.step_stride = heads * steps;
    s.step_channel_stride = one ? 0 : 1;
    s.a_stride = one ? 0 : size;
    s.a = a.const_data_ptr<float>() + head * (one ? 1 : channels * size);
    s.d = d.defined() ? d.const_data_ptr<float>() + head * channels : nullptr;
    s.state = state;
    s.tokens = count, s.size = size;
    return s;
  }
};

// Calls work(sequence, head, first channel, last channel) for parts of all sequences and heads, shared among threads.
template <class Work>
void share_parts(int64_t sequences, const Heads3& h, int64_t tokens, const Work& work) {
  const int64_t parts = (h.channels + CHANNELS_OF_PART - 1) / CHANNELS_OF_PART;
  const int64_t cost = CHANNELS_OF_PART * std::max<int64_t>(h.size, 1) * std::max<int64_t>(tokens, 1);
  share(sequences * h.heads * parts, cost, [&](int64_t begin, int64_t end) {
    for (int64_t number = begin; number < end; ++number) {
      const int64_t first = number % parts * CHANNELS_OF_PART, row = number / parts;
      work(row / h.heads, row % h.heads, first, std::min(first + CHANNELS_OF_PART, h.channels));
    }
  });
}

Tensor head_of(const OptionalTensor& tensor) { return tensor ? tensor->unsqueeze(0) : Tensor(); }

std::tuple<Tensor, Tensor> selective_scan(const Tensor& x, const Tensor& dt, const Tensor& a, const Tensor& b,
                                          const Tensor& c, const Tensor& query_start_loc, const Tensor& initial_states,
                                          const OptionalTensor& d, const OptionalTensor& z, const OptionalTensor& bias,
                                          bool softplus) {
  const char* op = "selective_scan";
  refuse_gradient(op, x, dt, a, b, c, initial_states, defined(d), defined(z), defined(bias));
  TORCH_CHECK_VALUE(x.dim() == 2 && dt.dim() == 2 && a.dim() == 2 && b.dim() == 2 && c.dim() == 2, op,
                    ": expected x, dt, A, B and C of two dimensions");
  const OptionalTensor gate = z ? OptionalTensor(z->unsqueeze(1)) : z;
  const Heads3 h(op, x.unsqueeze(1), dt.unsqueeze(1), a.unsqueeze(0), b.unsqueeze(1), c.unsqueeze(1),
                 d ? OptionalTensor(head_of(d)) : d, gate, bias ? OptionalTensor(head_of(bias)) : bias, softplus);
  const Tensor bounds = query_start_loc.to(at::kLong).contiguous();
  TORCH_CHECK_VALUE(bounds.dim() == 1 && bounds.numel() > 0, op, ": query_start_loc is no vector");
  const int64_t sequences = bounds.numel() - 1;
  const int64_t* at = bounds.const_data_ptr<int64_t>();
  TORCH_CHECK_VALUE(at[0] == 0 && at[sequences] == x.size(0) && std::is_sorted(at, at + sequences + 1), op,
                    ": query_start_loc does not ascend from 0 to the number of tokens");
  TORCH_CHECK_VALUE(initial_states.scalar_type() == at::kFloat, op, ": initial_states are not float32");
  h.expect(initial_states, {sequences, h.channels, h.size}, "initial_states");
  const Tensor out = fresh(x.sizes(), x.scalar_type()), final = fresh(initial_states.sizes(), at::kFloat);
  final.copy_(initial_states);
  const Tensor by_head = out.unsqueeze(1);
  float* states = final.mutable_data_ptr<float>();
  const StateScanKernel kernel = path().scan_states[h.dtype];
  share_parts(sequences, h, sequences ? x.size(0) / sequences : 0,
              [&](int64_t sequence, int64_t head, int64_t first, int64_t last) {
                float* state = states + sequence * h.channels * h.size;
                kernel(h.part(at[sequence], at[sequence + 1] - at[sequence], head, state, by_head), first, last);
              });
  return {out, final};
}

void selective_state_update(const Tensor& state, const Tensor& x, const Tensor& dt, const Tensor& a, const Tensor& b,
                            const Tensor& c, const Tensor& slots, const Tensor& out, const OptionalTensor& d,
                            const OptionalTensor& z, const OptionalTensor& bias, bool softplus) {
  const char* op = "selective_state_update";
  refuse_gradient(op, state, x, dt, a, b, c, out, defined(d), defined(z), defined(bias));
  TORCH_CHECK_VALUE(x.dim() == 3 && dt.dim() == 3 && c.dim() == 3, op, ": expected x, dt and C of three dimensions");
  const Heads3 h(op, x, dt, a, b, c, d, z, bias, softplus);
  const int64_t sequences = x.size(0), slots_there = state.dim() ? state.size(0) : 0;
  TORCH_CHECK_VALUE(state.scalar_type() == at::kFloat, op, ": state is not float32");
  h.expect(state, {slots_there, h.heads, h.channels, h.size}, "state");
  h.expect(out, x.sizes(), "out");
  TORCH_CHECK_VALUE(out.scalar_type() == x.scalar_type() && (out.stride(2) == 1 || out.size(2) == 1), op,
                    ": out lies in no rows of the dtype of x");
  TORCH_CHECK_VALUE(state.numel() == 0 || (state.stride(3) == 1 && state.stride(2) == h.size), op,
                    ": a head of state is not contiguous");
  const Tensor places = slots.to(at::kLong).contiguous();
  h.expect(places, {sequences}, "slots");
  const int64_t* place = places.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < sequences; ++i)
    TORCH_CHECK_VALUE(place[i] >= 0 && place[i] < slots_there, op, ": a slot is none");
  float* states = state.mutable_data_ptr<float>();
  const StateScanKernel kernel = path().scan_states[h.dtype];
  share_parts(sequences, h, 1, [&](int64_t sequence, int64_t head, int64_t first, int64_t last) {
    float* own = states + place[sequence] * state.stride(0) + head * state.stride(1);
    kernel(h.part(sequence, 1, head, own, out), first, last);
  });
  written(state);
  written(out);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(opgraft_cpu_kernels, library) {
  library.def(
      "selective_scan(Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor query_start_loc, Tensor "
      "initial_states, Tensor? D=None, Tensor? z=None, Tensor? dt_bias=None, bool dt_softplus=False) -> (Tensor, "
      "Tensor)");
  library.def(
      "selective_state_update(Tensor(a!) state, Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor slots, "
      "Tensor(b!) out, Tensor? D=None, Tensor? z=None, Tensor? dt_bias=None, bool dt_softplus=False) -> ()");
}

#define STATE_SPACE(apply) apply(selective_scan) apply(selective_state_update)

IMPLEMENT(STATE_SPACE)

}  // namespace opgraft_cpu_kernels
