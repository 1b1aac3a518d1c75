// Products of rows with the weights of their experts, for Hopper: out = x W[expert]^T (+ bias), or its gated activation.
//
// Rows lie in the order of their experts, and which rows are whose stands in a list of segments, on the device alone. A
// block takes tiles of `Width` rows of W for one segment. Its fetchers (one thread where the copy engine has all the work)
// run ahead, also into the next tile; one to three groups of four warps multiply by wgmma, with W as its A operand, whose
// height is fixed, and x as its B operand, whose width follows the segment: so few rows cost few instructions. Of a gated
// product, W's rows come to shared memory as 8 of gate, the same 8 of up, and so on, one box of the copy engine: a thread
// then has the gate of a column and its up side by side.
//
// A gated product of numbers reads x in the order of the tokens: its fetchers look up the token of each row. Where an expert
// has many rows, two blocks of a cluster take neighbouring columns of a segment instead, and each fetches half of x for both
// by the copy engine, which needs x in the order of the experts (not of x that is rounded: from the L2 cache comes half as
// much).
//
// W may be codes in patches (tile/patches.cuh) instead of numbers of T. These come to shared memory as they are, a copy for
// the patches beside each other of a stage, and become wgmma's A operand in registers. x may be rounded to such codes.
//
// k is summed in one piece, in its order: a row's result depends neither on the rows beside it nor on timing.
#pragma once

#include "raylm/cuda/gated.cuh"
#include "raylm/cuda/pipeline/ring.cuh"
#include "raylm/cuda/ptx/cluster.cuh"
#include "raylm/cuda/ptx/copy.cuh"
#include "raylm/cuda/ptx/grid.cuh"
#include "raylm/cuda/ptx/matrix.cuh"
#include "raylm/cuda/ptx/tensor_copy.cuh"
#include "raylm/cuda/ptx/warps.cuh"
#include "raylm/cuda/ptx/wgmma.cuh"
#include "raylm/cuda/segments.cuh"
#include "raylm/cuda/tile/fragments.cuh"
#include "raylm/cuda/tile/patches.cuh"
#include "raylm/cuda/tile/rounded.cuh"

