// Attention over pages as a torch op: it writes the new tokens, and shares what is to be computed among the threads.

#include <atomic>
#include <memory>
#include <vector>

#include "ops.h"

namespace opgraft_cpu_kernels {
namespace {

constexpr const char* PAGES = "attend_pages";
constexpr int64_t PART_ROWS = 48;  // rows that share a read of keys

void expect_tokens(const char* name, const Tensor& x, int64_t heads, const Tensor& query) {
  TORCH_CHECK_VALUE(x.dim() == 3 && x.size(0) == query.size(0) && x.size(1) == heads && x.size(2) == query.size(2),
                    PAGES, ": ", name, " has shape ", x.sizes(), ", expected [", query.size(0), ", ", heads, ", ",
                    query.size(2), "]");
  TORCH_CHECK_VALUE(x.scalar_type() == query.scalar_type(), PAGES, ": ", name, " has dtype ", x.scalar_type(),
                    ", expected that of query, ", query.scalar_type());
}

// Tokens whose heads adjoin; a copy where they do not.
Tensor in_rows(const Tensor& x) {
  return x.stride(2) == 1 && x.stride(1) == x.size(2) ? x : x.contiguous();
}

Codes codes_of(const Tensor& cache) {
  return cache.scalar_type() == at::kChar ? INT8_CODES : cache.scalar_type() == at::kByte ? FP8_CODES : NO_CODES;
}

void expect_cache(const Tensor& cache, const Tensor& query) {
  const bool coded = codes_of(cache) != NO_CODES;
  const int64_t size = query.size(2), elements = KEYS_OF_GROUP * (size + (coded ? SCALE_BYTES : 0));
  TORCH_CHECK_VALUE(cache.dim() == 5 && cache.size(1) == 2 && cache.size(2) > 0 && cache.size(4) == elements &&
                        size % 16 == 0 && cache.is_contiguous(),
                    PAGES, ": cache has shape ", cache.sizes(),
                    ", expected a contiguous [num_blocks, 2, num_kv_heads, ", "groups, ", elements,
                    "], and a head size that 16 divides");
  TORCH_CHECK_VALUE(coded || cache.scalar_type() == query.scalar_type(), PAGES, ": cache has dtype ",
                    cache.scalar_type(), ", expected that of query, ", query.scalar_type(), ", or codes");
  TORCH_CHECK_VALUE(query.size(1) > 0 && query.size(1) % cache.size(2) == 0, PAGES, ": cache has ", cache.size(2),
                    " heads, expected a divisor of ", query.size(1));
}

Tensor integers(const char* name, const Tensor& x, int64_t dims, at::ScalarType dtype) {
  TORCH_CHECK_VALUE(x.dim() == dims && (x.scalar_type() == at::kInt || x.scalar_type() == at::kLong), PAGES, ": ", name,
                    " has shape ", x.sizes(), " and dtype ", x.scalar_type(), ", expected ", dims,
                    " dimensions of integers");
  return x.to(dtype).contiguous();
}

// Writes an argument to its places: T is an unsigned integer as wide as its elements, PAIR how many lie together.
template <class T, int64_t PAIR>
void write(const Tensor& x, const Tensor& cache, const int64_t* slots, bool values) {
  const int64_t heads = x.size(1), size = x.size(2), groups = cache.size(3), stride = x.stride(0);
  const T* const from = static_cast<const T*>(x.const_data_ptr());
  T* const to = static_cast<T*>(cache.mutable_data_ptr());
  share(x.size(0), heads * size, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      const int64_t group = slots[token] / KEYS_OF_GROUP, lane = slots[token] % KEYS_OF_GROUP;
      for (int64_t head = 0; head < heads; ++head) {
        const int64_t part = (group / groups * 2 + values) * heads + head;
        const T* source = from + token * stride + head * size;
        T* target = to + (part * groups + group % groups) * cache.size(4);
        if (values) {
          target += lane / PAIR * PAIR * size + lane % PAIR;
          for (int64_t i = 0; i < size; ++i) target[i * PAIR] = source[i];
        } else {
          target += lane * PAIR;
          for (int64_t i = 0; i < size; ++i) target[i / PAIR * PAIR * KEYS_OF_GROUP + i % PAIR] = source[i];
        }
      }
    }
  });
}

