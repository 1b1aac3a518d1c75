// y = x W^T + b for few rows: every weight is read from memory once, however many rows there are.
#pragma once

#include <cstdlib>

#include "raylm/cpu/dot.h"
#include "raylm/cpu/kernels.h"

namespace raylm {
namespace {

constexpr int64_t kRowBytes = 256 * 1024;  // of x that stay in the second-level cache while the weights pass by
constexpr int64_t kChunkRows = 128;        // rows of x at most
constexpr int64_t kBlocksAhead = 2;        // distance at which weights are asked for, in blocks of four rows

// Four columns of a weight in float32, and lines of a later block, one for each, that are asked for on the way.
template <typename W>
RAYLM_INLINE void widen(const W* const w[4], const W* next, int64_t stride, int64_t size, float* wide) {
  for (int n = 0; n < 4; ++n) {
    const W* line = w[n];
    const W* ahead = next + n * stride;
    for_each_vec(size, [&](int64_t k, auto load, auto store) {
      prefetch(ahead + k);
      store(wide + n * size + k, load(line + k));
    });
  }
}

// Four columns times rows first.. of x, into `out` (kLinearColumns floats a row). `wide`, where it is not null, has room
// for four columns: many rows meet a weight of 16 bits there, which is converted once.
template <typename W>
RAYLM_INLINE void linear_block(const LinearArgs& a, int64_t column, int64_t first, int64_t rows, float* wide, float* out) {
  const W* w[4];
  for (int64_t n = 0; n < 4; ++n) {
    const int64_t c = column + n < a.out_size ? column + n : a.out_size - 1;
    w[n] = static_cast<const W*>(a.weight) + c * a.weight_stride;
  }
  // While the tiles compute, they ask for the weights of the block after next, each for its share, so that memory and
  // arithmetic overlap. (Past the last weight this asks for lines that nobody needs, which is allowed.)
  const W* next = w[0] + kBlocksAhead * 4 * a.weight_stride;
  if (wide) {
    widen(w, next, a.weight_stride, a.in_size, wide);
    const float* lines[4] = {wide, wide + a.in_size, wide + 2 * a.in_size, wide + 3 * a.in_size};
    for_each_tile(rows, [&]<int Rows>(int64_t, int64_t row) __attribute__((always_inline)) {
      Vec sums[Rows];
      dot_tile<Rows>(a.x + (first + row) * a.x_stride, a.x_stride, lines, a.in_size, Ahead<float>{}, sums);
#pragma GCC unroll 8
      for (int m = 0; m < Rows; ++m) std::memcpy(out + (row + m) * kLinearColumns, &sums[m], 4 * sizeof(float));
    });
    return;
  }
  const int64_t tiles = num_tiles(rows);
  const int64_t per_tile = tiles >= 4 ? 1 : tiles >= 2 ? 2 : 4;
  for_each_tile(rows, [&]<int Rows>(int64_t tile, int64_t row) __attribute__((always_inline)) {
    Vec sums[Rows];
    Ahead<W> ahead{next + tile * per_tile * a.weight_stride, a.weight_stride, 0};
    if (tile * per_tile < 4) ahead.count = static_cast<int>(per_tile);
    dot_tile<Rows>(a.x + (first + row) * a.x_stride, a.x_stride, w, a.in_size, ahead, sums);
#pragma GCC unroll 8
    for (int m = 0; m < Rows; ++m) std::memcpy(out + (row + m) * kLinearColumns, &sums[m], 4 * sizeof(float));
  });
}

template <typename W>
inline void linear(const LinearArgs& a, int64_t begin, int64_t end) {
  // Rows of y are often a multiple of 4 KiB apart, which is one set of the cache: results are gathered here, and each
  // line of y is written once and whole.
  alignas(64) float results[kChunkRows * kLinearColumns];
  float* wide = nullptr;
  if (sizeof(W) < sizeof(float) && a.num_rows > kMaxRows) {
    wide = static_cast<float*>(std::malloc(4 * a.in_size * sizeof(float)));
  }
  int64_t chunk = kRowBytes / (a.in_size * 4);
  chunk = chunk > kChunkRows ? kChunkRows : chunk < 4 * kMaxRows ? 4 * kMaxRows : chunk;
  for (int64_t first = 0; first < a.num_rows; first += chunk) {
    const int64_t rows = a.num_rows - first < chunk ? a.num_rows - first : chunk;
    for (int64_t column = begin; column < end; column += kLinearColumns) {
      const int64_t columns = end - column < kLinearColumns ? end - column : kLinearColumns;
      for (int64_t n = 0; n < columns; n += 4) {
        linear_block<W>(a, column + n, first, rows, wide, results + n);
      }
      for (int64_t m = 0; m < rows; ++m) {
        float* out = a.out + (first + m) * a.out_size + column;
        const float* row = results + m * kLinearColumns;
        for_each_vec(columns, [&](int64_t i, auto load, auto store) {
          store(out + i, a.bias ? load(row + i) + load(a.bias + column + i) : load(row + i));
        });
      }
    }
  }
  std::free(wide);
}

}  // namespace
}  // namespace raylm
