// Keys and values of new tokens into their slots of the paged cache: plain copies, whatever the type.
#pragma once

#include "raylm/cpu/kernels.h"
#include "raylm/cpu/vec.h"

namespace raylm {
namespace {

inline void store_kv(const StoreArgs& a, int64_t begin, int64_t end) {
  for (int64_t token = begin; token < end; ++token) {
    const int64_t block = a.slots[token] / a.block_size, offset = a.slots[token] % a.block_size;
    for (int side = 0; side < 2; ++side) {
      const char* src = static_cast<const char*>(a.src[side]) + token * a.token_stride[side] * a.element_bytes;
      char* dst = static_cast<char*>(a.cache[side]) +
                  (block * a.block_stride[side] + offset * a.slot_stride[side]) * a.element_bytes;
      for (int64_t head = 0; head < a.num_heads; ++head) {
        std::memcpy(dst + head * a.cache_head_stride[side] * a.element_bytes,
                    src + head * a.head_stride[side] * a.element_bytes, a.row_bytes);
      }
    }
  }
}

}  // namespace
}  // namespace raylm