namespace raylm::cuda {

// x in the order of the tokens, and the token of each row.
struct TokenRows {
  const char* x;      // [tokens, k]
  const int* tokens;  // [rows], in the order of the experts; null: a segment's rows are those of x from its source on
  int stride, width;  // of x's rows, in units of 16 bytes
};

struct GroupedParams {
  CUtensorMap x;       // [rows, k], boxes of 128 bytes of GroupedShape::kBoxRows, or of box_rows
  TokenRows token_rows;  // instead of the map of x where GroupedBlock::kLooksUp
  CUtensorMap weight;  // [experts, eights, halves, 8, k], boxes of Width rows, where it has numbers
  PatchedWeight patched;  // where it has codes
  const float* x_scales;  // of rows that are rounded
  Segments segments;
  const void* bias;  // of T, [experts, halves * columns], or null
  void* out;         // of T, [rows, columns]
  int columns;       // of the result, a multiple of 8
  int column_tiles;  // of a cluster
  int steps, stages, stage_bytes;
  int box_rows;  // of x
  ExpertGate gate;
  bool early;   // the segments are there, and W may be read, while the kernel ahead still runs
};

constexpr int kMostGroupedStages = 12;

template <int Width_, int Rows_, int Groups_, int Cluster_ = Groups_>
struct GroupedShape {
  static constexpr int kWidth = Width_, kRows = Rows_;  // of W; of a segment, at most
  static constexpr int kGroups = Groups_;  // of four warps that multiply
  static constexpr int kCluster = Cluster_;  // blocks that share x
  static constexpr int kTall = kWidth / 64 / kGroups;  // products of 64 rows of W below each other, of a group
  static constexpr int kDepth = 64;
  static constexpr int kRowBytes = kDepth * 2;
  static constexpr int kBoxRows = kRows < 128 ? 8 : 64;  // of x, fetched at a time
  static constexpr int kWeightBytes = kWidth * kRowBytes, kXBytes = kRows * kRowBytes;
  static constexpr int kStageBytes = kWeightBytes + kXBytes;
  static constexpr int kBlocks = kCluster == 1 && kRows < 128 ? 2 : 1;  // of a multiprocessor
  // Groups with many rows need more registers than there are for all alike: one more, which fetches, gives its own.
  static constexpr bool kMovesRegisters = kBlocks == 1;
  static constexpr int kFetchers = kMovesRegisters ? 128 : kWarp, kThreads = 128 * kGroups + kFetchers;
  static constexpr int kFetchRegisters = 40, kComputeRegisters = kGroups < 3 ? 232 : 152;
  static constexpr int kLeast = kRows < 32 ? 8 : kRows / 4;  // rows that are multiplied
  // The next larger number of rows that products exist for.
  __host__ __device__ static constexpr int wider(int rows) {
    return rows < 64 ? 2 * rows : rows < 128 ? rows + 32 : rows + 16;
  }
  // Results of many rows are written by GroupedBlock::write_tile; for that each group has two parts of such a size.
  static constexpr bool kWideStores = kRows >= 128;
  static constexpr int kPartBytes = 32 * 80, kResultBytes = kWideStores ? 2 * kGroups * kPartBytes : 0;
  static constexpr int kAlignment = 1024;
  static constexpr int shared_bytes(int stages) { return stages * kStageBytes + kResultBytes + kAlignment; }
};

// For codes: a stage has `Chunks` patches beside each other. `Boxes`: of x, 128 bytes a row, for the columns of a patch; there
// is one where x is rounded.
template <int Width, int Rows, int Groups, int Chunks, int Cluster = Groups, int Boxes = 2>
struct PatchedShape : GroupedShape<Width, Rows, Groups, Cluster> {
  using Base = GroupedShape<Width, Rows, Groups, Cluster>;
  static constexpr int kChunks = Chunks, kPatches = Width / 16;  // of a stage, below each other
  static constexpr int kBoxes = Boxes, kBoxColumns = 128 / Boxes;
  static constexpr int kLeast = Rows < 128 ? 8 : 32;
  __host__ __device__ static constexpr int wider(int rows) { return 2 * rows; }
  // From a box's columns of x to the next.
  __host__ __device__ static constexpr int x_pitch(int box_rows) {
    return (Rows < 128 ? box_rows : Rows) * Base::kRowBytes;
  }
  __host__ __device__ static constexpr int x_bytes(int box_rows) { return Boxes * Chunks * x_pitch(box_rows); }
  static constexpr int stage_bytes(int box_rows, int patch_bytes) {
    const int codes = kPatches * Chunks * patch_bytes;
    return x_bytes(box_rows) + (codes + Base::kAlignment - 1) / Base::kAlignment * Base::kAlignment;
  }
};

struct GroupedBarriers {
  uint64_t full[kMostGroupedStages], empty[kMostGroupedStages];
};

template <typename T, typename Shape, bool Gated, typename Form>
struct GroupedBlock {
  static constexpr int kHalves = Gated ? 2 : 1;
  static constexpr int kColumns = Shape::kWidth / kHalves;  // of the result, in a tile
  static constexpr int kMatrices = 2 / kHalves;  // 8 x 8 matrices of results that 16 rows of W make with 8 of x
  static constexpr bool kLooksUp = Gated && !Form::kCodes && Shape::kCluster == 1;  // x is params.token_rows
  const GroupedParams& params;
  const uint32_t memory, full, empty;
  const int rank = Shape::kCluster > 1 ? cluster_rank() : 0;

  __device__ GroupedBlock(const GroupedParams& p, const unsigned char* dynamic, GroupedBarriers& barriers)
      : params(p), memory((shared_address(dynamic) + 1023) / 1024 * 1024), full(shared_address(barriers.full)),
        empty(shared_address(barriers.empty)) {}

