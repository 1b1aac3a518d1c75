// y = x W^T (+ bias) for up to 64 rows of x, for Hopper: bound by the reading of W [n, k], which happens once.
//
// A cluster of blocks takes tiles of 64 rows of W in turn, and its blocks split k. A block keeps its part of x in shared
// memory for its whole life. One of its threads fetches W and runs ahead, also into the next tiles; four warps multiply by
// wgmma, with W as its A operand, 64 rows, and x, padded to Rows, as its B operand. Each block has a share of x's rows, of
// which the others send it their sums of a tile, thread by thread, to its shared memory; it adds them in the blocks' order,
// and writes them, after it has multiplied the next tile, so that a block rarely waits for another one. A row's result depends
// neither on the rows beside it nor on timing.
#pragma once

#include "raylm/cuda/pipeline/ring.cuh"
#include "raylm/cuda/ptx/cluster.cuh"
#include "raylm/cuda/ptx/copy.cuh"
#include "raylm/cuda/ptx/grid.cuh"
#include "raylm/cuda/ptx/matrix.cuh"
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
  uint64_t full[kSplitStages], empty[kSplitStages], received[2];
};

// A block's dynamic shared memory: stages of W, its part of x, what the cluster's blocks send of two tiles.
template <int Rows, int Cluster>
struct SplitLayout {
  static constexpr int kStepBytes = Rows * kSplitStep * 2;  // of x
  static constexpr int kShare = Rows / Cluster;             // of x's rows
  static constexpr int kEights = kShare < 8 ? 1 : kShare / 8;  // of them; a share may be part of eight rows
  static constexpr int kSenderBytes = kEights * 128 * 16;      // 4 sums a thread and eight
  static constexpr int kReceivedBytes = Cluster > 1 ? Cluster * kSenderBytes : 0;
  uint32_t stages, x, received;

  __device__ SplitLayout(const unsigned char* memory, int block_steps) {
    stages = (shared_address(memory) + 1023) / 1024 * 1024;
    x = stages + kSplitStages * kSplitStageBytes;
    received = x + block_steps * kStepBytes;
  }

  static constexpr int bytes(int block_steps) {
    return 1024 + kSplitStages * kSplitStageBytes + block_steps * kStepBytes + 2 * kReceivedBytes;
  }
};

// Of one block: where everything is, and its part of the work.
template <typename T, int Rows, int Cluster>
struct SplitBlock {
  using Layout = SplitLayout<Rows, Cluster>;
  using Stages = Ring<kSplitStages>;
  static constexpr int kSums = Rows / 2;  // of a thread
  const SplitLinearParams<T>& params;
  const Layout at;
  const uint32_t full, empty, received;
  const int rank = cluster_rank();
  const int from = min(rank * params.block_steps, params.steps);
  const int steps = min(params.block_steps, params.steps - from);

  __device__ SplitBlock(const SplitLinearParams<T>& p, const unsigned char* memory, SplitBarriers& barriers)
      : params(p), at(memory, p.block_steps), full(shared_address(barriers.full)),
        empty(shared_address(barriers.empty)), received(shared_address(barriers.received)) {}

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
    for (int i = 0; i < 2; ++i) barrier_init(received + 8 * i, 1);
    barrier_init_done();
    for (int i = 0; i < 2; ++i) expect_sums(i);
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
    float kept[Layout::kEights][4];
    for (; tile < params.tiles; tile += tile_step(), ++count) {
      float sums[kSums];
#pragma unroll
      for (float& sum : sums) sum = 0;
      sum_tile(sums, ring);
      if (count > 0) add(count - 1, kept);
      // Before a warp of another block sent what it has of tile count - 1, it added tile count - 2: the memory that this
      // one's sums go to is free. All lanes have seen that.
      __syncwarp();
      if constexpr (Cluster > 1) send(count, sums);
      if (count > 0) write(tile - tile_step(), kept);
      keep(sums, kept);
    }
    add(count - 1, kept);
    write(tile - tile_step(), kept);
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