// The largest magnitude of the elements of a head, as bits: NaN is above infinity.
template <class T>
T largest_bits(const T* x, int64_t size) {
  T largest = 0;
  for (int64_t i = 0; i < size; ++i) largest = std::max<T>(largest, x[i] & T(~T(0)) >> 1);
  return largest;
}

// Quantizes the heads of tokens, and writes codes and scales to their places. A head with what is not finite becomes
// NaN.
template <class T, int64_t PAIR, T INFINITE>
void write_codes(const Tensor& x, const Tensor& cache, const int64_t* slots, bool values) {
  const int64_t tokens = x.size(0), heads = x.size(1), size = x.size(2), groups = cache.size(3);
  const Dtype dtype = dtype_of(PAGES, x);
  const bool fp8 = codes_of(cache) == FP8_CODES;
  const Tensor codes = fresh(x.sizes(), at::kByte), scales = fresh({tokens, heads}, at::kFloat);
  Quantization q;
  q.x = {x.const_data_ptr(), x.stride(0)};
  q.out = codes.mutable_data_ptr<uint8_t>();
  q.width = heads * size;
  q.group = size;
  q.scales = scales.mutable_data_ptr<float>();
  q.scale_row_stride = heads;
  q.scale_group_stride = 1;
  q.smallest_scale = SMALLEST_SCALE;
  const QuantizationKernel quantize = (fp8 ? path().fp8_dynamic : path().int8_dynamic)[dtype];
  share(tokens, q.width, [&](int64_t begin, int64_t end) { quantize(q, begin, end); });
  write<uint8_t, PAIR>(codes, cache, slots, values);
  const T* const from = static_cast<const T*>(x.const_data_ptr());
  uint8_t* const to = static_cast<uint8_t*>(cache.mutable_data_ptr());
  for (int64_t token = 0; token < tokens; ++token) {
    const int64_t group = slots[token] / KEYS_OF_GROUP, lane = slots[token] % KEYS_OF_GROUP;
    for (int64_t head = 0; head < heads; ++head) {
      const bool finite = largest_bits(from + token * x.stride(0) + head * size, size) < INFINITE;
      const float scale = finite ? q.scales[token * heads + head] : __builtin_nanf("");
      const int64_t part = (group / groups * 2 + values) * heads + head;
      std::memcpy(to + (part * groups + group % groups) * cache.size(4) + KEYS_OF_GROUP * size + lane * SCALE_BYTES,
                  &scale, sizeof(scale));
    }
  }
}

void write_tokens(const Tensor& key, const Tensor& value, const Tensor& cache, const Tensor& slots) {
  const int64_t* const places = slots.const_data_ptr<int64_t>();
  const int64_t room = cache.size(0) * cache.size(3) * KEYS_OF_GROUP;
  for (int64_t i = 0; i < slots.numel(); ++i)
    TORCH_CHECK_VALUE(0 <= places[i] && places[i] < room, PAGES, ": slots has ", places[i], ", expected 0 to ",
                      room - 1);
  const at::ScalarType dtype = key.scalar_type();
  const bool coded = codes_of(cache) != NO_CODES;
  const auto write_one = dtype == at::kFloat  ? (coded ? &write_codes<uint32_t, 1, 0x7f800000> : &write<uint32_t, 1>)
                         : dtype == at::kHalf ? (coded ? &write_codes<uint16_t, 1, 0x7c00> : &write<uint16_t, 1>)
                                              : (coded ? &write_codes<uint16_t, 2, 0x7f80> : &write<uint16_t, 2>);
  write_one(key, cache, places, false);
  write_one(value, cache, places, true);
}

