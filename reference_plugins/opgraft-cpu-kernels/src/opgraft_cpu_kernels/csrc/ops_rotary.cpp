// Rotary embedding as torch ops.

#include "overlap.h"
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

void rotate(const Rotary& r, Dtype dtype, const Tensor& table, int64_t tokens) {
  const RotaryKernel kernel = path().rotary[dtype][index_of(table)];
  share(tokens, r.heads * r.head_size, [&](int64_t begin, int64_t end) { kernel(r, begin, end); });
}

Tensor apply_rotary_emb(const Tensor& x, const Tensor& cos, const Tensor& sin, bool is_neox_style) {
  const char* op = "apply_rotary_emb";
  refuse_gradient(op, x, cos, sin);
  TORCH_CHECK_VALUE(x.dim() >= 3 && x.size(-1) % 2 == 0, op, ": x has shape ", x.sizes(),
                    ", expected [..., sequence, heads, head_size] with an even head_size");
  const int64_t sequence = x.size(-3), head_size = x.size(-1), pairs = head_size / 2;
  const std::vector<int64_t> expected{sequence, pairs};
  TORCH_CHECK_VALUE(cos.sizes() == expected && sin.sizes() == expected, op, ": cos has shape ", cos.sizes(),
                    " and sin ", sin.sizes(), ", expected ", expected, " for x of shape ", x.sizes());
  const Tensor out = fresh(x.sizes(), x.scalar_type());
  if (x.numel() == 0) return out;
  Tensor cosines = usable(op, cos, x), sines = usable(op, sin, x);
  if (cosines.scalar_type() != sines.scalar_type()) {
    cosines = cosines.to(at::kFloat);
    sines = sines.to(at::kFloat);
  }
  const int64_t tokens = x.numel() / (x.size(-2) * head_size);
  const Heads heads(op, x, tokens, head_size);
  Rotary r = rotation(heads, out, head_size, head_size, is_neox_style);
  r.cos = cosines.const_data_ptr();
  r.sin = sines.const_data_ptr();
  r.table_stride = pairs;
  r.table_rows = sequence;
  rotate(r, dtype_of(op, x), cosines, tokens);
  return out;
}

// The rotation of a tensor by positions, to new memory or where it lies if that can be: refused by the constructor or
// not at all, so that of two tensors none is written if one is refused.
class Rotation {
 public:
  Rotation(const char* op, const Tensor& positions, const Tensor& x, int64_t head_size, const Tensor& cache, bool neox,
           bool in_place)
      : input(x), table((expect_fitting(op, positions, x, head_size, cache), usable(op, cache, x))),
        rows(positions.to(at::kLong).contiguous()), heads(op, x, positions.numel(), head_size),
        dtype(dtype_of(op, x)), head_size(head_size), neox(neox), in_place(in_place) {
    if (in_place && !is_apart(heads.tensor))
      heads = Heads(op, x.clone(at::MemoryFormat::Contiguous), heads.tokens, head_size);
    const int64_t* const wanted = rows.const_data_ptr<int64_t>();
    for (int64_t token = 0; x.numel() && token < heads.tokens; ++token) {
      TORCH_CHECK_VALUE(0 <= wanted[token] && wanted[token] < table.size(0), op, ": positions has ", wanted[token],
                        ", expected 0 to ", table.size(0) - 1);
    }
  }

  Tensor run() const {
    const Tensor out = in_place ? heads.tensor : fresh(input.sizes(), input.scalar_type());
    if (input.numel() == 0) return out;
    Rotary r = rotation(heads, out, head_size, table.size(1), neox);
    r.positions = rows.const_data_ptr<int64_t>();
    r.cos = table.const_data_ptr();
    r.sin = static_cast<const char*>(r.cos) + table.size(1) / 2 * table.element_size();
    r.table_stride = table.size(1);
    r.table_rows = table.size(0);
    rotate(r, dtype, table, heads.tokens);
    return out;
  }

