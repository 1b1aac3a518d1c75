// y = x W^T (+ bias), where W has codes in patches (tile/patches.cuh), for Hopper.
//
// A block takes tiles of Width rows of W and up to 16 rows of x, all columns or a slice of them, Chunks patches beside
// each other a stage. Products of a group are summed first and scaled then, in float32.
//
// One of its warps fetches and runs ahead, W also before the kernel ahead has ended. The others multiply: 32 rows of W and a
// part of the stage's columns each, so that x is read from shared memory as often as a tile has 32 rows. The parts' sums
// meet in shared memory. Where n is too small for all multiprocessors, the blocks of a cluster take a slice each of one
// tile, and send each other their sums; those whose warps have no parts read each other's.
//
// More rows of x are multiplied by wgmma. Its left operand, in registers, is W's numbers times their scales, both rounded
// to 16 bits. Each warp has the 16 rows of a patch; where W has few rows, parts of the warps share a stage's columns too.
// x has a ring of its own, and a warp that fetches it. Where x is rounded to 8 bits with a scale a row, W's codes are that
// operand as they are.
//
// Where W's rows are gates and ups, a warp has eight gates and their ups instead of 16 neighbouring rows, and a lane each gate
// with its up: so the activation takes both from registers.
//
// All sums have an order that follows from W's shape and the number of rows: a row's result depends neither on what the
// others hold nor on timing.
#pragma once

#include "raylm/cuda/gated.cuh"
#include "raylm/cuda/patched_shapes.cuh"
#include "raylm/cuda/pipeline/ring.cuh"
#include "raylm/cuda/ptx/cluster.cuh"
#include "raylm/cuda/ptx/copy.cuh"
#include "raylm/cuda/ptx/grid.cuh"
#include "raylm/cuda/ptx/matrix.cuh"
#include "raylm/cuda/ptx/tensor_copy.cuh"
#include "raylm/cuda/ptx/warps.cuh"
#include "raylm/cuda/ptx/wgmma.cuh"
#include "raylm/cuda/tile/fragments.cuh"
#include "raylm/cuda/tile/patches.cuh"
#include "raylm/cuda/tile/rounded.cuh"

namespace raylm::cuda {

// For 256 rows of x eight warps need more registers than are theirs; four more give up some.
constexpr int kPatchedComputeRegisters = 232, kPatchedFetchRegisters = 40;

struct PatchedParams {
  CUtensorMap x;                // [k / 64, rows, 64], boxes of a stage's columns; rounded [k / 128, rows, 128]
  const float* x_scales;        // of rounded rows
  const unsigned char* weight;  // [n / 16, across, bytes of a patch]
  const void* bias;             // or null
  void* out;                    // [rows, columns]
  int rows, n, columns;  // of x, of W, and the result's: n, or half of it where there is an activation
  GateAct act;
  int box_rows;          // of x
  int group_log2;        // columns of a group
  int row_tiles, tiles;  // below each other; in all
  int across;            // patches beside each other
  int steps, slice;      // stages: in all, and those of a block at most; each block has some
  int split, stages;
  bool early;  // W may be read while the kernel ahead still runs
};

struct PatchedBarriers {
  uint64_t full[kMostPatchedStages], empty[kMostPatchedStages];
  uint64_t x_full[kMostPatchedXStages], x_empty[kMostPatchedXStages];  // where x has a ring of its own
  uint64_t met;  // counts the sums that other blocks send, once
};

template <typename T, typename Shape, typename Form>
struct PatchedBlock {
  using Sums = float[Shape::kTall][Shape::kEights * 4];  // as the matrix instructions leave them
  using XRing = Ring<Shape::kXStages>;
  static constexpr int kUps = Shape::kWidth / kPatchRows / 2;  // where ups' patches begin, behind gates'
  const PatchedParams& params;
  const uint32_t memory, full;  // and behind the first barriers the others, in their order
  const uint32_t empty = full + offsetof(PatchedBarriers, empty);
  const uint32_t x_full = full + offsetof(PatchedBarriers, x_full), x_empty = full + offsetof(PatchedBarriers, x_empty);
  const uint32_t met = full + offsetof(PatchedBarriers, met);
  const int patch = bytes_of_patch<Form>(params.group_log2), stage_bytes = Shape::stage_bytes(patch);
  const int rank = params.split > 1 ? cluster_rank() : 0;
  const int from = rank * params.slice, steps = min(params.slice, params.steps - from);

