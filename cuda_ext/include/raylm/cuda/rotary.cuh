#pragma once

#include "raylm/cuda/common.cuh"

namespace raylm::cuda {

template <typename T>
struct RotarySide {
  T* x;
  int64_t token_stride, head_stride, num_heads;
};

// One block a token; its threads go over (head, pair). A position outside the table leaves its token as it is.
template <typename T>
__global__ void rotary_kernel(RotarySide<T> q, RotarySide<T> k, const int64_t* positions, const float* cos_sin,
                              int64_t max_position, int64_t rotary_dim) {
  const int64_t token = blockIdx.x, half = rotary_dim / 2, position = positions[token];
  if (position < 0 || position >= max_position) return;
  const float* cos = cos_sin + position * rotary_dim;
  for (int64_t i = threadIdx.x; i < (q.num_heads + k.num_heads) * half; i += blockDim.x) {
    const int64_t head = i / half, pair = i % half;
    T* x = head < q.num_heads ? q.x + token * q.token_stride + head * q.head_stride
                              : k.x + token * k.token_stride + (head - q.num_heads) * k.head_stride;
    const float c = cos[pair], s = cos[pair + half], u = to_float(x[pair]), v = to_float(x[pair + half]);
    x[pair] = from_float<T>(u * c - v * s);
    x[pair + half] = from_float<T>(v * c + u * s);
  }
}

}  // namespace raylm::cuda
