// Activations, rotary embedding, quantization and the choice of a path as torch ops.

#include <ATen/MemoryOverlap.h>

#include <mutex>

#include "tensors.h"

namespace opgraft_cpu_kernels {
namespace {

Tensor gated(const char* op, Gated kind, const Tensor& input, float first = 0, float second = 0, bool swapped = false) {
  refuse_gradient(op, input);
  const Matrix x(op, input);
  TORCH_CHECK_VALUE(x.width % 2 == 0, op, ": x has shape ", input.sizes(), ", expected an even last dimension");
  const int64_t width = x.width / 2;
  std::vector<int64_t> sizes = input.sizes().vec();
  sizes.back() = width;
  const Tensor out = fresh(sizes, input.scalar_type());
  GatedActivation a{x.view(), x.view(width), rows_of(out, width), width, first, second};
  if (swapped) std::swap(a.gate, a.up);
  const GatedKernel kernel = path().gated[kind][dtype_of(op, input)];
  share(x.rows, x.width, [&](int64_t begin, int64_t end) { kernel(a, begin, end); });
  return out;
}

bool is_tanh(const char* op, c10::string_view approximate) {
  const bool tanh = approximate == "tanh";
  TORCH_CHECK_VALUE(tanh || approximate == "none", op, ": approximate is '", approximate,
                    "', expected 'none' or 'tanh'");
  return tanh;
}

Tensor silu_and_mul(const Tensor& x) { return gated("silu_and_mul", SILU_AND_MUL, x); }
Tensor mul_and_silu(const Tensor& x) { return gated("mul_and_silu", SILU_AND_MUL, x, 0, 0, true); }
Tensor gelu_and_mul(const Tensor& x, c10::string_view approximate) {
  return gated("gelu_and_mul", is_tanh("gelu_and_mul", approximate) ? GELU_TANH_AND_MUL : GELU_AND_MUL, x);
}
Tensor fatrelu_and_mul(const Tensor& x, double threshold) {
  return gated("fatrelu_and_mul", FATRELU_AND_MUL, x, float(threshold));
}
Tensor silu_and_mul_with_clamp(const Tensor& x, double limit) {
  return gated("silu_and_mul_with_clamp", CLAMPED_SILU_AND_MUL, x, float(limit));
}
Tensor swiglustep_and_mul(const Tensor& x, double limit) {
  return gated("swiglustep_and_mul", SWIGLUSTEP, x, float(limit));
}
Tensor swigluoai_and_mul(const Tensor& x, double alpha, double limit) {
  return gated("swigluoai_and_mul", SWIGLUOAI, x, float(alpha), float(limit));
}

void activate(const char* op, Plain kind, const Tensor& x, const Tensor& out) {
  const PlainKernel kernel = path().plain[kind][dtype_of(op, x)];
  const void* from = x.const_data_ptr();
  void* to = out.mutable_data_ptr();
  share(x.numel(), 1, [&](int64_t begin, int64_t end) { kernel(from, to, begin, end); });
}

Tensor plain(const char* op, Plain kind, const Tensor& input) {
  refuse_gradient(op, input);
  const Tensor x = input.contiguous(), out = fresh(input.sizes(), input.scalar_type());
  activate(op, kind, x, out);
  return out;
}

Tensor gelu(const Tensor& x, c10::string_view approximate) {
  return plain("gelu", is_tanh("gelu", approximate) ? GELU_TANH : GELU, x);
}
Tensor gelu_tanh(const Tensor& x) { return plain("gelu_tanh", GELU_TANH, x); }
Tensor gelu_new(const Tensor& x) { return plain("gelu_new", GELU_TANH, x); }
Tensor gelu_fast(const Tensor& x) { return plain("gelu_fast", GELU_FAST, x); }
Tensor quick_gelu(const Tensor& x) { return plain("quick_gelu", QUICK_GELU, x); }
Tensor silu(const Tensor& x) { return plain("silu", SILU, x); }
Tensor relu2(const Tensor& x) { return plain("relu2", RELU2, x); }
void silu_(const Tensor& x) {
  refuse_gradient("silu_", x);
  if (x.is_contiguous()) {
    activate("silu_", SILU, x, x);
    written(x);
  } else {
    x.copy_(silu(x));
  }
}

// Heads of a tensor: [tokens, heads, head_size] with any distances but those within a head.
struct Heads {
  Tensor tensor;
  int64_t tokens, heads, head_size, token_stride, head_stride;

