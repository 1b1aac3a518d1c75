// Quantised weights of kWidth rows, decoded so that a vector has four neighbouring codes of every row: lane r of
// codes[g] is the codes 4 g to 4 g + 3 of row r. Products then need no sum across a vector.
#pragma once

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "raylm/cpu/block_kinds.h"
#include "raylm/cpu/dot.h"
#include "raylm/cpu/vec.h"

namespace raylm {
namespace {

constexpr int kTileValues = 512;  // of each row, at most

// Weight = code * scale + min, for parts of the values. Codes are bytes.
struct TileBlock {
  VecU* codes;
  Vec* scale;
  Vec* min;
};

struct Tile {
  alignas(64) VecU codes[kTileValues / 4];
  Vec scale[kTileValues / 16];
  Vec min[kTileValues / 16];

  RAYLM_INLINE TileBlock begin() { return {codes, scale, min}; }
};

// One block of each of kWidth rows. An offset for all costs less than kWidth pointers that move.
struct Rows {
  const uint8_t* const* lines;
  int64_t offset;

  RAYLM_INLINE const uint8_t* at(int row, int byte) const { return lines[row] + offset + byte; }
};

RAYLM_INLINE uint32_t load_u32(const void* p) {
  uint32_t value;
  std::memcpy(&value, p, 4);
  return value;
}

// Four bytes of every row.
RAYLM_INLINE VecU words(Rows p, int offset) {
  VecU v;
#if defined(__AVX512F__)
  const auto at = [&](int r) { return static_cast<int>(load_u32(p.at(r, offset))); };
  v = bit_cast<VecU>(_mm512_set_epi32(at(15), at(14), at(13), at(12), at(11), at(10), at(9), at(8), at(7), at(6), at(5),
                                      at(4), at(3), at(2), at(1), at(0)));
#elif defined(__AVX2__)
  const auto at = [&](int r) { return static_cast<int>(load_u32(p.at(r, offset))); };
  v = bit_cast<VecU>(_mm256_set_epi32(at(7), at(6), at(5), at(4), at(3), at(2), at(1), at(0)));
#else
  for (int r = 0; r < kWidth; ++r) v[r] = load_u32(p.at(r, offset));
#endif
  return v;
}

// Sixteen bytes of every row, as four vectors.
RAYLM_INLINE void words4(Rows p, int offset, VecU out[4]) {
#if defined(__AVX2__)
  // Vector i has rows i, i + 4, ... in its parts of 128 bits; each part is then a matrix of 4 by 4 words to transpose.
  const auto at = [&](int r) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p.at(r, offset))); };
#if defined(__AVX512F__)
  __m512i a[4];
  for (int i = 0; i < 4; ++i) {
    a[i] = _mm512_inserti32x4(_mm512_castsi128_si512(at(i)), at(i + 4), 1);
    a[i] = _mm512_inserti32x4(_mm512_inserti32x4(a[i], at(i + 8), 2), at(i + 12), 3);
  }
  const __m512i b0 = _mm512_unpacklo_epi32(a[0], a[1]), b1 = _mm512_unpackhi_epi32(a[0], a[1]);
  const __m512i b2 = _mm512_unpacklo_epi32(a[2], a[3]), b3 = _mm512_unpackhi_epi32(a[2], a[3]);
  out[0] = bit_cast<VecU>(_mm512_unpacklo_epi64(b0, b2));
  out[1] = bit_cast<VecU>(_mm512_unpackhi_epi64(b0, b2));
  out[2] = bit_cast<VecU>(_mm512_unpacklo_epi64(b1, b3));
  out[3] = bit_cast<VecU>(_mm512_unpackhi_epi64(b1, b3));
#else
  __m256i a[4];
  for (int i = 0; i < 4; ++i) a[i] = _mm256_inserti128_si256(_mm256_castsi128_si256(at(i)), at(i + 4), 1);
  const __m256i b0 = _mm256_unpacklo_epi32(a[0], a[1]), b1 = _mm256_unpackhi_epi32(a[0], a[1]);
  const __m256i b2 = _mm256_unpacklo_epi32(a[2], a[3]), b3 = _mm256_unpackhi_epi32(a[2], a[3]);
  out[0] = bit_cast<VecU>(_mm256_unpacklo_epi64(b0, b2));
  out[1] = bit_cast<VecU>(_mm256_unpackhi_epi64(b0, b2));
  out[2] = bit_cast<VecU>(_mm256_unpacklo_epi64(b1, b3));
  out[3] = bit_cast<VecU>(_mm256_unpackhi_epi64(b1, b3));
