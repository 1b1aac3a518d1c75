// y = x W^T (+ bias), where W has integers of 4 bits with a scale and a zero point a group of columns, for Hopper.
//
// W comes in patches (tile/int4.cuh), each one copy. Products of a group are summed first and scaled then, in float32.
//
// A block takes tiles of Width rows of W and up to 32 rows of x, all columns or a slice of them, Across patches a stage.
// One of its warps fetches and runs ahead, W also before the kernel ahead has ended. The others multiply: 32 rows of W and a
// part of the stage's columns each, so that x is read from shared memory as often as a tile has 32 rows. The parts' sums
// meet in shared memory. Where n is too small for all multiprocessors, the blocks of a cluster take a slice each of one
// tile, and their sums meet there as well.
//
// More rows of x are multiplied by wgmma, with W's numbers, rounded to 16 bits, and scales too, as its left operand in
// registers, and each of eight warps has a patch's 16 rows. x has a ring of its own then, whose stages are 128 columns.
//
// All sums have an order that follows from W's shape and the number of rows: a row's result depends neither on what the
// others hold nor on timing.
#pragma once

#include "raylm/cuda/pipeline/ring.cuh"
#include "raylm/cuda/ptx/cluster.cuh"
#include "raylm/cuda/ptx/copy.cuh"
#include "raylm/cuda/ptx/grid.cuh"
#include "raylm/cuda/ptx/matrix.cuh"
#include "raylm/cuda/ptx/tensor_copy.cuh"
#include "raylm/cuda/ptx/warps.cuh"
#include "raylm/cuda/ptx/wgmma.cuh"
#include "raylm/cuda/tile/fragments.cuh"
#include "raylm/cuda/tile/int4.cuh"

namespace raylm::cuda {

constexpr int kMostInt4Stages = 8, kInt4XStages = 4;  // the latter: where x has a ring of its own

struct Int4Params {
  CUtensorMap x;                // [k / 64, rows, 64], boxes of a stage's columns
  const unsigned char* weight;  // [n / 16, patches, bytes of a patch]
  const void* bias;             // or null
  void* out;                    // [rows, n]
  int rows, n;
  int box_rows;          // of x
  int group_shift;       // columns of a group: 32 << group_shift, which is 0, 1 or 2
  int row_tiles, tiles;  // below each other; in all
  int patches;           // beside each other
  int steps, slice;      // stages: in all, and those of a block at most; each block has some
  int split, stages;
  bool early;  // W may be read while the kernel ahead still runs
};

template <int Rows, int Width, int Across, int Warps>
struct Int4Shape {
  static constexpr bool kWide = false;
  static constexpr int kRows = Rows, kEights = Rows / 8;
  static constexpr int kWidth = Width, kTall = 2;  // rows of W: of a tile; those of a warp, in sixteens
  static constexpr int kAcross = Across, kColumns = Across * kPatchColumns;
  static constexpr int kThreads = Warps * kWarp;  // that multiply
  static constexpr int kTeam = Width / (16 * kTall);  // warps that have the same part of a stage's columns
  static constexpr int kParts = Warps / kTeam, kChunks = 4 * Across / kParts;  // of a stage; 128 columns of a part
  static constexpr int kAreas = kParts > 4 ? kParts / 4 : 1;  // where sums meet
  static constexpr int kPatches = kWidth / kPatchRows * Across;  // of a stage
  static constexpr int kBoxBytes = kRows * 128, kBoxes = kColumns / 64, kXBytes = kBoxes * kBoxBytes;
  static constexpr int kPitch = kWidth + 4;  // of sums that meet
  static constexpr int kAreaBytes = kRows * kPitch * 4, kMeetingBytes = kAreas * kAreaBytes;
  static_assert(kTeam * kParts == Warps && kChunks * kParts == 4 * Across && kPatches <= kWarp && kBoxes <= kWarp);
  __host__ __device__ static constexpr int stage_bytes(int group_shift) {
    return kXBytes + kPatches * patch_bytes(group_shift);
  }
  static constexpr int shared_bytes(int group_shift, int stages) {
    return 1024 + stages * stage_bytes(group_shift) + kMeetingBytes;  // 1024: alignment
  }
};

// For more rows, by wgmma.
template <int Rows>
struct Int4WideShape {
  static constexpr bool kWide = true;
  static constexpr int kRows = Rows, kEights = Rows / 8;
  static constexpr int kWidth = 128, kTall = 1, kAcross = 1, kColumns = kPatchColumns, kThreads = 256;
  static constexpr int kTeam = 8, kParts = 1, kAreas = 1, kPatches = kWidth / kPatchRows;
  static constexpr int kBoxBytes = Rows * 128, kBoxes = 2, kXBytes = kBoxes * kBoxBytes;  // of a stage of x
  static constexpr int kPitch = kWidth + 4;
  static constexpr int kAreaBytes = kRows * kPitch * 4;
  // Sums meet only of blocks that have one tile, where x was.
  static_assert(kAreaBytes <= kInt4XStages * kXBytes);
  __host__ __device__ static constexpr int stage_bytes(int group_shift) { return kPatches * patch_bytes(group_shift); }
  static constexpr int shared_bytes(int group_shift, int stages) {
    return 1024 + stages * stage_bytes(group_shift) + kInt4XStages * kXBytes;
  }
};

struct Int4Barriers {
  uint64_t full[kMostInt4Stages], empty[kMostInt4Stages];
  uint64_t x_full[kInt4XStages], x_empty[kInt4XStages];  // where x has a ring of its own
};

// Narrow: a group may have fewer than 128 columns.
template <typename T, typename Shape, bool Narrow>
struct Int4Block {
  using Sums = float[Shape::kTall][Shape::kEights * 4];  // as the matrix instructions leave them
  const Int4Params& params;
  const uint32_t memory, full, empty, x_full, x_empty;
  const int patch = patch_bytes(params.group_shift), stage_bytes = Shape::stage_bytes(params.group_shift);
  const int rank = params.split > 1 ? cluster_rank() : 0;
  const int from = rank * params.slice, steps = min(params.slice, params.steps - from);

