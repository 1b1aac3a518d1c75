// residual += the sum of all ranks' x; out = its root-mean-square norm: what follows the products of a layer that are
// split between ranks, in one kernel over peer memory (peer.cuh), in one shot.
#pragma once

#include "raylm/cuda/norm.cuh"
#include "raylm/cuda/peer.cuh"
#include "raylm/cuda/ptx/warps.cuh"

namespace raylm::cuda {

constexpr int kPeerNormThreads = 512;

// The sum over the `width` threads of a row, which are group `group` of the block. A group calls it with `turn` one
// higher each time: the next call writes where this one's reads are not.
__device__ inline float group_sum(float x, int group, int width, int turn) {
  __shared__ float parts[2][kPeerNormThreads / kWarp];
  x = warp_sum(x);
  const int warps = width / kWarp, lane = threadIdx.x % kWarp;
  if (warps == 1) return x;
  float* own = parts[turn % 2] + group * warps;
  if (lane == 0) own[threadIdx.x % width / kWarp] = x;
  // Barrier 0 is __syncthreads; of two warps or more there are at most 8 groups.
  sync_some(1 + group, width);
  return warp_sum(lane < warps ? own[lane] : 0.0f);
}

// Rows that a block has under way at a time, as far as there are registers for them.
template <int kMost, int kVecs>
constexpr int kNormRows = kMost * kVecs <= 2 ? 2 : 1;

// Block b has the rows b + i * gridDim.x, kVecs times 16 bytes of each a thread. It writes its x into the peers' windows
// and reads at home: a write does not wait for the way there and back. What lies on this GPU is read while the peers are
// waited for.
template <typename T, int kMost, int kVecs>
__global__ void __launch_bounds__(kPeerNormThreads, 1)
    peer_add_rms_norm_kernel(const __grid_constant__ Peers peers, const __grid_constant__ NormParams<T> p) {
  constexpr int kSize = kVec<T>, kRows = kNormRows<kMost, kVecs>;
  start_dependents();
  wait_for_dependencies();
  const PeerCall call(peers);
  const int vecs = static_cast<int>(p.hidden / kSize), rows = static_cast<int>(p.rows), step = gridDim.x;
  const auto for_vecs = [&](const auto& body) {  // body(j, v): vectors v of a row
#pragma unroll
    for (int j = 0; j < kVecs; ++j) {
      if (const int v = threadIdx.x + j * blockDim.x; v < vecs) body(j, v);
    }
  };
  const auto for_rows = [&](int first, const auto& body) {  // body(u, row)
#pragma unroll
    for (int u = 0; u < kRows; ++u) {
      if (first + u * step < rows) body(u, first + u * step);
    }
  };
  // What rank `from` gives rank `to`, which has a place for each of the others.
  const auto given = [&](int from, int to, int row) {
    return call.slot(to) + (static_cast<int64_t>(from - (from > to)) * rows + row) * vecs;
  };
  Vec<T> own[kRows][kVecs], held[kRows][kVecs], weight[kVecs];
  const auto load_own = [&](int u, int row) {
    for_vecs([&](int j, int v) { own[u][j] = Vec<T>::load(p.x + row * p.outer_stride + v * kSize); });
  };
  const auto load_residual = [&](int u, int row) {
    for_vecs([&](int j, int v) { held[u][j] = Vec<T>::load(p.residual + row * p.residual_stride + v * kSize); });
  };
#pragma unroll 1
  for (int first = blockIdx.x; first < rows; first += kRows * step) {
    for_rows(first, load_own);
    for_rows(first, [&](int u, int row) {
      for_vecs([&](int j, int v) {
        const uint4 x = *reinterpret_cast<const uint4*>(&own[u][j]);
#pragma unroll
        for (int r = 0; r < kMost; ++r) {
          if (r < peers.ranks && r != peers.rank) given(peers.rank, r, row)[v] = x;
        }
      });
    });
  }
  for_rows(blockIdx.x, load_residual);
  for_vecs([&](int j, int v) { weight[j] = Vec<T>::load(p.weight + v * kSize); });
  call.meet(0);
  int turn = 0;
#pragma unroll 1
  for (int first = blockIdx.x; first < rows; first += kRows * step) {
    Parts<kMost> parts[kRows][kVecs];
    if (rows > kRows * step) {  // else they are held
      for_rows(first, load_own);
      if (first != blockIdx.x) for_rows(first, load_residual);
    }
    for_rows(first, [&](int u, int row) {
      for_vecs([&](int j, int v) {
#pragma unroll
        for (int r = 0; r < kMost; ++r) {
          parts[u][j].of[r] = *reinterpret_cast<const uint4*>(&own[u][j]);
          if (r < peers.ranks && r != peers.rank) parts[u][j].of[r] = load_shared_by_peers(given(r, peers.rank, row) + v);
        }
      });
    });
    for_rows(first, [&](int u, int row) {
      float squares = 0;
      for_vecs([&](int j, int v) {
        // Rounded to T as a sum, then with the residual: the bits of peer_all_reduce and add_rms_norm one after the other.
        const Vec<T> sum = sum_parts<T>(parts[u][j], peers.ranks);
        Vec<T>& x = held[u][j];
        for (int i = 0; i < kSize; ++i) x.set(i, sum[i] + x[i]);
        x.store(p.residual + row * p.residual_stride + v * kSize);
        for (int i = 0; i < kSize; ++i) squares += x[i] * x[i];
      });
      const float mean = group_sum(squares, 0, blockDim.x, turn++) / static_cast<float>(p.hidden);
      const float scale = rsqrtf(mean + p.eps);
      for_vecs([&](int j, int v) {
        Vec<T>& x = held[u][j];
        for (int i = 0; i < kSize; ++i) x.set(i, x[i] * scale * weight[j][i]);
        x.store(p.out + row * p.hidden + v * kSize);
      });
    });
  }
  call.end();
}

}  // namespace raylm::cuda
