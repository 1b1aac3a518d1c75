// Products of rows with the weights of their experts, for Hopper: out = x W[expert]^T (+ bias), or its gated activation.
//
// Rows lie in the order of their experts, and which rows are whose stands in a list of segments, on the device alone. A
// block takes tiles of `Width` rows of W for one segment. One of its threads fetches and runs ahead, also into the next
// tile; one or two groups of four warps multiply by wgmma, with W as its A operand, whose height is fixed, and x as its B
// operand, whose width follows the segment: so few rows cost few instructions. Of a gated product, W's rows come to shared
// memory as 8 of gate, the same 8 of up, and so on, one box of the copy engine: a thread then has the gate of a column and
// its up side by side.
//
// k is summed in one piece, in its order: a row's result depends neither on the rows beside it nor on timing.
#pragma once

#include "raylm/cuda/expert_rows.cuh"
#include "raylm/cuda/gated.cuh"
#include "raylm/cuda/pipeline/ring.cuh"
#include "raylm/cuda/ptx/barrier.cuh"
#include "raylm/cuda/ptx/copy.cuh"
#include "raylm/cuda/ptx/grid.cuh"
#include "raylm/cuda/ptx/matrix.cuh"
#include "raylm/cuda/ptx/tensor_copy.cuh"
#include "raylm/cuda/ptx/wgmma.cuh"
#include "raylm/cuda/tile/fragments.cuh"

namespace raylm::cuda {

enum class ExpertAct { kSilu, kGeluTanh, kClampedSwiglu, kNone };  // in the order of raylm/ops/experts.py

struct GroupedParams {
  CUtensorMap x;       // [rows, k], boxes of GroupedShape::kBoxRows
  CUtensorMap weight;  // [experts, eights, halves, 8, k], boxes of Width rows
  Segments segments;
  const void* bias;  // of T, [experts, halves * columns], or null
  void* out;         // of T, [rows, columns]
  int columns;       // of the result, a multiple of 8
  int column_tiles;
  int steps, stages;
  ExpertAct act;
  float limit;  // of kClampedSwiglu
};

constexpr int kMostGroupedStages = 12;

template <int Width_, int Rows_, int Groups_>
struct GroupedShape {
  static constexpr int kWidth = Width_, kRows = Rows_;  // of W; of a segment, at most
  static constexpr int kGroups = Groups_;  // of four warps that multiply
  static constexpr int kTall = kWidth / 64 / kGroups;  // products of 64 rows of W below each other, of a group
  static constexpr int kDepth = 64;
  static constexpr int kRowBytes = kDepth * 2;
  static constexpr int kBoxRows = kRows < 128 ? 8 : 64;  // of x, fetched at a time
  static constexpr int kWeightBytes = kWidth * kRowBytes, kXBytes = kRows * kRowBytes;
  static constexpr int kStageBytes = kWeightBytes + kXBytes;
  static constexpr int kThreads = 128 * kGroups + kWarp;
  static constexpr int kBlocks = kGroups == 1 ? 2 : 1;  // of a multiprocessor
  static constexpr int kLeast = kRows < 32 ? 8 : kRows / 4;  // rows that are multiplied
  static constexpr int shared_bytes(int stages) { return stages * kStageBytes + 1024; }  // 1024: alignment
};

struct GroupedBarriers {
  uint64_t full[kMostGroupedStages], empty[kMostGroupedStages];
};

// GPT-OSS's.
__device__ inline float clamped_swiglu(float gate, float up, float limit) {
  gate = fminf(gate, limit);
  return gate * reciprocal_approx(1.0f + exp2_approx(-1.702f * kLog2E * gate)) * (fminf(fmaxf(up, -limit), limit) + 1);
}

template <typename T, typename Shape, bool Gated>
struct GroupedBlock {
  static constexpr int kHalves = Gated ? 2 : 1;
  static constexpr int kColumns = Shape::kWidth / kHalves;  // of the result, in a tile
  const GroupedParams& params;
  const uint32_t memory, full, empty;

