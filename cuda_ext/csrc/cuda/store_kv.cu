#include "cache.h"
#include "launch.h"
#include "raylm/cuda/store_kv.cuh"
#include "shapes.h"

namespace raylm::cuda {
namespace {

template <typename T, typename C>
StoreSide<T, C> side(const Tensor& source, const Tensor& cache, double scale) {
  return {data<T>(source), data<C>(cache),  source.stride(0), source.stride(1),
          cache.stride(0), cache.stride(1), cache.stride(2),  static_cast<float>(1 / scale)};
}

void store_kv(Tensor k, Tensor v, Tensor k_cache, Tensor v_cache, Tensor slot_mapping, double k_scale,
              double v_scale) {
  const char* op = "store_kv";
  check_store(op, k, v, k_cache, v_cache, slot_mapping, true);
  check_scales(op, k_cache, k_scale, v_scale);
  Arg(op, "v", v).on_device_of(k);
  Arg(op, "k_cache", k_cache).on_device_of(k);
  Arg(op, "v_cache", v_cache).on_device_of(k);
  Arg(op, "slot_mapping", slot_mapping).on_device_of(k);
  if (k.numel() == 0) return;
  const int64_t block_size = k_cache.size(1), num_slots = k_cache.size(0) * block_size;
  const Guard guard(k.get_device_index());
  by_dtype(k, [&](auto type) {
    using T = decltype(type);
    by_cache<T>(k_cache, [&](auto element) {
      using C = decltype(element);
      store_kv_kernel<T, C><<<k.size(0), threads_for(k.size(1) * k.size(2), 512), 0, current_stream(k)>>>(
          side<T, C>(k, k_cache, k_scale), side<T, C>(v, v_cache, v_scale), data<int64_t>(slot_mapping), num_slots,
          block_size, k.size(1), k.size(2));
    });
  });
  check_launch(op);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(raylm, CUDA, m) { m.impl("store_kv", TORCH_BOX(&store_kv)); }

}  // namespace raylm::cuda
