// Selective state spaces and the convolutions before them as torch ops.

#include "tensors.h"

namespace opgraft_cpu_kernels {
namespace {

constexpr int64_t CHANNELS_OF_PART = 64;  // that a thread takes at once

// Where sequences begin and end, in int64.
Tensor bounds_of(const char* op, const Tensor& query_start_loc, int64_t tokens) {
  const Tensor bounds = query_start_loc.to(at::kLong).contiguous();
  TORCH_CHECK_VALUE(bounds.dim() == 1 && bounds.numel() > 0, op, ": query_start_loc is no vector");
  const int64_t* at = bounds.const_data_ptr<int64_t>();
  const int64_t* last = at + bounds.numel() - 1;
  TORCH_CHECK_VALUE(*at == 0 && *last == tokens && std::is_sorted(at, last + 1), op,
                    ": query_start_loc does not ascend from 0 to the number of tokens");
  return bounds;
}

// The slot of each sequence, in int64.
Tensor places_of(const char* op, const Tensor& slots, int64_t sequences, int64_t there) {
  const Tensor places = slots.to(at::kLong).contiguous();
  TORCH_CHECK_VALUE(places.dim() == 1 && places.numel() == sequences && places.is_cpu(), op,
                    ": slots are not one for each sequence");
  const int64_t* place = places.const_data_ptr<int64_t>();
  TORCH_CHECK_VALUE(std::all_of(place, place + sequences, [&](int64_t slot) { return slot >= 0 && slot < there; }), op,
                    ": a slot is none");
  return places;
}

// What the scan of many tokens and the step of one have in common: tokens [tokens, heads, channels].
struct Heads3 {
  const char* op;
  Dtype dtype;
  Tensor x, step, bias, a, b, c, d, z;
  int64_t heads, channels, size, groups;
  bool softplus, one;  // one: step and A are one number per head, expanded over its channels

  Heads3(const char* op, const Tensor& x_, const Tensor& dt, const Tensor& a_, const Tensor& b_, const Tensor& c_,
         const OptionalTensor& d_, const OptionalTensor& z_, const OptionalTensor& bias_, bool softplus)
      : op(op), dtype(dtype_of(op, x_)), softplus(softplus) {
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
    if (defined(bias_).defined()) expect(*bias_, {heads, channels}, "dt_bias");
    expect_floating(op, a_);
    one = dt.stride(2) == 0 && a_.stride(1) == 0 && a_.stride(2) == 0 && size > 0 && channels > 0 &&
          (!defined(bias_).defined() || bias_->stride(1) == 0);
    a = one ? a_.narrow(1, 0, 1).narrow(2, 0, 1).to(at::kFloat).contiguous() : a_.to(at::kFloat).contiguous();
    step = one ? dt.narrow(2, 0, 1) : dt;
    if (step.scalar_type() != x.scalar_type()) step = step.to(at::kFloat);
    if (step.size(2) != 1 && step.stride(2) != 1) step = step.contiguous();
    if (defined(bias_).defined()) bias = (one ? bias_->narrow(1, 0, 1) : *bias_).to(at::kFloat).contiguous();
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
    const int64_t group = head / (heads / groups);
    s.x = rows(x, first, head), s.z = rows(z, first, head);
    s.b = rows(b, first, group), s.c = rows(c, first, group);
    const Rows to = rows(out, first, head);
    s.out = {const_cast<void*>(to.data), to.stride};
    s.step = rows(step, first, head);
    s.wide_steps = step.scalar_type() == at::kFloat, s.softplus = softplus;
    s.step_bias = bias.defined() ? bias.const_data_ptr<float>() + head * (one ? 1 : channels) : nullptr;
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
  const Tensor bounds = bounds_of(op, query_start_loc, x.size(0));
  const int64_t sequences = bounds.numel() - 1;
  const int64_t* at = bounds.const_data_ptr<int64_t>();
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
  const Tensor places = places_of(op, slots, sequences, slots_there);
  const int64_t* place = places.const_data_ptr<int64_t>();
  float* states = state.mutable_data_ptr<float>();
  const StateScanKernel kernel = path().scan_states[h.dtype];
  share_parts(sequences, h, 1, [&](int64_t sequence, int64_t head, int64_t first, int64_t last) {
    float* own = states + place[sequence] * state.stride(0) + head * state.stride(1);
    kernel(h.part(sequence, 1, head, own, out), first, last);
  });
  written(state);
  written(out);
}

// What the convolution of many tokens and the step of one have in common.
struct Taps {
  const char* op;
  Dtype dtype;
  at::ScalarType kind;
  Matrix x;
  Tensor weight, bias;
  bool silu;

  Taps(const char* op, const Tensor& x_, const Tensor& weight_, const OptionalTensor& bias_,
       std::optional<c10::string_view> activation)
      : op(op), dtype(dtype_of(op, x_)), kind(x_.scalar_type()), x(op, x_), silu(activation.has_value()) {
    TORCH_CHECK_VALUE(!silu || *activation == "silu" || *activation == "swish", op, ": activation is ", *activation);
    TORCH_CHECK_VALUE(x_.dim() == 2 && weight_.dim() == 2 && weight_.size(1) > 0, op,
                      ": expected x and weight of two dimensions");
    expect(weight_, {x_.size(1), weight_.size(1)}, "weight");
    weight = weight_.contiguous();
    if (defined(bias_).defined()) expect(*bias_, {x_.size(1)}, "bias"), bias = bias_->contiguous();
  }