#endif
#else
  for (int i = 0; i < 4; ++i) out[i] = words(p, offset + 4 * i);
#endif
}

// Each byte of v, which is below 16, becomes that entry of the table.
RAYLM_INLINE VecU look_up(const int8_t table[16], VecU v) {
#if defined(__AVX512F__)
  const __m512i entries = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
  return bit_cast<VecU>(_mm512_shuffle_epi8(entries, bit_cast<__m512i>(v)));
#elif defined(__AVX2__)
  const __m256i entries = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
  return bit_cast<VecU>(_mm256_shuffle_epi8(entries, bit_cast<__m256i>(v)));
#else
  uint8_t bytes[4 * kWidth];
  std::memcpy(bytes, &v, sizeof(v));
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(table[byte]);
  std::memcpy(&v, bytes, sizeof(v));
  return v;
#endif
}

constexpr uint32_t every_byte(uint32_t byte) { return byte * 0x01010101u; }

// Bits 4 g to 4 g + 3 of every word, as the bits 4 of its bytes.
RAYLM_INLINE VecU spread_bits(VecU v, int g) {
#if defined(__AVX2__)
  // The byte that has them, four times; then its bits, one for each.
  const __m128i lanes = _mm_setr_epi32(0x00000000, 0x04040404, 0x08080808, 0x0c0c0c0c);
  const __m128i byte = _mm_add_epi8(lanes, _mm_set1_epi8(static_cast<char>(g / 2)));
  const int bits = g % 2 == 0 ? 0x08040201 : static_cast<int>(0x80402010);
#if defined(__AVX512F__)
  const __m512i four = _mm512_shuffle_epi8(bit_cast<__m512i>(v), _mm512_broadcast_i32x4(byte));
  const __mmask64 found = _mm512_test_epi8_mask(four, _mm512_set1_epi32(bits));
  return bit_cast<VecU>(_mm512_maskz_mov_epi8(found, _mm512_set1_epi8(16)));
#else
  const __m256i mask = _mm256_set1_epi32(bits);
  const __m256i four = _mm256_shuffle_epi8(bit_cast<__m256i>(v), _mm256_broadcastsi128_si256(byte));
  return bit_cast<VecU>(_mm256_cmpeq_epi8(_mm256_and_si256(four, mask), mask)) & every_byte(16);
#endif
#else
  const VecU bits = (v >> (4 * g)) & 15u;
  return (bits << 4 | bits << 11 | bits << 18 | bits << 25) & every_byte(16);
#endif
}

// The bits of every byte that `mask` has once they have moved from bit `from` to bit `to`.
RAYLM_INLINE VecU move_bits(VecU v, int from, int to, uint32_t mask) {
  return (from > to ? v >> (from - to) : v << (to - from)) & every_byte(mask);
}

RAYLM_INLINE Vec to_float(VecU small) { return __builtin_convertvector(bit_cast<VecI>(small), Vec); }

struct Halves {
  Vec low, high;
};

// The two float16 that each word is.
RAYLM_INLINE Halves halves(VecU v) {
#if defined(__AVX512F__)
  const __m512i both = bit_cast<__m512i>(v);
  return {bit_cast<Vec>(_mm512_cvtph_ps(_mm512_cvtepi32_epi16(both))),
          bit_cast<Vec>(_mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(both, 16))))};
#elif defined(__AVX2__)
  // Within each 128 bits the low halves first, then the high ones.
  const __m256i order = _mm256_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15, 0, 1, 4, 5, 8, 9, 12, 13,
                                         2, 3, 6, 7, 10, 11, 14, 15);
  const __m256i apart = _mm256_permute4x64_epi64(_mm256_shuffle_epi8(bit_cast<__m256i>(v), order), 0xd8);
  return {bit_cast<Vec>(_mm256_cvtph_ps(_mm256_castsi256_si128(apart))),
          bit_cast<Vec>(_mm256_cvtph_ps(_mm256_extracti128_si256(apart, 1)))};
