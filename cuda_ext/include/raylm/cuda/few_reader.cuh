// What few_layers.cuh is given, how its blocks and warps share the work, and the rings that copies of weights, keys and
// values come by.
#pragma once

#include "raylm/cuda/pipeline/ring.cuh"
#include "raylm/cuda/skinny_linear.cuh"
#include "raylm/cuda/tile/numbers.cuh"
#include "raylm/cuda/tile/patches.cuh"

namespace raylm::cuda {

constexpr int kFewWarps = 8;
constexpr int kFewPatches = 4;  // beside each other, of a copy

// What a product multiplies, as numbers.cuh has it: W is patches of integers of 4 bits in groups of so many columns, x
// and results are of T.
template <typename T, int Columns>
struct Int4 {
  using Stored = unsigned char;
  using Result = T;
  using Codes = Int4Codes<T, Columns>;
  static constexpr bool kScaled = false;
  static constexpr int kColumns = Columns, kPatchBytes = bytes_of_patch(4, Codes::kGroupLog2);
};

enum class FewForm { kPlain, kCodes, kInt4 };  // of weights: numbers, 8-bit codes with a scale a row, patches

template <typename N>
inline constexpr FewForm kFewForm = N::kScaled ? FewForm::kCodes : FewForm::kPlain;
template <typename T, int Columns>
inline constexpr FewForm kFewForm<Int4<T, Columns>> = FewForm::kInt4;

// Of k: what a warp takes at a time, as the kernel for few rows does.
__host__ __device__ constexpr int few_block(FewForm form) {
  return form == FewForm::kPlain   ? kSkinnyBytes / 2
         : form == FewForm::kCodes ? kSkinnyBytes
                                   : kFewPatches * kPatchColumns;
}
constexpr int kFewThreads = kFewWarps * kWarp;  // that compute
// Registers are moved between groups of four warps: four more give some to those that compute. Two of the four fetch:
// one is too slow for a large model, and with all four a small one in bfloat16 takes longer.
constexpr int kFewGiving = 4 * kWarp, kFewLaunched = kFewThreads + kFewGiving, kFewFetchers = 2;
constexpr int kFewFetchRegisters = 56, kFewComputeRegisters = 224;
constexpr int kFewLaunchRegisters = (64 << 10) / kFewLaunched / 8 * 8;
static_assert(kFewThreads * kFewComputeRegisters + kFewGiving * kFewFetchRegisters <=
              kFewLaunched * kFewLaunchRegisters);
constexpr int kFewRows = 4;
constexpr int kFewMostLayers = 128;
constexpr int kFewMostStages = 8;
constexpr int kFewMostParts = 16;  // of a column of attention
constexpr int kFewKeys = 16;       // of a unit
constexpr int kFewUnits = 2;       // of a warp, before another block takes a part

// Bytes of a row of x in shared memory, which has room for whole blocks of k.
__host__ __device__ constexpr int few_x_pitch(FewForm form, int k) {
  const int block = few_block(form);
  return skinny_x_pitch(form == FewForm::kCodes, (k + block - 1) / block * block);
}

// Floats that a warp brings of a tile. Of patches a gated product's has two below each other, gate's and up's: so many
// that large models have room for those of the step's rows only. Elsewhere a constant is faster.
__host__ __device__ constexpr int few_sums(FewForm form, int rows) {
  return form == FewForm::kInt4 ? rows * 2 * kPatchRows : kFewRows * 8;
}

enum FewPhase { kFewQkv, kFewAttention, kFewO, kFewGateUp, kFewDown, kFewPhases };

template <typename T>
struct FewLayer {
  const char* weights[kFewPhases];  // [n, k] of each product: of T, or codes, or patches
  const float* scales[kFewPhases];  // of the rows of codes
  const T* qkv_bias;             // or null
  const T* q_norm;               // or null, and so k_norm
  const T* k_norm;
  const T* attention_norm;
  const T* mlp_norm;
  T* k_cache;
  T* v_cache;
};

struct FewStrides {
  int64_t block, slot, head;
};

// A step's rows: one token each. `positions` are those of the tokens, `seq_lens` one more.
struct FewStep {
  const int64_t* positions;
  const int64_t* slots;
  const int32_t* seq_lens;
  const int32_t* block_table;
  int64_t block_table_stride;
  const float* cos_sin;  // [max_position, head_dim]
  int64_t max_position, num_slots;
  int block_log2;  // of the tokens in a block: at least kFewKeys
  FewStrides k_strides, v_strides;
};

struct FewProduct {
  int n, k, tiles;  // tiles: of 8 rows of W; of patches, 16, or 16 of gate and those of up
};

template <typename T>
struct FewLayersArgs {
  FewLayer<T> layers[kFewMostLayers];
  FewProduct products[kFewPhases];
  FewStep step;
  int num_layers, rows, hidden, num_heads, num_kv_heads;
  float eps, scale;
  bool gelu;
  T* residual;                // [rows, hidden]: what the layers are given, and what they make of it
  uint2* cells[kFewPhases];   // [rows, outputs / 2] of each phase
  float* part_sums;           // [columns, kFewMostParts, 8, head_dim], each divided by its softmax's denominator
  float* part_logs;           // [columns, kFewMostParts, 8]: the logarithm to base 2 of that denominator
  unsigned* arrivals;         // [columns]: parts so far; 0 but in a kernel
  unsigned* launches;         // [2]: blocks that have ended, 0 but in a kernel; launches so far
  int stages;
  FewForm form;