  __device__ PatchedBlock(const PatchedParams& p, const unsigned char* dynamic, PatchedBarriers& barriers)
      : params(p), memory(kept((shared_address(dynamic) + 1023) / 1024 * 1024)), full(kept(shared_address(&barriers))) {}

  // Tiles in their order: the rows of x below each other first, which share W.
  __device__ int first() const { return blockIdx.x / params.split; }
  __device__ int stride() const { return gridDim.x / params.split; }
  __device__ int row(int tile) const { return tile % params.row_tiles * Shape::kRows; }
  __device__ int column(int tile) const { return tile / params.row_tiles * Shape::kWidth; }
  __device__ uint32_t stages() const { return memory + Shape::kXStages * Shape::kXBytes; }
  __device__ uint32_t x(int stage) const { return memory + stage * (Shape::kWide ? Shape::kXBytes : stage_bytes); }
  __device__ uint32_t weights(int stage) const {
    return stages() + stage * stage_bytes + (Shape::kWide ? 0 : Shape::kXBytes);
  }
  __device__ bool has_gates() const { return params.act != GateAct::kNone; }
  __device__ uint32_t meeting() const { return Shape::kMeets ? stages() + params.stages * stage_bytes : memory; }

  __device__ void init_barriers() const {
    for (int i = 0; i < params.stages; ++i) {
      barrier_init(full + 8 * i, 1);
      barrier_init(empty + 8 * i, Shape::kThreads / kWarp);
    }
    for (int i = 0; i < Shape::kXStages; ++i) {
      barrier_init(x_full + 8 * i, 1);
      barrier_init(x_empty + 8 * i, Shape::kThreads / kWarp);
    }
    barrier_init(met, 1);
    barrier_init_done();
    const int received = max(0, min(share(), params.rows - rank * share()));  // rows
    barrier_arrive_expecting(met, (params.split - 1) * received * Shape::kWidth * 4);
  }

  __device__ uint64_t policy() const { return params.row_tiles == 1 ? evict_first_policy() : evict_normal_policy(); }

  // Patches of a stage that are there, beside each other.
  __device__ int chunks(int step) const { return min(Shape::kChunks, params.across - (from + step) * Shape::kChunks); }

  // By a warp, a lane each copy.
  __device__ void load_weights(int tile, int step, int i) const {
    const int lane = threadIdx.x % kWarp, beside = chunks(step), halves = has_gates() ? 2 : 1;
    const int first = column(tile) / kPatchRows / halves, all = params.n / kPatchRows / halves;  // patches of a half
    const int below = min(Shape::kWidth / kPatchRows / halves, all - first);
    const int x_bytes = Shape::kWide ? 0 : Shape::kBoxes * params.box_rows * 128;
    if (lane == 0) barrier_arrive_expecting(full + 8 * i, x_bytes + halves * below * beside * patch);
    __syncwarp();
    const int down = lane / Shape::kCopies, right = lane % Shape::kCopies * kCopied;
    const bool of_up = has_gates() && down >= kUps;
    if (down - of_up * kUps >= below || right >= beside) return;
    const int64_t row = of_up ? all + first + down - kUps : first + down;
    const int64_t number = row * params.across + (from + step) * Shape::kChunks + right;
    bulk_copy_once(weights(i) + (down * Shape::kChunks + right) * patch, params.weight + number * patch,
                   min(kCopied, beside - right) * patch, full + 8 * i, policy());
  }

  // A stage's columns; what is more of x stays empty.
  __device__ void load_x(int tile, int step, int i) const {
    if (threadIdx.x % kWarp > 0) return;
    load_box(x(i), params.x, full + 8 * i, {0, row(tile), (from + step) * Shape::kBoxes});
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
    if (!Shape::kWide) wait_for_dependencies();
    SizedRing ring{params.stages};
    for (int tile = first(); tile < params.tiles; tile += stride()) {
      for (int step = 0; step < steps; ++step, ring.advance()) {
        if (tile != first() || step >= ahead()) {
          barrier_wait(empty + 8 * ring.stage, ring.parity ^ 1);
          load_weights(tile, step, ring.stage);
        }
        if (!Shape::kWide) load_x(tile, step, ring.stage);
      }
    }
  }

