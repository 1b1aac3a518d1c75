// x = the sum of all ranks' x, over memory that they share (peer.cuh).
//
// One shot: every rank reads all of every rank's data, after one meeting. Two shots: rank r sums part r of the data,
// and reads the other parts' sums after a second meeting: less to read from 3 ranks on, for a longer way. Both give
// the same bits, on every rank.
#pragma once

#include "raylm/cuda/peer.cuh"

namespace raylm::cuda {

constexpr int kReduceThreads = 512;

// Loads that a thread has under way are about as many for any number of ranks.
template <int kMost>
constexpr int kReduceUnroll = kMost <= 2 ? 4 : kMost <= 4 ? 2 : 1;

template <typename T, int kMost>
__device__ inline uint4 summed(const Parts<kMost>& parts, int ranks) {
  const Vec<T> sum = sum_parts<T>(parts, ranks);
  return *reinterpret_cast<const uint4*>(&sum);
}

template <typename T, int kMost>
__global__ void __launch_bounds__(kReduceThreads, 1)
    one_shot_all_reduce_kernel(const __grid_constant__ Peers peers, uint4* x, int64_t vecs) {
  start_dependents();
  wait_for_dependencies();
  const PeerCall call(peers);
  uint4* const own = call.own_slot();
  for_my_vecs<4>(vecs, [&](int64_t i) { return x[i]; }, [&](int64_t i, const uint4& v) { own[i] = v; });
  call.meet(0);
  for_my_vecs<kReduceUnroll<kMost>>(
      vecs, [&](int64_t i) { return load_parts<kMost>(call, peers.ranks, i); },
      [&](int64_t i, const Parts<kMost>& parts) { x[i] = summed<T>(parts, peers.ranks); });
  call.end();
}

// Vector i of every part is block b's on every rank. Part r of rank r's slot is read by rank r alone until the second
// meeting, so that its sum can take its place; the thread that overwrites a vector is the one that has read it.
template <typename T, int kMost>
__global__ void __launch_bounds__(kReduceThreads, 1)
    two_shot_all_reduce_kernel(const __grid_constant__ Peers peers, uint4* x, int64_t vecs) {
  constexpr int kUnroll = kReduceUnroll<kMost>;
  start_dependents();
  wait_for_dependencies();
  const PeerCall call(peers);
  uint4* const own = call.own_slot();
  const int64_t part = (vecs + peers.ranks - 1) / peers.ranks;
  const auto for_ranks = [&](int64_t i, const auto& body) {  // body(rank, index): vector i of that rank's part
#pragma unroll
    for (int r = 0; r < kMost; ++r) {
      if (r < peers.ranks && r * part + i < vecs) body(r, r * part + i);
    }
  };
  for_my_vecs<kUnroll>(
      part,
      [&](int64_t i) {
        Parts<kMost> parts;
        for_ranks(i, [&](int r, int64_t at) { parts.of[r] = x[at]; });
        return parts;
      },
      [&](int64_t i, const Parts<kMost>& parts) {
        for_ranks(i, [&](int r, int64_t at) { own[at] = parts.of[r]; });
      });
  call.meet(0);
  const int64_t begin = peers.rank * part, left = vecs - begin;
  for_my_vecs<kUnroll>(
      left < part ? left : part, [&](int64_t i) { return load_parts<kMost>(call, peers.ranks, begin + i); },
      [&](int64_t i, const Parts<kMost>& parts) { x[begin + i] = own[begin + i] = summed<T>(parts, peers.ranks); });
  call.meet(1);
  for_my_vecs<kUnroll>(
      part,
      [&](int64_t i) {
        Parts<kMost> sums;
        for_ranks(i, [&](int r, int64_t at) {
          if (r != peers.rank) sums.of[r] = load_shared_by_peers(call.slot(r) + at);
        });
        return sums;
      },
      [&](int64_t i, const Parts<kMost>& sums) {
        for_ranks(i, [&](int r, int64_t at) {
          if (r != peers.rank) x[at] = sums.of[r];
        });
      });
  call.end();
}

}  // namespace raylm::cuda
