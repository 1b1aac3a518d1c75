// What the CPU launchers share.
#pragma once

#include "checks.h"
#include "raylm/cpu/kernels.h"

namespace raylm {

inline DType dtype_of(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::BFloat16: return DType::kBFloat16;
    case ScalarType::Half: return DType::kFloat16;
    default: return DType::kFloat32;
  }
}

inline Tensor empty_like_shape(const Tensor& like, std::initializer_list<int64_t> sizes) {
  return torch::stable::new_empty(like, torch::headeronly::IntHeaderOnlyArrayRef(sizes.begin(), sizes.size()));
}

// Splits `count` items of `cost` elements each over torch's own threads, in pieces that are worth a thread.
template <typename Body>
void for_range(int64_t count, int64_t cost, const Body& body) {
  constexpr int64_t kWorthAThread = 16384;
  const int64_t grain = kWorthAThread / (cost > 0 ? cost : 1) + 1;
  torch::stable::parallel_for(0, count, grain, body);
}

// An index tensor's values, each checked to be in [0, limit).
inline const int64_t* checked_indices(const char* op, const char* name, const Tensor& tensor, int64_t limit) {
  const int64_t* values = tensor.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < tensor.numel(); ++i) {
    if (values[i] < 0 || values[i] >= limit) {
      fail(op, name, "[", i, "] is ", values[i], ", must be at least 0 and below ", limit);
    }
  }
  return values;
}

}  // namespace raylm
