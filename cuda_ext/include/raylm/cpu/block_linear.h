// y = x W^T + b with a quantised weight as it is stored: tiles of it are decoded where all rows of x use them.
#pragma once

#include "raylm/cpu/block_amx.h"
#include "raylm/cpu/block_dot.h"
#include "raylm/cpu/gated.h"

namespace raylm {
namespace {

constexpr int64_t kResultRows = 128;  // of x, whose sums are kept while the weight's tiles pass by

RAYLM_INLINE Vec rounded(Vec v) { return v + 0x1.8p23f - 0x1.8p23f; }  // to an integer, below 2^22

// Every number in 16 bits, in the order of QuantisedRows.
RAYLM_INLINE void store_codes(int16_t* p, VecI v) {
#if defined(__AVX512F__)
  const __m256i words = _mm512_cvtepi32_epi16(bit_cast<__m512i>(v));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(words, 0xd8), 0xd8));
#elif defined(__AVX2__)
  const __m256i all = bit_cast<__m256i>(v);
  const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm_shufflehi_epi16(_mm_shufflelo_epi16(words, 0xd8), 0xd8));
#else
  for (int i = 0; i < kWidth; ++i) p[place_of(i)] = static_cast<int16_t>(v[i]);
#endif
}

// Codes and scales of kQuantised values.
RAYLM_INLINE void quantise_block(const Vec v[kQuantised / kWidth], uint8_t* codes, RowScales& to) {
  constexpr int kVectors = kQuantised / kWidth;
  constexpr float kMost = 32767.0f;
  Vec largest{}, not_finite{};
  for (int i = 0; i < kVectors; ++i) {
    largest = max(largest, max(v[i], -v[i]));
    not_finite += v[i] * 0.0f;
  }
  // NaN where a value is not finite: the row's results are NaN. Below 2^-100 all codes are zero, so that the inverse is
  // finite.
  const float most = max_element(largest);
  const float inverse = most > 0x1p-100f ? kMost / most : 0.0f;
  Vec halves[2] = {}, high{};
  for (int i = 0; i < kVectors; ++i) {
    // In this order NaN becomes a number.
    const Vec code = min(splat(kMost), max(rounded(v[i] * inverse), splat(-kMost)));
    halves[2 * i / kVectors] += code;
    const VecI integers = __builtin_convertvector(code, VecI);
    if constexpr (kReadsBytes) {
      store_bytes(codes + i * kWidth, integers);
      high += __builtin_convertvector(integers >> 8, Vec);
    } else {
      store_codes(reinterpret_cast<int16_t*>(codes) + i * kWidth, integers);
    }
  }
  const Vec sums = sum4(not_finite, high, halves[0], halves[1]);
  const float scale = most / kMost + sums[0];
  const int32_t high_bytes = static_cast<int32_t>(sums[1]) * (1 << 15);
  to = {scale, {scale * (sums[2] + sums[3]), scale * sums[2], scale * sums[3]}, high_bytes};
}

template <typename T>
inline void quantise(const QuantiseArgs& a, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const T* x = static_cast<const T*>(a.x) + row * a.x_stride;
    for (int64_t b = 0; b < a.out.size / kQuantised; ++b) {
      Vec v[kQuantised / kWidth];
      for (int i = 0; i < kQuantised / kWidth; ++i) v[i] = load(x + b * kQuantised + i * kWidth);
      const int64_t at = row * a.out.size + b * kQuantised;
      quantise_block(v, a.out.codes + at * kCodeBytes, a.out.scales[at / kQuantised]);
    }
  }
}