  __device__ Int4Block(const Int4Params& p, const unsigned char* dynamic, Int4Barriers& barriers)
      : params(p), memory((shared_address(dynamic) + 1023) / 1024 * 1024), full(shared_address(barriers.full)),
        empty(shared_address(barriers.empty)), x_full(shared_address(barriers.x_full)),
        x_empty(shared_address(barriers.x_empty)) {}

  // Tiles in their order: the rows of x below each other first, which share W.
  __device__ int first() const { return blockIdx.x / params.split; }
  __device__ int stride() const { return gridDim.x / params.split; }
  __device__ int row(int tile) const { return tile % params.row_tiles * Shape::kRows; }
  __device__ int column(int tile) const { return tile / params.row_tiles * Shape::kWidth; }
  __device__ uint32_t weights(int stage) const { return memory + stage * stage_bytes + (Shape::kWide ? 0 : Shape::kXBytes); }
  __device__ uint32_t after_stages() const { return memory + params.stages * stage_bytes; }
  __device__ uint32_t x(int stage) const {
    return Shape::kWide ? after_stages() + stage * Shape::kXBytes : memory + stage * stage_bytes;
  }
  __device__ uint32_t meeting() const { return after_stages(); }

  __device__ void init_barriers() const {
    for (int i = 0; i < params.stages; ++i) {
      barrier_init(full + 8 * i, 1);
      barrier_init(empty + 8 * i, Shape::kThreads / kWarp);
    }
    for (int i = 0; Shape::kWide && i < kInt4XStages; ++i) {
      barrier_init(x_full + 8 * i, 1);
      barrier_init(x_empty + 8 * i, Shape::kThreads / kWarp);
    }
    barrier_init_done();
  }

  __device__ uint64_t policy() const { return params.row_tiles == 1 ? evict_first_policy() : evict_normal_policy(); }

  // By a warp, a lane each patch.
  __device__ void load_weights(int tile, int step, int i) const {
    const int lane = threadIdx.x % kWarp, first = column(tile) / kPatchRows, across = (from + step) * Shape::kAcross;
    const int below = min(Shape::kWidth / kPatchRows, params.n / kPatchRows - first);
    const int beside = min(Shape::kAcross, params.patches - across);
    const int x_bytes = Shape::kWide ? 0 : Shape::kBoxes * params.box_rows * 128;
    if (lane == 0) barrier_arrive_expecting(full + 8 * i, x_bytes + below * beside * patch);
    __syncwarp();
    const int down = lane / Shape::kAcross, right = lane % Shape::kAcross;
    if (down >= below || right >= beside) return;
    const int64_t number = static_cast<int64_t>(first + down) * params.patches + across + right;
    bulk_copy_once(weights(i) + lane * patch, params.weight + number * patch, patch, full + 8 * i, policy());
  }

