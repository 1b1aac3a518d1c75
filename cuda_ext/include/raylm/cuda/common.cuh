// What the CUDA kernels share. Storage may be float, bfloat16 or half; arithmetic is in float.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cfloat>
#include <cstdint>

namespace raylm::cuda {

constexpr int kWarp = 32;

// Lanes that arrive at a barrier for their warp. One does: __syncwarp has ordered what the others did before. The tool
// racecheck does not follow that; in a build for it every lane arrives, which costs a decode step a tenth and more.
#ifdef RAYLM_RACECHECK
constexpr unsigned kWarpArrivals = kWarp;
#else
constexpr unsigned kWarpArrivals = 1;
#endif

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
  for (int step = kWarp / 2; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
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

// For copies of what is read once: it is the first to leave the L2 cache.
__device__ inline uint64_t evict_first_policy() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

}  // namespace raylm::cuda
