// A product with many rows and its gated activation in one kernel, for Hopper: out = act(x gate^T) * (x up^T).
//
// A block stays on its SM and takes tile after tile of 128 rows and 128 columns. One of its warps fetches and runs ahead
// into the next tile; two groups of four warps compute, 64 rows each. A stage has the rows of gate and then those of up,
// so that one wgmma multiplies by both and a thread has the gate of a column and its up side by side in its registers:
// the activation is taken where the sums are, and [rows, 2 columns] never goes to memory. Nothing holds the two groups
// together but the stages, so while one takes its activations the other has the tensor cores.
//
// Blocks of a cluster take the same columns of neighbouring rows; each fetches its share of the weights for all of them.
#pragma once

#include "raylm/cuda/gated.cuh"
#include "raylm/cuda/pipeline/ring.cuh"
#include "raylm/cuda/ptx/cluster.cuh"
#include "raylm/cuda/ptx/matrix.cuh"
#include "raylm/cuda/ptx/tensor_copy.cuh"
#include "raylm/cuda/ptx/warps.cuh"
#include "raylm/cuda/ptx/wgmma.cuh"
#include "raylm/cuda/tile/fragments.cuh"

namespace raylm::cuda {

struct GatedShape {
  static constexpr int kRows = 128, kColumns = 128, kDepth = 64;  // depth: of the summed dimension, a stage
  static constexpr int kStages = 4, kGroups = 2, kThreads = 128 * (kGroups + 1);
  static constexpr int kFetchRegisters = 40, kComputeRegisters = 232;
  static constexpr int kMatrixBytes = 128 * kDepth * 2, kStageBytes = 3 * kMatrixBytes;  // x, gate, up
  static constexpr int kHalfBytes = 64 * 64 * 2;  // of a group's results, 64 columns: what one box stores
  static constexpr int kGroupBytes = 2 * kHalfBytes;
  static constexpr int kTileBytes = kStages * kStageBytes + kGroups * kGroupBytes;
  static constexpr int kSharedBytes = kTileBytes + 1024 + 1024;  // barriers, alignment
};

struct GatedLinearParams {
  CUtensorMap x;       // [rows, depth], boxes of 128 rows
  CUtensorMap weight;  // [2 * columns, depth], boxes of 128 rows
  CUtensorMap out;     // [rows, columns], boxes of 64 rows
  int rows, columns, steps;  // steps: stages of the summed dimension
  int band;                  // clusters' tiles above each other that are taken before the next columns
};

// Row and column of a block's tile, in elements.
struct GatedTile {
  int row, column;
};

// The tiles of a cluster, one after the other. Neighbours in time share weights within a band, and a band's rows are used
// again for the next columns: both come from the L2 cache.
template <int Cluster>
class GatedTiles {
 public:
  using Shape = GatedShape;

  __device__ explicit GatedTiles(const GatedLinearParams& p)
      : slabs_((p.rows + kSlab - 1) / kSlab), columns_(p.columns / Shape::kColumns), band_(p.band) {}

  __device__ bool more() const { return number_ < slabs_ * columns_; }
  __device__ void advance() { number_ += gridDim.x / Cluster; }

  __device__ GatedTile tile() const {
    const unsigned first = number_ / (band_ * columns_) * band_, inside = number_ - first * columns_;
    const unsigned height = min(band_, slabs_ - first);
    const unsigned column = inside / height, slab = first + inside - column * height, rank = blockIdx.x % Cluster;
    return {static_cast<int>(slab * kSlab + rank * Shape::kRows), static_cast<int>(column * Shape::kColumns)};
  }

 private:
  static constexpr int kSlab = Cluster * Shape::kRows;  // rows of a cluster
  unsigned slabs_, columns_, band_;
  unsigned number_ = blockIdx.x / Cluster;
};

// The block's shared memory: stages, results of the groups, barriers.
struct GatedBarriers {
  uint64_t full[GatedShape::kStages], empty[GatedShape::kStages];
};

struct GatedLayout {
  using Shape = GatedShape;
  uint32_t stages, results, full, empty;

