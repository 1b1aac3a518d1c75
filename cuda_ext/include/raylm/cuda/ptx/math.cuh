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

}  // namespace raylm::cuda
