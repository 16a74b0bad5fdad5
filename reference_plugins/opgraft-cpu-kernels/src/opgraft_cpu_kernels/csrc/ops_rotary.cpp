// Rotary embedding as torch ops.

#include <numeric>

#include "heads.h"
#include "overlap.h"
#include "ops.h"

namespace opgraft_cpu_kernels {
namespace {

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

// Query and key as models of transformers have them, [batch, heads, sequence, head_size], by tables [1, sequence,
// head_size] of which the first half of a row is read. The results lie as [batch, sequence, heads, head_size].
std::tuple<Tensor, Tensor> rotate_heads(const Tensor& query, const Tensor& key, const Tensor& cos, const Tensor& sin,
                                        bool is_neox_style) {
  const char* op = "rotate_heads";
  refuse_gradient(op, query, key, cos, sin);
  const Tensor cosines = usable(op, cos, query), sines = usable(op, sin, query);
  TORCH_CHECK_VALUE(cosines.dim() == 3 && cosines.sizes() == sines.sizes() && cosines.size(0) == 1 &&
                        cosines.scalar_type() == sines.scalar_type() && query.scalar_type() == key.scalar_type(),
                    op, ": cos has shape ", cos.sizes(), " and sin ", sin.sizes(), ", expected [1, sequence, ",
                    "head_size] of one dtype, and query and key of one");
  const Dtype dtype = dtype_of(op, query);
  const auto rotated = [&](const Tensor& x) {
    TORCH_CHECK_VALUE(x.dim() == 4 && x.size(2) == cosines.size(1) && x.size(3) == cosines.size(2) &&
                          x.size(3) % 2 == 0,
                      op, ": a tensor to rotate has shape ", x.sizes(), ", expected [batch, heads, ", cosines.size(1),
                      ", ", cosines.size(2), "]");
    const int64_t batch = x.size(0), count = x.size(1), tokens = x.size(2), size = x.size(3);
    const Tensor out = fresh({batch, tokens, count, size}, x.scalar_type());
    const bool in_order =
        x.stride(3) == 1 && (batch == 1 || tokens == 1 || x.stride(0) == tokens * x.stride(2));
    const Tensor from = in_order ? x : x.transpose(1, 2).contiguous().transpose(1, 2);
    if (x.numel()) {
      Rotary r;
      r.x = from.const_data_ptr();
      r.out = out.mutable_data_ptr();
      r.heads = count;
      r.head_size = r.rotary_dim = r.out_head_stride = size;
      r.token_stride = from.stride(tokens == 1 ? 0 : 2);  // that of a single token may be anything
      r.head_stride = from.stride(1);
      r.out_token_stride = count * size;
      r.neox = is_neox_style;
      r.cos = cosines.const_data_ptr();
      r.sin = sines.const_data_ptr();
      r.table_stride = size;
      r.table_rows = tokens;
      rotate(r, dtype, cosines, batch * tokens);
    }
    return out.transpose(1, 2);
  };
  return {rotated(query), rotated(key)};
}

void expect_integers(const char* op, const Tensor& positions) {
  const at::ScalarType dtype = positions.scalar_type();
  TORCH_CHECK_VALUE(dtype == at::kLong || dtype == at::kInt, op, ": positions has dtype ", dtype,
                    ", expected int32 or int64");
}

void expect_in_table(const char* op, const Tensor& rows, const Tensor& table) {
  const int64_t* const wanted = rows.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < rows.numel(); ++i) {
    TORCH_CHECK_VALUE(0 <= wanted[i] && wanted[i] < table.size(0), op, ": positions has ", wanted[i],
                      ", expected 0 to ", table.size(0) - 1);
  }
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
    if (x.numel()) expect_in_table(op, rows, table);
  }

  // Rotates; each head is normalised before where there are float32 factors for that.
  Tensor run(const Tensor& weight = {}, double eps = 0) const {
    const Tensor out = in_place ? heads.tensor : fresh(input.sizes(), input.scalar_type());
    if (input.numel()) {
      Rotary r = to(out);
      if (weight.defined()) r.weight = weight.const_data_ptr<float>();
      r.eps = float(eps);
      rotate(r, dtype, table, heads.tokens);
    }
    return out;
  }