  // A stage's columns; what is more of x stays empty.
  __device__ void load_x(int tile, int step, int i) const {
    if (threadIdx.x % kWarp > 0) return;
    load_box(x(i), params.x, full + 8 * i, {0, row(tile), (from + step) * Shape::kBoxes});
  }

  __device__ void load_x_in_parts(int tile, int step, Ring<kInt4XStages>& ring) const {
    if (threadIdx.x % kWarp > 0) return;
    for (int chunk = 0; chunk < 4; ++chunk, ring.advance()) {
      barrier_wait(x_empty + 8 * ring.stage, ring.parity ^ 1);
      barrier_arrive_expecting(x_full + 8 * ring.stage, Shape::kXBytes);
      load_box(x(ring.stage), params.x, x_full + 8 * ring.stage, {0, row(tile), ((from + step) * 4 + chunk) * 2});
    }
  }

  __device__ int ahead() const { return min(steps, params.stages); }

  // The warp that fetches. It asks for the first stages of W before anything else.
  __device__ void begin() const {
    if (threadIdx.x % kWarp == 0) init_barriers();
    __syncwarp();
    if (!params.early) wait_for_dependencies();
    for (int step = 0; step < ahead(); ++step) load_weights(first(), step, step);
  }

  __device__ void fetch() const {
    wait_for_dependencies();
    SizedRing ring{params.stages};
    Ring<kInt4XStages> x_ring;
    for (int tile = first(); tile < params.tiles; tile += stride()) {
      for (int step = 0; step < steps; ++step, ring.advance()) {
        if (tile != first() || step >= ahead()) {
          barrier_wait(empty + 8 * ring.stage, ring.parity ^ 1);
          load_weights(tile, step, ring.stage);
        }
        if constexpr (Shape::kWide) {
          load_x_in_parts(tile, step, x_ring);
        } else {
          load_x(tile, step, ring.stage);
        }
      }
    }
  }

  // Which part of a stage's columns, and which 32 rows of the tile's, this warp has.
  __device__ static int part() { return threadIdx.x / kWarp / Shape::kTeam; }
  __device__ static int first_row() { return threadIdx.x / kWarp % Shape::kTeam * 16 * Shape::kTall; }

  // 32 columns of x, as fragments of 8 rows each. Of fewer than 8 rows the last one stands for those that are not there.
  __device__ __forceinline__ void load_x_fragments(uint32_t (&b)[Shape::kEights][4], int stage, int columns) const {
    const int lane = threadIdx.x % kWarp, box = columns / 2, vector = columns % 2 * 4 + lane / 8;
    if constexpr (Shape::kEights == 1) {
      const int line = box * params.box_rows + min(lane % 8, params.box_rows - 1);
      load_matrices(b[0], x(stage) + line * 128 + (vector ^ line % 8) * 16);
    } else {
      const uint32_t row = x(stage) + box * Shape::kBoxBytes + lane % 8 * 128 + (vector ^ lane % 8) * 16;
#pragma unroll
      for (int q = 0; q < Shape::kEights; ++q) load_matrices(b[q], row + q * 1024);
    }
  }

  // Adds 128 columns' products, of which `chunk` is the number within the stage.
  __device__ __forceinline__ void add(Sums& sums, int stage, int chunk) const {
    const int lane = threadIdx.x % kWarp, inside = chunk % 4;
    const uint32_t mine = weights(stage) + (first_row() / kPatchRows * Shape::kAcross + chunk / 4) * patch;
    uint4 codes[Shape::kTall][2];
#pragma unroll
    for (int m = 0; m < 2 * Shape::kTall; ++m) {
      codes[m / 2][m % 2] = load_shared(mine + m / 2 * Shape::kAcross * patch + (inside * 2 + m % 2) * 512 + lane * 16);
    }
    Int4Group<T> groups[Shape::kTall][2];
    Sums parts;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t b[Shape::kEights][4];
      load_x_fragments(b, stage, chunk * 4 + i);
      if (Narrow || i == 0) {
        const int group = inside * 4 + i >> params.group_shift;
#pragma unroll
        for (int m = 0; m < 2 * Shape::kTall; ++m) {
          const int row = group * kPatchRows + m % 2 * 8 + lane / 4;
          const uint32_t at = mine + m / 2 * Shape::kAcross * patch + kPatchCodes + row * 4;
          groups[m / 2][m % 2] = Int4Group<T>::of(load_shared_word(at));
        }
        clear(parts);
      }
#pragma unroll
      for (int m = 0; m < Shape::kTall; ++m) multiply(parts[m], words(codes[m], i), groups[m], b);
      if (Narrow || i == 3) {
#pragma unroll
        for (int m = 0; m < Shape::kTall; ++m) scale(sums[m], parts[m], groups[m]);
      }
    }
  }

