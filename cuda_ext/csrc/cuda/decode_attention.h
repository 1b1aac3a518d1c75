#pragma once

#include <optional>

#include "launch.h"
#include "raylm/cuda/attention.cuh"

namespace raylm::cuda {

constexpr int64_t kMaxDecodeQueries = 16;

// Attention of the sequences with at most kMaxDecodeQueries queries, and zeros for rows past the last sequence, over a
// cache of C: T, or Code. Where this kernel cannot take the arguments it does nothing and returns false. alibi_slopes
// [num_heads] may be null. `arrivals` is as paged_attention takes it.
template <typename T, typename C>
bool decode_attention(const AttentionParams<T>& params, const Tensor& q, int64_t max_query_len, int64_t max_seq_len,
                      const float* alibi_slopes, const std::optional<Tensor>& arrivals);

// Whether that kernel takes 16-bit queries of such a shape on the device; `group` query heads share a KV head.
template <typename T, typename C>
bool has_decode_attention(int64_t head_dim, int64_t group, int64_t block_size, bool biased, int device);

}  // namespace raylm::cuda
