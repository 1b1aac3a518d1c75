// Products of rows with the weights of their experts, for Hopper: out = x W[expert]^T, or its gated activation, where an
// expert has few rows. Bound by the reading of W.
//
// Rows lie in the order of their experts, and which rows are whose stands in a list of segments, on the device alone. A
// block takes tiles of `Width` rows of W for one segment. One of its threads fetches and runs ahead, also into the next
// tile; four warps multiply by wgmma, with W as its A operand, whose height is fixed, and x as its B operand, whose width
// follows the segment: so few rows cost few instructions. Of a gated product, W's rows come to shared memory as 8 of gate,
// the same 8 of up, and so on, one box of the copy engine: a thread then has the gate of a column and its up side by side.
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

enum class ExpertAct { kNone, kSilu, kGeluTanh };

struct GroupedParams {
  CUtensorMap x;       // [rows, k], boxes of 8 rows
  CUtensorMap weight;  // [experts, eights, halves, 8, k], boxes of Width rows
  const Segment* segments;
  const int* num_segments;
  void* out;         // of T, [rows, columns]
  int columns;       // of the result, a multiple of 8
  int column_tiles;
  int steps, stages;
};

constexpr int kMostGroupedStages = 12;

template <int Width_, int Rows_>
struct GroupedShape {
  static constexpr int kWidth = Width_, kRows = Rows_;  // of W; of a segment, at most
  static constexpr int kTall = kWidth / 64;  // products of 64 rows of W below each other
  static constexpr int kDepth = 64;
  static constexpr int kEightBytes = 8 * kDepth * 2;  // of 8 rows
  static constexpr int kWeightBytes = kWidth / 8 * kEightBytes, kXBytes = kRows / 8 * kEightBytes;
  static constexpr int kStageBytes = kWeightBytes + kXBytes;
  static constexpr int kThreads = 128 + kWarp;
  static constexpr int kBlocks = 2;  // of a multiprocessor
  static constexpr int shared_bytes(int stages) { return stages * kStageBytes + 1024; }  // 1024: alignment
};

struct GroupedBarriers {
  uint64_t full[kMostGroupedStages], empty[kMostGroupedStages];
};

template <typename T, typename Shape, bool Gated>
struct GroupedBlock {
  static constexpr int kColumns = Gated ? Shape::kWidth / 2 : Shape::kWidth;  // of the result, in a tile
  const GroupedParams& params;
  const uint32_t memory, full, empty;
  const ExpertAct act;

  __device__ GroupedBlock(const GroupedParams& p, const unsigned char* dynamic, GroupedBarriers& barriers, ExpertAct a)
      : params(p), memory((shared_address(dynamic) + 1023) / 1024 * 1024), full(shared_address(barriers.full)),
        empty(shared_address(barriers.empty)), act(a) {}

  __device__ uint32_t weights(int stage) const { return memory + stage * Shape::kStageBytes; }
  __device__ uint32_t x(int stage) const { return weights(stage) + Shape::kWeightBytes; }
  __device__ int tiles() const { return *params.num_segments * params.column_tiles; }
  __device__ Segment segment(int tile) const { return params.segments[tile / params.column_tiles]; }
  __device__ int column(int tile) const { return tile % params.column_tiles * kColumns; }

  __device__ void init_barriers() const {
    for (int i = 0; i < params.stages; ++i) {
      barrier_init(full + 8 * i, 1);
      barrier_init(empty + 8 * i, 4);
    }
    barrier_init_done();
  }

  // The one thread that fetches.
  __device__ void fetch() const {
    const uint64_t policy = evict_first_policy();
    SizedRing ring{params.stages};
    for (int tile = blockIdx.x, end = tiles(); tile < end; tile += gridDim.x) {
      const Segment own = segment(tile);
      const int eights = (own.rows + 7) / 8;
      for (int step = 0; step < params.steps; ++step, ring.advance()) {
        const uint32_t barrier = full + 8 * ring.stage;
        const int k = step * Shape::kDepth;
        barrier_wait(empty + 8 * ring.stage, ring.parity ^ 1);
        barrier_arrive_expecting(barrier, Shape::kWeightBytes + eights * Shape::kEightBytes);
        load_box_once(weights(ring.stage), params.weight, barrier, {k, 0, 0, column(tile) / 8, own.expert}, policy);
        for (int i = 0; i < eights; ++i) {
          load_box(x(ring.stage) + i * Shape::kEightBytes, params.x, barrier, {k, own.first + 8 * i});
        }
      }
    }
  }