  // The thread that fetches x where it has a ring of its own, so that neither waits for the other's room.
  __device__ void fetch_x() const {
    wait_for_dependencies();
    XRing ring;
    const int begin = from * Shape::kChunks, end = min(begin + steps * Shape::kChunks, params.across);
    for (int tile = first(); tile < params.tiles; tile += stride()) {
      for (int chunk = begin; chunk < end; chunk += Shape::kXChunks, ring.advance()) {
        const uint32_t barrier = x_full + 8 * ring.stage;
        barrier_wait(x_empty + 8 * ring.stage, ring.parity ^ 1);
        barrier_arrive_expecting(barrier, Shape::kBoxes * params.box_rows * 128);
        load_box(x(ring.stage), params.x, barrier, {0, row(tile), chunk / Shape::kXChunks * Shape::kBoxes});
      }
    }
  }

  // Which part of a stage's columns, and which rows of the tile's, this warp has.
  __device__ static int part() { return threadIdx.x / kWarp / Shape::kTeam; }
  __device__ static int first_row() { return threadIdx.x / kWarp % Shape::kTeam * 16 * Shape::kTall; }

  // Where a stage has the codes and the word of a lane's row of W. Of the tile's 16 rows of that number a lane has row lane / 4
  // and (second) row lane / 4 + 8; or, of its 8 gates and their ups of that number, gate lane / 4 and (second) its up.
  __device__ PatchLane row_of_lane(int sixteen, int second) const {
    const int patches = has_gates() ? sixteen / 2 + second * kUps : sixteen, half = has_gates() ? sixteen % 2 : second;
    return PatchLane::of(half, patches * Shape::kChunks * patch);
  }

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
    constexpr int kSteps = Form::kColumns / 16;  // of those that are summed before they are scaled
    Form rows[Shape::kTall][2];
#pragma unroll
    for (int m = 0; m < 2 * Shape::kTall; ++m) {
      const PatchLane lane = row_of_lane(first_row() / kPatchRows + m / 2, m % 2);
      rows[m / 2][m % 2].load(weights(stage) + chunk * patch, lane, params.group_log2);
    }
    Sums parts;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t b[Shape::kEights][4];
      load_x_fragments(b, stage, chunk * 4 + i);
#pragma unroll
      for (int step = 2 * i; step < 2 * i + 2; ++step) {
        if (step % kSteps == 0) clear(parts);
#pragma unroll
        for (int m = 0; m < Shape::kTall; ++m) {
          multiply(Form::kSums ? parts[m] : sums[m], rows[m], step, b);
          if (Form::kSums && (step + 1) % kSteps == 0) scale(sums[m], parts[m], rows[m], step);
        }
      }
    }
  }

  __device__ static void clear(Sums& sums) {
#pragma unroll
    for (auto& tall : sums) {
#pragma unroll
      for (float& sum : tall) sum = 0.0f;
    }
  }

  __device__ static void multiply_all(Sums& sums, float factor) {
#pragma unroll
    for (auto& tall : sums) {
#pragma unroll
      for (float& sum : tall) sum *= factor;
    }
  }

  // 16 rows of W, of which a lane has two, and 16 columns, by all rows of x; `b` has 32 columns.
  __device__ static void multiply(float (&sums)[Shape::kEights * 4], const Form (&rows)[2], int step,
                                  const uint32_t (&b)[Shape::kEights][4]) {
    uint32_t a[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (Form::kSums) {
        a[i] = rows[i % 2].number(step, i / 2);
      } else {
        a[i] = rows[i % 2].scaled(step, i / 2);
      }
    }
    const int k = step % 2 * 2;
#pragma unroll
    for (int q = 0; q < Shape::kEights; ++q) multiply_add<T>(sums + 4 * q, a, b[q][k], b[q][k + 1]);
  }

  __device__ static void scale(float (&sums)[Shape::kEights * 4], const float (&parts)[Shape::kEights * 4],
                               const Form (&rows)[2], int step) {
    if constexpr (Form::kSums) {
#pragma unroll
      for (int i = 0; i < Shape::kEights * 4; ++i) sums[i] = fmaf(parts[i], rows[i / 2 % 2].scale(step), sums[i]);
    }
  }

  // Starts the products of 64 columns, whose x is `right`, and returns before they end.
  __device__ static __forceinline__ void multiply_half(Sums& sums, uint32_t (&a)[4][4], const Form (&rows)[2], int half,
                                                       uint64_t right) {
#pragma unroll
    for (int i = 0; i < 16; ++i) a[i / 4][i % 4] = rows[i % 2].scaled(half * 4 + i / 4, i % 4 / 2);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) multiply_by_transpose<T, Shape::kRows>(sums[0], a[k], right + 2 * k);
    wgmma_commit();
    wgmma_wait<1>();  // for the half before, whose registers are written next
  }

  __device__ __forceinline__ void sum_wide_tile(Sums& sums, SizedRing& ring, XRing& x_ring) const {
    constexpr int kOwn = Shape::kXChunks / Shape::kParts;  // of a stage of x
    clear(sums);
    settle(sums[0]);
    uint32_t a[2][4][4];
    const PatchLane lanes[2] = {row_of_lane(first_row() / kPatchRows, 0).kept_in_registers(),
                                row_of_lane(first_row() / kPatchRows, 1).kept_in_registers()};
    const int box_bytes = params.box_rows * 128, first_own = part() * kOwn;
    const uint32_t first_patch = weights(0) + first_own * patch;
    const uint32_t first_box = kept(x(0) + first_own * 2 * box_bytes);
    int last = x_ring.stage, left = min(steps * Shape::kChunks, params.across - from * Shape::kChunks) - first_own;
    for (int step = 0; step < steps; ++step, ring.advance(), left -= Shape::kChunks) {
      const uint32_t patches = first_patch + ring.stage * stage_bytes;
      barrier_wait(full + 8 * ring.stage, ring.parity);
#pragma unroll
      for (int begin = 0; begin < Shape::kChunks; begin += Shape::kXChunks) {
        if (begin > 0 && begin >= left) break;
        // By way of a shuffle the compiler knows that all lanes have the same.
        const uint32_t box = __shfl_sync(kAllLanes, first_box + x_ring.stage * Shape::kXBytes, 0);
        const uint64_t boxes = matrix_descriptor(box, 1024, 0);
        bool holds_last = step > 0 || begin > 0;
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
          // Without parts the first chunk of a stage is always there: then there is no branch.
          if ((Shape::kParts > 1 || begin + i > 0) && begin + i >= left) break;
          Form rows[2];
          for (int r = 0; r < 2; ++r) rows[r].load(patches + (begin + i) * patch, lanes[r], params.group_log2);
          if (i == 0) barrier_wait(x_full + 8 * x_ring.stage, x_ring.parity);
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            multiply_half(sums, a[half], rows, half, boxes + (i * 2 + half) * (box_bytes >> 4));
            if (i == 0 && half == 0 && holds_last) arrive(x_empty + 8 * last), holds_last = false;
          }
        }
        if (Shape::kParts > 1 && holds_last) {  // none of the stage's columns is this part's
          wgmma_wait<0>();
          arrive(x_empty + 8 * last);
        }
        last = x_ring.stage;
        x_ring.advance();
      }
      arrive(empty + 8 * ring.stage);
    }
    wgmma_wait<0>();
    arrive(x_empty + 8 * last);
    settle(sums[0]);
  }

  // Of x that is rounded: a warp has 16 rows of W, and all of a stage's columns.
  __device__ __forceinline__ void sum_rounded(Sums& sums, int tile, SizedRing& ring, XRing& x_ring) const {
    static_assert(Shape::kParts == 1 && Shape::kXChunks == 1 && Shape::kChunks == 2);
    constexpr bool kPending = !Form::kScalesPatches;  // a chunk's products, while the next one's are begun
    RoundedSums<Form, Shape::kRows> totals;
    totals.clear();
    const PatchLane low = row_of_lane(first_row() / kPatchRows, 0).kept_in_registers();
    const PatchLane high = row_of_lane(first_row() / kPatchRows, 1).kept_in_registers();
    uint32_t a[2][4][4];
    int last = x_ring.stage;
    for (int step = 0; step < steps; ++step, ring.advance()) {
      const int there = chunks(step);
      const uint32_t patches = weights(ring.stage);
      barrier_wait(full + 8 * ring.stage, ring.parity);
#pragma unroll
      for (int chunk = 0; chunk < Shape::kChunks; ++chunk) {
        if (chunk > 0 && chunk >= there) {
          if (kPending) wgmma_wait<0>();  // the first chunk's registers are written next
          break;
        }
        // By way of a shuffle the compiler knows that all lanes have the same.
        const uint32_t box = __shfl_sync(kAllLanes, x(x_ring.stage), 0);
        barrier_wait(x_full + 8 * x_ring.stage, x_ring.parity);
        totals.add(a[chunk], patches + chunk * patch, low, high, box);
        if (kPending) wgmma_wait<1>();  // for the chunk before, whose registers are written next
        if (!kPending) arrive(x_empty + 8 * x_ring.stage);
        if (kPending && (step > 0 || chunk > 0)) arrive(x_empty + 8 * last);
        last = x_ring.stage;
        x_ring.advance();
      }
      arrive(empty + 8 * ring.stage);
    }
    if (kPending) {
      wgmma_wait<0>();
      arrive(x_empty + 8 * last);
      settle(totals.totals);
    }
#pragma unroll
    for (int i = 0; i < Shape::kEights * 4; ++i) {
      const int of_x = min(row(tile) + i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2, params.rows - 1);
      sums[0][i] = totals.scaled(i, params.x_scales[of_x]);
    }
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
      const int there = chunks(step);
#pragma unroll
      for (int i = Shape::kPartChunks * part(); i < Shape::kPartChunks * (part() + 1); ++i) {
        if (i < there) add(sums, ring.stage, i);
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

  // Rows of x whose sums a block of a cluster adds up.
  __device__ int share() const { return (Shape::kRows + params.split - 1) / params.split; }
  // Where this block leaves its sums of four neighbours, and where the block of a slice sends its own.
  __device__ uint32_t left_at(int of_x, int column) const { return meeting() + (of_x * Shape::kPitch + column) * 4; }
  __device__ uint32_t sent_to(int slice, int of_x, int column) const {
    const int row = slice * share() + of_x % share();
    return meeting() + Shape::kAreas * Shape::kAreaBytes + (row * Shape::kWidth + column) * 4;
  }

  __device__ static void add(float4& sum, const float4& x) { sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w; }

  // This block's sums of four neighbours.
  __device__ float4 own_sum(int of_x, int column) const {
    const uint32_t from = left_at(of_x, column);
    float4 sum = load_shared_floats(from);
#pragma unroll
    for (int area = 1; area < Shape::kAreas; ++area) add(sum, load_shared_floats(from + area * Shape::kAreaBytes));
    return sum;
  }

  // All slices', in their order.
  __device__ float4 sum_of_slices(int of_x, int column) const {
    if (params.split == 1) return own_sum(of_x, column);
    float4 sum = make_float4(0, 0, 0, 0);
    for (int s = 0; s < params.split; ++s) {
      if constexpr (Shape::kMeets) {
        add(sum, s == rank ? own_sum(of_x, column) : load_shared_floats(sent_to(s, of_x, column)));
      } else {
        add(sum, load_shared_at(left_at(of_x, column), s));
      }
    }
    return sum;
  }

  // Sends the other blocks of the cluster what they add up, and waits for what they send.
  __device__ void exchange() const {
    constexpr int kQuads = Shape::kWidth / 4;
    for (int i = threadIdx.x; i < min(Shape::kRows, params.rows) * kQuads; i += Shape::kThreads) {
      const int of_x = i / kQuads, column = i % kQuads * 4, owner = of_x / share();
      if (owner != rank) store_shared_at(sent_to(rank, of_x, column), met, owner, own_sum(of_x, column));
    }
    barrier_wait_acquiring(met, 0);
  }

  // Writes this block's share of the tile.
  __device__ void write(int tile) const {
    const int halves = has_gates() ? 2 : 1, quads = Shape::kWidth / 4 / halves;
    const int begin = rank * share(), end = min(begin + share(), Shape::kRows);
    for (int i = begin * quads + threadIdx.x; i < end * quads; i += Shape::kThreads) {
      const int inside = i / quads, quad = i % quads * 4, in_tile = has_gates() ? quad / 8 * 16 + quad % 8 : quad;
      const int of_x = row(tile) + inside, at = column(tile) / halves + quad;
      if (of_x >= params.rows || at >= params.columns) continue;
      float4 sum = with_bias(sum_of_slices(inside, in_tile), at);
      if (has_gates()) {
        const float4 up = with_bias(sum_of_slices(inside, in_tile + 8), params.columns + at);
        sum = make_float4(activated(sum.x, up.x), activated(sum.y, up.y), activated(sum.z, up.z), activated(sum.w, up.w));
      }
      T* to = static_cast<T*>(params.out) + static_cast<int64_t>(of_x) * params.columns + at;
      *reinterpret_cast<uint2*>(to) = make_uint2(pack<T>(sum.x, sum.y), pack<T>(sum.z, sum.w));
    }
  }

  __device__ float bias_at(int row) const {
    return params.bias ? to_float(static_cast<const T*>(params.bias)[row]) : 0.0f;
  }
  __device__ float4 with_bias(const float4& sum, int row) const {
    return make_float4(sum.x + bias_at(row), sum.y + bias_at(row + 1), sum.z + bias_at(row + 2), sum.w + bias_at(row + 3));
  }
  __device__ float activated(float gate, float up) const { return gated(params.act, gate, up); }

  // Results of 8 rows of x and 16 of W, or 8 gates and 8 ups, at a time, 4 bytes a lane.
  __device__ __forceinline__ void write_sums(const Sums& sums, int tile) const {
    if (has_gates()) return write_gated(sums, tile);
    const int lane = threadIdx.x % kWarp, first = column(tile) + first_row();
    if (first >= params.n) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float added = bias_at(first + 8 * half + lane / 4);
#pragma unroll
      for (int q = 0; q < Shape::kEights; ++q) {
        const float* s = sums[0] + 4 * q + 2 * half;
        write_eights(pack<T>(s[0] + added, s[1] + added), row(tile) + 8 * q, first + 8 * half);
      }
    }
  }

  __device__ __forceinline__ void write_gated(const Sums& sums, int tile) const {
    const int first = (column(tile) + first_row()) / 2, at = first + threadIdx.x % kWarp / 4;
    if (first >= params.columns) return;
    const float of_gate = bias_at(at), of_up = bias_at(params.columns + at);
#pragma unroll
    for (int q = 0; q < Shape::kEights; ++q) {
      const float* s = sums[0] + 4 * q;
      const float one = activated(s[0] + of_gate, s[2] + of_up), other = activated(s[1] + of_gate, s[3] + of_up);
      write_eights(pack<T>(one, other), row(tile) + 8 * q, first);
    }
  }

  // 8 rows of x and 8 columns of the result, of which a lane has two neighbouring rows of x.
  __device__ __forceinline__ void write_eights(uint32_t pair, int first_of_x, int first) const {
    const int lane = threadIdx.x % kWarp, of_x = first_of_x + lane / 4;
    pair = transpose(pair);
    if (of_x >= params.rows) return;
    T* to = static_cast<T*>(params.out) + static_cast<int64_t>(of_x) * params.columns + first + lane % 4 * 2;
    *reinterpret_cast<uint32_t*>(to) = pair;
  }

  __device__ __forceinline__ void compute() const {
    SizedRing ring{params.stages};
    [[maybe_unused]] XRing x_ring;
    for (int tile = first(); tile < params.tiles; tile += stride()) {
      Sums sums;
      if constexpr (kRounded<Form>) {
        sum_rounded(sums, tile, ring, x_ring);
      } else if constexpr (Shape::kWide) {
        sum_wide_tile(sums, ring, x_ring);
      } else {
        sum_tile(sums, ring);
      }
      multiply_all(sums, Form::kFactor);
      if (!Shape::kMeets && params.split == 1) {
        write_sums(sums, tile);
        continue;
      }
      meet(sums);
      if (params.split == 1) write(tile);
    }
  }
};

