// All ranks' x side by side, over memory that they share (peer.cuh): what follows a product whose columns are split
// between ranks. Of all rows on every rank, or of a share of them on each: then each rank is given a share's parts alone.
//
// A rank writes into the others' windows, each in a place of its own there, and reads at home.
#pragma once

#include "raylm/cuda/peer.cuh"

namespace raylm::cuda {

constexpr int kGatherThreads = 512;

struct GatherParams {
  const uint4* x;
  uint4* out;
  int64_t share;          // vectors of x from what one rank is given to what the next one is; 0: all are given the same
  uint32_t width, count;  // vectors of a row of x, and of what a rank is given

  // Where vector i of a rank's x goes.
  __device__ int64_t place(uint32_t i, int rank, int ranks) const {
    return static_cast<int64_t>(i / width) * width * ranks + rank * width + i % width;
  }
};

// Vector i is block b's on every rank.
__global__ void __launch_bounds__(kGatherThreads, 1)
    peer_all_gather_kernel(const __grid_constant__ Peers peers, const __grid_constant__ GatherParams p) {
  constexpr int kUnroll = 4;
  start_dependents();
  wait_for_dependencies();
  const PeerCall call(peers);
  for (int k = 1; k <= peers.ranks; ++k) {  // itself last; the others not all in the same order
    const int to = (peers.rank + k) % peers.ranks;
    const uint4* const x = p.x + to * p.share;
    uint4* const part = call.slot(to) + (peers.rank - (peers.rank > to)) * static_cast<int64_t>(p.count);
    for_my_vecs<kUnroll>(
        p.count, [&](int64_t i) { return x[i]; },
        [&](int64_t i, const uint4& v) {
          *(to == peers.rank ? p.out + p.place(i, to, peers.ranks) : part + i) = v;
        });
  }
  call.meet(0);
  for (int k = 1; k < peers.ranks; ++k) {
    const int from = (peers.rank + k) % peers.ranks;
    const uint4* const part = call.own_slot() + (from - (from > peers.rank)) * static_cast<int64_t>(p.count);
    for_my_vecs<kUnroll>(
        p.count, [&](int64_t i) { return load_shared_by_peers(part + i); },
        [&](int64_t i, const uint4& v) { p.out[p.place(i, from, peers.ranks)] = v; });
  }
  call.end();
}

}  // namespace raylm::cuda
