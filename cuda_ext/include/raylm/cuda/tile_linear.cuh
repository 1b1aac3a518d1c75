// y = x W^T (+ bias), or its gated activation, for more than a few rows of x, for Hopper.
//
// A block takes tiles of Rows rows of x by Width rows of W, all of k or a slice of it. One of its threads fetches stages
// and runs ahead, also into the next tile; one or two groups of four warps multiply by wgmma, with x as its A operand and
// W as its B operand, whose width may be any multiple of 8: so tiles are as wide as gives each multiprocessor the same
// share of W, and k is summed in one piece, in its order, wherever that is possible.
//
// Where n is too small for that, the two blocks of a cluster take half of k each, of one tile, of which each writes half:
// it sends its sums of the other half, thread by thread, to the other block's shared memory, and adds what it gets to its
// own.
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
  static constexpr int kBoxes = kRows <= 64 || (kRows == 128 && kWidth <= 64) ? 2 : 1;  // of 128 bytes of a row, in a stage
  static constexpr int kDepth = 128 * kBoxes;         // bytes of a row in a stage
  static constexpr int kXBytes = kRows * 128, kWeightBytes = kWidth * 128;  // of a box
  static constexpr int kStageBytes = kBoxes * (kXBytes + kWeightBytes);
  // Many sums need more registers than there are for all alike: a third group, of which one thread fetches, gives its own.
  static constexpr bool kMovesRegisters = kTall * kSums > 128;
  static constexpr int kThreads = 128 * kGroups + (kMovesRegisters ? 128 : kWarp);
  static constexpr int kFetchRegisters = 40, kComputeRegisters = 232;
  // What a block of a pair keeps of its sums: of products below each other half of them, or of one half of its columns.
  static constexpr bool kKeepsRows = kTall % kSplit == 0;
  static constexpr int kKeptTall = kKeepsRows ? kTall / kSplit : kTall;
  static constexpr int kKeptSums = kKeepsRows ? kSums : kSums / kSplit;
  static constexpr int kSenders = 128 * kGroups * (kRows < 64 ? kRows : 64) / 64;  // threads that have rows
  static constexpr int kReceivedBytes = kSplit > 1 ? kKeptTall * kKeptSums * kSenders * 4 : 0;
  static constexpr int kBlocks = kRows <= 64 ? 2 : 1;  // of a multiprocessor, where shared memory has room
  // Scales and biases of W's rows: of two tiles, each group's own.
  static constexpr int kEpilogueBytes = 2 * kGroups * 2 * kGroupWidth * 4;
  static constexpr int kFixedBytes = 1024 + kReceivedBytes + kEpilogueBytes;  // 1024: alignment
  static_assert(kTall * kSums <= 168 && kGroupWidth <= 128 && kSplit <= 2);
  static_assert(kSplit == 1 || (kAcross == 1 && kKeptSums % 4 == 0 && (kTall == 1 || kKeepsRows)));
};

// Rows of a box of W: gate's and up's come apart, those of each group by themselves.
template <typename Shape, bool Gated>
constexpr int tile_box = Gated ? Shape::kGroupWidth / 2 : Shape::kWidth;

struct TileBarriers {
  uint64_t full[kMostTileStages], empty[kMostTileStages], received;
};

// Of one block: where everything is, and its part of the work.
template <typename N, typename Shape, bool Gated>
struct TileBlock {
  static_assert(!Gated || Shape::kSplit == 1);
  using Stored = typename N::Stored;
  using T = typename N::Result;
  static constexpr int kBox = 128 / sizeof(Stored);  // numbers of a row in a box
  using Sums = float[Shape::kTall][Shape::kSums];
  using Kept = float[Shape::kKeptTall][Shape::kKeptSums];
  static constexpr int kHalves = Gated ? 2 : 1;
  static constexpr int kColumns = Shape::kWidth / kHalves, kGroupColumns = Shape::kGroupWidth / kHalves;  // of the result
  static constexpr int kBoxRows = tile_box<Shape, Gated>;
  static constexpr bool kSharesEpilogue = N::kScaled || !Gated;
  const TileParams& params;
  const uint32_t memory, full, empty, received;
  const GateAct act;
  const int slice = Shape::kSplit > 1 ? cluster_rank() : 0;
  const int from = min(slice * params.slice_steps, params.steps);
  const int steps = min(params.slice_steps, params.steps - from);

  __device__ TileBlock(const TileParams& p, const unsigned char* dynamic, TileBarriers& barriers, GateAct a)
      : params(p), memory((shared_address(dynamic) + 1023) / 1024 * 1024), full(shared_address(barriers.full)),
        empty(shared_address(barriers.empty)), received(shared_address(&barriers.received)), act(a) {}

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
    if constexpr (Shape::kSplit > 1) barrier_init(received, 1);
    barrier_init_done();
    if constexpr (Shape::kSplit > 1) barrier_arrive_expecting(received, Shape::kReceivedBytes);
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