template <typename T, typename Shape, typename Form>
__global__ void __launch_bounds__(Shape::kThreads + Shape::kFetching, 1)
    patched_linear_kernel(const __grid_constant__ PatchedParams params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ unsigned char dynamic[];
  __shared__ PatchedBarriers barriers;
  start_dependents();
  const PatchedBlock<T, Shape, Form> block(params, dynamic, barriers);
  const int fetching = static_cast<int>(threadIdx.x) - Shape::kThreads;  // below 0: computes
  const bool fetches = fetching >= 0 && fetching < kWarp;
  if (fetches) block.begin();
  __syncthreads();
  if (params.split > 1) cluster_arrive();
  if (fetching < 0) {
    if constexpr (Shape::kMovesRegisters) take_registers<kPatchedComputeRegisters>();
    wait_for_dependencies();
    block.compute();
  } else {
    if constexpr (Shape::kMovesRegisters) give_registers_back<kPatchedFetchRegisters>();
    if (fetches) block.fetch();
    if constexpr (Shape::kWide) {
      if (fetching == kWarp) block.fetch_x();
    }
  }
  if (params.split > 1) {
    __syncwarp();
    cluster_wait();  // the others' barriers may be used
    if (Shape::kMeets && fetching < 0) block.exchange();
    if (!Shape::kMeets) cluster_sync();
    if (fetching < 0) block.write(block.first());
    __syncwarp();
    if (!Shape::kMeets) cluster_meet();  // a block stays until the others have read its sums
  }
#endif
}

}  // namespace raylm::cuda