  // Codes come behind x, which begins at a multiple of 1,024 bytes.
  __device__ int stage_bytes() const {
    if constexpr (Form::kCodes) return params.stage_bytes;
    return Shape::kStageBytes;
  }
  __device__ uint32_t weights(int stage) const {
    if constexpr (Form::kCodes) return memory + stage * stage_bytes() + Shape::x_bytes(params.box_rows);
    return memory + stage * stage_bytes();
  }
  __device__ uint32_t x(int stage) const {
    return memory + stage * stage_bytes() + (Form::kCodes ? 0 : Shape::kWeightBytes);
  }
  // Tiles of a cluster, in their order.
  __device__ int first() const { return blockIdx.x / Shape::kCluster; }
  __device__ int stride() const { return gridDim.x / Shape::kCluster; }
  __device__ int tiles() const { return params.segments.count() * params.column_tiles; }
  __device__ Segment segment(int tile) const { return params.segments.at(tile / params.column_tiles); }
  __device__ int column(int tile) const { return (tile % params.column_tiles * Shape::kCluster + rank) * kColumns; }

  __device__ void init_barriers() const {
    for (int i = 0; i < params.stages; ++i) {
      barrier_init(full + 8 * i, kLooksUp ? 1 + Shape::kFetchers : 1);
      barrier_init(empty + 8 * i, 4 * Shape::kGroups * Shape::kCluster);
    }
    barrier_init_done();
  }

  // Where an expert has many rows, its weights are read again for the next of them.
  __device__ static uint64_t policy() { return Shape::kRows < 128 ? evict_first_policy() : evict_normal_policy(); }

  __device__ static int boxes(const Segment& own) { return (own.rows + Shape::kBoxRows - 1) / Shape::kBoxRows; }

  __device__ void load_weights(const Segment& own, int column, int step, int stage) const {
    const uint32_t barrier = full + 8 * stage;
    const int x_bytes = kLooksUp ? 0 : boxes(own) * Shape::kBoxRows * Shape::kRowBytes;
    barrier_arrive_expecting(barrier, Shape::kWeightBytes + x_bytes);
    load_box_once(weights(stage), params.weight, barrier, {step * Shape::kDepth, 0, 0, column / 8, own.expert}, policy());
  }

  __device__ void load_x(const Segment& own, int step, int stage) const {
    for (int i = 0; i < boxes(own); ++i) {
      load_x_box(own, i * Shape::kBoxRows, step * Shape::kDepth, x(stage), stage, i % Shape::kCluster == rank);
    }
  }

  // Rows of 128 bytes of x; in a cluster by the block whose it is, for all.
  __device__ void load_x_box(const Segment& own, int row, int column, uint32_t area, int stage, bool mine) const {
    const uint32_t to = area + row * Shape::kRowBytes;
    if constexpr (Shape::kCluster == 1) {
      load_box(to, params.x, full + 8 * stage, {column, own.source + row});
    } else if (mine) {
      load_box_to_blocks(to, params.x, full + 8 * stage, {column, own.source + row}, 0b11);
    }
  }

  // The one thread that fetches. Where it may, it asks for the first stages of W before anything else.
  __device__ void fetch() const {
    int ahead = 0;
    if (params.early && first() < tiles()) {
      const Segment own = segment(first());
      for (; ahead < min(params.steps, params.stages); ++ahead) load_weights(own, column(first()), ahead, ahead);
    }
    wait_for_dependencies();
    SizedRing ring{params.stages};
    for (int tile = first(), end = tiles(); tile < end; tile += stride()) {
      const Segment own = segment(tile);
      for (int step = 0; step < params.steps; ++step, ring.advance()) {
        if (ahead > 0) {
          --ahead;
        } else {
          barrier_wait(empty + 8 * ring.stage, ring.parity ^ 1);
          load_weights(own, column(tile), step, ring.stage);
        }
        load_x(own, step, ring.stage);
      }
    }
  }

