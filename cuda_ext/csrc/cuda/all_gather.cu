#include "raylm/cuda/all_gather.cuh"

#include "peers.h"

namespace raylm::cuda {
namespace {

constexpr const char* kAllGather = "peer_all_gather";

// Bytes of a row.
int64_t check(const Tensor& x, const Peers& peers, bool split) {
  Arg(kAllGather, "x", x).on_device_of(x).dim(2).contiguous();
  const int64_t bytes = x.size(1) * static_cast<int64_t>(x.element_size()), most = bytes_from_each(peers);
  if (!is_aligned(x.data_ptr()) || bytes % 16 != 0) {
    fail(kAllGather, "x has rows of ", bytes, " bytes at ", x.data_ptr(), ", must be a multiple of 16 at a multiple of 16");
  }
  if (bytes > most) fail(kAllGather, "x has rows of ", bytes, " bytes, must have at most ", most, " (capacity)");
  if (split && x.size(0) % peers.ranks != 0) {
    fail(kAllGather, "x has ", x.size(0), " rows, must have a multiple of ", peers.ranks);
  }
  return bytes;
}

// Follows from the number of vectors alone, so that it is the same on every rank.
void launch(const Peers& peers, const GatherParams& params, cudaStream_t stream) {
  const int64_t blocks = std::min<int64_t>(kWindowBlocks, divide_up(params.count, kSpreadThreads));
  const dim3 grid(static_cast<unsigned>(blocks)), block(threads_for(divide_up(params.count, blocks), kGatherThreads));
  launch_dependent(peer_all_gather_kernel, grid, block, stream, peers, params);
}

Tensor peer_all_gather(Tensor x, Tensor windows, int64_t rank, int64_t capacity, double limit_s, bool split) {
  const Peers peers = make_peers(kAllGather, windows, rank, capacity, limit_s);
  const int64_t bytes = check(x, peers, split), rows = split ? x.size(0) / peers.ranks : x.size(0);
  Tensor out = torch::stable::new_empty(x, {rows, x.size(1) * peers.ranks});
  if (x.numel() == 0) return out;
  const Guard guard(x.get_device_index());
  const char* from = static_cast<const char*>(x.data_ptr());
  char* to = static_cast<char*>(out.data_ptr());
  const int64_t most = bytes_from_each(peers) / bytes;  // rows of a launch
  for (int64_t row = 0; row < rows; row += most) {
    const int64_t vecs = std::min(most, rows - row) * bytes / 16;
    const GatherParams params{reinterpret_cast<const uint4*>(from + row * bytes),
                              reinterpret_cast<uint4*>(to + row * bytes * peers.ranks), split ? rows * bytes / 16 : 0,
                              static_cast<uint32_t>(bytes / 16), static_cast<uint32_t>(vecs)};
    launch(peers, params, current_stream(x));
  }
  check_launch(kAllGather);
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(raylm, CUDA, m) { m.impl("peer_all_gather", TORCH_BOX(&peer_all_gather)); }

}  // namespace raylm::cuda
