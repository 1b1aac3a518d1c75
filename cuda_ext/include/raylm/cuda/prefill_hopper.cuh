// Attention of long runs of queries over a paged cache, for Hopper: FlashAttention-3 (Shah et al., arXiv:2407.08608).
//
// A block stays on its SM and takes tile after tile from a counter. Some of its warps fetch, keys and values, and run ahead
// into the next tile. Groups of four warps compute, 64 queries each: while wgmma multiplies the values of one step, the
// group takes the softmax of the next, whose keys have been multiplied before. The groups are not held to turns, as the
// paper's are: it was no faster.
#pragma once

#include "raylm/cuda/prefill_hopper_codes.cuh"
#include "raylm/cuda/prefill_hopper_fetch.cuh"
#include "raylm/cuda/ptx/grid.cuh"
#include "raylm/cuda/ptx/warps.cuh"
#include "raylm/cuda/ptx/wgmma.cuh"

namespace raylm::cuda {

// One of the groups that compute: 64 rows of the tile.
template <typename T, typename C, int D>
struct Computer {
  using Shape = HopperShape<C, D>;
  using Number = typename Shape::template Number<T>;
  static constexpr int kKeys = Shape::kKeys;
  const HopperParams<T>& params;
  const HopperLayout<C, D>& at;
  int group;
  Ring<Shape::kStages> k, v;
  Ring<Shape::kQueryStages> q;

  static __device__ uint32_t address(uint64_t& barrier) { return shared_address(&barrier); }

  static __device__ void release(uint64_t& barrier) {
    if (threadIdx.x % kWarp == 0) barrier_arrive(address(barrier));
  }

  // Converts the group's queries to Number, in place.
  __device__ __forceinline__ void convert_queries() const {
    const uint32_t rows = at.q + q.stage * Shape::kQueryBytes + group * 64 * 128 + threadIdx.x % 128 * 16;
#pragma unroll
    for (int i = 0; i < 4 * Shape::kHalves; ++i) {
      const uint32_t vector = rows + i / 4 * Shape::kRows * 128 + i % 4 * 128 * 16;
      const uint4 x = load_shared(vector);
      store_shared(vector, make_uint4(to_halves<T>(x.x), to_halves<T>(x.y), to_halves<T>(x.z), to_halves<T>(x.w)));
    }
    fence_shared_writes();
    sync_some(1 + group, 128);
  }

  // scores = Q K^T, begun only.
  __device__ __forceinline__ void multiply_keys(float (&scores)[kKeys / 2]) const {
    const uint32_t rows = at.q + q.stage * Shape::kQueryBytes + group * 64 * 128;
    const uint64_t queries = matrix_descriptor(rows, 1024, 0);
    const uint64_t keys = matrix_descriptor(at.k + k.stage * Shape::kStageBytes, Shape::kRowGroupBytes, 0);
    wgmma_fence();
#pragma unroll
    for (int d = 0; d < D / 16; ++d) {
      const int q_offset = d / 4 * Shape::kRows * 128 + d % 4 * 32;
      const int k_offset = d / 4 * Shape::kHalfBytes + d % 4 * 32;
      multiply_transposed<Number, kKeys>(scores, queries + (q_offset >> 4), keys + (k_offset >> 4), d != 0);
    }
    wgmma_commit();
  }

  // out += weights V, begun only.
  __device__ __forceinline__ void multiply_values(float (&out)[D / 2], const uint32_t (&weights)[kKeys / 4]) const {
    const uint64_t values = matrix_descriptor(at.v + v.stage * Shape::kStageBytes, Shape::kRowGroupBytes,
                                                      Shape::kHalfBytes);
    wgmma_fence();
#pragma unroll
    for (int n = 0; n < kKeys / 16; ++n) {
      multiply<Number, D>(out, weights + 4 * n, values + n * (2 * Shape::kRowGroupBytes >> 4));
    }
    wgmma_commit();
  }

  // Soft cap and mask, for the keys of step n.
  __device__ __forceinline__ void shape_scores(float (&scores)[kKeys / 2], int group_position, int n) const {
    const PrefillParams<T>& p = params.p;
    if (p.tanh_scale != 0) soft_cap_scores(scores, p.tanh_scale);
    const bool future = (n + 1) * kKeys > group_position + 1;
    const bool past = p.window > 0 && n * kKeys <= group_position + 63 - p.window;
    if (future || past) {
      const int row = threadIdx.x % 128 / kWarp * 16 + threadIdx.x % kWarp / 4;
      mask_scores(scores, group_position + row, n * kKeys, p.window);
    }
  }

