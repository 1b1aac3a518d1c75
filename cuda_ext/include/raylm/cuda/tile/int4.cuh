// Integers of 4 bits with a scale and a zero point a group of columns.
//
// They come in patches of 16 rows and 512 columns (raylm/ops/int4_fallback.py packs them): codes as a warp's lanes take
// them, 16 bytes a lane for 8 rows and 128 columns, and then a word for each group and row, the bits of a float32 scale
// whose lowest 8 bits are the zero point. So two operations make each pair of codes what mma.sync takes as a fragment of 16
// rows (16-bit floats 128 + code or 1024 + code: Kim et al., arXiv:2211.10017); one more takes the zero point from it,
// exactly.
#pragma once

#include "raylm/cuda/common.cuh"

namespace raylm::cuda {

constexpr int kPatchRows = 16, kPatchColumns = 512, kPatchCodes = kPatchRows * kPatchColumns / 2;  // the last: bytes
// Bytes of a patch; a group has 32 << group_shift columns.
__host__ __device__ constexpr int patch_bytes(int group_shift) {
  return kPatchCodes + (kPatchColumns / 32 >> group_shift) * kPatchRows * 4;
}

// What a product multiplies, as numbers.cuh has it: W is patches, x and results are of T.
template <typename T>
struct Int4 {
  using Stored = unsigned char;
  using Result = T;
  static constexpr bool kScaled = false;
};

// Pairs of 16-bit floats, each some power of two + a code, of a word's eight codes.
template <typename T>
inline constexpr uint32_t kInt4Base = std::is_same_v<T, __half> ? 0x64006400 : 0x43004300;

template <typename T>
__device__ inline uint32_t int4_pair(uint32_t word, int i) {
  return (word >> 4 * i & 0x000f000f) | kInt4Base<T>;
}

template <typename T>
__device__ inline uint32_t subtract_pairs(uint32_t a, uint32_t b) {
  using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
  const Pair difference = __hsub2(*reinterpret_cast<const Pair*>(&a), *reinterpret_cast<const Pair*>(&b));
  return *reinterpret_cast<const uint32_t*>(&difference);
}

template <typename T>
__device__ inline uint32_t multiply_pairs(uint32_t a, uint32_t b) {
  using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
  const Pair product = __hmul2(*reinterpret_cast<const Pair*>(&a), *reinterpret_cast<const Pair*>(&b));
  return *reinterpret_cast<const uint32_t*>(&product);
}

// A group's scale and its zero point, the latter twice, as int4_pair has codes.
template <typename T>
struct Int4Group {
  float scale;
  uint32_t zeros;
  __device__ static Int4Group of(uint32_t word) {
    return {__uint_as_float(word & ~0xffu), (word & 0xffu) * 0x10001u | kInt4Base<T>};
  }
};

}  // namespace raylm::cuda