  // All fetchers: each copies the same 16 of 128 bytes of some rows, and swizzles them as the copy engine does.
  __device__ void fetch_from_tokens() const {
    constexpr int kPieces = Shape::kRows * 8 / Shape::kFetchers, kApart = Shape::kFetchers / 8;
    const TokenRows& from = params.token_rows;
    const int fetcher = threadIdx.x % Shape::kFetchers, piece = fetcher % 8, row = fetcher / 8;
    wait_for_dependencies();
    SizedRing ring{params.stages};
    for (int tile = first(), end = tiles(); tile < end; tile += stride()) {
      const Segment own = segment(tile);
      unsigned pieces[kPieces];
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        const int at = min(row + i * kApart, own.rows - 1);
        const int token = from.tokens ? from.tokens[own.first + at] : own.source + at;
        pieces[i] = static_cast<unsigned>(token) * from.stride + piece;
      }
      for (int step = 0; step < params.steps; ++step, ring.advance()) {
        barrier_wait(empty + 8 * ring.stage, ring.parity ^ 1);
        if (fetcher == 0) load_weights(own, column(tile), step, ring.stage);
        const bool inside = step * 8 + piece < from.width;
#pragma unroll
        for (int i = 0; i < kPieces; ++i) {
          const int at = row + i * kApart;
          const uint32_t to = x(ring.stage) + at * Shape::kRowBytes + (piece ^ at % 8) * 16;
          if (at < own.rows) copy_async(to, from.x + (pieces[i] + step * 8) * int64_t{16}, inside);
        }
        copies_arrive<true>(full + 8 * ring.stage);
      }
    }
  }

  // Codes are fetched by a warp, a lane each copy: there are several for a stage.
  __device__ void fetch_codes() const {
    int ahead = 0;
    if (params.early && first() < tiles()) {
      const Segment own = segment(first());
      const auto from = patches(own, column(first()));
      for (; ahead < min(params.steps, params.stages); ++ahead) load_patches(from, boxes_of(own), ahead, ahead);
    }
    wait_for_dependencies();
    SizedRing ring{params.stages};
    for (int tile = first(), end = tiles(); tile < end; tile += stride()) {
      const Segment own = segment(tile);
      const auto from = patches(own, column(tile));
      const int num_boxes = boxes_of(own);
      for (int step = 0; step < params.steps; ++step, ring.advance()) {
        if (ahead > 0) {
          --ahead;
        } else {
          barrier_wait(empty + 8 * ring.stage, ring.parity ^ 1);
          load_patches(from, num_boxes, step, ring.stage);
        }
        const int across = Shape::kBoxes * chunks(step);
        for (int i = threadIdx.x % kWarp; i < across * num_boxes; i += kWarp) {
          const int box = i / across, inside = i % across;
          load_x_box(own, box * params.box_rows, (step * Shape::kBoxes * Shape::kChunks + inside) * Shape::kBoxColumns,
                     x(ring.stage) + inside * Shape::x_pitch(params.box_rows), ring.stage, box % Shape::kCluster == rank);
        }
      }
    }
  }

  __device__ int boxes_of(const Segment& own) const { return (own.rows + params.box_rows - 1) / params.box_rows; }
  // Patches of a stage that are there, beside each other.
  __device__ int chunks(int step) const { return min(Shape::kChunks, params.patched.across - step * Shape::kChunks); }

  // The patches of a tile, below each other; of a gated product gate's, and then up's. `mine`: this lane's first one, or null.
  struct Patches {
    const unsigned char* mine;
    int below;
  };

  __device__ Patches patches(const Segment& own, int column) const {
    const PatchedWeight& weight = params.patched;
    constexpr int kEach = Shape::kPatches / kHalves;
    const int lane = threadIdx.x % kWarp, half = weight.below / kHalves, first = column / 16;
    const int below = max(min(kEach, half - first), 0);  // a cluster's second block may have none
    const int64_t number = static_cast<int64_t>(own.expert) * weight.below + lane / kEach * half + first + lane % kEach;
    const bool is_there = lane < Shape::kPatches && lane % kEach < below;
    const unsigned char* row = weight.data + number * weight.across * bytes_of_patch<Form>(weight.group_log2);
    return {is_there ? row : nullptr, kHalves * below};
  }

  __device__ void load_patches(const Patches& from, int num_boxes, int step, int stage) const {
    const int patch = bytes_of_patch<Form>(params.patched.group_log2), bytes = chunks(step) * patch;
    const int x_bytes = Shape::kBoxes * chunks(step) * num_boxes * params.box_rows * Shape::kRowBytes, lane = threadIdx.x % kWarp;
    if (lane == 0) barrier_arrive_expecting(full + 8 * stage, from.below * bytes + x_bytes);
    __syncwarp();
    if (!from.mine) return;
    const uint32_t to = weights(stage) + lane * Shape::kChunks * patch;
    bulk_copy_once(to, from.mine + step * Shape::kChunks * patch, bytes, full + 8 * stage, policy());
  }

