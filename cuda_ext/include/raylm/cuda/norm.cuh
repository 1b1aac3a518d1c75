#pragma once

#include "raylm/cuda/common.cuh"

namespace raylm::cuda {

// One block a row. With a residual, x is added to it and the norm is that of the sum.
template <typename T>
__global__ void rms_norm_kernel(const T* x, int64_t inner, int64_t outer_stride, int64_t inner_stride, T* residual,
                                int64_t residual_stride, const T* weight, T* out, int64_t hidden, float eps) {
  const int64_t row = blockIdx.x;
  x += row / inner * outer_stride + row % inner * inner_stride;
  if (residual) residual += row * residual_stride;
  float squares = 0;
  for (int64_t i = threadIdx.x; i < hidden; i += blockDim.x) {
    float v = to_float(x[i]);
    if (residual) {
      residual[i] = from_float<T>(v + to_float(residual[i]));
      v = to_float(residual[i]);  // as rounded to T, like every later reader sees it
    }
    squares += v * v;
  }
  const float scale = rsqrtf(block_sum(squares) / static_cast<float>(hidden) + eps);
  const T* h = residual ? residual : x;
  for (int64_t i = threadIdx.x; i < hidden; i += blockDim.x) {
    out[row * hidden + i] = from_float<T>(to_float(h[i]) * scale * to_float(weight[i]));
  }
}

}  // namespace raylm::cuda
