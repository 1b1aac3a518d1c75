// y = x W^T (+ bias) for up to 64 rows of x, for Hopper: bound by the reading of W [n, k], which happens once.
//
// A cluster of blocks takes tiles of 64 rows of W in turn, and its blocks split k. A block keeps its part of x in shared
// memory for its whole life. One of its threads fetches W and runs ahead, also into the next tiles; four warps multiply by
// wgmma, with W as its A operand, 64 rows, and x, padded to Rows, as its B operand. The blocks' sums of a tile meet in
// the cluster's shared memory: each block adds all blocks' sums of its share of x's rows, in their order, and writes
// them, after it has multiplied the next tile, so that no block waits for another one. A row's result depends neither on
// the rows beside it nor on timing.
#pragma once

#include "raylm/cuda/pipeline/ring.cuh"
#include "raylm/cuda/ptx/cluster.cuh"
#include "raylm/cuda/ptx/copy.cuh"
#include "raylm/cuda/ptx/grid.cuh"
#include "raylm/cuda/ptx/tensor_copy.cuh"
#include "raylm/cuda/ptx/wgmma.cuh"
#include "raylm/cuda/tile/fragments.cuh"

namespace raylm::cuda {

constexpr int kSplitTile = 64;   // rows of W
constexpr int kSplitBoxes = 2;   // of 64 columns, in a stage
constexpr int kSplitStep = 64 * kSplitBoxes;
constexpr int kSplitStages = 5;
constexpr int kSplitStageBytes = kSplitTile * kSplitStep * 2;
constexpr int kSplitThreads = 128 + kWarp;
constexpr int kSplitPitch = kSplitTile + 4;  // of sums: the lanes that store at once are in different banks

template <typename T>
struct SplitLinearParams {
  CUtensorMap x;       // [rows, k], boxes of Rows rows
  CUtensorMap weight;  // [n, k], boxes of 64 rows
  const T* bias;       // or null
  T* out;
  int rows, n, tiles;
  int steps, block_steps;  // of k: in all, and those of a block at most
  bool early;              // W is read while the kernel ahead may still run; x never is
};

struct SplitBarriers {
  uint64_t full[kSplitStages], empty[kSplitStages], met[2];
};

// A block's dynamic shared memory: stages of W, its part of x, sums of two tiles.
template <int Rows>
struct SplitLayout {
  static constexpr int kStepBytes = Rows * kSplitStep * 2;  // of x
  static constexpr int kSumBytes = Rows * kSplitPitch * 4;
  uint32_t stages, x, sums;

  __device__ SplitLayout(const unsigned char* memory, int block_steps) {
    stages = (shared_address(memory) + 1023) / 1024 * 1024;
    x = stages + kSplitStages * kSplitStageBytes;
    sums = x + block_steps * kStepBytes;
  }

  static constexpr int bytes(int block_steps) {
    return 1024 + kSplitStages * kSplitStageBytes + block_steps * kStepBytes + 2 * kSumBytes;
  }
};

// Of one block: where everything is, and its part of the work.
template <typename T, int Rows, int Cluster>
struct SplitBlock {
  using Layout = SplitLayout<Rows>;
  using Stages = Ring<kSplitStages>;
  static constexpr int kSums = Rows / 2;  // of a thread
  const SplitLinearParams<T>& params;
  const Layout at;
  const uint32_t full, empty, met;
  const int rank = cluster_rank();
  const int from = min(rank * params.block_steps, params.steps);
  const int steps = min(params.block_steps, params.steps - from);

  __device__ SplitBlock(const SplitLinearParams<T>& p, const unsigned char* memory, SplitBarriers& barriers)
      : params(p), at(memory, p.block_steps), full(shared_address(barriers.full)),
        empty(shared_address(barriers.empty)), met(shared_address(barriers.met)) {}

  __device__ int first_tile() const { return blockIdx.x / Cluster; }
  __device__ int tile_step() const { return gridDim.x / Cluster; }

