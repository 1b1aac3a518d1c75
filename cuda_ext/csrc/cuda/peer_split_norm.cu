#include "raylm/cuda/peer_split_norm.cuh"

#include "peer_norms.h"

namespace raylm::cuda {
namespace {

constexpr const char* kSplitAddNorm = "peer_split_add_rms_norm";

// A slot of a window has the share of a rank for each of the others.
void check_slot(const char* op, const Peers& peers, int64_t rows, int64_t row_bytes) {
  const int64_t bytes = (peers.ranks - 1) * divide_up(rows, peers.ranks) * row_bytes;
  if (bytes > peers.capacity) {
    fail(op, "the peers' shares of x have ", bytes, " bytes, must have at most ", peers.capacity, " (capacity)");
  }
}

// Follows from the shape alone, so that it is the same on every rank.
template <typename T, int kMost, int kVecs>
void launch_vecs(const Peers& peers, const NormParams<T>& params, uint64_t sent, cudaStream_t stream) {
  const int64_t vecs = params.hidden / kVec<T>, most = divide_up(params.rows, peers.ranks);
  const unsigned width = threads_for(divide_up(vecs, kVecs), kPeerNormThreads), groups = kPeerNormThreads / width;
  const int64_t blocks = std::min<int64_t>(kWindowBlocks, most), turns = divide_up(most, blocks * groups);
  const int64_t rounds = divide_up(turns, std::min<int64_t>(kSplitChunks, turns));
  const Split split{most, static_cast<int>(width), static_cast<int>(groups), static_cast<int>(divide_up(turns, rounds)),
                    static_cast<int>(rounds), sent};
  const dim3 grid(static_cast<unsigned>(blocks)), block(width * groups);
  launch_dependent(peer_split_add_rms_norm_kernel<T, kMost, kVecs>, grid, block, stream, peers, params, split);
}

// More ranks have more loads for each 16 bytes, so that fewer of these keep as many under way.
template <typename T>
void launch(const Peers& peers, const NormParams<T>& params, uint64_t sent, cudaStream_t stream) {
  by_ranks(peers.ranks, [&](auto most) {
    constexpr int kVecs = most <= 2 ? kMostNormVecs : 2;
    if (params.hidden <= kVecs * kPeerNormThreads * kVec<T>) return launch_vecs<T, most, kVecs>(peers, params, sent, stream);
    launch_vecs<T, most, kMostNormVecs>(peers, params, sent, stream);
  });
}

Tensor peer_split_add_rms_norm(Tensor x, Tensor residual, Tensor weight, double eps, Tensor windows, int64_t rank,
                               int64_t capacity, double limit_s) {
  check_peer_norm(kSplitAddNorm, x, residual, weight);
  const Peers peers = make_peers(kSplitAddNorm, windows, rank, capacity, limit_s);
  Tensor out = torch::stable::new_empty(x, x.sizes());
  const Guard guard(x.get_device_index());
  by_dtype(x, [&](auto type) {
    using T = decltype(type);
    const NormParams<T> params = peer_norm_params<T>(kSplitAddNorm, x, residual, weight, out, eps, kPeerNormThreads);
    check_slot(kSplitAddNorm, peers, x.size(0), x.size(1) * static_cast<int64_t>(sizeof(T)));
    if (x.numel() > 0) launch(peers, params, 0, current_stream(x));
  });
  check_launch(kSplitAddNorm);
  return out;
}

// The rows that a rank owns.
struct Share {
  int64_t first, count;
};

Share share_of(int64_t rows, int64_t rank, int64_t ranks) {
  const int64_t first = rows * rank / ranks;
  return {first, rows * (rank + 1) / ranks - first};
}

// Fails unless x has a rank's share of `rows` rows.
void check_share(const char* op, const Tensor& x, int64_t rows, const Share& share) {
  Arg(op, "x", x).floating().dim(2).contiguous().size(0, share.count, "the share of the rows");
  if (share.count < 1) fail(op, "x is a share of ", rows, " rows, of which there must be as many as ranks");
}

void peer_send_rows(Tensor x, int64_t to, int64_t rows, Tensor windows, int64_t rank, int64_t capacity, int64_t number) {
  constexpr const char* kSend = "peer_send_rows";
  const Peers peers = make_peers(kSend, windows, rank, capacity, 1.0);
  if (to < 0 || to >= peers.ranks || to == rank) fail(kSend, "to is ", to, ", must be another rank");
  if (number < 1) fail(kSend, "number is ", number, ", must be 1 or more");
  check_share(kSend, x, rows, share_of(rows, to, peers.ranks));
  const int64_t row_bytes = x.size(1) * static_cast<int64_t>(x.element_size());
  check_slot(kSend, peers, rows, row_bytes);
  const Guard guard(x.get_device_index());
  const cudaStream_t stream = current_stream(x);
  char* const place = peers.windows[to] + sizeof(PeerHeader) +
                      (rank - (rank > to)) * divide_up(rows, peers.ranks) * row_bytes;
  const cudaError_t error =
      cudaMemcpyAsync(place, x.data_ptr(), x.size(0) * row_bytes, cudaMemcpyDeviceToDevice, stream);
  if (error != cudaSuccess) fail(kSend, cudaGetErrorString(error));
  peer_rows_sent_kernel<<<1, 32, 0, stream>>>(peers, static_cast<int>(to), static_cast<uint64_t>(number));
  check_launch(kSend);
}

Tensor peer_sent_add_rms_norm(Tensor x, Tensor residual, Tensor weight, double eps, Tensor windows, int64_t rank,
                              int64_t capacity, double limit_s, int64_t number) {
  constexpr const char* kSent = "peer_sent_add_rms_norm";
  check_peer_norm(kSent, residual, residual, weight);
  const Peers peers = make_peers(kSent, windows, rank, capacity, limit_s);
  const int64_t rows = residual.size(0);
  const Share share = share_of(rows, rank, peers.ranks);
  check_share(kSent, x, rows, share);
  Arg(kSent, "x", x).on_device_of(residual).dtype({residual.scalar_type()});
  Arg(kSent, "x", x).size(1, residual.size(1), "the columns of residual");
  if (number < 1) fail(kSent, "number is ", number, ", must be 1 or more");
  Tensor out = torch::stable::new_empty(x, residual.sizes());
  const Guard guard(x.get_device_index());
  by_dtype(x, [&](auto type) {
    using T = decltype(type);
    check_slot(kSent, peers, rows, x.size(1) * static_cast<int64_t>(sizeof(T)));
    NormParams<T> params = peer_norm_params<T>(kSent, residual, residual, weight, out, eps, kPeerNormThreads);
    params.outer_stride = x.stride(0);
    params.x = data<T>(x) - share.first * params.outer_stride;  // rows are counted from the first of all
    if (!is_aligned(x.data_ptr())) fail(kSent, "x must start at a multiple of 16 bytes");
    launch(peers, params, static_cast<uint64_t>(number), current_stream(x));
  });
  check_launch(kSent);
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(raylm, CUDA, m) {
  m.impl("peer_split_add_rms_norm", TORCH_BOX(&peer_split_add_rms_norm));
  m.impl("peer_send_rows", TORCH_BOX(&peer_send_rows));
  m.impl("peer_sent_add_rms_norm", TORCH_BOX(&peer_sent_add_rms_norm));
}

}  // namespace raylm::cuda