  Heads(const char* op, const Tensor& x, int64_t tokens, int64_t head_size) : tensor(x), tokens(tokens), head_size(head_size) {
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

  // Whether no two heads share memory: those at the smaller distance lie apart, and so do the groups of them.
  bool apart() const {
    int64_t distances[] = {heads > 1 ? head_stride : 0, tokens > 1 ? token_stride : 0}, counts[] = {heads, tokens};
    if (distances[0] > distances[1]) std::swap(distances[0], distances[1]), std::swap(counts[0], counts[1]);
    int64_t extent = head_size;
    for (int dim = 0; dim < 2; ++dim) {
      if (counts[dim] <= 1) continue;
      if (distances[dim] < extent) return false;
      extent += distances[dim] * (counts[dim] - 1);
    }
    return true;
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
  const Tensor cosines = usable(cos, x), sines = usable(sin, x).to(cosines.scalar_type());
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

// The rotation of a tensor by positions, to new memory or in place: refused by the constructor or not at all, so that
// of two tensors none is written if one is refused.
class Rotation {
 public:
  Rotation(const char* op, const Tensor& positions, const Tensor& x, int64_t head_size, const Tensor& cache, bool neox,
           bool in_place)
      : input(x), table((expect_fitting(op, positions, x, head_size, cache), usable(cache, x))),
        rows(positions.to(at::kLong).contiguous()), heads(op, x, positions.numel(), head_size),
        dtype(dtype_of(op, x)), head_size(head_size), neox(neox), in_place(in_place) {
    if (in_place) at::assert_no_internal_overlap(x);
    if (in_place && !heads.apart()) heads = Heads(op, x.clone(at::MemoryFormat::Contiguous), heads.tokens, head_size);
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
    if (in_place && !out.is_same(input)) input.copy_(out);
    return out;
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

Tensor rotary_embedding_query(const Tensor& positions, const Tensor& query, int64_t head_size, const Tensor& cache,
                              bool neox) {
  return Rotation("rotary_embedding", positions, query, head_size, cache, neox, false).run();
}
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
  if (key) expect_one_dtype("rotary_embedding_", query, *key);
  const char* op = "rotary_embedding_";
  const Rotation of_query(op, positions, query, head_size, cache, neox, true);
  std::optional<Rotation> of_key;
  if (key) of_key.emplace(op, positions, *key, head_size, cache, neox, true);
  of_query.run();
  written(query);
  if (key) {
    of_key->run();
    written(*key);
  }
}

// The groups of a quantization: [rows, columns], -1 for the whole extent. The last group of a row may be smaller.
struct Groups {
  bool whole;  // one scale for the tensor
  int64_t columns, count;

  Groups(const char* op, const Matrix& x, at::IntArrayRef shape) {
    TORCH_CHECK_VALUE(shape.size() == 2 && ((shape[0] == -1 && shape[1] == -1) || shape[0] == 1), op,
                      ": group_shape is ", shape, ", expected (-1, -1), (1, -1) or (1, columns)");
    whole = shape[0] == -1;
    columns = shape[1] == -1 ? x.width : shape[1];
    TORCH_CHECK_VALUE(x.width == 0 || (columns > 0), op, ": group_shape is ", shape, ", expected some columns");
    count = columns ? (x.width + columns - 1) / columns : 0;
  }
};

Quantization quantization(const Matrix& x, const Tensor& out, const Groups& groups, float* scales) {
  Quantization q;
  q.x = x.view();
  q.out = static_cast<uint8_t*>(out.mutable_data_ptr());
  q.width = x.width;
  q.group = groups.columns;
  q.scales = scales;
  q.scale_row_stride = groups.whole ? 0 : groups.count;
  q.scale_group_stride = groups.whole ? 0 : 1;
  return q;
}

void quantize(const QuantizationKernel kernel, const Quantization& q, const Matrix& x) {
  share(x.rows, x.width, [&](int64_t begin, int64_t end) { kernel(q, begin, end); });
}

Tensor quant_fp8_static(const Tensor& input, const Tensor& scale, at::IntArrayRef group_shape) {
  const char* op = "quant_fp8_static";
  refuse_gradient(op, input, scale);
  const Matrix x(op, input);
  const Groups groups(op, x, group_shape);
  const Tensor scales = scale.to(at::kFloat).contiguous();
  TORCH_CHECK_VALUE(scales.numel() == (groups.whole ? 1 : x.rows * groups.count), op, ": scale has shape ",
                    scale.sizes(), ", expected one element for each group");
  const Tensor out = fresh(input.sizes(), at::kFloat8_e4m3fn);
  quantize(path().fp8_static[dtype_of(op, input)],
           quantization(x, out, groups, const_cast<float*>(scales.const_data_ptr<float>())), x);
  return out;
}

float largest_absolute(Dtype dtype, const Matrix& x) {
  const MaximumKernel kernel = path().absolute_maximum[dtype];
  std::mutex one;
  float largest = 0;
  share(x.rows, x.width, [&](int64_t begin, int64_t end) {
    const float part = kernel(x.view(), x.width, begin, end);
    const std::lock_guard<std::mutex> guard(one);
    largest = std::max(largest, part);
  });
  return largest;
}

std::tuple<Tensor, Tensor> quantized(const char* op, const Tensor& input, at::IntArrayRef group_shape,
                                     const OptionalTensor& scale_ub, bool power_of_two, bool fp8) {
  refuse_gradient(op, input);
  const Dtype dtype = dtype_of(op, input);
  const Matrix x(op, input);
  const Groups groups(op, x, group_shape);
  std::vector<int64_t> sizes = input.sizes().vec();
  sizes.back() = groups.count;
  if (groups.whole) sizes = {1};
  const Tensor out = fresh(input.sizes(), fp8 ? at::kFloat8_e4m3fn : at::kChar), scales = fresh(sizes, at::kFloat);
  Quantization q = quantization(x, out, groups, scales.mutable_data_ptr<float>());
  const float largest_quantized = fp8 ? 448.0f : 127.0f;
  q.smallest_scale = fp8 ? 1.0f / (448.0f * 512.0f) : 1.17549435e-38f;
  q.power_of_two = power_of_two;
  if (scale_ub && scale_ub->defined()) q.upper_bound = scale_ub->item<float>();
  if (groups.whole) {
    *q.scales = scale_of(q, largest_absolute(dtype, x), largest_quantized);
    quantize(path().fp8_static[dtype], q, x);
  } else {
    quantize((fp8 ? path().fp8_dynamic : path().int8_dynamic)[dtype], q, x);
  }
  return {out, scales};
}

std::tuple<Tensor, Tensor> quant_fp8_dynamic(const Tensor& x, at::IntArrayRef group_shape,
                                             const OptionalTensor& scale_ub, bool use_ue8m0) {
  return quantized("quant_fp8_dynamic", x, group_shape, scale_ub, use_ue8m0, true);
}
std::tuple<Tensor, Tensor> quant_int8_dynamic(const Tensor& x) {
  return quantized("quant_int8_dynamic", x, {1, -1}, {}, false, false);
}

std::vector<std::string> path_names() {
  std::vector<std::string> names;
  for (const Path* path : supported_paths()) names.emplace_back(path->name);
  return names;
}

std::string path_name() { return path().name; }

void set_path_by_name(const std::string& name) {
  for (const Path* path : supported_paths()) {
    if (name == path->name) return set_path(*path);
  }
  TORCH_CHECK_VALUE(false, "path is '", name, "', expected one of those that this CPU has: ", path_names());
}

}  // namespace

TORCH_LIBRARY(opgraft_cpu_kernels, library) {
  library.def("path() -> str", &path_name);
  library.def("paths() -> str[]", &path_names);
  library.def("set_path(str path) -> ()", &set_path_by_name);
  library.def("silu_and_mul(Tensor x) -> Tensor");
  library.def("mul_and_silu(Tensor x) -> Tensor");
  library.def("gelu_and_mul(Tensor x, str approximate=\"none\") -> Tensor");
  library.def("fatrelu_and_mul(Tensor x, float threshold=0.0) -> Tensor");
  library.def("silu_and_mul_with_clamp(Tensor x, float limit) -> Tensor");
  library.def("swiglustep_and_mul(Tensor x, float limit=7.0) -> Tensor");
  library.def("swigluoai_and_mul(Tensor x, float alpha=1.702, float limit=7.0) -> Tensor");
  library.def("gelu(Tensor x, str approximate=\"none\") -> Tensor");
  library.def("gelu_tanh(Tensor x) -> Tensor");
  library.def("gelu_new(Tensor x) -> Tensor");
  library.def("gelu_fast(Tensor x) -> Tensor");
  library.def("quick_gelu(Tensor x) -> Tensor");
  library.def("silu(Tensor x) -> Tensor");
  library.def("silu_(Tensor(a!) x) -> ()");
  library.def("relu2(Tensor x) -> Tensor");
  library.def("apply_rotary_emb(Tensor x, Tensor cos, Tensor sin, bool is_neox_style=True) -> Tensor");
  library.def(
      "rotary_embedding_query(Tensor positions, Tensor query, int head_size, Tensor cos_sin_cache, bool "
      "is_neox_style=True) -> Tensor");
  library.def(
      "rotary_embedding(Tensor positions, Tensor query, Tensor key, int head_size, Tensor cos_sin_cache, bool "
      "is_neox_style=True) -> (Tensor, Tensor)");
  library.def(
      "rotary_embedding_(Tensor positions, Tensor(a!) query, Tensor(b!)? key, int head_size, Tensor cos_sin_cache, "
      "bool is_neox_style=True) -> ()");
  library.def("quant_fp8_static(Tensor x, Tensor scale, int[] group_shape) -> Tensor");
  library.def(
      "quant_fp8_dynamic(Tensor x, int[] group_shape, Tensor? scale_ub=None, bool use_ue8m0=False) -> (Tensor, "
      "Tensor)");
  library.def("quant_int8_dynamic(Tensor x) -> (Tensor, Tensor)");
}

#define OTHERS(apply)                                                                                                  \
  apply(silu_and_mul) apply(mul_and_silu) apply(gelu_and_mul) apply(fatrelu_and_mul) apply(silu_and_mul_with_clamp)    \
      apply(swiglustep_and_mul) apply(swigluoai_and_mul) apply(gelu) apply(gelu_tanh) apply(gelu_new) apply(gelu_fast) \
          apply(quick_gelu) apply(silu) apply(silu_) apply(relu2) apply(apply_rotary_emb)                              \
              apply(rotary_embedding_query) apply(rotary_embedding) apply(rotary_embedding_) apply(quant_fp8_static)   \
                  apply(quant_fp8_dynamic) apply(quant_int8_dynamic)

IMPLEMENT(OTHERS)

}  // namespace opgraft_cpu_kernels
