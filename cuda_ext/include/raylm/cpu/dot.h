// The inner product of a few rows with four rows, held in registers: the core of linear and of attention scores.
#pragma once

#include "raylm/cpu/vec.h"

namespace raylm {
namespace {

// Rows of x at once: as many accumulators as the registers hold.
#if defined(__AVX512F__)
constexpr int kMaxRows = 6;
#elif defined(__AVX2__)
constexpr int kMaxRows = 3;
#else
constexpr int kMaxRows = 2;
#endif

// Brings a line into the second-level cache: it has room for more outstanding requests than the first, which is what
// limits one core's share of the memory's bandwidth.
RAYLM_INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }

// Rows to bring into the cache, a line of each at every step.
template <typename W>
struct Ahead {
  const W* rows = nullptr;
  int64_t stride = 0;
  int count = 0;
};

// sums[m] = the products of row m of x with w[0..3], in its first four elements. The order of additions is the same
// for every Rows, so that a row's result does not depend on the rows beside it. The rows of `ahead` are brought
// into the cache on the way.
template <int Rows, typename W>
RAYLM_INLINE void dot_tile(const float* x, int64_t x_stride, const W* const w[4], int64_t size,
                           Ahead<W> ahead, Vec sums[Rows]) {
  Vec acc[Rows][4] = {};
  const auto step = [&](int64_t k, auto load_x, auto load_w) {
    Vec row[4];
#pragma GCC unroll 4
    for (int n = 0; n < 4; ++n) row[n] = load_w(w[n] + k);
#pragma GCC unroll 8
    for (int m = 0; m < Rows; ++m) {
      const Vec v = load_x(x + m * x_stride + k);
#pragma GCC unroll 4
      for (int n = 0; n < 4; ++n) acc[m][n] += v * row[n];
    }
  };
  const auto whole = [](const auto* p) __attribute__((always_inline)) { return load(p); };
  int64_t k = 0;
  for (; k + kWidth <= size; k += kWidth) {
    for (int n = 0; n < ahead.count; ++n) prefetch(ahead.rows + n * ahead.stride + k);
    step(k, whole, whole);
  }
  if (const int64_t rest = size - k; rest > 0) {
    const auto part = [rest](const auto* p) { return load_part(p, rest); };
    step(k, part, part);
  }
#pragma GCC unroll 8
  for (int m = 0; m < Rows; ++m) sums[m] = sum4(acc[m][0], acc[m][1], acc[m][2], acc[m][3]);
}

constexpr int64_t num_tiles(int64_t rows) { return (rows + kMaxRows - 1) / kMaxRows; }

// Calls body.template operator()<Rows>(tile, first row) for tiles of nearly equal size that cover `rows` rows.
template <typename Body>
RAYLM_INLINE void for_each_tile(int64_t rows, const Body& body) {
  const int64_t tiles = num_tiles(rows);
  int64_t first = 0;
  for (int64_t t = 0; t < tiles; ++t) {
    const int64_t size = (rows - first + tiles - t - 1) / (tiles - t);
    switch (size) {
      case 1: body.template operator()<1>(t, first); break;
      case 2: body.template operator()<2>(t, first); break;
#if defined(__AVX2__)
      case 3: body.template operator()<3>(t, first); break;
#endif
#if defined(__AVX512F__)
      case 4: body.template operator()<4>(t, first); break;
      case 5: body.template operator()<5>(t, first); break;
      case 6: body.template operator()<6>(t, first); break;
#endif
    }
    first += size;
  }
}

}  // namespace
}  // namespace raylm