  __device__ int ahead() const { return min(steps, kSplitStages); }

  // The first tile's stages bring x as well.
  __device__ void load_weights(int tile, int step, int stage, bool first) const {
    const uint64_t policy = evict_first_policy();
    barrier_arrive_expecting(full + 8 * stage, kSplitStageBytes + (first ? Layout::kStepBytes : 0));
    for (int box = 0; box < kSplitBoxes; ++box) {
      load_box_once(at.stages + stage * kSplitStageBytes + box * kSplitTile * 128, params.weight,
                            full + 8 * stage, {(from + step) * kSplitStep + box * 64, tile * kSplitTile}, policy);
    }
  }

  __device__ void load_x(int step, int stage) const {
    for (int box = 0; box < kSplitBoxes; ++box) {
      load_box(at.x + step * Layout::kStepBytes + box * Rows * 128, params.x, full + 8 * stage,
                       {(from + step) * kSplitStep + box * 64, 0});
    }
  }

  // The one thread that fetches. It asks for the first stages of W before the other blocks are there.
  __device__ void begin() const {
    for (int i = 0; i < kSplitStages; ++i) {
      barrier_init(full + 8 * i, 1);
      barrier_init(empty + 8 * i, 4);
    }
    for (int i = 0; i < 2; ++i) barrier_init(met + 8 * i, 4 * Cluster * kWarpArrivals);
    barrier_init_done();
    if (!params.early) wait_for_dependencies();
    for (int step = 0; step < ahead(); ++step) load_weights(first_tile(), step, step, true);
  }

  __device__ void fetch() const {
    wait_for_dependencies();
    Stages ring;
    for (int step = 0; step < ahead(); ++step, ring.advance()) load_x(step, step);
    for (int tile = first_tile(); tile < params.tiles; tile += tile_step()) {
      const bool first = tile == first_tile();
      for (int step = first ? ahead() : 0; step < steps; ++step, ring.advance()) {
        barrier_wait(empty + 8 * ring.stage, ring.parity ^ 1);
        load_weights(tile, step, ring.stage, first);
        if (first) load_x(step, ring.stage);
      }
    }
  }

  // Four warps, tile after tile.
  __device__ void compute() const {
    Stages ring;
    int count = 0, tile = first_tile();
    wait_for_dependencies();
    for (; tile < params.tiles; tile += tile_step(), ++count) {
      float sums[kSums];
#pragma unroll
      for (float& sum : sums) sum = 0;
      sum_tile(sums, ring);
      float4 before[kQuads];
      if (count > 0) add(count - 1, tile - tile_step(), before);
      // All blocks have added the tile before the last one: this buffer was its.
      leave(count, sums);
      if (count > 0) write(tile - tile_step(), before);
    }
    float4 last[kQuads];
    add(count - 1, tile - tile_step(), last);
    write(tile - tile_step(), last);
  }

  __device__ __forceinline__ void sum_tile(float (&sums)[kSums], Stages& ring) const {
    for (int step = 0; step < steps; ++step, ring.advance()) {
      barrier_wait(full + 8 * ring.stage, ring.parity);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < kSplitStep / 16; ++i) {
        const int box = i / 4, inside = i % 4 * 2;
        const uint64_t w = matrix_descriptor(
            at.stages + ring.stage * kSplitStageBytes + box * kSplitTile * 128, 1024, 0);
        const uint64_t x = matrix_descriptor(at.x + step * Layout::kStepBytes + box * Rows * 128, 1024, 0);
        multiply_transposed<T, Rows>(sums, w + inside, x + inside, 1);
      }
      wgmma_commit();
      wgmma_wait<0>();
      if (threadIdx.x % kWarp == 0) barrier_arrive(empty + 8 * ring.stage);
    }
    settle(sums);
  }

  __device__ uint32_t buffer(int count) const { return at.sums + count % 2 * Layout::kSumBytes; }

