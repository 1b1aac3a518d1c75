#include "common.h"
#include "shapes.h"

namespace raylm {
namespace {

void store_kv(Tensor k, Tensor v, Tensor k_cache, Tensor v_cache, Tensor slot_mapping) {
  const char* op = "store_kv";
  check_store(k, v, k_cache, v_cache, slot_mapping);
  Arg(op, "k", k).on_cpu();
  Arg(op, "v", v).on_cpu();
  Arg(op, "k_cache", k_cache).on_cpu();
  Arg(op, "v_cache", v_cache).on_cpu();
  Arg(op, "slot_mapping", slot_mapping).on_cpu();
  StoreArgs args{};
  args.block_size = k_cache.size(1);
  args.slots = checked_indices(op, "slot_mapping", slot_mapping, k_cache.size(0) * args.block_size);
  args.num_heads = k.size(1);
  args.element_bytes = static_cast<int64_t>(k.element_size());
  args.row_bytes = k.size(2) * args.element_bytes;
  const Tensor* sources[2] = {&k, &v};
  const Tensor* caches[2] = {&k_cache, &v_cache};
  for (int side = 0; side < 2; ++side) {
    args.src[side] = sources[side]->const_data_ptr();
    args.token_stride[side] = sources[side]->stride(0);
    args.head_stride[side] = sources[side]->stride(1);
    args.cache[side] = caches[side]->mutable_data_ptr();
    args.block_stride[side] = caches[side]->stride(0);
    args.slot_stride[side] = caches[side]->stride(1);
    args.cache_head_stride[side] = caches[side]->stride(2);
  }
  const int64_t cost = 2 * k.size(1) * k.size(2);
  for_range(k.size(0), cost, [&](int64_t begin, int64_t end) { cpu_kernels().store_kv(args, begin, end); });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(raylm, CPU, m) { m.impl("store_kv", TORCH_BOX(&store_kv)); }

}  // namespace raylm
