// Gated activations (arXiv:2002.05202): act(first half of a row) * second half.
#pragma once

#include "raylm/cuda/ptx/grid.cuh"
#include "raylm/cuda/ptx/math.cuh"
#include "raylm/cuda/tile/vec.cuh"

namespace raylm::cuda {

// x times the logistic function of y, where `power` is -y log2(e).
__device__ inline float times_logistic(float x, float power) { return x * reciprocal_approx(1.0f + exp2_approx(power)); }

struct Silu {
  static constexpr float kScale = -kLog2E;
  __device__ static float power(float x) { return kScale * x; }
  __device__ float operator()(float x) const { return times_logistic(x, power(x)); }
};

// 0.5 * (1 + tanh(y)) is the logistic function of 2 * y.
struct GeluTanh {
  static constexpr float kScale = -1.5957691216f * kLog2E, kCube = 0.044715f * kScale;
  __device__ static float power(float x) { return x * (kScale + kCube * x * x); }
  __device__ float operator()(float x) const { return times_logistic(x, power(x)); }
};

// What becomes of a product's two halves, gate and up.
enum class GateAct { kNone, kSilu, kGeluTanh };

__device__ inline float gated(GateAct act, float gate, float up) {
  return times_logistic(gate, act == GateAct::kSilu ? Silu::power(gate) : GeluTanh::power(gate)) * up;
}

// What an expert makes of gate and up: times_logistic(gate, gate * (scale + cube gate^2)) * (up + offset), where gate is at
// most `limit` and up no further from 0. Of an infinite gate and no limit it is NaN.
struct ExpertGate {
  float scale, cube, limit, offset;

  // Without branches, so that a thread computes several at a time.
  __device__ __forceinline__ float operator()(float gate, float up) const {
    gate = min_or_nan(gate, limit);
    up = max_or_nan(min_or_nan(up, limit), -limit) + offset;
    return times_logistic(gate, gate * (scale + cube * gate * gate)) * up;
  }
};

// Blocks in y share a row; kVecs times 16 bytes of each half a thread. Without vectors: rows of any size and alignment.
template <typename T, typename Act, int kVecs>
__global__ void gated_kernel(const T* x, int64_t x_stride, T* out, int64_t width) {
  constexpr int kSize = kVec<T>;
  start_dependents();
  wait_for_dependencies();
  const int64_t row = blockIdx.x, first = (blockIdx.y * kVecs * blockDim.x + threadIdx.x) * kSize;
  x += row * x_stride;
  out += row * width;
  Vec<T> gate[kVecs], up[kVecs];
#pragma unroll
  for (int j = 0; j < kVecs; ++j) {
    const int64_t at = first + j * blockDim.x * kSize;
    if (at >= width) break;
    gate[j] = Vec<T>::load(x + at);
    up[j] = Vec<T>::load(x + width + at);
  }
#pragma unroll
  for (int j = 0; j < kVecs; ++j) {
    const int64_t at = first + j * blockDim.x * kSize;
    if (at >= width) break;
    for (int i = 0; i < kSize; ++i) gate[j].set(i, Act{}(gate[j][i]) * up[j][i]);
    gate[j].store(out + at);
  }
}

template <typename T, typename Act>
__global__ void gated_any_kernel(const T* x, int64_t x_stride, T* out, int64_t width) {
  start_dependents();
  wait_for_dependencies();
  const T* gate = x + blockIdx.x * x_stride;
  for (int64_t i = blockIdx.y * blockDim.x + threadIdx.x; i < width; i += gridDim.y * blockDim.x) {
    out[blockIdx.x * width + i] = from_float<T>(Act{}(to_float(gate[i])) * to_float(gate[width + i]));
  }
}

}  // namespace raylm::cuda
