#include <tuple>

#include "cache.h"
#include "decode_attention.h"
#include "launch.h"
#include "prefill_attention.h"
#include "raylm/cuda/attention.cuh"
#include "shapes.h"

namespace raylm::cuda {
namespace {

constexpr int64_t kMaxHeadDim = 256;

template <typename T, typename C>
void launch(const AttentionParams<T>& params, int64_t num_tokens, const float* alibi_slopes, cudaStream_t stream) {
  const dim3 grid(num_tokens, params.num_heads);
  const unsigned threads = kAttentionWarps * kWarp;
  if (params.head_dim <= 64) {
    attention_kernel<T, C, 2><<<grid, threads, 0, stream>>>(params, alibi_slopes);
  } else if (params.head_dim <= 128) {
    attention_kernel<T, C, 4><<<grid, threads, 0, stream>>>(params, alibi_slopes);
  } else {
    attention_kernel<T, C, 8><<<grid, threads, 0, stream>>>(params, alibi_slopes);
  }
}

// Launches the kernels that the step needs, those for tensor cores where the shapes fit.
template <typename T, typename C>
void launch_all(AttentionParams<T> params, const AttentionCall& call, bool invariant) {
  const cudaStream_t stream = current_stream(call.q);
  if constexpr (sizeof(T) == 2) {
    if (!invariant && (decode_with_prefixes<T, C>(params, call) || decode_attention<T, C>(params, call))) {
      params.min_query_len = most_decode_queries(call.max_query_len, params.group()) + 1;
    }
    if (call.max_query_len < params.min_query_len) return;
    // Fewer queries do not fill the rows of a tile.
    const bool many = invariant || call.max_query_len > kMaxDecodeQueries;
    const PrefillSizes sizes{call.q.size(0), call.num_blocks, params.min_query_len};
    if (many && (prefill_attention_hopper<T, C>(params, sizes, call) ||
                 prefill_attention<T, C>(params, sizes, call.alibi_slopes, stream))) {
      return;
    }
  }
  launch<T, C>(params, call.q.size(0), call.alibi_slopes, stream);
}

// With `invariant` no sequence is decode: all go through the kernel for many queries, which walks a query's keys in tiles
// that lie where they lie in its sequence, whatever else is in the step. Which kernel that is follows from the layer's
// shapes alone.
Tensor attend(const char* op, bool invariant, const Tensor& q, const Tensor& k_cache, const Tensor& v_cache,
              const Tensor& block_table, const Tensor& query_start, const Tensor& seq_lens, int64_t max_query_len,
              int64_t max_seq_len, double scale, int64_t window, double soft_cap,
              const std::optional<Tensor>& alibi_slopes, const std::optional<Tensor>& arrivals,
              const std::optional<Tensor>& sinks, double k_scale, double v_scale,
              const std::optional<Tensor>& prefixes, bool frozen) {
  check_attention(q, k_cache, v_cache, block_table, query_start, seq_lens, window, soft_cap, alibi_slopes, sinks, true);
  check_scales(op, k_cache, k_scale, v_scale);
  Arg(op, "k_cache", k_cache).on_device_of(q);
  Arg(op, "v_cache", v_cache).on_device_of(q);
  Arg(op, "block_table", block_table).on_device_of(q);
  Arg(op, "query_start", query_start).on_device_of(q);
  Arg(op, "seq_lens", seq_lens).on_device_of(q);
  if (alibi_slopes) Arg(op, "alibi_slopes", *alibi_slopes).on_device_of(q);
  if (sinks) Arg(op, "sinks", *sinks).on_device_of(q);
  if (arrivals) Arg(op, "arrivals", *arrivals).dtype({ScalarType::Int}).dim(1).contiguous().on_device_of(q);
  if (prefixes) {
    Arg(op, "prefixes", *prefixes).dtype({ScalarType::Int}).dim(2).size(0, 3, "what shared_prefixes gives");
    Arg(op, "prefixes", *prefixes).size(1, seq_lens.size(0), "as seq_lens").last_contiguous().on_device_of(q);
  }
  if (q.size(2) > kMaxHeadDim) fail(op, "q has a head size of ", q.size(2), ", must be at most ", kMaxHeadDim);
  Tensor out = torch::stable::new_empty(q, q.sizes());
  if (q.numel() == 0) return out;
  const Guard guard(q.get_device_index());
  const float* slopes = alibi_slopes ? data<float>(*alibi_slopes) : nullptr;
  by_dtype(q, [&](auto type) {
    using T = decltype(type);
    AttentionParams<T> params{
        data<T>(q), q.stride(0), q.stride(1), k_cache.data_ptr(), v_cache.data_ptr(),
        k_cache.stride(0), k_cache.stride(1), k_cache.stride(2),
        v_cache.stride(0), v_cache.stride(1), v_cache.stride(2),
        data<int32_t>(block_table), block_table.stride(0), data<int32_t>(query_start), data<int32_t>(seq_lens),
        data<T>(out), seq_lens.size(0), q.size(1), k_cache.size(2), q.size(2), k_cache.size(1),
        static_cast<float>(scale * k_scale), window, static_cast<float>(soft_cap), 0,
        sinks ? data<float>(*sinks) : nullptr, static_cast<float>(v_scale)};
    by_cache<T>(k_cache, [&](auto element) {
      using C = decltype(element);
      const AttentionCall call{q, max_query_len, max_seq_len, k_cache.size(0), slopes, arrivals, prefixes, frozen};
      launch_all<T, C>(params, call, invariant);
    });
  });
  check_launch(op);
  return out;
}

Tensor paged_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor query_start,
                       Tensor seq_lens, int64_t max_query_len, int64_t max_seq_len, double scale, int64_t window,
                       double soft_cap, std::optional<Tensor> alibi_slopes, std::optional<Tensor> arrivals,
                       std::optional<Tensor> sinks, double k_scale, double v_scale, std::optional<Tensor> prefixes,
                       bool frozen) {
  return attend("paged_attention", false, q, k_cache, v_cache, block_table, query_start, seq_lens, max_query_len,
                max_seq_len, scale, window, soft_cap, alibi_slopes, arrivals, sinks, k_scale, v_scale, prefixes, frozen);
}

Tensor invariant_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor query_start,
                           Tensor seq_lens, int64_t max_query_len, int64_t max_seq_len, double scale, int64_t window,
                           double soft_cap, std::optional<Tensor> alibi_slopes, std::optional<Tensor> sinks,
                           double k_scale, double v_scale) {
  return attend("invariant_attention", true, q, k_cache, v_cache, block_table, query_start, seq_lens, max_query_len,
                max_seq_len, scale, window, soft_cap, alibi_slopes, std::nullopt, sinks, k_scale, v_scale, std::nullopt,
                false);
}

