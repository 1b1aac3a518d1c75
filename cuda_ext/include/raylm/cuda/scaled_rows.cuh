// Rows of 8-bit numbers with a scale each, the row's largest magnitude / 448: of what is there, or of what a gated
// activation makes.
#pragma once

#include "raylm/cuda/gated.cuh"
#include "raylm/cuda/tile/numbers.cuh"
#include "raylm/cuda/tile/vec.cuh"

namespace raylm::cuda {

constexpr float kLargestCode = 448.0f;

struct ScaledOut {
  Code* codes;  // [rows, size]
  float* scales;
  int64_t size;
};

// The largest over the threads of one row of the block, threadIdx.y; blockDim.x is a multiple of the warp.
__device__ inline float row_max(float x) {
  __shared__ float parts[kWarp];
  for (int step = kWarp / 2; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, step));
  const int warps = blockDim.x / kWarp;
  if (warps == 1) return x;
  float* row = parts + threadIdx.y * warps;
  if (threadIdx.x % kWarp == 0) row[threadIdx.x / kWarp] = x;
  __syncthreads();
  const int lane = threadIdx.x % kWarp;
  x = lane < warps ? row[lane] : 0.0f;
  for (int step = kWarp / 2; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, step));
  return x;
}

// A magnitude to look for the largest among. NaN counts as infinity, whose scale makes the row NaN.
__device__ inline float magnitude(float x) { return x == x ? fabsf(x) : INFINITY; }

// Of a row whose largest magnitude becomes the code `most`.
__device__ inline float scale_of(float largest, float most = kLargestCode) { return fmaxf(largest / most, FLT_MIN); }

// Writes a row that the threads hold as the vectors number threadIdx.x + j * blockDim.x of it. All threads of the block call
// it; those of a row that is not there have `inside` false.
template <typename T, int kVecs>
__device__ void write_scaled(const ScaledOut& out, const Vec<T> (&held)[kVecs], int64_t row, bool inside) {
  constexpr int kSize = kVec<T>;
  float largest = 0;
#pragma unroll
  for (int j = 0; j < kVecs; ++j) {
    const int64_t at = (threadIdx.x + static_cast<int64_t>(j) * blockDim.x) * kSize;
    if (!inside || at >= out.size) continue;
    for (int i = 0; i < kSize; ++i) largest = fmaxf(largest, magnitude(held[j][i]));
  }
  const float scale = scale_of(row_max(largest)), inverse = 1.0f / scale;
  if (inside && threadIdx.x == 0) out.scales[row] = scale;
#pragma unroll
  for (int j = 0; j < kVecs; ++j) {
    const int64_t at = (threadIdx.x + static_cast<int64_t>(j) * blockDim.x) * kSize;
    if (!inside || at >= out.size) continue;
    uint32_t codes[kSize / 4];
    for (int i = 0; i < kSize; i += 4) {
      codes[i / 4] = codes_of(held[j][i] * inverse, held[j][i + 1] * inverse, held[j][i + 2] * inverse,
                              held[j][i + 3] * inverse);
    }
    Code* const to = out.codes + row * out.size + at;
    if constexpr (kSize == 8) {
      *reinterpret_cast<uint2*>(to) = make_uint2(codes[0], codes[1]);
    } else {
      *reinterpret_cast<uint32_t*>(to) = codes[0];
    }
  }
}

// What a row is made of, eight or four numbers at a time or one by one.
template <typename T>
struct RowsAsTheyAre {
  const T* x;
  int64_t stride;

  __device__ Vec<T> vec(int64_t row, int64_t at, int64_t) const { return Vec<T>::load(x + row * stride + at); }
  __device__ float one(int64_t row, int64_t at, int64_t) const { return to_float(x[row * stride + at]); }
};

template <typename T>
struct GatedRows {
  const T* x;
  int64_t stride;
  bool gelu_tanh;

  __device__ float act(float gate) const { return gelu_tanh ? GeluTanh{}(gate) : Silu{}(gate); }
  __device__ Vec<T> vec(int64_t row, int64_t at, int64_t size) const {
    Vec<T> gate = Vec<T>::load(x + row * stride + at);
    const Vec<T> up = Vec<T>::load(x + row * stride + size + at);
    for (int i = 0; i < kVec<T>; ++i) gate.set(i, act(gate[i]) * up[i]);
    return gate;
  }
  __device__ float one(int64_t row, int64_t at, int64_t size) const {
    const T* const gate = x + row * stride + at;
    return to_float(from_float<T>(act(to_float(*gate)) * to_float(gate[size])));
  }
};

// A row stays in registers, kVecs times 16 bytes a thread. threadIdx.y: rows of a block.
template <typename T, typename Rows, int kVecs>
__global__ void __launch_bounds__(1024) scaled_rows_kernel(Rows rows, int64_t count, ScaledOut out) {
  start_dependents();
  wait_for_dependencies();
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  Vec<T> held[kVecs];
#pragma unroll
  for (int j = 0; j < kVecs; ++j) {
    const int64_t at = (threadIdx.x + static_cast<int64_t>(j) * blockDim.x) * kVec<T>;
    if (row < count && at < out.size) held[j] = rows.vec(row, at, out.size);
  }
  write_scaled<T>(out, held, row, row < count);
}

// Rows of any size and alignment: one block a row, which makes it twice.
template <typename Rows>
__global__ void scaled_rows_any_kernel(Rows rows, ScaledOut out) {
  start_dependents();
  wait_for_dependencies();
  const int64_t row = blockIdx.x;
  float largest = 0;
  for (int64_t i = threadIdx.x; i < out.size; i += blockDim.x) {
    largest = fmaxf(largest, magnitude(rows.one(row, i, out.size)));
  }
  const float scale = scale_of(row_max(largest)), inverse = 1.0f / scale;
  if (threadIdx.x == 0) out.scales[row] = scale;
  for (int64_t i = threadIdx.x; i < out.size; i += blockDim.x) {
    out.codes[row * out.size + i] = Code(rows.one(row, i, out.size) * inverse);
  }
}

}  // namespace raylm::cuda
