// Products of rows of x in 16 bits with a tile of decoded weights, in registers.
#pragma once

#include "raylm/cpu/block_tile.h"
#include "raylm/cpu/kernels.h"

namespace raylm {
namespace {

// Where the value i of a row of x has its code.
constexpr int64_t place_of(int64_t i) { return (i & ~3) | (i & 1) << 1 | (i >> 1 & 1); }

// Rows of x at once, and tiles beside each other: as many sums as the registers hold.
#if defined(__AVX2__)
constexpr int kBlockRows = 4;
#else
constexpr int kBlockRows = 2;
#endif
#if defined(__AVX2__)
constexpr int kTilesAtOnce = kLinearColumns / kWidth;
#else
constexpr int kTilesAtOnce = 1;
#endif

#if defined(__AVX512VNNI__)
constexpr bool kReadsBytes = true;
#else
constexpr bool kReadsBytes = false;
#endif

#if defined(__AVX2__)
#if defined(__AVX512F__)
using Wide = __m512i;
RAYLM_INLINE Wide same(uint32_t word) { return _mm512_set1_epi32(static_cast<int>(word)); }
RAYLM_INLINE Wide multiply_pairs(Wide a, Wide b) { return _mm512_madd_epi16(a, b); }
RAYLM_INLINE Wide up_8_bits(Wide a) { return _mm512_slli_epi16(a, 8); }
RAYLM_INLINE Wide down_8_bits(Wide a) { return _mm512_srli_epi16(a, 8); }
RAYLM_INLINE Wide down_8_bits_signed(Wide a) { return _mm512_srai_epi16(a, 8); }
#else
using Wide = __m256i;
RAYLM_INLINE Wide same(uint32_t word) { return _mm256_set1_epi32(static_cast<int>(word)); }
RAYLM_INLINE Wide multiply_pairs(Wide a, Wide b) { return _mm256_madd_epi16(a, b); }
RAYLM_INLINE Wide up_8_bits(Wide a) { return _mm256_slli_epi16(a, 8); }
RAYLM_INLINE Wide down_8_bits(Wide a) { return _mm256_srli_epi16(a, 8); }
RAYLM_INLINE Wide down_8_bits_signed(Wide a) { return _mm256_srai_epi16(a, 8); }
#endif

struct Pairs {
  Wide even, odd;
};

// The bytes 0 and 2 of every word, and 1 and 3, as 16 bits each.
template <bool Signed>
RAYLM_INLINE Pairs widen(Wide codes) {
  if constexpr (Signed) return {down_8_bits_signed(up_8_bits(codes)), down_8_bits_signed(codes)};
  else return {down_8_bits(up_8_bits(codes)), down_8_bits(codes)};
}

// to += the sum of the two products in each word.
RAYLM_INLINE void multiply_add(VecI& to, Wide a, Wide b) {
  Wide sum = bit_cast<Wide>(to + bit_cast<VecI>(multiply_pairs(a, b)));
  // Keeps the compiler from turning the chain of additions into a tree, whose leaves would not fit the registers.
  asm("" : "+v"(sum));
  to = bit_cast<VecI>(sum);
}
#endif

#if defined(__AVX512VNNI__)
// The low bytes of codes, and kQuantised bytes behind them the high ones.
RAYLM_INLINE void store_bytes(uint8_t* p, VecI code) {
  const Wide all = bit_cast<Wide>(code);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(all));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p + kQuantised), _mm512_cvtepi32_epi8(_mm512_srai_epi32(all, 8)));
}

