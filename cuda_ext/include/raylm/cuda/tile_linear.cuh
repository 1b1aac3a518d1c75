// y = x W^T (+ bias), or its gated activation, for more than a few rows of x, for Hopper.
//
// A block takes tiles of Rows rows of x by Width rows of W, all of k or a slice of it. One of its threads fetches stages
// and runs ahead, also into the next tile; one or two groups of four warps multiply by wgmma, with x as its A operand and
// W as its B operand, whose width may be any multiple of 8: so tiles are as wide as gives each multiprocessor the same
// share of W, and k is summed in one piece, in its order, wherever that is possible.
//
// Where n is too small for that, the Split blocks of a cluster take a slice of k each, of one tile. Their sums meet in the
// cluster's shared memory, where each block adds those of its part of the rows, in the slices' order.
//
// The numbers are of 16 bits, or of 8 with a scale for each row of x and of W, which the results are multiplied by: what
// follows counts in bytes, so that both are the same to it. The chip keeps some 14 bits of its sums of 8-bit numbers.
//
// A row's result depends neither on the rows beside it nor on timing.
#pragma once

#include "raylm/cuda/gated.cuh"
#include "raylm/cuda/pipeline/ring.cuh"
#include "raylm/cuda/ptx/cluster.cuh"
#include "raylm/cuda/ptx/copy.cuh"
#include "raylm/cuda/ptx/grid.cuh"
#include "raylm/cuda/ptx/tensor_copy.cuh"
#include "raylm/cuda/ptx/warps.cuh"
#include "raylm/cuda/ptx/wgmma.cuh"
#include "raylm/cuda/tile/fragments.cuh"
#include "raylm/cuda/tile/numbers.cuh"

namespace raylm::cuda {

struct TileParams {
  CUtensorMap x;       // [rows, k], boxes of tile_rows rows: the copy engine takes longer for what lies outside of a tensor
  CUtensorMap weight;  // [n, k], boxes of tile_box rows
  const void* bias;    // of results' type, or null
  void* out;           // [rows, columns]
  const float *x_scales, *scales;  // of rows of x and of W, where numbers have them
  int rows, columns;
  int tile_rows;           // of x, at most Rows
  int row_tiles, tiles;    // below each other; in all
  int steps, slice_steps;  // stages of k: in all, and those of a slice at most; each slice has some
  int stages;              // that the block's shared memory has room for
  bool early;              // W is read while the kernel ahead may still run; x never is
};

constexpr int kMostTileStages = 12;

template <int Rows_, int Width_, int Split_>
struct TileShape {
  static constexpr int kRows = Rows_, kWidth = Width_, kSplit = Split_;
  static constexpr int kGroups = kRows <= 64 ? 1 : 2;  // of four warps that multiply
  // The groups share the rows, or, of 192, the columns.
  static constexpr int kAcross = kRows == 192 ? 2 : 1;  // groups beside each other
  static constexpr int kTall = (kRows + 63) / 64 * kAcross / kGroups;  // products of 64 rows below each other, of a group
  static constexpr int kGroupWidth = kWidth / kAcross;
  static constexpr int kSums = kGroupWidth / 2;  // of a thread, each of these
  static constexpr int kBoxes = kRows <= 64 ? 2 : 1;  // of 128 bytes of a row, in a stage
  static constexpr int kDepth = 128 * kBoxes;         // bytes of a row in a stage
  static constexpr int kXBytes = kRows * 128, kWeightBytes = kWidth * 128;  // of a box
  static constexpr int kStageBytes = kBoxes * (kXBytes + kWeightBytes);
  // Many sums need more registers than there are for all alike: a third group, of which one thread fetches, gives its own.
  static constexpr bool kMovesRegisters = kTall * kSums > 128;
  static constexpr int kThreads = 128 * kGroups + (kMovesRegisters ? 128 : kWarp);
  static constexpr int kFetchRegisters = 40, kComputeRegisters = 232;
  static constexpr int kPitch = kWidth + 4;  // of sums that meet
  static constexpr int kMeetingBytes = kSplit > 1 ? kRows * kPitch * 4 : 0;
  static constexpr int kBlocks = kRows <= 64 ? 2 : 1;  // of a multiprocessor, where shared memory has room
  static_assert(kTall * kSums <= 168 && kRows % kSplit == 0 && (kSplit == 1 || kAcross == 1));

