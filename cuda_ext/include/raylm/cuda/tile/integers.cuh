// Integers of 4 and 8 bits with a scale and a zero point a group of columns, as pairs of 16-bit floats.
//
// Two operations make each pair of codes numbers: 16-bit floats 128 + code or 1024 + code, whose base is taken from them
// with the zero point, exactly (Kim et al., arXiv:2211.10017). A group's word is the bits of a float32 scale whose lowest
// 8 bits are the zero point.
#pragma once

#include "raylm/cuda/ptx/shared.cuh"
#include "raylm/cuda/tile/fragments.cuh"

namespace raylm::cuda {

template <typename T>
using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;

template <typename T>
__device__ inline uint32_t subtract_pairs(uint32_t a, uint32_t b) {
  const Pair<T> difference = __hsub2(*reinterpret_cast<const Pair<T>*>(&a), *reinterpret_cast<const Pair<T>*>(&b));
  return *reinterpret_cast<const uint32_t*>(&difference);
}

template <typename T>
__device__ inline uint32_t multiply_pairs(uint32_t a, uint32_t b) {
  const Pair<T> product = __hmul2(*reinterpret_cast<const Pair<T>*>(&a), *reinterpret_cast<const Pair<T>*>(&b));
  return *reinterpret_cast<const uint32_t*>(&product);
}

template <typename T>
__device__ inline uint32_t multiply_add_pairs(uint32_t a, uint32_t b, uint32_t c) {
  const auto* pairs = reinterpret_cast<const Pair<T>*>(&a);
  const Pair<T> sum = __hfma2(*pairs, *reinterpret_cast<const Pair<T>*>(&b), *reinterpret_cast<const Pair<T>*>(&c));
  return *reinterpret_cast<const uint32_t*>(&sum);
}

// The power of two that codes are added to, twice.
template <typename T>
inline constexpr uint32_t kIntegerBase = std::is_same_v<T, __half> ? 0x64006400 : 0x43004300;

// (x & Mask) | Base in one instruction. Of constants the compiler makes two.
template <uint32_t Mask, uint32_t Base>
__device__ inline uint32_t masked_beside(uint32_t x) {
  uint32_t out;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(out) : "r"(x), "n"(Mask), "r"(Base));
  return out;
}

// A pair of a word's eight codes of 4 bits, and the base.
template <typename T>
__device__ inline uint32_t int4_pair(uint32_t word, int i) {
  return masked_beside<0x000f000f, kIntegerBase<T>>(word >> 4 * i);
}

// The numbers of two codes of 8 bits with a sign, those of a word's first and third byte. bfloat16 has room for 7 bits
// beside its base: the eighth one, of which 128 are to be taken, becomes twice the base.
template <typename T>
__device__ inline uint32_t int8_pair(uint32_t word) {
  if constexpr (std::is_same_v<T, __half>) {
    return subtract_pairs<T>((word & 0x00ff00ff ^ 0x00800080) | kIntegerBase<T>, 0x64806480);
  } else {
    return subtract_pairs<T>(masked_beside<0x007f007f, kIntegerBase<T>>(word),
                             masked_beside<0x00800080, kIntegerBase<T>>(word));
  }
}

template <typename T>
struct IntegerGroup {
  float scale;
  uint32_t zero;
  __device__ static IntegerGroup of(uint32_t word) { return {__uint_as_float(word & ~0xffu), word & 0xffu}; }
  // The zero point, twice, as int4_pair has codes.
  __device__ uint32_t zeros_beside() const { return __byte_perm(zero, kIntegerBase<T>, 0x5050); }
  // The zero point and that base, as a number.
  __device__ float zero_and_base() const {
    return __uint_as_float(std::is_same_v<T, __half> ? 0x44800000 | zero << 13 : 0x43000000 | zero << 16);
  }
  __device__ uint32_t scales() const { return pack<T>(scale, scale); }
};

// A lane's words of a patch, one for each Columns columns, from where that of the first group is.
template <int Columns, int N>
__device__ inline void load_words(uint32_t (&words)[N], uint32_t first, int group_log2) {
#pragma unroll
  for (int i = 0; i < N; ++i) words[i] = load_shared_word(first + (i * Columns >> group_log2) * 64);
}

}  // namespace raylm::cuda