// As add_products, by bytes, which need not be widened. The instruction multiplies bytes without a sign by bytes with one:
// the low bytes of x, which `x` is, by codes, and codes by the high bytes. Those without a sign are below 128; Signed ones
// plus 128 have none, and what that adds, RowScales::high_bytes, is taken from the sums.
template <bool Signed, int Count, int M, int N>
RAYLM_INLINE void add_byte_products(const VecU* const codes[N], const uint8_t* x, int64_t stride,
                                    const RowScales* scales, int64_t scales_stride, VecI (&dot)[N][M]) {
  VecI high[N][M] = {};
#pragma GCC unroll 8
  for (int g = 0; g < Count; ++g) {
    Wide weights[N], positive[N];
#pragma GCC unroll 2
    for (int t = 0; t < N; ++t) {
      weights[t] = bit_cast<Wide>(codes[t][g]);
      positive[t] = Signed ? bit_cast<Wide>(codes[t][g] ^ every_byte(128)) : weights[t];
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const uint8_t* four = x + m * stride + 4 * g;
      const Wide low_bytes = same(load_u32(four)), high_bytes = same(load_u32(four + kQuantised));
#pragma GCC unroll 2
      for (int t = 0; t < N; ++t) {
        dot[t][m] = bit_cast<VecI>(_mm512_dpbusd_epi32(bit_cast<Wide>(dot[t][m]), low_bytes, weights[t]));
        high[t][m] = bit_cast<VecI>(_mm512_dpbusd_epi32(bit_cast<Wide>(high[t][m]), positive[t], high_bytes));
      }
    }
  }
  for (int m = 0; m < M; ++m) {
    const VecI less = Signed ? bit_cast<VecI>(_mm512_set1_epi32(scales[m * scales_stride].high_bytes)) : VecI{};
    for (int t = 0; t < N; ++t) dot[t][m] += (high[t][m] << 8) - less;
  }
}
#else
RAYLM_INLINE void store_bytes(uint8_t*, VecI) {}

template <bool Signed, int Count, int M, int N>
RAYLM_INLINE void add_byte_products(const VecU* const*, const uint8_t*, int64_t, const RowScales*, int64_t,
                                    VecI (&)[N][M]) {}
#endif

// dot[t][m] += for each lane the sum of the products of Count words of codes of tile t with as many of row m of x. Sums
// fit 32 bits: codes of weights have at most 8.
template <bool Signed, int Count, int M, int N>
RAYLM_INLINE void add_products(const VecU* const codes[N], const int16_t* x, int64_t stride, VecI (&dot)[N][M]) {
#if defined(__AVX2__)
  const int16_t* rows[M];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
    rows[m] = x + m * stride;
    asm("" : "+r"(rows[m]));  // or the compiler keeps the address of every word, for which there are no registers
  }
#pragma GCC unroll 8
  for (int g = 0; g < Count; ++g) {
    Pairs pairs[N];
#pragma GCC unroll 2
    for (int t = 0; t < N; ++t) pairs[t] = widen<Signed>(bit_cast<Wide>(codes[t][g]));
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const Wide even = same(load_u32(rows[m] + 4 * g)), odd = same(load_u32(rows[m] + 4 * g + 2));
#pragma GCC unroll 2
      for (int t = 0; t < N; ++t) {
        multiply_add(dot[t][m], pairs[t].even, even);
        multiply_add(dot[t][m], pairs[t].odd, odd);
      }
    }
  }
#else
  for (int g = 0; g < Count; ++g) {
    for (int t = 0; t < N; ++t) {
      uint8_t code[4 * kWidth];
      std::memcpy(code, &codes[t][g], sizeof(code));
      for (int m = 0; m < M; ++m) {
        const int16_t* four = x + m * stride + 4 * g;
        for (int i = 0; i < 4 * kWidth; ++i) {
          dot[t][m][i / 4] += (Signed ? static_cast<int8_t>(code[i]) : code[i]) * four[place_of(i % 4)];
        }
      }
    }
  }
#endif
}

// What the products need of M rows of x from a value on that a block of kQuantised begins with.
struct RowsOfX {
  const uint8_t* codes;
  const RowScales* scales;
  int64_t codes_stride, scales_stride;

  RAYLM_INLINE RowsOfX(const QuantisedRows& x, int64_t row, int64_t block)
      : codes(x.codes + (row * x.size + block * kQuantised) * kCodeBytes),
        scales(x.scales + row * (x.size / kQuantised) + block),
        codes_stride(x.size * kCodeBytes),
        scales_stride(x.size / kQuantised) {}

  // On to the next block of kQuantised values.
  RAYLM_INLINE void advance() {
    codes += kQuantised * kCodeBytes;
    ++scales;
  }
};

// sum += a part's products of codes, as numbers: `scale` and `code_sum` are those of a row of x.
template <typename C>
RAYLM_INLINE void add_part(Vec& sum, VecI dot, Vec weight_scale, Vec weight_min, float scale, float code_sum) {
  sum = fused_multiply_add(__builtin_convertvector(dot, Vec), weight_scale * scale, sum);
  if constexpr (!C::kSigned) sum = fused_multiply_add(weight_min, splat(code_sum), sum);
}

// Which of RowScales::sums is that of a part.
template <typename C>
constexpr int sum_of_part(int part) {
  return C::kPart == kQuantised ? 0 : 1 + part;
}

