#pragma once

#include "raylm/cuda/common.cuh"

namespace raylm::cuda {

struct Silu {
  __device__ float operator()(float x) const { return x / (1.0f + __expf(-x)); }
};

struct GeluTanh {
  __device__ float operator()(float x) const {
    return 0.5f * x * (1.0f + tanhf(0.7978845608f * (x + 0.044715f * x * x * x)));
  }
};

// act(first half of a row) * second half; blocks in y share a row.
template <typename T, typename Act>
__global__ void gated_kernel(const T* x, int64_t x_stride, T* out, int64_t width) {
  const int64_t row = blockIdx.x;
  const T* gate = x + row * x_stride;
  for (int64_t i = blockIdx.y * blockDim.x + threadIdx.x; i < width; i += gridDim.y * blockDim.x) {
    out[row * width + i] = from_float<T>(Act{}(to_float(gate[i])) * to_float(gate[width + i]));
  }
}

}  // namespace raylm::cuda
