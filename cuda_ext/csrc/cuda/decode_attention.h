#pragma once

#include <algorithm>
#include <optional>

#include "launch.h"
#include "raylm/cuda/attention.cuh"

namespace raylm::cuda {

constexpr int64_t kMaxDecodeQueries = 16;

// How many rows of a sequence, pairs of a query and a head of the group, a block of decode's two kernels has room for.
constexpr int64_t kNarrowRows = 32, kWideRows = 64;

// Whether the narrow kernel serves, which multiplies 8 rows where the wide one multiplies 16, and is faster where sequences
// have no more. In a step with prefill most of decode's sequences have one query, and prefill can take those with more.
inline bool narrow_decode(int64_t max_query_len, int64_t group) {
  return (max_query_len > kMaxDecodeQueries ? 1 : max_query_len) * group <= 8;
}

// Sequences with more queries are not decode's. In a step with prefill they are those whose rows a block has no room for.
inline int64_t most_decode_queries(int64_t max_query_len, int64_t group) {
  if (max_query_len <= kMaxDecodeQueries) return max_query_len;
  const int64_t room = narrow_decode(max_query_len, group) ? kNarrowRows : kWideRows;
  return std::clamp<int64_t>(room / group, 1, kMaxDecodeQueries);
}

// The last of the call's `arrivals`, so many, are the counters of prefill's tiles.
constexpr int64_t kTileCounters = 2;

// What attention takes beside its parameters. max_query_len and max_seq_len bound the lengths; the cache has
// num_blocks; alibi_slopes [num_heads] may be null; `arrivals`, `prefixes` and `frozen` are as paged_attention takes them,
// `prefixes` for decode_with_prefixes alone.
struct AttentionCall {
  const Tensor& q;
  int64_t max_query_len, max_seq_len, num_blocks;
  const float* alibi_slopes;
  const std::optional<Tensor>&arrivals, &prefixes;
  bool frozen;
};

// Attention of the sequences with at most most_decode_queries queries, and zeros for rows past the last sequence, over a
// cache of C: T, or Code. Where this kernel cannot take the arguments it does nothing and returns false.
template <typename T, typename C>
bool decode_attention(const AttentionParams<T>& params, const AttentionCall& call);

// The same with `prefixes`, for which there are kernels of few shapes.
template <typename T, typename C>
bool decode_with_prefixes(const AttentionParams<T>& params, const AttentionCall& call);

// Whether decode_attention takes 16-bit queries of such a shape on the device; `group` query heads share a KV head.
template <typename T, typename C>
bool has_decode_attention(int64_t head_dim, int64_t group, int64_t block_size, bool biased, int device);

}  // namespace raylm::cuda
