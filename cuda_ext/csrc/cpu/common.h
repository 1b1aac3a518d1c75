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

inline RotaryArgs rotary_args(const char* op, const Tensor& q, const Tensor& k, const Tensor& positions,
                              const Tensor& cos_sin) {
  RotaryArgs args{};
  args.dtype = dtype_of(q);
  args.positions = checked_indices(op, "positions", positions, cos_sin.size(0));
  args.cos_sin = cos_sin.const_data_ptr<float>();
  args.rotary_dim = cos_sin.size(1);
  const Tensor* sides[2] = {&q, &k};
  for (int side = 0; side < 2; ++side) {
    args.x[side] = sides[side]->mutable_data_ptr();
    args.token_stride[side] = sides[side]->stride(0);
    args.head_stride[side] = sides[side]->stride(1);
    args.num_heads[side] = sides[side]->size(1);
  }
  return args;
}

inline StoreArgs store_args(const char* op, const Tensor& k, const Tensor& v, const Tensor& k_cache,
                            const Tensor& v_cache, const Tensor& slot_mapping) {
  StoreArgs args{};
  args.block_size = k_cache.size(1);
  args.slots = checked_indices(op, "slot_mapping", slot_mapping, k_cache.size(0) * args.block_size);
  args.num_heads = k.size(1);
  args.element_bytes = static_cast<int64_t>(k.element_size());
  args.row_bytes = k.size(2) * args.element_bytes;
  const Tensor* sources[2] = {&k, &v};
  const Tensor* caches[2] = {&k_cache, &v_cache};
  for (int side = 0; side < 2; ++side) {
    args.src[side] = sources[side]->const_data_ptr();
    args.token_stride[side] = sources[side]->stride(0);
    args.head_stride[side] = sources[side]->stride(1);
    args.cache[side] = caches[side]->mutable_data_ptr();
    args.block_stride[side] = caches[side]->stride(0);
    args.slot_stride[side] = caches[side]->stride(1);
    args.cache_head_stride[side] = caches[side]->stride(2);
  }
  return args;
}

}  // namespace raylm
