// Numbers and tokens as integers that compare as they are ordered.
#pragma once

#include "raylm/cuda/common.cuh"

namespace raylm::cuda {

// Larger for a larger weight, and among equals for an earlier token. bits: of a weight, or an order-preserving image.
__device__ inline uint64_t ordered(uint32_t bits, int token) {
  return static_cast<uint64_t>(bits) << 32 | (0xffffffffu - static_cast<uint32_t>(token));
}

__device__ inline int token_of(uint64_t key) { return static_cast<int>(0xffffffffu - static_cast<uint32_t>(key)); }

__device__ inline uint64_t warp_max(uint64_t x) {
  const uint32_t high = static_cast<uint32_t>(x >> 32), highest = __reduce_max_sync(kAllLanes, high);
  const uint32_t low = __reduce_max_sync(kAllLanes, high == highest ? static_cast<uint32_t>(x) : 0u);
  return static_cast<uint64_t>(highest) << 32 | low;
}

// A logit as it is compared: NaN counts as infinity, and -0 as 0.
__device__ inline float comparable(float x) { return x != x ? INFINITY : x + 0.0f; }

// The order-preserving image of a number, above 0 unless it is a NaN of negative sign, and back.
__device__ inline uint32_t image_of(float x) {
  const uint32_t bits = __float_as_uint(x);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ inline float number_of(uint32_t image) {
  return __uint_as_float(image & 0x80000000u ? image & 0x7fffffffu : ~image);
}

}  // namespace raylm::cuda
