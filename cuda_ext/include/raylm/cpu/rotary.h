// Rotary position embedding in place, dimension i paired with i + R/2.
#pragma once

#include "raylm/cpu/kernels.h"
#include "raylm/cpu/vec.h"

namespace raylm {
namespace {

template <typename T>
inline void rotary(const RotaryArgs& a, int64_t begin, int64_t end) {
  const int64_t half = a.rotary_dim / 2;
  for (int64_t token = begin; token < end; ++token) {
    const float* cos = a.cos_sin + a.positions[token] * a.rotary_dim;
    const float* sin = cos + half;
    for (int side = 0; side < 2; ++side) {
      T* first = static_cast<T*>(a.x[side]) + token * a.token_stride[side];
      for (int64_t head = 0; head < a.num_heads[side]; ++head, first += a.head_stride[side]) {
        T* second = first + half;
        for_each_vec(half, [&](int64_t i, auto load, auto store) {
          const Vec c = load(cos + i), s = load(sin + i), u = load(first + i), v = load(second + i);
          store(first + i, u * c - v * s);
          store(second + i, v * c + u * s);
        });
      }
    }
  }
}

}  // namespace
}  // namespace raylm