  static constexpr int shared_bytes(int stages) {
    const int bytes = stages * kStageBytes;
    return 1024 + (bytes > kMeetingBytes ? bytes : kMeetingBytes);  // 1024: alignment
  }
};

// Rows of a box of W: gate's and up's come apart, those of each group by themselves.
template <typename Shape, bool Gated>
constexpr int tile_box = Gated ? Shape::kGroupWidth / 2 : Shape::kWidth;

struct TileBarriers {
  uint64_t full[kMostTileStages], empty[kMostTileStages];
};

// Of one block: where everything is, and its part of the work.
template <typename N, typename Shape, bool Gated>
struct TileBlock {
  static_assert(!Gated || Shape::kSplit == 1);
  using Stored = typename N::Stored;
  using T = typename N::Result;
  static constexpr int kBox = 128 / sizeof(Stored);  // numbers of a row in a box
  using Sums = float[Shape::kTall][Shape::kSums];
  static constexpr int kHalves = Gated ? 2 : 1;
  static constexpr int kColumns = Shape::kWidth / kHalves, kGroupColumns = Shape::kGroupWidth / kHalves;  // of the result
  static constexpr int kBoxRows = tile_box<Shape, Gated>;
  const TileParams& params;
  const uint32_t memory, full, empty;
  const GateAct act;
  const int slice = Shape::kSplit > 1 ? cluster_rank() : 0;
  const int from = min(slice * params.slice_steps, params.steps);
  const int steps = min(params.slice_steps, params.steps - from);

  __device__ TileBlock(const TileParams& p, const unsigned char* dynamic, TileBarriers& barriers, GateAct a)
      : params(p), memory((shared_address(dynamic) + 1023) / 1024 * 1024), full(shared_address(barriers.full)),
        empty(shared_address(barriers.empty)), act(a) {}

  // Tiles in their order: the rows below each other first, which share W.
  __device__ int first() const { return blockIdx.x / Shape::kSplit; }
  __device__ int stride() const { return gridDim.x / Shape::kSplit; }
  __device__ int row(int tile) const { return tile % params.row_tiles * params.tile_rows; }
  __device__ int end(int tile) const { return min(row(tile) + params.tile_rows, params.rows); }
  __device__ int column(int tile) const { return tile / params.row_tiles * kColumns; }

  __device__ uint32_t stage(int i) const { return memory + i * Shape::kStageBytes; }
  __device__ uint32_t weights(int i) const { return stage(i) + Shape::kBoxes * Shape::kXBytes; }

  // A stage is full with the bytes it is to get, and empty when each warp that computes has read it.
  __device__ void init_barriers() const {
    for (int i = 0; i < params.stages; ++i) {
      barrier_init(full + 8 * i, 1);
      barrier_init(empty + 8 * i, 4 * Shape::kGroups);
    }
    barrier_init_done();
  }

  __device__ void load_weights(int tile, int step, int i) const {
    const uint64_t policy = params.row_tiles == 1 ? evict_first_policy() : evict_normal_policy();
    barrier_arrive_expecting(full + 8 * i, Shape::kBoxes * (params.tile_rows * 128 + Shape::kWeightBytes));
#pragma unroll
    for (int box = 0; box < Shape::kBoxes; ++box) {
      const uint32_t to = weights(i) + box * Shape::kWeightBytes;
      const int k = ((from + step) * Shape::kBoxes + box) * kBox;
#pragma unroll
      for (int part = 0; part < Shape::kWidth / kBoxRows; ++part) {
        const int from_up = Gated ? part % 2 * params.columns : 0;
        load_box_once(to + part * kBoxRows * 128, params.weight, full + 8 * i,
                      {k, from_up + column(tile) + part / kHalves * kBoxRows}, policy);
      }
    }
  }

  __device__ void load_x(int tile, int step, int i) const {
#pragma unroll
    for (int box = 0; box < Shape::kBoxes; ++box) {
      const int k = ((from + step) * Shape::kBoxes + box) * kBox;
      load_box(stage(i) + box * Shape::kXBytes, params.x, full + 8 * i, {k, row(tile)});
    }
  }

  __device__ int ahead() const { return min(steps, params.stages); }

  // The one thread that fetches. It asks for the first stages of W before anything else.
  __device__ void begin() const {
    init_barriers();
    if (!params.early) wait_for_dependencies();
    for (int step = 0; step < ahead(); ++step) load_weights(first(), step, step);
  }

  __device__ void fetch() const {
    wait_for_dependencies();
    SizedRing ring{params.stages};
    for (int tile = first(); tile < params.tiles; tile += stride()) {
      for (int step = 0; step < steps; ++step, ring.advance()) {
        if (tile != first() || step >= ahead()) {
          barrier_wait(empty + 8 * ring.stage, ring.parity ^ 1);
          load_weights(tile, step, ring.stage);
        }
        load_x(tile, step, ring.stage);
      }
    }
  }

  __device__ void release(int i) const {
    if (threadIdx.x % kWarp == 0) barrier_arrive(empty + 8 * i);
  }

