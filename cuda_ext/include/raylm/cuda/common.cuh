// What the CUDA kernels share. Storage may be float, bfloat16 or half; arithmetic is in float.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cfloat>
#include <cstdint>
#include <type_traits>

namespace raylm::cuda {

constexpr int kWarp = 32;

constexpr unsigned kAllLanes = 0xffffffffu;

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ inline float to_float(__half x) { return __half2float(x); }

template <typename T>
__device__ inline T from_float(float x) {
  if constexpr (sizeof(T) == 4) {
    return x;
  } else if constexpr (std::is_same_v<T, __half>) {
    return __float2half_rn(x);
  } else {
    return __float2bfloat16_rn(x);
  }
}

// The largest finite number.
template <typename T>
inline constexpr float kLargest = FLT_MAX;
template <>
inline constexpr float kLargest<__half> = 65504.0f;
template <>
inline constexpr float kLargest<__nv_bfloat16> = 0x1.fep127f;

__device__ inline float warp_sum(float x) {
  for (int step = kWarp / 2; step > 0; step /= 2) x += __shfl_xor_sync(kAllLanes, x, step);
  return x;
}

// The sum over a block of at most 1024 threads, whole warps, in every thread.
__device__ inline float block_sum(float x) {
  __shared__ float parts[kWarp];
  x = warp_sum(x);
  if (threadIdx.x % kWarp == 0) parts[threadIdx.x / kWarp] = x;
  __syncthreads();
  x = threadIdx.x % kWarp < blockDim.x / kWarp ? parts[threadIdx.x % kWarp] : 0.0f;
  return warp_sum(x);
}

}  // namespace raylm::cuda