  __device__ GroupedBlock(const GroupedParams& p, const unsigned char* dynamic, GroupedBarriers& barriers)
      : params(p), memory((shared_address(dynamic) + 1023) / 1024 * 1024), full(shared_address(barriers.full)),
        empty(shared_address(barriers.empty)) {}

  __device__ uint32_t weights(int stage) const { return memory + stage * Shape::kStageBytes; }
  __device__ uint32_t x(int stage) const { return weights(stage) + Shape::kWeightBytes; }
  __device__ int tiles() const { return params.segments.count() * params.column_tiles; }
  __device__ Segment segment(int tile) const { return params.segments.at(tile / params.column_tiles); }
  __device__ int column(int tile) const { return tile % params.column_tiles * kColumns; }

  __device__ void init_barriers() const {
    for (int i = 0; i < params.stages; ++i) {
      barrier_init(full + 8 * i, 1);
      barrier_init(empty + 8 * i, 4 * Shape::kGroups);
    }
    barrier_init_done();
  }

  // The one thread that fetches.
  __device__ void fetch() const {
    // Where an expert has many rows, its weights are read again for the next of them.
    const uint64_t policy = Shape::kRows < 128 ? evict_first_policy() : evict_normal_policy();
    SizedRing ring{params.stages};
    for (int tile = blockIdx.x, end = tiles(); tile < end; tile += gridDim.x) {
      const Segment own = segment(tile);
      const int boxes = (own.rows + Shape::kBoxRows - 1) / Shape::kBoxRows;
      for (int step = 0; step < params.steps; ++step, ring.advance()) {
        const uint32_t barrier = full + 8 * ring.stage;
        const int k = step * Shape::kDepth;
        barrier_wait(empty + 8 * ring.stage, ring.parity ^ 1);
        barrier_arrive_expecting(barrier, Shape::kWeightBytes + boxes * Shape::kBoxRows * Shape::kRowBytes);
        load_box_once(weights(ring.stage), params.weight, barrier, {k, 0, 0, column(tile) / 8, own.expert}, policy);
        for (int i = 0; i < boxes; ++i) {
          const int row = i * Shape::kBoxRows;
          load_box(x(ring.stage) + row * Shape::kRowBytes, params.x, barrier, {k, own.source + row});
        }
      }
    }
  }

  __device__ void release(int stage) const {
    if (threadIdx.x % kWarp == 0) barrier_arrive(empty + 8 * stage);
  }

  template <int N>
  __device__ __forceinline__ void multiply(float (&sums)[Shape::kTall][N / 2], int stage, int group, bool first) const {
    wgmma_fence();
#pragma unroll
    for (int d = 0; d < Shape::kDepth / 16; ++d) {
      const uint64_t right = matrix_descriptor(x(stage), 1024, 0) + 2 * d;
#pragma unroll
      for (int t = 0; t < Shape::kTall; ++t) {
        const uint32_t rows = weights(stage) + (group * Shape::kTall + t) * 64 * Shape::kRowBytes;
        multiply_transposed<T, N>(sums[t], matrix_descriptor(rows, 1024, 0) + 2 * d, right, d != 0 || !first);
      }
    }
    wgmma_commit();
  }

  // A tile of a segment of at most N rows.
  template <int N>
  __device__ __forceinline__ void run_tile(const Segment& own, int column, int group, SizedRing& ring) const {
    float sums[Shape::kTall][N / 2];
    int last = ring.stage;
    for (int step = 0; step < params.steps; ++step) {
      barrier_wait(full + 8 * ring.stage, ring.parity);
      multiply<N>(sums, ring.stage, group, step == 0);
      wgmma_wait<1>();  // for the step before
      if (step > 0) release(last);
      last = ring.stage;
      ring.advance();
    }
    wgmma_wait<0>();
    release(last);
    const int warp = threadIdx.x % 128 / kWarp;
#pragma unroll
    for (int t = 0; t < Shape::kTall; ++t) {
      settle(sums[t]);
      const int first = column + ((group * Shape::kTall + t) * 4 + warp) * 16 / kHalves;
      const float2 bias = bias_at(own.expert, first);
#pragma unroll
      for (int j = 0; j < N / 8; ++j) write(sums[t] + 4 * j, bias, own, 8 * j, first);
    }
  }