  // Of the 64 rows of W a thread's sums are of row lane / 4 of its warp's 16 and of the one 8 further; of each 8 rows of x,
  // of number lane % 4 * 2 and the next. Whose share these two rows of x are:
  __device__ static int owner(int eight) {
    return (eight * 8 + static_cast<int>(threadIdx.x) % 4 * 2) / Layout::kShare;
  }
  // Where this block gets those from that `sender` has of the eight, of its tile number `count`.
  __device__ uint32_t place(int count, int sender, int eight) const {
    const int of_sender = eight % Layout::kEights * 128 + static_cast<int>(threadIdx.x);
    return at.received + count % 2 * Layout::kReceivedBytes + sender * Layout::kSenderBytes + of_sender * 16;
  }

  __device__ void expect_sums(int which) const {
    constexpr int kBytes = (Cluster - 1) * Layout::kSenderBytes * (Layout::kShare < 8 ? Layout::kShare : 8) / 8;
    if constexpr (Cluster > 1) barrier_arrive_expecting(received + 8 * which, kBytes);
  }

  __device__ __forceinline__ void send(int count, const float (&sums)[kSums]) const {
#pragma unroll
    for (int i = 0; i < Rows / 8; ++i) {
      const float* four = sums + 4 * i;
      if (owner(i) == rank) continue;
      store_shared_at(place(count, rank, i), received + 8 * (count % 2), owner(i),
                      make_float4(four[0], four[1], four[2], four[3]));
    }
  }

  // This block's own sums of its share.
  __device__ __forceinline__ void keep(const float (&sums)[kSums], float (&kept)[Layout::kEights][4]) const {
#pragma unroll
    for (int i = 0; i < Rows / 8; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (owner(i) == rank) kept[i % Layout::kEights][j] = sums[4 * i + j];
      }
    }
  }

  // All blocks' sums of this block's share of its tile number `count`, in their order.
  __device__ __forceinline__ void add(int count, float (&kept)[Layout::kEights][4]) const {
    if constexpr (Cluster > 1) {
      barrier_wait_acquiring(received + 8 * (count % 2), count / 2 & 1);
      if (threadIdx.x == 0) expect_sums(count % 2);
#pragma unroll
      for (int i = 0; i < Layout::kEights; ++i) {
        float4 parts[Cluster];
#pragma unroll
        for (int block = 0; block < Cluster; ++block) parts[block] = load_shared_floats(place(count, block, i));
        add(kept[i], parts);
      }
    }
  }

  // `parts`: the other blocks', beside this one's own.
  __device__ __forceinline__ void add(float (&kept)[4], const float4 (&parts)[Cluster]) const {
    const float4 own = make_float4(kept[0], kept[1], kept[2], kept[3]);
    float4 sum = rank == 0 ? own : parts[0];
#pragma unroll
    for (int block = 1; block < Cluster; ++block) {
      const float4 part = block == rank ? own : parts[block];
      sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
    }
    kept[0] = sum.x, kept[1] = sum.y, kept[2] = sum.z, kept[3] = sum.w;
  }

  // Writes them: a thread then has two neighbouring rows of W of one row of x.
  __device__ __forceinline__ void write(int tile, const float (&kept)[Layout::kEights][4]) const {
    const int lane = threadIdx.x % kWarp, first = rank * Layout::kShare / 8 * 8;
#pragma unroll
    for (int i = 0; i < Layout::kEights; ++i) {
      const int row = first + 8 * i + lane / 4;
      const bool mine = row / Layout::kShare == rank && row < params.rows;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int of_tile = threadIdx.x / kWarp * 16 + half * 8, n = tile * kSplitTile + of_tile + lane % 4 * 2;
        const float bias = bias_at(tile * kSplitTile + of_tile + lane / 4);
        const uint32_t pair = transpose(pack<T>(kept[i][2 * half] + bias, kept[i][2 * half + 1] + bias));
        T* const to = params.out + static_cast<int64_t>(row) * params.n + n;
        if (mine && n < params.n) *reinterpret_cast<uint32_t*>(to) = pair;
      }
    }
  }

  // Of a row of W.
  __device__ float bias_at(int n) const { return params.bias && n < params.n ? to_float(params.bias[n]) : 0.0f; }
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
#endif
}

}  // namespace raylm::cuda
