// All ranks' x side by side, over memory that they share (peer.cuh): what follows a product whose columns are split
// between ranks. Every rank reads all of every rank's data, after one meeting.
#pragma once

#include "raylm/cuda/peer.cuh"

namespace raylm::cuda {

constexpr int kGatherThreads = 512;

struct GatherParams {
  const uint4* x;
  uint4* out;
  uint32_t width, count;  // vectors of a row of x, and of x

  // Where vector i of a rank's x goes.
  __device__ int64_t place(uint32_t i, int rank, int ranks) const {
    return static_cast<int64_t>(i / width) * width * ranks + rank * width + i % width;
  }
};

// Vector i is block b's on every rank.
template <int kMost>
__global__ void __launch_bounds__(kGatherThreads, 1)
    peer_all_gather_kernel(const __grid_constant__ Peers peers, const __grid_constant__ GatherParams p) {
  constexpr int kUnroll = 8 / kMost;
  start_dependents();
  wait_for_dependencies();
  const PeerCall call(peers);
  uint4* const own = call.own_slot();
  for_my_vecs<4>(
      p.count, [&](int64_t i) { return p.x[i]; },
      [&](int64_t i, const uint4& v) { own[i] = p.out[p.place(i, peers.rank, peers.ranks)] = v; });
  call.meet(0);
  for_my_vecs<kUnroll>(
      p.count,
      [&](int64_t i) {
        Parts<kMost> parts;
#pragma unroll
        for (int r = 0; r < kMost; ++r) {
          if (r < peers.ranks && r != peers.rank) parts.of[r] = load_shared_by_peers(call.slot(r) + i);
        }
        return parts;
      },
      [&](int64_t i, const Parts<kMost>& parts) {
#pragma unroll
        for (int r = 0; r < kMost; ++r) {
          if (r < peers.ranks && r != peers.rank) p.out[p.place(i, r, peers.ranks)] = parts.of[r];
        }
      });
  call.end();
}

}  // namespace raylm::cuda
