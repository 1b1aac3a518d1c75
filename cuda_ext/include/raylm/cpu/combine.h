// Sums of rows with a weight each: what a token's experts made of it.
#pragma once

#include "raylm/cpu/kernels.h"
#include "raylm/cpu/vec.h"

namespace raylm {
namespace {

template <typename T>
inline void combine(const CombineArgs& a, int64_t begin, int64_t end) {
  const T* parts = static_cast<const T*>(a.parts);
  for (int64_t row = begin; row < end; ++row) {
    const int64_t* places = a.places + row * a.per_row;
    const float* weights = a.weights + row * a.per_row;
    T* out = static_cast<T*>(a.out) + row * a.width;
    for_each_vec(a.width, [&](int64_t i, auto load, auto store) {
      Vec sum{};
      for (int64_t k = 0; k < a.per_row; ++k) sum += weights[k] * load(parts + places[k] * a.width + i);
      store(out + i, sum);
    });
  }
}

}  // namespace
}  // namespace raylm