  // The rotation once for each of several rows of the table, side by side in the last dimension of the result.
  // `places` has a row of its own for each, all of which are in the table.
  Tensor run_versions(const char* op, const Tensor& places) const {
    const int64_t versions = places.size(0), width = input.size(-1);
    std::vector<int64_t> sizes = input.sizes().vec();
    sizes.back() *= versions;
    const Tensor out = fresh(sizes, input.scalar_type());
    if (input.numel() == 0) return out;
    TORCH_CHECK_VALUE(width == head_size || width == heads.heads * head_size, op, ": a tensor to rotate has shape ",
                      input.sizes(), ", expected heads of ", head_size, " in one dimension");
    Rotary r = to(out);
    r.out_token_stride *= versions;
    if (width == head_size) r.out_head_stride *= versions;
    const RotaryKernel kernel = path().rotary[dtype][index_of(table)];
    share(heads.tokens, versions * r.heads * head_size, [&](int64_t begin, int64_t end) {
      constexpr int64_t STEP = 8;  // tokens, which stay in the caches from one version to the next
      for (int64_t token = begin; token < end; token += STEP) {
        for (int64_t version = 0; version < versions; ++version) {
          Rotary one = r;
          one.positions = places.const_data_ptr<int64_t>() + version * heads.tokens;
          one.out = static_cast<char*>(r.out) + version * width * out.element_size();
          kernel(one, token, std::min(end, token + STEP));
        }
      }
    });
    return out;
  }

  // Puts what `run` returned where the tensor lies.
  void put(const Tensor& out) const {
    if (!out.is_same(input)) input.copy_(out);
    written(input);
  }

 private:
  Rotary to(const Tensor& out) const {
    Rotary r = rotation(heads, out, head_size, table.size(1), neox);
    r.positions = rows.const_data_ptr<int64_t>();
    r.cos = table.const_data_ptr();
    r.sin = static_cast<const char*>(r.cos) + table.size(1) / 2 * table.element_size();
    r.table_stride = table.size(1);
    r.table_rows = table.size(0);
    return r;
  }