  // Puts what `run` returned where the tensor lies.
  void put(const Tensor& out) const {
    if (!out.is_same(input)) input.copy_(out);
    written(input);
  }

 private:
  static void expect_fitting(const char* op, const Tensor& positions, const Tensor& x, int64_t head_size,
                             const Tensor& cache) {
    refuse_gradient(op, x, cache);
    const at::ScalarType integers = positions.scalar_type();
    TORCH_CHECK_VALUE(integers == at::kLong || integers == at::kInt, op, ": positions has dtype ", integers,
                      ", expected int32 or int64");
    TORCH_CHECK_VALUE(cache.dim() == 2 && cache.size(1) % 2 == 0 && cache.size(1) <= head_size, op,
                      ": cos_sin_cache has shape ", cache.sizes(),
                      ", expected [positions, rotary_dim] with an even rotary_dim up to ", head_size);
    const int64_t dims = positions.dim();
    const bool shaped = x.dim() > dims && x.sizes().slice(0, size_t(dims)) == positions.sizes();
    TORCH_CHECK_VALUE(shaped || (x.dim() > 1 && x.size(0) == positions.numel()), op, ": a tensor to rotate has shape ",
                      x.sizes(), ", expected it to begin with ", positions.sizes(), " or ", positions.numel());
  }

  const Tensor& input;
  const Tensor table, rows;
  Heads heads;
  const Dtype dtype;
  const int64_t head_size;
  const bool neox, in_place;
};

void expect_one_dtype(const char* op, const Tensor& query, const Tensor& key) {
  TORCH_CHECK_VALUE(query.scalar_type() == key.scalar_type(), op, ": key has dtype ", key.scalar_type(),
                    ", expected that of query, ", query.scalar_type());
}

std::tuple<Tensor, Tensor> rotary_embedding(const Tensor& positions, const Tensor& query, const Tensor& key,
                                            int64_t head_size, const Tensor& cache, bool neox) {
  expect_one_dtype("rotary_embedding", query, key);
  const char* op = "rotary_embedding";
  const Rotation of_query(op, positions, query, head_size, cache, neox, false);
  const Rotation of_key(op, positions, key, head_size, cache, neox, false);
  return {of_query.run(), of_key.run()};
}
void rotary_embedding_(const Tensor& positions, const Tensor& query, const OptionalTensor& key, int64_t head_size,
                       const Tensor& cache, bool neox) {
  const char* op = "rotary_embedding_";
  if (key) expect_one_dtype(op, query, *key);
  at::assert_no_internal_overlap(query);
  if (key) at::assert_no_internal_overlap(*key);
  const bool apart = !may_share_any(query, defined(key), cache, positions) &&
                     !may_share_any(defined(key), cache, positions);
  const Rotation of_query(op, positions, query, head_size, cache, neox, apart);
  std::optional<Rotation> of_key;
  if (key) of_key.emplace(op, positions, *key, head_size, cache, neox, apart);
  const Tensor turned = of_query.run(), turned_key = key ? of_key->run() : Tensor();
  of_query.put(turned);
  if (key) of_key->put(turned_key);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(opgraft_cpu_kernels, library) {
  library.def("apply_rotary_emb(Tensor x, Tensor cos, Tensor sin, bool is_neox_style=True) -> Tensor");
  library.def(
      "rotary_embedding(Tensor positions, Tensor query, Tensor key, int head_size, Tensor cos_sin_cache, bool "
      "is_neox_style=True) -> (Tensor, Tensor)");
  library.def(
      "rotary_embedding_(Tensor positions, Tensor(a!) query, Tensor(b!)? key, int head_size, Tensor cos_sin_cache, "
      "bool is_neox_style=True) -> ()");
}

#define ROTARY(apply) apply(apply_rotary_emb) apply(rotary_embedding) apply(rotary_embedding_)

IMPLEMENT(ROTARY)

}  // namespace opgraft_cpu_kernels