  __device__ static uint2 words(const uint4 (&codes)[2], int i) {
    const auto word = [&](const uint4& c) { return i == 0 ? c.x : i == 1 ? c.y : i == 2 ? c.z : c.w; };
    return make_uint2(word(codes[0]), word(codes[1]));
  }

  __device__ static void clear(Sums& sums) {
#pragma unroll
    for (auto& tall : sums) {
#pragma unroll
      for (float& sum : tall) sum = 0.0f;
    }
  }

  // 16 rows of W, of which a lane has two, and 32 columns, by all rows of x.
  __device__ static void multiply(float (&parts)[Shape::kEights * 4], uint2 codes, const Int4Group<T> (&groups)[2],
                                  const uint32_t (&b)[Shape::kEights][4]) {
#pragma unroll
    for (int k = 0; k < 4; k += 2) {
      const uint32_t a[4] = {subtract_pairs<T>(int4_pair<T>(codes.x, k), groups[0].zeros),
                             subtract_pairs<T>(int4_pair<T>(codes.y, k), groups[1].zeros),
                             subtract_pairs<T>(int4_pair<T>(codes.x, k + 1), groups[0].zeros),
                             subtract_pairs<T>(int4_pair<T>(codes.y, k + 1), groups[1].zeros)};
#pragma unroll
      for (int q = 0; q < Shape::kEights; ++q) multiply_add<T>(parts + 4 * q, a, b[q][k], b[q][k + 1]);
    }
  }

  __device__ static void scale(float (&sums)[Shape::kEights * 4], const float (&parts)[Shape::kEights * 4],
                               const Int4Group<T> (&groups)[2]) {
#pragma unroll
    for (int i = 0; i < Shape::kEights * 4; ++i) sums[i] = fmaf(parts[i], groups[i / 2 % 2].scale, sums[i]);
  }