  static __device__ __forceinline__ void pack_weights(uint32_t (&weights)[kKeys / 4],
                                                      const float (&scores)[kKeys / 2]) {
#pragma unroll
    for (int i = 0; i < kKeys / 4; ++i) weights[i] = pack<Number>(scores[2 * i], scores[2 * i + 1]);
  }

  __device__ __forceinline__ void compute_tile(const Tile& tile) {
    const int last = Shape::last_step(tile), first = Shape::first_step(tile, params.p.window);
    const int group_position = tile.position() + group * 64;
    float out[D / 2] = {}, scores[kKeys / 2], shrink[2];
    uint32_t weights[kKeys / 4];
    OnlineSoftmax softmax;

    barrier_wait(address(at.shared->k_full[k.stage]), k.parity);
    multiply_keys(scores);
    wgmma_wait<0>();
    settle(scores);
    finish_keys(last == first);
    shape_scores(scores, group_position, last);
    softmax.update(scores, params.p.exp2_scale, shrink);
    pack_weights(weights, scores);
    for (int n = last - 1; n >= first; --n) {
      barrier_wait(address(at.shared->k_full[k.stage]), k.parity);
      multiply_keys(scores);
      barrier_wait(address(at.shared->v_full[v.stage]), v.parity);
      multiply_values(out, weights);
      wgmma_wait<1>();
      settle(scores);
      finish_keys(n == first);
      shape_scores(scores, group_position, n);
      softmax.update(scores, params.p.exp2_scale, shrink);
      finish_values(out);
      scale_rows(out, shrink);
      pack_weights(weights, scores);
    }
    barrier_wait(address(at.shared->v_full[v.stage]), v.parity);
    multiply_values(out, weights);
    finish_values(out);
    const int row = group * 64 + threadIdx.x % 128 / kWarp * 16 + threadIdx.x % kWarp / 4;
    write_rows(params.p, tile, tile.first_row + row, out, softmax);
  }

  __device__ __forceinline__ void finish_keys(bool last) {
    release(at.shared->k_empty[k.stage]);
    k.advance();
    if (last) {
      release(at.shared->q_empty[q.stage]);
      q.advance();
    }
  }

  __device__ __forceinline__ void finish_values(float (&out)[D / 2]) {
    wgmma_wait<0>();
    settle(out);
    release(at.shared->v_empty[v.stage]);
    v.advance();
  }

  __device__ __forceinline__ void run() {
    TileQueue<C, D> tiles{*at.shared};
    for (Tile tile = tiles.take(); tile.seq >= 0; tile = tiles.take()) {
      barrier_wait(address(at.shared->q_full[q.stage]), q.parity);
      if constexpr (!std::is_same_v<Number, T>) convert_queries();
      compute_tile(tile);
    }
  }
};

// The four warps that do not compute: they fetch, and one writes the zeros behind the last sequence.
template <typename T, typename C, int D>
__device__ void fetch(const HopperParams<T>& params, const HopperLayout<C, D>& at, int warp) {
  if (warp == 3) zero_surplus_rows(params.p, blockIdx.x * kWarp + threadIdx.x % kWarp, gridDim.x * kWarp);
  if constexpr (std::is_same_v<C, Code>) {
    fetch_codes<T, D>(params, at, warp);
  } else if (warp == 0) {
    Fetcher<T, D>{params, at}.run_keys();
  } else if (warp == 1) {
    Fetcher<T, D>{params, at}.run_values();
  }
}

// One block for each SM.
template <typename T, typename C, int D>
__global__ void __launch_bounds__(HopperShape<C, D>::kThreads, 1)
    prefill_hopper_kernel(const __grid_constant__ HopperParams<T> params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ unsigned char memory[];
  using Shape = HopperShape<C, D>;
  const HopperLayout<C, D> at(memory);
  if (threadIdx.x == 0) at.shared->init();
  wait_for_dependencies();
  start_dependents();
  __syncthreads();
  const int warp = threadIdx.x / kWarp;
  if (warp < 4) {
    give_registers_back<Shape::kFetchRegisters>();
    fetch(params, at, warp);
  } else {
    take_registers<Shape::kComputeRegisters>();
    Computer<T, C, D>{params, at, warp / 4 - 1}.run();
  }
#endif
}

}  // namespace raylm::cuda
