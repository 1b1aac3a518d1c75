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

// Calls body.template operator()<D>() for a head size that has kernels; false for others.
template <typename Body>
bool by_head_dim(int64_t head_dim, const Body& body) {
  switch (head_dim) {
    case 64: return body.template operator()<64>();
    case 80: return body.template operator()<80>();
    case 96: return body.template operator()<96>();
    case 128: return body.template operator()<128>();
    case 192: return body.template operator()<192>();
    case 256: return body.template operator()<256>();
    default: return false;
  }
}

// The same for caches of codes, which have fewer kernels.
template <typename Body>
bool by_code_head_dim(int64_t head_dim, const Body& body) {
  switch (head_dim) {
    case 64: return body.template operator()<64>();
    case 128: return body.template operator()<128>();
    case 256: return body.template operator()<256>();
    default: return false;
  }
}

// Tensor cores of any GPU since Ampere; alibi_slopes [num_heads] may be null.
bool prefill_attention(const AttentionParams<__nv_bfloat16>& params, const PrefillSizes& sizes,
                       const float* alibi_slopes, cudaStream_t stream);
bool prefill_attention(const AttentionParams<__half>& params, const PrefillSizes& sizes, const float* alibi_slopes,
                       cudaStream_t stream);

// The same over a cache of codes, without linear biases.
bool prefill_attention_codes(const AttentionParams<__nv_bfloat16>& params, const PrefillSizes& sizes,
                             cudaStream_t stream);
bool prefill_attention_codes(const AttentionParams<__half>& params, const PrefillSizes& sizes, cudaStream_t stream);

// Hopper, without linear biases; `like` is any tensor on its device, for the allocator.
bool prefill_attention_hopper(const AttentionParams<__nv_bfloat16>& params, const PrefillSizes& sizes,
                              const Tensor& like, cudaStream_t stream);
bool prefill_attention_hopper(const AttentionParams<__half>& params, const PrefillSizes& sizes, const Tensor& like,
                              cudaStream_t stream);

// The same over a cache of codes.
bool prefill_attention_hopper_codes(const AttentionParams<__nv_bfloat16>& params, const PrefillSizes& sizes,
                                    const Tensor& like, cudaStream_t stream);
bool prefill_attention_hopper_codes(const AttentionParams<__half>& params, const PrefillSizes& sizes,
                                    const Tensor& like, cudaStream_t stream);

}  // namespace raylm::cuda
