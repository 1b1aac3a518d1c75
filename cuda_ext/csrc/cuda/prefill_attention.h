// The fast paths of paged_attention for sequences with many queries. Each returns false where it does not serve the
// shape and has launched nothing; otherwise the sequences of at least min_query_len queries are done, and the rows past
// the last sequence are zero. The arguments have been checked.
#pragma once

#include "decode_attention.h"
#include "launch.h"
#include "raylm/cuda/attention.cuh"
#include "raylm/cuda/tile/numbers.cuh"

namespace raylm::cuda {

struct PrefillSizes {
  int64_t num_tokens, num_blocks, min_query_len;
};

// Calls body.template operator()<D>() for a head size that has kernels over a cache of C; false for others. Caches of codes
// have fewer.
template <typename C, typename Body>
bool by_head_dim(int64_t head_dim, const Body& body) {
  switch (head_dim) {
    case 64: return body.template operator()<64>();
    case 128: return body.template operator()<128>();
    case 256: return body.template operator()<256>();
    default: break;
  }
  if constexpr (!std::is_same_v<C, Code>) {
    switch (head_dim) {
      case 80: return body.template operator()<80>();
      case 96: return body.template operator()<96>();
      case 192: return body.template operator()<192>();
      default: break;
    }
  }
  return false;
}

// Tensor cores of any GPU since Ampere, over a cache of C: T, or Code. alibi_slopes [num_heads] may be null; with them there
// are no kernels over codes.
template <typename T, typename C>
bool prefill_attention(const AttentionParams<T>& params, const PrefillSizes& sizes, const float* alibi_slopes,
                       cudaStream_t stream);

// The same on Hopper, without linear biases.
template <typename T, typename C>
bool prefill_attention_hopper(const AttentionParams<T>& params, const PrefillSizes& sizes, const AttentionCall& call);

}  // namespace raylm::cuda
