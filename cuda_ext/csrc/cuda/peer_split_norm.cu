#include "raylm/cuda/peer_split_norm.cuh"

#include "peer_norms.h"

namespace raylm::cuda {
namespace {

constexpr const char* kOp = "peer_split_add_rms_norm";

// A slot of a window has the share of a rank for each of the others.
void check_slot(const Peers& peers, int64_t rows, int64_t row_bytes) {
  const int64_t bytes = (peers.ranks - 1) * divide_up(rows, peers.ranks) * row_bytes;
  if (bytes > peers.capacity) {
    fail(kOp, "the peers' shares of x have ", bytes, " bytes, must have at most ", peers.capacity, " (capacity)");
  }
}

// Follows from the shape alone, so that it is the same on every rank.
template <typename T, int kMost, int kVecs>
void launch_vecs(const Peers& peers, const NormParams<T>& params, cudaStream_t stream) {
  const int64_t vecs = params.hidden / kVec<T>, most = divide_up(params.rows, peers.ranks);
  const unsigned width = threads_for(divide_up(vecs, kVecs), kPeerNormThreads), groups = kPeerNormThreads / width;
  const int64_t blocks = std::min<int64_t>(kWindowBlocks, most), turns = divide_up(most, blocks * groups);
  const int64_t rounds = divide_up(turns, std::min<int64_t>(kSplitChunks, turns));
  const Split split{most, static_cast<int>(width), static_cast<int>(groups), static_cast<int>(divide_up(turns, rounds)),
                    static_cast<int>(rounds)};
  const dim3 grid(static_cast<unsigned>(blocks)), block(width * groups);
  launch_dependent(peer_split_add_rms_norm_kernel<T, kMost, kVecs>, grid, block, stream, peers, params, split);
}

// More ranks have more loads for each 16 bytes, so that fewer of these keep as many under way.
template <typename T>
void launch(const Peers& peers, const NormParams<T>& params, cudaStream_t stream) {
  by_ranks(peers.ranks, [&](auto most) {
    constexpr int kVecs = most <= 2 ? kMostNormVecs : 2;
    if (params.hidden <= kVecs * kPeerNormThreads * kVec<T>) return launch_vecs<T, most, kVecs>(peers, params, stream);
    launch_vecs<T, most, kMostNormVecs>(peers, params, stream);
  });
}

Tensor peer_split_add_rms_norm(Tensor x, Tensor residual, Tensor weight, double eps, Tensor windows, int64_t rank,
                               int64_t capacity, double limit_s) {
  check_peer_norm(kOp, x, residual, weight);
  const Peers peers = make_peers(kOp, windows, rank, capacity, limit_s);
  Tensor out = torch::stable::new_empty(x, x.sizes());
  const Guard guard(x.get_device_index());
  by_dtype(x, [&](auto type) {
    using T = decltype(type);
    const NormParams<T> params = peer_norm_params<T>(kOp, x, residual, weight, out, eps, kPeerNormThreads);
    check_slot(peers, x.size(0), x.size(1) * static_cast<int64_t>(sizeof(T)));
    if (x.numel() > 0) launch(peers, params, current_stream(x));
  });
  check_launch(kOp);
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(raylm, CUDA, m) { m.impl("peer_split_add_rms_norm", TORCH_BOX(&peer_split_add_rms_norm)); }

}  // namespace raylm::cuda