#else
  return {half_to_float(v & 0xffffu), half_to_float(v >> 16)};
#endif
}

RAYLM_INLINE Vec half_at(Rows p, int offset) { return halves(words(p, offset)).low; }

// The float16 that the two last bytes of a block are.
RAYLM_INLINE Vec half_before(Rows p, int end) { return halves(words(p, end - 4)).high; }

RAYLM_INLINE Vec byte_to_float(VecU v, int byte) { return to_float((v >> (8 * byte)) & 255u); }

// Codes of a block's first 32 values by the 16 bytes at offset: lower halves of the bytes, then the upper ones.
template <typename Decode>
RAYLM_INLINE void nibbles(Rows p, int offset, VecU* codes, const Decode& decode) {
  VecU v[4];
  words4(p, offset, v);
  for (int g = 0; g < 4; ++g) {
    codes[g] = decode(v[g] & every_byte(15), g);
    codes[4 + g] = decode((v[g] >> 4) & every_byte(15), 4 + g);
  }
}

constexpr auto kAsTheyAre = [](VecU v, int) __attribute__((always_inline)) { return v; };

// How the codes of a kind are multiplied: parts of kPart values share scale and min; codes are bytes, signed or not.
// Signed ones have no min.
template <int Part, bool Signed = false>
struct Codes {
  using Like = Codes;
  static constexpr int kPart = Part;
  static constexpr bool kSigned = Signed;
};

template <typename Kind>
struct Reader;  // derives from Codes

template <>
struct Reader<Q4_0> : Codes<32> {
  static RAYLM_INLINE void decode(Rows p, TileBlock to) {
    nibbles(p, 2, to.codes, kAsTheyAre);
    to.scale[0] = half_at(p, 0);
    to.min[0] = -8.0f * to.scale[0];
  }
};

template <>
struct Reader<Q4_1> : Codes<32> {
  static RAYLM_INLINE void decode(Rows p, TileBlock to) {
    nibbles(p, 4, to.codes, kAsTheyAre);
    const Halves both = halves(words(p, 0));
    to.scale[0] = both.low;
    to.min[0] = both.high;
  }
};

template <>
struct Reader<Q5_0> : Codes<32> {
  static RAYLM_INLINE void decode(Rows p, TileBlock to) {
    const VecU high = words(p, 2);
    nibbles(p, 6, to.codes, [&](VecU v, int g) { return v | spread_bits(high, g); });
    to.scale[0] = half_at(p, 0);
    to.min[0] = -16.0f * to.scale[0];
  }
};

template <>
struct Reader<Q5_1> : Codes<32> {
  static RAYLM_INLINE void decode(Rows p, TileBlock to) {
    const VecU high = words(p, 4);
    nibbles(p, 8, to.codes, [&](VecU v, int g) { return v | spread_bits(high, g); });
    const Halves both = halves(words(p, 0));
    to.scale[0] = both.low;
    to.min[0] = both.high;
  }
};

template <>
struct Reader<Q8_0> : Codes<32, true> {
  static RAYLM_INLINE void decode(Rows p, TileBlock to) {
    words4(p, 2, to.codes);
    words4(p, 18, to.codes + 4);
    to.scale[0] = half_at(p, 0);
  }
};

template <>
struct Reader<IQ4_NL> : Codes<32, true> {
  static RAYLM_INLINE void decode(Rows p, TileBlock to) {
    nibbles(p, 2, to.codes, [](VecU nibble, int) { return look_up(kNonLinearValues, nibble); });
    to.scale[0] = half_at(p, 0);
  }
};

template <>
struct Reader<MXFP4> : Codes<32, true> {
  static RAYLM_INLINE void decode(Rows p, TileBlock to) {
    nibbles(p, 1, to.codes, [](VecU nibble, int) { return look_up(kTwiceE2M1, nibble); });
    const VecU e = words(p, 0) & 255u, is_small = bit_cast<VecU>(e < 2u);
    to.scale[0] = bit_cast<Vec>((is_small & ((e + 1u) << 21)) | (~is_small & ((e - 1u) << 23)));
  }
};

