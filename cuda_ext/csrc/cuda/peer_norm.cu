#include "raylm/cuda/peer_norm.cuh"

#include "peer_norms.h"

namespace raylm::cuda {
namespace {

constexpr const char* kAddNorm = "peer_add_rms_norm";

void check_sizes(const Tensor& x, int64_t row_bytes, const Peers& peers) {
  const int64_t bytes = x.size(0) * row_bytes, most = bytes_from_each(peers);
  if (bytes > most) fail(kAddNorm, "x has ", bytes, " bytes, must have at most ", most, " (capacity)");
}

template <typename T>
void launch(const Peers& peers, const NormParams<T>& params, cudaStream_t stream) {
  const int64_t vecs = params.hidden / kVec<T>;
  const int64_t each = vecs <= kPeerNormThreads ? 1 : vecs <= 2 * kPeerNormThreads ? 2 : kMostNormVecs;
  const dim3 grid(static_cast<unsigned>(std::min<int64_t>(params.rows, kWindowBlocks))),
      block(threads_for(divide_up(vecs, each), kPeerNormThreads));
  by_ranks(peers.ranks, [&](auto most) {
    const auto kernel = each == 1   ? peer_add_rms_norm_kernel<T, most, 1>
                        : each == 2 ? peer_add_rms_norm_kernel<T, most, 2>
                                    : peer_add_rms_norm_kernel<T, most, kMostNormVecs>;
    launch_dependent(kernel, grid, block, stream, peers, params);
  });
}

Tensor peer_add_rms_norm(Tensor x, Tensor residual, Tensor weight, double eps, Tensor windows, int64_t rank,
                         int64_t capacity, double limit_s) {
  check_peer_norm(kAddNorm, x, residual, weight);
  const Peers peers = make_peers(kAddNorm, windows, rank, capacity, limit_s);
  Tensor out = torch::stable::new_empty(x, x.sizes());
  const Guard guard(x.get_device_index());
  by_dtype(x, [&](auto type) {
    using T = decltype(type);
    check_sizes(x, x.size(1) * static_cast<int64_t>(sizeof(T)), peers);
    const NormParams<T> params = peer_norm_params<T>(kAddNorm, x, residual, weight, out, eps, kPeerNormThreads);
    if (x.numel() > 0) launch(peers, params, current_stream(x));
  });
  check_launch(kAddNorm);
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(raylm, CUDA, m) { m.impl("peer_add_rms_norm", TORCH_BOX(&peer_add_rms_norm)); }

}  // namespace raylm::cuda
