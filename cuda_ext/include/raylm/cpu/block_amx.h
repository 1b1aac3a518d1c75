// Products of many rows of x with a tile of decoded weights in AMX's tile registers, whose layout is that of Tile: a line
// of a register is four neighbouring codes of each of sixteen rows of the weight. Codes of x have 16 bits: the products of
// their bytes are two.
#pragma once

#include "raylm/cpu/block_dot.h"

namespace raylm {
namespace {

#if defined(__AMX_INT8__)

constexpr int64_t kTileRows = 12;  // fewer are faster in vectors, and so are parts of fewer than kQuantised values
constexpr int kRegisterRows = 16, kRegisterBytes = 64;

// The thread's tile registers, for as long as this lives: 0 and 1 are sums of low and high bytes, 2 and 3 those of x, 4
// has weights.
class TileRegisters {
 public:
  // For so many rows of x; does nothing for 0 of them.
  RAYLM_INLINE explicit TileRegisters(int64_t rows) : in_use_(rows > 0) {
    if (!in_use_) return;
    struct {
      uint8_t palette = 1, start = 0, unused[14] = {};
      uint16_t bytes[16] = {};
      uint8_t rows[16] = {};
    } shape;
    const auto most = static_cast<uint8_t>(rows < kRegisterRows ? rows : kRegisterRows);
    for (int i = 0; i < 4; ++i) {
      shape.rows[i] = most;
      shape.bytes[i] = i < 2 ? kRegisterBytes : kQuantised;
    }
    shape.rows[4] = kQuantised / 4;
    shape.bytes[4] = kRegisterBytes;
    asm volatile("" ::"m"(shape) : "memory");  // GCC 12 takes it that only the first bytes are read
    _tile_loadconfig(&shape);
  }
  RAYLM_INLINE ~TileRegisters() {
    if (in_use_) _tile_release();
  }
  TileRegisters(const TileRegisters&) = delete;
  TileRegisters& operator=(const TileRegisters&) = delete;

 private:
  bool in_use_;
};

struct BytePairs {
  alignas(64) int32_t low[kRegisterRows][kRegisterBytes / 4] = {}, high[kRegisterRows][kRegisterBytes / 4] = {};

  RAYLM_INLINE VecI dot(int row) const {
    VecI l, h;
    std::memcpy(&l, low[row], sizeof(l));
    std::memcpy(&h, high[row], sizeof(h));
    return (h << 8) + l;
  }
};

// The products of kQuantised values. `x` are their low bytes in the first of the rows, `stride` bytes apart; the high ones
// follow.
template <bool Signed>
RAYLM_INLINE void multiply_part(const uint8_t* x, int64_t stride, const VecU* codes, BytePairs& to) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_loadd(4, codes, kRegisterBytes);
  _tile_loadd(2, x, stride);
  _tile_loadd(3, x + kQuantised, stride);
  if constexpr (Signed) {
    _tile_dpbusd(0, 2, 4);
    _tile_dpbssd(1, 3, 4);
  } else {
    _tile_dpbuud(0, 2, 4);
    _tile_dpbsud(1, 3, 4);
  }
  _tile_stored(0, to.low, kRegisterBytes);
  _tile_stored(1, to.high, kRegisterBytes);
}

// As dot_tiles, with the same order of additions, for at least kTileRows rows of x. Vectors add up one part while tiles
// multiply the next.
template <typename C>
__attribute__((noinline)) void multiply_in_tiles(TileBlock tile, int count, const QuantisedRows& x, int64_t row,
                                                 int64_t rows, int64_t first, float* results) {
  const int64_t stride = kCodeBytes * x.size, scales_stride = x.size / kQuantised;
  BytePairs pairs[2];
  for (int64_t m = 0; m < rows; m += kRegisterRows) {
    // The last rows come with some before them, whose sums are not looked at.
    const int64_t from = rows < kRegisterRows ? 0 : m < rows - kRegisterRows ? m : rows - kRegisterRows;
    const uint8_t* bytes = x.codes + (row + from) * stride + first * kCodeBytes * kQuantised;
    const RowScales* scales = x.scales + (row + from) * scales_stride + first;
    const auto is_there = [&](int i) { return from + i < rows; };
    Vec sums[kRegisterRows];
#pragma GCC unroll 16
    for (int i = 0; i < kRegisterRows; ++i) sums[i] = load(results + (is_there(i) ? from + i : from) * kLinearColumns);
    const auto multiply = [&](int s) __attribute__((always_inline)) {
      const uint8_t* x_bytes = bytes + s * kCodeBytes * kQuantised;
      multiply_part<C::kSigned>(x_bytes, stride, tile.codes + s * (kQuantised / 4), pairs[s % 2]);
    };
    const auto add = [&](int s) __attribute__((always_inline)) {
      const Vec weight_min = C::kSigned ? Vec{} : tile.min[s];
#pragma GCC unroll 16
      for (int i = 0; i < kRegisterRows; ++i) {
        const RowScales& of_row = scales[s + (is_there(i) ? i : 0) * scales_stride];
        add_part<C>(sums[i], pairs[s % 2].dot(i), tile.scale[s], weight_min, of_row.scale, of_row.sums[0]);
      }
    };
    multiply(0);
    for (int s = 1; s < count; ++s) {
      multiply(s);
      add(s - 1);
    }
    add(count - 1);
#pragma GCC unroll 16
    for (int i = 0; i < kRegisterRows; ++i) {
      if (from + i >= m && is_there(i)) store(results + (from + i) * kLinearColumns, sums[i]);
    }
  }
}

#else

constexpr int64_t kTileRows = 0;

struct TileRegisters {
  RAYLM_INLINE explicit TileRegisters(int64_t) {}
};

template <typename C>
RAYLM_INLINE void multiply_in_tiles(TileBlock, int, const QuantisedRows&, int64_t, int64_t, int64_t, float*) {}

#endif

}  // namespace
}  // namespace raylm
