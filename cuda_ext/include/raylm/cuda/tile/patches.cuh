// Weights as codes in patches of 16 rows and 128 columns (raylm/ops/patches.py packs them), and how codes become what
// matrix instructions take from registers.
//
// A patch is codes in the order in which a warp's lanes take them, 16 bytes a lane at a time for 8 rows, and then words of
// scales. A lane has rows lane / 4 and lane / 4 + 8, and of each 16 columns 2 t, 2 t + 1, 2 t + 8 and 2 t + 9, where t is
// lane % 4.
#pragma once

#include "raylm/cuda/ptx/shared.cuh"
#include "raylm/cuda/tile/fragments.cuh"
#include "raylm/cuda/tile/integers.cuh"

namespace raylm::cuda {

constexpr int kPatchRows = 16, kPatchColumns = 128;

// [experts, n / 16, across] patches.
struct PatchedWeight {
  const unsigned char* data;
  int across;      // patches beside each other
  int below;       // below each other, of an expert
  int group_log2;  // columns of a group
};

// What a product multiplies: numbers of T as they are, or codes.
template <typename T>
struct AsNumbers {
  static constexpr bool kCodes = false;
};

__device__ inline uint32_t word_of(const uint4& four, int i) {
  return i == 0 ? four.x : i == 1 ? four.y : i == 2 ? four.z : four.w;
}

// Of a patch whose groups have so many columns, with a word for each group and row.
__host__ __device__ constexpr int bytes_of_patch(int code_bits, int group_log2) {
  return kPatchRows * kPatchColumns * code_bits / 8 + (kPatchColumns >> group_log2) * kPatchRows * 4;
}

// Of a form's: where a row of a patch has one word, the compiler knows how many.
template <typename Form>
__host__ __device__ constexpr int bytes_of_patch(int group_log2) {
  return bytes_of_patch(Form::kBits, Form::kOneWord ? 7 : group_log2);
}

// Where the codes and the word of one of a lane's rows are, of 8 rows of a patch, counted from some patch.
struct PatchLane {
  uint32_t codes, word;

  // Of the upper rows of a patch (half 0) or the lower (1) that lies so many bytes behind.
  __device__ static PatchLane of(int half, uint32_t behind = 0) {
    const uint32_t lane = threadIdx.x % kWarp;
    return {behind + half * 512 + lane * 16, behind + half * 32 + lane / 4 * 4};
  }
  // For loops, which then do not work it out again.
  __device__ PatchLane kept_in_registers() const { return {kept(codes), kept(word)}; }
};

// A form has 8 rows of a patch. Its pairs are of 16 columns, of which `step` is the number
// within the patch: the first two, or those 8 behind. `scaled` gives numbers of T, up to a factor of all; where kSums,
// `number` gives them without their scales, exactly, so that products may be summed first over kColumns columns.

// Floats of 8 bits (e4m3), those of a word's second and fourth byte or those behind, as bfloat16s: bits that have a code's
// exponent and mantissa in their own's lowest bits are a number 2^120 times too small, also where the code is subnormal.
__device__ inline uint32_t small_pair(uint32_t word, int behind) {
  const uint32_t pair = behind ? word << 8 : word;
  return (pair & 0x80008000) | (pair >> 4 & 0x07f007f0);
}

// Such floats with a float32 scale for each row of a patch.
template <typename T>
struct Fp8Codes {
  static_assert(std::is_same_v<T, __nv_bfloat16>);
  static constexpr bool kCodes = true, kSums = true, kOneWord = true;
  static constexpr int kColumns = 128, kBits = 8;
  static constexpr float kFactor = 1.0f;

  uint4 codes[2];  // of 64 columns each
  float of_row;
  uint32_t power;  // of_row 2^120, twice

  __device__ void load(uint32_t patch, const PatchLane& lane, int) {
    for (int i = 0; i < 2; ++i) codes[i] = load_shared(patch + i * 1024 + lane.codes);
    of_row = __uint_as_float(load_shared_word(patch + 2048 + lane.word));
    power = pack<T>(of_row * 0x1p120f, of_row * 0x1p120f);
  }

  __device__ float scale(int) const { return of_row; }
  __device__ uint32_t number(int step, int behind) const { return multiply_pairs<T>(small(step, behind), 0x7b807b80); }
  __device__ uint32_t scaled(int step, int behind) const { return multiply_pairs<T>(small(step, behind), power); }

  __device__ uint32_t small(int step, int behind) const {
    return small_pair(word_of(codes[step / 4], step % 4), behind);
  }
};

// Floats of 4 bits (e2m1), of which 32 columns have one scale, a power of two (e8m0): OCP Microscaling Formats, MXFP4. As
// above the numbers made of codes are too small, 2^126 times; of that the scale takes half, so that neither is too large
// for exponents up to 191, that of 2^64.
template <typename T>
struct Mxfp4Codes {
  static_assert(std::is_same_v<T, __nv_bfloat16>);  // float16 does not hold all of the scales
  static constexpr bool kCodes = true, kSums = false, kOneWord = true;
  static constexpr int kColumns = 32, kBits = 4;
  static constexpr float kFactor = 0x1p63f;