  // What wgmma takes as its left operand of 64 columns, a half of 128 of a patch whose codes are given: 16 a fragment, of
  // this lane's two rows. `groups` is where the words of the first of the 128 columns are.
  __device__ __forceinline__ void widen(uint32_t (&a)[4][4], const uint4 (&codes)[2], uint32_t groups, int half) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t group = groups + (half * 2 + i >> params.group_shift) * kPatchRows * 4;
      const uint2 pair = words(codes, half * 2 + i);
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const auto of = Int4Group<T>::of(load_shared_word(group + row * 32));
        const uint32_t scales = pack<T>(of.scale, of.scale);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const uint32_t two = subtract_pairs<T>(int4_pair<T>(row == 0 ? pair.x : pair.y, j), of.zeros);
          a[2 * i + j / 2][j % 2 * 2 + row] = multiply_pairs<T>(two, scales);
        }
      }
    }
  }

  __device__ __forceinline__ void sum_wide_tile(Sums& sums, SizedRing& ring, Ring<kInt4XStages>& x_ring) const {
    const int lane = threadIdx.x % kWarp;
    clear(sums);
    settle(sums[0]);
    uint32_t a[2][4][4];
    int last = x_ring.stage;
    for (int step = 0; step < steps; ++step, ring.advance()) {
      barrier_wait(full + 8 * ring.stage, ring.parity);
      const uint32_t own = weights(ring.stage) + threadIdx.x / kWarp * patch;
      for (int chunk = 0; chunk < 4; ++chunk, x_ring.advance()) {
        const uint32_t from = own + chunk * 1024 + lane * 16;
        const uint4 codes[2] = {load_shared(from), load_shared(from + 512)};
        const uint32_t groups = own + kPatchCodes + (chunk * 4 >> params.group_shift) * kPatchRows * 4 + lane / 4 * 4;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          widen(a[half], codes, groups, half);
          if (half == 0) barrier_wait(x_full + 8 * x_ring.stage, x_ring.parity);
          wgmma_fence();
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            const uint64_t right = matrix_descriptor(x(x_ring.stage) + half * Shape::kBoxBytes, 1024, 0) + 2 * k;
            multiply_by_transpose<T, Shape::kRows>(sums[0], a[half][k], right);
          }
          wgmma_commit();
          wgmma_wait<1>();  // the half before, whose registers are written next
          if (half == 0 && (step > 0 || chunk > 0)) arrive(x_empty + 8 * last);
        }
        last = x_ring.stage;
      }
      arrive(empty + 8 * ring.stage);
    }
    wgmma_wait<0>();
    arrive(x_empty + 8 * last);
    settle(sums[0]);
  }

  // For the warp.
  __device__ static void arrive(uint32_t barrier) {
    __syncwarp();
    if (threadIdx.x % kWarp == 0) barrier_arrive(barrier);
  }

  __device__ __forceinline__ void sum_tile(Sums& sums, SizedRing& ring) const {
    clear(sums);
    for (int step = 0; step < steps; ++step, ring.advance()) {
      barrier_wait(full + 8 * ring.stage, ring.parity);
      const int chunks = (params.patches - (from + step) * Shape::kAcross) * 4;  // in W; the rest of the stage is empty
#pragma unroll
      for (int i = Shape::kChunks * part(); i < Shape::kChunks * (part() + 1); ++i) {
        if (Shape::kAcross == 1 || i < chunks) add(sums, ring.stage, i);
      }
      arrive(empty + 8 * ring.stage);
    }
  }

  // Sums come to shared memory as [row of x][row of W]: in each area those of its first part of columns, to which the
  // warps of its other parts add theirs, one part after the other.
  __device__ __forceinline__ void meet(const Sums& sums) const {
    sync_some(1, Shape::kThreads);  // the tile before has been written
    if (part() < Shape::kAreas) leave<false>(sums);
#pragma unroll
    for (int i = 1; i < Shape::kParts / Shape::kAreas; ++i) {
      sync_some(1, Shape::kThreads);
      if (part() / Shape::kAreas == i) leave<true>(sums);
    }
    sync_some(1, Shape::kThreads);
  }

  template <bool Adds>
  __device__ __forceinline__ void leave(const Sums& sums) const {
    const int column = first_row() + threadIdx.x % kWarp / 4, row = threadIdx.x % 4 * 2;
    const uint32_t area = meeting() + part() % Shape::kAreas * Shape::kAreaBytes;
#pragma unroll
    for (int m = 0; m < Shape::kTall; ++m) {
#pragma unroll
      for (int q = 0; q < Shape::kEights; ++q) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const uint32_t to = area + ((8 * q + row + i % 2) * Shape::kPitch + column + 16 * m + i / 2 * 8) * 4;
          const float sum = sums[m][4 * q + i];
          store_shared(to, Adds ? sum + __uint_as_float(load_shared_word(to)) : sum);
        }
      }
    }
  }

  // Four neighbouring results: the areas' sums, those of all slices in their order.
  __device__ float4 sum_of_slices(uint32_t from) const {
    float4 sum = make_float4(0, 0, 0, 0);
    for (int s = 0; s < params.split; ++s) {
#pragma unroll
      for (int area = 0; area < Shape::kAreas; ++area) {
        const float4 part = sum_at(from + area * Shape::kAreaBytes, s);
        sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
      }
    }
    return sum;
  }

  __device__ float4 sum_at(uint32_t from, int slice) const {
    if (params.split > 1) return load_shared_at(from, slice);
    const uint4 x = load_shared(from);
    return make_float4(__uint_as_float(x.x), __uint_as_float(x.y), __uint_as_float(x.z), __uint_as_float(x.w));
  }

  // Writes this block's share of the tile.
  __device__ void write(int tile) const {
    const T* bias = static_cast<const T*>(params.bias);
    const auto bias_at = [&](int i) { return bias ? to_float(bias[i]) : 0.0f; };
    for (int i = rank * Shape::kThreads + threadIdx.x; i < Shape::kRows * Shape::kWidth / 4;
         i += params.split * Shape::kThreads) {
      const int inside = i / (Shape::kWidth / 4), quad = i % (Shape::kWidth / 4) * 4;
      const int of_x = row(tile) + inside, at = column(tile) + quad;
      if (of_x >= params.rows || at >= params.n) continue;
      const float4 sum = sum_of_slices(meeting() + (inside * Shape::kPitch + quad) * 4);
      T* to = static_cast<T*>(params.out) + static_cast<int64_t>(of_x) * params.n + at;
      *reinterpret_cast<uint2*>(to) = make_uint2(pack<T>(sum.x + bias_at(at), sum.y + bias_at(at + 1)),
                                                 pack<T>(sum.z + bias_at(at + 2), sum.w + bias_at(at + 3)));
    }
  }

  // Results of 8 rows of x and 16 of W at a time, 4 bytes a lane.
  __device__ __forceinline__ void write_sums(const Sums& sums, int tile) const {
    const int lane = threadIdx.x % kWarp, first = column(tile) + first_row();
    if (first >= params.n) return;
    const T* bias = static_cast<const T*>(params.bias);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float added = bias ? to_float(bias[first + 8 * half + lane / 4]) : 0.0f;
      const int at = first + 8 * half + lane % 4 * 2;
#pragma unroll
      for (int q = 0; q < Shape::kEights; ++q) {
        const float* s = sums[0] + 4 * q + 2 * half;
        const uint32_t pair = transpose(pack<T>(s[0] + added, s[1] + added));
        const int of_x = row(tile) + 8 * q + lane / 4;
        if (of_x >= params.rows) continue;
        T* to = static_cast<T*>(params.out) + static_cast<int64_t>(of_x) * params.n + at;
        *reinterpret_cast<uint32_t*>(to) = pair;
      }
    }
  }

  __device__ __forceinline__ void compute() const {
    SizedRing ring{params.stages};
    Ring<kInt4XStages> x_ring;
    for (int tile = first(); tile < params.tiles; tile += stride()) {
      Sums sums;
      if constexpr (Shape::kWide) {
        sum_wide_tile(sums, ring, x_ring);
        params.split == 1 ? write_sums(sums, tile) : meet(sums);
      } else {
        sum_tile(sums, ring);
        meet(sums);
        if (params.split == 1) write(tile);
      }
    }
  }
};

