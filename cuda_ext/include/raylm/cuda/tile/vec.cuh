// 16 bytes of storage at a time, in float arithmetic.
#pragma once

#include "raylm/cuda/common.cuh"

namespace raylm::cuda {

template <typename T>
inline constexpr int kVec = 16 / static_cast<int>(sizeof(T));

// The elements of one 16-byte access to p, which is 16-byte aligned.
template <typename T>
struct alignas(16) Vec {
  T x[kVec<T>];

  __device__ static Vec load(const T* p) {
    const uint4 raw = *reinterpret_cast<const uint4*>(p);
    return *reinterpret_cast<const Vec*>(&raw);
  }
  __device__ void store(T* p) const { *reinterpret_cast<uint4*>(p) = *reinterpret_cast<const uint4*>(this); }
  __device__ float operator[](int i) const { return to_float(x[i]); }
  __device__ void set(int i, float value) { x[i] = from_float<T>(value); }
};

}  // namespace raylm::cuda