// sums[t][m] += row m of x times the rows of tile t, for M rows, N tiles and `count` times kQuantised values. The order
// of additions is the same for every M, so that a row's result does not depend on the rows beside it.
template <typename C, int M, int N>
RAYLM_INLINE void add_blocks(const TileBlock (&tiles)[N], int count, RowsOfX x, Vec (&sums)[N][M]) {
  constexpr int kParts = kQuantised / C::kPart, kWords = C::kPart / 4;
  for (int b = 0; b < count; ++b, x.advance()) {
#pragma GCC unroll 2
    for (int part = 0; part < kParts; ++part) {
      const int s = b * kParts + part;
      const VecU* codes[N];
      for (int t = 0; t < N; ++t) codes[t] = tiles[t].codes + s * kWords;
      VecI dot[N][M] = {};
      if constexpr (kReadsBytes) {
        const uint8_t* of_part = x.codes + part * C::kPart;
        add_byte_products<C::kSigned, kWords, M, N>(codes, of_part, x.codes_stride, x.scales, x.scales_stride, dot);
      } else {
        const auto* of_part = reinterpret_cast<const int16_t*>(x.codes) + part * C::kPart;
        add_products<C::kSigned, kWords, M, N>(codes, of_part, x.codes_stride / kCodeBytes, dot);
      }
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        const RowScales& of_row = x.scales[m * x.scales_stride];
        const float scale = of_row.scale, sum = of_row.sums[sum_of_part<C>(part)];
#pragma GCC unroll 2
        for (int t = 0; t < N; ++t) {
          add_part<C>(sums[t][m], dot[t][m], tiles[t].scale[s], C::kSigned ? Vec{} : tiles[t].min[s], scale, sum);
        }
      }
    }
  }
}

// results += rows of x times the tiles of kLinearColumns rows of a weight. All kinds whose codes are alike share this
// function.
template <typename C>
__attribute__((noinline)) void dot_tiles(Tile* tiles, int count, const QuantisedRows& x, int64_t row,
                                         int64_t rows, int64_t first, float* results) {
  constexpr int N = kTilesAtOnce;
  const auto dot = [&]<int M>(int64_t m) __attribute__((always_inline)) {
    for (int64_t n = 0; n < kLinearColumns / kWidth; n += N) {
      const auto at = [&](int t, int i) { return results + (m + i) * kLinearColumns + (n + t) * kWidth; };
      TileBlock blocks[N];
      Vec sums[N][M];
#pragma GCC unroll 2
      for (int t = 0; t < N; ++t) {
        blocks[t] = tiles[n + t].begin();
#pragma GCC unroll 8
        for (int i = 0; i < M; ++i) sums[t][i] = load(at(t, i));
      }
      add_blocks<C, M, N>(blocks, count, RowsOfX(x, row + m, first), sums);
#pragma GCC unroll 2
      for (int t = 0; t < N; ++t) {
#pragma GCC unroll 8
        for (int i = 0; i < M; ++i) store(at(t, i), sums[t][i]);
      }
    }
  };
  int64_t m = 0;
  for (; m + kBlockRows <= rows; m += kBlockRows) dot.template operator()<kBlockRows>(m);
  switch (rows - m) {
    case 1: dot.template operator()<1>(m); break;
#if defined(__AVX2__)
    case 2: dot.template operator()<2>(m); break;
    case 3: dot.template operator()<3>(m); break;
#endif
  }
}

// The same for one row of x and `count` blocks of kWidth rows of a weight: what is decoded stays in registers where it
// fits.
template <typename Kind>
RAYLM_INLINE void dot_row(const uint8_t* const* lines, int64_t first, int count, BlocksAhead ahead,
                          const QuantisedRows& x, int64_t row, float* results) {
  using C = typename Reader<Kind>::Like;
  constexpr int kPerBlock = Kind::kValues / kQuantised;
  Vec sums[1][1] = {{load(results)}};
  for (int64_t b = first; b < first + count; ++b) {
    ahead.step();
    VecU codes[Kind::kValues / 4];
    Vec scale[Kind::kValues / C::kPart], min[Kind::kValues / C::kPart];
    Reader<Kind>::decode({lines, b * Kind::kBytes}, {codes, scale, min});
    const TileBlock blocks[1] = {{codes, scale, min}};
    add_blocks<C, 1, 1>(blocks, kPerBlock, RowsOfX(x, row, b * kPerBlock), sums);
  }
  store(results, sums[0][0]);
}

}  // namespace
}  // namespace raylm