template <typename T, typename Shape, bool Narrow>
__global__ void __launch_bounds__(Shape::kThreads + kWarp, 1)
    int4_linear_kernel(const __grid_constant__ Int4Params params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ unsigned char dynamic[];
  __shared__ Int4Barriers barriers;
  start_dependents();
  const Int4Block<T, Shape, Narrow> block(params, dynamic, barriers);
  const bool computes = threadIdx.x < Shape::kThreads;
  if (!computes) block.begin();
  __syncthreads();
  if (computes) {
    wait_for_dependencies();
    block.compute();
  } else {
    block.fetch();
  }
  if (params.split > 1) {
    __syncwarp();
    cluster_sync();
    if (computes) block.write(block.first());
    __syncwarp();  // a block stays until the others have read its sums
    cluster_sync();
  }
#endif
}

// W as numbers of T, for products of many rows: a warp takes 8 rows and 128 columns of a patch.
struct Int4DecodeParams {
  const unsigned char* weight;
  void* out;  // [n, k]
  int n, k, steps, group_shift;
};

template <typename T>
__global__ void int4_decode_kernel(Int4DecodeParams p) {
  wait_for_dependencies();
  const int lane = threadIdx.x % kWarp, part = blockIdx.x * (blockDim.x / kWarp) + threadIdx.x / kWarp;
  const int patch = part / 8, chunk = part / 2 % 4, low = part % 2 * 8 + lane / 4;  // low: the row within the patch
  if (patch >= p.n / kPatchRows * p.steps) return;
  const unsigned char* from = p.weight + static_cast<int64_t>(patch) * patch_bytes(p.group_shift);
  const uint4 codes = *reinterpret_cast<const uint4*>(from + part % 8 * 512 + lane * 16);
  const int64_t row = patch / p.steps * kPatchRows + low;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int group = chunk * 4 + i >> p.group_shift;
    const auto* words = reinterpret_cast<const uint32_t*>(from + kPatchCodes);
    const auto of = Int4Group<T>::of(words[group * kPatchRows + low]);
    const uint32_t word = i == 0 ? codes.x : i == 1 ? codes.y : i == 2 ? codes.z : codes.w;
    uint32_t pairs[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 numbers = unpack<T>(subtract_pairs<T>(int4_pair<T>(word, j), of.zeros));
      pairs[j] = pack<T>(numbers.x * of.scale, numbers.y * of.scale);
    }
    transpose4(pairs);
    const int column = patch % p.steps * kPatchColumns + chunk * 128 + i * 32 + lane % 4 * 8;
    if (column >= p.k) continue;
    *reinterpret_cast<uint4*>(static_cast<T*>(p.out) + row * p.k + column) =
        make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  }
}

}  // namespace raylm::cuda
