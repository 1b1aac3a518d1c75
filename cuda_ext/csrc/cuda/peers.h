// What the launchers of kernels over peer memory share.
#pragma once

#include <algorithm>

#include "launch.h"
#include "raylm/cuda/peer.cuh"

namespace raylm::cuda {

constexpr int64_t kSpreadThreads = 128;  // of a block, until all blocks are in use: a small message is quickest spread out

// `windows` holds the addresses of all ranks' windows in the order of ranks (int64, on the CPU): they go to the kernel
// by value.
inline Peers make_peers(const char* op, const Tensor& windows, int64_t rank, int64_t capacity, double limit_s) {
  Arg(op, "windows", windows).on_cpu().dtype({ScalarType::Long}).dim(1).contiguous();
  const int64_t ranks = windows.size(0);
  if (ranks < 2 || ranks > kMaxPeers) fail(op, "windows has ", ranks, " ranks, must have 2 to ", kMaxPeers);
  if (rank < 0 || rank >= ranks) fail(op, "rank is ", rank, ", must be 0 to ", ranks - 1);
  if (capacity < 16 || capacity % 16 != 0) fail(op, "capacity is ", capacity, ", must be a positive multiple of 16");
  if (!(limit_s > 0 && limit_s < 1e9)) fail(op, "limit_s is ", limit_s, ", must be over 0 and below 1e9");
  Peers peers{};
  for (int64_t r = 0; r < ranks; ++r) peers.windows[r] = reinterpret_cast<char*>(data<int64_t>(windows)[r]);
  peers.rank = static_cast<int>(rank), peers.ranks = static_cast<int>(ranks);
  peers.capacity = capacity, peers.limit_ns = static_cast<uint64_t>(limit_s * 1e9);
  return peers;
}

// Bytes of a slot for each of the other ranks, where these write into it.
inline int64_t bytes_from_each(const Peers& peers) { return peers.capacity / (peers.ranks - 1); }

// Calls body(std::integral_constant<int, n>{}) with the bound on the number of ranks that the kernel is compiled for.
template <typename Body>
void by_ranks(int ranks, const Body& body) {
  if (ranks <= 2) return body(std::integral_constant<int, 2>{});
  if (ranks <= 4) return body(std::integral_constant<int, 4>{});
  return body(std::integral_constant<int, kMaxPeers>{});
}

}  // namespace raylm::cuda
