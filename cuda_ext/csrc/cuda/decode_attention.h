#pragma once

#include <optional>

#include "launch.h"
#include "raylm/cuda/attention.cuh"

namespace raylm::cuda {

constexpr int64_t kMaxDecodeQueries = 16;

// Attention of the sequences with at most kMaxDecodeQueries queries, and zeros for rows past the last sequence. Where
// this kernel cannot take the arguments it does nothing and returns false. alibi_slopes [num_heads] may be null. `arrivals`
// is as paged_attention takes it.
template <typename T>
bool decode_attention(const AttentionParams<T>& params, const Tensor& q, int64_t max_query_len, int64_t max_seq_len,
                      const float* alibi_slopes, const std::optional<Tensor>& arrivals);

// Whether that kernel takes 16-bit numbers of such a shape on the device; `group` query heads share a KV head.
template <typename T>
bool has_decode_attention(int64_t head_dim, int64_t group, int64_t block_size, bool biased, int device);

extern template bool decode_attention(const AttentionParams<__half>&, const Tensor&, int64_t, int64_t, const float*,
                                      const std::optional<Tensor>&);
extern template bool decode_attention(const AttentionParams<__nv_bfloat16>&, const Tensor&, int64_t, int64_t,
                                      const float*, const std::optional<Tensor>&);
extern template bool has_decode_attention<__half>(int64_t, int64_t, int64_t, bool, int);
extern template bool has_decode_attention<__nv_bfloat16>(int64_t, int64_t, int64_t, bool, int);

}  // namespace raylm::cuda
