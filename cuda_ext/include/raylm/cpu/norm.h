// Root-mean-square norm, with the residual added first where there is one.
#pragma once

#include "raylm/cpu/kernels.h"
#include "raylm/cpu/vec.h"

namespace raylm {
namespace {

template <typename T>
inline void rms_norm_row(const T* x, T* residual, const T* weight, T* out, int64_t size, float eps) {
  Vec squares{};
  for_each_vec(size, [&](int64_t i, auto load, auto store) {
    Vec v = load(x + i);
    if (residual) {
      store(residual + i, v + load(residual + i));
      v = load(residual + i);  // as rounded to T, like every later reader sees it
    }
    squares += v * v;
  });
  const float mean = sum(squares) / static_cast<float>(size);
  const float scale = 1.0f / __builtin_sqrtf(mean + eps);
  const T* h = residual ? residual : x;
  for_each_vec(size, [&](int64_t i, auto load, auto store) { store(out + i, load(h + i) * scale * load(weight + i)); });
}

template <typename T>
inline void rms_norm(const NormArgs& a, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const T* x = static_cast<const T*>(a.x) + row / a.inner * a.outer_stride + row % a.inner * a.inner_stride;
    T* residual = a.residual ? static_cast<T*>(a.residual) + row * a.residual_stride : nullptr;
    T* out = static_cast<T*>(a.out) + row * a.hidden;
    rms_norm_row(x, residual, static_cast<const T*>(a.weight), out, a.hidden, a.eps);
  }
}

}  // namespace
}  // namespace raylm
