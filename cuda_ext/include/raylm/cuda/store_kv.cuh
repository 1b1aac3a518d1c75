#pragma once

#include "raylm/cuda/tile/numbers.cuh"

namespace raylm::cuda {

// From numbers of T into a cache of C.
template <typename T, typename C>
struct StoreSide {
  const T* src;
  C* cache;
  int64_t token_stride, head_stride;
  int64_t block_stride, slot_stride, cache_head_stride;
  float inverse;  // of the scale, where the cache holds codes
};

// One block a token. A slot outside the cache is skipped.
template <typename T, typename C>
__global__ void store_kv_kernel(StoreSide<T, C> k, StoreSide<T, C> v, const int64_t* slots, int64_t num_slots,
                                int64_t block_size, int64_t num_heads, int64_t head_dim) {
  const int64_t token = blockIdx.x, slot = slots[token];
  if (slot < 0 || slot >= num_slots) return;
  const int64_t block = slot / block_size, offset = slot % block_size;
  for (int64_t i = threadIdx.x; i < num_heads * head_dim; i += blockDim.x) {
    const int64_t head = i / head_dim, d = i % head_dim;
    k.cache[block * k.block_stride + offset * k.slot_stride + head * k.cache_head_stride + d] =
        kept<C>(k.src[token * k.token_stride + head * k.head_stride + d], k.inverse);
    v.cache[block * v.block_stride + offset * v.slot_stride + head * v.cache_head_stride + d] =
        kept<C>(v.src[token * v.token_stride + head * v.head_stride + d], v.inverse);
  }
}

}  // namespace raylm::cuda