  __device__ void release(int stage) const {
    if constexpr (Shape::kCluster == 1) {
      if (threadIdx.x % kWarp == 0) barrier_arrive(empty + 8 * stage);
    } else {
      barrier_arrive_at<Shape::kCluster>(empty + 8 * stage, threadIdx.x % kWarp);
    }
  }

  template <int N>
  __device__ __forceinline__ void multiply(float (&sums)[Shape::kTall][N / 2], int stage, int group) const {
    wgmma_fence();
#pragma unroll
    for (int d = 0; d < Shape::kDepth / 16; ++d) {
      const uint64_t right = matrix_descriptor(x(stage), 1024, 0) + 2 * d;
#pragma unroll
      for (int t = 0; t < Shape::kTall; ++t) {
        const uint32_t rows = weights(stage) + (group * Shape::kTall + t) * 64 * Shape::kRowBytes;
        multiply_transposed<T, N>(sums[t], matrix_descriptor(rows, 1024, 0) + 2 * d, right, 1);
      }
    }
    wgmma_commit();
  }

  template <int N>
  __device__ __forceinline__ void sum_tile(float (&sums)[Shape::kTall][N / 2], int group, SizedRing& ring) const {
    int last = ring.stage;
    for (int step = 0; step < params.steps; ++step) {
      barrier_wait(full + 8 * ring.stage, ring.parity);
      if constexpr (kLooksUp) fence_shared_writes();  // cp.async's writes become visible to wgmma
      multiply<N>(sums, ring.stage, group);
      wgmma_wait<1>();  // for the step before
      if (step > 0) release(last);
      last = ring.stage;
      ring.advance();
    }
    wgmma_wait<0>();
    release(last);
  }

  // Where a stage has the codes and the word of a thread's row of W, as PatchedBlock::row_of_lane has it, of the tile's 64 rows
  // of that number.
  __device__ __forceinline__ PatchLane row_of_lane(int tall, int second) const {
    const int sixteen = tall * 4 + threadIdx.x % 128 / kWarp;
    const int patches = Gated ? sixteen / 2 + second * (Shape::kPatches / 2) : sixteen, half = Gated ? sixteen % 2 : second;
    return PatchLane::of(half, patches * Shape::kChunks * bytes_of_patch<Form>(params.patched.group_log2));
  }