// Codes of two bits of 128 values by the 32 bytes at offset.
template <typename Decode>
RAYLM_INLINE void pairs_of_bits(Rows p, int offset, VecU* codes, const Decode& decode) {
  VecU v[8];
  words4(p, offset, v);
  words4(p, offset + 16, v + 4);
  for (int i = 0; i < 4; ++i) {
    for (int g = 0; g < 8; ++g) codes[8 * i + g] = decode((v[g] >> (2 * i)) & every_byte(3), 8 * i + g);
  }
}

template <>
struct Reader<Q2_K> : Codes<16> {
  static RAYLM_INLINE void decode(Rows p, TileBlock to) {
    VecU parts[4];
    words4(p, 0, parts);
    const Halves both = halves(words(p, 80));
    const Vec d = both.low, min = both.high;
    for (int s = 0; s < 16; ++s) {
      to.scale[s] = d * to_float((parts[s / 4] >> (8 * (s % 4))) & 15u);
      to.min[s] = -min * to_float((parts[s / 4] >> (8 * (s % 4) + 4)) & 15u);
    }
    for (int h = 0; h < 2; ++h) pairs_of_bits(p, 16 + 32 * h, to.codes + 32 * h, kAsTheyAre);
  }
};

template <>
struct Reader<Q3_K> : Codes<16> {
  static RAYLM_INLINE void decode(Rows p, TileBlock to) {
    const VecU low[2] = {words(p, 96), words(p, 100)}, high = words(p, 104);
    const Vec d = half_before(p, 110);
    for (int s = 0; s < 16; ++s) {
      const VecU four = (low[s / 4 % 2] >> (8 * (s % 4) + s / 8 * 4)) & 15u;
      const VecU two = (high >> (8 * (s % 4) + s / 4 * 2)) & 3u;
      to.scale[s] = d * (to_float(four | two << 4) - 32.0f);
      to.min[s] = -4.0f * to.scale[s];
    }
    VecU masks[8];
    words4(p, 0, masks);
    words4(p, 16, masks + 4);
    for (int h = 0; h < 2; ++h) {
      pairs_of_bits(p, 32 + 32 * h, to.codes + 32 * h, [&](VecU v, int i) {
        return v | move_bits(masks[i % 8], 4 * h + i / 8, 2, 4);
      });
    }
  }
};

// Scales and minima of a block of Q4_K or Q5_K, which are its first 16 bytes.
RAYLM_INLINE void six_bits(Rows p, const TileBlock& to) {
  VecU head[4];
  words4(p, 0, head);
  const Halves both = halves(head[0]);
  const Vec d = both.low, min = both.high;
  const VecU upper = (head[1] >> 2) & every_byte(0x30), min_upper = (head[2] >> 2) & every_byte(0x30);
  const VecU scales[2] = {head[1] & every_byte(63), (head[3] & every_byte(15)) | upper};
  const VecU mins[2] = {head[2] & every_byte(63), ((head[3] >> 4) & every_byte(15)) | min_upper};
  for (int s = 0; s < 8; ++s) {
    to.scale[s] = d * byte_to_float(scales[s / 4], s % 4);
    to.min[s] = -min * byte_to_float(mins[s / 4], s % 4);
  }
}

// Codes of four bits of 64 values by the 32 bytes at offset.
template <typename Decode>
RAYLM_INLINE void nibbles64(Rows p, int offset, VecU* codes, const Decode& decode) {
  VecU v[8];
  words4(p, offset, v);
  words4(p, offset + 16, v + 4);
  for (int g = 0; g < 8; ++g) {
    codes[g] = decode(v[g] & every_byte(15), 0, g);
    codes[8 + g] = decode((v[g] >> 4) & every_byte(15), 1, g);
  }
}

