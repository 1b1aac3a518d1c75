// Weights as codes in patches of 16 rows and 128 columns (raylm/ops/patches.py packs them), and how codes become what wgmma
// takes from registers.
//
// A patch is codes in the order in which a warp's lanes take them, 16 bytes a lane at a time for 8 rows, and then words of
// scales. A lane has rows lane / 4 and lane / 4 + 8, and of each 16 columns 2 t, 2 t + 1, 2 t + 8 and 2 t + 9, where t is
// lane % 4.
#pragma once

#include "raylm/cuda/ptx/shared.cuh"
#include "raylm/cuda/tile/fragments.cuh"
#include "raylm/cuda/tile/int4.cuh"

namespace raylm::cuda {

constexpr int kShortPatch = 128;  // columns

// [experts, n / 16, across] patches.
struct PatchedWeight {
  const unsigned char* data;
  int across;       // patches beside each other
  int below;        // below each other, of an expert
  int group_shift;  // columns of a group of integers: 32 << group_shift
};

// What a product multiplies: numbers of T as they are, or codes. `kScaled`: products of 128 columns are summed before they
// are scaled, else codes become numbers with their scales in them, up to a factor of all.
template <typename T>
struct AsNumbers {
  static constexpr bool kCodes = false, kScaled = false;
  static constexpr float kFactor = 1.0f;
};

__device__ inline uint32_t word_of(const uint4& four, int i) {
  return i == 0 ? four.x : i == 1 ? four.y : i == 2 ? four.z : four.w;
}

// Floats of 8 bits (e4m3) with a float32 scale for each row of a patch. Bits of bfloat16 that have a code's exponent and
// mantissa in their own's lowest bits are a number 2^120 times too small, of float16 2^8: also where the code is subnormal.
template <typename T>
struct Fp8Codes {
  static constexpr bool kCodes = true, kScaled = true;
  static constexpr float kFactor = 1.0f;
  static constexpr bool kHalf = std::is_same_v<T, __half>;
  static constexpr int kShift = kHalf ? 1 : 4;
  static constexpr uint32_t kMagnitude = kHalf ? 0x3f803f80 : 0x07f007f0, kPower = kHalf ? 0x5c005c00 : 0x7b807b80;
  static constexpr int kBytes = 16 * kShortPatch;  // of codes
  __host__ __device__ static constexpr int patch_bytes(int) { return kBytes + 16 * 4; }

  uint4 codes[2];  // of 64 columns each
  float scale;

  // Of 8 rows of a patch, the upper ones or the lower.
  __device__ void load(uint32_t patch, int rows, int) {
    const int lane = threadIdx.x % kWarp;
    for (int i = 0; i < 2; ++i) codes[i] = load_shared(patch + (2 * i + rows) * 512 + lane * 16);
    scale = __uint_as_float(load_shared_word(patch + kBytes + (rows * 8 + lane / 4) * 4));
  }

  // Of 16 columns, of which `step` is the number within a half of the patch: the first two, or those 8 behind.
  __device__ uint32_t pair(int half, int step, int behind) const {
    const uint32_t word = word_of(codes[half], step), pair = behind ? word << 8 : word;
    return multiply_pairs<T>((pair & 0x80008000) | (pair >> kShift & kMagnitude), kPower);
  }
};

// Floats of 4 bits (e2m1), of which 32 columns have one scale, a power of two (e8m0): OCP Microscaling Formats, MXFP4. As
// above the numbers made of codes are too small, 2^126 times; of that the scale takes half, so that neither is too large
// for exponents up to 191, that of 2^64.
template <typename T>
struct Mxfp4Codes {
  static_assert(std::is_same_v<T, __nv_bfloat16>);  // float16 does not hold all of the scales
  static constexpr bool kCodes = true, kScaled = false;
  static constexpr float kFactor = 0x1p63f;
  static constexpr int kBytes = 16 * kShortPatch / 2;
  __host__ __device__ static constexpr int patch_bytes(int) { return kBytes + 16 * 4; }

  uint4 codes;
  uint32_t exponents;  // a byte each 32 columns

  __device__ void load(uint32_t patch, int rows, int) {
    const int lane = threadIdx.x % kWarp;
    codes = load_shared(patch + rows * 512 + lane * 16);
    exponents = load_shared_word(patch + kBytes + (rows * 8 + lane / 4) * 4);
  }

  __device__ uint32_t pair(int half, int step, int behind) const {
    const int part = half * 2 + step / 2;
    const uint32_t pair = word_of(codes, part) << (12 - 4 * (step % 2 * 2 + behind));
    const uint32_t scale = ((exponents >> 8 * part & 0xff) + 63) * 0x00800080;
    return multiply_pairs<T>((pair & 0x80008000) | (pair >> 6 & 0x01c001c0), scale);
  }
};

// Integers of 4 bits with a scale and a zero point a group of columns, words as in tile/int4.cuh.
template <typename T>
struct Int4Codes {
  static constexpr bool kCodes = true, kScaled = false;
  static constexpr float kFactor = 1.0f;
  static constexpr int kBytes = 16 * kShortPatch / 2;
  __host__ __device__ static constexpr int patch_bytes(int group_shift) { return kBytes + (4 >> group_shift) * 16 * 4; }

  uint4 codes;
  uint32_t zeros[4], scales[4];  // each twice, of 32 columns

  __device__ void load(uint32_t patch, int rows, int group_shift) {
    const int lane = threadIdx.x % kWarp;
    codes = load_shared(patch + rows * 512 + lane * 16);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int word = (i >> group_shift) * 16 + rows * 8 + lane / 4;
      const auto group = Int4Group<T>::of(load_shared_word(patch + kBytes + word * 4));
      zeros[i] = group.zeros;
      scales[i] = pack<T>(group.scale, group.scale);
    }
  }

  __device__ uint32_t pair(int half, int step, int behind) const {
    const int part = half * 2 + step / 2;
    const uint32_t pair = int4_pair<T>(word_of(codes, part), step % 2 * 2 + behind);
    return multiply_pairs<T>(subtract_pairs<T>(pair, zeros[part]), scales[part]);
  }
};

}  // namespace raylm::cuda
