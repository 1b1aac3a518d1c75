// The fast paths of paged_attention for sequences with many queries. Each returns false where it does not serve the
// shape and has launched nothing; otherwise the sequences of at least min_query_len queries are done, and the rows past
// the last sequence are zero. The arguments have been checked.
#pragma once

#include "launch.h"
#include "raylm/cuda/attention.cuh"

namespace raylm::cuda {

struct PrefillSizes {
  int64_t num_tokens, num_blocks, min_query_len;
};

// Tensor cores of any GPU since Ampere; alibi_slopes [num_heads] may be null.
bool prefill_attention(const AttentionParams<__nv_bfloat16>& params, const PrefillSizes& sizes,
                       const float* alibi_slopes, cudaStream_t stream);
bool prefill_attention(const AttentionParams<__half>& params, const PrefillSizes& sizes, const float* alibi_slopes,
                       cudaStream_t stream);

// Hopper, without linear biases; `like` is any tensor on its device, for the allocator.
bool prefill_attention_hopper(const AttentionParams<__nv_bfloat16>& params, const PrefillSizes& sizes,
                              const Tensor& like, cudaStream_t stream);
bool prefill_attention_hopper(const AttentionParams<__half>& params, const PrefillSizes& sizes, const Tensor& like,
                              cudaStream_t stream);

}  // namespace raylm::cuda