  // This block's sums of its tile number `count`, as [row of x][row of W]. Of the 64 rows of W, a thread has row lane / 4
  // of its warp's 16 and the one 8 further; of each 8 rows of x, number lane % 4 * 2 and the next.
  __device__ __forceinline__ void leave(int count, const float (&sums)[kSums]) const {
    const int lane = threadIdx.x % kWarp;
    const uint32_t to = buffer(count) + (lane % 4 * 2 * kSplitPitch + threadIdx.x / kWarp * 16 + lane / 4) * 4;
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      store_shared(to + ((i / 4 * 8 + i % 2) * kSplitPitch + i / 2 % 2 * 8) * 4, sums[i]);
    }
    __syncwarp();
    barrier_arrive_lane<Cluster>(met + 8 * (count % 2), lane);
  }

  // A thread's four neighbours number i of this block's share of a tile: row of x, first row of W.
  __device__ static int row_of(int i) { return (i * 128 + threadIdx.x) / (kSplitTile / 4); }
  __device__ static int column_of(int i) { return (i * 128 + threadIdx.x) % (kSplitTile / 4) * 4; }
  static constexpr int kShare = Rows / Cluster;
  static constexpr int kQuads = (kShare * kSplitTile / 4 + 127) / 128;

  // Whether there are such results.
  __device__ bool is_there(int tile, int i) const {
    return row_of(i) < kShare && rank * kShare + row_of(i) < params.rows && tile * kSplitTile + column_of(i) < params.n;
  }

  // All blocks' sums of this block's share of a tile, its number `count`. What is read of others has a use, so that it is
  // there before this block is at the end.
  __device__ __forceinline__ void add(int count, int tile, float4 (&sum)[kQuads]) const {
    barrier_wait_acquiring(met + 8 * (count % 2), count / 2 & 1);
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      if (!is_there(tile, i)) continue;
      const uint32_t from = buffer(count) + ((rank * kShare + row_of(i)) * kSplitPitch + column_of(i)) * 4;
      float4 parts[Cluster];
#pragma unroll
      for (int block = 0; block < Cluster; ++block) parts[block] = load_shared_at(from, block);
      sum[i] = parts[0];
#pragma unroll
      for (int block = 1; block < Cluster; ++block) {
        sum[i].x += parts[block].x, sum[i].y += parts[block].y;
        sum[i].z += parts[block].z, sum[i].w += parts[block].w;
      }
    }
  }

  __device__ __forceinline__ void write(int tile, const float4 (&sum)[kQuads]) const {
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      const int row = rank * kShare + row_of(i), n = tile * kSplitTile + column_of(i);
      if (!is_there(tile, i)) continue;
      float bias[4] = {};
      for (int j = 0; j < 4 && params.bias; ++j) bias[j] = to_float(params.bias[n + j]);
      T* to = params.out + static_cast<int64_t>(row) * params.n + n;
      *reinterpret_cast<uint2*>(to) =
          make_uint2(pack<T>(sum[i].x + bias[0], sum[i].y + bias[1]), pack<T>(sum[i].z + bias[2], sum[i].w + bias[3]));
    }
  }
};

template <typename T, int Rows, int Cluster>
__global__ void __launch_bounds__(kSplitThreads, 1)
    split_linear_kernel(const __grid_constant__ SplitLinearParams<T> params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ unsigned char memory[];
  __shared__ SplitBarriers barriers;
  start_dependents();
  const SplitBlock<T, Rows, Cluster> block(params, memory, barriers);
  const bool fetches = threadIdx.x == 128;
  if (fetches) block.begin();
  __syncwarp();
  cluster_meet();
  if (threadIdx.x < 128) block.compute();
  if (fetches) block.fetch();
  // A block stays until the others have read its sums.
  __syncwarp();
  cluster_meet();
#endif
}

}  // namespace raylm::cuda
