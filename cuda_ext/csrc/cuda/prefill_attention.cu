#include "prefill_attention.h"

#include "raylm/cuda/prefill_attention.cuh"

namespace raylm::cuda {
namespace {

// Whether vectors of 16 bytes begin at the pointer and at every stride, in elements of E.
template <typename E>
bool whole_vectors(const void* pointer, std::initializer_list<int64_t> strides) {
  bool fits = reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
  for (const int64_t stride : strides) fits = fits && stride * sizeof(E) % 16 == 0;
  return fits;
}

template <typename T, typename C>
bool supported(const AttentionParams<T>& a) {
  return a.scale > 0 && whole_vectors<T>(a.q, {a.q_token_stride, a.q_head_stride}) &&
         whole_vectors<C>(a.k_cache, {a.k_block_stride, a.k_slot_stride, a.k_head_stride}) &&
         whole_vectors<C>(a.v_cache, {a.v_block_stride, a.v_slot_stride, a.v_head_stride});
}

template <typename T, typename C, int D, bool Biased>
bool launch(const AttentionParams<T>& a, const PrefillSizes& sizes, const float* alibi_slopes, cudaStream_t stream) {
  using Shape = PrefillShape<D>;
  constexpr auto* kernel = prefill_kernel<T, C, D, Biased>;
  const int64_t tiles = most_tiles(sizes.num_tokens, a.num_seqs, sizes.min_query_len, Shape::kRows);
  const dim3 grid(a.num_heads, tiles > 0 ? tiles : 1);  // one row of blocks for the rows past the last sequence
  int device = 0;
  cudaGetDevice(&device);
  allow_shared<kernel>("paged_attention", device, Shape::kSharedBytes);
  kernel<<<grid, Shape::kThreads, Shape::kSharedBytes, stream>>>(
      prefill_params(a, sizes.num_tokens, sizes.min_query_len), alibi_slopes);
  return true;
}

}  // namespace

template <typename T, typename C>
bool prefill_attention(const AttentionParams<T>& a, const PrefillSizes& sizes, const float* alibi_slopes,
                       cudaStream_t stream) {
  if (!supported<T, C>(a)) return false;
  return by_head_dim<C>(a.head_dim, [&]<int D> {
    if (!alibi_slopes) return launch<T, C, D, false>(a, sizes, nullptr, stream);
    if constexpr (std::is_same_v<C, Code>) return false;
    else return launch<T, C, D, true>(a, sizes, alibi_slopes, stream);
  });
}

using Bf16 = __nv_bfloat16;
template bool prefill_attention<Bf16, Bf16>(const AttentionParams<Bf16>&, const PrefillSizes&, const float*, cudaStream_t);
template bool prefill_attention<Bf16, Code>(const AttentionParams<Bf16>&, const PrefillSizes&, const float*, cudaStream_t);
template bool prefill_attention<__half, __half>(const AttentionParams<__half>&, const PrefillSizes&, const float*,
                                                cudaStream_t);
template bool prefill_attention<__half, Code>(const AttentionParams<__half>&, const PrefillSizes&, const float*,
                                              cudaStream_t);

}  // namespace raylm::cuda