// Whether decode, and prefill, have kernels on tensor cores for heads like q's, over a cache of q's type or of codes;
// else the plain kernel serves.
std::tuple<bool, bool> attention_kernels(Tensor q, int64_t num_kv_heads, int64_t block_size, bool biased, bool codes) {
  Arg("attention_kernels", "q", q).floating().dim(3);
  if (num_kv_heads < 1) fail("attention_kernels", "num_kv_heads is ", num_kv_heads, ", must be at least 1");
  const Guard guard(q.get_device_index());
  const int64_t head_dim = q.size(2), group = q.size(1) / num_kv_heads;
  std::tuple<bool, bool> found{false, false};
  by_dtype(q, [&](auto type) {
    using T = decltype(type);
    if constexpr (sizeof(T) == 2) {
      const int device = q.get_device_index();
      const auto any = []<int D> { return true; };
      found = codes ? std::tuple{has_decode_attention<T, Code>(head_dim, group, block_size, biased, device),
                                 !biased && by_head_dim<Code>(head_dim, any)}
                    : std::tuple{has_decode_attention<T, T>(head_dim, group, block_size, biased, device),
                                 by_head_dim<T>(head_dim, any)};
    }
  });
  return found;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(raylm, CUDA, m) {
  m.impl("paged_attention", TORCH_BOX(&paged_attention));
  m.impl("invariant_attention", TORCH_BOX(&invariant_attention));
  m.impl("attention_kernels", TORCH_BOX(&attention_kernels));
}

}  // namespace raylm::cuda