  __device__ explicit GatedLayout(const unsigned char* memory) {
    stages = (shared_address(memory) + 1023) / 1024 * 1024;
    results = stages + Shape::kStages * Shape::kStageBytes;
    full = stages + Shape::kTileBytes;
    empty = full + sizeof(GatedBarriers::full);
  }

  __device__ uint32_t stage(int i) const { return stages + i * Shape::kStageBytes; }
  __device__ uint32_t full_barrier(int i) const { return full + i * sizeof(uint64_t); }
  __device__ uint32_t empty_barrier(int i) const { return empty + i * sizeof(uint64_t); }

  // A stage is full with what its block expects of it, wherever it is fetched, and empty when each warp that computes, of
  // all blocks that a fetch writes to, has read it.
  __device__ void init_barriers(int cluster) const {
    for (int i = 0; i < Shape::kStages; ++i) {
      barrier_init(full_barrier(i), 1);
      barrier_init(empty_barrier(i), cluster * 4 * Shape::kGroups);
    }
    barrier_init_done();
  }
};

// The one thread that fetches.
template <int Cluster>
struct GatedFetcher {
  using Shape = GatedShape;
  const GatedLinearParams& params;
  const GatedLayout& at;
  Ring<Shape::kStages> ring{};

  // Gate rows are the weight's first `columns`, up rows the others.
  __device__ void load_weights(const GatedTile& tile, int depth, uint32_t stage, uint32_t full) const {
    if constexpr (Cluster == 2) {
      const int rank = cluster_rank();  // the first block fetches gate, the second one up
      load_box_to_blocks(stage + (1 + rank) * Shape::kMatrixBytes, params.weight, full,
                                 {depth, rank * params.columns + tile.column}, 0b11);
    } else {
      for (int half = 0; half < 2; ++half) {
        load_box(stage + (1 + half) * Shape::kMatrixBytes, params.weight, full,
                         {depth, half * params.columns + tile.column});
      }
    }
  }

  __device__ void run() {
    for (GatedTiles<Cluster> tiles(params); tiles.more(); tiles.advance()) {
      const GatedTile tile = tiles.tile();
      for (int step = 0; step < params.steps; ++step, ring.advance()) {
        const uint32_t stage = at.stage(ring.stage), full = at.full_barrier(ring.stage);
        barrier_wait(at.empty_barrier(ring.stage), ring.parity ^ 1);
        barrier_arrive_expecting(full, Shape::kStageBytes);
        load_box(stage, params.x, full, {step * Shape::kDepth, tile.row});
        load_weights(tile, step * Shape::kDepth, stage, full);
      }
    }
  }
};

// One of the groups that compute: 64 rows of the tile. Sums are as wgmma leaves them: of each 8 columns a thread has two
// neighbours of row lane / 4 of its warp's 16, and the same two of row lane / 4 + 8; first all of gate, then all of up.
template <typename T, typename Act, int Cluster>
struct GatedComputer {
  using Shape = GatedShape;
  static constexpr int kSums = Shape::kColumns;  // gate and up of 64 rows, over 128 threads
  using Sums = float[kSums];
  const GatedLinearParams& params;
  const GatedLayout& at;
  int group;
  Ring<Shape::kStages> ring{};

  // Another stage's part of the sums, begun only.
  __device__ __forceinline__ void multiply(Sums& sums, bool first) const {
    const uint32_t stage = at.stage(ring.stage);
    const uint64_t x = matrix_descriptor(stage + group * 64 * 128, 1024, 0);
    const uint64_t weight = matrix_descriptor(stage + Shape::kMatrixBytes, 1024, 0);
    wgmma_fence();
#pragma unroll
    for (int d = 0; d < Shape::kDepth / 16; ++d) {
      multiply_transposed<T, 2 * Shape::kColumns>(sums, x + 2 * d, weight + 2 * d, d != 0 || !first);
    }
    wgmma_commit();
  }