// Rows `row` up to row + rows of x times kLinearColumns rows of a weight, from `column` on, into `results`.
template <typename Kind>
__attribute__((noinline)) void block_columns(const BlockLinearArgs& a, int weight, int64_t column, int64_t row,
                                             int64_t rows, float* results) {
  constexpr int kInTile = kTileValues / Kind::kValues, kPerBlock = Kind::kValues / kQuantised;
  const int64_t blocks = a.x.size / Kind::kValues, stride = a.blocks_stride[weight];
  const int64_t num_tiles = (blocks + kInTile - 1) / kInTile;
  std::memset(results, 0, rows * kLinearColumns * sizeof(float));
  const uint8_t* lines[kLinearColumns];
  for (int64_t n = 0; n < kLinearColumns; ++n) {
    const int64_t c = column + n < a.out_size ? column + n : a.out_size - 1;
    lines[n] = a.blocks[weight] + c * stride;
  }
  using C = typename Reader<Kind>::Like;
  const bool in_tiles = kTileRows > 0 && rows >= kTileRows && C::kPart == kQuantised;
  const TileRegisters registers(in_tiles ? rows : 0);
  Tile tiles[kLinearColumns / kWidth];
  for (int64_t t = 0, first = 0; t < num_tiles; ++t) {
    const int count = static_cast<int>((blocks - first + num_tiles - t - 1) / (num_tiles - t));
    for (int64_t n = 0; n < kLinearColumns / kWidth; ++n) {
      const uint8_t* const* of_tile = lines + n * kWidth;
      const BlocksAhead ahead(of_tile, first * Kind::kBytes + kLinearColumns * stride, count * Kind::kBytes, count);
      if (rows == 1) dot_row<Kind>(of_tile, first, count, ahead, a.x, row, results + n * kWidth);
      else decode_tile<Kind>(of_tile, first, count, ahead, tiles[n]);
    }
    if (in_tiles) multiply_in_tiles<C>(tiles[0].begin(), count * kPerBlock, a.x, row, rows, first * kPerBlock, results);
    else if (rows > 1) dot_tiles<C>(tiles, count * kPerBlock, a.x, row, rows, first * kPerBlock, results);
    first += count;
  }
}

inline void block_columns_of(const BlockLinearArgs& a, int weight, int64_t column, int64_t row, int64_t rows,
                             float* results) {
  with_kind(a.kinds[weight], [&](auto kind) { block_columns<decltype(kind)>(a, weight, column, row, rows, results); });
}

// Calls body(first column, how many, first row, how many) for pieces of the result.
template <typename Body>
RAYLM_INLINE void for_each_piece(const BlockLinearArgs& a, int64_t begin, int64_t end, const Body& body) {
  for (int64_t row = 0; row < a.num_rows; row += kResultRows) {
    const int64_t rows = a.num_rows - row < kResultRows ? a.num_rows - row : kResultRows;
    for (int64_t column = begin; column < end; column += kLinearColumns) {
      body(column, end - column < kLinearColumns ? end - column : kLinearColumns, row, rows);
    }
  }
}

template <typename T>
inline void block_linear(const BlockLinearArgs& a, int64_t begin, int64_t end) {
  alignas(64) float results[kResultRows * kLinearColumns];
  const T* bias = static_cast<const T*>(a.bias[0]);
  for_each_piece(a, begin, end, [&](int64_t column, int64_t columns, int64_t row, int64_t rows) {
    block_columns_of(a, 0, column, row, rows, results);
    for (int64_t m = 0; m < rows; ++m) {
      T* out = static_cast<T*>(a.out) + (row + m) * a.out_stride + column;
      const float* of_row = results + m * kLinearColumns;
      for_each_vec(columns, [&](int64_t i, auto load, auto store) {
        store(out + i, bias ? load(of_row + i) + load(bias + column + i) : load(of_row + i));
      });
    }
  });
}

template <typename T>
inline void block_gated(const BlockLinearArgs& a, int64_t begin, int64_t end) {
  alignas(64) float results[2][kResultRows * kLinearColumns];
  for_each_piece(a, begin, end, [&](int64_t column, int64_t columns, int64_t row, int64_t rows) {
    for (int weight = 0; weight < 2; ++weight) block_columns_of(a, weight, column, row, rows, results[weight]);
    for (int64_t m = 0; m < rows; ++m) {
      T* out = static_cast<T*>(a.out) + (row + m) * a.out_stride + column;
      for_each_vec(columns, [&](int64_t i, auto load, auto store) {
        const auto sum = [&](int weight) {
          const Vec v = load(results[weight] + m * kLinearColumns + i);
          const T* bias = static_cast<const T*>(a.bias[weight]);
          return bias ? v + load(bias + column + i) : v;
        };
        store(out + i, gated_by(a.activation, sum(0), sum(1), a.limit));
      });
    }
  });
}

}  // namespace
}  // namespace raylm
