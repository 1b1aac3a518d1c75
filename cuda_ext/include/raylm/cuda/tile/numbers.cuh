// What a product multiplies, and what its results are; 8-bit floats (e4m3), which are called codes.
#pragma once

#include <cuda_fp8.h>

#include "raylm/cuda/tile/fragments.cuh"

namespace raylm::cuda {

using Code = __nv_fp8_e4m3;

// Both matrices and the result hold T.
template <typename T>
struct Plain {
  using Stored = T;
  using Result = T;
  static constexpr bool kScaled = false;
};

// Both matrices hold codes, each row with a scale; results are of T.
template <typename T>
struct Scaled {
  using Stored = Code;
  using Result = T;
  static constexpr bool kScaled = true;
};

// The numbers of the codes in the lower (0) or upper (1) half of a register, exactly.
template <int Half>
__device__ inline uint32_t halves_of(uint32_t codes) {
  const __half2_raw pair = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(codes >> 16 * Half), __NV_E4M3);
  return static_cast<uint32_t>(pair.x) | static_cast<uint32_t>(pair.y) << 16;
}

// Two numbers of T as half, clamped to its range; a NaN stays a NaN.
template <typename T>
__device__ inline uint32_t to_halves(uint32_t pair) {
  if constexpr (std::is_same_v<T, __half>) {
    return pair;
  } else {
    const auto bound = [](float x) { return fabsf(x) > kLargest<__half> ? copysignf(kLargest<__half>, x) : x; };
    const float2 x = unpack<T>(pair);
    return pack<__half>(bound(x.x), bound(x.y));
  }
}

// As halves_of, but numbers of T, exactly: bfloat16 has room for a code's 3 bits of fraction and 4 of exponent, too.
template <typename T, int Half>
__device__ inline uint32_t numbers_of(uint32_t codes) {
  const uint32_t halves = halves_of<Half>(codes);
  if constexpr (std::is_same_v<T, __half>) {
    return halves;
  } else {
    const float2 pair = unpack<__half>(halves);
    return pack<T>(pair.x, pair.y);
  }
}

__device__ inline float to_float(Code x) { return static_cast<float>(x); }

// The codes nearest to x; what is past the largest becomes that, and a NaN stays one.
__device__ inline uint32_t codes_of(float a, float b, float c, float d) {
  const uint32_t low = __nv_cvt_float2_to_fp8x2(make_float2(a, b), __NV_SATFINITE, __NV_E4M3);
  return low | static_cast<uint32_t>(__nv_cvt_float2_to_fp8x2(make_float2(c, d), __NV_SATFINITE, __NV_E4M3)) << 16;
}

__device__ inline Code code_of(float x) {
  Code code;
  code.__x = __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3);
  return code;
}

// What a cache of C keeps of a number: the number itself, or its code in units of a scale, whose inverse is given.
template <typename C, typename T>
__device__ inline C kept(T x, float inverse) {
  if constexpr (std::is_same_v<C, Code>) {
    return code_of(to_float(x) * inverse);
  } else {
    return x;
  }
}

}  // namespace raylm::cuda