  __device__ void release(int stage) const {
    barrier_arrive_at<Cluster>(at.empty_barrier(stage), threadIdx.x % kWarp);
  }

  __device__ __forceinline__ void sum_tile(Sums& sums) {
    int last = ring.stage;
    for (int step = 0; step < params.steps; ++step) {
      barrier_wait(at.full_barrier(ring.stage), ring.parity);
      multiply(sums, step == 0);
      wgmma_wait<1>();  // for the step before
      if (step > 0) release(last);
      last = ring.stage;
      ring.advance();
    }
    // There are always steps. Without the condition the compiler would take half of the activations before it releases.
    if (params.steps > 0) {
      wgmma_wait<0>();
      release(last);
    }
    wgmma_wait<0>();
    settle(sums);
  }

  // Results go to shared memory as the copy engine expects them, and from there in two boxes of 64 columns.
  __device__ __forceinline__ void write_tile(const Sums& sums, const GatedTile& tile) const {
    const int thread = threadIdx.x % 128, lane = thread % kWarp;
    const uint32_t results = at.results + group * Shape::kGroupBytes;
    int column = tile.column, first_row = tile.row + group * 64;
    asm volatile("" : "+r"(column), "+r"(first_row));  // known before the one thread that stores has to wait for it
    // Of the four 8 x 8 matrices of a store, the second and the fourth are 8 rows lower, the last two 8 columns further.
    const uint32_t row = results + (thread / kWarp * 16 + lane % 16) * 128;
    if (thread == 0) store_wait_read();
    sync_some(1 + group, 128);
#pragma unroll
    for (int n = 0; n < Shape::kColumns / 16; ++n) {
      uint32_t packed[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int first = 8 * n + 2 * i;
        packed[i] = pack<T>(gated(sums, first), gated(sums, first + 1));
      }
      const int vector = (n % 4 * 2 + lane / 16) ^ lane % 8;
      store_matrices(row + n / 4 * Shape::kHalfBytes + vector * 16, packed);
    }
    fence_shared_writes();
    sync_some(1 + group, 128);
    if (thread == 0 && first_row < params.rows) {
      store_box(params.out, results, {column, first_row});
      store_box(params.out, results + Shape::kHalfBytes, {column + 64, first_row});
      store_commit();
    }
  }

  static __device__ __forceinline__ float gated(const Sums& sums, int i) {
    return Act{}(sums[i]) * sums[kSums / 2 + i];
  }

  __device__ __forceinline__ void run() {
    for (GatedTiles<Cluster> tiles(params); tiles.more(); tiles.advance()) {
      Sums sums;
      sum_tile(sums);
      write_tile(sums, tiles.tile());
    }
    if (threadIdx.x % 128 == 0) store_wait();
  }
};

// Clusters of `Cluster` blocks, one block for each SM.
template <typename T, typename Act, int Cluster>
__global__ void __launch_bounds__(GatedShape::kThreads, 1)
    gated_linear_kernel(const __grid_constant__ GatedLinearParams params) {
  static_assert(Cluster == 1 || Cluster == 2);
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ unsigned char memory[];
  using Shape = GatedShape;
  const GatedLayout at(memory);
  if (threadIdx.x == 0) {
    at.init_barriers(Cluster);
    prefetch_map(params.x);
    prefetch_map(params.weight);
    prefetch_map(params.out);
  }
  Cluster == 1 ? __syncthreads() : cluster_meet();
  const int group = __shfl_sync(kAllLanes, threadIdx.x / 128, 0);  // in a register that the warp shares
  if (group == 0) {
    give_registers_back<Shape::kFetchRegisters>();
    if (threadIdx.x == 0) GatedFetcher<Cluster>{params, at}.run();
  } else {
    take_registers<Shape::kComputeRegisters>();
    GatedComputer<T, Act, Cluster>{params, at, group - 1}.run();
  }
  // A block of a cluster stays until the other one arrives at its barriers no more.
  if constexpr (Cluster > 1) cluster_sync();
#endif
}

}  // namespace raylm::cuda