template <>
struct Reader<Q4_K> : Codes<32> {
  static RAYLM_INLINE void decode(Rows p, TileBlock to) {
    six_bits(p, to);
    for (int j = 0; j < 4; ++j) {
      nibbles64(p, 16 + 32 * j, to.codes + 16 * j, [](VecU v, int, int) { return v; });
    }
  }
};

template <>
struct Reader<Q5_K> : Codes<32> {
  static RAYLM_INLINE void decode(Rows p, TileBlock to) {
    six_bits(p, to);
    VecU high[8];
    words4(p, 16, high);
    words4(p, 32, high + 4);
    for (int j = 0; j < 4; ++j) {
      nibbles64(p, 48 + 32 * j, to.codes + 16 * j, [&](VecU v, int upper, int g) {
        return v | move_bits(high[g], 2 * j + upper, 4, 16);
      });
    }
  }
};

template <>
struct Reader<Q6_K> : Codes<16> {
  static RAYLM_INLINE void decode(Rows p, TileBlock to) {
    VecU parts[4];
    words4(p, 192, parts);
    const Vec d = half_before(p, 210);
    for (int s = 0; s < 16; ++s) {
      const VecI scale = bit_cast<VecI>(parts[s / 4] << (24 - 8 * (s % 4))) >> 24;
      to.scale[s] = d * __builtin_convertvector(scale, Vec);
      to.min[s] = -32.0f * to.scale[s];
    }
    for (int h = 0; h < 2; ++h) {
      VecU high[8];
      words4(p, 128 + 32 * h, high);
      words4(p, 144 + 32 * h, high + 4);
      for (int q = 0; q < 2; ++q) {  // 32 bytes: lower halves are the part q of four, upper ones are q + 2
        VecU* codes = to.codes + 32 * h + 8 * q;
        VecU v[8];
        words4(p, 64 * h + 32 * q, v);
        words4(p, 64 * h + 32 * q + 16, v + 4);
        for (int g = 0; g < 8; ++g) {
          codes[g] = (v[g] & every_byte(15)) | move_bits(high[g], 2 * q, 4, 0x30);
          codes[16 + g] = ((v[g] >> 4) & every_byte(15)) | move_bits(high[g], 2 * q + 4, 4, 0x30);
        }
      }
    }
  }
};

template <>
struct Reader<IQ4_XS> : Codes<32, true> {
  static RAYLM_INLINE void decode(Rows p, TileBlock to) {
    const VecU head = words(p, 0), low = words(p, 4), high = head >> 16;
    const Vec d = halves(head).low;
    for (int s = 0; s < 8; ++s) {
      const VecU six = ((low >> (4 * s)) & 15u) | ((high >> (2 * s)) & 3u) << 4;
      nibbles(p, 8 + 16 * s, to.codes + 8 * s, [](VecU nibble, int) { return look_up(kNonLinearValues, nibble); });
      to.scale[s] = d * (to_float(six) - 32.0f);
    }
  }
};

// Asks for the `bytes` of every row from `start` on, in `count` steps: a core has room for few requests to memory at a
// time.
class BlocksAhead {
 public:
  RAYLM_INLINE BlocksAhead(const uint8_t* const* lines, int64_t start, int64_t bytes, int count)
      : lines_(lines), start_(start), each_(static_cast<unsigned>((bytes + 63) / 64 * kWidth + count - 1) / count) {}

  RAYLM_INLINE void step() {
    for (const unsigned end = next_ + each_; next_ < end; ++next_) {
      prefetch(lines_[next_ % kWidth] + start_ + next_ / kWidth * 64);
    }
  }

 private:
  const uint8_t* const* lines_;
  int64_t start_;
  unsigned each_;
  unsigned next_ = 0;
};

template <typename Kind>
RAYLM_INLINE void decode_tile(const uint8_t* const* lines, int64_t first, int count, BlocksAhead ahead, Tile& tile) {
  constexpr int kParts = Kind::kValues / Reader<Kind>::kPart;
  for (int b = 0; b < count; ++b) {
    ahead.step();
    Reader<Kind>::decode({lines, (first + b) * Kind::kBytes},
                         {tile.codes + b * (Kind::kValues / 4), tile.scale + b * kParts, tile.min + b * kParts});
  }
}

}  // namespace
}  // namespace raylm
