#pragma once

#include <optional>

#include "launch.h"
#include "raylm/cuda/attention.cuh"

namespace raylm::cuda {

constexpr int64_t kMaxDecodeQueries = 16;

// What attention takes beside its parameters. max_query_len and max_seq_len bound the lengths; alibi_slopes [num_heads]
// may be null; `arrivals`, `prefixes` and `frozen` are as paged_attention takes them, `prefixes` for decode_with_prefixes
// alone.
struct DecodeCall {
  const Tensor& q;
  int64_t max_query_len, max_seq_len;
  const float* alibi_slopes;
  const std::optional<Tensor>&arrivals, &prefixes;
  bool frozen;
};

// Attention of the sequences with at most kMaxDecodeQueries queries, and zeros for rows past the last sequence, over a
// cache of C: T, or Code. Where this kernel cannot take the arguments it does nothing and returns false.
template <typename T, typename C>
bool decode_attention(const AttentionParams<T>& params, const DecodeCall& call);

// The same with `prefixes`, for which there are kernels of few shapes.
template <typename T, typename C>
bool decode_with_prefixes(const AttentionParams<T>& params, const DecodeCall& call);

// Whether decode_attention takes 16-bit queries of such a shape on the device; `group` query heads share a KV head.
template <typename T, typename C>
bool has_decode_attention(int64_t head_dim, int64_t group, int64_t block_size, bool biased, int device);

}  // namespace raylm::cuda
