#include "launch.h"
#include "raylm/cuda/store_kv.cuh"
#include "shapes.h"

namespace raylm::cuda {
namespace {

template <typename T>
StoreSide<T> side(const Tensor& source, const Tensor& cache) {
  return {data<T>(source),  data<T>(cache),  source.stride(0), source.stride(1),
          cache.stride(0), cache.stride(1), cache.stride(2)};
}

void store_kv(Tensor k, Tensor v, Tensor k_cache, Tensor v_cache, Tensor slot_mapping) {
  const char* op = "store_kv";
  check_store(op, k, v, k_cache, v_cache, slot_mapping);
  Arg(op, "v", v).on_device_of(k);
  Arg(op, "k_cache", k_cache).on_device_of(k);
  Arg(op, "v_cache", v_cache).on_device_of(k);
  Arg(op, "slot_mapping", slot_mapping).on_device_of(k);
  if (k.numel() == 0) return;
  const int64_t block_size = k_cache.size(1), num_slots = k_cache.size(0) * block_size;
  const Guard guard(k.get_device_index());
  by_dtype(k, [&](auto type) {
    using T = decltype(type);
    store_kv_kernel<T><<<k.size(0), threads_for(k.size(1) * k.size(2), 512), 0, current_stream(k)>>>(
        side<T>(k, k_cache), side<T>(v, v_cache), data<int64_t>(slot_mapping), num_slots, block_size, k.size(1),
        k.size(2));
  });
  check_launch(op);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(raylm, CUDA, m) { m.impl("store_kv", TORCH_BOX(&store_kv)); }

}  // namespace raylm::cuda