  // Of this thread's two rows of W.
  __device__ __forceinline__ float2 bias_at(int expert, int column) const {
    column += threadIdx.x % kWarp / 4;
    if (!params.bias) return make_float2(0, 0);
    const T* bias = static_cast<const T*>(params.bias) + static_cast<int64_t>(expert) * kHalves * params.columns;
    const auto at = [&](int i, bool valid) { return valid ? to_float(bias[i]) : 0.0f; };
    if constexpr (Gated) {
      const bool valid = column < params.columns;
      return make_float2(at(column, valid), at(params.columns + column, valid));
    } else {
      return make_float2(at(column, column < params.columns), at(column + 8, column + 8 < params.columns));
    }
  }

  __device__ __forceinline__ float gated(float gate, float up) const {
    if (params.act == ExpertAct::kSilu) return Silu{}(gate) * up;
    return params.act == ExpertAct::kGeluTanh ? GeluTanh{}(gate) * up : clamped_swiglu(gate, up, params.limit);
  }

  // A warp's results for 8 rows of the segment. A thread has W's row lane / 4 of 16 and the one 8 below, of two
  // neighbouring rows of x each.
  __device__ __forceinline__ void write(const float* s, float2 bias, const Segment& own, int row, int column) const {
    if (row >= own.rows) return;
    const float low[2] = {s[0] + bias.x, s[1] + bias.x}, high[2] = {s[2] + bias.y, s[3] + bias.y};
    if constexpr (Gated) {
      store(pack<T>(gated(low[0], high[0]), gated(low[1], high[1])), own, row, column);
    } else {
      store(pack<T>(low[0], low[1]), own, row, column);
      store(pack<T>(high[0], high[1]), own, row, column + 8);
    }
  }

  __device__ __forceinline__ void store(uint32_t pair, const Segment& own, int row, int column) const {
    const int lane = threadIdx.x % kWarp;
    const uint32_t neighbours = transpose(pair);
    row += lane / 4;
    if (row >= own.rows || column >= params.columns) return;
    T* to = static_cast<T*>(params.out) + static_cast<int64_t>(own.first + row) * params.columns + column + lane % 4 * 2;
    *reinterpret_cast<uint32_t*>(to) = neighbours;
  }

  // With the least width that holds the segment.
  template <int N>
  __device__ __forceinline__ void run_segment(const Segment& own, int column, int group, SizedRing& ring) const {
    if constexpr (N < Shape::kRows) {
      constexpr int kNext = N < 128 ? 2 * N : N + 64;
      if (own.rows > N) return run_segment<kNext>(own, column, group, ring);
    }
    run_tile<N>(own, column, group, ring);
  }

  __device__ __forceinline__ void compute(int group) const {
    SizedRing ring{params.stages};
    for (int tile = blockIdx.x, end = tiles(); tile < end; tile += gridDim.x) {
      run_segment<Shape::kLeast>(segment(tile), column(tile), group, ring);
    }
  }
};

template <typename T, typename Shape, bool Gated>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocks)
    grouped_linear_kernel(const __grid_constant__ GroupedParams params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ unsigned char dynamic[];
  __shared__ GroupedBarriers barriers;
  start_dependents();
  const GroupedBlock<T, Shape, Gated> block(params, dynamic, barriers);
  const int group = __shfl_sync(kAllLanes, threadIdx.x / 128, 0);  // in a register that the warp shares
  const bool fetches = threadIdx.x == 128 * Shape::kGroups;
  if (fetches) {
    prefetch_map(params.x);
    prefetch_map(params.weight);
    block.init_barriers();
  }
  __syncthreads();
  wait_for_dependencies();
  if (group < Shape::kGroups) {
    block.compute(group);
  } else if (fetches) {
    block.fetch();
  }
#endif
}

}  // namespace raylm::cuda
