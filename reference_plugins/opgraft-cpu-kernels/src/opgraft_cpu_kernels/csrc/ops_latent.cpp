// Attention over latents in pages as a torch op, which shares tokens among the threads, or the chunks of few tokens.

#include <vector>

#include "ops.h"

namespace opgraft_cpu_kernels {
namespace {

constexpr const char* MLA = "mla_paged_attention";
constexpr int64_t COLUMNS = 64;  // that are taken at once, on the widest path

Tensor integers(const char* name, const Tensor& x, int64_t dims) {
  TORCH_CHECK_VALUE(x.dim() == dims && (x.scalar_type() == at::kInt || x.scalar_type() == at::kLong), MLA, ": ", name,
                    " has shape ", x.sizes(), " and dtype ", x.scalar_type(), ", expected ", dims,
                    " dimensions of integers");
  return x.to(at::kInt).contiguous();
}

void expect_latents(const Tensor& query, const Tensor& cache, int64_t rank) {
  TORCH_CHECK_VALUE(query.dim() == 3 && cache.dim() == 3 && query.size(2) == cache.size(2) && query.size(1) > 0, MLA,
                    ": query has shape ", query.sizes(), " and cache ", cache.sizes(),
                    ", expected [tokens, num_heads, size] and [num_blocks, block_size, size]");
  TORCH_CHECK_VALUE(cache.is_contiguous() && cache.scalar_type() == query.scalar_type(), MLA, ": cache has dtype ",
                    cache.scalar_type(), ", expected that of query, ", query.scalar_type(), ", contiguous");
  TORCH_CHECK_VALUE(rank > 0 && rank <= cache.size(2) && rank % COLUMNS == 0 && cache.size(2) % (COLUMNS / 2) == 0, MLA,
                    ": kv_lora_rank is ", rank, " of ", cache.size(2), ", expected multiples of ", COLUMNS, " and ",
                    COLUMNS / 2);
}

// Lists the tokens, of sequences whose blocks the cache has.
std::vector<LatentToken> tokens_of(const LatentAttention& a, const Tensor& starts, const Tensor& lengths,
                                   int64_t tokens, int64_t blocks) {
  const int64_t sequences = lengths.size(0);
  const int32_t *bounds = starts.const_data_ptr<int32_t>(), *length = lengths.const_data_ptr<int32_t>();
  TORCH_CHECK_VALUE(bounds[0] == 0 && bounds[sequences] == tokens, MLA, ": query_start_loc is from ", bounds[0], " to ",
                    bounds[sequences], ", expected 0 to ", tokens);
  std::vector<LatentToken> found;
  for (int64_t i = 0; i < sequences; ++i) {
    const int64_t count = int64_t(bounds[i + 1]) - bounds[i], room = a.table_stride * a.block_size;
    TORCH_CHECK_VALUE(0 <= count && count <= length[i] && length[i] <= room, MLA, ": sequence ", i, " has ", length[i],
                      " tokens, expected ", count, " to ", room);
    if (count == 0) continue;
    for (int64_t at = 0; at * a.block_size < length[i]; ++at) {
      const int64_t block = a.tables[i * a.table_stride + at];
      TORCH_CHECK_VALUE(0 <= block && block < blocks, MLA, ": block_table has ", block, ", expected 0 to ", blocks - 1);
    }
    for (int64_t t = 0; t < count; ++t) found.push_back({bounds[i] + t, i, length[i] - count + t + 1});
  }
  return found;
}

// Computes a token; where it has the threads to itself, they share its chunks.
void compute(const LatentAttention& a, const LatentToken& token, Dtype dtype, bool alone) {
  const int64_t chunks = (token.seen + CHUNK - 1) / CHUNK, length = a.heads * (a.rank + 2);
  std::vector<float> partials(size_t(chunks * length));
  const auto some = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) path().latent_chunk[dtype](a, token, i, partials.data() + i * length);
  };
  if (alone && chunks > 1)
    at::parallel_for(0, chunks, 1, some);
  else
    some(0, chunks);
  path().merge_latent_chunks[dtype](a, token, partials.data(), chunks);
}

}  // namespace

