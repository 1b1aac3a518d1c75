#include "cache.h"
#include "launch.h"
#include "raylm/cuda/rope_store.cuh"
#include "shapes.h"

namespace raylm::cuda {
namespace {

constexpr unsigned kThreads = 128;

template <typename T>
HeadsView<T> heads(const Tensor& x) {
  return {data<T>(x), x.stride(0), x.stride(1), static_cast<int>(x.size(1))};
}

template <typename C>
CacheView<C> cache(const Tensor& x, double scale) {
  return {data<C>(x), x.stride(0), x.stride(1), x.stride(2), static_cast<float>(1 / scale)};
}

// Codes of a vector are written at once, which takes less alignment than numbers do.
template <typename T, typename C>
bool fits_vectors(const RopeStoreParams<T, C>& p) {
  const auto heads_fit = [](const HeadsView<T>& x) {
    return is_aligned(x.x) && x.token_stride % kVec<T> == 0 && x.head_stride % kVec<T> == 0;
  };
  const auto cache_fits = [](const CacheView<C>& x) {
    return is_aligned(x.x) && x.block_stride % kVec<T> == 0 && x.slot_stride % kVec<T> == 0 &&
           x.head_stride % kVec<T> == 0;
  };
  return p.rotary_dim == p.head_dim && p.head_dim % (2 * kVec<T>) == 0 && p.head_dim <= 2 * kVec<T> * kWarp &&
         heads_fit(p.q) && heads_fit(p.k) && heads_fit(p.v) && cache_fits(p.k_cache) && cache_fits(p.v_cache) &&
         is_aligned(p.q_weight) && is_aligned(p.k_weight) && is_aligned(p.cos_sin);
}

template <typename T, typename C>
void launch(const RopeStoreParams<T, C>& p, cudaStream_t stream) {
  const bool vectors = fits_vectors(p);
  const int64_t needed = vectors ? p.head_dim / (2 * kVec<T>) : kWarp;
  int64_t lanes = 4;
  while (lanes < needed) lanes *= 2;
  const int64_t threads = p.num_tokens * (p.q.num_heads + p.k.num_heads + p.v.num_heads) * lanes;
  const dim3 grid(divide_up(threads, kThreads)), block(kThreads);
  if (!vectors) return launch_dependent(rope_store_any_kernel<T, C>, grid, block, stream, p);
  switch (lanes) {
    case 4: return launch_dependent(rope_store_kernel<T, C, 4>, grid, block, stream, p);
    case 8: return launch_dependent(rope_store_kernel<T, C, 8>, grid, block, stream, p);
    case 16: return launch_dependent(rope_store_kernel<T, C, 16>, grid, block, stream, p);
    default: return launch_dependent(rope_store_kernel<T, C, 32>, grid, block, stream, p);
  }
}

void rope_store(Tensor q, Tensor k, Tensor v, std::optional<Tensor> q_weight, std::optional<Tensor> k_weight,
                double eps, Tensor positions, Tensor cos_sin, Tensor k_cache, Tensor v_cache, Tensor slot_mapping,
                bool frozen, double k_scale, double v_scale) {
  const char* op = "rope_store";
  check_rope_store(q, k, v, q_weight, k_weight, positions, cos_sin, k_cache, v_cache, slot_mapping, true);
  check_scales(op, k_cache, k_scale, v_scale);
  Arg(op, "k", k).on_device_of(q);
  Arg(op, "v", v).on_device_of(q);
  if (q_weight) Arg(op, "q_weight", *q_weight).on_device_of(q);
  if (k_weight) Arg(op, "k_weight", *k_weight).on_device_of(q);
  Arg(op, "positions", positions).on_device_of(q);
  Arg(op, "cos_sin", cos_sin).on_device_of(q);
  Arg(op, "k_cache", k_cache).on_device_of(q);
  Arg(op, "v_cache", v_cache).on_device_of(q);
  Arg(op, "slot_mapping", slot_mapping).on_device_of(q);
  if (q.size(0) == 0) return;
  const Guard guard(q.get_device_index());
  by_dtype(q, [&](auto type) {
    using T = decltype(type);
    by_cache<T>(k_cache, [&](auto element) {
      using C = decltype(element);
      const RopeStoreParams<T, C> params{
          heads<T>(q), heads<T>(k), heads<T>(v), cache<C>(k_cache, k_scale), cache<C>(v_cache, v_scale),
          q_weight ? data<T>(*q_weight) : nullptr, k_weight ? data<T>(*k_weight) : nullptr, static_cast<float>(eps),
          data<int64_t>(positions), data<int64_t>(slot_mapping), data<float>(cos_sin), q.size(0), cos_sin.size(0),
          k_cache.size(0) * k_cache.size(1), static_cast<int>(k_cache.size(1)), static_cast<int>(q.size(2)),
          static_cast<int>(cos_sin.size(1)), frozen};
      launch(params, current_stream(q));
    });
  });
  check_launch(op);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(raylm, CUDA, m) { m.impl("rope_store", TORCH_BOX(&rope_store)); }

}  // namespace raylm::cuda