  static void expect_fitting(const char* op, const Tensor& positions, const Tensor& x, int64_t head_size,
                             const Tensor& cache) {
    refuse_gradient(op, x, cache);
    expect_integers(op, positions);
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

}  // namespace

std::tuple<Tensor, Tensor> rotary_embedding(const Tensor& positions, const Tensor& query, const Tensor& key,
                                            int64_t head_size, const Tensor& cache, bool neox) {
  expect_one_dtype("rotary_embedding", query, key);
  const char* op = "rotary_embedding";
  const Rotation of_query(op, positions, query, head_size, cache, neox, false);
  const Rotation of_key(op, positions, key, head_size, cache, neox, false);
  return {of_query.run(), of_key.run()};
}

namespace {
// The factors of a norm of heads, in float32.
Tensor factors(const char* op, const Tensor& weight, int64_t head_size, bool one_plus_weight) {
  refuse_gradient(op, weight);
  expect_floating(op, weight);
  TORCH_CHECK_VALUE(weight.dim() == 1 && weight.numel() == head_size, op, ": a weight has shape ", weight.sizes(),
                    ", expected ", head_size);
  const Tensor wide = weight.to(at::kFloat).contiguous();
  return one_plus_weight ? wide.add(1) : wide;
}

std::tuple<Tensor, Tensor> qk_norm_rope(const Tensor& positions, const Tensor& query, const Tensor& key,
                                        int64_t head_size, const Tensor& cache, const Tensor& query_weight,
                                        const Tensor& key_weight, double eps, bool neox, bool one_plus_weight) {
  const char* op = "qk_norm_rope";
  expect_one_dtype(op, query, key);
  const Rotation of_query(op, positions, query, head_size, cache, neox, false);
  const Rotation of_key(op, positions, key, head_size, cache, neox, false);
  const Tensor of_both[] = {factors(op, query_weight, head_size, one_plus_weight),
                            factors(op, key_weight, head_size, one_plus_weight)};
  return {of_query.run(of_both[0], eps), of_key.run(of_both[1], eps)};
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

// Writes a row of cosines and sines for each token, each pair from the row of the table at its own one of three
// positions.
template <class T>
void choose(const Tensor& table, const int64_t* positions, int64_t tokens, at::IntArrayRef sections, bool interleaved,
            const Tensor& chosen) {
  const int64_t pairs = table.size(1) / 2;
  const T* const from = static_cast<const T*>(table.const_data_ptr());
  T* const to = static_cast<T*>(chosen.mutable_data_ptr());
  share(tokens, table.size(1), [&](int64_t begin, int64_t end) {
    for (int64_t half = 2 * begin; half < 2 * end; ++half) {  // of a row: its cosines, its sines
      const auto row = [&](int64_t axis) { return 2 * positions[axis * tokens + half / 2] + half % 2; };
      T* target = to + half * pairs;
      if (interleaved) {
        std::copy_n(from + row(0) * pairs, pairs, target);
        for (int64_t axis = 1; axis < 3; ++axis) {
          const T* source = from + row(axis) * pairs;
          for (int64_t i = axis; i < 3 * sections[axis]; i += 3) target[i] = source[i];
        }
      } else {
        for (int64_t axis = 0, i = 0; axis < 3; i += sections[axis++])
          std::copy_n(from + row(axis) * pairs + i, sections[axis], target + i);
      }
    }
  });
}

void expect_sections(const char* op, at::IntArrayRef sections, int64_t pairs, bool interleaved) {
  bool fitting = sections.size() == 3 && *std::min_element(sections.begin(), sections.end()) >= 0 &&
                 *std::max_element(sections.begin(), sections.end()) <= pairs &&
                 sections[0] + sections[1] + sections[2] == pairs;
  if (fitting && interleaved) fitting = sections[1] <= (pairs + 1) / 3 && sections[2] <= pairs / 3;
  TORCH_CHECK_VALUE(fitting, op, ": mrope_section is ", sections, ", expected three counts with sum ", pairs,
                    interleaved ? ", those of height and width few enough to take turns" : "");
}

// A table with a row for each token, from which `rotary_embedding` turns each pair as `mrope` does.
Tensor by_section(const char* op, const Tensor& positions, const Tensor& cache, at::IntArrayRef sections,
                  bool interleaved) {
  refuse_gradient(op, cache);
  expect_floating(op, cache);
  expect_integers(op, positions);
  TORCH_CHECK_VALUE(positions.dim() > 1 && positions.size(0) == 3, op, ": positions has shape ", positions.sizes(),
                    ", expected [3, num_tokens]");
  TORCH_CHECK_VALUE(cache.dim() == 2 && cache.size(1) % 2 == 0, op, ": cos_sin_cache has shape ", cache.sizes(),
                    ", expected [positions, rotary_dim] with an even rotary_dim");
  expect_sections(op, sections, cache.size(1) / 2, interleaved);
  const Tensor rows = positions.to(at::kLong).contiguous(), table = cache.contiguous();
  expect_in_table(op, rows, table);
  const int64_t tokens = positions.numel() / 3, size = table.element_size();
  const Tensor chosen = fresh({tokens, table.size(1)}, table.scalar_type());
  const auto kernel = size == 2 ? &choose<uint16_t> : size == 4 ? &choose<uint32_t> : &choose<uint64_t>;
  kernel(table, rows.const_data_ptr<int64_t>(), tokens, sections, interleaved, chosen);
  return chosen;
}

std::tuple<Tensor, Tensor> mrope(const Tensor& positions, const Tensor& query, const Tensor& key, int64_t head_size,
                                 const Tensor& cache, at::IntArrayRef sections, bool neox, bool interleaved) {
  const char* op = "mrope";
  expect_one_dtype(op, query, key);
  const Tensor table = by_section(op, positions, cache, sections, interleaved);
  const Tensor rows = fresh(positions.sizes().slice(1), at::kLong);
  std::iota(rows.mutable_data_ptr<int64_t>(), rows.mutable_data_ptr<int64_t>() + table.size(0), 0);
  const Rotation of_query(op, rows, query, head_size, table, neox, false);
  const Rotation of_key(op, rows, key, head_size, table, neox, false);
  return {of_query.run(), of_key.run()};
}

// The rows of the table by which the query at each position is rotated, the first of which is also the key's.
Tensor places_in_chunks(const char* op, const Tensor& positions, int64_t chunk_size, int64_t length) {
  const Tensor given = positions.to(at::kLong).contiguous();
  const int64_t tokens = given.numel();
  const Tensor places = fresh({5, tokens}, at::kLong);
  int64_t* const place = places.mutable_data_ptr<int64_t>();
  for (int64_t token = 0; token < tokens; ++token) {
    const int64_t position = given.const_data_ptr<int64_t>()[token], own = position % length, before = own + length;
    TORCH_CHECK_VALUE(position >= 0, op, ": positions has ", position, ", expected no negative ones");
    place[token] = own;
    place[tokens + token] = std::min(before, chunk_size);
    place[2 * tokens + token] = std::min(2 * length - 1, chunk_size);
    place[3 * tokens + token] = before;
    place[4 * tokens + token] = own + chunk_size;
  }
  return places;
}

std::tuple<Tensor, Tensor> dual_chunk_rotary_embedding(const Tensor& positions, const Tensor& query, const Tensor& key,
                                                       int64_t head_size, const Tensor& cache, int64_t chunk_size,
                                                       int64_t local_size, bool neox) {
  const char* op = "dual_chunk_rotary_embedding";
  expect_one_dtype(op, query, key);
  expect_integers(op, positions);
  TORCH_CHECK_VALUE(0 <= local_size && local_size < chunk_size, op, ": local_size is ", local_size,
                    ", expected 0 to below chunk_size=", chunk_size);
  const int64_t length = chunk_size - local_size;
  TORCH_CHECK_VALUE(cache.dim() == 2 && chunk_size <= cache.size(0) - length, op, ": cos_sin_cache has shape ",
                    cache.sizes(), ", expected at least ", chunk_size, " + ", length, " rows");
  const Tensor places = places_in_chunks(op, positions, chunk_size, length);
  const Tensor own = places.select(0, 0).view(positions.sizes());
  const Rotation of_query(op, own, query, head_size, cache, neox, false);
  const Rotation of_key(op, own, key, head_size, cache, neox, false);
  return {of_query.run_versions(op, places), of_key.run()};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(opgraft_cpu_kernels, library) {
  library.def("apply_rotary_emb(Tensor x, Tensor cos, Tensor sin, bool is_neox_style=True) -> Tensor");
  library.def(
      "rotate_heads(Tensor query, Tensor key, Tensor cos, Tensor sin, bool is_neox_style=True) -> (Tensor, Tensor)");
  library.def(
      "rotary_embedding(Tensor positions, Tensor query, Tensor key, int head_size, Tensor cos_sin_cache, bool "
      "is_neox_style=True) -> (Tensor, Tensor)");
  library.def(
      "qk_norm_rope(Tensor positions, Tensor query, Tensor key, int head_size, Tensor cos_sin_cache, Tensor "
      "query_weight, Tensor key_weight, float eps, bool is_neox_style=True, bool one_plus_weight=False) -> (Tensor, "
      "Tensor)");
  library.def(
      "rotary_embedding_(Tensor positions, Tensor(a!) query, Tensor(b!)? key, int head_size, Tensor cos_sin_cache, "
      "bool is_neox_style=True) -> ()");
  library.def(
      "mrope(Tensor positions, Tensor query, Tensor key, int head_size, Tensor cos_sin_cache, int[] mrope_section, "
      "bool is_neox_style=True, bool interleaved=False) -> (Tensor, Tensor)");
  library.def(
      "dual_chunk_rotary_embedding(Tensor positions, Tensor query, Tensor key, int head_size, Tensor cos_sin_cache, "
      "int chunk_size, int local_size, bool is_neox_style=True) -> (Tensor, Tensor)");
}

#define ROTARY(apply)                                                                          \
  apply(apply_rotary_emb) apply(rotate_heads) apply(rotary_embedding) apply(rotary_embedding_) \
      apply(qk_norm_rope) apply(mrope) apply(dual_chunk_rotary_embedding)

IMPLEMENT(ROTARY)

}  // namespace opgraft_cpu_kernels
