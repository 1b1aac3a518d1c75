// Parts of a matrix as matrix instructions hand them out: a thread holds, of each 8 columns, two neighbours of row
// lane / 4 and the same two of row lane / 4 + 8.
#pragma once

#include "raylm/cuda/common.cuh"

namespace raylm::cuda {

// Two elements in one register, the first in the lower half.
template <typename T>
__device__ inline uint32_t pack(float first, float second) {
  if constexpr (std::is_same_v<T, __half>) {
    const __half2 pair = __floats2half2_rn(first, second);
    return *reinterpret_cast<const uint32_t*>(&pair);
  } else {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
}

// The two elements of one register.
template <typename T>
__device__ inline float2 unpack(uint32_t pair) {
  if constexpr (std::is_same_v<T, __half>) {
    return __half22float2(*reinterpret_cast<const __half2*>(&pair));
  } else {
    return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&pair));
  }
}

// Lane q of four holds element q of rows 0 to 3; afterwards it holds row q.
__device__ inline void transpose4(uint32_t (&x)[4]) {
#pragma unroll
  for (int step = 1; step < 4; step *= 2) {
    const bool upper = threadIdx.x & step;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & step) continue;
      const uint32_t got = __shfl_xor_sync(kAllLanes, upper ? x[i] : x[i + step], step);
      if (upper) {
        x[i] = got;
      } else {
        x[i + step] = got;
      }
    }
  }
}

}  // namespace raylm::cuda
