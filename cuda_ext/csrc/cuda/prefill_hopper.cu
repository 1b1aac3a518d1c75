#include <algorithm>
#include <numeric>

#include "prefill_attention.h"
#include "raylm/cuda/prefill_hopper.cuh"
#include "tensor_map.h"

namespace raylm::cuda {
namespace {

// As HopperParams says. Halves of all heads are one dimension only where heads follow each other without a gap.
template <typename C, int D, typename T>
bool make_cache_map(CUtensorMap* map, const void* cache, const AttentionParams<T>& a, const PrefillSizes& sizes,
                    int box_slots, int64_t slot_stride, int64_t head_stride, int64_t block_stride) {
  using Shape = HopperShape<C, D>;
  const int64_t box_groups = box_slots / 8;
  if constexpr (Shape::kWhole && !Shape::kCodes) {
    return make_heads_map<C, D>(map, cache, sizes.num_blocks, a.block_size, a.num_kv_heads, block_stride, slot_stride,
                                head_stride, box_groups);
  } else {
    const C* data = static_cast<const C*>(cache);
    const int64_t groups = a.block_size / 8;
    return make_map<C, 5>(map, data, {D, 8, a.num_kv_heads, groups, sizes.num_blocks},
                          {slot_stride, head_stride, 8 * slot_stride, block_stride},
                          {Shape::kCodes ? D : 64, 8, 1, box_groups, 1},
                          Shape::kCodes ? CU_TENSOR_MAP_SWIZZLE_NONE : CU_TENSOR_MAP_SWIZZLE_128B);
  }
}

template <typename C, int D, typename T>
bool make_params(HopperParams<T>& params, const AttentionParams<T>& a, const PrefillSizes& sizes) {
  using Shape = HopperShape<C, D>;
  params.p = prefill_params(a, sizes.num_tokens, sizes.min_query_len);
  const int64_t common = std::gcd<int64_t, int64_t>(a.block_size, Shape::kCodes ? Shape::kPartRows : Shape::kKeys);
  params.box_slots = static_cast<int>(common & -common);  // a power of two
  return make_map<T, 3>(&params.q, a.q, {D, a.num_heads, sizes.num_tokens}, {a.q_head_stride, a.q_token_stride},
                        {64, 1, Shape::kRows}) &&
         make_cache_map<C, D>(&params.k, a.k_cache, a, sizes, params.box_slots, a.k_slot_stride, a.k_head_stride,
                              a.k_block_stride) &&
         make_cache_map<C, D>(&params.v, a.v_cache, a, sizes, params.box_slots, a.v_slot_stride, a.v_head_stride,
                              a.v_block_stride);
}

static_assert(sizeof(TileCounters) == kTileCounters * sizeof(int32_t));

// Counters that are zeros: the call's own, which the kernel leaves so, or some made here.
Tensor tile_counters(const AttentionCall& call) {
  if (call.arrivals && call.arrivals->numel() >= kTileCounters) return *call.arrivals;
  Tensor made = torch::stable::new_empty(call.q, {kTileCounters}, ScalarType::Int);
  cudaMemsetAsync(made.data_ptr(), 0, kTileCounters * sizeof(int32_t), current_stream(call.q));
  return made;
}

template <typename C, int D, typename T>
bool launch(const AttentionParams<T>& a, const PrefillSizes& sizes, const AttentionCall& call) {
  using Shape = HopperShape<C, D>;
  HopperParams<T> params;
  if (!make_params<C, D>(params, a, sizes)) return false;
  const Tensor counters = tile_counters(call);
  params.tiles = reinterpret_cast<TileCounters*>(data<int32_t>(counters) + counters.numel() - kTileCounters);
  constexpr auto* kernel = prefill_hopper_kernel<T, C, D>;
  const int32_t device = call.q.get_device_index();
  allow_shared<kernel>("paged_attention", device, Shape::kSharedBytes);
  const int64_t tiles = a.num_heads * most_tiles(sizes.num_tokens, a.num_seqs, sizes.min_query_len, Shape::kRows);
  const int64_t blocks = std::clamp<int64_t>(tiles, 1, device_attribute(cudaDevAttrMultiProcessorCount, device));
  launch_dependent(kernel, {dim3(blocks), dim3(Shape::kThreads), current_stream(call.q), Shape::kSharedBytes}, params);
  return true;
}

}  // namespace

template <typename T, typename C>
bool prefill_attention_hopper(const AttentionParams<T>& a, const PrefillSizes& sizes, const AttentionCall& call) {
  if (call.alibi_slopes || a.block_size % 16 != 0 || !(a.scale > 0) || sizes.num_blocks == 0) return false;
  if (!kHopperKernels || compute_major(call.q.get_device_index()) != 9) return false;
  return by_head_dim<C>(a.head_dim, [&]<int D> { return launch<C, D>(a, sizes, call); });
}

using Bf16 = __nv_bfloat16;
template bool prefill_attention_hopper<Bf16, Bf16>(const AttentionParams<Bf16>&, const PrefillSizes&,
                                                   const AttentionCall&);
template bool prefill_attention_hopper<Bf16, Code>(const AttentionParams<Bf16>&, const PrefillSizes&,
                                                   const AttentionCall&);
template bool prefill_attention_hopper<__half, __half>(const AttentionParams<__half>&, const PrefillSizes&,
                                                       const AttentionCall&);
template bool prefill_attention_hopper<__half, Code>(const AttentionParams<__half>&, const PrefillSizes&,
                                                     const AttentionCall&);

}  // namespace raylm::cuda
