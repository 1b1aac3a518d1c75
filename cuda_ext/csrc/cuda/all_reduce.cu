#include "raylm/cuda/all_reduce.cuh"

#include "peers.h"

namespace raylm::cuda {
namespace {

constexpr const char* kAllReduce = "peer_all_reduce";

void check(const Tensor& x, int64_t bytes, int64_t capacity) {
  Arg(kAllReduce, "x", x).floating().on_device_of(x).contiguous();
  if (!is_aligned(x.data_ptr()) || bytes % 16 != 0) {
    fail(kAllReduce, "x has ", bytes, " bytes at ", x.data_ptr(), ", must be a multiple of 16 at a multiple of 16");
  }
  if (bytes > capacity) fail(kAllReduce, "x has ", bytes, " bytes, must have at most ", capacity, " (capacity)");
}

// Follows from the number of vectors alone, so that it is the same on every rank.
template <typename T>
void launch(const Peers& peers, void* x, int64_t vecs, bool two_shot, cudaStream_t stream) {
  const int64_t spread = two_shot ? divide_up(vecs, peers.ranks) : vecs;
  const int64_t blocks = std::min<int64_t>(kPeerBlocks, divide_up(spread, kSpreadThreads));
  const dim3 grid(static_cast<unsigned>(blocks)), block(threads_for(divide_up(spread, blocks), kReduceThreads));
  by_ranks(peers.ranks, [&](auto most) {
    const auto kernel = two_shot ? two_shot_all_reduce_kernel<T, most> : one_shot_all_reduce_kernel<T, most>;
    launch_dependent(kernel, grid, block, stream, peers, static_cast<uint4*>(x), vecs);
  });
}

void peer_all_reduce(Tensor x, Tensor windows, int64_t rank, int64_t capacity, double limit_s, bool two_shot) {
  const Peers peers = make_peers(kAllReduce, windows, rank, capacity, limit_s);
  const Guard guard(x.get_device_index());
  by_dtype(x, [&](auto type) {
    using T = decltype(type);
    const int64_t bytes = x.numel() * static_cast<int64_t>(sizeof(T));
    check(x, bytes, capacity);
    if (bytes > 0) launch<T>(peers, x.data_ptr(), bytes / 16, two_shot, current_stream(x));
  });
  check_launch(kAllReduce);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(raylm, CUDA, m) { m.impl("peer_all_reduce", TORCH_BOX(&peer_all_reduce)); }

}  // namespace raylm::cuda