  void expect(const Tensor& tensor, at::IntArrayRef sizes, const char* name) const {
    TORCH_CHECK_VALUE(tensor.sizes() == sizes, op, ": ", name, " has shape ", tensor.sizes(), ", expected ", sizes);
    TORCH_CHECK_VALUE(tensor.is_cpu() && tensor.scalar_type() == kind, op, ": ", name, " is none of the dtype of x");
  }

  Convolution into(const Tensor& out, const Tensor& states) const {
    Convolution s;
    s.x = x.view(), s.out = rows_of(out, out.stride(0));
    s.weight = weight.const_data_ptr(), s.bias = bias.defined() ? bias.const_data_ptr() : nullptr;
    s.states = const_cast<void*>(states.const_data_ptr()), s.state_stride = states.stride(0);
    s.channels = weight.size(0), s.width = weight.size(1), s.silu = silu;
    return s;
  }
};

// Leaves the last inputs of each sequence where its state was, which has what was before them.
template <class Word>
void keep_last(const Convolution& s, int64_t sequences) {
  const int64_t before = s.width - 1;
  for (int64_t sequence = 0; sequence < sequences; ++sequence) {
    const int64_t start = s.bounds[sequence], length = s.bounds[sequence + 1] - start;
    for (int64_t k = 0; k < before && length; ++k) {
      Word* to = static_cast<Word*>(s.states) + sequence * s.channels * before + k;
      const int64_t place = length - before + k;
      const Word* from = place < 0 ? to + length : static_cast<const Word*>(s.x.data) + (start + place) * s.x.stride;
      const int64_t apart = place < 0 ? before : 1;
      for (int64_t channel = 0; channel < s.channels; ++channel) to[channel * before] = from[channel * apart];
    }
  }
}

std::tuple<Tensor, Tensor> causal_conv1d(const Tensor& x, const Tensor& weight, const Tensor& query_start_loc,
                                         const Tensor& initial_states, const OptionalTensor& bias,
                                         std::optional<c10::string_view> activation) {
  const char* op = "causal_conv1d";
  refuse_gradient(op, x, weight, initial_states, defined(bias));
  const Taps taps(op, x, weight, bias, activation);
  const Tensor bounds = bounds_of(op, query_start_loc, x.size(0));
  const int64_t sequences = bounds.numel() - 1;
  taps.expect(initial_states, {sequences, x.size(1), weight.size(1) - 1}, "initial_states");
  const Tensor out = fresh(x.sizes(), x.scalar_type()), final = fresh(initial_states.sizes(), x.scalar_type());
  final.copy_(initial_states);
  Convolution s = taps.into(out, final);
  s.bounds = bounds.const_data_ptr<int64_t>();
  const ConvolutionKernel kernel = path().convolve_tokens[taps.dtype];
  share(x.size(0), s.channels * s.width, [&](int64_t begin, int64_t end) { kernel(s, begin, end); });
  x.element_size() == 4 ? keep_last<uint32_t>(s, sequences) : keep_last<uint16_t>(s, sequences);
  return {out, final};
}

void causal_conv1d_update(const Tensor& x, const Tensor& conv_state, const Tensor& weight, const Tensor& slots,
                          const Tensor& out, const OptionalTensor& bias, std::optional<c10::string_view> activation) {
  const char* op = "causal_conv1d_update";
  refuse_gradient(op, x, conv_state, weight, out, defined(bias));
  const Taps taps(op, x, weight, bias, activation);
  const int64_t there = conv_state.dim() ? conv_state.size(0) : 0, before = weight.size(1) - 1;
  taps.expect(conv_state, {there, x.size(1), before}, "conv_state");
  taps.expect(out, x.sizes(), "out");
  TORCH_CHECK_VALUE(out.stride(1) == 1 || out.size(1) == 1, op, ": out lies in no rows");
  TORCH_CHECK_VALUE(conv_state.numel() == 0 || (conv_state.stride(2) == 1 && conv_state.stride(1) == before), op,
                    ": a state is not contiguous");
  const Tensor places = places_of(op, slots, x.size(0), there);
  Convolution s = taps.into(out, conv_state);
  s.slots = places.const_data_ptr<int64_t>();
  const ConvolutionKernel kernel = path().convolve_steps[taps.dtype];
  share(x.size(0), 4 * s.channels * s.width, [&](int64_t begin, int64_t end) { kernel(s, begin, end); });
  written(conv_state);
  written(out);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(opgraft_cpu_kernels, library) {
  library.def(
      "causal_conv1d(Tensor x, Tensor weight, Tensor query_start_loc, Tensor initial_states, Tensor? bias=None, str? "
      "activation=None) -> (Tensor, Tensor)");
  library.def(
      "causal_conv1d_update(Tensor x, Tensor(a!) conv_state, Tensor weight, Tensor slots, Tensor(b!) out, Tensor? "
      "bias=None, str? activation=None) -> ()");
  library.def(
      "selective_scan(Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor query_start_loc, Tensor "
      "initial_states, Tensor? D=None, Tensor? z=None, Tensor? dt_bias=None, bool dt_softplus=False) -> (Tensor, "
      "Tensor)");
  library.def(
      "selective_state_update(Tensor(a!) state, Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor slots, "
      "Tensor(b!) out, Tensor? D=None, Tensor? z=None, Tensor? dt_bias=None, bool dt_softplus=False) -> ()");
}

#define STATE_SPACE(apply) \
  apply(causal_conv1d) apply(causal_conv1d_update) apply(selective_scan) apply(selective_state_update)

IMPLEMENT(STATE_SPACE)

}  // namespace opgraft_cpu_kernels