  template <int N>
  __device__ __forceinline__ void multiply_codes(float (&sums)[N / 2], int stage, int chunk, int tall) const {
    const uint32_t patches = weights(stage) + chunk * bytes_of_patch<Form>(params.patched.group_log2);
    Form low, high;
    low.load(patches, row_of_lane(tall, 0), params.patched.group_log2);
    high.load(patches, row_of_lane(tall, 1), params.patched.group_log2);
    uint32_t a[2][4][4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < 16; ++i) a[half][i / 4][i % 4] = (i % 2 ? high : low).scaled(half * 4 + i / 4, i % 4 / 2);
      const uint64_t right = matrix_descriptor(x(stage) + (chunk * 2 + half) * Shape::x_pitch(params.box_rows), 1024, 0);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < 4; ++k) multiply_by_transpose<T, N>(sums, a[half][k], right + 2 * k);
      wgmma_commit();
    }
    wgmma_wait<0>();
  }

  template <int N>
  __device__ __forceinline__ void sum_coded_tile(float (&sums)[Shape::kTall][N / 2], int group, SizedRing& ring) const {
    for (int step = 0; step < params.steps; ++step, ring.advance()) {
      barrier_wait(full + 8 * ring.stage, ring.parity);
      for (int chunk = 0; chunk < chunks(step); ++chunk) {
#pragma unroll
        for (int t = 0; t < Shape::kTall; ++t) multiply_codes<N>(sums[t], ring.stage, chunk, group * Shape::kTall + t);
      }
      release(ring.stage);
    }
#pragma unroll
    for (int t = 0; t < Shape::kTall; ++t) {
      settle(sums[t]);
#pragma unroll
      for (int i = 0; i < N / 2; ++i) sums[t][i] *= Form::kFactor;
    }
  }

  template <int N>
  __device__ __forceinline__ void sum_rounded_tile(float (&sums)[1][N / 2], const Segment& own, int group,
                                                   SizedRing& ring) const {
    RoundedSums<Form, N> totals;
    totals.clear();
    uint32_t a[4][4];
    const PatchLane low = row_of_lane(group, 0).kept_in_registers(), high = row_of_lane(group, 1).kept_in_registers();
    for (int step = 0; step < params.steps; ++step, ring.advance()) {
      barrier_wait(full + 8 * ring.stage, ring.parity);
      for (int chunk = 0; chunk < chunks(step); ++chunk) {
        const uint32_t box = x(ring.stage) + chunk * Shape::x_pitch(params.box_rows);
        const uint32_t patches = weights(ring.stage) + chunk * bytes_of_patch<Form>(params.patched.group_log2);
        totals.add(a, patches, low, high, box);
        wgmma_wait<0>();
      }
      release(ring.stage);
    }
    settle(totals.totals);
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      const int row = min(i / 4 * 8 + static_cast<int>(threadIdx.x) % 4 * 2 + i % 2, own.rows - 1);
      sums[0][i] = totals.scaled(i, params.x_scales[own.source + row]);
    }
  }

  // A tile of a segment of at most N rows.
  template <int N>
  __device__ __forceinline__ void run_tile(const Segment& own, int column, int group, SizedRing& ring) const {
    float sums[Shape::kTall][N / 2];
    if constexpr (kRounded<Form>) {
      sum_rounded_tile<N>(sums, own, group, ring);
    } else {
      // Zeros: of sums that begin with what the first product finds, the compiler keeps those of all widths at once.
#pragma unroll
      for (int t = 0; t < Shape::kTall; ++t) {
#pragma unroll
        for (float& sum : sums[t]) sum = 0;
        settle(sums[t]);
      }
      if constexpr (Form::kCodes) {
        sum_coded_tile<N>(sums, group, ring);
      } else {
        sum_tile<N>(sums, group, ring);
      }
    }
    const int warp = threadIdx.x % 128 / kWarp;
#pragma unroll
    for (int t = 0; t < Shape::kTall; ++t) {
      settle(sums[t]);
      const int first = column + ((group * Shape::kTall + t) * 4 + warp) * 16 / kHalves;
      const float2 bias = bias_at(own.expert, first);
      if constexpr (Shape::kWideStores) {
        write_tile<N>(sums[t], bias, own, column + group * 64 / kHalves, group);
      } else {
#pragma unroll
        for (int j = 0; j < N / 8; ++j) write(sums[t] + 4 * j, bias, own, 8 * j, first);
      }
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

  // A warp's results for 8 rows of the segment, as kMatrices 8 x 8 matrices of 8 columns each. A thread has W's row
  // lane / 4 of 16 and the one 8 below, of two neighbouring rows of x each.
  __device__ __forceinline__ void pack_results(const float* s, float2 bias, uint32_t* matrices) const {
    const float low[2] = {s[0] + bias.x, s[1] + bias.x}, high[2] = {s[2] + bias.y, s[3] + bias.y};
    if constexpr (Gated) {
      matrices[0] = pack<T>(params.gate(low[0], high[0]), params.gate(low[1], high[1]));
    } else {
      matrices[0] = pack<T>(low[0], low[1]);
      matrices[1] = pack<T>(high[0], high[1]);
    }
  }

  // Writes 8 rows, 4 bytes a lane.
  __device__ __forceinline__ void write(const float* s, float2 bias, const Segment& own, int row, int column) const {
    if (row >= own.rows) return;
    uint32_t matrices[kMatrices];
    pack_results(s, bias, matrices);
#pragma unroll
    for (int m = 0; m < kMatrices; ++m) store(matrices[m], own, row, column + 8 * m);
  }

  // Writes a group's results part by part: its warps lay out some rows of the segment in shared memory, 8 or 16 columns
  // each; of these each thread writes 16 bytes, so that what goes to memory lies together. One part is written while the
  // next is laid out.
  template <int N>
  __device__ __forceinline__ void write_tile(const float (&sums)[N / 2], float2 bias, const Segment& own, int column,
                                             int group) const {
    static_assert(Shape::kTall == 1);
    constexpr int kRows = 32 / kMatrices, kVectors = 8 / kHalves, kPitch = kVectors * 16 + 16;  // of a part
    static_assert(kRows * kPitch <= Shape::kPartBytes);
    const int thread = threadIdx.x % 128, lane = thread % kWarp, row = thread / kVectors, vector = thread % kVectors;
    const uint32_t parts = memory + params.stages * stage_bytes() + group * 2 * Shape::kPartBytes;
    const uint32_t given = parts + (lane / (8 * kMatrices) * 8 + lane % 8) * kPitch +
                           (thread / kWarp * kMatrices + lane / 8 % kMatrices) * 16;
    const uint32_t taken = parts + row * kPitch + vector * 16;
    T* to = static_cast<T*>(params.out) + static_cast<int64_t>(own.first + row) * params.columns + column + vector * 8;
    const int rows = column + vector * 8 < params.columns ? own.rows - row : 0;
    sync_some(1 + group, 128);  // the tile before has been read
#pragma unroll
    for (int first = 0; first < N + kRows; first += kRows) {
      uint4 bytes;
      if (first > 0) bytes = load_shared(taken + (first / kRows - 1) % 2 * Shape::kPartBytes);
      if (first < N) {
        uint32_t matrices[4] = {};  // the last part may be half full
#pragma unroll
        for (int m = 0; m < 4; m += kMatrices) {
          const int eight = first + 8 * (m / kMatrices);
          if (eight < N) pack_results(sums + eight / 2, bias, matrices + m);
        }
        store_matrices_transposed(given + first / kRows % 2 * Shape::kPartBytes, matrices);
      }
      if (first > 0) {
        if (first - kRows < rows) *reinterpret_cast<uint4*>(to) = bytes;
        to += kRows * params.columns;
      }
      if (first < N) sync_some(1 + group, 128);
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
      if (own.rows > N) return run_segment<Shape::wider(N)>(own, column, group, ring);
    }
    run_tile<N>(own, column, group, ring);
  }

  __device__ __forceinline__ void compute(int group) const {
    SizedRing ring{params.stages};
    const int end = tiles();
    Segment next = first() < end ? segment(first()) : Segment{};
    for (int tile = first(); tile < end; tile += stride()) {
      const Segment own = next;
      if (tile + stride() < end) next = segment(tile + stride());  // known by the time that it is needed
      run_segment<Shape::kLeast>(own, column(tile), group, ring);
    }
  }
};

template <typename T, typename Shape, bool Gated, typename Form>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocks)
    grouped_linear_kernel(const __grid_constant__ GroupedParams params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ unsigned char dynamic[];
  __shared__ GroupedBarriers barriers;
  const GroupedBlock<T, Shape, Gated, Form> block(params, dynamic, barriers);
  const int group = __shfl_sync(kAllLanes, threadIdx.x / 128, 0);  // in a register that the warp shares
  const bool fetches = threadIdx.x == 128 * Shape::kGroups, fetches_codes = threadIdx.x / kWarp == 4 * Shape::kGroups;
  if (fetches) {
    if constexpr (!block.kLooksUp) prefetch_map(params.x);
    if constexpr (!Form::kCodes) prefetch_map(params.weight);
    block.init_barriers();
  }
  Shape::kCluster == 1 ? __syncthreads() : cluster_meet();
  if (group < Shape::kGroups) {
    if constexpr (Shape::kMovesRegisters) take_registers<Shape::kComputeRegisters>();
    wait_for_dependencies();
    start_dependents();  // only now: the next kernel may read early what the one ahead of this has written
    block.compute(group);
  } else {
    if constexpr (Shape::kMovesRegisters) give_registers_back<Shape::kFetchRegisters>();
    if constexpr (Form::kCodes) {
      if (fetches_codes) block.fetch_codes();
    } else if constexpr (block.kLooksUp) {
      block.fetch_from_tokens();
    } else {
      if (fetches) block.fetch();
    }
  }
  // A block stays until the other one writes to its shared memory and arrives at its barriers no more.
  if constexpr (Shape::kCluster > 1) {
    __syncwarp();
    cluster_sync();
  }
#endif
}

}  // namespace raylm::cuda
