// The kernels as plain functions over rows in memory: no torch here, so that every path compiles in seconds.
//
// A path is a table of functions, one table per instruction set, all made from the same templates. Strides and widths
// count elements. Functions work on the rows [begin, end), so that a caller can share the rows among threads.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

// Compilers that know the tiles of AMX, and the system that grants them.
#if defined(__x86_64__) && defined(__linux__) && defined(__has_include)
#if __has_include(<amxbf16intrin.h>)
#define OPGRAFT_AMX
#endif
#endif

// Compilers that know the conversion to bfloat16.
#if defined(__x86_64__) && defined(__has_include)
#if __has_include(<avx512bf16intrin.h>)
#define OPGRAFT_AVX512_BF16
#endif
#endif

namespace opgraft_cpu_kernels {

enum Dtype { FLOAT32, BFLOAT16, FLOAT16, DTYPES };

struct Rows {
  const void* data = nullptr;  // null where an optional argument is absent
  int64_t stride = 0;
};

struct MutableRows {
  void* data = nullptr;
  int64_t stride = 0;
  bool streamed = false;  // written past the caches; each row begins at a multiple of 64 bytes
};

struct Norm {
  Rows x, residual;
  const void* weight = nullptr;
  const void* bias = nullptr;  // in the weight's dtype
  MutableRows out, sum;        // sum: x + residual, rounded
  int64_t width = 0;
  int64_t measured = 0;  // the mean square is that of the first so many elements
  float eps = 0;
  bool one_plus_weight = false;  // Gemma's norm multiplies by 1 + weight
};

struct GatedNorm {
  Rows x, z;
  const void* weight = nullptr;
  MutableRows out;
  int64_t width = 0, group = 0;
  float eps = 0;
  bool norm_before_gate = false, sigmoid = false;
};

enum Gated {
  SILU_AND_MUL,
  GELU_AND_MUL,
  GELU_TANH_AND_MUL,
  FATRELU_AND_MUL,
  CLAMPED_SILU_AND_MUL,
  SWIGLUSTEP,
  SWIGLUOAI,
  GELU_AND_MUL_SPARSE,
  GELU_TANH_AND_MUL_SPARSE,
  GATED
};
enum Plain { GELU, GELU_TANH, GELU_FAST, QUICK_GELU, SILU, RELU2, PLAIN };

struct GatedActivation {
  Rows gate, up;  // for SWIGLUOAI gate holds pairs (gate, up) and up is not read
  MutableRows out;
  int64_t width = 0;
  float first = 0, second = 0;  // the activation's parameters
};

// positive · x² + beta · x above zero, (e^min(x, eps) - 1 - x) · negative + beta · x elsewhere.
struct Xielu {
  const void* x = nullptr;
  void* out = nullptr;
  float positive = 0, negative = 0, beta = 0, eps = 0;
};

struct Rotary {
  const void* x = nullptr;
  void* out = nullptr;
  int64_t heads = 0, head_size = 0, rotary_dim = 0;
  int64_t token_stride = 0, head_stride = 0, out_token_stride = 0, out_head_stride = 0;
  // The row of cosines and sines of token t is positions[t], or t modulo the number of rows without positions.
  const int64_t* positions = nullptr;
  const void* cos = nullptr;
  const void* sin = nullptr;
  int64_t table_stride = 0, table_rows = 0;
  bool neox = true;
  // Factors of the norm of each head, before it is rotated; null if there is none.
  const float* weight = nullptr;
  float eps = 0;
};

// Sections of a row, each with a scale of its own: the whole row, or groups of it.
struct Quantization {
  Rows x;
  uint8_t* out = nullptr;  // contiguous
  int64_t width = 0, group = 0;
  float* scales = nullptr;  // written by dynamic quantization, else read
  int64_t scale_row_stride = 0, scale_group_stride = 0;
  float smallest_scale = 0;
  float upper_bound = __builtin_inff();  // of the absolute maximum; NaN makes the scales NaN
  bool power_of_two = false;
};

// The scale of values of which the largest is given.
inline float scale_of(const Quantization& q, float largest, float largest_quantized) {
  if (!(largest <= q.upper_bound)) largest = q.upper_bound;
  float scale = largest / largest_quantized;
  if (scale < q.smallest_scale) scale = q.smallest_scale;
  if (!q.power_of_two) return scale;
  uint32_t bits;
  std::memcpy(&bits, &scale, 4);
  bits = (bits + 0x7fffff) & 0x7f800000;  // up to the next power of two
  std::memcpy(&scale, &bits, 4);
  return scale;
}

enum Activation { NONE, RELU, SILU_ALONE, GELU_ALONE, GELU_TANH_ALONE };

// activation(x · weightᵀ + bias) + residual.
struct Linear {
  Rows x, residual;
  const void* weight = nullptr;  // contiguous, a row for each column of the result
  const void* bias = nullptr;
  MutableRows out;
  int64_t rows = 0, in_features = 0, out_features = 0;
  Activation activation = NONE;
  uint64_t call = 0;                 // number of the call, whose pieces have the same rows; 0: unknown
  const uint16_t* packed = nullptr;  // the weight as panels of 32 columns of the result
  int parts = 0;                     // bfloat16 numbers for one float32 number
};

// What codes stand for. Those of MXFP4, two e2m1 in a byte, have powers of two as scales, a byte for each 32 inputs.
enum Format { INTEGERS, E4M3, E5M2, MXFP4 };

// code · scale + offset by group of inputs, times rows of x. In tiles of outputs codes are where tiles.inc says, and
// scales and offsets of a group follow one another; otherwise those of an output do.
struct QuantizedLinear {
  static constexpr int64_t BLOCK = 128;    // inputs in a block of 4-bit integers
  static constexpr int64_t LANES = 16;     // inputs that a kernel takes to be of one group
  static constexpr int64_t MX_BLOCK = 32;  // inputs that share a scale of MXFP4
  const uint8_t* codes = nullptr;
  int64_t row_bytes = 0;
  int bits = 0;
  Format format = INTEGERS;
  const void* scales = nullptr;
  const void* offsets = nullptr;
  Dtype scale_dtype = FLOAT32;
  const void* bias = nullptr;  // in the dtype of x
  int64_t rows = 0, in_features = 0, out_features = 0, groups = 0, group = 0;
  int64_t padded = 0;                 // in_features, filled up to whole blocks
  const void* x = nullptr;            // rows of so many, prepared
  const float* group_sums = nullptr;  // of rows of x
  float* sums = nullptr;              // results before they are rounded
  MutableRows out;
};

// A weight of bfloat16 numbers in 12 bits; lossless.inc says where they are.
struct LosslessWeight {
  static constexpr int64_t UNIT = 64;        // inputs whose numbers lie together
  static constexpr int64_t UNIT_BYTES = 96;  // which they take
  static constexpr int64_t EXPONENTS = 16;
  static constexpr int32_t END = INT32_MAX;
  const uint8_t* codes = nullptr;      // a row for each output
  const uint8_t* exponents = nullptr;  // biased
  const int32_t* places = nullptr;     // ascending numbers of the plain units, and END
  const uint16_t* plain = nullptr;     // these units, and one more that is not used
  int64_t count = 0;                   // of plain units
  int64_t in_features = 0;
  int64_t units() const { return in_features / UNIT; }
  int64_t row_bytes() const { return units() * UNIT_BYTES + in_features % UNIT * 2; }
};

constexpr float SMALLEST_SCALE = 1.17549435e-38f;

struct Int8Linear {
  const int8_t* weight = nullptr;
  const float* scales = nullptr;
  const void* bias = nullptr;  // in the dtype of x
  int64_t rows = 0, in_features = 0, out_features = 0;
  int64_t padded = 0;  // in_features, filled up to whole vectors
  const int8_t* x = nullptr;
  const float* x_scales = nullptr;
  MutableRows out;
};

// Attention over pages. A block holds keys and then values, each a head after another, each of these in groups of 16
// tokens. A group of keys lies by elements: [head_size][16], in bfloat16 by pairs of them: [head_size / 2][16][2]. A
// group of values lies by tokens: [16][head_size], in bfloat16 by pairs of them: [8][head_size][2].
//
// In 8 bits a group is its codes, which lie as elements in the dtype of the query would, and then the float32 scales of
// its 16 tokens.
constexpr int64_t KEYS_OF_GROUP = 16;
constexpr int64_t SCALE_BYTES = 4;
constexpr int64_t CHUNK = 256;  // keys whose results are merged with those of others

enum Codes { NO_CODES, INT8_CODES, FP8_CODES, CODES };

struct PagedAttention {
  const void* query = nullptr;
  void* out = nullptr;  // contiguous
  const void* cache = nullptr;
  int64_t query_stride = 0, block_size = 0, head_size = 0, heads = 0, kv_heads = 0;
  int64_t token_size = 0;  // elements of the cache for a token's key or value: head_size and its scale
  const int32_t* tables = nullptr;
  int64_t table_stride = 0;
  const int32_t *starts = nullptr, *lengths = nullptr;
  float scale = 0, cap = 0;  // cap: none if zero
  int64_t window = INT64_MAX;
  const float* sinks = nullptr;
};

// Tokens [first, last) of the query of a sequence, with the heads that share a key head.
struct AttentionPart {
  int64_t sequence = 0, kv_head = 0, first = 0, last = 0;
  int64_t chunk = 0;         // the only one, if there is a place for what it gives
  float* partial = nullptr;  // for each row head_size + 2 numbers
  const AttentionPart* ahead = nullptr;  // what the thread computes next, whose memory is asked for; null: nothing
};

// Attention over latents in pages. A block holds a row of `width` elements for each of its tokens, of which the first
// `rank` are the latent.
struct LatentAttention {
  const void* query = nullptr;  // contiguous: tokens, heads, width
  void* out = nullptr;          // contiguous: tokens, heads, rank
  const void* cache = nullptr;
  int64_t block_size = 0, heads = 0, width = 0, rank = 0;
  const int32_t* tables = nullptr;
  int64_t table_stride = 0;
  float scale = 0;
};

// A token of the query, its sequence, and the rows that it sees.
struct LatentToken {
  int64_t number = 0, sequence = 0, seen = 0;
};

// A matrix for each head of each batch, whose rows are tokens; elements of a row follow one another.
struct Heads {
  const void* data = nullptr;
  int64_t batch_stride = 0, head_stride = 0, stride = 0;
};

// Attention over all keys at once, softmax(query · keyᵀ · scale + mask) · value.
struct DenseAttention {
  Heads query, key, value;
  Heads mask;             // float32, added to scores; null if absent
  int64_t mask_step = 0;  // from one key to the next
  void* out = nullptr;    // contiguous: batch, queries, heads, value_size
  int64_t heads = 0, shared = 1;  // query heads, and how many of them share a key head
  int64_t queries = 0, keys = 0, size = 0, value_size = 0;
  float scale = 0;
  bool causal = false;  // a query sees as many keys as its number and one
};

constexpr int64_t QUERIES_OF_TILE = 192;  // of a head, which share what is made of its keys
inline int64_t tiles_of(const DenseAttention& a) { return (a.queries + QUERIES_OF_TILE - 1) / QUERIES_OF_TILE; }

// Tokens of one sequence and one head, whose channels have a state of so many float32 each.
struct StateScan {
  Rows x, z, b, c, step;  // a row for each token
  MutableRows out;
  bool wide_steps = false, softplus = false;  // steps are float32; they are made positive
  int64_t step_channel_stride = 1;            // 0: all have one step
  const float* step_bias = nullptr;           // null if absent
  const float* a = nullptr;  // a row for each channel, or one number for all
  int64_t a_stride = 0;
  const float* d = nullptr;  // null if absent
  float* state = nullptr;    // contiguous
  int64_t tokens = 0, size = 0;
};

// Tokens [tokens, channels] of sequences, or a token of each, convolved with what was before them.
struct Convolution {
  Rows x;
  MutableRows out;
  const void *weight = nullptr, *bias = nullptr;  // a row of `width` for each channel; null if absent
  void* states = nullptr;                         // rows of `width - 1` for each channel of a sequence
  int64_t state_stride = 0;
  const int64_t *bounds = nullptr, *slots = nullptr;
  int64_t channels = 0, width = 0;
  bool silu = false;
};

using NormKernel = void (*)(const Norm&, int64_t begin, int64_t end);
using GatedNormKernel = void (*)(const GatedNorm&, int64_t begin, int64_t end);
using GatedKernel = void (*)(const GatedActivation&, int64_t begin, int64_t end);
using PlainKernel = void (*)(const void* x, void* out, int64_t begin, int64_t end);
using XieluKernel = void (*)(const Xielu&, int64_t begin, int64_t end);
using RotaryKernel = void (*)(const Rotary&, int64_t begin, int64_t end);
using MaximumKernel = float (*)(const Rows& x, int64_t width, int64_t begin, int64_t end);
using GreatestKernel = void (*)(const Rows& x, int64_t width, float* values, int64_t* places, int64_t begin,
                                int64_t end);
using QuantizationKernel = void (*)(const Quantization&, int64_t begin, int64_t end);
using LinearKernel = void (*)(const Linear&, int64_t begin, int64_t end);
using QuantizedLinearKernel = void (*)(const QuantizedLinear&, int64_t begin, int64_t end);
using PrepareKernel = void (*)(const Rows& x, const QuantizedLinear&, void* to, float* group_sums);
using IntegersKernel = void (*)(const Rows& x, const QuantizedLinear&, void* to, int64_t begin, int64_t end);
using DequantizeKernel = void (*)(const QuantizedLinear&, int64_t begin, int64_t end, void* to);
using LosslessKernel = void (*)(const Linear&, const LosslessWeight&, int64_t begin, int64_t end);
using ExpandKernel = void (*)(const LosslessWeight&, int64_t begin, int64_t end, void* to);
using Int8RowsKernel = void (*)(const Rows& x, const Int8Linear&, int8_t* codes, float* scales, int64_t begin,
                                int64_t end);
using Int8LinearKernel = void (*)(const Int8Linear&, int64_t begin, int64_t end);
using AttentionKernel = void (*)(const PagedAttention&, const AttentionPart&);
using MergeKernel = void (*)(const PagedAttention&, const AttentionPart&, const float* partials, int64_t count);
using LatentKernel = void (*)(const LatentAttention&, const LatentToken&, int64_t chunk, float* to);
using LatentMergeKernel = void (*)(const LatentAttention&, const LatentToken&, const float* chunks, int64_t count);
using StateScanKernel = void (*)(const StateScan&, int64_t begin, int64_t end);
using ConvolutionKernel = void (*)(const Convolution&, int64_t begin, int64_t end);
using DenseAttentionKernel = void (*)(const DenseAttention&, int64_t begin, int64_t end);
using SumKernel = void (*)(const void* const* parts, int64_t count, void* out, int64_t size);
using PackKernel = bool (*)(const float* weight, int64_t in_features, int64_t out_features, int parts,
                            uint16_t* packed, int64_t begin, int64_t end);
using PackedLinearKernel = bool (*)(const Linear&, int64_t begin, int64_t end, int64_t first_panel,
                                    int64_t last_panel);

// The second index says whether the weight, or the table of a rotary embedding, is float32 (1) or of the dtype of x
// (0).
struct Path {
  const char* name;
  NormKernel rms_norm[DTYPES][2];
  NormKernel layer_norm[DTYPES][2];
  GatedNormKernel gated_norm[DTYPES][2];
  GatedKernel gated[GATED][DTYPES];
  PlainKernel plain[PLAIN][DTYPES];
  XieluKernel xielu[DTYPES];
  RotaryKernel rotary[DTYPES][2];
  MaximumKernel absolute_maximum[DTYPES];
  GreatestKernel greatest[DTYPES];
  QuantizationKernel fp8_static[DTYPES], fp8_dynamic[DTYPES], int8_dynamic[DTYPES];
  LinearKernel linear[DTYPES];
  QuantizedLinearKernel quantized_linear[DTYPES];
  PrepareKernel prepare_rows[DTYPES];
  DequantizeKernel dequantize_rows[DTYPES];
  Int8RowsKernel int8_rows[DTYPES];
  Int8LinearKernel int8_linear[DTYPES];
  LosslessKernel lossless_linear;  // of bfloat16
  ExpandKernel expand_rows;
  AttentionKernel attention[CODES][DTYPES];
  MergeKernel merge_chunks[DTYPES];
  DenseAttentionKernel dense_attention[DTYPES];
  LatentKernel latent_chunk[DTYPES];
  LatentMergeKernel merge_latent_chunks[DTYPES];
  StateScanKernel scan_states[DTYPES];
  ConvolutionKernel convolve_tokens[DTYPES], convolve_steps[DTYPES];
  SumKernel sum_vectors[DTYPES];
  // Null without tiles. They return whether bfloat16 can hold what they read.
  PackKernel pack = nullptr;
  PackedLinearKernel packed_linear = nullptr;
  // Over codes in tiles, by numbers of tiles. Null where bytes are not multiplied.
  IntegersKernel prepare_integers[DTYPES];
  QuantizedLinearKernel tiled_linear[DTYPES];
  DequantizeKernel dequantize_tiles = nullptr;  // to bfloat16
};

extern const Path scalar_path;
#if defined(__x86_64__)
extern const Path avx2_path, avx512_path;
#if defined(OPGRAFT_AVX512_BF16)
const Path& avx512_bf16_path();
#endif
#endif
#if defined(OPGRAFT_AMX)
const Path& amx_path();
bool has_amx();
#endif

std::vector<const Path*> supported_paths();  // the fastest first
const Path& path();                          // the one in force
void set_path(const Path& path);

}  // namespace opgraft_cpu_kernels