Tensor mla_paged_attention(const Tensor& query, const Tensor& cache, const Tensor& block_table,
                           const Tensor& query_start_loc, const Tensor& seq_lens, int64_t kv_lora_rank,
                           double scale) {
  refuse_gradient(MLA, query, cache);
  const Dtype dtype = dtype_of(MLA, query);
  expect_latents(query, cache, kv_lora_rank);
  const Tensor table = integers("block_table", block_table, 2), starts = integers("query_start_loc", query_start_loc, 1);
  const Tensor lengths = integers("seq_lens", seq_lens, 1), heads = query.contiguous();
  TORCH_CHECK_VALUE(starts.size(0) == lengths.size(0) + 1 && table.size(0) == lengths.size(0), MLA,
                    ": query_start_loc and block_table have ", starts.size(0), " and ", table.size(0),
                    " rows, expected ", lengths.size(0) + 1, " and ", lengths.size(0));
  const Tensor out = fresh({query.size(0), query.size(1), kv_lora_rank}, query.scalar_type());
  LatentAttention a;
  a.query = heads.const_data_ptr();
  a.out = out.mutable_data_ptr();
  a.cache = cache.const_data_ptr();
  a.block_size = cache.size(1);
  a.heads = query.size(1);
  a.width = query.size(2);
  a.rank = kv_lora_rank;
  a.tables = table.const_data_ptr<int32_t>();
  a.table_stride = table.size(1);
  a.scale = float(scale);
  const std::vector<LatentToken> tokens = tokens_of(a, starts, lengths, query.size(0), cache.size(0));
  const int64_t count = int64_t(tokens.size());
  const bool alone = count < at::get_num_threads();
  const auto some = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) compute(a, tokens[size_t(i)], dtype, alone);
  };
  if (alone)
    some(0, count);
  else
    at::parallel_for(0, count, 1, some);
  return out;
}

// The rows of each head by a weight of its own: few of them take as long as the weights take to be read.
Tensor linear_by_heads(const Tensor& x, const Tensor& weight) {
  constexpr const char* OP = "linear_by_heads";
  refuse_gradient(OP, x, weight);
  const Dtype dtype = dtype_of(OP, x);
  TORCH_CHECK_VALUE(x.dim() == 3 && weight.dim() == 3 && weight.size(0) == x.size(1) && weight.size(2) == x.size(2) &&
                        x.size(2) > 0 && weight.is_contiguous() && weight.scalar_type() == x.scalar_type(),
                    OP, ": x has shape ", x.sizes(), " and weight ", weight.sizes(), " and dtype ",
                    weight.scalar_type(), ", expected [tokens, heads, in] and a contiguous [heads, out, in] of dtype ",
                    x.scalar_type());
  const Tensor rows = x.stride(2) == 1 ? x : x.contiguous();
  const int64_t heads = x.size(1), inputs = x.size(2), outputs = weight.size(1), size = x.element_size();
  const Tensor out = fresh({x.size(0), heads, outputs}, x.scalar_type());
  const LinearKernel kernel = path().linear[dtype];
  share(out.numel() ? heads : 0, x.size(0) * inputs * outputs, [&](int64_t begin, int64_t end) {
    for (int64_t head = begin; head < end; ++head) {
      Linear linear;
      linear.x = {static_cast<const char*>(rows.const_data_ptr()) + head * rows.stride(1) * size, rows.stride(0)};
      linear.weight = static_cast<const char*>(weight.const_data_ptr()) + head * outputs * inputs * size;
      linear.out = {static_cast<char*>(out.mutable_data_ptr()) + head * outputs * size, heads * outputs};
      linear.rows = x.size(0);
      linear.in_features = inputs;
      linear.out_features = outputs;
      kernel(linear, 0, outputs);
    }
  });
  return out;
}

TORCH_LIBRARY_FRAGMENT(opgraft_cpu_kernels, library) {
  library.def("linear_by_heads(Tensor x, Tensor weight) -> Tensor");
  library.def(
      "mla_paged_attention(Tensor query, Tensor cache, Tensor block_table, Tensor query_start_loc, Tensor seq_lens, int "
      "kv_lora_rank, float scale) -> Tensor");
}

#define LATENT(apply) apply(mla_paged_attention) apply(linear_by_heads)

IMPLEMENT(LATENT)

}  // namespace opgraft_cpu_kernels
