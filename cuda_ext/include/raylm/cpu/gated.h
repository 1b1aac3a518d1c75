// act(first half of a row) * second half.
#pragma once

#include "raylm/cpu/kernels.h"
#include "raylm/cpu/vec.h"

namespace raylm {
namespace {

RAYLM_INLINE Vec silu(Vec x) { return x / (1.0f + exp(-x)); }

RAYLM_INLINE Vec gelu_tanh(Vec x) {
  const Vec inner = 0.7978845608f * (x + 0.044715f * x * x * x);
  return 0.5f * x * (1.0f + tanh(inner));
}

// GPT-OSS's: both are clamped, and 1 is added to up. In this order NaN stays NaN.
RAYLM_INLINE Vec clamped_swiglu(Vec gate, Vec up, float limit) {
  const Vec most = splat(limit), clamped = min(most, gate);
  return clamped / (1.0f + exp(-1.702f * clamped)) * (max(-most, min(most, up)) + 1.0f);
}

RAYLM_INLINE Vec gated_by(Activation activation, Vec gate, Vec up, float limit) {
  switch (activation) {
    case Activation::kSilu: return silu(gate) * up;
    case Activation::kGeluTanh: return gelu_tanh(gate) * up;
    case Activation::kClampedSwiglu: return clamped_swiglu(gate, up, limit);
  }
  __builtin_unreachable();
}

template <typename T>
inline void gated(const GatedArgs& a, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const T* gate = static_cast<const T*>(a.x) + row * a.x_stride;
    const T* up = gate + a.width;
    T* out = static_cast<T*>(a.out) + row * a.width;
    for_each_vec(a.width, [&](int64_t i, auto load, auto store) {
      const Vec g = load(gate + i);
      store(out + i, (a.activation == Activation::kSilu ? silu(g) : gelu_tanh(g)) * load(up + i));
    });
  }
}

}  // namespace
}  // namespace raylm