  // What the epilogue reads: for all of its group a thread brings the scale and the bias of one row of W, and for itself the
  // scales of its rows of x. It is fetched before the sums, for a load behind them takes longer than all else there.
  struct Epilogue {
    float scale, bias;
    float x_scales[2 * Shape::kKeptTall];
  };

  __device__ float x_scale(int row) const { return row < params.rows ? params.x_scales[row] : 0.0f; }

  __device__ __forceinline__ Epilogue fetch_epilogue(int group, int tile) const {
    Epilogue inputs{};
    const int thread = threadIdx.x % 128, of_up = thread >= kGroupColumns ? 1 : 0;
    const int column = first_column(group, tile) + thread - of_up * kGroupColumns;
    const bool there = thread < Shape::kGroupWidth && column < params.columns;
    if constexpr (N::kScaled) {
      if (there) inputs.scale = params.scales[of_up * params.columns + column];
#pragma unroll
      for (int i = 0; i < 2 * Shape::kKeptTall; ++i) inputs.x_scales[i] = x_scale(first_row(group, tile, i / 2) + i % 2 * 8);
    }
    if constexpr (!Gated) {
      if (there && params.bias) inputs.bias = to_float(static_cast<const T*>(params.bias)[column]);
    }
    return inputs;
  }

  // Where the other block's sums come to.
  __device__ uint32_t sums_area() const { return memory + params.stages * Shape::kStageBytes; }

  // Of a group, where all its threads find them. Tiles take turns, so that none is written while another thread reads it.
  __device__ uint32_t epilogue_area(int group, int turn) const {
    return sums_area() + Shape::kReceivedBytes + (turn % 2 * Shape::kGroups + group) * 2 * Shape::kGroupWidth * 4;
  }

  __device__ __forceinline__ void share_epilogue(const Epilogue& inputs, uint32_t area) const {
    const int thread = threadIdx.x % 128;
    if (thread >= Shape::kGroupWidth) return;
    if constexpr (N::kScaled) store_shared(area + thread * 4, inputs.scale);
    if constexpr (!Gated) store_shared(area + (Shape::kGroupWidth + thread) * 4, inputs.bias);
  }

  // Of two rows of W beside each other, a tile's or a group's.
  __device__ __forceinline__ float2 scales_of(uint32_t area, int column) const {
    return N::kScaled ? load_shared_pair(area + column * 4) : make_float2(1, 1);
  }
  __device__ __forceinline__ float2 biases_of(uint32_t area, int column) const {
    return Gated ? make_float2(0, 0) : load_shared_pair(area + (Shape::kGroupWidth + column) * 4);
  }

  __device__ static float times(float sum, float of_row, float of_column) {
    return N::kScaled ? sum * of_row * of_column : sum;
  }

  __device__ int first_column(int group, int tile) const {
    return column(tile) + group % Shape::kAcross * kGroupColumns;
  }
  // A thread's of what it keeps: of each 8 columns it has two neighbours of this row, and the same two of the row 8 below.
  __device__ int first_row(int group, int tile, int tall) const {
    const int warp = threadIdx.x % 128 / kWarp, lane = threadIdx.x % kWarp;
    const int first = group / Shape::kAcross * Shape::kTall + (Shape::kKeepsRows ? slice * Shape::kKeptTall : 0);
    return row(tile) + (first + tall) * 64 + warp * 16 + lane / 4;
  }

  __device__ T* at(int row, int column) const {
    return static_cast<T*>(params.out) + static_cast<int64_t>(row) * params.columns + column;
  }

  // Scales and biases of this thread's two rows of W, of the eight that begin at this column of the group's.
  struct Pair {
    float2 scales, of_up, biases;
  };
  __device__ __forceinline__ Pair pair_of(uint32_t area, int column) const {
    const int at = column + threadIdx.x % 4 * 2;
    return {scales_of(area, at), Gated ? scales_of(area, kGroupColumns + at) : float2{}, biases_of(area, at)};
  }
  __device__ __forceinline__ uint32_t result(const float* s, const Pair& pair, float of_row) const {
    const float first = times(s[0], of_row, pair.scales.x), second = times(s[1], of_row, pair.scales.y);
    if constexpr (Gated) {
      const float* up = s + Shape::kSums / 2;
      return pack<T>(gated(act, first, times(up[0], of_row, pair.of_up.x)),
                     gated(act, second, times(up[1], of_row, pair.of_up.y)));
    } else {
      return pack<T>(first + pair.biases.x, second + pair.biases.y);
    }
  }