void expect_sequences(const PagedAttention& a, int64_t sequences, int64_t tokens, int64_t blocks) {
  const auto length_of = [&](int64_t i) { return int64_t(a.starts[i + 1]) - a.starts[i]; };
  TORCH_CHECK_VALUE(a.starts[0] == 0 && a.starts[sequences] == tokens, PAGES, ": query_start_loc is from ", a.starts[0],
                    " to ", a.starts[sequences], ", expected 0 to ", tokens);
  for (int64_t i = 0; i < sequences; ++i) {
    const int64_t length = a.lengths[i], room = a.table_stride * a.block_size;
    TORCH_CHECK_VALUE(length_of(i) >= 0 && length_of(i) <= length && length <= room, PAGES, ": sequence ", i, " has ",
                      length, " tokens, expected ", length_of(i), " to ", room);
    if (length_of(i) == 0) continue;
    const int64_t seen = length - length_of(i) + 1, low = seen > a.window ? seen - a.window : 0;
    // Of steps of keys that begin before the window, the groups before it are not read.
    for (int64_t at = low / KEYS_OF_GROUP * KEYS_OF_GROUP / a.block_size; at * a.block_size < length; ++at) {
      const int64_t block = a.tables[i * a.table_stride + at];
      TORCH_CHECK_VALUE(0 <= block && block < blocks, PAGES, ": block_table has ", block, ", expected 0 to ",
                        blocks - 1);
    }
  }
}

// A part that is computed chunk by chunk, by whoever comes.
struct Divided {
  AttentionPart part;
  std::vector<float> partials;
  int64_t chunks = 0;
  std::atomic<int64_t> left{0};
};

struct Work {
  std::vector<AttentionPart> parts;
  std::vector<Divided*> owners;  // null for whole parts
  std::vector<std::unique_ptr<Divided>> divided;
  int64_t products = 0;
};

void in_chunks(const PagedAttention& a, const AttentionPart& part, int64_t low, int64_t high, Work& work) {
  const int64_t rows = (part.last - part.first) * (a.heads / a.kv_heads), length = rows * (a.head_size + 2);
  auto made = std::make_unique<Divided>();
  made->part = part;
  made->chunks = (high + CHUNK - 1) / CHUNK - low / CHUNK;
  made->left = made->chunks;
  made->partials.resize(size_t(made->chunks * length));
  for (int64_t i = 0; i < made->chunks; ++i) {
    AttentionPart one = part;
    one.chunk = low / CHUNK + i;
    one.partial = made->partials.data() + i * length;
    work.parts.push_back(one);
    work.owners.push_back(made.get());
  }
  work.divided.push_back(std::move(made));
}

// Lists what there is to do, the longest of each sequence first; in chunks where threads would wait for parts.
Work work_of(const PagedAttention& a, int64_t sequences) {
  Work work;
  const int64_t shared = a.heads / a.kv_heads, tokens = std::max<int64_t>(1, PART_ROWS / shared);
  const bool few = sequences * a.kv_heads < 8 * at::get_num_threads() && at::get_num_threads() > 1;
  for (int64_t sequence = 0; sequence < sequences; ++sequence) {
    const int64_t count = a.starts[sequence + 1] - a.starts[sequence], before = a.lengths[sequence] - count;
    for (int64_t last = count; last > 0; last -= tokens) {
      const int64_t first = std::max<int64_t>(0, last - tokens), high = before + last;
      const int64_t low = std::max<int64_t>(0, before + first + 1 - std::min(a.window, high));
      for (int64_t head = 0; head < a.kv_heads; ++head) {
        const AttentionPart part{sequence, head, first, last};
        work.products += (high - low) * (last - first) * shared * a.head_size;
        if (few && count == 1 && high - low > CHUNK) {
          in_chunks(a, part, low, high, work);
        } else {
          work.parts.push_back(part);
          work.owners.push_back(nullptr);
        }
      }
    }
  }
  return work;
}

void run(const PagedAttention& a, Codes codes, Dtype dtype, Work& work) {
  const Path& kernels = path();
  const int64_t threads = std::min<int64_t>(at::get_num_threads(), work.products / (4 * GRAIN) + 1);
  const size_t count = work.parts.size();
  std::atomic<size_t> next{0};
  const auto pull = [&](int64_t, int64_t) {
    for (size_t i = next++; i < count;) {
      // A thread takes its next part early, to ask for its memory, while enough are left for the others too.
      const bool early = next + size_t(threads) <= count;
      const size_t after = early ? next++ : count;
      AttentionPart part = work.parts[i];
      if (after < count) part.ahead = &work.parts[after];
      kernels.attention[codes][dtype](a, part);
      Divided* const owner = work.owners[i];
      if (owner && owner->left.fetch_sub(1, std::memory_order_acq_rel) == 1)
        kernels.merge_chunks[dtype](a, owner->part, owner->partials.data(), owner->chunks);
      i = early ? after : next++;
    }
  };
  divide(threads, 1, pull);
}

}  // namespace

