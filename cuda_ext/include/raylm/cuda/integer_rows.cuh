// Rows rounded to integers of 8 bits with a scale each, the row's largest magnitude / 127, in the order in which products
// with weights in patches take them: of each 16 columns 2 t + 8, 2 t, 2 t + 9 and 2 t + 1 for each t below 4.
#pragma once

#include "raylm/cuda/ptx/grid.cuh"
#include "raylm/cuda/scaled_rows.cuh"

namespace raylm::cuda {

constexpr float kLargestInteger = 127.0f;

template <typename T>
struct IntegerRowsParams {
  const T* x;
  int64_t stride;
  signed char* integers;  // [rows, across], zeros behind the columns
  float* scales;
  int columns, across;  // multiples of 16
};

// 16 columns of a row.
template <typename T>
struct Sixteen {
  Vec<T> first, last;

  __device__ static Sixteen load(const T* from) { return {Vec<T>::load(from), Vec<T>::load(from + 8)}; }

  __device__ float largest() const {
    float most = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) most = fmaxf(most, fmaxf(magnitude(first[i]), magnitude(last[i])));
    return most;
  }

  __device__ uint4 integers(float inverse) const {
    uint32_t words[4];
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      const float four[4] = {last[2 * t], first[2 * t], last[2 * t + 1], first[2 * t + 1]};
      words[t] = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) words[t] |= (__float2int_rn(four[i] * inverse) & 0xff) << 8 * i;
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
  }
};

// One block a row. Rows of more than 16,384 columns do not fit the threads' registers, and are read twice.
template <typename T>
__global__ void __launch_bounds__(1024) integer_rows_kernel(IntegerRowsParams<T> p) {
  start_dependents();
  wait_for_dependencies();
  const T* const x = p.x + blockIdx.x * p.stride;
  const int step = blockDim.x * 16, begin = threadIdx.x * 16;
  Sixteen<T> held;
  float largest = 0;
  for (int at = begin; at < p.columns; at += step) {
    held = Sixteen<T>::load(x + at);
    largest = fmaxf(largest, held.largest());
  }
  const float scale = scale_of(row_max(largest), kLargestInteger), inverse = 1.0f / scale;
  if (threadIdx.x == 0) p.scales[blockIdx.x] = scale;
  signed char* const to = p.integers + static_cast<int64_t>(blockIdx.x) * p.across;
  for (int at = begin; at < p.across; at += step) {
    if (p.columns > step && at < p.columns) held = Sixteen<T>::load(x + at);
    *reinterpret_cast<uint4*>(to + at) = at < p.columns ? held.integers(inverse) : make_uint4(0, 0, 0, 0);
  }
}

}  // namespace raylm::cuda
