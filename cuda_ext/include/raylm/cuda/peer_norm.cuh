// residual += the sum of all ranks' x; out = its root-mean-square norm: what follows the products of a layer that are
// split between ranks, in one kernel over peer memory (peer.cuh), in one shot.
#pragma once

#include "raylm/cuda/norm.cuh"
#include "raylm/cuda/peer.cuh"

namespace raylm::cuda {

constexpr int kPeerNormThreads = 512;

// One block a row, kVecs times 16 bytes a thread. What lies on this GPU is read while the peers are waited for.
template <typename T, int kMost, int kVecs>
__global__ void __launch_bounds__(kPeerNormThreads, 1)
    peer_add_rms_norm_kernel(const __grid_constant__ Peers peers, const __grid_constant__ NormParams<T> p) {
  constexpr int kSize = kVec<T>;
  start_dependents();
  wait_for_dependencies();
  const PeerCall call(peers);
  const int64_t row = blockIdx.x, vecs = p.hidden / kSize;
  const T* x = p.row(row);
  T* residual = p.residual + row * p.residual_stride;
  uint4* const own = call.own_slot() + row * vecs;
  Vec<T> held[kVecs], weight[kVecs];
#pragma unroll
  for (int j = 0; j < kVecs; ++j) {
    const int64_t v = threadIdx.x + static_cast<int64_t>(j) * blockDim.x;
    if (v < vecs) own[v] = *reinterpret_cast<const uint4*>(x + v * kSize);
  }
#pragma unroll
  for (int j = 0; j < kVecs; ++j) {
    const int64_t v = threadIdx.x + static_cast<int64_t>(j) * blockDim.x;
    if (v >= vecs) continue;
    held[j] = Vec<T>::load(residual + v * kSize);
    weight[j] = Vec<T>::load(p.weight + v * kSize);
  }
  call.meet(0);
  float squares = 0;
#pragma unroll
  for (int j = 0; j < kVecs; ++j) {
    const int64_t v = threadIdx.x + static_cast<int64_t>(j) * blockDim.x;
    if (v >= vecs) continue;
    // Rounded to T as a sum, then with the residual: the bits of peer_all_reduce and add_rms_norm one after the other.
    const Vec<T> sum = sum_parts<T>(load_parts<kMost>(call, peers.ranks, row * vecs + v), peers.ranks);
    for (int i = 0; i < kSize; ++i) held[j].set(i, sum[i] + held[j][i]);
    held[j].store(residual + v * kSize);
    for (int i = 0; i < kSize; ++i) squares += held[j][i] * held[j][i];
  }
  const float scale = rsqrtf(row_sum(squares) / static_cast<float>(p.hidden) + p.eps);
#pragma unroll
  for (int j = 0; j < kVecs; ++j) {
    const int64_t v = threadIdx.x + static_cast<int64_t>(j) * blockDim.x;
    if (v >= vecs) continue;
    for (int i = 0; i < kSize; ++i) held[j].set(i, held[j][i] * scale * weight[j][i]);
    held[j].store(p.out + row * p.hidden + v * kSize);
  }
  call.end();
}

}  // namespace raylm::cuda
