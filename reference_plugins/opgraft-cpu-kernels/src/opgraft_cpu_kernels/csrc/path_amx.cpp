// The path avx512_bf16 with a linear layer on the tiles of AMX.
//
// Tiles multiply bfloat16 and add in float32. A float32 number is the sum of three bfloat16 numbers, so that the six
// largest of the nine products of two such sums give a product to about 2^-24; of two numbers each, the three largest
// give 2^-16. Numbers below 2^-126, and parts that small, count as zero.
#include "common.h"

#if defined(OPGRAFT_AMX)
#include <sys/syscall.h>
#include <unistd.h>

OPGRAFT_TARGET_BEGIN("amx-tile,amx-bf16,avx512bf16,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
namespace opgraft_cpu_kernels {
namespace amx {
#define CONVERTS_TO_BFLOAT16
#include "vector_avx512.inc"
#include "arithmetic.inc"
#include "rows.inc"
#include "linear.inc"

constexpr int64_t TILE = 512;                    // bfloat16 numbers in a tile: 16 rows of 32, or 16 pairs of rows
constexpr int64_t BLOCK_BYTES = int64_t(1) << 20;  // what the parts of a block of rows of x may take, half the cache

struct alignas(64) Configuration {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes_of_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

INLINE int64_t chunks(int64_t count) { return (count + 31) / 32; }

INLINE F low_half(__m512i words) { return as_float((I)_mm512_cvtepu16_epi32(_mm512_castsi512_si256(words)) << 16); }
INLINE F high_half(__m512i words) {
  return as_float((I)_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(words, 1)) << 16);
}

// Splits up to 32 numbers, the rest being zero, into parts that lie `distance` apart; returns which of them bfloat16
// cannot hold, infinities and NaN among them.
INLINE __mmask32 split(const float* from, int64_t count, int parts, uint16_t* to, int64_t distance) {
  const auto mask = [&](int64_t n) { return __mmask16(n >= 16 ? 0xffff : n <= 0 ? 0 : (1u << n) - 1); };
  F low = _mm512_maskz_loadu_ps(mask(count), from);
  F high = _mm512_maskz_loadu_ps(mask(count - 16), from + 16);
  __mmask32 beyond = 0;
  for (int part = 0; part < parts; ++part) {
    const __m512i words = (__m512i)_mm512_cvtne2ps_pbh(high, low);
    _mm512_store_si512(to + part * distance, words);
    if (part == 0) {
      const __m512i infinite = _mm512_set1_epi16(0x7f80);
      beyond = _mm512_cmpeq_epi16_mask(_mm512_and_si512(words, infinite), infinite);
    }
    low = low - low_half(words);
    high = high - high_half(words);
  }
  return beyond;
}

// A panel of 32 columns of the result: for each 32 numbers of a row, for each part, two tiles of 16 columns, in which
// pairs of numbers of one column lie together.
bool pack(const float* weight, int64_t in_features, int64_t out_features, int parts, uint16_t* packed, int64_t begin,
          int64_t end) {
  const int64_t steps = chunks(in_features);
  alignas(64) uint16_t row[3 * 32];
  __mmask32 beyond = 0;
  for (int64_t panel = begin; panel < end; ++panel) {
    for (int64_t step = 0; step < steps; ++step) {
      uint16_t* tiles = packed + (panel * steps + step) * parts * 2 * TILE;
      for (int64_t column = 0; column < 32; ++column) {
        const int64_t feature = panel * 32 + column, width = feature < out_features ? in_features - step * 32 : 0;
        beyond |= split(weight + (width ? feature * in_features + step * 32 : 0), width, parts, row, 32);
        for (int part = 0; part < parts; ++part) {
          uint16_t* tile = tiles + (2 * part + column / 16) * TILE + column % 16 * 2;
          for (int64_t pair = 0; pair < 16; ++pair) std::memcpy(tile + pair * 32, row + part * 32 + pair * 2, 4);
        }
      }
    }
  }
  return beyond == 0;
}

// Rows of x, as tiles of 16 rows in the order of the panels.
bool split_rows(const Linear& linear, int64_t begin, int64_t end, uint16_t* to) {
  const int64_t steps = chunks(linear.in_features);
  __mmask32 beyond = 0;
  for (int64_t row = begin; row < begin + chunks(end - begin) * 32; ++row) {
    const int64_t at = row - begin;
    uint16_t* tile = to + at / 32 * steps * linear.parts * 2 * TILE + at % 32 / 16 * TILE + at % 16 * 32;
    const float* from = row < end ? row_of<float>(linear.x, row) : nullptr;
    for (int64_t step = 0; step < steps; ++step, tile += linear.parts * 2 * TILE) {
      const int64_t width = from ? linear.in_features - step * 32 : 0;
      beyond |= split(from + (from ? step * 32 : 0), width, linear.parts, tile, 2 * TILE);
    }
  }
  return beyond == 0;
}

#define LOAD_ROWS(part)                            \
  _tile_loadd(4, rows + (2 * (part)) * TILE, 64);  \
  _tile_loadd(5, rows + (2 * (part) + 1) * TILE, 64)
#define LOAD_COLUMNS(part)                            \
  _tile_loadd(6, columns + (2 * (part)) * TILE, 64);  \
  _tile_loadd(7, columns + (2 * (part) + 1) * TILE, 64)
#define MULTIPLY            \
  _tile_dpbf16ps(0, 4, 6);  \
  _tile_dpbf16ps(1, 4, 7);  \
  _tile_dpbf16ps(2, 5, 6);  \
  _tile_dpbf16ps(3, 5, 7)

// 32 rows times 32 columns. From product to product one of the factors stays.
template <int PARTS>
INLINE void multiply(const uint16_t* rows, const uint16_t* columns, int64_t steps, float* sums) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t step = 0; step < steps; ++step, rows += PARTS * 2 * TILE, columns += PARTS * 2 * TILE) {
    LOAD_COLUMNS(0);
    if constexpr (PARTS == 3) {
      LOAD_ROWS(2);
      MULTIPLY;
    }
    LOAD_ROWS(1);
    MULTIPLY;
    if constexpr (PARTS == 3) {
      LOAD_COLUMNS(1);
      MULTIPLY;
      LOAD_ROWS(0);
      MULTIPLY;
      LOAD_COLUMNS(2);
      MULTIPLY;
    } else {
      LOAD_ROWS(0);
      LOAD_COLUMNS(1);
      MULTIPLY;
    }
    LOAD_COLUMNS(0);
    MULTIPLY;
  }
  _tile_stored(0, sums, 128);
  _tile_stored(1, sums + 16, 128);
  _tile_stored(2, sums + 16 * 32, 128);
  _tile_stored(3, sums + 16 * 32 + 16, 128);
}

INLINE void finish_block(const Linear& linear, const float* sums, int64_t row, int64_t rows, int64_t column) {
  const int64_t columns = linear.out_features - column < 32 ? linear.out_features - column : 32;
  for (int64_t r = 0; r < rows; ++r) {
    across<false>(columns, [&](int64_t i, auto part) INLINE_LAMBDA {
      finish<float>(linear, load(sums + r * 32 + i, part), row + r, column + i, part);
    });
  }
}

// The rows [begin, end) of the result in some panels; false where bfloat16 cannot hold a number of x.
bool tiles(const Linear& linear, int64_t begin, int64_t end, int64_t first_panel, int64_t last_panel) {
  static thread_local Workspace workspace;
  alignas(64) float sums[32 * 32];
  const int64_t steps = chunks(linear.in_features), tiles_of_32 = steps * linear.parts * 2 * TILE;
  int64_t block = BLOCK_BYTES / (tiles_of_32 * 2) * 32;
  if (block < 32) block = 32;
  if (block > chunks(end - begin) * 32) block = chunks(end - begin) * 32;
  auto* x = static_cast<uint16_t*>(workspace.at_least(size_t(block / 32 * tiles_of_32 * 2)));
  const Configuration configuration;
  _tile_loadconfig(&configuration);
  bool held = true;
  for (int64_t row = begin; row < end; row += block) {
    const int64_t stop = row + block < end ? row + block : end;
    held = split_rows(linear, row, stop, x) && held;
    __asm__ volatile("" ::: "memory");  // loads of tiles read what was written
    for (int64_t panel = first_panel; panel < last_panel; ++panel) {
      const uint16_t* columns = linear.packed + panel * tiles_of_32;
      for (int64_t r = row; r < stop; r += 32) {
        const uint16_t* rows = x + (r - row) / 32 * tiles_of_32;
        linear.parts == 3 ? multiply<3>(rows, columns, steps, sums) : multiply<2>(rows, columns, steps, sums);
        finish_block(linear, sums, r, stop - r < 32 ? stop - r : 32, panel * 32);
      }
    }
  }
  _tile_release();
  return held;
}

}  // namespace amx
}  // namespace opgraft_cpu_kernels
OPGRAFT_TARGET_END

namespace opgraft_cpu_kernels {
namespace {

Path with_tiles(Path path) {
  path.name = "amx";
  path.pack = &amx::pack;
  path.packed_linear = &amx::tiles;
  return path;
}

}  // namespace

const Path& amx_path() {
  static const Path path = with_tiles(avx512_bf16_path());
  return path;
}

// Whether the CPU has tiles of bfloat16 and Linux grants their registers, which a process asks for once.
bool has_amx() {
  constexpr long ASK_FOR_STATE = 0x1023, TILE_DATA = 18;
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  const bool tiles = (d >> 22 & 1) && (d >> 24 & 1);  // amx-bf16, amx-tile
  if (!__get_cpuid_count(7, 1, &a, &b, &c, &d)) return false;
  const bool conversion = a >> 5 & 1;  // avx512-bf16
  return tiles && conversion && syscall(SYS_arch_prctl, ASK_FOR_STATE, TILE_DATA) == 0;
}

}  // namespace opgraft_cpu_kernels
#endif
