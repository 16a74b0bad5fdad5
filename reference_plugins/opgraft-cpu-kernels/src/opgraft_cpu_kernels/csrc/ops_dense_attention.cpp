// Attention over all keys at once as a torch op.

#include <ATen/ExpandUtils.h>

#include <cmath>
#include <limits>

#include "ops.h"
#include "quantizing.h"

namespace opgraft_cpu_kernels {
namespace {

constexpr const char* SDPA = "scaled_dot_product_attention";

// An argument as [batch, heads, tokens, size] whose elements of a token adjoin; a copy of it where they do not.
Tensor by_heads(const char* name, const Tensor& x, int64_t dims) {
  TORCH_CHECK_VALUE(x.dim() == dims, SDPA, ": ", name, " has shape ", x.sizes(), ", expected ", dims, " dimensions");
  Tensor four = x;
  while (four.dim() < 4) four = four.unsqueeze(0);
  return four.stride(3) == 1 || four.size(3) == 1 ? four : four.contiguous();
}

Heads heads_of(const Tensor& x) { return {x.const_data_ptr(), x.stride(0), x.stride(1), x.stride(2)}; }

void expect_keys(const char* name, const Tensor& x, const Tensor& query, const Tensor& key, bool grouped) {
  TORCH_CHECK_VALUE(x.scalar_type() == query.scalar_type(), SDPA, ": ", name, " has dtype ", x.scalar_type(),
                    ", expected that of query, ", query.scalar_type());
  const int64_t heads = x.size(1);
  const bool fits = grouped ? heads > 0 && query.size(1) % heads == 0 : heads == query.size(1);
  TORCH_CHECK_VALUE(fits && x.size(0) == query.size(0) && heads == key.size(1) && x.size(2) == key.size(2), SDPA, ": ",
                    name, " has shape ", x.sizes(), " beside query ", query.sizes());
}

void expect_mask(const Tensor& mask, const Tensor& query, at::IntArrayRef scores) {
  const at::ScalarType dtype = mask.scalar_type();
  TORCH_CHECK_VALUE(dtype == at::kBool || dtype == at::kFloat || dtype == query.scalar_type(), SDPA,
                    ": attn_mask has dtype ", dtype, ", expected bool, float32 or that of query");
  TORCH_CHECK_VALUE(at::is_expandable_to(mask.sizes(), scores), SDPA, ": attn_mask has shape ", mask.sizes(),
                    ", expected it to broadcast to ", scores);
}

// A mask as what is added to scores. Dimensions that were expanded stay so.
Tensor as_scores(const Tensor& mask) {
  if (mask.scalar_type() != at::kBool) return mask.to(at::kFloat);
  Tensor bytes = mask;
  for (int64_t dim = 0; dim < mask.dim(); ++dim)
    if (!mask.stride(dim) && mask.size(dim)) bytes = bytes.narrow(dim, 0, 1);
  bytes = bytes.contiguous();
  const Tensor scores = fresh(bytes.sizes(), at::kFloat);
  const bool* const from = bytes.const_data_ptr<bool>();
  float* const to = scores.mutable_data_ptr<float>();
  for (int64_t i = 0; i < bytes.numel(); ++i) to[i] = from[i] ? 0.0f : -std::numeric_limits<float>::infinity();
  return scores;
}

// Attention that is ready to run: its arguments, and the tensors that hold their memory.
struct DenseCall {
  Dtype dtype;
  Tensor q, k, v, scores, out;
  DenseAttention a;

  DenseCall(const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& mask, bool is_causal,
            std::optional<double> scale, bool enable_gqa) {
    refuse_gradient(SDPA, query, key, value, defined(mask));
    const int64_t dims = query.dim();
    TORCH_CHECK_VALUE(2 <= dims && dims <= 4 && !(mask && is_causal) && !(enable_gqa && dims < 3), SDPA,
                      ": query has shape ", query.sizes(), ", is_causal ", is_causal);
    dtype = dtype_of(SDPA, query);
    q = by_heads("query", query, dims);
    k = by_heads("key", key, dims);
    v = by_heads("value", value, dims);
    expect_keys("key", k, q, k, enable_gqa);
    expect_keys("value", v, q, k, enable_gqa);
    TORCH_CHECK_VALUE(q.size(3) == k.size(3) && k.numel() && v.numel() && q.numel(), SDPA, ": query has shape ",
                      q.sizes(), " and key ", k.sizes());
    a.query = heads_of(q);
    a.key = heads_of(k);
    a.value = heads_of(v);
    a.heads = q.size(1);
    a.shared = q.size(1) / k.size(1);
    a.queries = q.size(2);
    a.keys = k.size(2);
    a.size = q.size(3);
    a.value_size = v.size(3);
    a.scale = float(scale.value_or(1 / std::sqrt(double(a.size))));
    a.causal = is_causal;
    if (defined(mask).defined()) {
      const int64_t sizes[] = {q.size(0), a.heads, a.queries, a.keys};
      expect_mask(*mask, query, sizes);
      scores = as_scores(*mask).expand(sizes);
      a.mask = heads_of(scores);
      a.mask_step = scores.stride(3);
    }
    out = fresh({q.size(0), a.queries, a.heads, a.value_size}, query.scalar_type());
    a.out = out.mutable_data_ptr();
  }