  __device__ void release(int stage) const {
    if (threadIdx.x % kWarp == 0) barrier_arrive(empty + 8 * stage);
  }

  template <int N>
  __device__ __forceinline__ void multiply(float (&sums)[Shape::kTall][N / 2], int stage, bool first) const {
    wgmma_fence();
#pragma unroll
    for (int d = 0; d < Shape::kDepth / 16; ++d) {
      const uint64_t right = matrix_descriptor(x(stage), 1024, 0) + 2 * d;
#pragma unroll
      for (int t = 0; t < Shape::kTall; ++t) {
        const uint64_t left = matrix_descriptor(weights(stage) + t * 64 * 128, 1024, 0) + 2 * d;
        multiply_transposed<T, N>(sums[t], left, right, d != 0 || !first);
      }
    }
    wgmma_commit();
  }

  // A tile of a segment of at most N rows.
  template <int N>
  __device__ __forceinline__ void run_tile(const Segment& own, int column, SizedRing& ring) const {
    float sums[Shape::kTall][N / 2];
    int last = ring.stage;
    for (int step = 0; step < params.steps; ++step) {
      barrier_wait(full + 8 * ring.stage, ring.parity);
      multiply<N>(sums, ring.stage, step == 0);
      wgmma_wait<1>();  // for the step before
      if (step > 0) release(last);
      last = ring.stage;
      ring.advance();
    }
    wgmma_wait<0>();
    release(last);
#pragma unroll
    for (int t = 0; t < Shape::kTall; ++t) {
      settle(sums[t]);
#pragma unroll
      for (int j = 0; j < N / 8; ++j) write(sums[t] + 4 * j, own, 8 * j, column + (t * 4 + threadIdx.x / kWarp) * kColumns / (4 * Shape::kTall));
    }
  }

  __device__ __forceinline__ float gated(float gate, float up) const {
    return (act == ExpertAct::kSilu ? Silu{}(gate) : GeluTanh{}(gate)) * up;
  }

  // A warp's results for 8 rows of the segment. A thread has W's row lane / 4 of 16 and the one 8 below, of two
  // neighbouring rows of x each.
  __device__ __forceinline__ void write(const float* s, const Segment& own, int row, int column) const {
    if constexpr (Gated) {
      store(pack<T>(gated(s[0], s[2]), gated(s[1], s[3])), own, row, column);
    } else {
      store(pack<T>(s[0], s[1]), own, row, column);
      store(pack<T>(s[2], s[3]), own, row, column + 8);
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

  __device__ __forceinline__ void compute() const {
    SizedRing ring{params.stages};
    for (int tile = blockIdx.x, end = tiles(); tile < end; tile += gridDim.x) {
      const Segment own = segment(tile);
      if (own.rows <= 8) {
        run_tile<8>(own, column(tile), ring);
      } else if (Shape::kRows <= 16 || own.rows <= 16) {
        if constexpr (Shape::kRows >= 16) run_tile<16>(own, column(tile), ring);
      } else if (Shape::kRows <= 32 || own.rows <= 32) {
        if constexpr (Shape::kRows >= 32) run_tile<32>(own, column(tile), ring);
      } else {
        if constexpr (Shape::kRows >= 64) run_tile<64>(own, column(tile), ring);
      }
    }
  }
};

template <typename T, typename Shape, bool Gated>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocks)
    grouped_linear_kernel(const __grid_constant__ GroupedParams params, ExpertAct act) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ unsigned char dynamic[];
  __shared__ GroupedBarriers barriers;
  start_dependents();
  const GroupedBlock<T, Shape, Gated> block(params, dynamic, barriers, act);
  const int group = __shfl_sync(kAllLanes, threadIdx.x / 128, 0);  // in a register that the warp shares
  if (threadIdx.x == 128) {
    prefetch_map(params.x);
    prefetch_map(params.weight);
    block.init_barriers();
  }
  __syncthreads();
  wait_for_dependencies();
  if (group == 0) {
    block.compute();
  } else if (threadIdx.x == 128) {
    block.fetch();
  }
#endif
}

}  // namespace raylm::cuda