Tensor attend_pages(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& cache,
                    const Tensor& slots, const Tensor& block_table, const Tensor& query_start_loc,
                    const Tensor& seq_lens, double scale, std::optional<int64_t> sliding_window,
                    std::optional<double> logits_soft_cap, const OptionalTensor& sinks) {
  const Tensor& sink = defined(sinks);
  refuse_gradient(PAGES, query, key, value, sink);
  const Dtype dtype = dtype_of(PAGES, query);
  TORCH_CHECK_VALUE(query.dim() == 3, PAGES, ": query has shape ", query.sizes(), ", expected three dimensions");
  expect_cache(cache, query);
  expect_tokens("key", key, cache.size(2), query);
  expect_tokens("value", value, cache.size(2), query);
  const Tensor places = integers("slots", slots, 1, at::kLong), table = integers("block_table", block_table, 2, at::kInt);
  const Tensor starts = integers("query_start_loc", query_start_loc, 1, at::kInt);
  const Tensor lengths = integers("seq_lens", seq_lens, 1, at::kInt);
  const int64_t sequences = lengths.size(0);
  TORCH_CHECK_VALUE(starts.size(0) == sequences + 1 && table.size(0) == sequences && places.size(0) == query.size(0),
                    PAGES, ": query_start_loc, block_table and slots have ", starts.size(0), ", ", table.size(0),
                    " and ", places.size(0), " rows, expected ", sequences + 1, ", ", sequences, " and ",
                    query.size(0));
  TORCH_CHECK_VALUE(sliding_window.value_or(1) > 0 && logits_soft_cap.value_or(1) > 0, PAGES,
                    ": a window or a cap is not positive");
  TORCH_CHECK_VALUE(!sink.defined() || (sink.dim() == 1 && sink.size(0) == query.size(1)), PAGES,
                    ": sinks has another shape than [heads]");
  const Tensor heads = in_rows(query), bias = sink.defined() ? sink.to(at::kFloat).contiguous() : sink;
  const Tensor out = fresh(query.sizes(), query.scalar_type());
  PagedAttention a;
  a.query = heads.const_data_ptr();
  a.out = out.mutable_data_ptr();
  a.cache = cache.const_data_ptr();
  a.query_stride = heads.stride(0);
  a.block_size = cache.size(3) * KEYS_OF_GROUP;
  a.head_size = query.size(2);
  a.heads = query.size(1);
  a.kv_heads = cache.size(2);
  a.token_size = cache.size(4) / KEYS_OF_GROUP;
  a.tables = table.const_data_ptr<int32_t>();
  a.table_stride = table.size(1);
  a.starts = starts.const_data_ptr<int32_t>();
  a.lengths = lengths.const_data_ptr<int32_t>();
  a.scale = float(scale);
  a.cap = float(logits_soft_cap.value_or(0));
  a.window = sliding_window.value_or(a.window);
  a.sinks = bias.defined() ? bias.const_data_ptr<float>() : nullptr;
  expect_sequences(a, sequences, query.size(0), cache.size(0));
  write_tokens(in_rows(key), in_rows(value), cache, places);
  written(cache);
  Work work = work_of(a, sequences);
  run(a, codes_of(cache), dtype, work);
  return out;
}

TORCH_LIBRARY_FRAGMENT(opgraft_cpu_kernels, library) {
  library.def(
      "attend_pages(Tensor query, Tensor key, Tensor value, Tensor(a!) cache, Tensor slots, Tensor block_table, Tensor "
      "query_start_loc, Tensor seq_lens, float scale, int? sliding_window=None, float? logits_soft_cap=None, Tensor? "
      "sinks=None) -> Tensor");
}

#define ATTENTION(apply) apply(attend_pages)

IMPLEMENT(ATTENTION)

}  // namespace opgraft_cpu_kernels