  // Shares the tiles among threads.
  template <class Kernel>
  void run(const Kernel& kernel) const {
    share(q.size(0) * a.heads * tiles_of(a),
          std::min(a.queries, QUERIES_OF_TILE) * a.keys * (a.size + a.value_size) / 16,
          [&](int64_t begin, int64_t end) { kernel(a, begin, end); });
  }
};

Tensor without_added_dims(Tensor result, int64_t dims) {
  while (result.dim() > dims) result = result.squeeze(0);
  return result;
}

Tensor scaled_dot_product_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                                    const OptionalTensor& mask, double dropout_p, bool is_causal,
                                    std::optional<double> scale, bool enable_gqa) {
  TORCH_CHECK_VALUE(dropout_p == 0, SDPA, ": dropout_p is ", dropout_p, ", expected 0");
  const DenseCall call(query, key, value, mask, is_causal, scale, enable_gqa);
  const DenseAttentionKernel kernel = path().dense_attention[call.dtype];
  call.run(kernel);
  return without_added_dims(call.out.transpose(1, 2), query.dim());
}

Tensor scaled_dot_product_attention_quant_fp8_static(const Tensor& query, const Tensor& key, const Tensor& value,
                                                     const Tensor& output_scale, const OptionalTensor& mask,
                                                     bool is_causal, std::optional<double> scale, bool enable_gqa) {
  refuse_gradient(SDPA, output_scale);
  const DenseCall call(query, key, value, mask, is_causal, scale, enable_gqa);
  const DenseAttention& a = call.a;
  const DenseAttentionKernel kernel = path().dense_attention[call.dtype];
  // By heads, as the form is registered. The kernel of attention writes by tokens.
  QuantizedRows rows(SDPA, {call.q.size(0), a.heads, a.queries, a.value_size}, query.scalar_type(), call.dtype,
                     {-1, -1}, output_scale);
  if (a.queries == 1) {
    // Both orders are the same, and one call for all heads takes less time than one for each.
    call.run(kernel);
    rows.quantize({a.out, a.value_size});
    return without_added_dims(rows.out, query.dim());
  }
  const char* const attended = static_cast<const char*>(a.out);
  const int64_t row_bytes = a.value_size * call.out.element_size(), tiles = tiles_of(a);
  call.run([&](const DenseAttention&, int64_t begin, int64_t end) {
    kernel(a, begin, end);
    for (int64_t tile = begin; tile < end; ++tile) {
      const int64_t of = tile / tiles, batch = of / a.heads, head = of % a.heads;
      const int64_t first = tile % tiles * QUERIES_OF_TILE, last = std::min(first + QUERIES_OF_TILE, a.queries);
      const int64_t row = (batch * a.queries + first) * a.heads + head;
      rows.quantize_from(attended + row * row_bytes, a.heads * a.value_size, of * a.queries + first,
                         of * a.queries + last);
    }
  });
  return without_added_dims(rows.out, query.dim());
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(opgraft_cpu_kernels, library) {
  library.def(
      "scaled_dot_product_attention(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, float "
      "dropout_p=0.0, bool is_causal=False, float? scale=None, bool enable_gqa=False) -> Tensor");
  library.def(
      "scaled_dot_product_attention_quant_fp8_static(Tensor query, Tensor key, Tensor value, Tensor output_scale, "
      "Tensor? attn_mask=None, bool is_causal=False, float? scale=None, bool enable_gqa=False) -> Tensor");
}

#define DENSE_ATTENTION(apply) \
  apply(scaled_dot_product_attention) apply(scaled_dot_product_attention_quant_fp8_static)

IMPLEMENT(DENSE_ATTENTION)

}  // namespace opgraft_cpu_kernels
