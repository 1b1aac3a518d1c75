#include "raylm/cuda/all_gather.cuh"

#include "peers.h"

namespace raylm::cuda {
namespace {

constexpr const char* kOp = "peer_all_gather";
constexpr int64_t kFewThreads = 128;  // of a block, until all blocks are in use, as in a sum

// Bytes of a row.
int64_t check(const Tensor& x, int64_t capacity) {
  Arg(kOp, "x", x).floating().on_device_of(x).dim(2).contiguous();
  const int64_t bytes = x.size(1) * static_cast<int64_t>(x.element_size());
  if (!is_aligned(x.data_ptr()) || bytes % 16 != 0) {
    fail(kOp, "x has rows of ", bytes, " bytes at ", x.data_ptr(), ", must be a multiple of 16 at a multiple of 16");
  }
  if (bytes > capacity) fail(kOp, "x has rows of ", bytes, " bytes, must have at most ", capacity, " (capacity)");
  return bytes;
}

// Follows from the number of vectors alone, so that it is the same on every rank.
void launch(const Peers& peers, const GatherParams& params, cudaStream_t stream) {
  const int64_t blocks = std::min<int64_t>(kWindowBlocks, divide_up(params.count, kFewThreads));
  const dim3 grid(static_cast<unsigned>(blocks)), block(threads_for(divide_up(params.count, blocks), kGatherThreads));
  by_ranks(peers.ranks, [&](auto most) {
    launch_dependent(peer_all_gather_kernel<most>, grid, block, stream, peers, params);
  });
}

Tensor peer_all_gather(Tensor x, Tensor windows, int64_t rank, int64_t capacity, double limit_s) {
  const Peers peers = make_peers(kOp, windows, rank, capacity, limit_s);
  const int64_t bytes = check(x, capacity), rows = x.size(0);
  Tensor out = torch::stable::new_empty(x, {rows, x.size(1) * peers.ranks});
  const Guard guard(x.get_device_index());
  const char* from = static_cast<const char*>(x.data_ptr());
  char* to = static_cast<char*>(out.data_ptr());
  const int64_t most = bytes > 0 ? capacity / bytes : rows;  // rows that a window has place for
  for (int64_t row = 0; row < rows && bytes > 0; row += most) {
    const int64_t vecs = std::min(most, rows - row) * bytes / 16;
    const GatherParams params{reinterpret_cast<const uint4*>(from + row * bytes),
                              reinterpret_cast<uint4*>(to + row * bytes * peers.ranks),
                              static_cast<uint32_t>(bytes / 16), static_cast<uint32_t>(vecs)};
    launch(peers, params, current_stream(x));
  }
  check_launch(kOp);
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(raylm, CUDA, m) { m.impl("peer_all_gather", TORCH_BOX(&peer_all_gather)); }

}  // namespace raylm::cuda
