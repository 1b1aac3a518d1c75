// Functions that the chip has instructions for, to about 22 bits.
#pragma once

namespace raylm::cuda {

constexpr float kLog2E = 1.4426950408889634f;

// 2 to the power of x; 0 where that is denormal.
__device__ inline float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ inline float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Of a NaN and a number the NaN, unlike fminf and fmaxf.
__device__ inline float min_or_nan(float x, float y) {
  float least;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(least) : "f"(x), "f"(y));
  return least;
}

__device__ inline float max_or_nan(float x, float y) {
  float most;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(most) : "f"(x), "f"(y));
  return most;
}

}  // namespace raylm::cuda