  uint4 codes;
  uint32_t exponents;  // a byte each 32 columns

  __device__ void load(uint32_t patch, const PatchLane& lane, int) {
    codes = load_shared(patch + lane.codes);
    exponents = load_shared_word(patch + 1024 + lane.word);
  }

  __device__ uint32_t scaled(int step, int behind) const {
    const int part = step / 2;
    const uint32_t pair = word_of(codes, part) << (12 - 4 * (step % 2 * 2 + behind));
    const uint32_t scale = ((exponents >> 8 * part & 0xff) + 63) * 0x00800080;
    return multiply_pairs<T>((pair & 0x80008000) | (pair >> 6 & 0x01c001c0), scale);
  }
};

// Floats of 8 bits (e4m3) whose scales are as MXFP4's: MXFP8. Numbers made of codes are 2^120 times too small, of which the
// scale takes half.
template <typename T>
struct Mxfp8Codes {
  static_assert(std::is_same_v<T, __nv_bfloat16>);
  static constexpr bool kCodes = true, kSums = false, kOneWord = true;
  static constexpr int kColumns = 32, kBits = 8;
  static constexpr float kFactor = 0x1p60f;

  uint4 codes[2];  // of 64 columns each
  uint32_t exponents;  // a byte each 32 columns

  __device__ void load(uint32_t patch, const PatchLane& lane, int) {
    for (int i = 0; i < 2; ++i) codes[i] = load_shared(patch + i * 1024 + lane.codes);
    exponents = load_shared_word(patch + 2048 + lane.word);
  }

  __device__ uint32_t scaled(int step, int behind) const {
    const uint32_t scale = ((exponents >> 8 * (step / 2) & 0xff) + 60) * 0x00800080;
    return multiply_pairs<T>(small_pair(word_of(codes[step / 4], step % 4), behind), scale);
  }
};

// Integers of 4 bits with a scale and a zero point a group of at least Columns columns.
template <typename T, int Columns>
struct Int4Codes {
  static constexpr bool kCodes = true, kSums = true, kOneWord = Columns == 128;
  static constexpr int kColumns = Columns, kBits = 4;
  static constexpr float kFactor = 1.0f;

  uint4 codes;
  uint32_t words[kPatchColumns / Columns];

  static constexpr int kGroupLog2 = Columns == 128 ? 7 : Columns == 64 ? 6 : 5;

  // Without group_log2: groups of exactly so many columns.
  __device__ void load(uint32_t patch, const PatchLane& lane, int group_log2 = kGroupLog2) {
    codes = load_shared(patch + lane.codes);
    load_words<Columns>(words, patch + 1024 + lane.word, group_log2);
  }

  __device__ IntegerGroup<T> group(int step) const { return IntegerGroup<T>::of(words[step * 16 / Columns]); }
  __device__ float scale(int step) const { return group(step).scale; }
  __device__ uint32_t beside_base(int step, int behind) const {
    return int4_pair<T>(word_of(codes, step / 2), step % 2 * 2 + behind);
  }
  __device__ uint32_t number(int step, int behind) const {
    return subtract_pairs<T>(beside_base(step, behind), group(step).zeros_beside());
  }
  __device__ uint32_t scaled(int step, int behind) const {
    return multiply_pairs<T>(number(step, behind), group(step).scales());
  }
};

// The bytes of four numbers of NF4's table, which are bfloat16s: the lower ones or, with a shift of 8, the upper ones.
__host__ __device__ constexpr uint32_t nf4_bytes(int first, int shift) {
  constexpr uint16_t kTable[16] = {0xbf80, 0xbf32, 0xbf06, 0xbeca, 0xbe92, 0xbe3d, 0xbdba, 0x0000,
                                   0x3da3, 0x3e25, 0x3e7c, 0x3ead, 0x3ee2, 0x3f10, 0x3f39, 0x3f80};
  uint32_t bytes = 0;
  for (int i = 0; i < 4; ++i) bytes |= (kTable[first + i] >> shift & 0xffu) << 8 * i;
  return bytes;
}

// Codes of 4 bits that stand for the numbers of that table (Dettmers et al., arXiv:2305.14314), with a float32 scale a
// group of at least 32 columns. A byte has the codes of two neighbours.
template <typename T>
struct Nf4Codes {
  static_assert(std::is_same_v<T, __nv_bfloat16>);
  static constexpr bool kCodes = true, kSums = true, kOneWord = false;
  static constexpr int kColumns = 32, kBits = 4;
  static constexpr float kFactor = 1.0f;

  uint4 codes;
  uint32_t words[kPatchColumns / kColumns];