  __device__ __forceinline__ void multiply(Sums& sums, int i, int group, bool first) const {
    wgmma_fence();
#pragma unroll
    for (int d = 0; d < Shape::kDepth / 32; ++d) {
      const int box = d / 4, inside = d % 4 * 2;
      const uint32_t of_group = group % Shape::kAcross * Shape::kGroupWidth * 128;
      const uint64_t w = matrix_descriptor(weights(i) + box * Shape::kWeightBytes + of_group, 1024, 0) + inside;
#pragma unroll
      for (int t = 0; t < Shape::kTall; ++t) {
        const uint32_t x = stage(i) + box * Shape::kXBytes + (group / Shape::kAcross * Shape::kTall + t) * 64 * 128;
        const uint64_t rows = matrix_descriptor(x, 1024, 0) + inside;
        multiply_transposed<Stored, Shape::kGroupWidth>(sums[t], rows, w, d != 0 || !first);
      }
    }
    wgmma_commit();
  }

  __device__ __forceinline__ void sum_tile(Sums& sums, int group, SizedRing& ring) const {
    int last = ring.stage;
    for (int step = 0; step < steps; ++step) {
      barrier_wait(full + 8 * ring.stage, ring.parity);
      multiply(sums, ring.stage, group, step == 0);
      wgmma_wait<1>();  // for the step before
      if (step > 0) release(last);
      last = ring.stage;
      ring.advance();
    }
    wgmma_wait<0>();
    release(last);
#pragma unroll
    for (int t = 0; t < Shape::kTall; ++t) settle(sums[t]);
  }

  __device__ float bias_at(int column) const {
    return params.bias ? to_float(static_cast<const T*>(params.bias)[column]) : 0.0f;
  }

  // A sum times what its rows of x and of W have as scales, where numbers have them. Columns: rows of W.
  __device__ float x_scale(int row) const {
    if constexpr (N::kScaled) return row < params.rows ? params.x_scales[row] : 0.0f;
    return 1.0f;
  }
  __device__ float scaled(float sum, float x_scale, int column) const {
    constexpr int kParts = Gated ? 2 : 1;
    if constexpr (N::kScaled) return column < kParts * params.columns ? sum * x_scale * params.scales[column] : 0.0f;
    return sum;
  }

  // What number j of 8 columns beside each other makes of row lane / 4 (half 0) or that row + 8: two neighbours.
  __device__ __forceinline__ uint32_t result(const float (&sums)[Shape::kSums], int j, int half, float x_scale,
                                             int column) const {
    const float* s = sums + 4 * j + 2 * half;
    if constexpr (Gated) {
      const float* up = s + Shape::kSums / 2;
      const int of_up = params.columns + column;
      return pack<T>(gated(act, scaled(s[0], x_scale, column), scaled(up[0], x_scale, of_up)),
                     gated(act, scaled(s[1], x_scale, column + 1), scaled(up[1], x_scale, of_up + 1)));
    } else {
      const bool biased = params.bias && column < params.columns;
      return pack<T>(scaled(s[0], x_scale, column) + (biased ? bias_at(column) : 0),
                     scaled(s[1], x_scale, column + 1) + (biased ? bias_at(column + 1) : 0));
    }
  }

  __device__ T* at(int row, int column) const {
    return static_cast<T*>(params.out) + static_cast<int64_t>(row) * params.columns + column;
  }

  // Of each 8 columns a thread has two neighbours of row lane / 4 of its warp's 16, and the same two of row lane / 4 + 8.
  // Four lanes of a row exchange theirs, so that each stores 8 columns.
  __device__ __forceinline__ void write_rows(const float (&sums)[Shape::kSums], int half, int row, int end,
                                             int column) const {
    const int lane = threadIdx.x % 4;
    constexpr int kEights = kGroupColumns / 8, kWhole = kEights / 4 * 4;
    const float of_row = x_scale(row);
#pragma unroll
    for (int j = 0; j < kWhole; j += 4) {
      uint32_t packed[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) packed[i] = result(sums, j + i, half, of_row, column + 8 * (j + i) + 2 * lane);
      transpose4(packed);
      const int first = column + 8 * (j + lane);
      if (row >= end || first >= params.columns) continue;
      *reinterpret_cast<uint4*>(at(row, first)) = make_uint4(packed[0], packed[1], packed[2], packed[3]);
    }
#pragma unroll
    for (int j = kWhole; j < kEights; ++j) {
      const int first = column + 8 * j + 2 * lane;
      const uint32_t pair = result(sums, j, half, of_row, first);
      if (row < end && first < params.columns) *reinterpret_cast<uint32_t*>(at(row, first)) = pair;
    }
  }