  // Four lanes of a row exchange their pairs of columns, so that each stores 8 columns; of what is left of a tile's width,
  // each stores its pair.
  template <int Eights>
  __device__ __forceinline__ void write_eights(const Kept& sums, const Epilogue& inputs, uint32_t area, int eight, int group,
                                               int tile) const {
    const int lane = threadIdx.x % 4, of_group = 8 * eight + (Shape::kKeepsRows ? 0 : slice * Shape::kKeptSums * 2);
    Pair pairs[Eights];
#pragma unroll
    for (int i = 0; i < Eights; ++i) pairs[i] = pair_of(area, of_group + 8 * i);
#pragma unroll
    for (int i = 0; i < 2 * Shape::kKeptTall; ++i) {
      const int row = first_row(group, tile, i / 2) + i % 2 * 8;
      uint32_t packed[Eights];
#pragma unroll
      for (int j = 0; j < Eights; ++j) {
        packed[j] = result(sums[i / 2] + 4 * (eight + j) + i % 2 * 2, pairs[j], inputs.x_scales[i]);
      }
      if constexpr (Eights == 4) transpose4(packed);
      const int first = first_column(group, tile) + of_group + (Eights == 4 ? 8 : 2) * lane;
      if (row >= end(tile) || first >= params.columns) continue;
      if constexpr (Eights == 4) {
        *reinterpret_cast<uint4*>(at(row, first)) = make_uint4(packed[0], packed[1], packed[2], packed[3]);
      } else {
        *reinterpret_cast<uint32_t*>(at(row, first)) = packed[0];
      }
    }
  }

  __device__ __forceinline__ void write_tile(const Kept& sums, const Epilogue& inputs, uint32_t area, int group,
                                             int tile) const {
    constexpr int kEights = Shape::kKeptSums / 4 / kHalves, kWhole = kEights / 4 * 4;
#pragma unroll
    for (int j = 0; j < kWhole; j += 4) write_eights<4>(sums, inputs, area, j, group, tile);
#pragma unroll
    for (int j = kWhole; j < kEights; ++j) write_eights<1>(sums, inputs, area, j, group, tile);
  }

  // Number i of what this block keeps, or sends.
  static __device__ __forceinline__ float& part(Sums& sums, int half, int i) {
    const int at = half * Shape::kKeptTall * Shape::kKeptSums + i;
    return sums[at / Shape::kSums][at % Shape::kSums];
  }

  // Sends the other block of the pair its half of the sums, and makes those that it keeps whole.
  __device__ __forceinline__ void exchange(Sums& sums, Kept& kept, int group) const {
    constexpr int kEach = Shape::kKeptTall * Shape::kKeptSums;
    const uint32_t area = sums_area() + (group * (Shape::kSenders / Shape::kGroups) + threadIdx.x % 128) * 16;
    const auto chosen = [&](bool upper, int i) { return upper ? part(sums, 1, i) : part(sums, 0, i); };
    const bool has_rows = threadIdx.x % 128 < Shape::kSenders / Shape::kGroups;
    cluster_wait();  // the other one's barrier is there
    if (!has_rows) return;
#pragma unroll
    for (int i = 0; i < kEach; i += 4) {
      const float4 four = make_float4(chosen(slice == 0, i), chosen(slice == 0, i + 1), chosen(slice == 0, i + 2),
                                      chosen(slice == 0, i + 3));
      store_shared_at(area + i * Shape::kSenders * 4, received, slice ^ 1, four);
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i) kept[i / Shape::kKeptSums][i % Shape::kKeptSums] = chosen(slice == 1, i);
    barrier_wait_acquiring(received, 0);
#pragma unroll
    for (int i = 0; i < kEach; i += 4) {
      const float4 got = load_shared_floats(area + i * Shape::kSenders * 4);
      float* to = kept[i / Shape::kKeptSums] + i % Shape::kKeptSums;
      to[0] += got.x, to[1] += got.y, to[2] += got.z, to[3] += got.w;
    }
  }

  // A group of four warps, tile after tile.
  __device__ __forceinline__ void compute(int group) const {
    SizedRing ring{params.stages};
    for (int tile = first(), turn = 0; tile < params.tiles; tile += stride(), ++turn) {
      const Epilogue inputs = fetch_epilogue(group, tile);
      Sums sums;
      sum_tile(sums, group, ring);
      const uint32_t area = epilogue_area(group, turn);
      share_epilogue(inputs, area);
      if constexpr (kSharesEpilogue) sync_some(1 + group, 128);
      if constexpr (Shape::kSplit == 1) {
        write_tile(sums, inputs, area, group, tile);
      } else {
        Kept kept;
        exchange(sums, kept, group);
        write_tile(kept, inputs, area, group, tile);
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
  if constexpr (Shape::kSplit > 1) cluster_arrive();
  if (group < Shape::kGroups) {
    if constexpr (Shape::kMovesRegisters) take_registers<Shape::kComputeRegisters>();
    wait_for_dependencies();
    block.compute(group);
  } else {
    if constexpr (Shape::kMovesRegisters) give_registers_back<Shape::kFetchRegisters>();
    if (fetches) block.fetch();
    if constexpr (Shape::kSplit > 1) {
      __syncwarp();
      cluster_wait();
    }
  }
#endif
}

}  // namespace raylm::cuda
