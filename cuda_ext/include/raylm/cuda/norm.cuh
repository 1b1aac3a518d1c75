// Root-mean-square norm (arXiv:1910.07467), with the residual added first where there is one.
#pragma once

#include "raylm/cuda/scaled_rows.cuh"

namespace raylm::cuda {

template <typename T>
struct NormParams {
  const T* x;  // row r starts at (r / inner) * outer_stride + (r % inner) * inner_stride
  int64_t rows, inner, outer_stride, inner_stride;
  T* residual;  // null: plain norm; else x is added to it and the norm is that of the sum
  int64_t residual_stride;
  const T* weight;
  T* out;  // contiguous rows
  int64_t hidden;
  float eps;
  const T* other = nullptr;  // where rows are a sum of two parts, the second one, laid out as x

  __device__ const T* row(int64_t r) const { return x + r / inner * outer_stride + r % inner * inner_stride; }
};

// The sum over the threads of one row of the block, threadIdx.y; blockDim.x is a multiple of the warp.
__device__ inline float row_sum(float x) {
  __shared__ float parts[kWarp];
  x = warp_sum(x);
  const int warps = blockDim.x / kWarp;
  if (warps == 1) return x;
  float* row = parts + threadIdx.y * warps;
  if (threadIdx.x % kWarp == 0) row[threadIdx.x / kWarp] = x;
  __syncthreads();
  const int lane = threadIdx.x % kWarp;
  return warp_sum(lane < warps ? row[lane] : 0.0f);
}

// A row stays in registers, kVecs times 16 bytes a thread, so that everything is read once. threadIdx.y: rows of a block.
// With kIsScaled, `scaled` gets the rows instead of p.out.
template <typename T, int kVecs, bool kIsScaled>
__global__ void __launch_bounds__(1024) rms_norm_kernel(NormParams<T> p, ScaledOut scaled) {
  constexpr int kSize = kVec<T>;
  start_dependents();
  wait_for_dependencies();
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  const bool inside = row < p.rows;
  const T* x = inside ? p.row(row) : nullptr;
  T* residual = p.residual + row * p.residual_stride;
  Vec<T> held[kVecs], weight[kVecs];
  float squares = 0;
#pragma unroll
  for (int j = 0; j < kVecs; ++j) {
    const int64_t at = (threadIdx.x + static_cast<int64_t>(j) * blockDim.x) * kSize;
    if (!inside || at >= p.hidden) continue;
    held[j] = Vec<T>::load(x + at);
    weight[j] = Vec<T>::load(p.weight + at);
    if (p.residual) {
      const Vec<T> before = Vec<T>::load(residual + at);
      // As rounded to T, like every later reader sees it.
      if (p.other) {
        const Vec<T> more = Vec<T>::load(p.other + (x - p.x) + at);
        for (int i = 0; i < kSize; ++i) held[j].set(i, held[j][i] + more[i] + before[i]);
      } else {
        for (int i = 0; i < kSize; ++i) held[j].set(i, held[j][i] + before[i]);
      }
      held[j].store(residual + at);
    }
    for (int i = 0; i < kSize; ++i) squares += held[j][i] * held[j][i];
  }
  const float scale = rsqrtf(row_sum(squares) / static_cast<float>(p.hidden) + p.eps);
#pragma unroll
  for (int j = 0; j < kVecs; ++j) {
    const int64_t at = (threadIdx.x + static_cast<int64_t>(j) * blockDim.x) * kSize;
    if (!inside || at >= p.hidden) continue;
    for (int i = 0; i < kSize; ++i) held[j].set(i, held[j][i] * scale * weight[j][i]);
    if constexpr (!kIsScaled) held[j].store(p.out + row * p.hidden + at);
  }
  if constexpr (kIsScaled) write_scaled<T>(scaled, held, row, inside);
}

// Rows of any size and alignment: one block a row, which reads it twice.
template <typename T>
__global__ void rms_norm_any_kernel(NormParams<T> p) {
  start_dependents();
  wait_for_dependencies();
  const int64_t row = blockIdx.x;
  const T* x = p.row(row);
  T* residual = p.residual ? p.residual + row * p.residual_stride : nullptr;
  float squares = 0;
  for (int64_t i = threadIdx.x; i < p.hidden; i += blockDim.x) {
    float v = to_float(x[i]);
    if (residual) {
      if (p.other) v += to_float(p.other[x - p.x + i]);
      residual[i] = from_float<T>(v + to_float(residual[i]));
      v = to_float(residual[i]);
    }
    squares += v * v;
  }
  const float scale = rsqrtf(row_sum(squares) / static_cast<float>(p.hidden) + p.eps);
  const T* h = residual ? residual : x;
  for (int64_t i = threadIdx.x; i < p.hidden; i += blockDim.x) {
    p.out[row * p.hidden + i] = from_float<T>(to_float(h[i]) * scale * to_float(p.weight[i]));
  }
}

}  // namespace raylm::cuda