  // The most columns of a row of x.
  __host__ __device__ int widest() const {
    int most = 0;
    for (const FewProduct& product : products) most = product.k > most ? product.k : most;
    return most;
  }
  __host__ __device__ int x_bytes() const { return (rows * few_x_pitch(form, widest()) + 127) / 128 * 128; }
  __host__ __device__ int norm_bytes() const { return (hidden * 2 + 127) / 128 * 128; }
  // The warps' sums of tiles, and those of x's squares.
  __host__ __device__ int meeting_bytes() const { return (kFewWarps * few_sums(form, rows) + kFewRows) * kFewWarps * 4; }
  __host__ __device__ int bytes_besides_rings() const { return x_bytes() + norm_bytes() + meeting_bytes(); }
};

// A warp's place in a product: which tiles of 8 rows of W are its team's, and where in k it begins. The teams of a
// block are one of 8 warps, or two of 4 where k is short.
struct FewTeam {
  int split, index, warp, first_tile, tile_step;

  __device__ FewTeam(int k, int warp_of_block, int block) {
    const int teams_log2 = k > 4 * block ? 0 : 1;
    split = kFewWarps >> teams_log2;
    index = teams_log2 ? warp_of_block / (kFewWarps / 2) : 0, warp = warp_of_block - index * split;
    first_tile = (blockIdx.x << teams_log2) + index, tile_step = gridDim.x << teams_log2;
  }
};

// What the block attends to in every layer: units [begin, end) of a column.
struct FewColumn {
  int index, part, parts, row, kv_head, group, length, begin, end;
  bool works;

  template <typename T>
  __device__ explicit FewColumn(const FewLayersArgs<T>& args) {
    const int columns = args.rows * args.num_kv_heads, most = min(gridDim.x / columns, kFewMostParts);
    index = blockIdx.x % columns, part = blockIdx.x / columns;
    row = index / args.num_kv_heads, kv_head = index % args.num_kv_heads;
    group = args.num_heads / args.num_kv_heads;
    length = args.step.seq_lens[row];
    const int units = (length + kFewKeys - 1) / kFewKeys, whole = kFewWarps * kFewUnits;
    const int wanted = max(1, min(most, (units + whole - 1) / whole)), size = max(1, (units + wanted - 1) / wanted);
    parts = max(1, (units + size - 1) / size);
    works = part < parts;
    begin = part * size, end = works ? min(units, begin + size) : begin;
  }
};

// A warp's part of a product, the same in every layer but for where its weight begins.
struct FewShare {
  int64_t first;      // bytes from there to the first copy
  int64_t half;       // bytes from a tile's first row to its fifth, which may be up's; of patches, from gate's to up's
  int64_t next_tile;  // bytes from behind a tile's last copy to the next tile's first
  int k;              // of W
  int first_column;   // of a tile's first copy
  int step;           // columns from a copy to the next
  int copies;
};

struct FewRings {
  FewShare shares[kFewWarps][kFewPhases];
  uint64_t full[kFewWarps][kFewMostStages], empty[kFewWarps][kFewMostStages];
};

// A stage of a warp's ring: of a product's weight 8 rows by 512 bytes, or patches beside each other; of the cache 16
// keys or their values. N: what weights hold.
template <typename N, int D>
struct FewStage {
  static constexpr bool kInt4 = kFewForm<N> == FewForm::kInt4;
  static constexpr int kBytes = 8 * kSkinnyPitch;
  static constexpr int kKeyPitch = (D + 8) * 2;
  static_assert(kFewKeys * kKeyPitch <= kBytes && kFewPatches * Int4<__half, 64>::kPatchBytes <= kBytes);

  // Behind writes to a stage that are no bulk copy's, before it is given up.
  __device__ static void order_writes() {
    if constexpr (kInt4) fence_shared_writes();
  }
};

// A warp's end of its ring: stages in the order in which it uses them through all layers.
template <typename N, int D>
class FewReader {
 public:
  using T = typename N::Result;
  using Stage = FewStage<N, D>;

  __device__ FewReader(const FewLayersArgs<T>& args, const FewRings& rings, char* memory) : ring_{args.stages} {
    const int warp = threadIdx.x / kWarp;
    stages_ = memory + warp * args.stages * Stage::kBytes;
    full_ = shared_address(rings.full[warp]), empty_ = shared_address(rings.empty[warp]);
  }

  // The stage that comes next, once it has arrived.
  __device__ char* next() const {
    barrier_wait(full_ + 8 * ring_.stage, ring_.parity);
    return stages_ + ring_.stage * Stage::kBytes;
  }

  // Gives up the stage that next() gave.
  __device__ void release() {
    barrier_arrive_warp(empty_ + 8 * ring_.stage);
    ring_.advance();
  }

 private:
  SizedRing ring_;
  char* stages_;
  uint32_t full_, empty_;
};

}  // namespace raylm::cuda
