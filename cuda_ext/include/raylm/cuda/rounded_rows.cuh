// Rows rounded to integers or floats (e4m3) of 8 bits with a scale each, the row's largest magnitude / 127 or 448, in the
// order in which products with weights in patches take them: of each 16 columns 2 t + 8, 2 t, 2 t + 9 and 2 t + 1 for each t
// below 4.
#pragma once

#include "raylm/cuda/ptx/grid.cuh"
#include "raylm/cuda/scaled_rows.cuh"

namespace raylm::cuda {

template <typename Byte>
inline constexpr float kLargestByte = std::is_same_v<Byte, Code> ? kLargestCode : 127.0f;

template <typename T>
struct RoundedRowsParams {
  const T* x;
  int64_t stride;
  unsigned char* bytes;  // [rows or places, across], zeros behind the columns
  float* scales;
  const int* places;  // [rows, each]: where a row goes, if it is spread
  int rows, each;
  int columns, across;  // multiples of 16
};

// The numbers of 8 bits nearest to these.
template <typename Byte>
__device__ inline uint32_t bytes_of(const float (&four)[4]) {
  if constexpr (std::is_same_v<Byte, Code>) {
    return codes_of(four[0], four[1], four[2], four[3]);
  } else {
    uint32_t word = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) word |= (__float2int_rn(four[i]) & 0xff) << 8 * i;
    return word;
  }
}

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

  template <typename Byte>
  __device__ uint4 rounded(float inverse) const {
    uint32_t words[4];
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      const int i = 2 * t;
      words[t] = bytes_of<Byte>({last[i] * inverse, first[i] * inverse, last[i + 1] * inverse, first[i + 1] * inverse});
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
  }
};

// threadIdx.y: rows of a block. A thread holds 16 columns `Held` times; rows that do not fit are read twice.
template <typename T, typename Byte, int Held, bool Spreads>
__global__ void __launch_bounds__(1024, 1) rounded_rows_kernel(RoundedRowsParams<T> p) {
  if (!Spreads) start_dependents();
  wait_for_dependencies();
  if (Spreads) start_dependents();  // only now: the next kernel reads early what the one ahead of this has written
  const int row = blockIdx.x * blockDim.y + threadIdx.y, columns = row < p.rows ? p.columns : 0;
  const T* const x = p.x + row * p.stride;
  const int step = blockDim.x * 16, begin = threadIdx.x * 16;
  Sixteen<T> held[Held];
  float largest = 0;
#pragma unroll
  for (int i = 0; i < Held; ++i) {
    if (begin + i * step < columns) held[i] = Sixteen<T>::load(x + begin + i * step);
  }
#pragma unroll
  for (int i = 0; i < Held; ++i) {
    if (begin + i * step < columns) largest = fmaxf(largest, held[i].largest());
  }
  for (int at = begin + Held * step; at < columns; at += step) largest = fmaxf(largest, Sixteen<T>::load(x + at).largest());
  const float scale = scale_of(row_max(largest), kLargestByte<Byte>), inverse = 1.0f / scale;
  if (row >= p.rows) return;
  const int* const places = p.places + row * p.each;
  if constexpr (Spreads) {
    for (int i = threadIdx.x; i < p.each; i += blockDim.x) p.scales[places[i]] = scale;
  } else if (threadIdx.x == 0) {
    p.scales[row] = scale;
  }
  const auto write = [&](int at, const Sixteen<T>& sixteen) {
    const uint4 bytes = at < p.columns ? sixteen.template rounded<Byte>(inverse) : make_uint4(0, 0, 0, 0);
    const auto put = [&](int to) { *reinterpret_cast<uint4*>(p.bytes + static_cast<int64_t>(to) * p.across + at) = bytes; };
    if constexpr (Spreads) {
#pragma unroll 4
      for (int i = 0; i < p.each; ++i) put(places[i]);
    } else {
      put(row);
    }
  };
#pragma unroll
  for (int i = 0; i < Held; ++i) {
    if (begin + i * step < p.across) write(begin + i * step, held[i]);
  }
  for (int at = begin + Held * step; at < p.across; at += step) {
    write(at, at < p.columns ? Sixteen<T>::load(x + at) : Sixteen<T>{});
  }
}

}  // namespace raylm::cuda