  __device__ void load(uint32_t patch, const PatchLane& lane, int group_log2) {
    codes = load_shared(patch + lane.codes);
    load_words<kColumns>(words, patch + 1024 + lane.word, group_log2);
  }

  __device__ float scale(int step) const { return __uint_as_float(words[step * 16 / kColumns]); }
  __device__ uint32_t scaled(int step, int behind) const {
    return multiply_pairs<T>(number(step, behind), pack<T>(scale(step), scale(step)));
  }

  __device__ uint32_t number(int step, int behind) const {
    const uint32_t word = word_of(codes, step / 2), four = step % 2 ? word >> 16 : word;
    const uint32_t last = __byte_perm(0x0000ff00, 0, four >> 3 & 0x1111);  // bytes of ones for codes from 8 on
    return __byte_perm(looked_up<0>(four & 0x7777, last), looked_up<8>(four & 0x7777, last), behind ? 0x7362 : 0x5140);
  }

 private:
  // Bytes of four codes' numbers, by three bits of each in the first half of the table or the last.
  template <int Shift>
  __device__ static uint32_t looked_up(uint32_t low, uint32_t last) {
    constexpr uint32_t kBytes0 = nf4_bytes(0, Shift), kBytes4 = nf4_bytes(4, Shift);
    constexpr uint32_t kBytes8 = nf4_bytes(8, Shift), kBytes12 = nf4_bytes(12, Shift);
    return (__byte_perm(kBytes0, kBytes4, low) & ~last) | (__byte_perm(kBytes8, kBytes12, low) & last);
  }
};

// The same of 8 bits, from which 128 is taken, as the zero points' is.
template <typename T>
struct Int8Codes {
  static constexpr bool kCodes = true, kSums = true, kOneWord = false;
  static constexpr int kColumns = 16, kBits = 8;
  static constexpr float kFactor = 1.0f;

  uint4 codes[2];  // of 64 columns each
  uint32_t words[kPatchColumns / kColumns];

  __device__ void load(uint32_t patch, const PatchLane& lane, int group_log2) {
    for (int i = 0; i < 2; ++i) codes[i] = load_shared(patch + i * 1024 + lane.codes);
    load_words<kColumns>(words, patch + 2048 + lane.word, group_log2);
  }

  __device__ IntegerGroup<T> group(int step) const { return IntegerGroup<T>::of(words[step]); }
  __device__ float scale(int step) const { return group(step).scale; }
  __device__ uint32_t number(int step, int behind) const {
    const uint32_t word = word_of(codes[step / 4], step % 4);
    return subtract_pairs<T>(int8_pair<T>(behind ? word : word >> 8), int8_pair<T>(group(step).zero * 0x10001u ^ 0x800080));
  }
  __device__ uint32_t scaled(int step, int behind) const {
    return multiply_pairs<T>(number(step, behind), group(step).scales());
  }
};

// Codes of 4 bits, or of 7 in bytes, whose numbers are code scale + offset: a word of two float16 a group of columns, the
// scale in the lower half.
template <typename T, int Bits>
struct AffineCodes {
  static_assert(std::is_same_v<T, __nv_bfloat16>);
  static constexpr bool kCodes = true, kSums = false, kOneWord = false;
  static constexpr int kColumns = 16, kBits = Bits;
  static constexpr float kFactor = 1.0f;

  uint4 codes[Bits / 4];
  uint32_t words[kPatchColumns / kColumns];

  __device__ void load(uint32_t patch, const PatchLane& lane, int group_log2) {
    for (int i = 0; i < Bits / 4; ++i) codes[i] = load_shared(patch + i * 1024 + lane.codes);
    load_words<kColumns>(words, patch + Bits * 256 + lane.word, group_log2);
  }

  __device__ uint32_t scaled(int step, int behind) const {
    uint32_t pair;
    if constexpr (Bits == 4) {
      pair = int4_pair<__half>(word_of(codes[0], step / 2), step % 2 * 2 + behind);
    } else {
      const uint32_t word = word_of(codes[step / 4], step % 4);
      pair = masked_beside<0x007f007f, kIntegerBase<__half>>(behind ? word : word >> 8);
    }
    const uint32_t scales = __byte_perm(words[step], 0, 0x1010), offsets = __byte_perm(words[step], 0, 0x3232);
    pair = multiply_add_pairs<__half>(subtract_pairs<__half>(pair, kIntegerBase<__half>), scales, offsets);
    const float2 numbers = unpack<__half>(pair);
    return pack<T>(numbers.x, numbers.y);
  }
};

template <typename T>
using Affine4Codes = AffineCodes<T, 4>;
template <typename T>
using Affine8Codes = AffineCodes<T, 8>;
template <typename T>
using Int4Groups = Int4Codes<T, 32>;  // of any size
template <typename T>
using Int4LongGroups = Int4Codes<T, 128>;

}  // namespace raylm::cuda
