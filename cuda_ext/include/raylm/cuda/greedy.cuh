// The largest logit of a warp's part of a row, and its token: two logits of 16 bits are compared at a time, and the token
// is looked for once a lane knows the largest.
#pragma once

#include "raylm/cuda/order.cuh"
#include "raylm/cuda/tile/fragments.cuh"
#include "raylm/cuda/tile/vec.cuh"

namespace raylm::cuda {

// The larger of two numbers, or of two pairs; what is no number is the largest.
template <typename T>
__device__ inline uint32_t larger(uint32_t a, uint32_t b) {
  if constexpr (sizeof(T) == 4) {
    float most;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(most) : "f"(__uint_as_float(a)), "f"(__uint_as_float(b)));
    return __float_as_uint(most);
  }
  uint32_t most;
  if constexpr (std::is_same_v<T, __half>) {
    asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(most) : "r"(a), "r"(b));
  } else {
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(most) : "r"(a), "r"(b));
  }
  return most;
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
template <typename T>
class GreedyRow {
 public:
  // x: the row, of which the warp has the tokens first to end. vectors: it is aligned for 16-byte loads.
  __device__ GreedyRow(const T* x, bool vectors, int first, int end)
      : x_(x), vectors_(vectors), first_(first), end_(end) {}

  // The largest logit's order-preserving image, with its token (ordered()). NaN counts as infinity: a row that has one still gives a token.
  __device__ uint64_t best_of_warp() {
    const int own = first_ + static_cast<int>(threadIdx.x) % kWarp * kSize;
    float best = -INFINITY;
    int token = first_;
    for (int base = own; base < end_; base += kHeld * kWarp * kSize) {
#pragma unroll
      for (int j = 0; j < kHeld; ++j) {
        const int at = base + j * kWarp * kSize;
        if (whole(at)) held_[j] = *reinterpret_cast<const uint4*>(x_ + at);
      }
      const float most = largest_held(base);
      if (most > best) best = most, token = place_of(most, base);
      for (int j = 0; j < kHeld; ++j) {
        const int at = base + j * kWarp * kSize;
        for (int i = at; !whole(at) && i < min(at + kSize, end_); ++i) {
          const float value = comparable(to_float(x_[i]));
          if (value > best) best = value, token = i;
        }
      }
    }
    return warp_max(first_ < end_ ? ordered(image_of(best), token) : 0);
  }

 private:
  static constexpr int kSize = kVec<T>, kHeld = 4;

  __device__ bool whole(int at) const { return vectors_ && at + kSize <= end_; }

  __device__ float largest_held(int base) const {
    constexpr bool kPairs = sizeof(T) == 2;
    constexpr uint32_t kLeast = !kPairs ? 0xff800000u : std::is_same_v<T, __half> ? 0xfc00fc00u : 0xff80ff80u;
    uint32_t most = kLeast;
#pragma unroll
    for (int j = 0; j < kHeld; ++j) {
      const uint32_t low = larger<T>(held_[j].x, held_[j].y), high = larger<T>(held_[j].z, held_[j].w);
      if (whole(base + j * kWarp * kSize)) most = larger<T>(most, larger<T>(low, high));
    }
    if constexpr (kPairs) {
      const float2 pair = unpack<T>(most);
      return pair.x != pair.x || pair.y != pair.y ? INFINITY : fmaxf(pair.x, pair.y) + 0.0f;
    } else {
      return comparable(__uint_as_float(most));
    }
  }

  // The first token held whose logit is no less than the largest.
  __device__ int place_of(float most, int base) const {
    int token = base;
#pragma unroll
    for (int j = kHeld - 1; j >= 0; --j) {
      const int at = base + j * kWarp * kSize;
      if (!whole(at)) continue;
      const uint32_t words[4] = {held_[j].x, held_[j].y, held_[j].z, held_[j].w};
#pragma unroll
      for (int i = 3; i >= 0; --i) {
        if constexpr (sizeof(T) == 2) {
          const float2 pair = unpack<T>(words[i]);
          if (!(pair.y < most)) token = at + 2 * i + 1;
          if (!(pair.x < most)) token = at + 2 * i;
        } else {
          if (!(__uint_as_float(words[i]) < most)) token = at + i;
        }
      }
    }
    return token;
  }

  const T* const x_;
  const bool vectors_;
  const int first_, end_;
  uint4 held_[kHeld];
};
#endif

}  // namespace raylm::cuda