  __device__ __forceinline__ void write_tile(const Sums& sums, int group, int tile) const {
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x % 128 / kWarp;
    const int first_column = column(tile) + group % Shape::kAcross * kGroupColumns;
#pragma unroll
    for (int t = 0; t < Shape::kTall; ++t) {
      const int first = row(tile) + (group / Shape::kAcross * Shape::kTall + t) * 64 + warp * 16 + lane / 4;
      write_rows(sums[t], 0, first, end(tile), first_column);
      write_rows(sums[t], 1, first + 8, end(tile), first_column);
    }
  }

  // This block's sums go to shared memory, in the place of stages, as [row of x][row of W].
  __device__ __forceinline__ void leave(const Sums& sums, int group) const {
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x % 128 / kWarp;
#pragma unroll
    for (int t = 0; t < Shape::kTall; ++t) {
      const int row0 = (group * Shape::kTall + t) * 64 + warp * 16 + lane / 4;
      const uint32_t to = memory + (row0 * Shape::kPitch + lane % 4 * 2) * 4;
#pragma unroll
      for (int i = 0; i < Shape::kSums; ++i) {
        if (Shape::kRows < 64 && row0 + i / 2 % 2 * 8 >= Shape::kRows) continue;
        store_shared(to + (i / 2 % 2 * 8 * Shape::kPitch + i / 4 * 8 + i % 2) * 4, sums[t][i]);
      }
    }
  }

  __device__ float4 sum_of_slices(int row, int column) const {
    const uint32_t from = memory + (row * Shape::kPitch + column) * 4;
    float4 parts[Shape::kSplit];
#pragma unroll
    for (int s = 0; s < Shape::kSplit; ++s) parts[s] = load_shared_at(from, s);
#pragma unroll
    for (int s = 1; s < Shape::kSplit; ++s) {
      parts[0].x += parts[s].x, parts[0].y += parts[s].y, parts[0].z += parts[s].z, parts[0].w += parts[s].w;
    }
    return parts[0];
  }

  // Adds all slices' sums of this block's part of the rows, and writes them.
  __device__ void add(int tile) const {
    constexpr int kPart = Shape::kRows / Shape::kSplit, kQuads = Shape::kWidth / 4;
    for (int i = threadIdx.x; i < kPart * kQuads; i += 128 * Shape::kGroups) {
      const int inside = slice * kPart + i / kQuads, quad = i % kQuads * 4;
      const int first = column(tile) + quad;
      if (row(tile) + inside >= end(tile) || first >= params.columns) continue;  // what is read must have a use
      float4 sum = sum_of_slices(inside, quad);
      const float of_row = x_scale(row(tile) + inside);
      sum.x = scaled(sum.x, of_row, first), sum.y = scaled(sum.y, of_row, first + 1);
      sum.z = scaled(sum.z, of_row, first + 2), sum.w = scaled(sum.w, of_row, first + 3);
      if (params.bias) {
        sum.x += bias_at(first), sum.y += bias_at(first + 1);
        sum.z += bias_at(first + 2), sum.w += bias_at(first + 3);
      }
      *reinterpret_cast<uint2*>(at(row(tile) + inside, first)) = make_uint2(pack<T>(sum.x, sum.y), pack<T>(sum.z, sum.w));
    }
  }

  // A group of four warps, tile after tile.
  __device__ __forceinline__ void compute(int group) const {
    SizedRing ring{params.stages};
    for (int tile = first(); tile < params.tiles; tile += stride()) {
      Sums sums;
      sum_tile(sums, group, ring);
      if constexpr (Shape::kSplit == 1) {
        write_tile(sums, group, tile);
      } else {
        sync_some(1, 128 * Shape::kGroups);  // the other group reads the stages still
        leave(sums, group);
      }
    }
  }
};

template <typename N, typename Shape, bool Gated>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocks)
    tile_linear_kernel(const __grid_constant__ TileParams params, GateAct act) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ unsigned char dynamic[];
  __shared__ TileBarriers barriers;
  start_dependents();
  const TileBlock<N, Shape, Gated> block(params, dynamic, barriers, act);
  const int group = __shfl_sync(kAllLanes, threadIdx.x / 128, 0);  // in a register that the warp shares
  const bool fetches = threadIdx.x == 128 * Shape::kGroups;
  if (fetches) block.begin();
  __syncthreads();
  if (group < Shape::kGroups) {
    if constexpr (Shape::kMovesRegisters) take_registers<Shape::kComputeRegisters>();
    wait_for_dependencies();
    block.compute(group);
  } else {
    if constexpr (Shape::kMovesRegisters) give_registers_back<Shape::kFetchRegisters>();
    if (fetches) block.fetch();
  }
  if constexpr (Shape::kSplit > 1) {
    __syncwarp();
    cluster_sync();
    if (group < Shape::kGroups) block.add(block.first());
    __syncwarp();  // a block stays until the others have read its sums
    cluster_meet();
  }
#endif
}

}  // namespace raylm::cuda
